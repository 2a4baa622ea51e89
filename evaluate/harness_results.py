"""Reads what lm-eval returns: the headline metric, scores of tasks and groups, every sample."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any

import numpy as np

from qkit.errors import MeasurementError
from qkit.evaluate.quiet import BOOTSTRAP_ITERATIONS
from qkit.evaluate.scores import is_perplexity
from qkit.measurements import Sample, TaskScore

#: Metric that is the headline, the first of these a task has; else the task's first. Where a task
#: has both, the length-normalized accuracy is the one the field quotes.
HEADLINE_METRICS = ("acc_norm", "acc", "exact_match", "prompt_level_strict_acc", "word_perplexity")
#: Keys of a task's configuration that say where its data lies; documents have hashes of their own.
_PLACES = ("dataset_path", "dataset_kwargs")
#: Folders, and addresses of objects, in how lm-eval writes a task's functions down.
_PATH = re.compile(r"(?:/[^/\s\"'<>]+)+/|0x[0-9a-f]+")

BOOTSTRAP_SEED = 1234

Results = Mapping[str, Any]


def headline_metric(results: Results, task: str) -> tuple[str, str]:
    """Return the metric and filter a task is known by, for example ("acc", "none").

    Raises:
        MeasurementError: lm-eval computed no metric for the task.
    """
    keys = [key.partition(",") for key in results["results"].get(task, {}) if "," in key]
    found = [(name, chosen) for name, _, chosen in keys if not name.endswith("_stderr")]
    for preferred in HEADLINE_METRICS:
        for name, chosen in found:
            if name == preferred:
                return name, chosen
    if not found:
        raise MeasurementError(f"lm-eval computed no score for {task!r}")
    return found[0]


def task_scores(
    results: Results, metric: tuple[str, str], suite: str, tasks: Mapping[str, Any] | None = None
) -> list[TaskScore]:
    """Return the headline metric of the suite itself, then of its groups, then of its tasks.

    Args:
        results: What lm-eval returned.
        metric: Metric and filter.
        suite: Task or group that was asked for.
        tasks: lm-eval's tasks by name, for the standard errors that lm-eval does not compute.
    """
    groups = results.get("groups", {})
    subtasks = results.get("group_subtasks", {})
    order = sorted(results["results"], key=lambda name: (name != suite, name not in groups, name))
    # lm-eval leaves out groups of groups; where all tasks agree, theirs is the groups' too.
    counts = set(results["n-shot"].values())
    common = counts.pop() if len(counts) == 1 else None
    configs = results.get("configs", {})
    scores = []
    for name in order:
        row = results["results"][name]
        value = row.get(",".join(metric))
        if value is None:
            continue  # a group that has no score of its own
        stderr = row.get(f"{metric[0]}_stderr,{metric[1]}")
        if not isinstance(stderr, (int, float)) and tasks and name in tasks:
            stderr = _bootstrapped(results["samples"][name], metric, tasks[name])
        version = results["versions"].get(name)
        shots = results["n-shot"].get(name, common)
        scores.append(
            TaskScore(
                task=name,
                alias=str(row.get("alias", name)).strip(" -"),
                metric=metric[0],
                value=float(value),
                stderr=float(stderr) if isinstance(stderr, (int, float)) else None,
                n=int(row["sample_len"]),
                filter=metric[1],
                is_group=name in groups,
                version=None if version is None else str(version),
                num_fewshot=shots if isinstance(shots, int) else None,
                config_hash=config_hash(configs[name]) if name in configs else None,
                subtasks=tuple(subtasks.get(name, ())) if name in groups else (),
            )
        )
    return scores


def _bootstrapped(
    logged: Sequence[Mapping[str, Any]], metric: tuple[str, str], task: Any
) -> float | None:
    """Return a task's standard error by resampling its documents."""
    values = [e[metric[0]] for e in logged if e["filter"] == metric[1] and metric[0] in e]
    aggregate = task.aggregation().get(metric[0])
    return bootstrap_stderr(values, aggregate) if callable(aggregate) else None


def bootstrap_stderr(
    values: Sequence[Any], aggregate: Callable[[list[Any]], float]
) -> float | None:
    """Return the bootstrap standard error of a metric over documents (Efron, 1979), seeded.

    Args:
        values: What the metric keeps of each document.
        aggregate: From these to the score.

    Returns:
        The standard deviation over `BOOTSTRAP_ITERATIONS` resamples; None below two documents, or
        where it is not finite.
    """
    if len(values) < 2:
        return None
    rng = np.random.default_rng(BOOTSTRAP_SEED)
    drawn = rng.integers(len(values), size=(BOOTSTRAP_ITERATIONS, len(values)))
    scores = [aggregate([values[i] for i in row]) for row in drawn]
    stderr = float(np.std(scores, ddof=1))
    return stderr if math.isfinite(stderr) else None


def config_hash(config: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a task's configuration, wherever its files and data lie."""
    kept = {key: value for key, value in config.items() if key not in _PLACES}
    kept["metadata"] = {
        key: value for key, value in dict(config.get("metadata") or {}).items() if key == "version"
    }
    return sha256(_PATH.sub("", json.dumps(kept, sort_keys=True, default=str)).encode()).hexdigest()


def samples_of(
    results: Results,
    metric: tuple[str, str],
    tasks: Mapping[str, Any],
    cut: Mapping[tuple[str, int], int] | None = None,
) -> list[Sample]:
    """Return every scored document with its value and the options' log-likelihoods or the text.

    Args:
        results: What lm-eval returned.
        metric: Metric and filter of the values.
        tasks: lm-eval's tasks by name.
        cut: Tokens that documents' prompts lost, by task and number.
    """
    samples = []
    for name, logged in results["samples"].items():
        aggregate = tasks[name].aggregation().get(metric[0])
        generates = tasks[name].OUTPUT_TYPE == "generate_until"
        for entry in logged:
            if entry["filter"] != metric[1] or metric[0] not in entry:
                continue
            samples.append(
                Sample(
                    task=name,
                    doc_hash=entry["doc_hash"],
                    value=sample_value(entry[metric[0]], metric[0], aggregate),
                    weight=sample_weight(entry[metric[0]]),
                    loglikelihoods=() if generates else _loglikelihoods(entry["filtered_resps"]),
                    target=str(entry["target"]),
                    prompt_hash=entry["prompt_hash"],
                    filter=metric[1] if generates else None,
                    generated=_text(entry["resps"]) if generates else None,
                    filtered=_text(entry["filtered_resps"]) if generates else None,
                    truncated_tokens=(cut or {}).get((name, entry["doc_id"]), 0),
                )
            )
    return samples


def _text(responses: Any) -> str:
    """Return a document's first generated text; lm-eval nests it by request and repeat."""
    while isinstance(responses, (list, tuple)):
        responses = responses[0] if responses else ""
    return str(responses)


def sample_value(raw: Any, metric: str, aggregate: Any = None) -> float:
    """Return a document's own value; lm-eval keeps perplexities as log-likelihoods.

    Args:
        raw: What lm-eval logged: a number, or a sum and its weight.
        metric: Its name.
        aggregate: lm-eval's function from all documents to the score, for other kinds of values.

    Raises:
        ValueError: The value is of another kind and there is no function.
    """
    if is_perplexity(metric):
        total, weight = raw if isinstance(raw, (tuple, list)) else (raw, 1.0)
        return math.exp(-total / weight)
    if isinstance(raw, (bool, int, float)):
        return float(raw)
    if aggregate is None:
        raise ValueError(f"a value of {metric!r} is no number")
    return float(aggregate([raw]))


def sample_weight(raw: Any) -> float:
    """Return how much a document counts: lm-eval keeps perplexities as (sum, weight)."""
    pair = isinstance(raw, (tuple, list)) and len(raw) == 2
    weight = raw[1] if pair else 1.0
    return float(weight) if isinstance(weight, (int, float)) and weight > 0 else 1.0


def _loglikelihoods(responses: Sequence[Any]) -> tuple[float, ...]:
    """Return the log-likelihood of each option; empty for generated text."""
    values = [r[0] if isinstance(r, (tuple, list)) and r else r for r in responses]
    return tuple(float(v) for v in values if isinstance(v, (int, float)))
