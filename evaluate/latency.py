"""Figures of requests and of sets of them, from their records: pure arithmetic.

Definitions, per request and on the client's side:

- ttft: request sent to the first chunk that carries a token. In an open loop it counts from when
  the request was due, so that a client or server that falls behind does not look fast (the
  "coordinated omission" of G. Tene, "How not to measure latency").
- e2e: from the same moment to the last chunk that carries a token.
- tpot: (e2e - ttft) / (output tokens - 1); undefined below two tokens.
- itl: gaps between chunks that carry a token, pooled over requests; per chunk, not per token.

Only requests with status "ok" enter a figure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from qkit.measurements import Distribution, RequestRecord, SteadyWindow
from qkit.suites import FEWEST_VALUES

_EMPTY = Distribution(n=0, mean=None, p50=None, p90=None, p95=None, p99=None, max=None)


def distribution(values: Iterable[float]) -> Distribution:
    """Return mean, maximum and percentiles (linear interpolation between order statistics).

    A percentile that n values do not support (p90 below 10, p95 below 20, p99 below 100) is None.
    """
    ordered = sorted(values)
    n = len(ordered)
    if n == 0:
        return _EMPTY

    def percentile(q: int) -> float | None:
        if n < FEWEST_VALUES.get(f"p{q}", 1):
            return None
        position = (n - 1) * q / 100
        low = math.floor(position)
        high = min(low + 1, n - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (position - low)

    return Distribution(
        n=n,
        mean=math.fsum(ordered) / n,
        p50=percentile(50),
        p90=percentile(90),
        p95=percentile(95),
        p99=percentile(99),
        max=ordered[-1],
    )


def due_s(record: RequestRecord) -> float:
    """When a request's time begins: when it was due, or in a closed loop when it was sent."""
    return record.start_s if record.scheduled_s is None else record.scheduled_s


def ttft_ms(record: RequestRecord) -> float | None:
    """Time to first token in milliseconds, or None without a token."""
    if record.first_token_s is None:
        return None
    return (record.first_token_s - due_s(record)) * 1000


def e2e_ms(record: RequestRecord) -> float | None:
    """Time to the last token in milliseconds, or None without a token."""
    if record.last_token_s is None:
        return None
    return (record.last_token_s - due_s(record)) * 1000


def tpot_ms(record: RequestRecord) -> float | None:
    """Time per output token after the first in milliseconds, or None below two tokens."""
    if record.first_token_s is None or record.last_token_s is None:
        return None
    if record.output_tokens is None or record.output_tokens < 2:
        return None
    return (record.last_token_s - record.first_token_s) * 1000 / (record.output_tokens - 1)


def itl_ms(record: RequestRecord) -> list[float]:
    """Gaps between token-carrying chunks in milliseconds."""
    return [(later - earlier) * 1000 for earlier, later in pairwise(record.chunk_s)]


def dispatch_ms(record: RequestRecord) -> float | None:
    """Time until a request's body had been handed to the operating system, or None if never."""
    return None if record.written_s is None else (record.written_s - due_s(record)) * 1000


def figures_ms(record: RequestRecord, metric: str) -> list[float]:
    """Return a request's figures of a metric: "ttft", "tpot", "e2e" (at most one), or "itl"."""
    if metric == "itl":
        return itl_ms(record)
    figure = {"ttft": ttft_ms, "tpot": tpot_ms, "e2e": e2e_ms}[metric](record)
    return [] if figure is None else [figure]


def in_flight_max(records: Sequence[RequestRecord]) -> int:
    """Return the most requests that were under way at one moment."""
    # An end at the moment of a start comes first: the slot that becomes free is taken again.
    changes = sorted([(r.start_s, 1) for r in records] + [(r.end_s, -1) for r in records])
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of a cell, seconds on the run's clock."""

    opens_s: float
    closes_s: float

    @property
    def duration_s(self) -> float:
        """Length in seconds."""
        return self.closes_s - self.opens_s

    def holds(self, moment: float | None) -> bool:
        """Whether a moment lies inside; the opening moment does not."""
        return moment is not None and self.opens_s < moment <= self.closes_s


def steady_window(concurrency: int | None, records: Sequence[RequestRecord]) -> Window | None:
    """Return when the load of one repeat was full, or None if it never was.

    Closed loop: it opens when the last slot gets its first request, and closes at the first end
    after the last request was sent. Open loop (no concurrency): it opens when the first request
    has ended, because from then on requests leave as well as come, and closes when the last is
    sent.
    """
    starts = sorted(record.start_s for record in records)
    if concurrency is None:
        window = Window(min(record.end_s for record in records), starts[-1])
    elif len(starts) < concurrency:
        return None
    else:
        opens = starts[concurrency - 1]
        # Strictly after: the end that made room for the last request may bear the same stamp.
        closes = min((r.end_s for r in records if r.end_s > starts[-1]), default=opens)
        window = Window(opens, closes)
    return window if window.duration_s > 0 else None


def tokens_inside(window: Window, records: Iterable[RequestRecord]) -> float:
    """Return the output tokens of successful requests that came inside a window.

    A chunk counts as output tokens / chunks of its request, at its arrival.
    """
    tokens = 0.0
    for record in records:
        if record.status == "ok" and record.chunk_s and record.output_tokens is not None:
            inside = sum(map(window.holds, record.chunk_s))
            tokens += record.output_tokens * inside / len(record.chunk_s)
    return tokens


def steady_figures(
    concurrency: int | None, repeats: Sequence[Sequence[RequestRecord]]
) -> SteadyWindow | None:
    """Return the figures of the steady windows of a cell's repeats together."""
    seconds = tokens = 0.0
    inside: list[RequestRecord] = []
    for records in repeats:
        window = steady_window(concurrency, records)
        if window is not None:
            seconds += window.duration_s
            tokens += tokens_inside(window, records)
            inside += [r for r in records if r.status == "ok" and window.holds(r.first_token_s)]
    if not seconds:
        return None
    return SteadyWindow(
        duration_s=seconds,
        n=len(inside),
        ttft_ms=distribution(known(map(ttft_ms, inside))),
        tpot_ms=distribution(known(map(tpot_ms, inside))),
        output_tok_per_s=tokens / seconds,
    )


def known(values: Iterable[float | None]) -> list[float]:
    """Return the values that are known."""
    return [value for value in values if value is not None]
