"""Fidelity in the matrix and its reports: distances, noise, and what is not compared."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace

import numpy as np
import pytest
from fakes.fidelity_server import distribution
from golden import matrix_input as given

from qkit.errors import InputError
from qkit.evaluate.fidelity_metrics import divergence, top1_agreement
from qkit.evaluate.fidelity_scores import Scores
from qkit.evaluate.matrix import Matrix, build_matrix
from qkit.evaluate.pairing import VariantInput
from qkit.evaluate.report import csv_file, html, markdown
from qkit.evaluate.report.sheets import sheets
from qkit.measurements import FidelityResult, Measurement
from qkit.plan import Cell, make_plan, measure_key
from qkit.recipe import Recipe, parse_recipe
from qkit.selection import choose_suites
from qkit.suites import FIDELITY_AGAIN, FIDELITY_SUITE, FidelitySuite

DOCUMENTS, LENGTH, TOP = 12, 30, 10


def scores(shift: float, *, generated: int = 0) -> Scores:
    """What a server with that shift answers about made-up tokens."""
    random = np.random.default_rng(0)
    token = random.integers(0, 256, (DOCUMENTS, LENGTH + 1))
    rows = [
        (
            document,
            int(token[document, i + 1]),
            distribution(token[document, : i + 1].tolist(), shift),
        )
        for document in range(DOCUMENTS)
        for i in range(LENGTH)
    ]
    logprobs = np.array([row for _, _, row in rows])
    ids = np.argsort(-logprobs, axis=1, kind="stable")[:, :TOP]
    own = np.array([t for _, t, _ in rows], np.int32)
    continued = np.tile(np.arange(8, dtype=np.int32), (4, 1))
    continued[:generated, 3:] += 1
    return Scores(
        key="k",
        document=np.array([d for d, _, _ in rows], np.int32),
        window=np.array([d for d, _, _ in rows], np.int32),
        token=own,
        logprob=logprobs[np.arange(len(own)), own].astype(np.float32),
        top_ids=ids.astype(np.int32),
        top_logprobs=np.take_along_axis(logprobs, ids, axis=1).astype(np.float32),
        generated=continued,
    )


def result(of: Scores, **changes: object) -> FidelityResult:
    values = {
        "text": "qkit",
        "text_hash": "t" * 64,
        "tokenizer_hash": "z" * 64,
        "tokens_hash": "s" * 64,
        "documents": DOCUMENTS,
        "windows": DOCUMENTS,
        "window_tokens": LENGTH + 1,
        "scored_tokens": DOCUMENTS * LENGTH,
        "top_logprobs": TOP,
        "unit": "document",
        "greedy_prompts": 4,
        "greedy_prompt_tokens": 8,
        "greedy_tokens": 8,
        "perplexity": of.perplexity,
        "scores_hash": "h" * 64,
        "duration_s": 1.0,
    }
    return FidelityResult.model_validate(values | changes)


def measurement(name: str, suite: str, fidelity: FidelityResult) -> Measurement:
    return Measurement(
        key="k",
        suite=suite,
        variant=name,
        variant_hash="v" * 64,
        created="2026-12-01T02:00:00Z",
        hardware=given.HARDWARE,
        server=given.SERVER,
        versions={},
        fidelity=fidelity,
    )


def variant(name: str, suites: dict[str, Scores], **changes: object) -> VariantInput:
    return VariantInput(
        name=name,
        method=name,
        scheme=name,
        measurements=[measurement(name, s, result(v, **changes)) for s, v in suites.items()],
        scores=suites,
    )


def matrix(*others: VariantInput, again: float | None = 0.001, allow: bool = False) -> Matrix:
    suites = {FIDELITY_SUITE: scores(0)}
    if again is not None:
        suites[FIDELITY_AGAIN] = scores(again)
    return build_matrix(
        run="r",
        created="2026-12-01T02:00:00Z",
        baseline="bf16",
        variants=[*others, variant("bf16", suites)],
        allow_incomparable=allow,
    )


def test_a_row_has_its_distance_and_the_baseline_has_none() -> None:
    other = scores(0.3, generated=3)
    base, row = matrix(variant("awq", {FIDELITY_SUITE: other})).rows
    assert base.fidelity is not None
    assert base.fidelity.distance is None
    assert base.fidelity.perplexity.value == pytest.approx(scores(0).perplexity, rel=1e-5)
    assert row.fidelity is not None
    distance, greedy = row.fidelity.distance, row.fidelity.greedy
    assert distance is not None
    assert greedy is not None
    ratio = other.perplexity / scores(0).perplexity
    assert distance.perplexity_ratio.value == pytest.approx(ratio, rel=1e-5)
    kl = divergence(scores(0), other)
    assert distance.kl_mean.value == pytest.approx(kl.lower.mean(), rel=1e-5)
    assert distance.kl_max == pytest.approx(kl.lower.max(), rel=1e-5)
    agreement = top1_agreement(scores(0), other).mean()
    assert distance.top1_agreement.value == pytest.approx(agreement, rel=1e-5)
    for estimate in (distance.kl_mean, distance.kl_p99, distance.rms_probability_change):
        assert estimate.low is not None
        assert estimate.high is not None
        assert estimate.low <= estimate.value <= estimate.high
    assert distance.kl_median.value < distance.kl_mean.value < distance.kl_p99.value
    assert (greedy.prompts, greedy.identical, greedy.first_difference_median) == (4, 1, 3)
    assert row.marks == ()


def test_the_noise_floor_is_the_baseline_against_itself() -> None:
    found = matrix().fidelity_noise
    assert found is not None
    assert found.distance is not None
    assert 0 < found.distance.kl_mean.value < 1e-4
    assert matrix(again=None).fidelity_noise is None


def test_generations_that_never_part_have_no_median() -> None:
    row = matrix(variant("awq", {FIDELITY_SUITE: scores(0.1, generated=2)})).rows[1]
    assert row.fidelity is not None
    assert row.fidelity.greedy is not None
    assert row.fidelity.greedy.identical == 2
    assert row.fidelity.greedy.first_difference_median is None


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"text_hash": "u" * 64}, "text uuuuuuuuuuuu vs tttttttttttt (baseline)"),
        ({"window_tokens": 99}, "window tokens 99 vs 31 (baseline)"),
        ({"tokenizer_hash": "y" * 64}, "tokenizer hash yyyyyyyyyyyy vs zzzzzzzzzzzz (baseline)"),
        ({"top_logprobs": 5}, "top logprobs 5 vs 10 (baseline)"),
        ({"tokens_hash": "r" * 64}, "tokens sent rrrrrrrrrrrr vs ssssssssssss (baseline)"),
    ],
)
def test_what_differs_is_named_and_not_compared(change: dict[str, object], field: str) -> None:
    other = variant("awq", {FIDELITY_SUITE: scores(0.3)}, **change)
    row = matrix(other).rows[1]
    assert row.fidelity is not None
    assert row.fidelity.distance is None
    assert row.fidelity.perplexity.value > 0
    assert f"not compared: {field}" in row.marks


def test_other_tokens_are_not_compared_whatever_is_allowed() -> None:
    one = scores(0.3)
    other = replace(one, token=one.token + 1)
    row = matrix(variant("awq", {FIDELITY_SUITE: other}, tokens_hash="r" * 64), allow=True).rows[1]
    assert row.fidelity is not None
    assert row.fidelity.distance is None


def test_lost_scores_are_said_and_leave_the_perplexity() -> None:
    lost = replace(variant("awq", {FIDELITY_SUITE: scores(0.3)}), scores={})
    row = matrix(lost).rows[1]
    assert row.fidelity is not None
    assert row.fidelity.distance is None
    assert row.fidelity.perplexity.low is None
    assert "fidelity: its file of log-probabilities is lost; measure it again" in row.marks


def test_a_row_that_was_not_measured_is_null_and_says_so() -> None:
    other = VariantInput("awq", "awq", "awq", measurements=given.baseline().measurements)
    row = matrix(other).rows[1]
    assert row.fidelity is None
    assert "not measured: fidelity" in row.marks
    assert json.loads(matrix(other).model_dump_json())["rows"][1]["fidelity"] is None


def test_reports_show_it() -> None:
    built = matrix(variant("awq", {FIDELITY_SUITE: scores(0.3, generated=3)}))
    (sheet,) = (s for s in sheets(built) if s.title == "Fidelity")
    assert [line.cells[0].main for line in sheet.lines] == ["bf16", "bf16 again", "awq"]
    assert "360 tokens of 12 documents of the text that ships with qkit" in sheet.caption
    assert "a lower bound" in sheet.caption
    assert sheet.lines[-1].cells[-1].inline == "1/4, after 3 of 8"
    for text in (markdown.render(built), html.render(built)):
        assert "Same top token" in text
        assert "bf16 again" in text
    base, row = csv.DictReader(io.StringIO(csv_file.render(built)))
    fidelity = built.rows[1].fidelity
    assert fidelity is not None
    assert fidelity.distance is not None
    assert float(row["fidelity_kl_mean"]) == fidelity.distance.kl_mean.value
    assert float(row["fidelity_kl_mean_low"]) == fidelity.distance.kl_mean.low
    assert row["fidelity_greedy_identical"] == "1"
    assert base["fidelity_kl_mean"] == ""
    assert Matrix.model_validate_json(built.model_dump_json()) == built


# ------------------------------------------------------------------------------- plan and recipe

RECIPE = Recipe(name="r", model="m", accuracy=(), bench=())


def test_the_baseline_is_scored_twice_on_one_server() -> None:
    groups = make_plan(RECIPE.model_copy(update={"fidelity": FidelitySuite()})).groups
    assert [c.suite for c in groups[0].cells] == ["fidelity", "fidelity-again"]
    assert [[c.suite for c in group.cells] for group in groups[1:]] == [["fidelity"]] * 4
    once = FidelitySuite(repeat_baseline=False)
    first = make_plan(RECIPE.model_copy(update={"fidelity": once})).groups[0]
    assert [c.suite for c in first.cells] == ["fidelity"]


def test_the_suite_is_named_on_the_command_line_or_in_the_recipe() -> None:
    assert choose_suites(RECIPE, "fidelity").fidelity == FidelitySuite()
    chosen = choose_suites(RECIPE, "fidelity,mmlu", text="a.txt")
    assert chosen.fidelity == FidelitySuite(text="a.txt")
    assert [suite.task for suite in chosen.accuracy] == ["mmlu"]
    own = RECIPE.model_copy(update={"fidelity": FidelitySuite(tokens=99)})
    assert choose_suites(own, None).fidelity == choose_suites(own, "fidelity").fidelity
    assert choose_suites(own, "mmlu").fidelity is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fidelity": {"tokns": 5}}, "fidelity.tokns: unknown key, did you mean 'tokens'?"),
        ({"fidelity": {"window_tokens": 1}}, "fidelity.window_tokens: "),
        ({"accuracy": [{"task": "fidelity"}]}, "'fidelity' cannot be a suite's name"),
        ({"bench": {"name": "fidelity-again"}}, "'fidelity-again' cannot be a suite's name"),
    ],
)
def test_wrong_recipes_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_recipe({"name": "r", "model": "m", **change}, where="r.yaml")
    assert message in (caught.value.detail or "")


def test_a_changed_text_changes_the_key() -> None:
    def key(text: str | None) -> str:
        return measure_key(
            cell=Cell("awq", FIDELITY_SUITE, FidelitySuite()),
            variant_hash="v",
            flags=(),
            variables={},
            environment="e",
            hardware=given.HARDWARE,
            harness="h",
            data=None,
            text=text,
        )

    assert len({key(None), key("a"), key("b")}) == 3
