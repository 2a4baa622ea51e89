"""Child processes in a group of their own, ended for certain.

vLLM starts children that outlive a killed parent (reparented, same process group, memory held),
so everything qkit starts leads its own session and is ended by its group's id.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from qkit.measurements import MemoryUse

GRACE_S = 10.0
GUARD = Path(__file__).resolve().parent / "_guard.py"


def start(command: Sequence[str], *, log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a command in a new session, its output appended to `log`.

    The process returned is a guard (`_guard.py`) that leads the session, exits as the command
    does, and ends the whole group should this process die first, even by SIGKILL.
    """
    with log.open("ab") as stream:
        return subprocess.Popen(
            [sys.executable, "-P", str(GUARD), *command],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=dict(env),
            start_new_session=True,
        )


def group_members(pgid: int) -> list[int]:
    """Return the ids of live (not zombie) processes in a process group."""
    members = []
    for process in psutil.process_iter(["pid", "status"]):
        try:
            if process.info["status"] != psutil.STATUS_ZOMBIE and os.getpgid(process.pid) == pgid:
                members.append(process.pid)
        except (ProcessLookupError, PermissionError):
            continue
    return members


def memory_of_group(pgid: int) -> MemoryUse:
    """Return what the processes of a group have taken.

    The kernel keeps each process's largest resident set (VmHWM), so nothing has to be sampled
    while something is measured.
    """
    peaks, shares = [], []
    members = group_members(pgid)
    for pid in members:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            peaks.append(int(status.split("VmHWM:", 1)[1].split()[0]) * 1024)
            shares.append(psutil.Process(pid).memory_full_info().pss)
        except (OSError, IndexError, AttributeError, psutil.Error):
            continue
    return MemoryUse(
        rss_peak_bytes=sum(peaks) if len(peaks) == len(members) and peaks else None,
        pss_bytes=sum(shares) if len(shares) == len(members) and shares else None,
        processes=len(members),
    )


def stop(process: subprocess.Popen[bytes], *, grace_s: float = GRACE_S) -> None:
    """End a process started by `start` and every process left in its group.

    Terminate, wait at most `grace_s`, then kill. Returns when no live process of the group is
    left.
    """
    pgid = process.pid  # the leader of a session leads the group of the same id
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pgid, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline:
        process.poll()
        if not group_members(pgid):
            break
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pgid, signal.SIGKILL)
    process.wait()
    while group_members(pgid):
        time.sleep(0.02)


def is_running_since(pid: int, moment: float) -> bool:
    """Tell whether the process that had an id at a moment (seconds since 1970) still lives.

    A process started later has only inherited the number, as happens after a restart.
    """
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= moment + 1.0
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Turn SIGTERM into SystemExit while the block runs, so that children are stopped.

    Batch schedulers end a job with SIGTERM, whose default action would leave the children alive.
    """

    def leave(signum: int, _frame: object) -> None:
        raise SystemExit(128 + signum)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def tail(path: Path, lines: int) -> str:
    """Return the last lines of a log, or an empty string where there is none."""
    if not path.is_file():
        return ""
    with path.open("rb") as stream:
        stream.seek(0, os.SEEK_END)
        stream.seek(max(0, stream.tell() - 400 * lines))
        text = stream.read().decode("utf-8", errors="replace")
    return "\n".join(text.splitlines()[-lines:])
