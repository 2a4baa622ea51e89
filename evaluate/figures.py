"""Derived figures as they are stored: rounded far below any measurement's noise."""

from __future__ import annotations

#: Significant digits of derived figures.
DIGITS = 6


def ratio(value: float | None, base: float | None) -> float | None:
    """Return value / base; None where either is unknown or the base is 0."""
    return None if value is None or not base else figure(value / base)


def figure(value: float | None) -> float | None:
    """Round a derived figure to six significant digits, far below any measurement's noise."""
    return None if value is None else float(f"{value:.{DIGITS}g}")
