"""Sends prepared requests to a server at a fixed concurrency, and watches itself doing so.

The loop does as little as it can while streams run: stamp, keep the bytes, read on. Bodies are
encoded before and replies are parsed after. Times are `time.perf_counter`, which on Linux is one
clock for all processes of a machine.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp

from qkit.evaluate.latency import ClientLoad
from qkit.evaluate.stream import RawReply, TransportFailure

_HEADERS = {
    "Content-Type": "application/json",
    "Accept": "text/event-stream",
    # Nothing is decompressed here, so nothing may be compressed.
    "Accept-Encoding": "identity",
}
#: Servers close an idle connection after some seconds (vLLM after 5). One that is left alone for
#: longer than this is not used again, so that no request is lost to a connection being closed.
_KEEPALIVE_S = 2.0
_WATCH_PERIOD_S = 0.01
#: A failure that is no answer at all, after which the server may be gone for good.
_UNANSWERED: frozenset[TransportFailure] = frozenset({"refused", "timeout"})


def open_session() -> aiohttp.ClientSession:
    """Return a session without a limit on connections, without decompression and time-outs."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None),
        auto_decompress=False,
    )


async def send(
    session: aiohttp.ClientSession, url: str, body: bytes, *, timeout_s: float
) -> RawReply:
    """Send one request and keep what comes back; never raises for what the server does.

    The clock starts before the connection is made or taken from the pool.
    """
    now = time.perf_counter
    raw = RawReply(start_s=now())
    reads = raw.reads
    try:
        async with (
            asyncio.timeout(timeout_s),
            session.post(url, data=body, headers=_HEADERS) as response,
        ):
            raw.http_status = response.status
            read = response.content.readany
            while data := await read():
                reads.append((now(), data))
    except TimeoutError:
        raw.failure, raw.error = "timeout", None
    except aiohttp.ClientConnectorError as error:
        raw.failure, raw.error = "refused", str(error)
    except (aiohttp.ClientError, OSError) as error:
        raw.failure, raw.error = "cut", f"{type(error).__name__}: {error}"
    raw.end_s = now()
    return raw


@dataclass
class Breaker:
    """Stops sending to a server that has given no answer to a whole round of requests.

    Without it a dead server would cost `timeout_s` for every request that is left.
    """

    limit: int
    reason: str | None = None
    _unanswered: int = field(default=0, init=False)

    def note(self, raw: RawReply) -> None:
        """Take the end of a request into account."""
        if raw.failure not in _UNANSWERED:
            self._unanswered = 0
            return
        self._unanswered += 1
        if self._unanswered >= self.limit:
            what = raw.error or "time-out"
            self.reason = f"{self._unanswered} requests in a row went unanswered ({what})"


def not_sent(reason: str) -> RawReply:
    """Return the reply of a request that was never sent because the server is gone."""
    now = time.perf_counter()
    return RawReply(start_s=now, end_s=now, failure="refused", error=f"not sent: {reason}")


async def closed_loop(
    session: aiohttp.ClientSession,
    url: str,
    units: Sequence[Sequence[bytes]],
    *,
    concurrency: int,
    timeout_s: float,
    breaker: Breaker,
    on_done: Callable[[], None] = lambda: None,
) -> list[RawReply]:
    """Send every unit, `concurrency` at a time; a slot sends its next when its last has ended.

    A unit's bodies are sent one after another by the same slot.

    Returns:
        One reply per body, in the order of the units and their bodies.
    """
    replies: list[list[RawReply]] = [[] for _ in units]
    waiting = iter(enumerate(units))

    async def slot() -> None:
        for index, unit in waiting:
            for body in unit:
                if breaker.reason is None:
                    raw = await send(session, url, body, timeout_s=timeout_s)
                    breaker.note(raw)
                else:
                    raw = not_sent(breaker.reason)
                replies[index].append(raw)
                on_done()

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(units))):
            group.create_task(slot())
    return [reply for unit in replies for reply in unit]


class ClientWatch:
    """Measures how late the event loop wakes a sleeper, and the process's CPU time."""

    def __init__(self) -> None:
        self._lags_s: list[float] = []
        self._cpu_s = 0.0
        self._wall_s = 0.0

    @property
    def load(self) -> ClientLoad:
        """What was seen between entering and leaving `watching`."""
        share = self._cpu_s / self._wall_s if self._wall_s > 0 else 0.0
        lags = sorted(self._lags_s) or [0.0]
        return ClientLoad(
            lag_ms_max=lags[-1] * 1000,
            lag_ms_p99=lags[int(0.99 * (len(lags) - 1))] * 1000,
            cpu_share=share,
        )

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch the client while the block runs, with the garbage collector out of the way."""
        collecting = gc.isenabled()
        gc.collect()
        gc.disable()
        task = asyncio.create_task(self._sleep_and_compare())
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self._wall_s = time.perf_counter() - wall
            self._cpu_s = time.process_time() - cpu
            task.cancel()
            if collecting:
                gc.enable()

    async def _sleep_and_compare(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(_WATCH_PERIOD_S)
            self._lags_s.append(time.perf_counter() - before - _WATCH_PERIOD_S)
