"""Drift of the machine, as the baseline's first and last benchmark show it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from golden import matrix_input as given

from qkit.evaluate.drift import measure_drift
from qkit.evaluate.matrix import Matrix, VariantInput, build_matrix
from qkit.measurements import BenchResult


def build(base: VariantInput) -> Matrix:
    return build_matrix(run="r", created="2026-12-01", baseline="bf16", variants=[base])


def one_level(tpot_ms: float, tok_per_s: float, jitter: float = 0.0, n: int = 20) -> BenchResult:
    return given.bench([given.bench_cell(8, 80.0, tpot_ms, tok_per_s, n=n, jitter=jitter)])


def measured_twice(first: BenchResult, last: BenchResult) -> VariantInput:
    measurements = (
        given.measurement("bf16", "bench", bench=first),
        given.measurement("bf16", "bench-again", bench=last),
    )
    return VariantInput(name="bf16", method="bf16", scheme="BF16", measurements=measurements)


def test_changes_are_percent_of_the_first() -> None:
    (drift,) = measure_drift(one_level(10.0, 500.0), one_level(10.3, 490.0))
    assert (drift.concurrency, drift.tpot_percent, drift.output_tok_per_s_percent) == (8, 3.0, -2.0)
    assert (drift.tpot_noise_percent, drift.output_tok_per_s_noise_percent) == (5.0, 5.0)
    assert not drift.moved


@pytest.mark.parametrize(
    ("tpot", "rate", "moved"),
    [(10.51, 500.0, True), (10.49, 500.0, False), (9.4, 500.0, True), (10.0, 470.0, True)],
)
def test_even_requests_make_five_percent_the_limit(tpot: float, rate: float, moved: bool) -> None:
    (drift,) = measure_drift(one_level(10.0, 500.0), one_level(tpot, rate))
    assert drift.moved is moved


def test_widely_spread_requests_raise_the_limit_to_their_standard_error() -> None:
    # Half the requests 30 % above the mean and half below: deviation 0.3 * sqrt(n / (n - 1)).
    (drift,) = measure_drift(one_level(10.0, 500.0, jitter=0.3), one_level(10.8, 500.0, jitter=0.3))
    stderr = 0.3 * (20 / 19) ** 0.5 / 20**0.5
    assert drift.tpot_noise_percent == pytest.approx(
        100 * 1.96 * 1.2533 * stderr * 2**0.5, rel=1e-3
    )
    assert drift.tpot_percent == 8.0
    assert not drift.moved


def test_levels_and_figures_that_one_side_lacks_are_left_out() -> None:
    first = given.sweep(given.BF16_FIGURES)
    last = one_level(13.88, 554.1)
    cell = last.cells[0].model_copy(update={"output_tok_per_s": None})
    (drift,) = measure_drift(first, last.model_copy(update={"cells": (cell,)}))
    assert (drift.concurrency, drift.tpot_percent) == (8, 0.0)
    assert drift.output_tok_per_s_percent is None


def test_drift_beyond_the_noise_is_a_note_of_the_table() -> None:
    matrix = build(measured_twice(one_level(10.0, 500.0), one_level(11.0, 455.0)))
    assert matrix.notes == (
        "The machine drifted: between the first and the last benchmark of bf16 at concurrency 8, "
        "median TPOT +10.0 % (noise up to 5.0 %) and throughput -9.0 % (noise up to 5.0 %). "
        "Ratios of that size mean nothing here.",
    )
    assert matrix.drift[0].moved


def test_drift_within_the_noise_is_kept_but_is_no_note() -> None:
    matrix = build(given.baseline())
    assert [drift.concurrency for drift in matrix.drift] == list(given.LEVELS)
    assert matrix.notes == ()


def test_the_second_benchmark_is_no_suite_of_the_row() -> None:
    row = build(given.baseline()).rows[0]
    assert [cell.tpot_ms_p50 for cell in row.bench] == [f[1] for f in given.BF16_FIGURES]


def test_a_baseline_measured_once_leaves_drift_unknown() -> None:
    base = replace(given.baseline(), measurements=given.baseline().measurements[:2])
    matrix = build(base)
    assert matrix.drift == ()
    assert matrix.notes == (
        "bf16 was benchmarked once, so drift of the machine during the run is unknown.",
    )


def test_a_second_benchmark_of_something_else_is_refused() -> None:
    other = one_level(10.0, 500.0).model_copy(update={"prompt_hash": "b" * 64})
    matrix = build(measured_twice(one_level(10.0, 500.0), other))
    assert matrix.drift == ()
    assert matrix.notes == (
        "The two benchmarks of bf16 cannot be compared: prompt set bbbbbbbbbbbb vs 7f3a00000000 "
        "(baseline).",
    )


def test_a_failed_second_benchmark_marks_the_row_but_does_not_fail_it() -> None:
    base = replace(
        given.baseline(),
        measurements=given.baseline().measurements[:2],
        failures=(given.failure("bf16", "bench-again", "the server died"),),
    )
    row = build(base).rows[0]
    assert (row.status, row.marks) == ("ok", ("its second benchmark failed: the server died",))
