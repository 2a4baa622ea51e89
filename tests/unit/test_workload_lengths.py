"""Lengths drawn from distributions: mean, spread, range, and the bounds they are clipped to."""

from __future__ import annotations

import random
import statistics

import pytest
from pydantic import TypeAdapter, ValidationError

from qkit.evaluate.workloads.lengths import describe, draw_length, log_parameters
from qkit.workloads import Fixed, Length, LogNormal, Normal, Uniform, span_of

LENGTH: TypeAdapter[Length] = TypeAdapter(Length)
DRAWS = 20_000


def draws(length: Length, at_most: int = 100_000) -> list[int]:
    rng = random.Random("lengths")
    return [draw_length(length, rng, at_most=at_most) for _ in range(DRAWS)]


def test_uniform_has_both_ends_and_the_mean_between_them() -> None:
    found = draws(Uniform(low=10, high=30))
    assert set(found) == set(range(10, 31))
    assert statistics.fmean(found) == pytest.approx(20, abs=0.2)


@pytest.mark.parametrize("length", [Normal(mean=500, std=50), LogNormal(mean=500, std=50)])
def test_mean_and_deviation_are_those_of_the_lengths(length: Length) -> None:
    found = draws(length)
    assert statistics.fmean(found) == pytest.approx(500, rel=0.01)
    assert statistics.stdev(found) == pytest.approx(50, rel=0.03)


def test_a_log_normal_one_is_skewed_to_the_right() -> None:
    found = draws(LogNormal(mean=400, std=400))
    assert statistics.fmean(found) == pytest.approx(400, rel=0.03)
    # exp(mu) = mean / sqrt(1 + (std / mean)²)
    assert statistics.median(found) == pytest.approx(400 / 2**0.5, rel=0.03)
    mu, sigma = log_parameters(400, 400)
    assert (mu, sigma) == pytest.approx((5.6449, 0.8326), abs=1e-4)


def test_without_spread_the_mean_is_all_there_is() -> None:
    assert set(draws(Normal(mean=7, std=0))) == set(draws(LogNormal(mean=7, std=0))) == {7}


@pytest.mark.parametrize("kind", [Normal, LogNormal])
def test_bounds_and_served_length_clip(kind: type[Normal] | type[LogNormal]) -> None:
    found = draws(kind(mean=100, std=80, low=40, high=150))
    assert (min(found), max(found)) == (40, 150)
    assert max(draws(kind(mean=100, std=80), at_most=120)) == 120
    assert min(draws(kind(mean=3, std=9))) == 1


def test_a_fixed_length_is_never_clipped() -> None:
    assert set(draws(Fixed(tokens=99), at_most=10)) == {99}


def test_how_a_recipe_writes_them() -> None:
    assert LENGTH.validate_python(512) == Fixed(tokens=512)
    assert describe(LENGTH.validate_python({"shape": "uniform", "low": 1, "high": 9})) == (
        "1 to 9 (uniform)"
    )
    assert describe(LogNormal(mean=512, std=128.5)) == "512 ± 128.5 (lognormal)"
    assert span_of(Normal(mean=5, std=1, low=2)).most is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"shape": "uniform", "low": 9, "high": 3}, "low 9 is above high 3"),
        ({"shape": "normal", "mean": 9, "std": 1, "low": 9, "high": 3}, "low 9 is above high 3"),
        ({"shape": "gauss", "mean": 9}, "'fixed', 'uniform', 'normal', 'lognormal'"),
        ({"shape": "normal", "mean": 9}, "Field required"),
        (0, "greater than or equal to 1"),
    ],
)
def test_what_is_no_length(wrong: object, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LENGTH.validate_python(wrong)
