"""Processes of a run killed on purpose: waiting for the moment, and who is left after it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

#: A run that takes this long hangs.
HANGS_AFTER_S = 300.0
_POLL_S = 0.002


def wait_for(event: Callable[[], bool], process: subprocess.Popen[bytes]) -> bool:
    """Wait for an event of a run; tell whether it came before the run's end."""
    deadline = time.monotonic() + HANGS_AFTER_S
    while time.monotonic() < deadline:
        # Asked before the event: a run may bring it about with its last act.
        over = process.poll() is not None
        if event():
            return True
        if over:
            return False
        time.sleep(_POLL_S)
    return False


def family(pid: int) -> list[int]:
    """Return the process ids of a run: its own and those of all its descendants."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return [pid]


def survivors(root: Path, pids: Sequence[int], within_s: float) -> list[str]:
    """Wait until no process of a killed run is left; return the command lines of those that are.

    Args:
        root: The run's folder; a process with it in its command line belongs to the run.
        pids: Processes that belonged to the run when it was killed.
        within_s: Seconds to wait.
    """
    deadline = time.monotonic() + within_s
    while left := _living(root, pids):
        if time.monotonic() > deadline:
            return left
        time.sleep(0.05)
    return []


def _living(root: Path, pids: Sequence[int]) -> list[str]:
    found = []
    for process in psutil.process_iter(["pid", "status", "cmdline"]):
        command = " ".join(process.info["cmdline"] or ())
        ours = process.pid in pids or str(root) in command
        alive = process.info["status"] != psutil.STATUS_ZOMBIE and process.pid != os.getpid()
        if ours and alive:
            found.append(command)
    return found
