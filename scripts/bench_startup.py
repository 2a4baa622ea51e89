#!/usr/bin/env python3
"""How long `qkit --help` takes, as a multiple of an interpreter that starts and ends.

    python scripts/bench_startup.py [--runs 15]

Both are run in turn, so that a machine that slows down slows both; the median of each and the
ratio of each pair's times are printed.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

import click

COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "import click": [sys.executable, "-c", "import click"],
    "qkit --help": [sys.executable, "-m", "qkit", "--help"],
}


def seconds(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


@click.command()
@click.option("--runs", type=click.IntRange(min=3), default=15, show_default=True)
def main(runs: int) -> None:
    """Time `qkit --help` against the bare interpreter."""
    for command in COMMANDS.values():
        seconds(command)  # fills the caches of files and bytecode
    times = [{name: seconds(command) for name, command in COMMANDS.items()} for _ in range(runs)]
    for name in COMMANDS:
        own = [run[name] for run in times]
        ratio = statistics.median(run[name] / run["python -c pass"] for run in times)
        click.echo(
            f"{name:<16} median {1000 * statistics.median(own):6.1f} ms  "
            f"min {1000 * min(own):6.1f}  max {1000 * max(own):6.1f}  ratio {ratio:.1f}x"
        )


if __name__ == "__main__":
    main()
