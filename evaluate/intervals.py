"""Confidence intervals of scores, paired differences and paired ratios. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, stats

CONFIDENCE = 0.95
#: Resamples of a bootstrap interval, and the seed that makes it the same every time.
RESAMPLES, SEED = 4000, 0


@dataclass(frozen=True)
class Interval:
    """A two-sided confidence interval, in the unit of what it is about."""

    low: float
    high: float

    def scaled(self, factor: float) -> Interval:
        """Return the interval in another unit."""
        return Interval(self.low * factor, self.high * factor)


def z_of(confidence: float = CONFIDENCE) -> float:
    """Return the normal quantile of a two-sided level: 1.96 for 95 %."""
    return float(stats.norm.ppf(0.5 + confidence / 2))


def is_binary(values: Sequence[float]) -> bool:
    """Whether all values are 0 or 1."""
    return all(value in (0.0, 1.0) for value in values)


# --------------------------------------------------------------------------------------- a score


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


def effective_wilson_interval(
    mean: float, stderr: float | None, n: int, confidence: float = CONFIDENCE
) -> Interval:
    """Return Wilson's interval of a proportion whose standard error is not that of n free draws.

    A group such as `mmlu` is a stratified sample: subjects are fixed, questions are drawn within
    them. Wilson's formula then takes the effective number of questions, mean * (1 - mean) /
    stderr^2, that has the stratified standard error. Source: C. Franco, R. Little, T. Louis,
    E. Slud, "Comparative study of confidence intervals for proportions in complex sample surveys",
    Journal of Survey Statistics and Methodology 7 (2019) 334-364.

    Args:
        mean: The score, a fraction.
        stderr: Its stratified standard error; n is taken where it is unknown or 0.
        n: Questions.
        confidence: Two-sided level.
    """
    effective = mean * (1 - mean) / stderr**2 if stderr else float(n)
    z2 = z_of(confidence) ** 2
    center = (mean + z2 / (2 * effective)) / (1 + z2 / effective)
    inside = mean * (1 - mean) / effective + z2 / (4 * effective**2)
    half = math.sqrt(z2 * inside) / (1 + z2 / effective)
    return Interval(max(center - half, 0.0), min(center + half, 1.0))


def stratified_stderr(
    strata: Mapping[str, Sequence[float]], weights: Mapping[str, float]
) -> float | None:
    """Return the standard error of sum(weight * mean) over strata; None where one has one value.

    Source: W. G. Cochran, "Sampling Techniques", 3rd ed. (1977), theorem 5.3, without the finite
    population correction.
    """
    errors = {name: mean_stderr(values) for name, values in strata.items()}
    if any(error is None for error in errors.values()):
        return None
    return math.sqrt(math.fsum((weights[n] * e) ** 2 for n, e in errors.items() if e is not None))


def t_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval | None:
    """Return Student's interval of a mean; None below two values.

    Of paired differences, this is the analysis of E. Miller, "Adding error bars to evals",
    arXiv:2411.00640 (2024), section 4.2, with Student's quantile in place of 1.96.
    """
    stderr = mean_stderr(values)
    if stderr is None:
        return None
    n = len(values)
    mean = math.fsum(values) / n
    half = float(stats.t.ppf(0.5 + confidence / 2, n - 1)) * stderr
    return Interval(mean - half, mean + half)


# ----------------------------------------------------------------- difference of paired proportions


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
    z = z_of(confidence)
    estimate = (flips_to_right - flips_to_wrong) / n

    def score(delta: float) -> float:
        """Tango's statistic for a true difference `delta`; it falls as `delta` grows."""
        a = 2 * n
        b = -flips_to_right - flips_to_wrong + (2 * n - flips_to_right + flips_to_wrong) * delta
        c = -flips_to_wrong * delta * (1 - delta)
        # Maximum-likelihood P(first right, second wrong) under the constraint.
        p_wrong = (math.sqrt(max(b * b - 4 * a * c, 0.0)) - b) / (2 * a)
        variance = n * (2 * p_wrong + delta * (1 - delta))
        return _standardized(flips_to_right - flips_to_wrong - n * delta, variance)

    def bound(end: float, target: float) -> float:
        """Find where the statistic is `target` between the estimate and an end of the range."""
        if abs(estimate - end) < 1e-12:
            return end
        return _solve(score, target, end * (1 - 1e-12), estimate)

    return Interval(low=bound(-1.0, z), high=bound(1.0, -z))


# ---------------------------------------------------------------------- ratio of paired proportions


def tang_ratio_interval(
    both_right: int,
    flips_to_wrong: int,
    flips_to_right: int,
    n: int,
    confidence: float = CONFIDENCE,
) -> Interval | None:
    """Return the score interval of the ratio of two paired proportions; None at a ratio of 0.

    The ratio's counterpart of Tango's interval: it has a width where no answer flipped, which the
    delta method has not. Source: N.-S. Tang, M.-L. Tang, I. Chan, "On tests of equivalence via
    non-unity relative risk for matched-pair design", Statistics in Medicine 22 (2003) 1217-1233, as
    given by M. Fagerland, S. Lydersen, P. Laake, "Recommended tests and confidence intervals for
    paired binomial proportions", Statistics in Medicine 33 (2014) 2850-2875.

    Args:
        both_right: Pairs of which both are right.
        flips_to_wrong: Pairs of which the first is right and the second wrong.
        flips_to_right: Pairs of which the first is wrong and the second right.
        n: All pairs.
        confidence: Two-sided level.

    Returns:
        Interval of P(second right) / P(first right).
    """
    first, second = both_right + flips_to_wrong, both_right + flips_to_right
    if not first or not second:
        return None
    z = z_of(confidence)
    either = first + flips_to_right

    def score(log_ratio: float) -> float:
        """The statistic for a true ratio; it falls as the ratio grows."""
        ratio = math.exp(log_ratio)
        a = n * (1 + ratio)
        b = first * ratio**2 - (second + 2 * flips_to_wrong)
        c = flips_to_wrong * (1 - ratio) * either / n
        # Maximum-likelihood P(first right, second wrong) under the constraint.
        p_wrong = (math.sqrt(max(b * b - 4 * a * c, 0.0)) - b) / (2 * a)
        return _standardized(second - first * ratio, a * p_wrong + either * (ratio - 1))

    estimate = math.log(second / first)
    return Interval(
        math.exp(_solve(score, z, estimate - 20, estimate)),
        math.exp(_solve(score, -z, estimate + 20, estimate)),
    )


def log_ratio_interval(
    baseline: Mapping[str, Sequence[float]],
    variant: Mapping[str, Sequence[float]],
    weights: Mapping[str, float],
    confidence: float = CONFIDENCE,
) -> Interval | None:
    """Return the delta-method interval of the ratio of two weighted means of the same questions.

    Var(log(v / b)) is the variance of v_i / v - b_i / b, the linearized log-ratio of a question, so
    that what the two have in common cancels out. Source: A. W. van der Vaart, "Asymptotic
    Statistics" (1998), theorem 3.1.

    Args:
        baseline: Values by stratum.
        variant: Values of the same questions in the same order.
        weights: Of the strata, with the sum 1.
        confidence: Two-sided level.

    Returns:
        Interval of variant / baseline; None where a mean is not positive, a stratum has a single
        value, or the two do not differ in a single value.
    """
    mean_b = math.fsum(weights[name] * math.fsum(v) / len(v) for name, v in baseline.items())
    mean_v = math.fsum(weights[name] * math.fsum(v) / len(v) for name, v in variant.items())
    if mean_b <= 0 or mean_v <= 0:
        return None
    linear = {
        name: [
            after / mean_v - before / mean_b for before, after in _pairs(baseline, variant, name)
        ]
        for name in baseline
    }
    stderr = stratified_stderr(linear, weights)
    if not stderr:
        return None
    half = z_of(confidence) * stderr
    center = math.log(mean_v / mean_b)
    return Interval(math.exp(center - half), math.exp(center + half))


def bootstrap_log_ratio_interval(
    logs: Sequence[float],
    weights: Sequence[float],
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
) -> Interval | None:
    """Return the percentile bootstrap interval, over documents, of exp(sum(w * log) / sum(w)).

    With the logarithm of each document's perplexity ratio and its number of words as the weight,
    this is the ratio of two perplexities of the whole text. Source: B. Efron, R. Tibshirani, "An
    Introduction to the Bootstrap" (1993), chapter 13.

    Returns:
        The interval, the same every time; None below two documents.
    """
    n = len(logs)
    if n < 2:
        return None
    rng = np.random.default_rng(SEED)
    weight = np.asarray(weights, dtype=float)
    total = weight * np.asarray(logs, dtype=float)
    drawn = np.empty(resamples)
    for index in range(resamples):
        chosen = rng.integers(0, n, n)
        drawn[index] = total[chosen].sum() / weight[chosen].sum()
    tail = (1 - confidence) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return Interval(math.exp(low), math.exp(high))


# --------------------------------------------------------------------------------------- internals


def _standardized(difference: float, variance: float) -> float:
    if variance <= 0:
        return math.copysign(math.inf, difference) if difference else 0.0
    return difference / math.sqrt(variance)


def _solve(score: Callable[[float], float], target: float, end: float, estimate: float) -> float:
    """Find where a falling statistic is `target` between an end of the range and the estimate."""
    clip = 1e6  # brentq needs finite values at both ends

    def gap(at: float) -> float:
        return max(-clip, min(clip, score(at))) - target

    return float(optimize.brentq(gap, min(end, estimate), max(end, estimate)))


def _pairs(
    baseline: Mapping[str, Sequence[float]], variant: Mapping[str, Sequence[float]], name: str
) -> list[tuple[float, float]]:
    return list(zip(baseline[name], variant[name], strict=True))
