"""One client or several: a load is split over processes, and their replies are put together.

A single event loop keeps up with some hundred fast streams. Beyond that the load is split over
processes; they share the monotonic clock, so their time stamps need no correction. A process
that dies takes its replies with it: its requests are counted as failed, never left out.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Literal

import aiohttp

from qkit.evaluate.cell_marks import ClientLoad
from qkit.evaluate.client_watch import ClientWatch, worst
from qkit.evaluate.load import Breaker, Load, Replies, Sender, open_session
from qkit.evaluate.stream import RawReply

try:
    import uvloop
except ImportError:  # there is none for some platforms; asyncio's own loop is slower but right
    new_event_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
else:
    new_event_loop = uvloop.new_event_loop

#: Streams that one process keeps up with: 250 of them, a chunk every 20 ms, at some 40
#: microseconds a chunk take half of a core.
STREAMS_PER_PROCESS = 250
#: More processes than this are started only by name.
AUTO_MAX = 8
#: A dead server is believed after so many unanswered requests, or one whole round if larger.
_UNANSWERED_MIN = 3
#: All processes start at one moment, so long after the last was told to.
_START_IN_S = 0.05


@dataclass(frozen=True, slots=True)
class Sent:
    """What became of a load: replies by unit, and how busy the client was."""

    replies: list[Replies]
    client: ClientLoad


class Clients:
    """The client processes of a sweep, as an async context manager.

    Args:
        count: Processes, or "auto": one for each 250 streams, and more after `add`.
    """

    def __init__(self, count: int | Literal["auto"] = "auto") -> None:
        self._wanted = count
        self._least = 1
        self._children: list[_Child] = []
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Clients:
        self._session = open_session()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session:
            await self._session.close()
        for child in self._children:
            child.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        """The session of this process, for calls beside the load."""
        if self._session is None:
            raise RuntimeError("the clients are not open")
        return self._session

    def processes(self, streams: int) -> int:
        """Return how many processes a load of so many streams is split over."""
        if self._wanted != "auto":
            return self._wanted
        expected = max(self._least, math.ceil(streams / STREAMS_PER_PROCESS))
        return min(expected, _auto_limit())

    def add(self, streams: int) -> bool:
        """Use twice as many processes from now on; False where there cannot be more."""
        before = self.processes(streams)
        self._least = 2 * before
        return self.processes(streams) > before

    async def send(
        self, load: Load, *, streams: int, breaker: Breaker, on_done: Callable[[], None]
    ) -> Sent:
        """Send a load and watch the client doing so.

        Args:
            load: What is sent.
            streams: Requests that may be under way at once, by which processes are counted.
            breaker: Of this cell. With several processes each has its own, and the one given
                learns the first reason.
            on_done: Called after every request.
        """
        count = min(self.processes(streams), len(load.units), load.concurrency or len(load.units))
        if count <= 1:
            return await run_load(self.session, load, breaker, on_done)
        while len(self._children) < count:
            self._children.append(_Child())
        parts = split(load, count)
        start_s = time.perf_counter() + _START_IN_S
        sent = await asyncio.gather(
            *(
                asyncio.to_thread(
                    child.run,
                    replace(part, start_s=start_s),
                    breaker_limit(math.ceil(breaker.limit / count)),
                    breaker.reason,
                )
                for child, part in zip(self._children, parts, strict=False)
            )
        )
        for child in [child for child in self._children if not child.is_alive]:
            child.close()
            self._children.remove(child)
        replies: list[Replies] = [()] * len(load.units)
        for number, answer in enumerate(sent):
            replies[number::count] = answer.sent.replies
            breaker.reason = breaker.reason or answer.reason
        for unit in replies:
            for _ in unit:
                on_done()
        client = worst([answer.sent.client for answer in sent])
        return Sent(replies, replace(client, processes=count))


async def run_load(
    session: aiohttp.ClientSession, load: Load, breaker: Breaker, on_done: Callable[[], None]
) -> Sent:
    """Send a load from this process and watch it."""
    watch = ClientWatch()
    async with watch.watching():
        replies = await Sender(session, breaker, on_done).run(load)
    return Sent(replies, watch.load)


def split(load: Load, count: int) -> list[Load]:
    """Deal a load out to processes: every `count`th unit, slot and due time to each."""
    return [
        replace(
            load,
            units=load.units[number::count],
            concurrency=_share(load.concurrency, number, count),
            delays_s=load.delays_s[number::count],
            due_s=load.due_s[number::count],
            max_in_flight=_share(load.max_in_flight, number, count),
        )
        for number in range(count)
    ]


def breaker_limit(streams: int) -> int:
    """Return after how many unanswered requests a server with so many streams is given up."""
    return max(_UNANSWERED_MIN, streams)


def _share(total: int | None, number: int, count: int) -> int | None:
    return None if total is None else max(1, total // count + (number < total % count))


def _auto_limit() -> int:
    """Half of the processors at most: the server may need the others."""
    return max(1, min(AUTO_MAX, len(os.sched_getaffinity(0)) // 2))


# ------------------------------------------------------------------------------- child processes


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a process sends back: its part of the load, and why its breaker opened, if it did."""

    sent: Sent
    reason: str | None


class _Child:
    """One client process and the pipe to it."""

    def __init__(self) -> None:
        # Not forked: this process has threads and an event loop.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(
            target=_serve, args=(theirs,), name="qkit-client", daemon=True
        )
        self._process.start()
        theirs.close()

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def close(self) -> None:
        """End the process, whatever it does, and then the pipe that a thread may wait on."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def run(self, load: Load, limit: int, reason: str | None) -> _Answer:
        """Have a load sent; blocks until its replies are here or the process is dead."""
        try:
            self._pipe.send((load, limit, reason))
            connection.wait([self._pipe, self._process.sentinel])
            if self._pipe.poll():
                answer = self._pipe.recv()
                if isinstance(answer, _Answer):
                    return answer
        except (EOFError, OSError):
            pass  # it died in between
        self._process.join(timeout=2)
        return _Answer(_lost(load, self._process.exitcode), None)


def _lost(load: Load, exit_code: int | None) -> Sent:
    """Return failed replies to everything that a dead process had to send."""
    now = time.perf_counter()
    why = f"the client process that sent it ended with exit code {exit_code}"
    replies = [
        tuple(
            RawReply(start_s=min(load.start_s or now, now), end_s=now, failure="client", error=why)
            for _ in unit
        )
        for unit in load.units
    ]
    return Sent(replies, ClientLoad(0.0, 0.0, 0.0))


def _serve(pipe: connection.Connection) -> None:
    """Send the loads that come through the pipe until it closes; the child's whole life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_serve_loads(pipe))


async def _serve_loads(pipe: connection.Connection) -> None:
    async with open_session() as session:
        while True:
            try:
                load, limit, reason = await asyncio.to_thread(pipe.recv)
            except EOFError:
                return
            breaker = Breaker(limit, reason)
            sent = await run_load(session, load, breaker, lambda: None)
            pipe.send(_Answer(sent, breaker.reason))
