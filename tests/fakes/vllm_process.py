"""Stands in for the interpreter of a serve environment: `-m vllm…api_server` runs a fake server.

Used where a test needs a server that fails in a chosen way. `QKIT_FAKE_VLLM` chooses: "ok", "die"
(exits with vLLM's out-of-memory traceback; "die:LOG" with another of `tests/golden/logs`), "hang"
(never ready), "die_after:N" (dies after N requests). It starts a child of its own, as vLLM does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

LOGS = Path(__file__).parents[1] / "golden" / "logs"


def executable(folder: Path) -> Path:
    """Write a program that behaves as a serve environment's python, and return it."""
    program = folder / "python"
    program.write_text(
        "#!/bin/sh\n"
        f'case "$2" in -c) exec {sys.executable} "$@" ;; esac\n'
        f'exec {sys.executable} {Path(__file__).resolve()} "$@"\n'
    )
    program.chmod(0o755)
    return program


def main() -> None:
    from fakes.openai_server import FakeServer

    mode, _, detail = os.environ.get("QKIT_FAKE_VLLM", "ok").partition(":")
    port = int(sys.argv[sys.argv.index("--port") + 1])
    print("the arguments are", *sys.argv[1:], flush=True)
    if mode == "die":
        print((LOGS / f"{detail or 'v0.32-died'}.log").read_text(), flush=True)
        sys.exit(1)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    if mode == "hang":
        time.sleep(600)
    print((LOGS / "v0.32-cpu-bf16.log").read_text(), flush=True)
    dies = int(detail) if mode == "die_after" else None
    with FakeServer(port=port, vary_tokens=True, die_after=dies) as server:
        while not server.is_dead:
            time.sleep(0.05)
    print((LOGS / "v0.32-died.log").read_text(), flush=True)
    child.kill()
    os._exit(1)


if __name__ == "__main__":
    main()
