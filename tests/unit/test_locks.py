from __future__ import annotations

import subprocess
import sys

import pytest

from qkit.errors import EXIT_LOCKED, LockedError
from qkit.locks import accelerator_lock_path, lock

HOLD = """
import sys
from pathlib import Path
from qkit.locks import lock
with lock(Path(sys.argv[1]), "it"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock until it is ended."""
    path = tmp_path / "a.lock"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "held\n"
    yield path, process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def test_a_held_lock_is_refused_with_the_holder_named(holder):
    path, process = holder
    with pytest.raises(LockedError) as caught, lock(path, "the accelerator"):
        pass
    assert f"another qkit process (pid {process.pid}) is using the accelerator" in str(caught.value)
    assert caught.value.exit_code == EXIT_LOCKED


def test_waiting_gets_the_lock_when_the_holder_is_killed(holder):
    path, process = holder
    process.kill()
    with lock(path, "it", wait_s=30):
        assert path.read_text().startswith("pid ")


def test_a_lock_is_free_again_after_an_error(tmp_path):
    path = tmp_path / "a.lock"
    with pytest.raises(RuntimeError), lock(path, "it"):
        raise RuntimeError
    with lock(path, "it"):
        pass


def test_jobs_on_different_gpus_do_not_exclude_each_other(monkeypatch, tmp_path):
    monkeypatch.setenv("QKIT_LOCK_DIR", str(tmp_path))
    paths = set()
    for devices in ("0", "1", "0,1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
        paths.add(accelerator_lock_path())
    assert len(paths) == 3
    assert all(path.parent == tmp_path for path in paths)
