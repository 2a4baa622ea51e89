"""What a paired difference means: p-values, verdicts, and how many questions would settle one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from scipy import stats

from qkit.evaluate.intervals import CONFIDENCE, Interval, z_of

Verdict = Literal["non-inferior", "inferior", "inconclusive"]

MARGIN_POINTS = 1.0
#: Chance to settle a verdict that the number of questions for it is reckoned with.
POWER = 0.8


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


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for being several, in the same order.

    The chance that any of them falls below a level without cause stays below that level. Source:
    S. Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of
    Statistics 6 (1979) 65-70.
    """
    adjusted = [1.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


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


def questions_to_settle(
    delta_points: float,
    variance: float,
    margin_points: float = MARGIN_POINTS,
    *,
    power: float = POWER,
    confidence: float = CONFIDENCE,
) -> int | None:
    """Return how many questions would settle a verdict if the difference stayed as it is.

    n = (z(confidence) + z(power))^2 * variance / (delta + margin)^2, the number for a matched-pairs
    test of non-inferiority or of its opposite; but at least z^2 * (1 / margin - 1), below which
    Tango's interval does not fit above -margin even without a flip. Source: Y. Lu, J. Bean, "On the
    sample size for one-sided equivalence of sensitivities based upon McNemar's test", Statistics in
    Medicine 14 (1995) 1831-1839.

    Args:
        delta_points: Observed difference.
        variance: Of one question's difference, as fractions; flips / n - delta^2 for right and
            wrong.
        margin_points: Loss that is allowed.
        power: Chance that the interval of so many questions settles it.
        confidence: Two-sided level of the interval.

    Returns:
        The number; None where the difference lies on the margin, which no number settles.
    """
    distance = (delta_points + margin_points) / 100
    if math.isclose(distance, 0, abs_tol=1e-9):
        return None
    z = z_of(confidence)
    needed = (z + float(stats.norm.ppf(power))) ** 2 * variance / distance**2
    margin = margin_points / 100
    least = z * z * (1 / margin - 1) if 0 < margin < 1 else 1.0
    return math.ceil(max(needed, least))


def recovery_percent(baseline: float, variant: float) -> float | None:
    """Return 100 * variant / baseline; None where the baseline is 0."""
    return None if baseline == 0 else 100 * variant / baseline


def relative_percent(baseline: float, variant: float) -> float | None:
    """Return 100 * (variant - baseline) / baseline; None where the baseline is 0."""
    return None if baseline == 0 else 100 * (variant - baseline) / baseline
