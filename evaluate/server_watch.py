"""Watches a server while a cell is measured: `/metrics` and NVML, from a thread of its own.

Nothing may disturb the client's time stamps or the server, so what is fetched is only kept, and
read after the cell; and scraping takes at most 2 % of the time, because vLLM writes the answer in
the very event loop that streams the tokens.
"""

from __future__ import annotations

import asyncio
import http.client
import threading
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from qkit.evaluate.gpu_meter import GpuMeter, GpuReading, open_meter, summarize_gpus
from qkit.evaluate.server_metrics import Reading, parse_reading
from qkit.measurements import GpuUse, RequestRecord, ServerSample, ServerSide

#: Time between two samples, at least.
PERIOD_S = 0.5
#: A sample that took so long is followed by a pause of this many times as long.
PAUSE_PER_SCRAPE = 49
TIMELINE_MAX = 240
_TIMEOUT_S = 5.0
#: The counters are read after the cell until they stand still, which takes the server a moment.
_SETTLE_TRIES = 4
_SETTLE_S = 0.05


@dataclass(frozen=True, slots=True)
class _Scrape:
    """One answer of the server's, not yet read."""

    at_s: float
    took_s: float
    text: bytes | None


class ServerWatch:
    """What was seen; use it through `watching_server`."""

    def __init__(self, root: str, meter: GpuMeter | None) -> None:
        parts = urlsplit(root)
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        self._connection = kind(parts.hostname or "", parts.port, timeout=_TIMEOUT_S)
        self._path = f"{parts.path}/metrics"
        self._meter = meter
        self._scrapes: list[_Scrape] = []
        self._gpu: list[GpuReading] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="qkit-server-watch", daemon=True)

    def begin(self) -> None:
        """Take the first sample, and more from then on."""
        self._sample()
        self._thread.start()

    def end(self) -> None:
        """Take the last sample, once the counters stand still."""
        self._stop.set()
        self._thread.join()
        before = self._sample()
        for _ in range(_SETTLE_TRIES):
            time.sleep(_SETTLE_S)
            after = self._sample(replace=True)
            if after is None or after == before:
                break
            before = after
        self._connection.close()
        if self._meter is not None:
            self._meter.close()

    def result(self) -> ServerSide:
        """Read what was kept."""
        readings = [
            Reading() if s.text is None else parse_reading(s.text.decode(errors="replace"))
            for s in self._scrapes
        ]
        times = [s.at_s for s in self._scrapes]
        gpu = summarize_gpus(self._meter.count, self._gpu) if self._meter else None
        took = [s.took_s for s in self._scrapes[1:-1] if s.text is not None]
        return summarize_side(times, readings, gpu=gpu, took_s=took)

    def _run(self) -> None:
        pause = PERIOD_S
        while not self._stop.wait(pause):
            self._sample()
            pause = max(PERIOD_S, PAUSE_PER_SCRAPE * self._scrapes[-1].took_s)

    def _sample(self, *, replace: bool = False) -> float | None:
        """Keep one sample, and return the generated tokens in it where it is worth to know."""
        at_s = time.perf_counter()
        text = self._fetch()
        scrape = _Scrape(at_s, time.perf_counter() - at_s, text)
        if replace:
            self._scrapes.pop()
        self._scrapes.append(scrape)
        if self._meter is not None and not replace:
            self._gpu.append(self._meter.read(at_s))
        if not self._stop.is_set() or text is None:
            return None
        return parse_reading(text.decode(errors="replace")).generation_tokens

    def _fetch(self) -> bytes | None:
        try:
            self._connection.request("GET", self._path, headers={"Accept": "text/plain"})
            response = self._connection.getresponse()
            body = response.read()
        except (OSError, http.client.HTTPException):
            self._connection.close()  # the next request opens it again
            return None
        return body if response.status == 200 else None


@asynccontextmanager
async def watching_server(root: str, *, gpus: int = 0) -> AsyncIterator[ServerWatch]:
    """Watch a server while the block runs; `result` of what is yielded is there afterwards.

    Args:
        root: The server's root URL.
        gpus: GPUs of this machine that the server runs on; 0 for none, or another machine.
    """
    watch = ServerWatch(root, open_meter(gpus))
    await asyncio.to_thread(watch.begin)
    try:
        yield watch
    finally:
        await asyncio.to_thread(watch.end)


def summarize_side(
    times: Sequence[float],
    readings: Sequence[Reading],
    *,
    gpu: GpuUse | None = None,
    took_s: Sequence[float] = (),
) -> ServerSide:
    """Sum the samples of a cell up.

    Args:
        times: When each was taken, in seconds.
        readings: Two or more; counters are the last less the first, gauges those in between.
        gpu: What the GPUs did.
        took_s: What each sample in between took.
    """
    first, last = readings[0], readings[-1]
    inside = list(zip(times, readings, strict=True))[1:-1]
    running = _known(r.running for _, r in inside)
    waiting = _known(r.waiting for _, r in inside)
    usage = _known(r.kv_cache_usage for _, r in inside)
    stride = -(-len(inside) // TIMELINE_MAX) or 1
    return ServerSide(
        duration_s=round(times[-1] - times[0], 6),
        samples=len(running),
        scrape_ms=round(1000 * sum(took_s) / len(took_s), 3) if took_s else None,
        running_mean=_mean(running),
        running_max=max(running, default=None),
        waiting_mean=_mean(waiting),
        waiting_max=max(waiting, default=None),
        kv_cache_usage_max=max(usage, default=None),
        prompt_tokens=_growth(first.prompt_tokens, last.prompt_tokens),
        generation_tokens=_growth(first.generation_tokens, last.generation_tokens),
        prefix_query_tokens=_growth(first.prefix_query_tokens, last.prefix_query_tokens),
        prefix_hit_tokens=_growth(first.prefix_hit_tokens, last.prefix_hit_tokens),
        preemptions=_growth(first.preemptions, last.preemptions),
        draft_tokens=_growth(first.draft_tokens, last.draft_tokens),
        accepted_tokens=_growth(first.accepted_tokens, last.accepted_tokens),
        gpu=gpu,
        timeline=tuple(
            ServerSample(
                at_s=round(at - times[0], 3),
                running=reading.running,
                waiting=reading.waiting,
                kv_cache_usage=reading.kv_cache_usage,
            )
            for at, reading in inside[::stride]
        ),
    )


def token_mark(side: ServerSide, records: Sequence[RequestRecord]) -> str | None:
    """Return a mark where server and client count other output tokens, or None.

    Only where every request ended well and its tokens are the server's own count: what a failed
    request had got of its answer is not known here.
    """
    counted = side.generation_tokens
    tokens = [r.output_tokens for r in records if r.status == "ok" and not r.tokens_estimated]
    known = [count for count in tokens if count is not None]
    if counted is None or len(known) != len(records) or counted == sum(known):
        return None
    return (
        f"the server counted {counted:.0f} generated tokens and the client {sum(known)}: something "
        "else uses the server, or tokens were lost"
    )


def combine_sides(sides: Sequence[ServerSide]) -> ServerSide | None:
    """Combine the repeats of a cell: counters add up, means weigh by samples; None without any."""
    if not sides:
        return None
    if len(sides) == 1:
        return sides[0]

    def total(name: str) -> float | None:
        values = [getattr(side, name) for side in sides]
        return None if None in values else float(sum(values))

    def largest(name: str) -> float | None:
        return max((v for side in sides if (v := getattr(side, name)) is not None), default=None)

    def mean(name: str) -> float | None:
        pairs = [(v, s.samples) for s in sides if (v := getattr(s, name)) is not None and s.samples]
        return sum(v * n for v, n in pairs) / sum(n for _, n in pairs) if pairs else None

    duration = sum(side.duration_s for side in sides)
    return ServerSide(
        duration_s=duration,
        samples=sum(side.samples for side in sides),
        scrape_ms=mean("scrape_ms"),
        running_mean=mean("running_mean"),
        running_max=largest("running_max"),
        waiting_mean=mean("waiting_mean"),
        waiting_max=largest("waiting_max"),
        kv_cache_usage_max=largest("kv_cache_usage_max"),
        prompt_tokens=total("prompt_tokens"),
        generation_tokens=total("generation_tokens"),
        prefix_query_tokens=total("prefix_query_tokens"),
        prefix_hit_tokens=total("prefix_hit_tokens"),
        preemptions=total("preemptions"),
        draft_tokens=total("draft_tokens"),
        accepted_tokens=total("accepted_tokens"),
        gpu=_combined_gpus([side.gpu for side in sides], [side.duration_s for side in sides]),
        timeline=sides[0].timeline,
    )


def _combined_gpus(uses: Sequence[GpuUse | None], durations: Sequence[float]) -> GpuUse | None:
    found = [(use, seconds) for use, seconds in zip(uses, durations, strict=True) if use]
    if not found:
        return None

    def mean(name: str) -> float | None:
        pairs = [(v, s) for use, s in found if (v := getattr(use, name)) is not None]
        return sum(v * s for v, s in pairs) / sum(s for _, s in pairs) if pairs else None

    energy = [use.energy_j for use, _ in found]
    known = [joules for joules in energy if joules is not None]
    return GpuUse(
        count=found[0][0].count,
        utilisation_percent=mean("utilisation_percent"),
        power_w_mean=mean("power_w_mean"),
        power_w_max=max(
            (u.power_w_max for u, _ in found if u.power_w_max is not None), default=None
        ),
        energy_j=sum(known) if len(known) == len(energy) else None,
        memory_bytes_max=max(
            (u.memory_bytes_max for u, _ in found if u.memory_bytes_max is not None), default=None
        ),
    )


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _growth(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None or after < before else after - before
