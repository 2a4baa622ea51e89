#!/usr/bin/env python3
"""Kill a real `qkit run` or its vLLM server while it measures, and see that nothing is lost.

    python scripts/kill_measuring.py [--kills 9] [--seed 0]

The demo's checkpoint is served by the real vLLM and measured: questions first, then a benchmark of
three levels. At random moments qkit, vLLM's API server or vLLM's engine is ended with SIGKILL, in
the middle of the questions or of the benchmark's levels. Then qkit is run again. Every question
answered and every level measured before the kill must be there afterwards without having been asked
or measured again (what was in flight is asked again), and after a kill of qkit no process may be
left. Ends with 1 on any violation.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import click
import psutil
from kill_processes import HANGS_AFTER_S, family, survivors, wait_for

from qkit.errors import EXIT_CELLS_FAILED
from qkit.measurements import AccuracyResult, BenchCell, BenchResult, Measurement
from qkit.processes import GUARD
from qkit.recipe import RECIPES_DIR
from qkit.store import RunStore

RUN = "kills"
SUITE, BENCH, ROW = "demo_facts", "bench", "bf16"
LEVELS = (1, 2, 4)
VICTIMS = ("qkit", "server", "engine")
RECIPE = """\
name: kills
model: {model}
accelerator: cpu
variants: []
serve:
  max_model_len: 512
  kv_cache_gib: 1
  enforce_eager: true
  args: [--distributed-executor-backend, uni]
  env: {{VLLM_ENABLE_V1_MULTIPROCESSING: "{multiprocessing}", OMP_NUM_THREADS: "1"}}
accuracy:
  - task: demo_facts
bench:
  concurrency: {levels}
  input_tokens: 64
  output_tokens: 32
  min_requests: 8
  repeat_baseline: false
"""
GONE_WITHIN_S = 10.0


@dataclass(frozen=True)
class Kill:
    """What is killed, and when.

    Attributes:
        victim: "qkit", "server" (vLLM's API server) or "engine".
        during: "questions" or "levels".
        share: Of the questions or levels that are done by then.
    """

    victim: str
    during: str
    share: float


@dataclass(frozen=True)
class Left:
    """What a killed run had measured.

    Attributes:
        answers: Questions answered and kept.
        levels: Levels of the benchmark measured and kept.
        violations: What is wrong with how it ended.
    """

    answers: int
    levels: tuple[BenchCell, ...]
    violations: tuple[str, ...]


def plan_kills(number: int, seed: int) -> list[Kill]:
    """Return kills of every victim in turn, two in three among the questions."""
    choose = random.Random(seed)
    return [
        Kill(
            victim=VICTIMS[index % len(VICTIMS)],
            during="levels" if index // len(VICTIMS) % 3 == 2 else "questions",
            share=choose.uniform(0.05, 0.95),
        )
        for index in range(number)
    ]


class Bench:
    """Runs qkit in a folder of its own, watches it, and kills it."""

    def __init__(self, folder: Path) -> None:
        self.store = RunStore(folder / RUN)
        self._recipe = folder / "recipe.yaml"
        self._env = {
            **os.environ,
            "QKIT_ARTIFACTS": str(folder),
            "QKIT_LOCK_DIR": str(folder),
            "HF_HUB_OFFLINE": "1",
        }
        self._output = folder / "output.txt"

    def start(self, *, own_engine: bool) -> subprocess.Popen[bytes]:
        """Start `qkit run`.

        Args:
            own_engine: Whether vLLM's engine is a process of its own, which can be killed alone.
        """
        text = RECIPE.format(
            model=RECIPES_DIR / "demo" / "model",
            multiprocessing=int(own_engine),
            levels=list(LEVELS),
        )
        self._recipe.write_text(text, encoding="utf-8")
        with self._output.open("wb") as stream:
            return subprocess.Popen(
                [sys.executable, "-m", "qkit", "run", str(self._recipe)],
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=self._env,
            )

    def output(self) -> str:
        """Return what the last run printed."""
        return self._output.read_text(errors="replace")

    def clear(self) -> None:
        """Forget everything that was measured."""
        shutil.rmtree(self.store.root, ignore_errors=True)

    def undisturbed(self) -> AccuracyResult:
        """Run to the end and return the scores."""
        code = self.start(own_engine=False).wait(HANGS_AFTER_S)
        found = self.accuracy()
        if code or found is None:
            raise click.ClickException(f"the undisturbed run failed:\n{self.output()}")
        return found

    def kill(self, kill: Kill, questions: int) -> Left:
        """Start a run, kill what is to be killed, and judge how it ended."""
        process = self.start(own_engine=kill.victim == "engine")
        if kill.during == "questions":
            due = max(1, round(kill.share * questions))
            reached = wait_for(lambda: self.answers() >= due, process)
        else:
            due = int(kill.share * len(LEVELS))
            reached = wait_for(lambda: self._in_level(due), process)
            # Into the next level, not between two.
            time.sleep(0.2 + kill.share / 2)
        found = [] if reached else [f"the run ended before the kill: {self.output()[-400:]}"]
        pids = family(process.pid)
        victim = process.pid if kill.victim == "qkit" else _process(process.pid, kill.victim)
        if victim is None:
            found.append(f"there is no {kill.victim} to kill")
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        code = process.wait(HANGS_AFTER_S)
        if kill.victim == "qkit":
            commands = survivors(self.store.root, pids, GONE_WITHIN_S)
            found += [f"still running: {command}" for command in commands]
        else:
            found += self._judge_report(code, SUITE if kill.during == "questions" else BENCH)
        return Left(self.answers(), self._levels(), tuple(found))

    def _judge_report(self, code: int, broken: str) -> list[str]:
        """Judge how a run ended whose server was killed: the other suite got a new server."""
        found = []
        if code != EXIT_CELLS_FAILED:
            found.append(f"qkit ended with {code}, not {EXIT_CELLS_FAILED}")
        if "Traceback" in self.output():
            found.append("qkit printed a traceback")
        if broken not in {failure.step for failure in self.store.failures(ROW)}:
            found.append(f"qkit did not store that {broken} failed")
        if broken == SUITE and self.bench() is None:
            found.append("the benchmark was not measured on a new server")
        return found

    def _levels(self) -> tuple[BenchCell, ...]:
        bench = self.bench()
        cells = bench.cells if bench else ()
        return tuple(cell for cell in cells if cell.output_tok_per_s is not None)

    def rerun(self, kill: Kill, left: Left, undisturbed: AccuracyResult) -> list[str]:
        """Run again as a person would, and return the violations."""
        code = self.start(own_engine=kill.victim == "engine").wait(HANGS_AFTER_S)
        if code:
            return [f"the next run ended with {code}: {self.output().strip()[-400:]}"]
        found = []
        accuracy, bench = self.accuracy(), self.bench()
        if accuracy is None or bench is None:
            return ["the next run left a suite unmeasured"]
        if kill.during == "questions":
            if accuracy.resumed != left.answers:
                found.append(f"{left.answers} answers were kept, {accuracy.resumed} used")
            asked = accuracy.requests + accuracy.resumed
            if asked != undisturbed.requests:
                found.append(f"{asked} questions answered in all, not {undisturbed.requests}")
        if _questions(accuracy) != _questions(undisturbed):
            found.append("the questions scored are not the undisturbed run's")
        found += [
            f"level {cell.level.figure} was measured again"
            for cell in left.levels
            if cell not in bench.cells
        ]
        if [cell.level.concurrency for cell in bench.cells] != list(LEVELS):
            found.append("the next run's benchmark lacks a level")
        return found

    def answers(self) -> int:
        """Return how many answers are kept of unfinished questions."""
        path = self.store.scored_file(ROW, SUITE)
        with contextlib.suppress(FileNotFoundError):
            return max(0, path.read_bytes().count(b"\n") - 1)  # the first line is a header
        return 0

    def accuracy(self) -> AccuracyResult | None:
        """Return the scores stored."""
        found = self._measurement(SUITE)
        return found.accuracy if found else None

    def bench(self) -> BenchResult | None:
        """Return the levels stored."""
        found = self._measurement(BENCH)
        return found.bench if found else None

    def _in_level(self, done: int) -> bool:
        if self.accuracy() is None:
            return False
        bench = self.bench()
        return (len(bench.cells) if bench else 0) >= done

    def _measurement(self, suite: str) -> Measurement | None:
        return self.store.measurement(ROW, suite)


def _questions(result: AccuracyResult) -> list[tuple[str, str]]:
    return sorted((sample.task, sample.doc_hash) for sample in result.samples)


def _process(pid: int, kind: str) -> int | None:
    """Return the API server's or the engine's process id among a run's descendants."""
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            command = " ".join(child.cmdline())
            is_engine = "EngineCore" in command or "EngineCore" in child.name()
            is_guard = GUARD.name in command  # its command line ends with the server's
            is_server = not is_engine and not is_guard and "vllm.entrypoints" in command
            if is_engine if kind == "engine" else is_server:
                return int(child.pid)
    return None


@click.command()
@click.option("--kills", type=click.IntRange(min=1), default=9, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the moments.")
def main(kills: int, seed: int) -> None:
    """Kill qkit or its server while it measures; end with 1 on any violation."""
    violations = 0
    with tempfile.TemporaryDirectory(prefix="qkit-kills-") as temporary:
        bench = Bench(Path(temporary))
        undisturbed = bench.undisturbed()
        click.echo(f"undisturbed: {undisturbed.requests} questions, {len(LEVELS)} levels")
        for number, kill in enumerate(plan_kills(kills, seed), start=1):
            bench.clear()
            left = bench.kill(kill, undisturbed.requests)
            found = [*left.violations, *bench.rerun(kill, left, undisturbed)]
            violations += len(found)
            click.echo(
                f"{number:>3} {kill.victim:<6} in the {kill.during:<9} ({kill.share:4.0%}) "
                f"kept: {left.answers} answers, {len(left.levels)} levels; run again: "
                + ("wrong" if found else "well")
            )
            for violation in found:
                click.echo(f"    VIOLATION: {violation}")
    click.echo(f"{kills} kills, {violations} violations")
    raise SystemExit(1 if violations else 0)


if __name__ == "__main__":
    main()
