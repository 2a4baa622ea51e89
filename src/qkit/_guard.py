"""Runs one command and ends it when its starter dies: `python -P _guard.py COMMAND...`.

A server or worker that outlives a killed qkit would hold the GPU's memory for ever. The guard leads
the process group, so it takes everything in it along, also children whose parent died before.
It needs the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

POLL_S = 0.2


def main(command: list[str]) -> None:
    """Run the command and exit as it does."""
    starter = os.getppid()
    # The group gets a SIGTERM together with the command, which decides how it ends.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = subprocess.Popen(command, preexec_fn=_default_signals)  # noqa: PLW1509 (no threads)
    while child.poll() is None:
        if os.getppid() != starter:
            os.killpg(0, signal.SIGKILL)
        time.sleep(POLL_S)
    if child.returncode < 0:  # ended by a signal: end by the same one
        with contextlib.suppress(OSError):  # SIGKILL cannot be set and needs not
            signal.signal(-child.returncode, signal.SIG_DFL)
        os.kill(os.getpid(), -child.returncode)
    sys.exit(child.returncode)


def _default_signals() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main(sys.argv[1:])
