#!/usr/bin/env python3
"""Kill a real `qkit quantize` again and again, and see that nothing half-made passes for finished.

    python scripts/kill_quantize.py [--kills 20] [--methods gptq,rtn,fp8] [--seed 0]

The demo's checkpoint is quantized once undisturbed by each method. Then runs are ended with SIGKILL
at random moments: spread over the whole duration of the undisturbed run, every third between the
first saved file and the end, and every fourth time the worker alone. After each kill no process may
be left, and the variant's folder must be missing or whole; a run after it must end well, with the
undisturbed run's content hash, and clear what the killed one left. Ends with 1 on any violation.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import psutil
from kill_judgement import (
    judge_folder,
    judge_rerun,
    judge_worker_death,
    left_behind,
)
from kill_processes import HANGS_AFTER_S, family, survivors, wait_for

from qkit.protocol import PROGRESS_FILE, REQUEST_FILE, RESULT_FILE
from qkit.recipe import RECIPES_DIR, Variant
from qkit.store import RunStore

SOURCE = RECIPES_DIR / "demo" / "model"
SAMPLES, SEQ_LEN = 8, 64
RUN = "kills"
#: The guard looks every 0.2 s whether its starter lives; the kernel then takes a moment.
GONE_WITHIN_S = 5.0
OVER = "over"


@dataclass(frozen=True)
class Timing:
    """Seconds from the start of an undisturbed run.

    Attributes:
        worker_s: Its worker was started.
        saved_s: The first file was in the folder being written.
        result_s: The worker was done.
        end_s: The run was done.
    """

    worker_s: float
    saved_s: float
    result_s: float
    end_s: float


@dataclass(frozen=True)
class Kill:
    """When a run is killed.

    Attributes:
        method: What is being made.
        after: What must have happened before the delay begins: "start", "worker" or "saved".
        share: Delay as a share of the time between that and the end (the worker's end, where the
            worker is killed).
        worker_only: Kill the worker and not qkit.
        replaces: A whole variant is there before.
    """

    method: str
    after: str
    share: float
    worker_only: bool
    replaces: bool

    def delay_s(self, timing: Timing) -> float:
        """Return the seconds to wait after `after`, on the clock of the undisturbed run."""
        begin = {"start": 0.0, "worker": timing.worker_s, "saved": timing.saved_s}[self.after]
        end = timing.result_s if self.worker_only else timing.end_s
        return self.share * (end - begin)


@dataclass(frozen=True)
class Hit:
    """What a kill hit, and what it left."""

    stage: str
    delay_s: float
    had_one: bool
    left: tuple[str, ...]
    violations: tuple[str, ...]


def plan_kills(number: int, methods: Sequence[str], seed: int) -> list[Kill]:
    """Return kills spread evenly, each at a random place of its part of the duration."""
    choose = random.Random(seed)
    kinds = []
    for index in range(number):
        worker_only = index % 4 == 3
        after = "saved" if index % 3 == 1 else "worker" if worker_only else "start"
        kinds.append((after, worker_only))
    kills = []
    for index, kind in enumerate(kinds):
        before, alike = kinds[:index].count(kind), kinds.count(kind)
        kills.append(
            Kill(
                method=methods[index % len(methods)],
                after=kind[0],
                share=(before + choose.random()) / alike,
                worker_only=kind[1],
                replaces=choose.random() < 0.5,
            )
        )
    return kills


class Bench:
    """Runs qkit in a folder of its own, watches it, and kills it."""

    def __init__(self, folder: Path) -> None:
        self.store = RunStore(folder / RUN)
        self._env = {
            "OMP_NUM_THREADS": "1",
            **os.environ,
            "QKIT_ARTIFACTS": str(folder),
            "QKIT_LOCK_DIR": str(folder),
        }
        self._output = folder / "output.txt"

    def start(self, method: str, *, force: bool) -> subprocess.Popen[bytes]:
        """Start `qkit quantize`."""
        command = [sys.executable, "-m", "qkit", "quantize", "--recipe", "demo", "--run", RUN]
        command += ["--method", method, "--samples", str(SAMPLES), "--seq-len", str(SEQ_LEN)]
        with self._output.open("wb") as stream:
            return subprocess.Popen(
                [*command, *(["--force"] if force else [])],
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=self._env,
            )

    def output(self) -> str:
        """Return what the last run printed."""
        return self._output.read_text(errors="replace")

    def undisturbed(self, method: str) -> tuple[Timing, str]:
        """Run to the end; return when things happened, and the variant's content hash."""
        began = time.monotonic()
        process = self.start(method, force=True)
        work = self.store.quantize_dir(method)
        events: list[Callable[[], bool]] = [
            lambda: _worker_of(process.pid) is not None,
            lambda: self._saved(method),
            (work / RESULT_FILE).is_file,
            lambda: process.poll() is not None,
        ]
        times = []
        for event in events:
            if not wait_for(event, process):
                raise click.ClickException(f"the undisturbed run failed:\n{self.output()}")
            times.append(time.monotonic() - began)
        record = self.store.variant(method)
        if process.returncode or record is None:
            raise click.ClickException(f"the undisturbed run failed:\n{self.output()}")
        return Timing(*times), record.content_hash

    def finish(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for a run's end and return its exit code."""
        return process.wait(timeout=HANGS_AFTER_S)

    def kill(self, kill: Kill, timing: Timing) -> Hit:
        """Start a run, kill it, and judge what is left.

        A run that was over before its time (the machine is faster than when the undisturbed run
        was timed) is no kill; the next try waits half as long.
        """
        delay_s = kill.delay_s(timing)
        while (hit := self._kill(kill, delay_s)).stage == OVER and not hit.violations:
            delay_s /= 2
        return hit

    def _kill(self, kill: Kill, delay_s: float) -> Hit:
        variant = Variant.model_validate({"method": kill.method})
        folder = self.store.model_dir(kill.method)
        if folder.exists() and not kill.replaces:
            shutil.rmtree(folder)
        had_one = folder.exists()
        began = time.time()
        process = self.start(kill.method, force=True)
        if kill.after == "worker":
            wait_for(lambda: _worker_of(process.pid) is not None, process)
        elif kill.after == "saved":
            wait_for(lambda: self._saved(kill.method), process)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(delay_s)
        pids = family(process.pid)
        victim = _worker_of(process.pid) if kill.worker_only else process.pid
        stage = OVER
        if process.poll() is None and victim is not None:
            with contextlib.suppress(ProcessLookupError):
                # Stopped first, so that what it has reached can be read before it is killed.
                os.kill(victim, signal.SIGSTOP)
                stage = self._stage(kill.method, began)
                os.kill(victim, signal.SIGKILL)
        code = self.finish(process)
        found = [
            f"still running: {command}"
            for command in survivors(self.store.root, pids, GONE_WITHIN_S)
        ]
        found += judge_folder(folder, SOURCE, variant, had_one=had_one)
        left = left_behind(self.store.root)
        if kill.worker_only and stage not in (OVER, "verifying"):
            found += judge_worker_death(code, self.output())
            if left:
                found.append(f"left by a worker's death: {', '.join(left)}")
        return Hit(stage, delay_s, had_one, tuple(left), tuple(found))

    def rerun(self, method: str, content_hash: str) -> list[str]:
        """Run again as a person would, and return the violations."""
        code = self.finish(self.start(method, force=False))
        variant = Variant.model_validate({"method": method})
        return judge_rerun(code, self.output(), self.store, SOURCE, variant, content_hash)

    def _saved(self, method: str) -> bool:
        folder = self.store.model_dir(method)
        return any(folder.parent.glob(f".{folder.name}.partial-*/*"))

    def _stage(self, method: str, started: float) -> str:
        work, folder = self.store.quantize_dir(method), self.store.model_dir(method)
        request = work / REQUEST_FILE
        if not request.is_file() or request.stat().st_mtime < started:
            return "before the worker"
        if folder.exists() and folder.stat().st_mtime > started:
            return "in place"
        if any(folder.parent.glob(f".{folder.name}.partial-*/qkit.json")):
            return "renaming"
        if (work / RESULT_FILE).is_file():
            return "verifying"
        progress = work / PROGRESS_FILE
        lines = progress.read_text().splitlines() if progress.is_file() else []
        if not lines:
            return "importing"
        last = json.loads(lines[-1])
        stage = {"save": "saving", "check": "checking logits", "load": "loading"}
        return stage.get(last["stage"], f"layer {last['done']} of {last['total']}")


def _worker_of(pid: int) -> int | None:
    """Return the worker's process id: the child of the guard, which is qkit's child."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for guard in psutil.Process(pid).children():
            for worker in guard.children():
                return int(worker.pid)
    return None


@click.command()
@click.option("--kills", type=click.IntRange(min=1), default=20, show_default=True)
@click.option("--methods", default="gptq,rtn,fp8", show_default=True, help="Taken in turn.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the moments.")
@click.option(
    "--rerun-every",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Kills before a run is let through; more leave more behind.",
)
def main(kills: int, methods: str, seed: int, rerun_every: int) -> None:
    """Kill `qkit quantize` at random moments; end with 1 on any violation."""
    names = methods.split(",")
    violations: list[str] = []
    stages: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="qkit-kills-") as temporary:
        bench = Bench(Path(temporary))
        undisturbed = {}
        for name in names:
            timing, content_hash = bench.undisturbed(name)
            undisturbed[name] = timing, content_hash
            click.echo(
                f"{name}: undisturbed {timing.end_s:.1f} s, first file saved after"
                f" {timing.saved_s:.1f} s, {content_hash[:12]}"
            )
        for number, kill in enumerate(plan_kills(kills, names, seed), start=1):
            timing, content_hash = undisturbed[kill.method]
            hit = bench.kill(kill, timing)
            found = list(hit.violations)
            again = ""
            if number % rerun_every == 0 or number == kills:
                wrong = bench.rerun(kill.method, content_hash)
                found += wrong
                again = "; run again: " + ("wrong" if wrong else "well")
            stages[hit.stage.split(" ")[0]] = stages.get(hit.stage.split(" ")[0], 0) + 1
            violations += found
            click.echo(
                f"{number:>3} {kill.method:<5} {'worker' if kill.worker_only else 'qkit':<6}"
                f" {hit.delay_s:5.2f} s after {kill.after:<6} {hit.stage:<18}"
                f" {'replacing' if hit.had_one else 'new':<9}"
                f" left: {', '.join(hit.left) or 'nothing'}{again}"
            )
            for violation in found:
                click.echo(f"    VIOLATION: {violation}")
    click.echo(
        f"{kills} kills, {len(violations)} violations; hit: "
        + ", ".join(f"{stage} {count}" for stage, count in sorted(stages.items()))
    )
    raise SystemExit(1 if violations else 0)


if __name__ == "__main__":
    main()
