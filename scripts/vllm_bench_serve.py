"""Runs vLLM's `bench serve` and prints what it measured and the CPU time it took, as JSON.

    SERVE_PYTHON scripts/vllm_bench_serve.py RESULT.json --backend openai --base-url URL ...

For the serve environment's interpreter, with the options of `vllm bench serve`: the `vllm` command
itself asks for the version of a distribution called vllm, which the CPU build does not have. The
CPU time is that of the benchmark alone, without imports and prompts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from vllm.benchmarks import serve


def main() -> None:
    """Run the benchmark; write its result with `cpu_s` added."""
    target, *options = sys.argv[1:]
    parser = argparse.ArgumentParser()
    serve.add_cli_args(parser)
    benchmark = serve.benchmark
    cpu_s = 0.0

    async def timed(*args: Any, **kwargs: Any) -> Any:
        nonlocal cpu_s
        before = time.process_time()
        try:
            return await benchmark(*args, **kwargs)
        finally:
            cpu_s = time.process_time() - before

    serve.benchmark = timed
    result = serve.main(parser.parse_args([*options, "--disable-tqdm"]))
    figures = {key: value for key, value in result.items() if isinstance(value, (int, float))}
    Path(target).write_text(json.dumps({**figures, "cpu_s": cpu_s}), encoding="utf-8")


if __name__ == "__main__":
    main()
