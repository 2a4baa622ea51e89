"""Real `qkit quantize` runs are killed: nothing half-made passes for finished."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "kill_quantize.py"


def test_four_kills_leave_nothing_that_passes_for_finished() -> None:
    """Two anywhere, one while saving, one of the worker; then one run clears up after all."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--kills", "4", "--methods", "fp8", "--rerun-every", "4"],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1].startswith("4 kills, 0 violations; hit: ")
    assert sum("worker" in line.split()[2:3] for line in lines) == 1
    assert lines[-2].endswith("run again: well")
