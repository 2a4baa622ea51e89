"""Real measurements are killed, and so is the real server under them: nothing is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "kill_measuring.py"


def test_killed_in_the_middle_of_a_suite_neither_qkit_nor_vllm_loses_an_answer(
    serve_python: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--kills", "2", "--seed", "1"],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "2 kills, 0 violations"
    assert [line.split()[1] for line in lines[1:3]] == ["qkit", "server"]
    assert all(line.endswith("run again: well") for line in lines[1:3])
