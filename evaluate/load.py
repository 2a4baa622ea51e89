"""Sends prepared requests to a server, in a closed or an open loop.

The loops do as little as they can while streams run: stamp, keep the bytes, read on. Bodies are
encoded before and replies are parsed after. Times are `time.perf_counter`, which on Linux is one
clock for all processes of a machine.

What is sent is a sequence of units: requests that are sent one after another (the turns of a
chat). Most units hold one request.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
from aiohttp.abc import AbstractStreamWriter

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
#: A failure that is no answer at all, after which the server may be gone for good.
_UNANSWERED: frozenset[TransportFailure] = frozenset({"refused", "timeout"})

#: Bodies of requests that are sent one after another.
Bodies = Sequence[bytes]
#: The replies to a unit, in the order of its bodies.
Replies = tuple[RawReply, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """What one client process sends, and when.

    Attributes:
        url: Endpoint.
        units: What is sent.
        timeout_s: Limit of one request.
        concurrency: Slots of a closed loop; None for an open one.
        delays_s: Closed loop: how long each slot waits before its first unit; empty for not.
        due_s: Open loop: when each unit is due, in seconds after the start.
        max_in_flight: Open loop: units under way at most.
        start_s: When it starts, on the clock of all processes; None is at once.
    """

    url: str
    units: tuple[Bodies, ...]
    timeout_s: float
    concurrency: int | None
    delays_s: tuple[float, ...] = ()
    due_s: tuple[float, ...] = ()
    max_in_flight: int | None = None
    start_s: float | None = None


class _StampedBody(aiohttp.BytesPayload):
    """A request's body that notes when it has been written."""

    def __init__(self, body: bytes, raw: RawReply) -> None:
        super().__init__(body)
        self._raw = raw

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Write the whole body (aiohttp before 3.12)."""
        await super().write(writer)
        self._raw.written_s = time.perf_counter()

    async def write_with_length(
        self, writer: AbstractStreamWriter, content_length: int | None
    ) -> None:
        """Write the whole body."""
        await super().write_with_length(writer, content_length)
        self._raw.written_s = time.perf_counter()


def open_session() -> aiohttp.ClientSession:
    """Return a session without a limit on connections, without decompression and time-outs."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None),
        auto_decompress=False,
    )


async def send(
    session: aiohttp.ClientSession,
    url: str,
    body: bytes,
    *,
    timeout_s: float,
    scheduled_s: float | None = None,
) -> RawReply:
    """Send one request and keep what comes back; never raises for what the server does.

    The clock starts before the connection is made or taken from the pool.
    """
    now = time.perf_counter
    raw = RawReply(start_s=now(), scheduled_s=scheduled_s)
    reads = raw.reads
    try:
        async with (
            asyncio.timeout(timeout_s),
            session.post(url, data=_StampedBody(body, raw), headers=_HEADERS) as response,
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


def _nothing() -> None:
    """Take the end of a request that nobody counts."""


@dataclass
class Sender:
    """One client: a session, and the breaker that all its loads share."""

    session: aiohttp.ClientSession
    breaker: Breaker
    on_done: Callable[[], None] = _nothing

    async def run(self, load: Load) -> list[Replies]:
        """Send a load; return the replies to every unit, in the order of the units."""
        start = load.start_s if load.start_s is not None else time.perf_counter()
        await asyncio.sleep(max(0.0, start - time.perf_counter()))
        if load.concurrency is None:
            return await self._open_loop(load, start)
        return await self._closed_loop(load, load.concurrency)

    async def _closed_loop(self, load: Load, concurrency: int) -> list[Replies]:
        """A slot sends its next unit when its last has ended."""
        replies: list[Replies] = [()] * len(load.units)
        waiting = iter(enumerate(load.units))

        async def slot(delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            for index, unit in waiting:
                replies[index] = await self._unit(load, unit)

        slots = min(concurrency, len(load.units))
        async with asyncio.TaskGroup() as group:
            for delay_s in load.delays_s[:slots] or (0.0,) * slots:
                group.create_task(slot(delay_s))
        return replies

    async def _open_loop(self, load: Load, start_s: float) -> list[Replies]:
        """A unit is sent when it is due, whether others have ended or not."""
        replies: list[Replies] = [()] * len(load.units)
        room = asyncio.Semaphore(load.max_in_flight or len(load.units))
        due = [start_s + moment for moment in load.due_s]

        async def one(index: int) -> None:
            async with room:
                replies[index] = await self._unit(load, load.units[index], due[index])

        async with asyncio.TaskGroup() as group, _ticking(due) as ticks:
            for index in range(len(load.units)):
                if self.breaker.reason is None:
                    await ticks.get()
                group.create_task(one(index))
        return replies

    async def _unit(self, load: Load, unit: Bodies, due_s: float | None = None) -> Replies:
        """Send the requests of a unit in turn; after one that failed the rest makes no sense."""
        replies: list[RawReply] = []
        for body in unit:
            if self.breaker.reason is not None:
                raw = not_sent(self.breaker.reason)
            elif replies and (replies[-1].failure or replies[-1].http_status != 200):
                raw = not_sent("the turn before it failed")
            else:
                raw = await send(
                    self.session,
                    load.url,
                    body,
                    timeout_s=load.timeout_s,
                    # A later turn is due when the one before has ended.
                    scheduled_s=None if replies else due_s,
                )
                self.breaker.note(raw)
            replies.append(raw)
            self.on_done()
        return tuple(replies)


@asynccontextmanager
async def _ticking(due_s: Sequence[float]) -> AsyncIterator[asyncio.Queue[None]]:
    """Fill a queue with one item at each of the moments, from a thread.

    Timers of an event loop have a resolution of a millisecond, which is as large as what is to be
    measured; a thread's sleep is precise to a tenth of that.
    """
    loop = asyncio.get_running_loop()
    ticks: asyncio.Queue[None] = asyncio.Queue()
    stop = threading.Event()

    def tick() -> None:
        for moment in due_s:
            if stop.wait(max(0.0, moment - time.perf_counter())):
                return
            loop.call_soon_threadsafe(ticks.put_nowait, None)

    thread = threading.Thread(target=tick, name="arrivals", daemon=True)
    thread.start()
    try:
        yield ticks
    finally:
        stop.set()
        thread.join()
