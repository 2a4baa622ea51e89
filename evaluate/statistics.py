"""Statistics of accuracy: errors, intervals and paired differences. Pure functions.

Scores are fractions (0.70); differences are in points (percentage points: 0.70 -> 0.69 is -1.0
point), which is another thing than percent (the same step is -1.4 %). Differences are always
variant minus baseline, on the same questions, so that the questions' own difficulty cancels out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scipy import optimize, stats

from qkit.errors import InputError
from qkit.measurements import Sample

Verdict = Literal["non-inferior", "inferior", "inconclusive"]

CONFIDENCE = 0.95
MARGIN_POINTS = 1.0


@dataclass(frozen=True)
class Interval:
    """A two-sided confidence interval, in the unit of what it is about."""

    low: float
    high: float


@dataclass(frozen=True)
class PairedComparison:
    """A variant against the baseline on the same questions.

    Attributes:
        n: Number of questions.
        baseline: Mean value of the baseline, a fraction.
        variant: Mean value of the variant, a fraction.
        delta_points: 100 * (variant - baseline).
        interval_points: Confidence interval of `delta_points`.
        interval_method: "tango-score" for 0/1 values, "paired-t" for others.
        confidence: Level of the interval.
        relative_percent: 100 * (variant - baseline) / baseline; None where the baseline is 0.
        recovery_percent: 100 * variant / baseline; None where the baseline is 0.
        flips_to_wrong: Questions the baseline had right and the variant has wrong; None where
            values are not 0 or 1.
        flips_to_right: The other way round.
        mcnemar_p: Exact McNemar p-value; None where values are not 0 or 1.
    """

    n: int
    baseline: float
    variant: float
    delta_points: float
    interval_points: Interval
    interval_method: Literal["tango-score", "paired-t"]
    confidence: float
    relative_percent: float | None
    recovery_percent: float | None
    flips_to_wrong: int | None
    flips_to_right: int | None
    mcnemar_p: float | None

    def verdict(self, margin_points: float = MARGIN_POINTS) -> Verdict:
        """Return the verdict against a margin; see `verdict`."""
        return verdict(self.interval_points, margin_points)


def mean_stderr(values: Sequence[float]) -> float | None:
    """Return the standard error of the mean: the sample's deviation (n - 1) over sqrt(n).

    This is what lm-eval prints as `stderr`. For n values of 0 and 1 with mean p it equals
    sqrt(p * (1 - p) / (n - 1)). None below two values.
    """
    n = len(values)
    if n < 2:
        return None
    mean = math.fsum(values) / n
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)


def wilson_interval(successes: int, n: int, confidence: float = CONFIDENCE) -> Interval:
    """Return Wilson's score interval of a proportion, as fractions.

    It keeps its level near 0 and 1, where p +- 1.96 standard errors leaves the range or has no
    width. Source: E. B. Wilson, "Probable inference, the law of succession, and statistical
    inference", JASA 22 (1927) 209-212.

    Raises:
        ValueError: n is below 1, or `successes` is not between 0 and n.
    """
    ci = stats.binomtest(successes, n).proportion_ci(confidence, method="wilson")
    return Interval(float(ci.low), float(ci.high))


def mcnemar_exact(flips_to_wrong: int, flips_to_right: int) -> float:
    """Return the two-sided exact McNemar p-value of two flip counts.

    Where nothing changed but by chance, each flip is as likely to be for the worse as for the
    better, so the count is binomial with p = 0.5. Without flips the p-value is 1. Source:
    Q. McNemar, Psychometrika 12 (1947) 153-157, in its exact conditional form.
    """
    flips = flips_to_wrong + flips_to_right
    if flips == 0:
        return 1.0
    return float(stats.binomtest(flips_to_right, flips, 0.5).pvalue)


def tango_interval(
    flips_to_wrong: int, flips_to_right: int, n: int, confidence: float = CONFIDENCE
) -> Interval:
    """Return Tango's score interval of the difference of two paired proportions, as fractions.

    Unlike the normal interval it has a width where no answer flipped (then it is
    +- z^2 / (n + z^2)) and keeps its level when flips are few, which is the usual case between a
    checkpoint and its quantized form. That it lies above -margin is Tango's test of
    non-inferiority. Source: T. Tango, "Equivalence test and confidence interval for the difference
    in proportions for the paired-sample design", Statistics in Medicine 17 (1998) 891-908.

    Args:
        flips_to_wrong: Pairs of which the first is right and the second wrong.
        flips_to_right: Pairs of which the first is wrong and the second right.
        n: All pairs.
        confidence: Two-sided level.

    Returns:
        Interval of P(second right) - P(first right), within [-1, 1].

    Raises:
        ValueError: n is below 1, or the flips are more than n or negative.
    """
    if n < 1 or min(flips_to_wrong, flips_to_right) < 0 or flips_to_wrong + flips_to_right > n:
        raise ValueError(f"{flips_to_wrong} + {flips_to_right} flips among {n} pairs")
    z = float(stats.norm.ppf(0.5 + confidence / 2))
    estimate = (flips_to_right - flips_to_wrong) / n

    def score(delta: float) -> float:
        """Tango's statistic for a true difference `delta`; it falls as `delta` grows."""
        a = 2 * n
        b = -flips_to_right - flips_to_wrong + (2 * n - flips_to_right + flips_to_wrong) * delta
        c = -flips_to_wrong * delta * (1 - delta)
        # Maximum-likelihood P(first right, second wrong) under the constraint.
        p_wrong = (math.sqrt(max(b * b - 4 * a * c, 0.0)) - b) / (2 * a)
        variance = n * (2 * p_wrong + delta * (1 - delta))
        difference = flips_to_right - flips_to_wrong - n * delta
        if variance <= 0:
            return math.copysign(math.inf, difference) if difference else 0.0
        return difference / math.sqrt(variance)

    def bound(end: float, target: float) -> float:
        """Find where the statistic is `target` between the estimate and an end of the range."""
        if abs(estimate - end) < 1e-12:
            return end
        inner = end * (1 - 1e-12)
        clip = 1e6  # brentq needs finite values at both ends

        def gap(delta: float) -> float:
            return max(-clip, min(clip, score(delta))) - target

        return float(optimize.brentq(gap, min(inner, estimate), max(inner, estimate)))

    return Interval(low=bound(-1.0, z), high=bound(1.0, -z))


def paired_t_interval(
    differences: Sequence[float], confidence: float = CONFIDENCE
) -> Interval | None:
    """Return Student's interval of the mean of paired differences; None below two pairs.

    Source: the paired-differences analysis of E. Miller, "Adding error bars to evals",
    arXiv:2411.00640 (2024), section 4.2, with Student's quantile in place of 1.96.
    """
    stderr = mean_stderr(differences)
    if stderr is None:
        return None
    n = len(differences)
    mean = math.fsum(differences) / n
    half = float(stats.t.ppf(0.5 + confidence / 2, n - 1)) * stderr
    return Interval(mean - half, mean + half)


def recovery_percent(baseline: float, variant: float) -> float | None:
    """Return 100 * variant / baseline; None where the baseline is 0."""
    return None if baseline == 0 else 100 * variant / baseline


def relative_percent(baseline: float, variant: float) -> float | None:
    """Return 100 * (variant - baseline) / baseline; None where the baseline is 0."""
    return None if baseline == 0 else 100 * (variant - baseline) / baseline


def verdict(interval_points: Interval, margin_points: float = MARGIN_POINTS) -> Verdict:
    """Say whether a loss beyond the margin is excluded, shown, or neither.

    Decided on the interval, never on the rounded mean: "non-inferior" where the whole interval
    lies above -margin, "inferior" where it lies below, else "inconclusive".
    """
    if interval_points.low > -margin_points:
        return "non-inferior"
    if interval_points.high < -margin_points:
        return "inferior"
    return "inconclusive"


def compare_values(
    baseline: Sequence[float], variant: Sequence[float], confidence: float = CONFIDENCE
) -> PairedComparison:
    """Compare two sequences of values of the same questions in the same order.

    Values of only 0 and 1 get Tango's interval, flips and the exact McNemar test; other values
    (for example truthfulqa_mc2) get the paired t interval.

    Raises:
        ValueError: The lengths differ, there is no value, or a single value that is not 0 or 1.
    """
    if len(baseline) != len(variant) or not baseline:
        raise ValueError(f"cannot pair {len(baseline)} values with {len(variant)}")
    n = len(baseline)
    mean_baseline = math.fsum(baseline) / n
    mean_variant = math.fsum(variant) / n
    pairs = list(zip(baseline, variant, strict=True))
    to_wrong: int | None = None
    to_right: int | None = None
    p_value: float | None = None
    method: Literal["tango-score", "paired-t"] = "paired-t"
    if all(value in (0.0, 1.0) for pair in pairs for value in pair):
        method = "tango-score"
        to_wrong = sum(1 for before, after in pairs if before > after)
        to_right = sum(1 for before, after in pairs if before < after)
        p_value = mcnemar_exact(to_wrong, to_right)
        interval = tango_interval(to_wrong, to_right, n, confidence)
        # From the counts, so that no rounding of two means shows in the difference.
        delta = (to_right - to_wrong) / n
    else:
        differences = [after - before for before, after in pairs]
        found = paired_t_interval(differences, confidence)
        if found is None:
            raise ValueError("one pair of values that are not 0 or 1 has no interval")
        interval, delta = found, math.fsum(differences) / n
    return PairedComparison(
        n=n,
        baseline=mean_baseline,
        variant=mean_variant,
        delta_points=100 * delta,
        interval_points=Interval(100 * interval.low, 100 * interval.high),
        interval_method=method,
        confidence=confidence,
        relative_percent=relative_percent(mean_baseline, mean_variant),
        recovery_percent=recovery_percent(mean_baseline, mean_variant),
        flips_to_wrong=to_wrong,
        flips_to_right=to_right,
        mcnemar_p=p_value,
    )


def compare_samples(
    baseline: Sequence[Sample], variant: Sequence[Sample], confidence: float = CONFIDENCE
) -> PairedComparison:
    """Pair two results' samples by task and document hash and compare them.

    All samples weigh the same, which is how lm-eval weighs MMLU's subjects. A question that a task
    holds twice is paired in order of appearance.

    Raises:
        InputError: The two were not scored on the same questions, or there is none.
    """
    before, after = _by_document(baseline), _by_document(variant)
    if not before and not after:
        raise InputError("there are no samples to compare", fix="run the accuracy suite again")
    only_before = sum(len(values) for values in before.values()) - _shared(before, after)
    only_after = sum(len(values) for values in after.values()) - _shared(before, after)
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
    keys = list(before)
    return compare_values(
        [value for key in keys for value in before[key]],
        [value for key in keys for value in after[key]],
        confidence,
    )


Documents = dict[tuple[str, str], list[float]]


def _by_document(samples: Sequence[Sample]) -> Documents:
    grouped: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for sample in samples:
        grouped[sample.task, sample.doc_hash].append(sample.value)
    return dict(grouped)


def _shared(before: Documents, after: Documents) -> int:
    return sum(min(len(values), len(after.get(key, ()))) for key, values in before.items())
