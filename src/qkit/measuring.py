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
from qkit.suites import FIDELITY_AGAIN, BenchSuite, FidelitySuite


def measure_cell(
    cell: Cell,
    subject: Subject,
    server: RunningServer,
    *,
    key: str,
    hardware: Hardware,
    data: Path | None,
    reporter: Reporter,
    scores_file: Path,
    resume: bool = True,
) -> Measurement:
    """Measure one suite on a running server and return what is to be stored.

    Args:
        cell: What to measure.
        subject: The checkpoint that is served.
        server: Where it is served.
        key: Key of the measurement.
        hardware: The machine.
        data: Folder of local data sets.
        reporter: Who is told.
        scores_file: Where a fidelity suite's log-probabilities go.
        resume: Whether to go on where an interrupted suite of the same key stopped.

    Raises:
        QkitError: The measurement could not be completed.
    """
    accuracy = bench = fidelity = None
    if isinstance(cell.settings, BenchSuite):
        from qkit.evaluate.bench import run_bench  # noqa: PLC0415  (imports aiohttp, tokenizers)

        bench = run_bench(
            cell.settings,
            base_url=server.base_url,
            model=server.model,
            tokenizer_path=subject.path,
            max_model_len=server.record.max_model_len,
            on_progress=reporter.progress,
        )
    elif isinstance(cell.settings, FidelitySuite):
        from qkit.evaluate.fidelity import run_fidelity  # noqa: PLC0415  (imports lm-eval)

        fidelity = run_fidelity(
            cell.settings,
            base_url=server.base_url,
            model=server.model,
            tokenizer_path=subject.path,
            max_model_len=server.record.max_model_len,
            scores_file=scores_file,
            key=key,
            resume=resume,
            backwards=cell.suite == FIDELITY_AGAIN,
            on_progress=lambda done, total: reporter.progress("windows of text", done, total),
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
        fidelity=fidelity,
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
    if measurement.fidelity:
        scored = measurement.fidelity
        return f"perplexity {scored.perplexity:.4g} ({scored.scored_tokens:,} tokens)"
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
