"""Entry point inside a backend's environment: `python -P _worker_main.py MODULE:FUNCTION FOLDER`.

Reads FOLDER/request.json, calls the function, and writes FOLDER/result.json whole or not at all.
The backend's environment has no qkit installed. This file makes the modules beside it importable
as `qkit.…` without putting the core's site-packages on the path, where they would mix with the
backend's own.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
import types
from importlib import metadata
from pathlib import Path


def main(entry: str, folder: Path) -> int:
    """Run one worker; return the process's exit code."""
    package = types.ModuleType("qkit")
    package.__path__ = [str(Path(__file__).resolve().parent)]
    sys.modules["qkit"] = package
    protocol = importlib.import_module("qkit.protocol")

    started = time.perf_counter()
    versions: dict[str, str] = {"python": ".".join(map(str, sys.version_info[:3]))}
    value, failure = None, None

    def progress(stage: str, done: int, total: int) -> None:
        line = json.dumps({"stage": stage, "done": done, "total": total})
        with (folder / protocol.PROGRESS_FILE).open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")

    try:
        module_name, _, function_name = entry.partition(":")
        module = importlib.import_module(module_name)
        request = protocol.load(module.REQUEST, protocol.read_json(folder / protocol.REQUEST_FILE))
        result = getattr(module, function_name)(request, progress)
        value = protocol.dump(result)
        for name in module.PACKAGES:
            try:
                versions[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
    except Exception as error:
        traceback.print_exc()
        failure = protocol.Failure(
            type=type(error).__name__, message=str(error), traceback=traceback.format_exc()
        )
    protocol.write_json(
        folder / protocol.RESULT_FILE,
        protocol.Envelope(
            schema_version=protocol.SCHEMA_VERSION,
            status="error" if failure else "ok",
            value=value,
            error=failure,
            versions=versions,
            duration_s=time.perf_counter() - started,
        ),
    )
    return 1 if failure else 0


if __name__ == "__main__":
    code = main(sys.argv[1], Path(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    # Thread pools of the heavy libraries can hang interpreter shutdown; the result is on disk.
    os._exit(code)
