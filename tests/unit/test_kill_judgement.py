"""The judgements of scripts/kill_quantize.py: whole folders pass, each planted wreck is found."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from fakes.checkpoints import TinyQwen2, read_json, write_json, write_record, write_variant

from qkit.hashing import hash_checkpoint
from qkit.processes import is_running_since
from qkit.recipe import Variant
from qkit.store import RunStore

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
RTN = Variant(method="rtn")


@pytest.fixture(scope="module")
def judge() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        return importlib.import_module("kill_judgement")


@pytest.fixture(scope="module")
def processes() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        return importlib.import_module("kill_processes")


@pytest.fixture(scope="module")
def driver() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        return importlib.import_module("kill_quantize")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return TinyQwen2(hidden=128, intermediate=256).write(tmp_path / "source")


@pytest.fixture
def store(tmp_path: Path, source: Path) -> RunStore:
    """Return a run with one whole variant."""
    store = RunStore(tmp_path / "run")
    folder = store.model_dir("rtn")
    folder.parent.mkdir(parents=True)
    write_record(write_variant(source, folder, RTN))
    (store.root / ".lock").touch()
    return store


def test_a_whole_variant_and_no_variant_pass(
    judge: ModuleType, store: RunStore, source: Path
) -> None:
    folder = store.model_dir("rtn")
    assert judge.judge_folder(folder, source, RTN, had_one=True) == []
    assert judge.judge_folder(folder, source, RTN, had_one=False) == []
    assert judge.judge_folder(folder.parent / "none", source, RTN, had_one=False) == []
    whole = hash_checkpoint(folder)
    assert judge.judge_rerun(0, "", store, source, RTN, whole) == []


def truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def cut_before_the_record(folder: Path) -> None:
    (folder / "qkit.json").unlink()


def record_nothing_and_truncate(folder: Path) -> None:
    cut_before_the_record(folder)
    truncate(folder)


def only_weights(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name != "model.safetensors":
            path.unlink()


def half_a_record(folder: Path) -> None:
    path = folder / "qkit.json"
    path.write_text(path.read_text()[:100])


def another_config(folder: Path) -> None:
    config = read_json(folder / "config.json")
    config.pop("quantization_config")
    write_json(folder / "config.json", config)


def not_quantized_but_consistent(folder: Path) -> None:
    another_config(folder)
    write_record(folder)


@pytest.mark.parametrize(
    ("damage", "readers", "reason"),
    [
        (truncate, "qkit and transformers", "not those its qkit.json describes"),
        (cut_before_the_record, "transformers", "no qkit.json"),
        (record_nothing_and_truncate, "transformers", "no qkit.json"),
        (half_a_record, "transformers", "not valid JSON"),
        (another_config, "qkit and transformers", "not those its qkit.json describes"),
        (not_quantized_but_consistent, "qkit and transformers", "no quantization_config"),
    ],
)
def test_a_planted_wreck_is_a_violation(
    judge: ModuleType,
    store: RunStore,
    source: Path,
    damage: Callable[[Path], None],
    readers: str,
    reason: str,
) -> None:
    folder = store.model_dir("rtn")
    damage(folder)
    (violation,) = judge.judge_folder(folder, source, RTN, had_one=False)
    assert violation.startswith(f"an unfinished folder passes for finished with {readers}: ")
    assert reason in violation
    (after,) = judge.judge_rerun(0, "", store, source, RTN, hash_checkpoint(folder))
    assert after.startswith("the next run's variant is not whole")


def test_a_folder_no_reader_takes_is_a_violation_under_the_final_name(
    judge: ModuleType, store: RunStore, source: Path
) -> None:
    folder = store.model_dir("rtn")
    only_weights(folder)
    (violation,) = judge.judge_folder(folder, source, RTN, had_one=False)
    assert violation.startswith("an unfinished folder is there: ")


def test_a_missing_shard_is_not_taken_by_transformers(judge: ModuleType, tmp_path: Path) -> None:
    folder = TinyQwen2(tied=False, shards=2).write(tmp_path / "sharded")
    assert judge.readers_it_passes_for(folder) == ["transformers"]
    next(folder.glob("model-*.safetensors")).unlink()
    assert judge.readers_it_passes_for(folder) == []


def test_an_earlier_variant_may_be_aside_but_not_gone(
    judge: ModuleType, store: RunStore, source: Path
) -> None:
    folder = store.model_dir("rtn")
    aside = folder.rename(folder.with_name(".model.old-1"))
    assert judge.judge_folder(folder, source, RTN, had_one=True) == []
    truncate(aside)
    assert judge.judge_folder(folder, source, RTN, had_one=True) == ["the earlier variant is gone"]


def test_what_is_left_after_the_next_run_is_named(
    judge: ModuleType, store: RunStore, source: Path
) -> None:
    folder = store.model_dir("rtn")
    assert judge.left_behind(store.root) == []
    (folder.parent / ".model.partial-7").mkdir()
    (store.root / ".run.json.7.tmp").touch()
    left = [".run.json.7.tmp", "variants/rtn/.model.partial-7"]
    assert judge.left_behind(store.root) == left
    violations = judge.judge_rerun(0, "", store, source, RTN, "another hash")
    assert violations == [
        "the next run's variant is not the undisturbed run's",
        f"left after the next run: {', '.join(left)}",
    ]
    assert judge.judge_rerun(3, "why", store, source, RTN, "") == ["the next run ended with 3: why"]


@pytest.mark.parametrize(
    ("code", "output", "violations"),
    [
        (3, "failed fp8 quantize the worker was killed by SIGKILL", 0),
        (0, "the worker was killed by SIGKILL", 1),
        (3, "something failed", 1),
        (1, "Traceback (most recent call last):", 3),
    ],
)
def test_a_workers_death_must_be_told(
    judge: ModuleType, code: int, output: str, violations: int
) -> None:
    assert len(judge.judge_worker_death(code, output)) == violations


def test_a_process_of_the_run_is_found_and_others_are_not(
    processes: ModuleType, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with (
        subprocess.Popen([*command, str(tmp_path / "mine")]) as mine,
        subprocess.Popen(command) as known,
    ):
        try:
            assert len(processes.survivors(tmp_path / "mine", [], 0.0)) == 1
            assert len(processes.survivors(tmp_path / "mine", [known.pid], 0.0)) == 2
            assert processes.survivors(tmp_path / "other", [], 0.0) == []
        finally:
            mine.kill()
            known.kill()
            mine.wait()
            known.wait()
    assert processes.survivors(tmp_path / "mine", [mine.pid, known.pid], 0.0) == []


def test_kills_are_the_same_by_seed_and_cover_the_whole_run(driver: ModuleType) -> None:
    kills = driver.plan_kills(20, ["gptq", "rtn", "fp8"], 0)
    assert kills == driver.plan_kills(20, ["gptq", "rtn", "fp8"], 0)
    assert kills != driver.plan_kills(20, ["gptq", "rtn", "fp8"], 1)
    assert {kill.method for kill in kills} == {"gptq", "rtn", "fp8"}
    assert sum(kill.worker_only for kill in kills) == 5
    assert {kill.replaces for kill in kills} == {True, False}
    for after, least in (("start", 5), ("saved", 5), ("worker", 3)):
        shares = sorted(kill.share for kill in kills if kill.after == after)
        assert len(shares) >= least
        assert shares[0] < 1 / 3
        assert shares[-1] > 2 / 3
    timing = driver.Timing(worker_s=2.0, saved_s=8.0, result_s=9.0, end_s=10.0)
    half = driver.Kill("rtn", "saved", 0.5, worker_only=False, replaces=False)
    assert half.delay_s(timing) == 1.0


def test_a_number_that_a_later_process_has_is_not_the_earlier_one() -> None:
    now = time.time()
    assert is_running_since(os.getpid(), now)
    assert not is_running_since(os.getpid(), now - 10**6)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert not is_running_since(ended.pid, now)
