"""Did the machine drift during a run? The baseline's first benchmark against its last.

A change counts as drift when it is larger than both

- 5 %, which is how far medians of TPOT and throughput move between repeats on a quiet machine, and
- 1.96 standard errors of the change, from the spread of the two cells' own requests.

The second alone would be too eager, because requests of one cell share its good and bad moments;
the first alone would cry drift at a cell of few, widely spread requests.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from qkit.evaluate.latency import e2e_ms, known, tpot_ms
from qkit.levels import Level
from qkit.measurements import BenchCell, BenchResult, RequestRecord, Stored

#: Percent that medians move between repeats without any cause.
REPEAT_NOISE_PERCENT = 5.0
#: Standard errors of the change that are taken for noise (95 %).
STANDARD_ERRORS = 1.96
#: Standard error of a median over that of a mean, for a normal distribution: sqrt(pi / 2).
MEDIAN_FACTOR = math.sqrt(math.pi / 2)


class Drift(Stored):
    """Change of the baseline between its first and its last benchmark, at one level."""

    concurrency: int | None
    request_rate: float | None = None
    #: 100 * (last - first) / first of the median TPOT; None where either is unknown.
    tpot_percent: float | None
    #: Changes up to this are noise.
    tpot_noise_percent: float
    #: The same of the output tokens per second.
    output_tok_per_s_percent: float | None
    output_tok_per_s_noise_percent: float
    #: Whether either figure moved by more than its noise.
    moved: bool

    @property
    def level(self) -> Level:
        """The load."""
        return Level(self.concurrency, self.request_rate)


def measure_drift(first: BenchResult, last: BenchResult) -> tuple[Drift, ...]:
    """Compare two sweeps of the baseline at every level that both have."""
    again = {cell.level: cell for cell in last.cells}
    return tuple(_drift(cell, again[cell.level]) for cell in first.cells if cell.level in again)


def _drift(first: BenchCell, last: BenchCell) -> Drift:
    # The closed loop's throughput is concurrency * tokens / mean request time, so its relative
    # error is that of the mean request time.
    tpot = _change_percent(first.tpot_ms.p50, last.tpot_ms.p50)
    tpot_noise = _noise([_tpots(first.requests), _tpots(last.requests)], MEDIAN_FACTOR)
    rate = _change_percent(first.output_tok_per_s, last.output_tok_per_s)
    rate_noise = _noise([_durations(first.requests), _durations(last.requests)], 1.0)
    return Drift(
        concurrency=first.concurrency,
        request_rate=first.request_rate,
        tpot_percent=tpot,
        tpot_noise_percent=tpot_noise,
        output_tok_per_s_percent=rate,
        output_tok_per_s_noise_percent=rate_noise,
        moved=_beyond(tpot, tpot_noise) or _beyond(rate, rate_noise),
    )


def _beyond(change: float | None, noise: float) -> bool:
    return change is not None and abs(change) > noise


def _change_percent(first: float | None, last: float | None) -> float | None:
    if first is None or last is None or first == 0:
        return None
    return round(100 * (last - first) / first, 3)


def _noise(cells: Sequence[Sequence[float]], factor: float) -> float:
    """Return the noise of a change between two cells in percent, at least the repeats' own."""
    errors = [factor * _relative_stderr(values) for values in cells if len(values) > 1]
    return round(max(REPEAT_NOISE_PERCENT, 100 * STANDARD_ERRORS * math.hypot(*errors)), 3)


def _relative_stderr(values: Sequence[float]) -> float:
    """Return the standard error of the mean over the mean."""
    mean = statistics.fmean(values)
    return statistics.stdev(values) / math.sqrt(len(values)) / mean if mean > 0 else 0.0


def _tpots(requests: Sequence[RequestRecord]) -> list[float]:
    """Return each successful request's time per output token."""
    return known(tpot_ms(record) for record in requests if record.status == "ok")


def _durations(requests: Sequence[RequestRecord]) -> list[float]:
    """Return each successful request's time to its last token."""
    return known(e2e_ms(record) for record in requests if record.status == "ok")
