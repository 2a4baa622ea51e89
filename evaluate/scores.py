"""One score: what kind of figure it is, how its tasks weigh, and its confidence interval. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from qkit.evaluate.intervals import (
    Interval,
    bootstrap_log_ratio_interval,
    effective_wilson_interval,
    is_binary,
    stratified_stderr,
    t_interval,
    wilson_interval,
    z_of,
)
from qkit.measurements import AccuracyResult, Sample, TaskScore

#: Parts of the names of metrics that are no share of right answers.
_NOT_SHARES = ("perplexity", "bits_per_byte", "bleu", "chrf")
#: Two means that agree this well are the same mean.
_SAME = 1e-6

Strata = dict[str, list[float]]


def is_fraction(result: AccuracyResult) -> bool:
    """Whether points make sense: every value lies between 0 and 1 and the metric is a share."""
    if any(part in metric_name(result.headline.metric) for part in _NOT_SHARES):
        return False
    values = [result.headline.value, *(sample.value for sample in result.samples)]
    return all(0 <= value <= 1 for value in values)


def is_perplexity(metric: str) -> bool:
    """Whether a metric is an exponential of a mean, so that two of them make a ratio."""
    return metric_name(metric).endswith("perplexity")


def metric_name(metric: str) -> str:
    """Return a metric as lm-eval names it, without its filter."""
    return metric.split(",", maxsplit=1)[0]


def by_task(samples: Sequence[Sample]) -> Strata:
    """Return the samples' values by task, in order of appearance."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for sample in samples:
        found[sample.task].append(sample.value)
    return dict(found)


def task_weights(result: AccuracyResult) -> dict[str, float] | None:
    """Return the weight of each task in a group's score; None where all questions weigh the same.

    lm-eval takes a group's mean over questions (as for mmlu) or over tasks; which one is told by
    the score itself. None, too, for a single task and where neither gives the score.
    """
    strata = by_task(result.samples)
    if not result.headline.is_group or len(strata) < 2:
        return None
    values = [value for task in strata.values() for value in task]
    if abs(math.fsum(values) / len(values) - result.headline.value) <= _SAME:
        return None
    mean = math.fsum(math.fsum(task) / len(task) for task in strata.values()) / len(strata)
    if abs(mean - result.headline.value) <= _SAME:
        return dict.fromkeys(strata, 1 / len(strata))
    return None


def score_interval(result: AccuracyResult) -> Interval | None:
    """Return the 95 % interval of a result's headline score, in its own unit; None if unknown.

    A task of right and wrong answers has Wilson's interval. A group is a stratified sample, its
    tasks being fixed: its interval is Wilson's with the effective number of questions. Other
    values have Student's interval, perplexities a bootstrap interval over documents.
    """
    score, samples = result.headline, result.samples
    if is_perplexity(score.metric):
        if not samples or min(sample.value for sample in samples) <= 0:
            return None
        logs = [math.log(sample.value) for sample in samples]
        return bootstrap_log_ratio_interval(logs, [sample.weight for sample in samples])
    strata = by_task(samples)
    if not strata or not is_fraction(result):
        return _normal(score)
    return _share_interval(score, strata, task_weights(result))


def part_interval(score: TaskScore, values: Mapping[str, Sequence[float]]) -> Interval | None:
    """Return the 95 % interval of the score of a part: a task, or a group of tasks.

    Args:
        score: The part's score, a share.
        values: Of its questions by task; empty where they are not known.
    """
    strata = {task: list(found) for task, found in values.items()}
    return _share_interval(score, strata, None) if strata else _normal(score)


def _share_interval(
    score: TaskScore, strata: Strata, weights: Mapping[str, float] | None
) -> Interval | None:
    values = [value for task in strata.values() for value in task]
    if len(strata) > 1:
        shares = weights or {task: len(found) / len(values) for task, found in strata.items()}
        stderr = stratified_stderr(strata, shares)
        if stderr is None:  # a task with one question says nothing of its own spread
            stderr = score.stderr
        return effective_wilson_interval(score.value, stderr, len(values))
    if is_binary(values):
        return wilson_interval(round(math.fsum(values)), len(values))
    return t_interval(values)


def _normal(score: TaskScore) -> Interval | None:
    """Return the normal interval from lm-eval's own standard error."""
    if score.stderr is None:
        return None
    half = z_of() * score.stderr
    return Interval(score.value - half, score.value + half)
