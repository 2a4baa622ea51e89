"""Run one worker in one backend's environment.

`request.json` in, `result.json` out, `worker.log` and `progress.jsonl` beside them. A worker that
reports an exception, exits without a result, is killed, runs out of time or writes a result of
another schema are different errors.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from qkit import processes, protocol
from qkit.errors import WorkerError
from qkit.protocol import Envelope, Progress, SchemaError

T = TypeVar("T")
MAIN = Path(__file__).resolve().parent / "_worker_main.py"
POLL_S = 0.1
TAIL_LINES = 15


@dataclass(frozen=True)
class WorkerResult(Generic[T]):
    """What a worker returned, with the versions that made it and how long it took."""

    value: T
    versions: dict[str, str]
    duration_s: float


def run_worker(
    python: Path,
    entry: str,
    request: Any,
    result_type: type[T],
    folder: Path,
    *,
    timeout_s: float | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    env: Mapping[str, str] | None = None,
) -> WorkerResult[T]:
    """Run `entry` ("module:function") under another environment's interpreter and wait for it.

    Args:
        python: Interpreter of the backend's environment.
        entry: Function that takes the request and a progress callback and returns a dataclass.
        request: Frozen dataclass written to `request.json`.
        result_type: Dataclass the result is read as.
        folder: Work folder; results of an earlier run in it are removed first.
        timeout_s: Seconds until the worker is ended; None waits for ever.
        on_progress: Called with every new progress line.
        env: Variables on top of this process's own.

    Raises:
        WorkerError: `kind` says which of the ways of failing it was.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in (protocol.RESULT_FILE, protocol.PROGRESS_FILE, protocol.LOG_FILE):
        (folder / name).unlink(missing_ok=True)
    protocol.write_json(folder / protocol.REQUEST_FILE, request)
    log = folder / protocol.LOG_FILE
    process = processes.start(
        [str(python), "-P", str(MAIN), entry, str(folder)],
        log=log,
        env={**worker_environment(), **(env or {})},
    )
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    progress = _ProgressReader(folder / protocol.PROGRESS_FILE, on_progress)
    try:
        while process.poll() is None:
            progress.read()
            if deadline is not None and time.monotonic() > deadline:
                raise WorkerError(
                    f"the worker did not finish within {timeout_s:g} s",
                    kind="timeout",
                    where=log,
                    detail=processes.tail(log, TAIL_LINES),
                )
            time.sleep(POLL_S)
        progress.read()
    finally:
        processes.stop(process)
    return _read_result(folder, process.returncode, result_type)


def worker_environment() -> dict[str, str]:
    """Return this process's environment without what would leak the core's packages."""
    dropped = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__"}
    kept = {key: value for key, value in os.environ.items() if key not in dropped}
    return {**kept, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}


def _read_result(folder: Path, exit_code: int, result_type: type[T]) -> WorkerResult[T]:
    log, result = folder / protocol.LOG_FILE, folder / protocol.RESULT_FILE
    if not result.is_file():
        evidence = processes.tail(log, TAIL_LINES)
        if exit_code < 0:
            name = signal.Signals(-exit_code).name
            hint = "most often the machine ran out of memory" if name == "SIGKILL" else None
            raise WorkerError(
                f"the worker was killed by {name}",
                kind="killed",
                where=log,
                detail=evidence,
                fix=hint and f"{hint}: use fewer --samples, a shorter --seq-len, or more memory",
            )
        if exit_code:
            raise WorkerError(
                f"the worker exited with code {exit_code} and no result",
                kind="exit",
                where=log,
                detail=evidence,
            )
        raise WorkerError(
            "the worker ended without a result", kind="missing", where=log, detail=evidence
        )
    try:
        raw = protocol.read_json(result)
        found = raw.get("schema_version") if isinstance(raw, dict) else None
        if found != protocol.SCHEMA_VERSION:
            raise SchemaError(
                f"schema_version {found!r}, this qkit reads {protocol.SCHEMA_VERSION}"
            )
        envelope = protocol.load(Envelope, raw)
        if envelope.status == "ok":
            return WorkerResult(
                protocol.load(result_type, envelope.value), envelope.versions, envelope.duration_s
            )
    except SchemaError as error:
        raise WorkerError(
            f"the worker's result cannot be read: {error}",
            kind="schema",
            where=result,
            fix="run the step again; if it stays, the environment's worker is of another qkit",
        ) from error
    failure = envelope.error
    message = f"{failure.type}: {failure.message}" if failure else "an error without a message"
    raise WorkerError(
        f"the worker failed with {message}",
        kind="error",
        where=log,
        fix="the log has the whole traceback",
    )


class _ProgressReader:
    """Reads whole new lines of a growing progress file."""

    def __init__(self, path: Path, callback: Callable[[Progress], None] | None) -> None:
        self._path, self._callback, self._offset = path, callback, 0

    def read(self) -> None:
        if self._callback is None or not self._path.is_file():
            return
        with self._path.open("rb") as stream:
            stream.seek(self._offset)
            block = stream.read()
        whole = block[: block.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            self._callback(protocol.load(Progress, json.loads(line)))
