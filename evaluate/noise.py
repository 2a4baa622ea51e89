"""The noise floor of accuracy: the baseline against itself, measured a second time. Pure.

A served model does not answer the same question the same way twice: batches of other requests
change the order of floating-point sums, and a near tie tips over. A difference of a variant that is
no larger is no effect of its quantization.
"""

from __future__ import annotations

import math

from qkit.errors import InputError
from qkit.evaluate.comparable import differences
from qkit.evaluate.figures import figure
from qkit.evaluate.intervals import z_of
from qkit.evaluate.matrix_values import Flips, NoiseFloor
from qkit.evaluate.pairing import VariantInput, pair_accuracy
from qkit.evaluate.statistics import Comparison
from qkit.measurements import Measurement
from qkit.recipe import again, is_again


def noise_floors(baseline: VariantInput | None) -> dict[str, NoiseFloor]:
    """Return the noise floor of every accuracy suite that the baseline was measured on twice."""
    suites = baseline.suites if baseline else {}
    found = {
        name: noise_floor(first, suites[again(name)])
        for name, first in suites.items()
        if first.accuracy and not is_again(name) and again(name) in suites
    }
    return {name: floor for name, floor in found.items() if floor}


def noise_floor(first: Measurement, second: Measurement) -> NoiseFloor | None:
    """Compare a suite's two measurements of one variant; None where they are not comparable."""
    if not (first.accuracy and second.accuracy) or differences(first, second):
        return None
    try:
        comparison = pair_accuracy(first.accuracy, second.accuracy).comparison
    except (InputError, ValueError):
        return None
    if comparison is None:
        return None
    flips = None
    if comparison.flips_to_wrong is not None and comparison.flips_to_right is not None:
        flips = Flips(to_wrong=comparison.flips_to_wrong, to_right=comparison.flips_to_right)
    return NoiseFloor(
        n=comparison.n,
        flips=flips,
        delta_points=float(figure(comparison.delta_points) or 0),
        spread_points=float(figure(spread_points(comparison)) or 0),
    )


def spread_points(comparison: Comparison) -> float:
    """Return how far a score moves by such flips alone, in points: 95 % of the time no further.

    Each of the f questions that flip goes either way by chance, so the score's standard deviation
    is sqrt(f) / n; other values take the root mean square of their differences. It is never less
    than the difference that was seen.
    """
    delta = comparison.delta_points
    if comparison.flips_to_wrong is not None and comparison.flips_to_right is not None:
        flips = comparison.flips_to_wrong + comparison.flips_to_right
        deviation = 100 * math.sqrt(flips) / comparison.n
    else:
        square = (comparison.variance or 0.0) + (delta / 100) ** 2
        deviation = 100 * math.sqrt(square / comparison.n)
    return max(z_of() * deviation, abs(delta))
