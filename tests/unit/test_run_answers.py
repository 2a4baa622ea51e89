"""A run keeps an unfinished suite's answers until it is stored, and forgets on --force."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.question_model import write_question_model
from fakes.scoring_server import MODEL, ScoringServer
from fakes.vllm_process import executable

from qkit import run as runs
from qkit.measurements import ServerRecord
from qkit.recipe import Recipe
from qkit.run import Job, Outcome
from qkit.selection import attach_group
from qkit.server import RunningServer
from qkit.store import RunStore
from qkit.suites import AccuracySuite

QUESTIONS = 30


class Bench:
    """A job whose server is a fake one, with the fault of the moment."""

    def __init__(self, folder: Path) -> None:
        self.store = RunStore(folder / "artifacts" / "r")
        self.model = folder / "model"
        self.file = self.store.scored_file("bf16", "mmlu_dev")
        self.server: ScoringServer

    def run(self, *, limit: int = QUESTIONS, force: bool = False, **fault: Any) -> Outcome:
        recipe = Recipe(
            name="r", model=str(self.model), accelerator="cpu", variants=(), bench=(),
            accuracy=(AccuracySuite(task="mmlu_dev", limit=limit),),
        )  # fmt: skip
        with ScoringServer(max_model_len=8192, **fault) as self.server:
            return Job(recipe, self.store, force=force).run()

    @property
    def asked(self) -> int:
        return len(self.server.bodies)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("QKIT_LOCK_DIR", str(tmp_path / "locks"))
    monkeypatch.setenv("QKIT_SERVE_PYTHON", str(executable(tmp_path)))
    bench = Bench(tmp_path)
    write_question_model(bench.model, ["Which of these is right?"] * 20)

    @contextlib.contextmanager
    def serve(*_: object, **__: object) -> Iterator[RunningServer]:
        record = ServerRecord(version="0", flags=(), max_model_len=8192, kernels=())
        yield RunningServer(bench.server.url, MODEL, record)

    monkeypatch.setattr(runs, "serve", serve)
    monkeypatch.setattr(runs, "smoke_check", lambda *_: None)
    return bench


def test_a_failed_suite_goes_on_and_its_answers_go_with_its_success(bench: Bench) -> None:
    assert bench.run(fault="http_422", fault_after=12).failures
    lines = bench.file.read_text().splitlines()
    assert json.loads(lines[0])["identity"]
    left = len(lines) - 1
    assert left == 12
    assert not bench.run().failures
    assert bench.asked == QUESTIONS - left
    measurement = bench.store.measurement("bf16", "mmlu_dev")
    assert measurement
    assert measurement.accuracy
    assert (measurement.accuracy.resumed, len(measurement.accuracy.samples)) == (left, QUESTIONS)
    assert not bench.file.exists()


def test_force_asks_everything_again(bench: Bench) -> None:
    assert bench.run(fault="http_422", fault_after=12).failures
    assert not bench.run(force=True).failures
    assert bench.asked == QUESTIONS


def test_a_changed_checkpoint_asks_everything_again(bench: Bench) -> None:
    assert bench.run(fault="http_422", fault_after=12).failures
    config = bench.model / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "rms_norm_eps": 1e-5}))
    assert not bench.run().failures
    assert bench.asked == QUESTIONS


def test_another_limit_takes_the_answers_it_shares(bench: Bench) -> None:
    assert bench.run(fault="http_422", fault_after=12).failures
    left = len(bench.file.read_text().splitlines()) - 1
    assert not bench.run(limit=281).failures
    measurement = bench.store.measurement("bf16", "mmlu_dev")
    assert measurement
    assert measurement.accuracy
    assert measurement.accuracy.resumed == left
    # Two of the 281 questions are the same prompt.
    assert bench.asked == 280 - left


class TestAttached:
    """A server that qkit did not start."""

    def run(self, bench: Bench, server: ScoringServer, *, force: bool = False) -> Outcome:
        recipe = Recipe(
            name="r", model=server.url, accelerator="cpu", variants=(), bench=(),
            accuracy=(AccuracySuite(task="mmlu_dev", limit=QUESTIONS),),
        )  # fmt: skip
        attached = attach_group(recipe, server.url, None, bench.model)
        return Job(recipe, bench.store, force=force).measure_attached(attached)

    @pytest.mark.parametrize(
        ("started", "force", "asked"), [(1.0, False, 18), (2.0, False, 30), (1.0, True, 30)]
    )
    def test_an_interrupted_suite_goes_on_while_it_is_the_same_process(
        self, bench: Bench, started: float, force: bool, asked: int
    ) -> None:
        with ScoringServer(
            max_model_len=8192, started=1.0, fault="http_422", fault_after=12
        ) as server:
            assert self.run(bench, server).failures
            server.fault, server.started = None, started
            server.bodies.clear()
            assert not self.run(bench, server, force=force).failures
            assert len(server.bodies) == asked
            # A suite that is finished is asked anew: nothing tells whether the model was changed.
            server.bodies.clear()
            assert not self.run(bench, server).failures
            assert len(server.bodies) == QUESTIONS
