#!/usr/bin/env python3
"""What `qkit quantize` takes on top of a bare llm-compressor script that does the same work.

    python scripts/bench_quantize.py [--model DIR] [--method gptq] [--samples 8] [--seq-len 256]

Both run under the same environment, read the same rows and make the same weights, compared byte
for byte. They run in turn, each pair in the other order, with qkit's memory of file digests empty;
the overhead is the median of the pairs' ratios. qkit also proves what it saved, which the bare
script does not; the overhead is printed with these checks and without them. On a machine that
others use, go by the processor time: waiting for them is not in it.
"""

from __future__ import annotations

import filecmp
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from qkit.cache import cache_dir
from qkit.environments import python_of
from qkit.protocol import PROGRESS_FILE, REQUEST_FILE, RESULT_FILE
from qkit.recipe import RECIPES_DIR
from qkit.store import RunStore

DEMO = RECIPES_DIR / "demo"
BARE = Path(__file__).with_name("bare_llmcompressor.py")
SEED = 0
POLL_S = 0.02
TOTAL, PROCESSOR = "total", "processor time"
#: Parts of qkit's run that prove the variant and that a bare script does not have.
CHECKS = ("source's logits", "variant's logits", "files and hash")
#: A stage of the worker's progress to the part that begins with it.
STAGES = {
    "load": "load",
    "reference": "source's logits",
    "quantize": "quantize",
    "save": "save",
    "check": "variant's logits",
}


@dataclass(frozen=True)
class Work:
    """What both sides do."""

    model: Path
    method: str
    samples: int
    seq_len: int


def run_bare(work: Work, folder: Path, python: Path) -> dict[str, float]:
    """Run the bare script; return the seconds of its parts, of all, and of the processor."""
    done = folder / "done.json"
    arguments = [work.model, DEMO / "calibration.jsonl", folder / "model", work.method]
    arguments += [work.samples, work.seq_len, SEED, done]
    began, used = time.perf_counter(), processor_s()
    with (folder / "log").open("wb") as log:
        subprocess.run(
            [str(python), "-P", str(BARE), *map(str, arguments)],
            check=True,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment({"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}),
        )
    parts = json.loads(done.read_text())
    return {**parts, TOTAL: time.perf_counter() - began, PROCESSOR: processor_s() - used}


def run_qkit(work: Work, folder: Path) -> dict[str, float]:
    """Run `qkit quantize`, watch its files, and return the same as `run_bare`."""
    store = RunStore(folder / "run")
    files = store.quantize_dir(work.method)
    command = [sys.executable, "-m", "qkit", "quantize", "--recipe", "demo", "--run", "run"]
    command += ["--model", str(work.model), "--method", work.method, "--accelerator", "cpu"]
    command += ["--samples", str(work.samples), "--seq-len", str(work.seq_len)]
    fresh = folder / "cache"
    fresh.mkdir()
    (fresh / "environments").symlink_to(cache_dir() / "environments")
    variables = {
        "QKIT_ARTIFACTS": str(folder),
        "QKIT_LOCK_DIR": str(folder),
        "QKIT_CACHE": str(fresh),
    }
    began, used = time.perf_counter(), processor_s()
    marks = [(0.0, "start, preflight, hash")]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment(variables)
        )
    while process.poll() is None:
        new = reached(files)[len(marks) - 1 :]
        marks += [(time.perf_counter() - began, name) for name in new]
        time.sleep(POLL_S)
    total = time.perf_counter() - began
    if process.returncode:
        raise click.ClickException((folder / "log").read_text())
    marks += [(total, name) for name in reached(files)[len(marks) - 1 :]]
    ends = [*(at for at, _ in marks[1:]), total]
    parts = {name: end - at for (at, name), end in zip(marks, ends, strict=True)}
    return {**parts, TOTAL: total, PROCESSOR: processor_s() - used}


def processor_s() -> float:
    """Return the processor seconds of all children that have ended, and of theirs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def reached(files: Path) -> list[str]:
    """Return the parts a run has begun after its start, in order, by the files it has written."""
    found = []
    if files.is_dir():
        found.append("calibration")
    if (files / REQUEST_FILE).is_file():
        found.append("import")
    progress = files / PROGRESS_FILE
    lines = progress.read_text().splitlines() if progress.is_file() else []
    stages = [json.loads(line)["stage"] for line in lines if line.endswith("}")]
    found += [STAGES[stage] for stage in dict.fromkeys(stages)]
    if (files / RESULT_FILE).is_file():
        found.append("files and hash")
    return found


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a run: one compute thread unless more are asked for."""
    return {"OMP_NUM_THREADS": "1", **os.environ, **variables}


def overheads(pairs: list[tuple[dict[str, float], dict[str, float]]]) -> dict[str, list[float]]:
    """Return each pair's overhead, with the checks and without, in percent of the bare run."""
    return {
        "with its checks": [100 * (own[TOTAL] / bare[TOTAL] - 1) for bare, own in pairs],
        "without them": [
            100 * ((own[TOTAL] - sum(own.get(part, 0.0) for part in CHECKS)) / bare[TOTAL] - 1)
            for bare, own in pairs
        ],
        "with its checks, in processor time": [
            100 * (own[PROCESSOR] / bare[PROCESSOR] - 1) for bare, own in pairs
        ],
    }


def show(name: str, runs: list[dict[str, float]]) -> None:
    """Print the medians of one side's parts."""
    click.echo(f"{name}: seconds, median (least to most) of {len(runs)}")
    for part in runs[0]:
        own = [run[part] for run in runs]
        share = statistics.median(run[part] / run[TOTAL] for run in runs)
        click.echo(
            f"  {part:<23} {statistics.median(own):8.2f}"
            f"  ({min(own):.2f} to {max(own):.2f})  {100 * share:5.1f} %"
        )


@click.command()
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path),
    default=DEMO / "model",
    help="Checkpoint with a chat template. Default: the demo's, too small to say much.",
)
@click.option("--method", type=click.Choice(["gptq", "rtn", "fp8"]), default="gptq")
@click.option("--samples", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--seq-len", type=click.IntRange(min=8), default=256, show_default=True)
@click.option("--pairs", type=click.IntRange(min=1), default=3, show_default=True)
def main(model: Path, method: str, samples: int, seq_len: int, pairs: int) -> None:
    """Time `qkit quantize` against a bare llm-compressor script on the same work."""
    work, python = Work(model, method, samples, seq_len), python_of("quantize", "cpu")
    measured = []
    for number in range(pairs):
        with tempfile.TemporaryDirectory(prefix="qkit-bench-") as temporary:
            bare_folder, own_folder = Path(temporary) / "bare", Path(temporary) / "qkit"
            bare_folder.mkdir()
            own_folder.mkdir()
            if number % 2:
                own = run_qkit(work, own_folder)
                bare = run_bare(work, bare_folder, python)
            else:
                bare = run_bare(work, bare_folder, python)
                own = run_qkit(work, own_folder)
            made = RunStore(own_folder / "run").model_dir(method)
            for path in sorted(made.glob("*.safetensors")):
                if not filecmp.cmp(path, bare_folder / "model" / path.name, shallow=False):
                    raise click.ClickException(f"{path.name} differs: not the same work")
        measured.append((bare, own))
        click.echo(
            f"pair {number + 1}: bare {bare[TOTAL]:.1f} s, qkit {own[TOTAL]:.1f} s,"
            f" {100 * (own[TOTAL] / bare[TOTAL] - 1):+.1f} %; of the processor"
            f" {bare[PROCESSOR]:.1f} s and {own[PROCESSOR]:.1f} s,"
            f" {100 * (own[PROCESSOR] / bare[PROCESSOR] - 1):+.1f} %;"
            f" load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs"
        )
    click.echo(f"\n{method} of {model.name}, {samples} x {seq_len} tokens, weights equal")
    show("bare", [bare for bare, _ in measured])
    show("qkit", [own for _, own in measured])
    for name, values in overheads(measured).items():
        click.echo(
            f"overhead {name}: {statistics.median(values):+.1f} %"
            f" ({min(values):+.1f} to {max(values):+.1f})"
        )


if __name__ == "__main__":
    main()
