"""The matrix: every variant against the baseline, a pure function of the stored measurements.

`build_matrix` reads no file and starts nothing. It takes what was measured, pairs each variant
with the baseline (same concurrency, same questions), and refuses to compare what is not
comparable: then there is no ratio and no difference, and a mark names the field that differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from qkit.evaluate.comparable import server_differences
from qkit.evaluate.drift import Drift
from qkit.evaluate.marks import (
    baseline_drift,
    calibration_notes,
    one_line,
    row_marks,
    table_notes,
)
from qkit.evaluate.matrix_values import (
    SCHEMA_VERSION,
    Accuracy,
    BenchRow,
    FailedStep,
    Flips,
    Matrix,
    Ratio,
    Row,
    Workload,
)
from qkit.evaluate.memory import WeightSource, logged_weight_bytes, weight_source
from qkit.evaluate.pairing import BENCH_AGAIN_SUITE, Pairing, VariantInput, is_fraction, pair
from qkit.evaluate.statistics import MARGIN_POINTS, PairedComparison
from qkit.measurements import AccuracyResult, BenchCell, Measurement, ServerRecord
from qkit.recipe import BENCH_SUITE

__all__ = [
    "BENCH_AGAIN_SUITE",
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

#: Significant digits of derived figures.
_DIGITS = 6


def build_matrix(
    *,
    run: str,
    created: str,
    baseline: str,
    variants: Sequence[VariantInput],
    allow_incomparable: bool = False,
    margin_points: float = MARGIN_POINTS,
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
    """
    ordered = sorted(variants, key=lambda variant: variant.name != baseline)  # the sort is stable
    base = ordered[0] if ordered and ordered[0].name == baseline else None
    source = weight_source([m.server for m in variant.measurements] for variant in ordered)
    context = _Context(base, source, allow_incomparable, margin_points)
    measured = [m for variant in ordered for m in variant.suites.values()]
    drift = baseline_drift(base)
    return Matrix(
        schema_version=SCHEMA_VERSION,
        run=run,
        created=created,
        hardware=measured[0].hardware if measured else None,
        versions=_merged_versions(measured),
        baseline=baseline,
        weight_source=source,
        margin_points=margin_points,
        workload=next((_workload(m) for m in measured if m.bench), None),
        drift=drift,
        notes=(*table_notes(baseline, base, drift), *calibration_notes(ordered)),
        rows=tuple(_row(context, variant) for variant in ordered),
    )


# -------------------------------------------------------------------------------------- one row


@dataclass(frozen=True)
class _Context:
    """What all rows of a matrix share."""

    baseline: VariantInput | None
    weight_source: WeightSource
    allow_incomparable: bool
    margin_points: float


def _row(context: _Context, variant: VariantInput) -> Row:
    suites, record = variant.suites, variant.record
    is_baseline = context.baseline is not None and variant.name == context.baseline.name
    pairings = {
        suite: pair(measurement, context.baseline, allow_incomparable=context.allow_incomparable)
        for suite, measurement in suites.items()
        if suite != BENCH_AGAIN_SUITE
    }
    failures = _failures(variant)
    if not pairings and not failures:
        failures = (FailedStep(step="run", reason="not measured yet", detail=""),)
    bench = pairings.get(BENCH_SUITE)
    server = _server(variant)
    return Row(
        variant=variant.name,
        method=variant.method,
        scheme=record.scheme if record else variant.scheme,
        backend=record.backend if record else None,
        status="failed" if failures else "ok",
        reason="; ".join(f"{f.step}: {f.reason}" for f in failures) or None,
        failures=failures,
        variant_hash=record.content_hash if record else _measured_hash(variant),
        kernel=" + ".join(_unique(k for m in suites.values() for k in m.server.kernels)) or None,
        weight_bytes=_weight_bytes(context, variant),
        weight_source=context.weight_source,
        quantized_bytes=record.quantized_bytes if record else variant.quantized_bytes,
        unquantized_bytes=record.unquantized_bytes if record else variant.unquantized_bytes,
        weight_ratio=_weight_ratio(context, variant),
        kv_cache_tokens=server.kv_cache_tokens if server else None,
        max_concurrency=server.max_concurrency if server else None,
        max_model_len=server.max_model_len if server else None,
        server_flags=server.flags if server else None,
        server_environment=server.environment if server else None,
        accuracy={
            suite: _accuracy(pairing.measurement.accuracy, pairing.samples, is_baseline, context)
            for suite, pairing in pairings.items()
            if pairing.measurement.accuracy
        },
        bench=_bench_rows(bench) if bench else (),
        marks=row_marks(variant, context.baseline, pairings),
    )


def _failures(variant: VariantInput) -> tuple[FailedStep, ...]:
    """Return what failed of a row; the baseline's repeat is a check and fails no row."""
    return tuple(
        FailedStep(step=f.step, reason=one_line(f.reason), detail=f.detail)
        for f in variant.failures
        if f.step != BENCH_AGAIN_SUITE
    )


def _measured_hash(variant: VariantInput) -> str | None:
    return next((m.variant_hash for m in variant.suites.values()), None)


def _server(variant: VariantInput) -> ServerRecord | None:
    """Return the server that speaks for a row: the benchmark's, else the first one's."""
    suites = variant.suites
    measurement = suites.get(BENCH_SUITE) or next(iter(suites.values()), None)
    return measurement.server if measurement else None


# --------------------------------------------------------------------------------------- memory


def _weight_bytes(context: _Context, variant: VariantInput) -> int | None:
    if context.weight_source == "vllm-log":
        return logged_weight_bytes([m.server for m in variant.suites.values()])
    return variant.record.weight_bytes if variant.record else variant.weight_bytes


def _weight_ratio(context: _Context, variant: VariantInput) -> float | None:
    if context.baseline is None:
        return None
    mine, base = _server(variant), _server(context.baseline)
    logged = context.weight_source == "vllm-log"
    # What a server logs depends on its flags (tensor parallelism); bytes on disk do not.
    differ = logged and mine and base and server_differences(base, mine)
    if differ and not context.allow_incomparable:
        return None
    return _ratio(_weight_bytes(context, variant), _weight_bytes(context, context.baseline))


# ------------------------------------------------------------------------------------- accuracy


def _accuracy(
    result: AccuracyResult, paired: PairedComparison | None, is_baseline: bool, context: _Context
) -> Accuracy:
    score, fraction = result.headline, is_fraction(result)
    delta = interval = recovery = p_value = flips = verdict = None
    if is_baseline and fraction:
        delta, recovery = 0.0, 100.0
    elif paired and fraction:
        delta = _figure(paired.delta_points)
        interval = (
            round(paired.interval_points.low, _DIGITS),
            round(paired.interval_points.high, _DIGITS),
        )
        recovery, p_value = _figure(paired.recovery_percent), _figure(paired.mcnemar_p)
        verdict = paired.verdict(context.margin_points)
        if paired.flips_to_wrong is not None and paired.flips_to_right is not None:
            flips = Flips(to_wrong=paired.flips_to_wrong, to_right=paired.flips_to_right)
    return Accuracy(
        metric=score.metric,
        fraction=fraction,
        value=score.value,
        stderr=score.stderr,
        n=score.n,
        num_fewshot=result.num_fewshot,
        limit=result.limit,
        chat_template=result.chat_template,
        delta_points=delta,
        delta_interval=interval,
        recovery_percent=recovery,
        flips=flips,
        mcnemar_p=p_value,
        verdict=verdict,
    )


# ---------------------------------------------------------------------------------------- bench


def _bench_rows(pairing: Pairing) -> tuple[BenchRow, ...]:
    """Return one row per concurrency level, with ratios where the baseline has that level."""
    other = pairing.baseline.bench.cells if pairing.baseline and pairing.baseline.bench else ()
    base = {cell.concurrency: cell for cell in other}
    cells = pairing.measurement.bench.cells if pairing.measurement.bench else ()
    return tuple(_bench_row(cell, base.get(cell.concurrency)) for cell in cells)


def _bench_row(cell: BenchCell, base: BenchCell | None) -> BenchRow:
    return BenchRow(
        concurrency=cell.concurrency,
        n=cell.n,
        failed=cell.failed,
        duration_s=cell.duration_s,
        ttft_ms_p50=cell.ttft_ms.p50,
        ttft_ms_p95=cell.ttft_ms.p95,
        ttft_ms_max=cell.ttft_ms.max,
        tpot_ms_p50=cell.tpot_ms.p50,
        tpot_ms_p95=cell.tpot_ms.p95,
        tpot_ms_max=cell.tpot_ms.max,
        itl_ms_p50=cell.itl_ms.p50,
        itl_ms_p95=cell.itl_ms.p95,
        e2e_ms_p50=cell.e2e_ms.p50,
        e2e_ms_p95=cell.e2e_ms.p95,
        output_tok_per_s=cell.output_tok_per_s,
        total_tok_per_s=cell.total_tok_per_s,
        steady_tok_per_s=cell.steady_tok_per_s,
        req_per_s=cell.req_per_s,
        input_tokens_mean=cell.input_tokens_mean,
        output_tokens_mean=cell.output_tokens_mean,
        prefix_hit_tokens=cell.prefix_hit_tokens,
        preemptions=cell.preemptions,
        ratio=Ratio(
            ttft=_ratio(cell.ttft_ms.p50, base.ttft_ms.p50) if base else None,
            tpot=_ratio(cell.tpot_ms.p50, base.tpot_ms.p50) if base else None,
            output_tok_per_s=_ratio(cell.output_tok_per_s, base.output_tok_per_s) if base else None,
        ),
        marks=cell.marks,
    )


def _workload(measurement: Measurement) -> Workload | None:
    bench = measurement.bench
    if bench is None:
        return None
    return Workload(
        endpoint=bench.endpoint,
        input_tokens=bench.input_tokens,
        output_tokens=bench.output_tokens,
        ignore_eos=bench.ignore_eos,
        sampling=bench.sampling,
        seed=bench.seed,
        prompt_hash=bench.prompt_hash,
    )


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


def _ratio(value: float | None, base: float | None) -> float | None:
    """Return value / base; None where either is unknown or the base is 0."""
    return None if value is None or not base else _figure(value / base)


def _figure(value: float | None) -> float | None:
    """Round a derived figure to six significant digits, far below any measurement's noise."""
    return None if value is None else float(f"{value:.{_DIGITS}g}")


def _unique(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))
