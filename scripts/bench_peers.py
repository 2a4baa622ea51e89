#!/usr/bin/env python3
"""Do the load generator, vLLM's `bench serve` and guidellm agree on the same server?

    python scripts/bench_peers.py URL --tokenizer FOLDER [--guidellm-python PYTHON]
        [--concurrency 8] [--requests 64] [--repeats 5]

They send, in turns, the same number of requests of the same lengths, with the same sampling and as
many requests of warm-up, to a server that runs already (`qkit serve bf16 --recipe demo`). Every
repeat has prompts of its own. For each tool the medians of its repeats are printed with the
repeats' spread (range in percent of the median). Within 5 % (TPOT, throughput), or within the
larger of the two spreads (TTFT, which moves most between repeats), they agree. Where the repeats of
one tool spread over more than 5 %, and over no less than the tools' difference, nothing is decided.
The exit code is 0 where all figures agree, else 1. Run it on an idle machine: the clients share its
cores with a CPU server, and the load average stands beside every figure.

guidellm lives in an environment of its own, made by hand; without `--guidellm-python` it is left
out. Its only data loader needs torch (an override that drops torch breaks it), of which the CPU
build will do:

    uv venv guidellm
    uv pip install --python guidellm/bin/python --torch-backend cpu guidellm==0.8.1
    python scripts/bench_peers.py URL --tokenizer FOLDER --guidellm-python guidellm/bin/python

What differs by definition:

- Throughput's time ends with the last token for qkit and guidellm, with the last response for bench
  serve. The summary that guidellm prints covers its warm-up; the figures here are made from its
  record of every request.
- guidellm's own "time per output token" is (last token - request sent) / output tokens. Its line
  shows it beside what that would be for qkit; the line TPOT compares the same quantity.
- guidellm's first token is the first chunk with text. Where chunks without text (half a character)
  came first, the script says so and counts from them, as the others do.
- qkit and guidellm ask for a running token count in every chunk; bench serve does not.
- guidellm's warm-up runs into what is measured, without a pause; the other two pause.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from peer_figures import (
    AGREE_PERCENT,
    Figures,
    GuidellmFigures,
    UnfitOutputError,
    agreement,
    as_guidellm_tpot,
    read_bench_serve,
    read_guidellm,
)

from qkit.environments import python_of
from qkit.errors import QkitError
from qkit.evaluate.bench import run_bench
from qkit.hardware import detect_accelerator
from qkit.server import attach
from qkit.suites import BenchSuite

VLLM_CLIENT = Path(__file__).resolve().parent / "vllm_bench_serve.py"
SAMPLING = {"temperature": 0, "top_p": 1, "repetition_penalty": 1}
#: guidellm's own default for the processes that send.
MOST_SENDERS = 10
#: A hung client ends the script.
LONGEST_RUN_S = 1800


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
        "--base-url": server_of(args.url),
        "--endpoint": "/v1/completions",
        "--model": model,
        "--tokenizer": args.tokenizer,
        "--dataset-name": "random",
        "--random-input-len": args.input_tokens,
        "--random-output-len": args.output_tokens,
        "--num-prompts": args.requests,
        "--num-warmups": args.concurrency,
        "--max-concurrency": args.concurrency,
        "--temperature": SAMPLING["temperature"],
        "--extra-body": json.dumps(
            {name: value for name, value in SAMPLING.items() if name != "temperature"}
        ),
        "--seed": 1_000 + repeat,
    }
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [str(python), str(VLLM_CLIENT), str(result), "--ignore-eos"]
        command += [str(part) for item in options.items() for part in item]
        run_client("bench serve", command, result)
        return read_bench_serve(
            json.loads(result.read_text(encoding="utf-8")),
            requests=args.requests,
            output_tokens=args.output_tokens,
        )


def with_guidellm(args: argparse.Namespace, model: str, repeat: int) -> GuidellmFigures:
    """Measure with guidellm. Its tokenizer comes from the folder, so nothing is downloaded.

    By default it starts up to ten processes that send, each of which imports everything again. On
    few cores they would take the server's time, so that half of the cores is the limit here.
    """
    senders = min(MOST_SENDERS, max(1, (os.cpu_count() or 1) // 2))
    with tempfile.TemporaryDirectory() as folder:
        scenario, result = Path(folder) / "scenario.json", Path(folder) / "report.json"
        spec = {
            "backend": {
                "kind": "openai_http",
                "target": server_of(args.url),
                "model": model,
                "request_format": "/v1/completions",
                "extras": {"body": {**SAMPLING, "ignore_eos": True}},
            },
            "profile": {"kind": "concurrent", "streams": [args.concurrency]},
            "constraints": [{"kind": "max_requests", "count": args.concurrency + args.requests}],
            "tokenizer": {"kind": "huggingface_auto", "model": str(args.tokenizer)},
            "data": [
                {
                    "kind": "synthetic_text",
                    "prompt_tokens": args.input_tokens,
                    "output_tokens": args.output_tokens,
                }
            ],
            "seed": {"kind": "static", "value": 2_000 + repeat},
            "outputs": [{"kind": "json", "path": str(result)}],
        }
        scenario.write_text(json.dumps({"spec": spec}), encoding="utf-8")
        command = [str(args.guidellm_python), "-m", "guidellm", "run"]
        command += ["--config", str(scenario), "--disable-console"]
        env = {"HF_HUB_OFFLINE": "1", "GUIDELLM__MAX_WORKER_PROCESSES": str(senders)}
        run_client("guidellm", command, result, env=env)
        return read_guidellm(
            json.loads(result.read_text(encoding="utf-8")),
            warmups=args.concurrency,
            requests=args.requests,
            input_tokens=args.input_tokens,
            output_tokens=args.output_tokens,
        )


def server_of(url: str) -> str:
    """Return the address of a server without the API's version."""
    return url.rstrip("/").removesuffix("/v1")


def run_client(
    tool: str, command: Sequence[str], result: Path, env: dict[str, str] | None = None
) -> None:
    """Run a tool in its own environment; end with what it said where it wrote no result."""
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            check=False,
            timeout=LONGEST_RUN_S,
        )
    except OSError as error:
        raise SystemExit(f"{tool} cannot be started: {error}") from None
    except subprocess.TimeoutExpired:
        raise SystemExit(f"{tool} did not end within {LONGEST_RUN_S} s") from None
    if done.returncode or not result.is_file():
        raise SystemExit(f"{tool} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def check_guidellm(python: Path) -> None:
    """End, before anything is measured, where guidellm cannot be run."""
    try:
        done = subprocess.run(
            [str(python), "-c", "import guidellm.entrypoints, torch"],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        raise SystemExit(f"--guidellm-python cannot be started: {error}") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise SystemExit(f"--guidellm-python: {python} cannot run guidellm: {reason}")


def print_agreement(tool: str, ours: Sequence[Figures], theirs: Sequence[Figures]) -> bool:
    """Print qkit's figures beside a tool's, and return whether all are within their limits."""
    print(f"\nqkit against {tool}, medians of {len(ours)} repeats (spread of the repeats)")
    print(f"  {'':14}{'qkit':>20}{tool:>20}{'difference':>13}  verdict")
    lines: tuple[tuple[str, Callable[[Figures], float], float | None], ...] = (
        ("TPOT ms", lambda f: f.tpot_ms, AGREE_PERCENT),
        ("output tok/s", lambda f: f.output_tok_per_s, AGREE_PERCENT),
        ("TTFT ms", lambda f: f.ttft_ms, None),
    )
    words = []
    for name, figure, limit in lines:
        found = agreement([*map(figure, ours)], [*map(figure, theirs)], limit_percent=limit)
        mine = f"{found.ours:.2f} ({found.our_spread_percent:.1f} %)"
        other = f"{found.theirs:.2f} ({found.their_spread_percent:.1f} %)"
        print(
            f"  {name:14}{mine:>20}{other:>20}{found.difference_percent:>+11.1f} %  {found.verdict}"
        )
        words.append(found.word)
    return all(word == "within" for word in words)


def print_definitions(
    ours: Sequence[Figures], theirs: Sequence[GuidellmFigures], args: argparse.Namespace
) -> None:
    """Print what guidellm's own words stand for."""
    found = agreement(
        [as_guidellm_tpot(figures, args.output_tokens) for figures in ours],
        [repeat.own_tpot_ms for repeat in theirs],
    )
    print(
        f"  explained by definition: guidellm's own time per output token is {found.theirs:.2f} ms,"
        f" first token included;\n  so counted, qkit's is about {found.ours:.2f} ms "
        f"({found.difference_percent:+.1f} %)"
    )
    if textless := sum(repeat.textless_first for repeat in theirs):
        print(
            f"  explained by definition: {textless} of {len(theirs) * args.requests} requests "
            "began with a chunk without text, which\n  guidellm's own time to first token passes "
            "over and the figures above count"
        )


def measure(
    args: argparse.Namespace,
    model: str,
    repeat: int,
    into: tuple[list[Figures], list[Figures], list[GuidellmFigures]],
) -> None:
    """Let every tool measure once, and print each one's figures as they come."""
    qkit, vllm, guidellm = into

    def first() -> Figures:
        qkit.append(with_qkit(args, model, repeat))
        return qkit[-1]

    def second() -> Figures:
        vllm.append(with_vllm(args, model, repeat))
        return vllm[-1]

    def third() -> Figures:
        guidellm.append(with_guidellm(args, model, repeat))
        return guidellm[-1].figures

    turns: list[tuple[str, Callable[[], Figures]]] = [("qkit", first), ("bench serve", second)]
    if args.guidellm_python:
        turns.append(("guidellm", third))
    print(f"repeat {repeat + 1} of {args.repeats}, {os.cpu_count()} cores")
    # Each tool begins a round in its turn: what comes first may find the machine otherwise.
    shift = repeat % len(turns)
    for name, turn in turns[shift:] + turns[:shift]:
        load = os.getloadavg()[0]
        found = turn()
        print(
            f"  {name:12} TPOT {found.tpot_ms:8.2f} ms  {found.output_tok_per_s:9.2f} tok/s  "
            f"TTFT {found.ttft_ms:8.2f} ms  (load average before: {load:.1f})",
            flush=True,
        )


def main() -> None:
    """Measure in turns, print medians, and say whether they agree."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("url")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--guidellm-python", type=Path, help="interpreter that has guidellm 0.8")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if min(args.concurrency, args.requests, args.input_tokens) < 1:
        parser.error("concurrency, requests and input tokens must be at least 1")
    if args.repeats < 2:
        parser.error("--repeats must be at least 2: a single one has no spread")
    if args.output_tokens < 2:
        parser.error("--output-tokens must be at least 2: TPOT is undefined below")
    if not args.tokenizer.is_dir():
        parser.error(f"--tokenizer: no folder {args.tokenizer}")
    qkit: list[Figures] = []
    vllm: list[Figures] = []
    guidellm: list[GuidellmFigures] = []
    try:
        model = attach(args.url).model
        if args.guidellm_python:
            check_guidellm(args.guidellm_python)
        else:
            print(
                "guidellm is left out: --guidellm-python is not given (the script's top says how)"
            )
        print(
            f"{args.requests} requests a repeat at concurrency {args.concurrency}, "
            f"{args.input_tokens} tokens in, exactly {args.output_tokens} out; "
            f"{json.dumps(SAMPLING)}"
        )
        for repeat in range(args.repeats):
            measure(args, model, repeat, into=(qkit, vllm, guidellm))
    except UnfitOutputError as error:
        raise SystemExit(f"nothing to compare: {error}") from None
    except QkitError as error:
        raise SystemExit(str(error)) from None
    agree = print_agreement("bench serve", qkit, vllm)
    if guidellm:
        agree &= print_agreement("guidellm", qkit, [repeat.figures for repeat in guidellm])
        print_definitions(qkit, guidellm, args)
    raise SystemExit(0 if agree else 1)


if __name__ == "__main__":
    main()
