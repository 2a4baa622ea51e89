"""The noise floor, published scores, Holm and the parts of a group in the matrix."""

from __future__ import annotations

import math
from typing import Any

import pytest
from golden import matrix_input as given

from qkit.evaluate.matrix import Matrix, build_matrix
from qkit.recipe import PublishedScore


def build(**options: Any) -> Matrix:
    return build_matrix(
        run="a-run",
        created="2026-12-01T02:00:00Z",
        baseline="bf16",
        variants=[given.baseline(scored_again=True), *given.quantized()],
        **options,
    )


def test_the_noise_floor_is_the_flips_of_the_baseline_against_itself() -> None:
    floor = build().noise_floors["mmlu"]
    assert floor.flips is not None
    assert (floor.flips.to_wrong, floor.flips.to_right) == (2, 1)
    assert floor.delta_points == pytest.approx(-100 / given.QUESTIONS, rel=1e-5)
    spread = 196 * math.sqrt(3) / given.QUESTIONS
    assert floor.spread_points == pytest.approx(spread, rel=1e-3)


def test_a_difference_within_the_noise_is_said_to_be_so_and_a_larger_one_is_not() -> None:
    rows = {row.variant: row for row in build().rows}
    assert rows["fp8"].accuracy["mmlu"].within_noise is True
    assert any("within the noise" in mark for mark in rows["fp8"].marks)
    assert rows["smoothquant"].accuracy["mmlu"].within_noise is False
    assert not any("within the noise" in mark for mark in rows["smoothquant"].marks)


def test_the_repeat_is_no_suite_of_its_own() -> None:
    rows = build().rows
    assert all("mmlu-again" not in row.accuracy for row in rows)
    assert not any("not measured" in mark for row in rows for mark in row.marks)


def test_p_values_are_adjusted_for_the_number_of_variants() -> None:
    found = {r.variant: a for r in build().rows if (a := r.accuracy.get("mmlu"))}
    raw, adjusted = found["smoothquant"].mcnemar_p, found["smoothquant"].mcnemar_p_holm
    assert raw is not None
    assert adjusted == pytest.approx(3 * raw, rel=1e-4)
    assert found["bf16"].mcnemar_p_holm is None


def test_categories_and_subjects_have_their_own_paired_differences() -> None:
    awq = next(row for row in build().rows if row.variant == "awq").accuracy["mmlu"]
    parts = {part.task: part for part in awq.parts}
    assert [part.task for part in awq.parts][:2] == ["mmlu_stem", "mmlu_other"]
    subjects = [part for part in awq.parts if not part.is_group]
    assert sum(part.n for part in subjects) == awq.n
    assert awq.flips is not None
    total = sum(p.flips.to_wrong for p in subjects if p.flips)
    assert total == awq.flips.to_wrong
    stem = parts["mmlu_stem"]
    assert stem.flips is not None
    assert stem.flips.to_wrong == sum(
        f.to_wrong
        for name in ("mmlu_abstract_algebra", "mmlu_astronomy")
        if (f := parts[name].flips)
    )


def published(**changes: Any) -> PublishedScore:
    fields = {"name": "Them", "variant": "bf16", "task": "mmlu", "value": 74.24, "source": "card"}
    return PublishedScore.model_validate({**fields, "num_fewshot": 5, **changes})


def test_a_baseline_near_what_was_published_is_not_flagged() -> None:
    matrix = build(references=[published()])
    (reference,) = matrix.references
    assert reference.difference == pytest.approx(-0.0295, abs=1e-3)
    assert (reference.off, matrix.notes) == (False, ())


def test_a_baseline_far_from_what_was_published_is_flagged() -> None:
    matrix = build(references=[published(value=80.0)])
    assert matrix.references[0].off
    assert "5.8 points below the published 80.00 (Them, card)" in matrix.notes[0]


def test_what_was_scored_otherwise_is_shown_but_not_subtracted() -> None:
    (reference,) = build(references=[published(value=80.0, num_fewshot=0)]).references
    assert (reference.difference, reference.off) == (None, False)
    assert reference.differs == ("few-shot 5 vs 0 (published)",)


def test_two_points_that_few_questions_explain_are_not_flagged() -> None:
    (reference,) = build(references=[published(value=76.5)]).references
    assert reference.difference is not None
    assert reference.difference < -2
    assert not reference.off
