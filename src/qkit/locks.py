"""Locks between qkit processes: one accelerator user at a time, one writer a run folder.

The kernel drops a lock when its process ends, however it ends, so a crash leaves none behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from qkit.errors import LockedError

POLL_S = 1.0


@contextlib.contextmanager
def lock(path: Path, what: str, *, wait_s: float = 0.0) -> Iterator[None]:
    """Hold an exclusive lock on a file while the block runs.

    Args:
        path: Lock file; made if missing, never removed.
        what: The thing being locked, for the message.
        wait_s: Seconds to wait for another process to let go.

    Raises:
        LockedError: Another process holds it (exit code 75, "try again later").
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + wait_s
    descriptor = _open(path)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() >= deadline:
                    holder = os.pread(descriptor, 100, 0).decode(errors="replace").strip()
                    raise LockedError(
                        f"another qkit process ({holder or 'unknown'}) is using {what}",
                        where=path,
                        fix="wait until it has finished, or give --wait SECONDS",
                    ) from None
                time.sleep(POLL_S)
        with contextlib.suppress(OSError):  # another user's lock file is open for reading only
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"pid {os.getpid()}".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    """Open a lock file that several users may share, in a sticky folder such as /tmp.

    Linux refuses O_CREAT on another user's file there (fs.protected_regular), so an existing file
    is opened without it, read-only where need be; flock works on any descriptor.
    """
    for flags in (os.O_RDWR, os.O_RDONLY):
        try:
            return os.open(path, flags | os.O_CLOEXEC)
        except FileNotFoundError:
            break
        except PermissionError:
            continue
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except FileExistsError:
        return _open(path)
    os.fchmod(descriptor, 0o666)  # the umask took the others' right to write
    return descriptor


def accelerator_lock_path() -> Path:
    """Return the machine-wide lock file of the devices this process may use.

    Jobs that see different GPUs (`CUDA_VISIBLE_DEVICES`) do not exclude each other. Set
    `QKIT_LOCK_DIR` where several users share a node and their temporary folders differ.
    """
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "all").replace(",", "-") or "none"
    folder = Path(os.environ.get("QKIT_LOCK_DIR") or tempfile.gettempdir())
    return folder / f"qkit-accelerator-{devices}.lock"
