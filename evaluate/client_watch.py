"""A client's watch on itself: how late it stamps what arrives, and how much CPU time it takes."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from qkit.evaluate.cell_marks import ClientLoad

_PERIOD_S = 0.01
_STAMP = struct.Struct("d")


class ClientWatch:
    """Measures how late the event loop reads what a socket holds, and the process's CPU time.

    A thread writes to a socket every 10 ms, and the loop reads it like any stream. The time from
    when the thread was due to wake until the loop has read is what a chunk that arrives at that
    moment waits for its stamp. (A timer of the loop itself would add its own millisecond.)
    """

    def __init__(self) -> None:
        self._lags_s: list[float] = []
        self._cpu_s = 0.0
        self._wall_s = 0.0

    @property
    def load(self) -> ClientLoad:
        """What was seen between entering and leaving `watching`."""
        share = self._cpu_s / self._wall_s if self._wall_s > 0 else 0.0
        lags = sorted(self._lags_s) or [0.0]
        last = len(lags) - 1
        return ClientLoad(
            lag_ms_max=lags[-1] * 1000,
            lag_ms_p99=lags[int(0.99 * last)] * 1000,
            lag_ms_p50=lags[int(0.5 * last)] * 1000 if self._lags_s else None,
            cpu_share=share,
        )

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch the client while the block runs, with the garbage collector out of the way."""
        collecting = gc.isenabled()
        gc.collect()
        gc.disable()
        loop = asyncio.get_running_loop()
        reader, writer = socket.socketpair()
        reader.setblocking(False)
        loop.add_reader(reader, self._read, reader)
        stop = threading.Event()
        thread = threading.Thread(target=_beat, args=(writer, stop), name="watch", daemon=True)
        wall, cpu = time.perf_counter(), time.process_time()
        thread.start()
        try:
            yield
        finally:
            self._wall_s = time.perf_counter() - wall
            self._cpu_s = time.process_time() - cpu
            stop.set()
            thread.join()
            loop.remove_reader(reader)
            reader.close()
            writer.close()
            if collecting:
                gc.enable()

    def _read(self, reader: socket.socket) -> None:
        data = reader.recv(64 * _STAMP.size)
        now = time.perf_counter()
        self._lags_s += [now - due for (due,) in _STAMP.iter_unpack(data)]


def _beat(writer: socket.socket, stop: threading.Event) -> None:
    """Write, every period, when that was due."""
    due = time.perf_counter() + _PERIOD_S
    while not stop.wait(max(0.0, due - time.perf_counter())):
        writer.send(_STAMP.pack(due))
        # Late beats are not made up for: each is a sample of its own moment.
        due = max(due, time.perf_counter()) + _PERIOD_S


def worst(loads: list[ClientLoad]) -> ClientLoad:
    """Return the load of several processes: of each figure the worst one's."""
    return ClientLoad(
        lag_ms_max=max(load.lag_ms_max for load in loads),
        lag_ms_p99=max(load.lag_ms_p99 for load in loads),
        lag_ms_p50=max((load.lag_ms_p50 for load in loads if load.lag_ms_p50), default=None),
        cpu_share=max(load.cpu_share for load in loads),
        processes=max(load.processes for load in loads),
    )
