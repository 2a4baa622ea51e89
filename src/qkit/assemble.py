"""From a run folder to its matrix, and the matrix to its files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from qkit.errors import InputError
from qkit.evaluate import matrix as matrices
from qkit.evaluate.derived import Price
from qkit.evaluate.fidelity_scores import Scores, read_scores
from qkit.evaluate.pairing import VariantInput
from qkit.evaluate.report import csv_file, html, markdown, records_file
from qkit.measurements import Measurement, Subject
from qkit.quantize.methods import scheme_label
from qkit.recipe import BASELINE, Recipe, Variant
from qkit.store import RunStore
from qkit.suites import BENCH_SUITE


def load_matrix(
    store: RunStore,
    *,
    allow_incomparable: bool = False,
    margin_points: float | None = None,
    price: Price | None = None,
) -> matrices.Matrix:
    """Compute the matrix of a run from its stored files.

    Args:
        store: The run.
        allow_incomparable: Compare what differs in hardware, versions or settings, and say so.
        margin_points: Loss in points that verdicts allow; None takes the recipe's.
        price: What an hour of the machine costs; by default the recipe's, if it has one.

    Raises:
        InputError: The folder is not a run's, or a stored file cannot be read.
    """
    recipe = store.read_recipe()
    planned = {variant.label: variant for variant in recipe.variants}
    labels = [BASELINE, *planned, *store.external()]
    present = [label for label in labels if label in planned or store.subject(label)]
    if BASELINE not in present and store.failures(BASELINE):
        present.insert(0, BASELINE)
    return matrices.build_matrix(
        run=store.name,
        created=store.created(),
        baseline=BASELINE,
        variants=[_input(store, label, planned.get(label)) for label in present],
        allow_incomparable=allow_incomparable,
        margin_points=recipe.margin_points if margin_points is None else margin_points,
        references=recipe.references,
        headline_bench=recipe.bench[0].name if recipe.bench else BENCH_SUITE,
        price=price or price_of(recipe),
    )


def price_of(
    recipe: Recipe,
    *,
    per_hour: float | None = None,
    currency: str | None = None,
    tokens_per_request: float | None = None,
) -> Price | None:
    """Return the recipe's price with what is given in its place; None where neither has one."""
    hourly = recipe.price_per_hour if per_hour is None else per_hour
    if hourly is None:
        return None
    return Price(
        per_hour=hourly,
        currency=currency or recipe.currency,
        tokens_per_request=tokens_per_request or recipe.tokens_per_request,
    )


def write_matrix(store: RunStore, matrix: matrices.Matrix) -> None:
    """Write matrix.json, .csv, .tasks.csv, .md and .html into the run's folder."""
    texts = {
        "json": matrix.model_dump_json(indent=1) + "\n",
        "csv": csv_file.render(matrix),
        "tasks.csv": csv_file.render_tasks(matrix),
        "md": markdown.render(matrix),
        "html": html.render(matrix),
    }
    for suffix, text in texts.items():
        store.write_text(store.matrix_file(suffix), text)


def write_records(store: RunStore, path: Path) -> None:
    """Write every request of a run's benchmarks as JSON lines.

    Raises:
        InputError: The folder is not a run's, or the file cannot be written.
    """
    labels = dict.fromkeys(
        [BASELINE, *(variant.label for variant in store.read_recipe().variants), *store.external()]
    )
    measurements = (m for label in labels for m in store.measurements(label))
    try:
        store.write_text(path, "".join(records_file.render(measurements)))
    except OSError as error:
        raise InputError(f"the records cannot be written: {error.strerror}", where=path) from None


def _input(store: RunStore, label: str, variant: Variant | None) -> VariantInput:
    subject: Subject | None = store.subject(label)
    failures = store.failures(label)
    failed = {failure.step: failure.created for failure in failures}
    scheme = subject.scheme if subject else (scheme_label(variant) if variant else "")
    measurements = [
        measurement
        for measurement in store.measurements(label)
        if subject and _is_current(measurement, subject, failed.get(measurement.suite))
    ]
    return VariantInput(
        name=label,
        method=(subject.method if subject else None) or (variant.method if variant else label),
        scheme=scheme,
        record=subject.record if subject else None,
        measurements=measurements,
        failures=failures,
        weight_bytes=subject.weight_bytes if subject else None,
        quantized_bytes=subject.quantized_bytes if subject else None,
        unquantized_bytes=subject.unquantized_bytes if subject else None,
        predicted_bytes=subject.predicted_bytes if subject else None,
        read_bytes=subject.read_bytes if subject else None,
        kv_bytes_per_token=subject.kv_bytes_per_token if subject else None,
        scores=dict(_scores(store, measurements)),
    )


def _scores(store: RunStore, measurements: Iterable[Measurement]) -> Iterator[tuple[str, Scores]]:
    """Yield the log-probabilities of fidelity suites, by suite, without lost ones."""
    for measurement in measurements:
        if measurement.fidelity:
            path = store.scores_file(measurement.variant, measurement.suite)
            scores = read_scores(path, measurement.fidelity.scores_hash)
            if scores is not None:
                yield measurement.suite, scores


def _is_current(measurement: Measurement, subject: Subject, failed: str | None) -> bool:
    """Tell whether a measurement is of the checkpoint as it is now, and no later try failed.

    A sweep that was measured in part is stored with its failure, which is not later than itself.
    """
    if measurement.variant_hash != subject.content_hash:
        return False
    return failed is None or measurement.created >= failed
