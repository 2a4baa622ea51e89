"""`qkit compare`: sides of every kind, what is refused, and what is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from golden import matrix_input as given

from qkit.cli import cli

DOCUMENTS = 200


def measured(folder: Path, name: str, flips: tuple[int, int] = (0, 0), **changes: Any) -> str:
    path = folder / name / "mmlu.json"
    path.parent.mkdir()
    found = given.measurement(name, "mmlu", accuracy=given.accuracy(*flips, **changes))
    path.write_text(found.model_dump_json(), encoding="utf-8")
    return str(path.parent)


def lm_eval(folder: Path, name: str, wrong: int, *, old: bool, samples: bool = True) -> str:
    """Write a result as lm-eval does: in one file, or with samples beside it."""
    right = DOCUMENTS - wrong
    entries = [
        {
            "doc_id": i,
            "doc_hash": f"{i:064x}",
            "filter": "none",
            "target": "0",
            "acc": int(i < right),
        }
        for i in range(DOCUMENTS)
    ]
    mean = right / DOCUMENTS
    stderr = (mean * (1 - mean) / (DOCUMENTS - 1)) ** 0.5
    data: dict[str, Any] = {
        "results": {"copa": {"alias": "copa", "acc,none": mean, "acc_stderr,none": stderr}},
        "group_subtasks": {"copa": []},
        "versions": {"copa": 1.0},
        "n-shot": {"copa": 0},
        "config": {"model": "hf", "limit": None},
        "n-samples": {"copa": {"original": DOCUMENTS, "effective": DOCUMENTS}},
        "lm_eval_version": "0.4.9",
    }
    target = folder / name
    target.mkdir()
    if old:
        data |= {"samples": {"copa": entries}} if samples else {}
        path = target / f"{name}.json"
        path.write_text(json.dumps(data), encoding="utf-8")
        return str(path)
    (target / "results_2026-01-01T00-00-00.json").write_text(json.dumps(data), encoding="utf-8")
    if samples:
        lines = "".join(f"{json.dumps(entry)}\n" for entry in entries)
        (target / "samples_copa_2026-01-01T00-00-00.jsonl").write_text(lines, encoding="utf-8")
    return str(target)


def compare(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["compare", *arguments])


def accuracy(*arguments: str) -> dict[str, Any]:
    result = compare(*arguments, "--format", "json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)["rows"][1]["accuracy"]
    return found


def test_measurements_are_paired(tmp_path: Path) -> None:
    base, other = measured(tmp_path, "bf16"), measured(tmp_path, "awq", (31, 22))
    found = accuracy(base, f"{other}/mmlu.json")["mmlu"]
    assert found["flips"] == {"to_wrong": 31, "to_right": 22}
    assert found["delta_points"] == pytest.approx(-100 * 9 / given.QUESTIONS, rel=1e-5)
    assert compare(base, other).exit_code == 0


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"harness": "0.4.9"}, "harness version 0.4.9 vs 0.4.13"),
        ({"num_fewshot": 0}, "few-shot 0 vs 5"),
        ({"tokenizer_hash": "dd" * 32}, "tokenizer hash dddddddddddd"),
        ({"chat_template": True}, "chat template on vs off"),
        ({"seed": 3}, "seed 3 vs 0"),
    ],
)
def test_what_differs_is_named_and_not_subtracted_unless_allowed(
    tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    base, other = measured(tmp_path, "bf16"), measured(tmp_path, "awq", (3, 1), **changes)
    refused = compare(base, other)
    assert refused.exit_code == 3
    assert f"not compared: {field}" in " ".join(refused.stdout.split())
    allowed = compare(base, other, "--allow-incomparable")
    assert allowed.exit_code == 0
    assert "COMPARED ALTHOUGH NOT COMPARABLE" in allowed.stdout


def test_several_suites_have_an_average(tmp_path: Path) -> None:
    names = [measured(tmp_path, "bf16"), measured(tmp_path, "awq", (31, 22))]
    for name, flips in zip(names, [(0, 0), (9, 4)], strict=True):
        result = given.accuracy(*flips, suite="copa")
        found = given.measurement(Path(name).name, "copa", accuracy=result)
        (Path(name) / "copa.json").write_text(found.model_dump_json(), encoding="utf-8")
    rows = json.loads(compare(*names, "--format", "json").stdout)["rows"]
    assert rows[0]["average"]["suites"] == ["copa", "mmlu"]
    assert rows[1]["average"]["delta_points"] == pytest.approx(-700 / given.QUESTIONS, rel=1e-5)
    assert "Average of 2 suites" in compare(*names).stdout


@pytest.mark.parametrize("old", [True, False])
def test_lm_evals_own_files_are_paired(tmp_path: Path, old: bool) -> None:
    base = lm_eval(tmp_path, "bf16", 50, old=old)
    other = lm_eval(tmp_path, "awq", 60, old=not old)
    found = accuracy(base, other)["copa"]
    assert (found["n"], found["delta_points"]) == (DOCUMENTS, -5.0)
    assert found["flips"] == {"to_wrong": 10, "to_right": 0}
    text = " ".join(compare(base, other).stdout.split())
    assert "not recorded, so not checked: tokenizer hash, BOS, task hash, server" in text


@pytest.mark.parametrize("old", [True, False])
def test_without_samples_the_difference_is_unpaired_and_says_so(tmp_path: Path, old: bool) -> None:
    base = lm_eval(tmp_path, "bf16", 50, old=old)
    other = lm_eval(tmp_path, "awq", 60, old=old, samples=False)
    found = accuracy(base, other)["copa"]
    assert (found["delta_method"], found["flips"]) == ("unpaired-normal", None)
    assert "UNPAIRED, because awq has no samples" in " ".join(compare(base, other).stdout.split())


def test_suites_that_only_one_has_are_an_error_that_lists_both(tmp_path: Path) -> None:
    base, other = measured(tmp_path, "bf16"), lm_eval(tmp_path, "awq", 60, old=False)
    result = compare(base, other)
    assert result.exit_code == 2
    assert "have no accuracy suite in common" in result.stderr
    assert "copa" in result.stderr


@pytest.mark.parametrize("content", ["not json", "{}", "[1]"])
def test_a_file_of_another_kind_is_an_error(tmp_path: Path, content: str) -> None:
    base = measured(tmp_path, "bf16")
    path = tmp_path / "other.json"
    path.write_text(content, encoding="utf-8")
    result = compare(base, str(path))
    assert result.exit_code == 2
    assert "other.json" in result.stderr
    assert "Traceback" not in result.stderr


def test_nothing_there_is_an_error(tmp_path: Path) -> None:
    base = measured(tmp_path, "bf16")
    assert "nothing to compare it with" in compare(base).stderr
    assert compare(base, "no-such-run/awq").exit_code == 2
