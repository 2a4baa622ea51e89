"""Benchmarks in the matrix: levels of a load and their ratios to the baseline's. Pure."""

from __future__ import annotations

from qkit.evaluate.figures import ratio
from qkit.evaluate.matrix_derived import Served, derive
from qkit.evaluate.matrix_values import BenchRow, Ratio, Workload
from qkit.evaluate.pairing import Pairing
from qkit.measurements import BenchCell, BenchResult


def bench_rows(pairing: Pairing, served: Served) -> tuple[BenchRow, ...]:
    """Return one row per concurrency level, with ratios where the baseline has that level."""
    other = pairing.baseline.bench.cells if pairing.baseline and pairing.baseline.bench else ()
    base = {cell.concurrency: cell for cell in other}
    cells = pairing.measurement.bench.cells if pairing.measurement.bench else ()
    measurement = pairing.measurement
    return tuple(
        derive(
            _bench_row(cell, base.get(cell.concurrency)),
            cell,
            base.get(cell.concurrency),
            served=served,
            server=measurement.server,
            hardware=measurement.hardware,
        )
        for cell in cells
    )


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
        input_tokens=bench.input_tokens,
        output_tokens=bench.output_tokens,
        ignore_eos=bench.ignore_eos,
        sampling=bench.sampling,
        seed=bench.seed,
        prompt_hash=bench.prompt_hash,
    )
