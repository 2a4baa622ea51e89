#!/usr/bin/env python3
"""Do the load generator and vLLM's `bench serve` agree on the same server?

    python scripts/bench_peers.py URL --tokenizer FOLDER [--concurrency 8] [--repeats 5]

Both send, in turns, the same number of requests of the same lengths, with the same sampling, to a
server that runs already (`qkit serve bf16 --recipe demo`). For each tool the medians of its
repeats are printed with the repeats' spread. Within 5 % (TPOT, throughput), or within the larger
of the two spreads (TTFT, which moves most between repeats), they agree; the exit code is 1 where
they do not. The two define throughput's time alike but for the end: the load generator's ends with
the last token, bench serve's with the last response.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from qkit.environments import python_of
from qkit.evaluate.bench import run_bench
from qkit.hardware import detect_accelerator
from qkit.server import attach
from qkit.suites import BenchSuite

VLLM_CLIENT = Path(__file__).resolve().parent / "vllm_bench_serve.py"
#: Largest difference of medians of TPOT and throughput, in percent.
AGREE_PERCENT = 5.0


@dataclass(frozen=True, slots=True)
class Figures:
    """One repeat of one tool."""

    ttft_ms: float
    tpot_ms: float
    output_tok_per_s: float


def with_qkit(args: argparse.Namespace, model: str, repeat: int) -> Figures:
    """Measure with the load generator."""
    suite = BenchSuite(
        concurrency=(args.concurrency,),
        min_requests=args.requests,
        requests_per_slot=1,
        input_tokens=args.input_tokens,
        output_tokens=args.output_tokens,
        seed=repeat,
    )
    (cell,) = run_bench(
        suite,
        base_url=args.url,
        model=model,
        tokenizer_path=args.tokenizer,
        max_model_len=None,
    ).cells
    for mark in cell.marks:
        print(f"  note: {mark}")
    if cell.ttft_ms.p50 is None or cell.tpot_ms.p50 is None or cell.output_tok_per_s is None:
        raise SystemExit("requests failed, so there is nothing to compare")
    return Figures(cell.ttft_ms.p50, cell.tpot_ms.p50, cell.output_tok_per_s)


def with_vllm(args: argparse.Namespace, model: str, repeat: int) -> Figures:
    """Measure with vLLM's own client, warmed up as much."""
    python = python_of("serve", detect_accelerator("auto"))
    options = {
        "--backend": "openai",
        "--base-url": args.url.rstrip("/").removesuffix("/v1"),
        "--endpoint": "/v1/completions",
        "--model": model,
        "--tokenizer": args.tokenizer,
        "--dataset-name": "random",
        "--random-input-len": args.input_tokens,
        "--random-output-len": args.output_tokens,
        "--num-prompts": args.requests,
        "--num-warmups": args.concurrency,
        "--max-concurrency": args.concurrency,
        "--temperature": 0,
        "--extra-body": json.dumps({"top_p": 1, "repetition_penalty": 1}),
        "--seed": 1_000 + repeat,
    }
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [str(python), str(VLLM_CLIENT), str(result), "--ignore-eos"]
        command += [str(part) for item in options.items() for part in item]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"bench serve failed:\n{done.stderr[-2000:]}")
        found = json.loads(result.read_text())
    return Figures(found["median_ttft_ms"], found["median_tpot_ms"], found["output_throughput"])


def spread_percent(values: list[float]) -> float:
    """Return the range of repeats in percent of their median."""
    return 100 * (max(values) - min(values)) / statistics.median(values)


def compare(name: str, ours: list[float], theirs: list[float], *, by_spread: bool) -> bool:
    """Print one figure of both tools and tell whether they agree."""
    mine, other = statistics.median(ours), statistics.median(theirs)
    difference = 100 * (mine - other) / other
    spreads = spread_percent(ours), spread_percent(theirs)
    limit = max(AGREE_PERCENT, *spreads) if by_spread else AGREE_PERCENT
    agrees = abs(difference) <= limit
    print(
        f"{name:18} qkit {mine:9.2f} (spread {spreads[0]:5.1f} %)   bench serve {other:9.2f} "
        f"(spread {spreads[1]:5.1f} %)   {difference:+6.1f} %  "
        f"{'within' if agrees else 'not within'} {limit:.1f} %"
    )
    return agrees


def main() -> None:
    """Measure in turns, print medians, and say whether they agree."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("url")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    model = attach(args.url).model
    tools: tuple[Callable[[argparse.Namespace, str, int], Figures], ...] = (with_qkit, with_vllm)
    found: tuple[list[Figures], list[Figures]] = ([], [])
    for repeat in range(args.repeats):
        for tool, figures in zip(tools, found, strict=True):
            figures.append(tool(args, model, repeat))
    ours, theirs = found
    agree = [
        compare("TPOT ms", [f.tpot_ms for f in ours], [f.tpot_ms for f in theirs], by_spread=False),
        compare(
            "output tok/s",
            [f.output_tok_per_s for f in ours],
            [f.output_tok_per_s for f in theirs],
            by_spread=False,
        ),
        compare("TTFT ms", [f.ttft_ms for f in ours], [f.ttft_ms for f in theirs], by_spread=True),
    ]
    raise SystemExit(0 if all(agree) else 1)


if __name__ == "__main__":
    main()
