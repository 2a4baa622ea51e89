"""Repeats of a cell: the interval of a figure over them, and when there are enough. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from qkit.evaluate.statistics import paired_t_interval


def interval_95(values: Sequence[float | None]) -> tuple[float, float] | None:
    """Return Student's 95 % interval of a figure's mean over repeats.

    None below two repeats, and where a repeat does not have the figure.
    """
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    found = paired_t_interval(known)  # of one sample: the differences are the values
    return None if found is None else (found.low, found.high)


def half_width_percent(values: Sequence[float | None]) -> float | None:
    """Return the interval's half width in percent of the mean; None where it is not known."""
    found = interval_95(values)
    if found is None:
        return None
    low, high = found
    middle = (low + high) / 2
    return None if middle == 0 else 100 * (high - low) / 2 / abs(middle)


def is_enough(figures: Sequence[Sequence[float | None]], target_percent: float) -> bool:
    """Tell whether every figure's half width is at most the target.

    Args:
        figures: For each figure (throughput, median TPOT) its values over the repeats. A figure
            that no repeat has (TPOT of single tokens) is not waited for.
        target_percent: Largest half width, in percent of the mean.
    """
    widths = [
        half_width_percent(values)
        for values in figures
        if any(value is not None for value in values)
    ]
    return bool(widths) and all(width is not None and width <= target_percent for width in widths)
