"""The search for the largest load that meets an objective: doubling, then bisection. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from qkit.levels import Level
from qkit.measurements import LoadSearch

#: The search over rates ends when the bracket is this narrow.
RATE_RATIO_MIN = 1.1
#: Significant digits of a rate that is tried.
_RATE_DIGITS = 3


def bracket(verdicts: Mapping[Level, bool | None]) -> tuple[Level | None, Level | None]:
    """Return the largest load below which all met the objective, and the smallest that did not.

    Loads above the first that fails do not count, whatever they did: a load that meets an
    objective only by luck above one that does not is none to rely on. A cell that cannot be
    judged (its requests failed) did not meet it.
    """
    met = unmet = None
    for level in sorted(verdicts, key=lambda level: level.value):
        if not verdicts[level]:
            unmet = level
            break
        met = level
    return met, unmet


def next_level(verdicts: Mapping[Level, bool | None]) -> Level | None:
    """Return the load to try next, or None where the bracket is as narrow as it gets.

    While all loads meet the objective the largest is doubled; then the bracket is halved:
    concurrency in the middle, rates at the geometric middle. Nothing below the lowest is tried.
    """
    met, unmet = bracket(verdicts)
    if met is None:
        return None
    if unmet is None:
        return _like(met, 2 * met.value)
    if met.is_open:
        if unmet.value / met.value <= RATE_RATIO_MIN:
            return None
        middle = math.sqrt(met.value * unmet.value)
        level = _like(met, float(f"{middle:.{_RATE_DIGITS}g}"))
    else:
        level = _like(met, (met.value + unmet.value) // 2)
    return None if level in verdicts else level


def conclude(objective: str, verdicts: Mapping[Level, bool | None]) -> LoadSearch:
    """Say what the search found.

    "not met at the lowest" and "met at the highest tried" are outcomes, not numbers: the largest
    load lies beyond what was tried, so it is not known.
    """
    met, unmet = bracket(verdicts)
    if met is None:
        outcome = "not met at the lowest"
    elif unmet is None:
        outcome = "met at the highest tried"
    else:
        outcome = "found"
    return LoadSearch(
        slo=objective,
        over="request_rate" if any(level.is_open for level in verdicts) else "concurrency",
        outcome=outcome,
        largest_load=met.value if met and unmet else None,
        highest_met=met.value if met else None,
        lowest_unmet=unmet.value if unmet else None,
        tried=tuple(sorted(level.value for level in verdicts)),
    )


def _like(level: Level, value: float) -> Level:
    return Level(request_rate=value) if level.is_open else Level(concurrency=int(value))
