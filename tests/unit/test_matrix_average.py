"""The mean over suites in the matrix: which suites, when there is none, and how it reads."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from golden import matrix_input as given

from qkit.evaluate.matrix import Matrix, VariantInput, build_matrix
from qkit.evaluate.report.sheets import accuracy_sheets
from qkit.measurements import AccuracyResult, Measurement

QUESTIONS = 400
#: (flips to wrong, flips to right) by suite.
FLIPS = {"mmlu": (6, 2), "copa": (12, 4)}


def variant(name: str, suites: dict[str, AccuracyResult]) -> VariantInput:
    found: Sequence[Measurement] = [
        given.measurement(name, suite, accuracy=result) for suite, result in suites.items()
    ]
    return VariantInput(name=name, method=name, scheme="W4A16", measurements=found)


def scored(suite: str, flips: tuple[int, int] = (0, 0), **changes: object) -> AccuracyResult:
    result = given.accuracy(*flips, questions=QUESTIONS)
    return result.model_copy(update={"suite": suite, **changes})


def build(*others: VariantInput, baseline: VariantInput | None = None) -> Matrix:
    base = baseline or variant("bf16", {suite: scored(suite) for suite in FLIPS})
    return build_matrix(run="r", created="2026-12-01", baseline="bf16", variants=[base, *others])


def test_every_suite_weighs_the_same_and_the_interval_covers_all() -> None:
    awq = variant("awq", {suite: scored(suite, flips) for suite, flips in FLIPS.items()})
    base, row = (row.average for row in build(awq).rows)
    assert base is not None
    assert row is not None
    assert base.suites == row.suites == tuple(FLIPS)
    assert (base.delta_points, base.recovery_percent) == (0, 100)
    assert base.delta_interval is None
    assert row.recovery_interval is not None
    assert row.recovery_interval[0] < (row.recovery_percent or 0) < row.recovery_interval[1]
    assert row.delta_points == pytest.approx(-100 * (4 + 8) / QUESTIONS / 2)
    assert row.value == pytest.approx(base.value + row.delta_points / 100)
    assert row.recovery_percent == pytest.approx(100 * row.value / base.value, rel=1e-5)
    variance = sum(
        ((lost + won) / QUESTIONS - ((lost - won) / QUESTIONS) ** 2) / (QUESTIONS - 1)
        for lost, won in FLIPS.values()
    )
    assert row.delta_interval is not None
    low, high = row.delta_interval
    assert high - low == pytest.approx(196 * math.sqrt(variance), rel=1e-3)
    assert row.verdict == "inconclusive"


def test_there_is_none_below_two_suites() -> None:
    alone = variant("bf16", {"mmlu": scored("mmlu")})
    matrix = build(variant("awq", {"mmlu": scored("mmlu", (3, 1))}), baseline=alone)
    assert all(row.average is None for row in matrix.rows)
    assert not any(sheet.title.startswith("Average") for sheet in accuracy_sheets(matrix))


def test_a_row_that_lacks_a_suite_or_was_scored_otherwise_has_none() -> None:
    lacking = variant("lacking", {"mmlu": scored("mmlu")})
    otherwise = variant("otherwise", {"mmlu": scored("mmlu"), "copa": scored("copa", limit=10)})
    rows = {row.variant: row.average for row in build(lacking, otherwise).rows}
    assert rows["bf16"] is not None
    assert rows["lacking"] is rows["otherwise"] is None


def test_the_baselines_repeat_is_no_suite_of_the_average() -> None:
    again = variant("bf16", {"mmlu": scored("mmlu"), "mmlu-again": scored("mmlu")})
    assert build(baseline=again).rows[0].average is None


def test_a_perplexity_is_not_averaged_with_shares() -> None:
    wikitext = scored("wikitext")
    headline = wikitext.headline.model_copy(update={"metric": "word_perplexity", "value": 8.1})
    suites = {suite: scored(suite) for suite in FLIPS}
    base = variant("bf16", {**suites, "wikitext": scored("wikitext", headline=headline)})
    average = build(baseline=base).rows[0].average
    assert average is not None
    assert average.suites == tuple(FLIPS)


def test_the_sheet_says_what_it_averages() -> None:
    awq = variant("awq", {suite: scored(suite, flips) for suite, flips in FLIPS.items()})
    matrix = build(awq, variant("lacking", {"mmlu": scored("mmlu")}))
    sheet = next(s for s in accuracy_sheets(matrix) if s.title == "Average of 2 suites")
    assert "mean of mmlu, copa" in sheet.caption
    shown = [[cell.inline for cell in line.cells] for line in sheet.lines]
    assert shown[0][2] == "baseline"
    assert shown[1][2].startswith("-1.5")
    assert shown[2][1:] == ["-", "-", "-"]
