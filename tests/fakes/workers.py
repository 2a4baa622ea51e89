"""Worker entries that succeed and fail in every way a real one can.

`qkit.worker` runs them as `fakes.workers:NAME` with `tests/` on the worker's PYTHONPATH.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Request:
    folder: str
    number: int


@dataclass(frozen=True)
class Result:
    number: int


REQUEST = Request
PACKAGES = ("click", "a-package-that-does-not-exist")


def double(request: Request, progress) -> Result:
    progress("doubling", 0, 1)
    print("a line for the log")
    progress("doubling", 1, 1)
    return Result(2 * request.number)


def fail(request: Request, progress) -> Result:
    raise ValueError("layer 3 is not finite")


def die(request: Request, progress) -> Result:
    print("about to exit", flush=True)
    os._exit(7)


def be_killed(request: Request, progress) -> Result:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def end_quietly(request: Request, progress) -> Result:
    os._exit(0)


def garbage(request: Request, progress) -> Result:
    (Path(request.folder) / "result.json").write_text("}{")
    os._exit(0)


def other_schema(request: Request, progress) -> Result:
    (Path(request.folder) / "result.json").write_text('{"schema_version": 999}')
    os._exit(0)


def hang(request: Request, progress) -> Result:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (Path(request.folder) / "child").write_text(str(child.pid))
    time.sleep(600)
    raise AssertionError("unreachable")
