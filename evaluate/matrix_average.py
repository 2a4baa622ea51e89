"""The average over suites in the matrix, and its paired difference from the baseline. Pure.

Model cards report it as one figure ("99.4 % recovery") without saying how sure it is. Here it has
the interval that follows from the questions of all suites.
"""

from __future__ import annotations

from collections.abc import Mapping

from qkit.errors import InputError
from qkit.evaluate.figures import DIGITS, figure
from qkit.evaluate.matrix_accuracy import rounded
from qkit.evaluate.matrix_values import Average
from qkit.evaluate.scores import is_fraction, task_weights
from qkit.evaluate.statistics import compare_averages
from qkit.measurements import AccuracyResult


def averaged_suites(baseline: Mapping[str, AccuracyResult]) -> tuple[str, ...]:
    """Return the suites whose scores are averaged: the fractions; none below two."""
    found = tuple(name for name, result in baseline.items() if is_fraction(result))
    return found if len(found) > 1 else ()


def average_row(
    variant: Mapping[str, AccuracyResult],
    baseline: Mapping[str, AccuracyResult],
    *,
    is_baseline: bool,
    margin_points: float,
) -> Average | None:
    """Return the mean score of a row; None below two suites or where the mean would be another one.

    Args:
        variant: The row's results by suite, without those that may not be compared.
        baseline: The baseline's results by suite.
        is_baseline: Whether the row is the baseline itself.
        margin_points: Loss in points up to which a variant counts as non-inferior.
    """
    suites = averaged_suites(baseline)
    if not suites or any(name not in variant or not is_fraction(variant[name]) for name in suites):
        return None
    value = sum(variant[name].headline.value for name in suites) / len(suites)
    if is_baseline:
        return Average(
            suites=suites,
            value=value,
            delta_points=0.0,
            delta_interval=None,
            recovery_percent=100.0 if value else None,
            recovery_interval=None,
            verdict=None,
        )
    try:
        found = compare_averages(
            [
                (baseline[name].samples, variant[name].samples, task_weights(baseline[name]))
                for name in suites
            ]
        )
    except (InputError, ValueError):
        return None  # other questions, or too few for an interval: each suite's mark says so
    return Average(
        suites=suites,
        value=value,
        delta_points=round(found.delta_points, DIGITS),
        delta_interval=rounded(found.interval_points),
        recovery_percent=figure(found.recovery_percent),
        recovery_interval=rounded(found.recovery_interval),
        verdict=found.verdict(margin_points),
    )
