"""The benchmark of a single variant: one line a level, nothing to compare with."""

from __future__ import annotations

from collections.abc import Callable

from qkit.evaluate.matrix_values import BenchRow, Matrix, Row
from qkit.evaluate.report import text
from qkit.evaluate.report.sheet import Cell, Column, Line, Sheet
from qkit.evaluate.report.sheets_bench import HITS, bench_caption

#: A column and how a level fills it.
_Field = tuple[Column, Callable[[BenchRow], Cell]]

_P95 = "95th percentile; 'max' marks the largest where requests are too few for it."
_FIELDS: tuple[_Field, ...] = (
    (
        Column("Conc.", "Requests kept in flight all the time (closed loop).", key=True),
        lambda c: Cell(text.integer(c.concurrency)),
    ),
    (Column("n", "Requests measured."), lambda c: Cell(text.integer(c.n))),
    (
        Column("Wall s", "From the first request to the last answer."),
        lambda c: Cell(text.decimal(c.duration_s, 2)),
    ),
    (Column("req/s", "Successful requests a second."), lambda c: Cell(text.figure(c.req_per_s))),
    (
        Column("tok/s", "Output tokens a second."),
        lambda c: Cell(text.figure(c.output_tok_per_s)),
    ),
    (
        Column("x of 1", "Output tokens a second over those at concurrency 1."),
        lambda c: Cell(text.ratio(c.tok_per_s_scaling)),
    ),
    (
        Column("p50", "Time from sending a request to its first token: median.", "TTFT ms"),
        lambda c: Cell(text.figure(c.ttft_ms_p50)),
    ),
    (
        Column("p95", f"The same, {_P95}", "TTFT ms"),
        lambda c: Cell(text.percentile(c.ttft_ms_p95, c.ttft_ms_max)),
    ),
    (
        Column("p50", "Time per output token after the first: median.", "TPOT ms"),
        lambda c: Cell(text.figure(c.tpot_ms_p50)),
    ),
    (
        Column("p95", f"The same, {_P95}", "TPOT ms"),
        lambda c: Cell(text.percentile(c.tpot_ms_p95, c.tpot_ms_max)),
    ),
)
_LENGTH: _Field = (
    Column("Tokens out", "Mean output tokens a request; answers end by themselves."),
    lambda c: Cell(text.decimal(c.output_tokens_mean, 1)),
)
_FAILED: _Field = (
    Column("Failed", "Requests that failed; they are in no other figure."),
    lambda c: Cell(text.integer(c.failed)),
)


def only_row(matrix: Matrix, name: str) -> Row | None:
    """Return the row that a benchmark was measured on, if there is just one."""
    rows = [row for row in matrix.rows if row.bench_of(name, matrix.headline_bench)]
    return rows[0] if len(rows) == 1 else None


def level_sheet(matrix: Matrix, name: str, row: Row) -> Sheet:
    """One line a level of one variant's benchmark.

    Args:
        matrix: What to show.
        name: The benchmark's, one of `matrix.benches`.
        row: The variant.
    """
    workload = matrix.benches[name]
    levels = row.bench_of(name, matrix.headline_bench)
    show_hits = HITS[1]
    fields = [*_FIELDS]
    if workload.hits_expected:
        fields.append((HITS[0], lambda c: show_hits(row, c)))
    if not workload.ignore_eos:
        fields.append(_LENGTH)
    if any(level.failed for level in levels):
        fields.insert(2, _FAILED)
    lines = (
        Line(tuple(show(level) for _, show in fields), failed=row.status == "failed")
        for level in levels
    )
    return Sheet(
        f"Latency and throughput: {row.variant}"
        + ("" if name == matrix.headline_bench else f", {name}"),
        bench_caption(workload),
        tuple(column for column, _ in fields),
        tuple(lines),
    )
