"""The matrix: every variant against the baseline, a pure function of the stored measurements.

`build_matrix` reads no file and starts nothing. It takes what was measured, pairs each variant
with the baseline (same concurrency, same questions), and refuses to compare what is not
comparable: then there is no ratio and no difference, and a mark names the field that differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from qkit.evaluate.comparable import server_differences
from qkit.evaluate.derived import Price
from qkit.evaluate.drift import Drift
from qkit.evaluate.figures import ratio
from qkit.evaluate.marks import (
    baseline_drift,
    calibration_notes,
    one_line,
    row_marks,
    table_notes,
)
from qkit.evaluate.matrix_accuracy import accuracy_row, adjusted_for_several
from qkit.evaluate.matrix_average import average_row
from qkit.evaluate.matrix_bench import bench_rows, workload
from qkit.evaluate.matrix_derived import Served
from qkit.evaluate.matrix_fidelity import fidelity_row, noise_floor
from qkit.evaluate.matrix_values import (
    SCHEMA_VERSION,
    Accuracy,
    BenchRow,
    FailedStep,
    Flips,
    Matrix,
    NoiseFloor,
    Ratio,
    Row,
    Workload,
)
from qkit.evaluate.memory import WeightSource, account, logged_weight_bytes, weight_source
from qkit.evaluate.noise import noise_floors
from qkit.evaluate.pairing import VariantInput, pair
from qkit.evaluate.reference import reference_notes, reference_rows
from qkit.evaluate.statistics import MARGIN_POINTS
from qkit.kernel_log import kernel_mismatch
from qkit.measurements import Measurement, ServerRecord
from qkit.recipe import PublishedScore, is_again
from qkit.suites import BENCH_SUITE, FIDELITY_SUITE

__all__ = [
    "SCHEMA_VERSION",
    "Accuracy",
    "BenchRow",
    "Drift",
    "FailedStep",
    "Flips",
    "Matrix",
    "Ratio",
    "Row",
    "VariantInput",
    "Workload",
    "build_matrix",
]


def build_matrix(
    *,
    run: str,
    created: str,
    baseline: str,
    variants: Sequence[VariantInput],
    allow_incomparable: bool = False,
    margin_points: float = MARGIN_POINTS,
    headline_bench: str = BENCH_SUITE,
    references: Sequence[PublishedScore] = (),
    price: Price | None = None,
) -> Matrix:
    """Build the matrix of a run.

    Args:
        run: The run's name.
        created: ISO 8601 time that the matrix is dated.
        baseline: Name of the variant that the others are compared with; it becomes the first row,
            the others keep their order. Without it there are no ratios and no differences.
        variants: Everything that is stored of the run.
        allow_incomparable: Compare what differs in hardware, server, settings or prompts all the
            same, and say so in the row's marks.
        margin_points: Loss in points up to which a variant counts as non-inferior.
        headline_bench: Benchmark whose levels are a row's `bench`; the others are further ones.
        references: Published scores to show beside ours.
        price: What an hour of the machine costs, for the costs in `capacity`.
    """
    ordered = sorted(variants, key=lambda variant: variant.name != baseline)  # the sort is stable
    base = ordered[0] if ordered and ordered[0].name == baseline else None
    source = weight_source([m.server for m in variant.measurements] for variant in ordered)
    floors = noise_floors(base)
    context = _Context(
        base, source, allow_incomparable, margin_points, headline_bench, floors, price
    )
    measured = [m for variant in ordered for m in variant.suites.values()]
    drift = baseline_drift(base, headline_bench)
    workloads = _workloads(measured)
    rows = adjusted_for_several([_row(context, variant) for variant in ordered])
    published = reference_rows(references, rows)
    return Matrix(
        schema_version=SCHEMA_VERSION,
        run=run,
        created=created,
        hardware=measured[0].hardware if measured else None,
        versions=_merged_versions(measured),
        baseline=baseline,
        weight_source=source,
        margin_points=margin_points,
        price=price,
        headline_bench=headline_bench,
        workload=workloads.pop(headline_bench, None),
        further_workloads=workloads,
        fidelity_noise=noise_floor(base),
        drift=drift,
        noise_floors=floors,
        references=published,
        notes=(
            *table_notes(baseline, base, drift, headline_bench),
            *calibration_notes(ordered),
            *reference_notes(published, baseline),
        ),
        rows=rows,
    )


# -------------------------------------------------------------------------------------- one row


@dataclass(frozen=True)
class _Context:
    """What all rows of a matrix share."""

    baseline: VariantInput | None
    weight_source: WeightSource
    allow_incomparable: bool
    margin_points: float
    headline_bench: str
    noise_floors: Mapping[str, NoiseFloor]
    price: Price | None


def _row(context: _Context, variant: VariantInput) -> Row:
    suites, record = variant.suites, variant.record
    is_baseline = context.baseline is not None and variant.name == context.baseline.name
    pairings = {
        suite: pair(measurement, context.baseline, allow_incomparable=context.allow_incomparable)
        for suite, measurement in suites.items()
        if not is_again(suite)
    }
    failures = _failures(variant)
    if not pairings and not failures:
        failures = (FailedStep(step="run", reason="not measured yet", detail=""),)
    served = Served(variant.read_bytes, variant.kv_bytes_per_token, context.price)
    benches = {name: bench_rows(p, served) for name, p in pairings.items() if p.measurement.bench}
    server = _server(variant, context.headline_bench)
    kernels = _unique(k for m in suites.values() for k in m.server.kernels)
    quantized = record.quantized_bytes if record else variant.quantized_bytes
    unquantized = record.unquantized_bytes if record else variant.unquantized_bytes
    return Row(
        variant=variant.name,
        method=variant.method,
        scheme=record.scheme if record else variant.scheme,
        backend=record.backend if record else None,
        status="failed" if failures else "ok",
        reason="; ".join(f"{f.step}: {f.reason}" for f in failures) or None,
        failures=failures,
        variant_hash=record.content_hash if record else _measured_hash(variant),
        kernel=" + ".join(kernels) or None,
        kernel_asked=server.kernel_asked if server else None,
        kernel_as_asked=_as_asked(server.kernel_asked if server else "auto", kernels),
        weight_bytes=_weight_bytes(context, variant),
        weight_source=context.weight_source,
        quantized_bytes=quantized,
        unquantized_bytes=unquantized,
        weight_ratio=_weight_ratio(context, variant),
        memory=account(
            variant.measurements,
            server=server,
            weight_bytes=_weight_bytes(context, variant),
            quantized_bytes=quantized,
            unquantized_bytes=unquantized,
            predicted_bytes=variant.predicted_bytes,
        ),
        kv_cache_tokens=server.kv_cache_tokens if server else None,
        max_concurrency=server.max_concurrency if server else None,
        max_model_len=server.max_model_len if server else None,
        server_flags=server.flags if server else None,
        server_environment=server.environment if server else None,
        accuracy={
            suite: accuracy_row(
                pairing.measurement.accuracy,
                pairing.accuracy,
                is_baseline=is_baseline,
                margin_points=context.margin_points,
                noise=context.noise_floors.get(suite),
            )
            for suite, pairing in pairings.items()
            if pairing.measurement.accuracy
        },
        average=average_row(
            {
                suite: result
                for suite, result in variant.accuracy.items()
                if suite in pairings and pairings[suite].baseline
            },
            context.baseline.accuracy if context.baseline else {},
            is_baseline=is_baseline,
            margin_points=context.margin_points,
        ),
        fidelity=fidelity_row(variant, context.baseline, pairings.get(FIDELITY_SUITE)),
        bench=benches.pop(context.headline_bench, ()),
        further_benches=benches,
        load_searches={
            name: pairing.measurement.bench.search
            for name, pairing in pairings.items()
            if pairing.measurement.bench and pairing.measurement.bench.search
        },
        marks=row_marks(
            variant,
            context.baseline,
            pairings,
            headline_bench=context.headline_bench,
            noise_floors={} if is_baseline else context.noise_floors,
        ),
    )


def _failures(variant: VariantInput) -> tuple[FailedStep, ...]:
    """Return what failed of a row; the baseline's repeats are checks and fail no row."""
    return tuple(
        FailedStep(step=f.step, reason=one_line(f.reason), detail=f.detail)
        for f in variant.failures
        if not is_again(f.step)
    )


def _measured_hash(variant: VariantInput) -> str | None:
    return next((m.variant_hash for m in variant.suites.values()), None)


def _as_asked(asked: str, kernels: tuple[str, ...]) -> bool | None:
    if asked == "auto" or not kernels:
        return None
    return kernel_mismatch(asked, kernels) is None


def _server(variant: VariantInput, headline_bench: str) -> ServerRecord | None:
    """Return the server that speaks for a row: the benchmark's, else the first one's."""
    suites = variant.suites
    measurement = suites.get(headline_bench) or next(iter(suites.values()), None)
    return measurement.server if measurement else None


# --------------------------------------------------------------------------------------- memory


def _weight_bytes(context: _Context, variant: VariantInput) -> int | None:
    if context.weight_source == "vllm-log":
        return logged_weight_bytes([m.server for m in variant.suites.values()])
    return variant.record.weight_bytes if variant.record else variant.weight_bytes


def _weight_ratio(context: _Context, variant: VariantInput) -> float | None:
    if context.baseline is None:
        return None
    mine = _server(variant, context.headline_bench)
    base = _server(context.baseline, context.headline_bench)
    logged = context.weight_source == "vllm-log"
    # What a server logs depends on its flags (tensor parallelism); bytes on disk do not.
    differ = logged and mine and base and server_differences(base, mine)
    if differ and not context.allow_incomparable:
        return None
    return ratio(_weight_bytes(context, variant), _weight_bytes(context, context.baseline))


# ---------------------------------------------------------------------------------------- small


def _merged_versions(measurements: Iterable[Measurement]) -> dict[str, str]:
    """Return every package's version; several versions of one are joined by a comma."""
    found: dict[str, list[str]] = {}
    for measurement in measurements:
        server = {measurement.server.engine: measurement.server.version}
        for package, version in (*server.items(), *measurement.versions.items()):
            if version and version not in found.setdefault(package, []):
                found[package].append(version)
    return {package: ", ".join(versions) for package, versions in sorted(found.items()) if versions}


def _workloads(measurements: Iterable[Measurement]) -> dict[str, Workload]:
    """Return every benchmark's settings, as run on the first row that has it."""
    found: dict[str, Workload] = {}
    for measurement in measurements:
        if measurement.bench and not is_again(measurement.suite):
            found.setdefault(measurement.suite, workload(measurement.bench))
    return found


def _unique(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))
