"""What a run does again, what it keeps, and how it survives faults; the servers are fakes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from fakes.checkpoints import TinyQwen2, write_record, write_variant
from fakes.vllm_process import executable

from qkit.assemble import load_matrix, write_records
from qkit.errors import InputError, LockedError
from qkit.locks import accelerator_lock_path, lock
from qkit.measurements import RequestRecord
from qkit.recipe import Calibration, Recipe, Serve, Variant
from qkit.reporting import Silent
from qkit.run import Job
from qkit.store import RunStore
from qkit.suites import BenchSuite


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a checkpoint and environments whose interpreter is the fake one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("QKIT_LOCK_DIR", str(tmp_path / "locks"))
    program = str(executable(tmp_path))
    monkeypatch.setenv("QKIT_SERVE_PYTHON", program)
    monkeypatch.setenv("QKIT_QUANTIZE_PYTHON", program)
    TinyQwen2(hidden=128).write(tmp_path / "model")
    (tmp_path / "chats.jsonl").write_text(
        "".join(json.dumps({"text": f"sentence {i} about nothing"}) + "\n" for i in range(50))
    )
    return tmp_path


def recipe_of(place, **change):
    values = {
        "name": "r",
        "model": str(place / "model"),
        "accelerator": "cpu",
        "calibration": Calibration(source=str(place / "chats.jsonl"), samples=4, seq_len=32),
        "variants": (),
        "accuracy": (),
        "serve": Serve(startup_timeout_s=60),
        "bench": BenchSuite(
            concurrency=(1, 2), min_requests=3, requests_per_slot=1, input_tokens=16,
            output_tokens=4, repeat_baseline=False,
        ),
    }  # fmt: skip
    return Recipe(**{**values, **change})


class Lines(Silent):
    """A reporter that keeps what it was told."""

    def __init__(self):
        self.lines = []

    def finished(self, label, step, note):
        self.lines.append(("done", label, step))

    def skipped(self, label, step):
        self.lines.append(("kept", label, step))

    def failed(self, label, step, reason):
        self.lines.append(("failed", label, step))


def run(place, recipe, **options):
    reporter = Lines()
    outcome = Job(recipe, RunStore(place / "artifacts" / "r"), reporter, **options).run()
    return outcome, reporter.lines


def test_a_rerun_with_nothing_changed_does_no_work(place):
    recipe = recipe_of(place)
    _, first = run(place, recipe)
    assert first == [("done", "bf16", "serve"), ("done", "bf16", "bench")]
    outcome, second = run(place, recipe)
    assert second == [("kept", "bf16", "bench")]
    assert (outcome.done, outcome.skipped, outcome.failures) == (0, 1, [])


def test_what_changed_is_done_again_and_nothing_else(place):
    run(place, recipe_of(place))
    wider = recipe_of(place, bench=(recipe_of(place).bench[0].model_copy(update={"seed": 1}),))
    _, lines = run(place, wider)
    assert ("done", "bf16", "bench") in lines
    (place / "model" / "config.json").write_text(
        (place / "model" / "config.json").read_text().replace('"rope_theta"', '"rope_theta" ')
    )
    _, lines = run(place, wider)
    assert ("done", "bf16", "bench") in lines


def test_force_does_everything_again(place):
    run(place, recipe_of(place))
    _, lines = run(place, recipe_of(place), force=True)
    assert lines == [("done", "bf16", "serve"), ("done", "bf16", "bench")]


def test_a_variant_that_cannot_be_made_is_a_row_and_the_others_go_on(place):
    recipe = recipe_of(place, variants=(Variant(method="awq"),))
    outcome, lines = run(place, recipe)
    assert lines == [
        ("failed", "awq", "quantize"),
        ("done", "bf16", "serve"),
        ("done", "bf16", "bench"),
    ]
    assert [failure.step for failure in outcome.failures] == ["quantize"]
    matrix = load_matrix(RunStore(place / "artifacts" / "r"))
    assert [(row.variant, row.status) for row in matrix.rows] == [("bf16", "ok"), ("awq", "failed")]
    assert "the worker exited with code 1" in matrix.rows[1].reason
    assert matrix.rows[1].weight_bytes is None
    assert not (place / "artifacts/r/variants/awq/model").exists()


def test_what_killed_runs_left_is_cleared_also_where_nothing_is_to_be_made(place):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    run(place, recipe_of(place))
    root = place / "artifacts" / "r"
    store = RunStore(root)
    variant, recipe = Variant(method="rtn"), recipe_of(place)
    job = Job(recipe, store)
    made = write_variant(place / "model", store.model_dir("rtn"), variant)
    key = job.keys.of_variant(variant, recipe.calibration, job.source_hash)
    write_record(made, key=key)
    partial = made.with_name(f".model.partial-{ended.pid}")
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(b"half")
    (root / f".run.json.{ended.pid}.tmp").touch()
    at_work = root / f".matrix.md.{os.getppid()}.tmp"
    at_work.touch()
    outcome = job.quantize([variant])
    assert (outcome.done, outcome.skipped) == (0, 1)
    assert [path.name for path in made.parent.iterdir()] == ["model"]
    assert [path.name for path in root.glob(".*.tmp")] == [at_work.name]


def test_a_server_that_does_not_start_is_a_row_with_its_own_reason(place, monkeypatch):
    monkeypatch.setenv("QKIT_FAKE_VLLM", "die")
    outcome, lines = run(place, recipe_of(place))
    assert lines == [("failed", "bf16", "serve")]
    assert "CUDA out of memory" in outcome.failures[0].reason
    matrix = load_matrix(RunStore(place / "artifacts" / "r"))
    assert matrix.rows[0].status == "failed"
    assert "CUDA out of memory" in matrix.rows[0].reason


def test_a_server_that_dies_of_its_first_tokens_is_a_row_with_its_own_reason(place, monkeypatch):
    """vLLM answers HTTP 500 and ends: what it says on the way out is the reason, not the 500."""
    monkeypatch.setenv("QKIT_FAKE_VLLM", "die_after:1")
    outcome, lines = run(place, recipe_of(place))
    assert lines == [("failed", "bf16", "serve")]
    assert outcome.failures[0].reason == (
        "the server died (exit code 1): torch.OutOfMemoryError: CUDA out of memory. Tried to"
        " allocate 260.00 MiB."
    )


def test_a_run_goes_on_where_a_server_died(place, monkeypatch):
    both = recipe_of(place)
    monkeypatch.setenv("QKIT_FAKE_VLLM", "die_after:9")  # 4 smoke prompts, warm-up, 3, then 1 of 2
    outcome, lines = run(place, both)
    assert lines == [("done", "bf16", "serve"), ("failed", "bf16", "bench")]
    assert "CUDA out of memory" in outcome.failures[0].reason
    row = load_matrix(RunStore(place / "artifacts" / "r")).rows[0]
    assert row.status == "failed"
    assert row.bench[0].output_tok_per_s is not None, "the level before the death is kept"
    assert row.bench[1].output_tok_per_s is None
    monkeypatch.setenv("QKIT_FAKE_VLLM", "ok")
    outcome, lines = run(place, both)
    assert lines == [("done", "bf16", "serve"), ("done", "bf16", "bench")]
    assert outcome.failures == []
    matrix = load_matrix(RunStore(place / "artifacts" / "r"))
    assert matrix.rows[0].status == "ok"


def test_two_runs_never_share_the_accelerator(place):
    with lock(accelerator_lock_path(), "the accelerator"), pytest.raises(LockedError):
        run(place, recipe_of(place))
    _, lines = run(place, recipe_of(place))
    assert ("done", "bf16", "bench") in lines


def test_what_is_wrong_is_found_before_anything_is_written(place):
    (place / "model" / "model.safetensors").unlink()
    with pytest.raises(InputError, match="safetensors"):
        run(place, recipe_of(place, variants=(Variant(method="fp8"),)))
    assert not (place / "artifacts").exists()


def test_a_changed_stored_file_is_named(place):
    run(place, recipe_of(place))
    path = place / "artifacts/r/measurements/bf16/bench.json"
    value = json.loads(path.read_text())
    value["surprise"] = 1
    path.write_text(json.dumps(value))
    with pytest.raises(InputError, match="does not have the shape") as caught:
        load_matrix(RunStore(place / "artifacts" / "r"))
    assert str(path) in str(caught.value)
    assert "surprise" in str(caught.value)


class Interrupting(Lines):
    """Ends the run in the middle of a level, as a signal does."""

    def __init__(self, level):
        super().__init__()
        self.level = level

    def progress(self, stage, done, total):
        if (stage, done) == (self.level, 2):
            raise KeyboardInterrupt


def test_an_interrupted_sweep_goes_on_at_the_next_level(place):
    recipe, store = recipe_of(place), RunStore(place / "artifacts" / "r")
    with pytest.raises(KeyboardInterrupt):
        Job(recipe, store, Interrupting("concurrency 2")).run()
    left = store.measurement("bf16", "bench")
    assert [cell.concurrency for cell in left.bench.cells] == [1]
    assert not left.bench.complete
    (row,) = load_matrix(store).rows
    assert [cell.concurrency for cell in row.bench] == [1]
    assert "interrupted: the other levels were not measured" in row.marks

    _, lines = run(place, recipe)
    assert lines[-1] == ("done", "bf16", "bench")
    whole = store.measurement("bf16", "bench")
    assert [cell.concurrency for cell in whole.bench.cells] == [1, 2]
    assert whole.bench.cells[0] == left.bench.cells[0]
    assert whole.bench.complete
    assert run(place, recipe)[1] == [("kept", "bf16", "bench")]


def test_an_interrupted_sweep_of_other_inputs_is_measured_anew(place):
    store = RunStore(place / "artifacts" / "r")
    with pytest.raises(KeyboardInterrupt):
        Job(recipe_of(place), store, Interrupting("concurrency 2")).run()
    left = store.measurement("bf16", "bench")
    longer = recipe_of(place).bench[0].model_copy(update={"output_tokens": 5})
    run(place, recipe_of(place, bench=(longer,)))
    assert store.measurement("bf16", "bench").bench.cells[0] != left.bench.cells[0]


def test_every_request_is_exported_as_a_line(place):
    run(place, recipe_of(place))
    store = RunStore(place / "artifacts" / "r")
    write_records(store, place / "out" / "records.jsonl")
    lines = [json.loads(line) for line in (place / "out" / "records.jsonl").open()]
    cells = store.measurement("bf16", "bench").bench.cells
    assert [(line["variant"], line["bench"], line["concurrency"]) for line in lines] == [
        ("bf16", "bench", cell.concurrency) for cell in cells for _ in cell.requests
    ]
    fields = RequestRecord.model_fields
    found = [RequestRecord(**{k: line[k] for k in fields}) for line in lines]
    assert found == [record for cell in cells for record in cell.requests]
