"""Reads lm-eval's own result files, so that they can be compared with qkit's measurements.

Two layouts: one file with everything (`--output_path FILE` of old versions, or what
`simple_evaluate` returns), and a folder with `results_TIME.json` beside `samples_TASK_TIME.jsonl`.
What lm-eval does not write down (the tokenizer's hash, BOS, the server) stays unknown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from qkit.errors import InputError, MeasurementError
from qkit.evaluate.harness_results import (
    headline_metric,
    sample_value,
    sample_weight,
    task_scores,
)
from qkit.measurements import AccuracyResult, Sample

#: Time in the names of lm-eval's files; samples belong to the results of the same time.
_TIME = re.compile(r"^results_(.+)$")

Data = Mapping[str, Any]


def is_lm_eval_file(data: object) -> bool:
    """Whether a JSON file's content is what lm-eval writes."""
    return isinstance(data, dict) and "results" in data and "config" in data


def newest_results(folder: Path) -> Path | None:
    """Return the newest results file of lm-eval in a folder or below it, or None."""
    return max(folder.rglob("results_*.json"), key=lambda path: path.name, default=None)


def read_lm_eval(path: Path, data: Data) -> dict[str, AccuracyResult]:
    """Return every top-level task and group of a result file, by name.

    Raises:
        InputError: The file holds no score, or its samples cannot be read.
    """
    results = dict(data)
    results.setdefault("groups", {})
    results.setdefault("n-shot", {})
    results.setdefault("versions", {})
    results.setdefault("configs", {})
    counts = results.get("n-samples", {})
    rows = {name: dict(row) for name, row in results["results"].items()}
    samples = _samples(path, results)
    for name, row in rows.items():
        known = len({entry.get("doc_id", i) for i, entry in enumerate(samples.get(name, ()))})
        effective = counts.get(name, {}).get("effective", known)
        row.setdefault("sample_len", effective)
    _sum_groups(rows, results.get("group_subtasks", {}))
    results["results"] = rows
    parts = {child for children in results.get("group_subtasks", {}).values() for child in children}
    found = {}
    for name in rows:
        if name in parts:
            continue
        try:
            found[name] = _result(name, results, samples)
        except MeasurementError:
            continue  # a group without a score of its own
    if not found:
        raise InputError("the lm-eval file holds no score", where=path)
    return found


def _result(
    name: str, results: dict[str, Any], samples: Mapping[str, list[Data]]
) -> AccuracyResult:
    metric = headline_metric(results, name)
    subtasks = results.get("group_subtasks", {})
    members = _members(name, subtasks)
    own = {**results, "results": {k: v for k, v in results["results"].items() if k in members}}
    scores = tuple(task_scores(own, metric, name))
    config = results.get("config", {})
    limit = config.get("limit")
    template = results.get("chat_template")
    return AccuracyResult(
        suite=name,
        harness=f"lm-eval {results.get('lm_eval_version') or results.get('git_hash') or 'unknown'}",
        headline=scores[0],
        scores=scores,
        samples=tuple(
            _sample(task, entry, metric)
            for task in members
            for entry in samples.get(task, ())
            if metric[0] in entry and entry.get("filter", metric[1]) == metric[1]
        ),
        num_fewshot=scores[0].num_fewshot,
        limit=int(limit) if isinstance(limit, (int, float)) and limit >= 1 else None,
        chat_template=bool(template),
        fewshot_as_multiturn=bool(results.get("fewshot_as_multiturn", True)),
        system_prompt=results.get("system_instruction"),
        tokenizer_hash="",
        duration_s=float(results.get("total_evaluation_time_seconds") or 0),
        requests=0,
        prompt_tokens=0,
        cached_tokens=None,
    )


def _sample(task: str, entry: Data, metric: tuple[str, str]) -> Sample:
    return Sample(
        task=task,
        doc_hash=entry.get("doc_hash") or _hash_of(entry.get("doc")),
        value=sample_value(entry[metric[0]], metric[0]),
        weight=sample_weight(entry[metric[0]]),
        target=str(entry.get("target", "")),
        prompt_hash=str(entry.get("prompt_hash", "")),
    )


def _hash_of(document: object) -> str:
    """Return lm-eval's own hash of a document, for files older than it."""
    text = json.dumps(document, indent=2, default=str, ensure_ascii=False)
    return sha256(text.encode("utf-8")).hexdigest()


def _samples(path: Path, results: Data) -> dict[str, list[Data]]:
    """Return each task's samples: from the file itself, else from the files beside it."""
    if results.get("samples"):
        return {name: list(entries) for name, entries in results["samples"].items()}
    time = _TIME.match(path.stem)
    if not time:
        return {}
    suffix = f"_{time[1]}.jsonl"
    return {
        file.name.removeprefix("samples_").removesuffix(suffix): _lines(file)
        for file in sorted(path.parent.glob(f"samples_*{suffix}"))
    }


def _lines(path: Path) -> list[Data]:
    try:
        with path.open(encoding="utf-8") as lines:
            return [json.loads(line) for line in lines if line.strip()]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(
            "a file of lm-eval's samples cannot be read", where=path, detail=str(error)
        ) from error


def _members(name: str, subtasks: Mapping[str, list[str]]) -> list[str]:
    """Return a task or group and all that is below it."""
    found = [name]
    for child in subtasks.get(name, ()):
        found += _members(child, subtasks)
    return found


def _sum_groups(rows: dict[str, dict[str, Any]], subtasks: Mapping[str, list[str]]) -> None:
    """Give groups, whose number lm-eval leaves out, the questions of their tasks."""
    for name, row in rows.items():
        leaves = [n for n in _members(name, subtasks) if not subtasks.get(n) and n in rows]
        if subtasks.get(name):
            row["sample_len"] = sum(rows[leaf]["sample_len"] for leaf in leaves)
