#!/usr/bin/env python3
"""What the load generator costs: CPU time per streamed chunk, against others' clients.

    python scripts/bench_client.py [--streams 64] [--requests 256] [--tokens 128] [--repeats 3]

A fake server in a process of its own streams at a set pace. In turns, over the same number of
requests and streams, run (a) a bare aiohttp loop that stamps every read and throws it away,
(b) the load generator, whose parsing and records, done after the streams have ended, are timed
apart, and (c), where the serve environment is there, vLLM's own `bench serve`. Process time is CPU
time, so the figures do not depend on the server's pace.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import uvloop

from qkit.environments import python_of
from qkit.errors import QkitError
from qkit.evaluate.bench_requests import request_body, to_record
from qkit.evaluate.cell_plan import CellPlanner
from qkit.evaluate.clients import run_load
from qkit.evaluate.load import Breaker, Load, open_session
from qkit.evaluate.workloads.units import CellPrompts
from qkit.evaluate.workloads.vocabulary import Vocabulary, load_vocabulary
from qkit.suites import BenchSuite

ROOT = Path(__file__).resolve().parent.parent
FAKE = ROOT / "tests" / "fakes" / "paced_server.py"
VLLM_CLIENT = ROOT / "scripts" / "vllm_bench_serve.py"
MICRO = 1e6


async def bare(url: str, bodies: list[bytes], streams: int) -> int:
    """Stream all bodies with aiohttp alone; return the number of reads."""
    reads = 0
    waiting = iter(bodies)
    headers = {"Content-Type": "application/json"}

    async def slot(session: aiohttp.ClientSession) -> None:
        nonlocal reads
        for body in waiting:
            async with session.post(url, data=body, headers=headers) as response:
                async for _ in response.content.iter_any():
                    time.perf_counter()
                    reads += 1

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(slot(session) for _ in range(streams)))
    return reads


class Ours:
    """The load generator on the same bodies; parsing is timed apart from receiving."""

    def __init__(self, suite: BenchSuite, cell: CellPrompts, vocabulary: Vocabulary) -> None:
        self.parse_s = 0.0
        self._suite, self._cell, self._vocabulary = suite, cell, vocabulary

    async def __call__(self, url: str, bodies: list[bytes], streams: int) -> int:
        """Stream all bodies, then read the replies; return the number of reads."""
        load = Load(url, tuple((body,) for body in bodies), 600, streams)
        async with open_session() as session:
            sent = await run_load(session, load, Breaker(limit=streams), lambda: None)
        replies = [raw for unit in sent.replies for raw in unit]
        before = time.process_time()
        records = [
            to_record(
                raw,
                index=index,
                origin_s=0.0,
                suite=self._suite,
                turn=turn,
                vocabulary=self._vocabulary,
            )
            for index, (raw, turn) in enumerate(zip(replies, self._cell.turns, strict=True))
        ]
        self.parse_s = time.process_time() - before
        if any(record.status != "ok" for record in records):
            raise SystemExit(f"a request failed: {records[0].error}")
        return sum(len(raw.reads) for raw in replies)


def cpu_per_read(
    client: Callable[[str, list[bytes], int], Awaitable[int]],
    url: str,
    bodies: list[bytes],
    streams: int,
) -> tuple[float, int]:
    """Return CPU microseconds per read, everything included, and the number of reads."""

    async def run() -> int:
        return await client(url, bodies, streams)

    before = time.process_time()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        reads = runner.run(run())
    return (time.process_time() - before) / reads * MICRO, reads


def vllm_cpu_us(python: Path, url: str, args: argparse.Namespace) -> float:
    """Return the CPU microseconds per chunk of vLLM's `bench serve`."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        options = {
            "--backend": "openai",
            "--base-url": url,
            "--endpoint": "/v1/completions",
            "--model": "fake-model",
            "--tokenizer": args.tokenizer,
            "--dataset-name": "random",
            "--random-input-len": 64,
            "--random-output-len": args.tokens,
            "--num-prompts": args.requests,
            "--max-concurrency": args.streams,
            "--temperature": 0,
        }
        command = [str(python), str(VLLM_CLIENT), str(result), "--ignore-eos"]
        command += [str(part) for item in options.items() for part in item]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"bench serve failed:\n{done.stderr[-2000:]}")
        cpu_s = json.loads(result.read_text())["cpu_s"]
    # Its one test request beside the measured ones.
    return float(cpu_s) / (args.requests + 1) / args.tokens * MICRO


def serve_python() -> Path | None:
    """Return the serve environment's interpreter, or None where it was not made."""
    try:
        return python_of("serve", "cpu")
    except QkitError:
        return None


def main() -> None:
    """Measure the clients in turns and print the medians and their ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--gap-ms", type=float, default=20.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokenizer", type=Path, default=ROOT / "recipes" / "demo" / "model")
    args = parser.parse_args()

    suite = BenchSuite(
        concurrency=(args.streams,),
        min_requests=args.requests,
        requests_per_slot=1,
        input_tokens=64,
        output_tokens=args.tokens,
    )
    vocabulary = load_vocabulary(args.tokenizer)
    (cell,) = CellPlanner(suite, vocabulary).named
    bodies = [request_body(suite, "fake-model", turn) for turn in cell.turns]
    ours = Ours(suite, cell, vocabulary)

    command = [sys.executable, str(FAKE), "--token-gap-s", str(args.gap_ms / 1000)]
    python = serve_python()
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        root = server.stdout.readline().strip()
        url = root + "/v1/completions"
        bare_us, receive_us, parse_us, ratios, vllm_us = [], [], [], [], []
        for _ in range(args.repeats):
            theirs, _reads = cpu_per_read(bare, url, bodies, args.streams)
            total, reads = cpu_per_read(ours, url, bodies, args.streams)
            parse = ours.parse_s / reads * MICRO
            bare_us.append(theirs)
            receive_us.append(total - parse)
            parse_us.append(parse)
            ratios.append((total - parse) / theirs)
            if python:
                vllm_us.append(vllm_cpu_us(python, root, args))
        server.communicate()  # closes its standard input, at which it ends

    print(f"{args.streams} streams, {len(bodies)} requests of {args.tokens} chunks, ", end="")
    print(f"median of {args.repeats}, CPU microseconds per chunk:")
    print(f"  bare aiohttp, stamps only          {statistics.median(bare_us):6.1f}")
    print(f"  load generator, while streaming    {statistics.median(receive_us):6.1f}")
    print(f"  load generator, parsing afterwards {statistics.median(parse_us):6.1f}")
    print(f"  ratio while streaming / bare       {statistics.median(ratios):6.2f}")
    if vllm_us:
        vllm, ours_us = statistics.median(vllm_us), statistics.median(receive_us)
        print(f"  vLLM's bench serve, all of it      {vllm:6.1f}")
        whole = (ours_us + statistics.median(parse_us)) / vllm
        print(f"  ratio streaming and parsing / vLLM {whole:6.2f}")


if __name__ == "__main__":
    main()
