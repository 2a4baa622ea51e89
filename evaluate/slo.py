"""Service-level objectives: limits on latency, whether a cell meets them, and its goodput.

An objective such as `ttft_p95<200ms,tpot_p95<30ms` is read in two ways:

- A cell meets it when each named statistic over its requests is below its limit.
- Goodput is the rate of requests that each keep all limits by themselves (the request's own TTFT
  below 200 ms and its own TPOT below 30 ms). Source: Y. Zhong et al., "DistServe", OSDI 2024,
  section 2, and vLLM's `bench serve --goodput`, which counts requests the same way. Failed
  requests keep no limit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_UNITS_MS = {"ms": 1.0, "s": 1000.0}
_METRICS = ("ttft", "tpot", "itl", "e2e")
_STATISTICS = ("mean", "p50", "p90", "p95", "p99")
_LIMIT = re.compile(
    r"^(?P<name>[a-z0-9]+)_(?P<statistic>[a-z0-9]+)<(?P<value>[0-9.]+)(?P<unit>.*)$"
)
_EXAMPLE = "write it as ttft_p95<200ms,tpot_p95<30ms"


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit: a metric's statistic must lie below so many milliseconds."""

    metric: str
    statistic: str
    limit_ms: float

    def __str__(self) -> str:
        """Return the limit as it is written."""
        return f"{self.metric}_{self.statistic}<{self.limit_ms:g}ms"


@dataclass(frozen=True, slots=True)
class Objective:
    """Limits that hold together."""

    limits: tuple[Limit, ...]

    def __str__(self) -> str:
        """Return the objective as it is written, all limits in milliseconds."""
        return ",".join(map(str, self.limits))

    def is_met(self, statistic_ms: Callable[[str, str], float | None]) -> bool | None:
        """Tell whether every limit is met.

        Args:
            statistic_ms: A metric and a statistic to its value over the requests of a cell.

        Returns:
            None where no limit is broken but one of the figures is not known.
        """
        values = [statistic_ms(limit.metric, limit.statistic) for limit in self.limits]
        pairs = list(zip(values, self.limits, strict=True))
        if any(value is not None and value >= limit.limit_ms for value, limit in pairs):
            return False
        return None if any(value is None for value in values) else True

    def is_kept(self, figures_ms: Callable[[str], Sequence[float]]) -> bool:
        """Tell whether one request keeps every limit by itself.

        Args:
            figures_ms: A metric to the request's figures: one of each, but for `itl` all its
                gaps, of which the limit's own statistic is taken. A metric that the request does
                not have (TPOT of a single token) breaks no limit.
        """
        for limit in self.limits:
            values = figures_ms(limit.metric)
            if values and statistic_of(values, limit.statistic) >= limit.limit_ms:
                return False
        return True


def statistic_of(values: Sequence[float], statistic: str) -> float:
    """Return the mean or a percentile (linear interpolation) of at least one value."""
    ordered = sorted(values)
    if statistic == "mean":
        return math.fsum(ordered) / len(ordered)
    position = (len(ordered) - 1) * int(statistic[1:]) / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def parse_objective(text: str) -> Objective:
    """Read an objective: limits `METRIC_STATISTIC<NUMBER UNIT`, separated by commas.

    Raises:
        ValueError: A part cannot be read; the message says which and what would be right.
    """
    limits = tuple(_parse_limit(part.strip()) for part in text.split(",") if part.strip())
    if not limits:
        raise ValueError(f"an objective without a limit; {_EXAMPLE}")
    seen = set()
    for limit in limits:
        if (limit.metric, limit.statistic) in seen:
            raise ValueError(f"{limit.metric}_{limit.statistic} is limited twice")
        seen.add((limit.metric, limit.statistic))
    return Objective(limits)


def _parse_limit(part: str) -> Limit:
    match = _LIMIT.match(part.replace(" ", "").replace("<=", "<"))
    if match is None:
        raise ValueError(f"{part!r} is not a limit; {_EXAMPLE}")
    metric, statistic, unit = match["name"], match["statistic"], match["unit"]
    if metric not in _METRICS:
        raise ValueError(f"{part!r}: unknown metric {metric!r}; there are {', '.join(_METRICS)}")
    if statistic not in _STATISTICS:
        raise ValueError(
            f"{part!r}: unknown statistic {statistic!r}; there are {', '.join(_STATISTICS)}"
        )
    if unit not in _UNITS_MS:
        raise ValueError(f"{part!r}: the limit needs a unit, ms or s, not {unit or 'none'!r}")
    try:
        value = float(match["value"])
    except ValueError:
        raise ValueError(f"{part!r}: {match['value']!r} is not a number") from None
    if value <= 0:
        raise ValueError(f"{part!r}: the limit must be above 0")
    return Limit(metric, statistic, value * _UNITS_MS[unit])
