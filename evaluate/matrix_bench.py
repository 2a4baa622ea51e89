"""Benchmarks in the matrix: levels of a load and their ratios to the baseline's. Pure."""

from __future__ import annotations

from qkit.evaluate.figures import ratio
from qkit.evaluate.matrix_derived import Served, derive
from qkit.evaluate.matrix_values import BenchRow, Ratio, Workload
from qkit.evaluate.pairing import Pairing
from qkit.evaluate.scaling import LevelFigures, Scaling, scaling
from qkit.measurements import BenchCell, BenchResult


def bench_rows(pairing: Pairing, served: Served) -> tuple[BenchRow, ...]:
    """Return one row per level, with ratios where the baseline has that level."""
    other = pairing.baseline.bench.cells if pairing.baseline and pairing.baseline.bench else ()
    base = {cell.level: cell for cell in other}
    cells = pairing.measurement.bench.cells if pairing.measurement.bench else ()
    # Only a closed loop scales with its concurrency.
    closed = [figures for cell in cells if (figures := _figures(cell))]
    scaled = {level.concurrency: level for level in scaling(closed)}
    measurement = pairing.measurement
    return tuple(
        derive(
            _bench_row(cell, base.get(cell.level), scaled.get(cell.concurrency or 0)),
            cell,
            base.get(cell.level),
            served=served,
            server=measurement.server,
            hardware=measurement.hardware,
        )
        for cell in cells
    )


def _figures(cell: BenchCell) -> LevelFigures | None:
    if cell.concurrency is None:
        return None
    return LevelFigures(cell.concurrency, cell.output_tok_per_s, cell.ttft_ms.p50, cell.tpot_ms.p50)


def hit_share(cell: BenchCell) -> float | None:
    """Return the share of a cell's prompt tokens that the prefix cache held.

    None where a count is not known; a failed request's prompt is not.
    """
    if cell.failed or cell.prefix_hit_tokens is None or cell.input_tokens_mean is None:
        return None
    return ratio(cell.prefix_hit_tokens, cell.input_tokens_mean * cell.n)


def _bench_row(cell: BenchCell, base: BenchCell | None, scaled: Scaling | None) -> BenchRow:
    return BenchRow(
        concurrency=cell.concurrency,
        request_rate=cell.request_rate,
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
        output_tok_per_s_interval=cell.output_tok_per_s_interval,
        tpot_ms_p50_interval=cell.tpot_ms_p50_interval,
        goodput_req_per_s=cell.goodput.req_per_s if cell.goodput else None,
        slo_met=cell.goodput.met if cell.goodput else None,
        input_tokens_mean=cell.input_tokens_mean,
        output_tokens_mean=cell.output_tokens_mean,
        prefix_hit_tokens=cell.prefix_hit_tokens,
        preemptions=cell.preemptions,
        prefix_hit_share=hit_share(cell),
        tok_per_s_scaling=scaled.throughput if scaled else None,
        tpot_scaling=scaled.tpot if scaled else None,
        ratio=Ratio(
            ttft=ratio(cell.ttft_ms.p50, base.ttft_ms.p50) if base else None,
            tpot=ratio(cell.tpot_ms.p50, base.tpot_ms.p50) if base else None,
            output_tok_per_s=ratio(cell.output_tok_per_s, base.output_tok_per_s) if base else None,
        ),
        marks=cell.marks,
    )


def workload(bench: BenchResult) -> Workload:
    """Return a benchmark's settings."""
    return Workload(
        endpoint=bench.endpoint,
        description=bench.workload,
        hits_expected=bench.hits_expected,
        input_tokens=bench.input_tokens,
        output_tokens=bench.output_tokens,
        ignore_eos=bench.ignore_eos,
        sampling=bench.sampling,
        seed=bench.seed,
        prompt_hash=bench.prompt_hash,
        arrival=bench.arrival,
    )
