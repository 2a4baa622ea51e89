"""Runs one accuracy suite: lm-eval's own task, scored on a served variant, every sample kept."""

from __future__ import annotations

import importlib.metadata
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lm_eval

from qkit.errors import InputError, MeasurementError
from qkit.evaluate.lm import OnProgress, ServedLM, load_tokenizer
from qkit.evaluate.quiet import BOOTSTRAP_ITERATIONS, quiet_lm_eval
from qkit.evaluate.task_catalog import LoadedTask, load_task, num_fewshot
from qkit.hashing import hash_tokenizer
from qkit.measurements import AccuracyResult, Sample, TaskScore
from qkit.suites import AccuracySuite

#: Metric that is the headline, the first of these a task has; else the task's first. Where a task
#: has both, the length-normalized accuracy is the one the field quotes.
HEADLINE_METRICS = ("acc_norm", "acc", "exact_match", "prompt_level_strict_acc", "word_perplexity")
#: lm-eval's own seeds; `seed` is added to them, so that 0 gives lm-eval's few-shot examples.
LM_EVAL_SEED = 1234

Results = Mapping[str, Any]


def run_accuracy(
    suite: AccuracySuite,
    *,
    base_url: str,
    model: str,
    tokenizer_path: Path,
    max_model_len: int | None,
    data: Path | None = None,
    seed: int = 0,
    on_progress: OnProgress | None = None,
) -> AccuracyResult:
    """Score a served variant on one lm-eval task or group.

    Group scores and their standard errors are lm-eval's own; for `mmlu` that is the mean over all
    questions, not over subjects.

    Args:
        suite: Task, few-shot count, limit and chat template.
        base_url: Root of the server.
        model: Name the model is served under.
        tokenizer_path: Folder of the served checkpoint.
        max_model_len: Served length in tokens; None asks the server.
        data: Folder of hub data sets in their own layout.
        seed: Of few-shot sampling and of generation.
        on_progress: Called after every request with those finished and all known so far.

    Raises:
        InputError: The task, its data, the model's name or the tokenizer cannot be used, or a
            prompt does not fit the served length.
        HubUnreachableError: The task's data cannot be had.
        ServerError: The server is gone, stalls, or keeps failing.
        MeasurementError: The server does not give exact log-probabilities.
    """
    started = time.monotonic()
    tokenizer = load_tokenizer(tokenizer_path)
    if suite.chat_template and not tokenizer.chat_template:
        raise InputError(
            "the tokenizer has no chat template",
            where=tokenizer_path,
            fix="leave `chat_template` off, or use an instruct checkpoint",
        )
    task = load_task(suite, data=data)
    lm = ServedLM(
        base_url=base_url,
        model=model,
        tokenizer=tokenizer,
        max_model_len=max_model_len,
        seed=seed,
        on_progress=on_progress,
    )
    shots = num_fewshot(suite)
    results = _evaluate(suite, lm, task, shots, seed)
    headline = headline_metric(results, suite.task)
    scores = tuple(task_scores(results, headline, suite.task))
    first = scores[0]
    if not math.isfinite(first.value):
        raise MeasurementError(f"the score of {suite.task!r} is not finite ({first.value})")
    return AccuracyResult(
        suite=suite.task,
        harness=f"lm-eval {importlib.metadata.version('lm_eval')}",
        headline=first,
        scores=scores,
        samples=tuple(samples_of(results, headline, task.leaves)),
        num_fewshot=first.num_fewshot if first.num_fewshot is not None else shots,
        limit=suite.limit,
        chat_template=suite.chat_template,
        tokenizer_hash=hash_tokenizer(tokenizer_path),
        duration_s=time.monotonic() - started,
        requests=lm.usage.requests,
        prompt_tokens=lm.usage.prompt_tokens,
        cached_tokens=lm.usage.cached_tokens,
        marks=(f"limit: first {suite.limit} of each task",) if suite.limit else (),
    )


def _evaluate(
    suite: AccuracySuite, lm: ServedLM, task: LoadedTask, shots: int | None, seed: int
) -> Results:
    try:
        with quiet_lm_eval():
            results: Results | None = lm_eval.simple_evaluate(
                model=lm,
                tasks=task.roots,
                task_manager=task.manager,
                num_fewshot=shots,
                limit=suite.limit,
                bootstrap_iters=BOOTSTRAP_ITERATIONS,
                log_samples=True,
                apply_chat_template=suite.chat_template,
                fewshot_as_multiturn=True,
                random_seed=seed,
                numpy_random_seed=LM_EVAL_SEED + seed,
                torch_random_seed=LM_EVAL_SEED + seed,
                fewshot_random_seed=LM_EVAL_SEED + seed,
            )
    except AssertionError as error:  # how lm-eval refuses too many few-shot examples
        raise InputError(
            f"lm-eval refuses the settings of the task {suite.task!r}",
            detail=str(error),
            fix="ask for fewer few-shot examples",
        ) from error
    if results is None:
        raise MeasurementError(f"lm-eval returned no result for {suite.task!r}")
    return results


# ----------------------------------------------------------------------- reading lm-eval's results


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


def task_scores(results: Results, metric: tuple[str, str], suite: str) -> list[TaskScore]:
    """Return the headline metric of the suite itself, then of its groups, then of its tasks."""
    groups = results.get("groups", {})
    order = sorted(results["results"], key=lambda name: (name != suite, name not in groups, name))
    # lm-eval leaves out groups of groups; where all tasks agree, theirs is the groups' too.
    counts = set(results["n-shot"].values())
    common = counts.pop() if len(counts) == 1 else None
    scores = []
    for name in order:
        row = results["results"][name]
        value = row.get(",".join(metric))
        if value is None:
            continue  # a group that has no score of its own
        stderr = row.get(f"{metric[0]}_stderr,{metric[1]}")
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
                is_group=name in groups,
                version=None if version is None else str(version),
                num_fewshot=shots if isinstance(shots, int) else None,
            )
        )
    return scores


def samples_of(results: Results, metric: tuple[str, str], tasks: Mapping[str, Any]) -> list[Sample]:
    """Return every scored document with its value and the options' log-likelihoods."""
    samples = []
    for name, logged in results["samples"].items():
        aggregate = tasks[name].aggregation().get(metric[0])
        for entry in logged:
            if entry["filter"] != metric[1] or metric[0] not in entry:
                continue
            samples.append(
                Sample(
                    task=name,
                    doc_hash=entry["doc_hash"],
                    value=_value(entry[metric[0]], aggregate),
                    loglikelihoods=_loglikelihoods(entry["filtered_resps"]),
                    target=str(entry["target"]),
                )
            )
    return samples


def _value(raw: Any, aggregate: Any) -> float:
    """Return a document's own value; perplexities are kept by lm-eval as (sum, weight)."""
    return float(raw) if isinstance(raw, (bool, int, float)) else float(aggregate([raw]))


def _loglikelihoods(responses: Sequence[Any]) -> tuple[float, ...]:
    """Return the log-likelihood of each option; empty for generated text."""
    values = [r[0] if isinstance(r, (tuple, list)) and r else r for r in responses]
    return tuple(float(v) for v in values if isinstance(v, (int, float)))
