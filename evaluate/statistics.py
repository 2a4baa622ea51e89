"""Statistics of accuracy: paired differences, tests and verdicts. Pure functions.

Scores are fractions (0.70); differences are in points (percentage points: 0.70 -> 0.69 is -1.0
point), which is another thing than percent (the same step is -1.4 %). Differences are always
variant minus baseline, on the same questions, so that the questions' own difficulty cancels out.
Intervals are in `qkit.evaluate.intervals`, tests and verdicts in `qkit.evaluate.verdicts`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from qkit.errors import InputError
from qkit.evaluate.intervals import (
    CONFIDENCE,
    Interval,
    bootstrap_log_ratio_interval,
    is_binary,
    log_ratio_interval,
    mean_stderr,
    stratified_stderr,
    t_interval,
    tang_ratio_interval,
    tango_interval,
    wilson_interval,
    z_of,
)
from qkit.evaluate.verdicts import (
    MARGIN_POINTS,
    POWER,
    Verdict,
    holm,
    mcnemar_exact,
    questions_to_settle,
    recovery_percent,
    relative_percent,
    verdict,
)
from qkit.measurements import Sample, TaskScore

__all__ = [
    "CONFIDENCE",
    "MARGIN_POINTS",
    "POWER",
    "Comparison",
    "Interval",
    "RatioComparison",
    "Verdict",
    "compare_averages",
    "compare_perplexities",
    "compare_samples",
    "compare_scores",
    "compare_values",
    "holm",
    "mcnemar_exact",
    "mean_stderr",
    "questions_to_settle",
    "recovery_percent",
    "relative_percent",
    "tango_interval",
    "verdict",
    "wilson_interval",
]

IntervalMethod = Literal["tango-score", "paired-t", "paired-stratified", "unpaired-normal"]


@dataclass(frozen=True)
class Comparison:
    """A variant against the baseline.

    Attributes:
        n: Number of questions; the variant's where they are not the same ones.
        baseline: Score of the baseline, a fraction.
        variant: Score of the variant, a fraction.
        delta_points: 100 * (variant - baseline).
        interval_points: Confidence interval of `delta_points`.
        interval_method: "tango-score" for 0/1 values, "paired-t" for others, "paired-stratified"
            where tasks are weighted, "unpaired-normal" for scores of which no samples are known.
        confidence: Level of the intervals.
        relative_percent: 100 * (variant - baseline) / baseline; None where the baseline is 0.
        recovery_percent: 100 * variant / baseline; None where the baseline is 0.
        recovery_interval: Confidence interval of `recovery_percent`; None where it has none.
        flips_to_wrong: Questions the baseline had right and the variant has wrong; None where
            values are not 0 or 1.
        flips_to_right: The other way round.
        mcnemar_p: Exact McNemar p-value; None where values are not 0 or 1.
        variance: Of one question's difference; None where samples are not paired.
    """

    n: int
    baseline: float
    variant: float
    delta_points: float
    interval_points: Interval
    interval_method: IntervalMethod
    confidence: float
    relative_percent: float | None
    recovery_percent: float | None
    recovery_interval: Interval | None = None
    flips_to_wrong: int | None = None
    flips_to_right: int | None = None
    mcnemar_p: float | None = None
    variance: float | None = None

    @property
    def paired(self) -> bool:
        """Whether both were asked the same questions, one by one."""
        return self.interval_method != "unpaired-normal"

    def verdict(self, margin_points: float = MARGIN_POINTS) -> Verdict:
        """Return the verdict against a margin; see `verdict`."""
        return verdict(self.interval_points, margin_points)

    def questions_to_settle(self, margin_points: float = MARGIN_POINTS) -> int | None:
        """Return how many questions would settle the verdict; None where it is or never will be."""
        if self.variance is None or self.verdict(margin_points) != "inconclusive":
            return None
        needed = questions_to_settle(self.delta_points, self.variance, margin_points)
        # The interval of these n did not settle it, whatever the approximation says.
        return None if needed is None else max(needed, self.n + 1)


@dataclass(frozen=True)
class RatioComparison:
    """Two perplexities of the same documents.

    Attributes:
        n: Number of documents.
        ratio: Variant / baseline; above 1 is worse.
        interval: Bootstrap interval over documents; None below two.
    """

    n: int
    ratio: float
    interval: Interval | None


# ------------------------------------------------------------------------------------- comparisons


def compare_values(
    baseline: Sequence[float], variant: Sequence[float], confidence: float = CONFIDENCE
) -> Comparison:
    """Compare two sequences of values of the same questions in the same order.

    Values of only 0 and 1 get Tango's interval, flips and the exact McNemar test; other values
    (for example truthfulqa_mc2) get the paired t interval.

    Raises:
        ValueError: The lengths differ, there is no value, or a single value that is not 0 or 1.
    """
    if len(baseline) != len(variant) or not baseline:
        raise ValueError(f"cannot pair {len(baseline)} values with {len(variant)}")
    return _compare({"": list(baseline)}, {"": list(variant)}, {"": 1.0}, confidence)


def compare_samples(
    baseline: Sequence[Sample],
    variant: Sequence[Sample],
    confidence: float = CONFIDENCE,
    *,
    weights: Mapping[str, float] | None = None,
) -> Comparison:
    """Pair two results' samples by task and document hash and compare them.

    A question that a task holds twice is paired in order of appearance.

    Args:
        baseline: Samples of the baseline.
        variant: Samples of the variant.
        confidence: Two-sided level of the intervals.
        weights: Of tasks, with the sum 1, where a group is their mean; None weighs all samples
            alike, which is how lm-eval weighs MMLU's subjects.

    Raises:
        InputError: The two were not scored on the same questions, or there is none.
        ValueError: There are too few for an interval.
    """
    before, after = _paired(baseline, variant)
    if weights is None:
        return compare_values(_joined(before)[""], _joined(after)[""], confidence)
    return _compare(before, after, weights, confidence)


def compare_averages(
    suites: Sequence[tuple[Sequence[Sample], Sequence[Sample], Mapping[str, float] | None]],
    confidence: float = CONFIDENCE,
) -> Comparison:
    """Compare the means of several suites' scores, each suite with the same weight.

    The suites' questions are separate samples, so that a suite is a stratum (or several, where it
    weighs its tasks) and the variance of the mean is the sum of theirs.

    Args:
        suites: Of each the baseline's samples, the variant's, and the weights of its tasks as for
            `compare_samples`.
        confidence: Two-sided level of the intervals.

    Raises:
        InputError: The two were not scored on the same questions, or there is none.
        ValueError: There are too few for an interval.
    """
    before: dict[str, list[float]] = {}
    after: dict[str, list[float]] = {}
    weights: dict[str, float] = {}
    for index, (baseline, variant, of_tasks) in enumerate(suites):
        old, new = _paired(baseline, variant)
        if of_tasks is None:
            old, new = _joined(old), _joined(new)
        for task, weight in (of_tasks or {"": 1.0}).items():
            stratum = f"{index}/{task}"
            before[stratum], after[stratum] = old[task], new[task]
            weights[stratum] = weight / len(suites)
    return _compare(before, after, weights, confidence)


def compare_perplexities(
    baseline: Sequence[Sample], variant: Sequence[Sample], confidence: float = CONFIDENCE
) -> RatioComparison:
    """Return the ratio of two perplexities of the same documents; above 1 is worse.

    Each sample's value is its document's own perplexity, its weight the document's number of words
    or bytes.

    Raises:
        InputError: The two were not scored on the same documents, or there is none.
        ValueError: A perplexity is not positive.
    """
    before, after = _paired(baseline, variant)
    sizes, _ = _paired(
        [sample.model_copy(update={"value": sample.weight}) for sample in baseline], variant
    )
    old, new, weights = (
        [value for values in side.values() for value in values] for side in (before, after, sizes)
    )
    if min(*old, *new) <= 0:
        raise ValueError("a perplexity is not positive")
    logs = [math.log(v / b) for b, v in zip(old, new, strict=True)]
    total = math.fsum(w * log for w, log in zip(weights, logs, strict=True))
    return RatioComparison(
        n=len(logs),
        ratio=math.exp(total / math.fsum(weights)),
        interval=bootstrap_log_ratio_interval(logs, weights, confidence),
    )


def compare_scores(
    baseline: TaskScore, variant: TaskScore, confidence: float = CONFIDENCE
) -> Comparison | None:
    """Compare two scores of which no samples are known; None where a standard error is missing.

    The variance of the difference is the sum of both, as for two separate sets of questions: on the
    same questions it is too wide by far, which is the price of not knowing them.
    """
    if baseline.stderr is None or variant.stderr is None:
        return None
    delta = variant.value - baseline.value
    stderr = math.hypot(baseline.stderr, variant.stderr)
    half = z_of(confidence) * stderr
    recovery = recovery_percent(baseline.value, variant.value)
    spread = None
    if baseline.value > 0 and variant.value > 0:
        error = math.hypot(baseline.stderr / baseline.value, variant.stderr / variant.value)
        factor, ratio = math.exp(z_of(confidence) * error), variant.value / baseline.value
        spread = Interval(100 * ratio / factor, 100 * ratio * factor)
    return Comparison(
        n=variant.n,
        baseline=baseline.value,
        variant=variant.value,
        delta_points=100 * delta,
        interval_points=Interval(100 * (delta - half), 100 * (delta + half)),
        interval_method="unpaired-normal",
        confidence=confidence,
        relative_percent=relative_percent(baseline.value, variant.value),
        recovery_percent=recovery,
        recovery_interval=spread,
    )


def _compare(
    baseline: Mapping[str, list[float]],
    variant: Mapping[str, list[float]],
    weights: Mapping[str, float],
    confidence: float,
) -> Comparison:
    """Compare values by task, each task's mean with its weight."""
    mean_baseline, mean_variant = _mean(baseline, weights), _mean(variant, weights)
    before = [value for values in baseline.values() for value in values]
    after = [value for name in baseline for value in variant[name]]
    n, binary = len(before), is_binary(before) and is_binary(after)
    to_wrong = to_right = p_value = None
    if binary:
        pairs = list(zip(before, after, strict=True))
        to_wrong = sum(1 for old, new in pairs if old > new)
        to_right = sum(1 for old, new in pairs if old < new)
        p_value = mcnemar_exact(to_wrong, to_right)
    differences = {
        name: [new - old for old, new in zip(values, variant[name], strict=True)]
        for name, values in baseline.items()
    }
    recovery = log_ratio_interval(baseline, variant, weights, confidence)
    method: IntervalMethod
    if len(weights) > 1:
        method, delta = "paired-stratified", _mean(differences, weights)
        interval = _stratified(differences, weights, delta, confidence)
    elif to_wrong is not None and to_right is not None:
        # From the counts, so that no rounding of two means shows in the difference.
        method, delta = "tango-score", (to_right - to_wrong) / n
        interval = tango_interval(to_wrong, to_right, n, confidence)
        both_right = round(math.fsum(before)) - to_wrong
        recovery = tang_ratio_interval(both_right, to_wrong, to_right, n, confidence)
    else:
        method, delta = "paired-t", _mean(differences, weights)
        interval = t_interval(next(iter(differences.values())), confidence)
    if interval is None:
        raise ValueError("one pair of values that are not 0 or 1 has no interval")
    stderr = stratified_stderr(differences, weights)
    return Comparison(
        n=n,
        baseline=mean_baseline,
        variant=mean_variant,
        delta_points=100 * delta,
        interval_points=interval.scaled(100),
        interval_method=method,
        confidence=confidence,
        relative_percent=relative_percent(mean_baseline, mean_variant),
        recovery_percent=recovery_percent(mean_baseline, mean_variant),
        recovery_interval=recovery.scaled(100) if recovery else None,
        flips_to_wrong=to_wrong,
        flips_to_right=to_right,
        mcnemar_p=p_value,
        variance=None if stderr is None else stderr**2 * n,
    )


def _joined(strata: Mapping[str, list[float]]) -> dict[str, list[float]]:
    return {"": [value for values in strata.values() for value in values]}


def _mean(strata: Mapping[str, Sequence[float]], weights: Mapping[str, float]) -> float:
    return math.fsum(weights[name] * math.fsum(v) / len(v) for name, v in strata.items())


def _stratified(
    differences: Mapping[str, Sequence[float]],
    weights: Mapping[str, float],
    delta: float,
    confidence: float,
) -> Interval | None:
    stderr = stratified_stderr(differences, weights)
    if not stderr:  # no difference at all: no wider than Tango's for as many questions
        n = sum(len(values) for values in differences.values())
        return None if stderr is None else tango_interval(0, 0, n, confidence)
    half = z_of(confidence) * stderr
    return Interval(delta - half, delta + half)


# ------------------------------------------------------------------------------- pairing of samples

Documents = dict[tuple[str, str], list[float]]


def _paired(
    baseline: Sequence[Sample], variant: Sequence[Sample]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return both sides' values by task, in the same order of documents.

    Raises:
        InputError: The two were not scored on the same questions, or there is none.
    """
    before, after = _by_document(baseline), _by_document(variant)
    if not before and not after:
        raise InputError("there are no samples to compare", fix="run the accuracy suite again")
    shared = sum(min(len(values), len(after.get(key, ()))) for key, values in before.items())
    only_before = sum(map(len, before.values())) - shared
    only_after = sum(map(len, after.values())) - shared
    if only_before or only_after:
        tasks = sorted(
            {
                task
                for task, document in before.keys() | after.keys()
                if len(before.get((task, document), ())) != len(after.get((task, document), ()))
            }
        )
        raise InputError(
            f"the results were scored on different questions: {only_before} only in the baseline, "
            f"{only_after} only in the variant",
            where=", ".join(tasks[:3]) + (" and others" if len(tasks) > 3 else ""),
            fix="measure both with the same lm-eval version, task, limit and seed",
        )
    old: defaultdict[str, list[float]] = defaultdict(list)
    new: defaultdict[str, list[float]] = defaultdict(list)
    for key, values in before.items():
        old[key[0]] += values
        new[key[0]] += after[key]
    return dict(old), dict(new)


def _by_document(samples: Sequence[Sample]) -> Documents:
    grouped: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for sample in samples:
        grouped[sample.task, sample.doc_hash].append(sample.value)
    return dict(grouped)
