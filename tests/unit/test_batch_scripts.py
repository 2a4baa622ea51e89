"""The batch job and the nightly units."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
JOB = SCRIPTS / "batch-job"


def job(folder, *arguments, **variables):
    environment = {
        "PATH": os.environ["PATH"],
        "QKIT_ARTIFACTS": str(folder / "artifacts"),
        **variables,
    }
    return subprocess.run(
        [str(JOB), *arguments], env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture
def program(tmp_path):
    """A stand-in for qkit that says what it was asked and ends as told."""
    path = tmp_path / "qkit"
    path.write_text('#!/bin/sh\necho "asked: $*"\nexit "${ENDS_WITH:-0}"\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("code", [0, 3, 75])
def test_the_exit_code_is_qkits_and_the_log_holds_its_output(tmp_path, program, code):
    done = job(tmp_path, "demo", "--force", QKIT=program, ENDS_WITH=str(code), QKIT_WAIT="60")
    assert done.returncode == code
    (log,) = (tmp_path / "artifacts" / "logs").glob("demo-*.log")
    assert done.stdout == f"log: {log}\n"
    assert log.read_text() == "asked: run demo --force --wait 60\n"


def test_without_a_recipe_it_says_how_to_use_it(tmp_path, program):
    done = job(tmp_path, QKIT=program)
    assert done.returncode == 2
    assert "usage:" in done.stderr


def test_without_qkit_it_says_what_to_do(tmp_path):
    done = job(tmp_path, "demo", QKIT=str(tmp_path / "nowhere"))
    assert done.returncode == 2
    assert "set QKIT to the program" in done.stderr


def test_the_timer_starts_the_service_and_the_service_the_job():
    service = (SCRIPTS / "qkit-nightly.service").read_text()
    assert "ExecStart=/bin/bash /opt/qkit/scripts/batch-job qwen2.5-7b-a800" in service
    assert "RestartForceExitStatus=75" in service
    assert "OnCalendar=" in (SCRIPTS / "qkit-nightly.timer").read_text()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
def test_the_units_are_valid():
    units = [str(SCRIPTS / f"qkit-nightly.{kind}") for kind in ("service", "timer")]
    done = subprocess.run(
        ["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
