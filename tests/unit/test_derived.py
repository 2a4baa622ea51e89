"""Intervals, the memory roof and capacity against sums done by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from qkit.evaluate.derived import (
    Price,
    capacity,
    mean_ratio_interval,
    median_ratio_interval,
    repeat_rates,
    tpot_floor_ms,
)
from qkit.evaluate.report import text
from qkit.measurements import RequestRecord
from qkit.quantize.devices import DEVICES


def test_the_seeds_sum() -> None:
    """588 tok/s at 200 tokens and 15 CNY an hour."""
    found = capacity(588, None, Price(per_hour=15, currency="CNY", tokens_per_request=200))
    assert found is not None
    assert f"{found.req_per_s:.1f}" == "2.9"
    assert found.req_per_day == pytest.approx(254_016)
    assert round(found.req_per_day / 1000, -1) == 250
    assert found.cost_per_month == 10_800
    assert text.money(found.cost_per_request) == "0.0014"
    assert found.cost_per_million_tokens == pytest.approx(15 / 3600 / 588 * 1e6)


def test_the_seeds_rows_give_its_speed_up() -> None:
    """46.8 tok/s at concurrency 1 and 588.5 at 16: 12.6 times."""
    assert f"{588.5 / 46.8:.1f}" == "12.6"
    alone, loaded = (capacity(rate, 128, None) for rate in (46.8, 588.5))
    assert alone is not None
    assert loaded is not None
    assert f"{loaded.req_per_s / alone.req_per_s:.1f}" == "12.6"


def test_without_a_price_there_are_no_costs_and_without_tokens_nothing() -> None:
    found = capacity(100, 50, None)
    assert found is not None
    assert (found.req_per_s, found.cost_per_month, found.cost_per_request) == (2, None, None)
    assert capacity(None, 50, None) is None
    assert capacity(100, None, None) is None


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "-"), (0.0014172, "0.0014"), (0.5, "0.50"), (7.0862, "7.09"), (0.001, "0.0010")],
)
def test_money(value: float | None, shown: str) -> None:
    assert text.money(value) == shown


def test_large_counts_are_in_thousands() -> None:
    assert [text.thousands(v) for v in (None, 9_999, 254_016)] == ["-", "9,999", "254 K"]


# ----------------------------------------------------------------------------- intervals of ratios


def test_an_interval_holds_the_ratio_and_is_the_same_every_time() -> None:
    generator = np.random.default_rng(7)
    base = generator.lognormal(3, 0.1, 64)
    variant = base[:40] * 0.7
    first = median_ratio_interval(list(variant), list(base))
    assert first is not None
    assert first[0] < float(np.median(variant) / np.median(base)) < first[1]
    assert 0.6 < first[0] < first[1] < 0.8
    assert first == median_ratio_interval(list(variant), list(base))
    wide = median_ratio_interval(list(variant[:10]), list(base[:10]))
    assert wide is not None
    assert wide[1] - wide[0] > first[1] - first[0]


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        variant, base = generator.lognormal(math.log(0.8), 0.2, 40), generator.lognormal(0, 0.2, 40)
        ends = median_ratio_interval(list(variant), list(base), resamples=400)
        assert ends is not None
        hits += ends[0] <= 0.8 <= ends[1]
    assert 180 <= hits <= 200


def test_too_few_requests_have_no_interval() -> None:
    assert median_ratio_interval([1.0] * 7, [1.0] * 20) is None
    assert median_ratio_interval([1.0] * 20, []) is None
    assert median_ratio_interval([1.0] * 20, [0.0] * 20) is None


def test_rates_of_repeats_by_hand() -> None:
    # Logarithms 0 and 0.2 against -0.1 and 0.1: difference 0.1, error sqrt(0.01 + 0.01),
    # two degrees of freedom, t = 4.3027.
    variant, base = [1.0, math.exp(0.2)], [math.exp(-0.1), math.exp(0.1)]
    low, high = mean_ratio_interval(variant, base) or (0, 0)
    half = 4.302653 * math.sqrt(0.02)
    assert (math.log(low), math.log(high)) == pytest.approx((0.1 - half, 0.1 + half), abs=1e-6)


def test_one_repeat_has_no_spread() -> None:
    assert mean_ratio_interval([100.0], [90.0, 91.0]) is None
    assert mean_ratio_interval([100.0, 101.0], [90.0, 0.0]) is None
    assert mean_ratio_interval([110.0, 110.0], [100.0, 100.0]) == pytest.approx((1.1, 1.1))


def record(repeat: int, start: float, last: float, **changes: object) -> RequestRecord:
    fields: dict[str, object] = {
        "index": 0, "repeat": repeat, "status": "ok", "start_s": start, "first_token_s": start,
        "last_token_s": last, "end_s": last, "prompt_tokens": 1, "output_tokens": 50,
    }  # fmt: skip
    return RequestRecord.model_validate(fields | changes)


def test_rates_are_those_of_each_repeat() -> None:
    records = [record(0, 0, 1), record(0, 1, 2), record(1, 10, 11), record(2, 20, 21, status="cut")]
    assert repeat_rates(records) == [50, 50]


# --------------------------------------------------------------------------------- the memory roof


def test_the_floor_of_a_7b_model_on_an_a800() -> None:
    """Qwen2.5-7B in BF16: 14.1 GB to read and 57,344 bytes of cache a token."""
    floor = tpot_floor_ms(
        read_bytes=14_140_000_000, kv_bytes_per_token=57_344, concurrency=16, input_tokens=512,
        output_tokens=128, bandwidth=DEVICES["A800-80"].bandwidth,
    )  # fmt: skip
    cache = 57_344 * 16 * (512 + 64)
    assert floor == pytest.approx(1000 * (14_140_000_000 + cache) / 2039e9, rel=1e-5)


def test_two_cards_read_twice_as_fast_and_an_unknown_card_has_no_floor() -> None:
    def floor(bandwidth: float | None, cards: int = 1) -> float | None:
        return tpot_floor_ms(
            read_bytes=10**9, kv_bytes_per_token=0, concurrency=1, input_tokens=1,
            output_tokens=1, bandwidth=bandwidth, cards=cards,
        )  # fmt: skip

    assert floor(1e12) == pytest.approx(1.0)
    assert floor(1e12, 2) == pytest.approx(0.5)
    assert floor(None) is None
