"""Measures one suite on a running server: which module does it, and what is stored."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from qkit import __version__
from qkit.errors import MeasurementError
from qkit.levels import names
from qkit.measurements import (
    AccuracyResult,
    BenchResult,
    FidelityResult,
    Hardware,
    Measurement,
    Subject,
)
from qkit.plan import Cell
from qkit.recipe import is_again
from qkit.reporting import Reporter
from qkit.server import RunningServer
from qkit.store import now
from qkit.suites import FIDELITY_AGAIN, AccuracySuite, BenchSuite, FidelitySuite


@dataclass(frozen=True)
class AnswersFile:
    """The file of an unfinished suite's answers.

    Attributes:
        path: The file.
        key: What the answers depend on besides the requests: `qkit.plan.answers_key`, or
            `qkit.server.instance_of` a server that qkit did not start.
    """

    path: Path
    key: str


@dataclass(frozen=True)
class Kept:
    """What an interrupted suite left, and where a running one keeps what it has so far.

    Attributes:
        levels: Levels of a benchmark that are measured already; they are taken over.
        on_level: Called after every level of a benchmark with what there is so far.
        answers: Where an accuracy suite keeps its answers until it is finished; None for a server
            that does not say enough of itself for them to be taken up again.
        scores_file: Where a fidelity suite's log-probabilities go.
        resume: Whether a fidelity suite of the same key goes on where it stopped.
    """

    levels: BenchResult | None
    on_level: Callable[[Measurement], None]
    answers: AnswersFile | None
    scores_file: Path
    resume: bool


def measure_cell(
    cell: Cell,
    subject: Subject,
    server: RunningServer,
    *,
    key: str,
    hardware: Hardware,
    data: Path | None,
    reporter: Reporter,
    kept: Kept,
) -> Measurement:
    """Measure one suite on a running server and return what is to be stored.

    Args:
        cell: What to measure.
        subject: The checkpoint that is served.
        server: Where it is served.
        key: Of everything that shapes the result.
        hardware: The machine.
        data: Folder of local copies of hub data sets.
        reporter: Who is told.
        kept: What an interrupted run of the suite left, and where this one leaves it.

    Raises:
        QkitError: The measurement could not be completed.
    """

    def measurement(
        *,
        accuracy: AccuracyResult | None = None,
        bench: BenchResult | None = None,
        fidelity: FidelityResult | None = None,
    ) -> Measurement:
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
            memory=server.memory_use(),
        )

    match cell.settings:
        case BenchSuite() as suite:
            bench = _bench(
                suite,
                subject,
                server,
                reporter,
                earlier=kept.levels,
                on_cell=lambda so_far: kept.on_level(measurement(bench=so_far)),
            )
            return measurement(bench=bench)
        case FidelitySuite() as suite:
            backwards = cell.suite == FIDELITY_AGAIN
            # Of a server that qkit did not start, its process is all that scores can be known by.
            known_by = key or (kept.answers.key if kept.answers else "")
            return measurement(
                fidelity=_fidelity(suite, subject, server, reporter, known_by, kept, backwards)
            )
        case AccuracySuite() as suite:
            backwards = is_again(cell.suite)
            return measurement(
                accuracy=_accuracy(suite, subject, server, reporter, data, kept.answers, backwards)
            )


def _bench(
    suite: BenchSuite,
    subject: Subject,
    server: RunningServer,
    reporter: Reporter,
    *,
    earlier: BenchResult | None,
    on_cell: Callable[[BenchResult], None],
) -> BenchResult:
    from qkit.evaluate.bench import run_bench  # noqa: PLC0415  (imports aiohttp, tokenizers)

    return run_bench(
        suite,
        base_url=server.base_url,
        model=server.model,
        tokenizer_path=subject.path,
        max_model_len=server.record.max_model_len,
        on_progress=reporter.progress,
        gpus=server.gpus,
        on_cell=on_cell,
        earlier=earlier,
    )


def _fidelity(
    suite: FidelitySuite,
    subject: Subject,
    server: RunningServer,
    reporter: Reporter,
    key: str,
    kept: Kept,
    backwards: bool,
) -> FidelityResult:
    from qkit.evaluate.fidelity import run_fidelity  # noqa: PLC0415  (imports lm-eval)

    return run_fidelity(
        suite,
        base_url=server.base_url,
        model=server.model,
        tokenizer_path=subject.path,
        max_model_len=server.record.max_model_len,
        scores_file=kept.scores_file,
        key=key,
        resume=kept.resume,
        backwards=backwards,
        on_progress=lambda done, total: reporter.progress("windows of text", done, total),
    )


def _accuracy(
    suite: AccuracySuite,
    subject: Subject,
    server: RunningServer,
    reporter: Reporter,
    data: Path | None,
    answers: AnswersFile | None,
    backwards: bool,
) -> AccuracyResult:
    from qkit.evaluate.accuracy import run_accuracy  # noqa: PLC0415  (imports lm-eval)
    from qkit.evaluate.adaptive import starting_limit  # noqa: PLC0415
    from qkit.evaluate.scored_answers import ScoredAnswers  # noqa: PLC0415

    with ScoredAnswers(answers.path, answers.key) if answers else nullcontext() as scored:
        return run_accuracy(
            suite,
            base_url=server.base_url,
            model=server.model,
            tokenizer_path=subject.path,
            max_model_len=server.record.max_model_len,
            data=data,
            concurrency=starting_limit(server.record.flags),
            backwards=backwards,
            scored=scored,
            on_progress=lambda done, total: reporter.progress("questions", done, total),
        )


def headline(measurement: Measurement) -> str:
    """Return one line about a measurement, for the person who watches."""
    if measurement.accuracy:
        from qkit.evaluate.scores import is_fraction  # noqa: PLC0415  (imports scipy)

        score = measurement.accuracy.headline
        scale = 100 if is_fraction(measurement.accuracy) else 1
        error = "" if score.stderr is None else f" ± {scale * score.stderr:.2f}"
        return f"{score.metric} {scale * score.value:.2f}{error} (n={score.n})"
    if measurement.bench:
        return "tok/s " + ", ".join(
            f"{cell.level.figure}: "
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
        f"{len(lost)} of {len(cells)} levels failed "
        f"({names(cell.level for cell in lost)}): "
        f"{reasons[0] if reasons else 'no successful request'}"
    )
