"""Figures as text: units, digits and signs, the same in every report."""

from __future__ import annotations

import math
import re

#: What stands for a figure that is not known.
MISSING = "-"


def decimal(value: float | None, digits: int) -> str:
    """Return a number with a fixed count of decimals and thousands separated by commas."""
    return MISSING if value is None else f"{value:,.{digits}f}"


def integer(value: float | None) -> str:
    """Return a whole number with thousands separated by commas."""
    return decimal(value, 0)


def figure(value: float | None) -> str:
    """Return a measured figure with three significant digits or all before the point.

    `9.87`, `45.0`, `388.5`, `1,234`: one decimal more than three digits between 100 and 1,000,
    where throughputs lie that are compared within a few percent.
    """
    if value is None:
        return MISSING
    if abs(value) < 10:
        return f"{value:.2f}"
    return f"{value:,.1f}" if abs(value) < 1000 else f"{value:,.0f}"


def ratio(value: float | None, *, missing: str = MISSING) -> str:
    """Return a ratio to the baseline, `0.82x`."""
    return missing if value is None else f"{value:.2f}x"


def ratio_interval(interval: tuple[float, float] | None) -> str:
    """Return a ratio's interval, `0.79-0.86`; empty where there is none."""
    return "" if interval is None else f"{interval[0]:.2f}-{interval[1]:.2f}"


def percent(fraction: float | None) -> str:
    """Return a fraction as percent with one decimal, without the sign."""
    return MISSING if fraction is None else f"{100 * fraction:.1f}"


def thousands(value: float | None) -> str:
    """Return a large count in thousands, `254 K`, and a smaller one as it is."""
    if value is None or value < 10_000:
        return integer(value)
    return f"{value / 1000:,.0f} K"


def money(value: float | None) -> str:
    """Return an amount with two decimals, below 0.1 with two significant digits, `0.0014`."""
    if value is None or value <= 0:
        return decimal(value, 2)
    return decimal(value, max(2, 1 - math.floor(math.log10(value))))


def size(value: int | None) -> str:
    """Return bytes in the binary unit that fits, `4.53 GiB`."""
    if value is None:
        return MISSING
    amount = float(value)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{figure(amount)} {unit}"
        amount /= 1024
    return f"{figure(amount)} GiB"


def percentile(value: float | None, largest: float | None) -> str:
    """Return a percentile, or the maximum, marked as such, where requests are too few for one."""
    if value is not None:
        return figure(value)
    return MISSING if largest is None else f"{figure(largest)} max"


def difference(points: float | None, interval: tuple[float, float] | None) -> str:
    """Return a signed difference in points and its interval, `-0.7 [-2.1, +0.7]`."""
    if points is None:
        return MISSING
    shown = signed(points)
    return shown if interval is None else f"{shown} [{signed(interval[0])}, {signed(interval[1])}]"


def probability(value: float | None) -> str:
    """Return a p-value, never rounded to 0."""
    if value is None:
        return MISSING
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def humps(name: str) -> list[str]:
    """Split a CamelCase name where a line may break; joined, the parts are the name again.

    `CutlassFP8ScaledMMLinearKernel` is `Cutlass`, `FP8`, `Scaled`, `MM`, `Linear`, `Kernel`.
    """
    return re.findall(r"\s*(?:[A-Z0-9]+(?![a-z])|[A-Z]?[^A-Z\s]+)|\s+", name)


def signed(value: float) -> str:
    """Return one decimal with a sign; what rounds to zero has none."""
    shown = f"{value:+.1f}"
    return "0.0" if float(shown) == 0 else shown


def counted(n: int, noun: str) -> str:
    """Return a count and its noun, `1 flip`, `1,204 flips`."""
    return f"{integer(n)} {noun}{'' if n == 1 else 's'}"


def interval(low_high: tuple[float, float] | None, digits: int, scale: float = 1.0) -> str:
    """Return an interval, `[72.9, 75.4]`; nothing where it is not known."""
    if low_high is None:
        return ""
    low, high = (decimal(value * scale, digits) for value in low_high)
    return f"[{low}, {high}]"


def about(value: float) -> str:
    """Return a count with two significant digits, `4,200`: no more is known of an estimate."""
    return integer(float(f"{value:.2g}"))
