"""Measures one suite on a running server: which module does it, and what is stored."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from qkit import __version__
from qkit.errors import MeasurementError
from qkit.measurements import Hardware, Measurement, Subject
from qkit.plan import Cell
from qkit.reporting import Reporter
from qkit.server import RunningServer
from qkit.store import now
from qkit.suites import BenchSuite


def measure_cell(
    cell: Cell,
    subject: Subject,
    server: RunningServer,
    *,
    key: str,
    hardware: Hardware,
    data: Path | None,
    reporter: Reporter,
) -> Measurement:
    """Measure one suite on a running server and return what is to be stored.

    Raises:
        QkitError: The measurement could not be completed.
    """
    accuracy = bench = None
    if isinstance(cell.settings, BenchSuite):
        from qkit.evaluate.bench import run_bench  # noqa: PLC0415  (imports aiohttp, tokenizers)

        bench = run_bench(
            cell.settings,
            base_url=server.base_url,
            model=server.model,
            tokenizer_path=subject.path,
            max_model_len=server.record.max_model_len,
            on_progress=reporter.progress,
            gpus=server.gpus,
        )
    else:
        from qkit.evaluate.accuracy import run_accuracy  # noqa: PLC0415  (imports lm-eval)

        accuracy = run_accuracy(
            cell.settings,
            base_url=server.base_url,
            model=server.model,
            tokenizer_path=subject.path,
            max_model_len=server.record.max_model_len,
            data=data,
            on_progress=lambda done, total: reporter.progress("questions", done, total),
        )
    return Measurement(
        key=key,
        suite=cell.suite,
        variant=cell.label,
        variant_hash=subject.content_hash,
        created=now(),
        hardware=hardware,
        server=server.record,
        versions={"qkit": __version__, "lm-eval": metadata.version("lm-eval")},
        accuracy=accuracy,
        bench=bench,
        memory=server.memory_use(),
    )


def headline(measurement: Measurement) -> str:
    """Return one line about a measurement, for the person who watches."""
    if measurement.accuracy:
        score = measurement.accuracy.headline
        error = "" if score.stderr is None else f" ± {100 * score.stderr:.2f}"
        return f"{score.metric} {100 * score.value:.2f}{error} (n={score.n})"
    if measurement.bench:
        return "tok/s " + ", ".join(
            f"{cell.concurrency}: "
            + ("failed" if cell.output_tok_per_s is None else f"{cell.output_tok_per_s:.1f}")
            for cell in measurement.bench.cells
        )
    return ""


def lost_levels(measurement: Measurement) -> MeasurementError | None:
    """Return what failed in a sweep that was measured only in part, or None."""
    cells = measurement.bench.cells if measurement.bench else ()
    lost = [cell for cell in cells if cell.output_tok_per_s is None]
    if not lost:
        return None
    reasons = [r.error or r.status for r in lost[0].requests if r.status != "ok"]
    return MeasurementError(
        f"{len(lost)} of {len(cells)} concurrency levels failed "
        f"({', '.join(str(cell.concurrency) for cell in lost)}): "
        f"{reasons[0] if reasons else 'no successful request'}"
    )
