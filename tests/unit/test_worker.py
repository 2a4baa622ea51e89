from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from fakes.workers import Request, Result

from qkit import protocol
from qkit.errors import WorkerError
from qkit.worker import run_worker, worker_environment

TESTS = Path(__file__).parents[1]


def work(entry, folder, **options):
    return run_worker(
        Path(sys.executable),
        f"fakes.workers:{entry}",
        Request(str(folder), 21),
        Result,
        folder,
        env={"PYTHONPATH": str(TESTS)},
        **options,
    )


def test_a_worker_returns_its_value_versions_and_progress(tmp_path):
    seen = []
    result = work("double", tmp_path, on_progress=seen.append)
    assert result.value == Result(42)
    assert set(result.versions) == {"python", "click"}
    assert result.duration_s > 0
    assert [(p.stage, p.done, p.total) for p in seen] == [("doubling", 0, 1), ("doubling", 1, 1)]
    assert "a line for the log" in (tmp_path / protocol.LOG_FILE).read_text()


@pytest.mark.parametrize(
    ("entry", "kind", "message"),
    [
        ("fail", "error", "the worker failed with ValueError: layer 3 is not finite"),
        ("die", "exit", "the worker exited with code 7 and no result"),
        ("be_killed", "killed", "the worker was killed by SIGKILL"),
        ("end_quietly", "missing", "the worker ended without a result"),
        ("garbage", "schema", "the worker's result cannot be read"),
        ("other_schema", "schema", "schema_version 999"),
        ("no_such_entry", "error", "no_such_entry"),
    ],
)
def test_each_way_of_failing_is_told_apart(tmp_path, entry, kind, message):
    with pytest.raises(WorkerError) as caught:
        work(entry, tmp_path)
    assert caught.value.kind == kind
    assert message in caught.value.what
    assert "Traceback" not in str(caught.value)


def test_what_a_dying_worker_printed_is_shown(tmp_path):
    with pytest.raises(WorkerError) as caught:
        work("die", tmp_path)
    assert "about to exit" in str(caught.value)


def test_a_worker_out_of_time_is_ended_with_its_children(tmp_path):
    with pytest.raises(WorkerError) as caught:
        work("hang", tmp_path, timeout_s=5)
    assert caught.value.kind == "timeout"
    child = int((tmp_path / "child").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie"


def test_an_old_result_is_never_taken_for_a_new_one(tmp_path):
    work("double", tmp_path)
    with pytest.raises(WorkerError):
        work("end_quietly", tmp_path)
    assert not (tmp_path / protocol.RESULT_FILE).exists()


def test_the_cores_packages_do_not_leak_into_a_worker(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("VIRTUAL_ENV", "/elsewhere")
    assert not {"PYTHONPATH", "VIRTUAL_ENV"} & set(worker_environment())


def test_a_worker_ends_when_qkit_is_killed(tmp_path):
    """A worker that lived on would hold the GPU and write over the next run's result."""
    code = f"""
import sys; sys.path.insert(0, {str(TESTS)!r})
from pathlib import Path
from unit.test_worker import work
work("hang", Path({str(tmp_path)!r}))
"""
    starter = subprocess.Popen([sys.executable, "-c", code])
    child = tmp_path / "child"
    deadline = time.monotonic() + 60
    while not child.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    (guard,) = psutil.Process(starter.pid).children()
    group = [guard, *guard.children(recursive=True)]
    assert len(group) == 3
    starter.kill()
    starter.wait()
    _, alive = psutil.wait_procs(group, timeout=30)
    assert alive == []
