"""The benchmarks' sheets: one line a variant and level."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from qkit.evaluate.matrix_values import BenchRow, Matrix, Row, Workload
from qkit.evaluate.report import text
from qkit.evaluate.report.sheet import CONCURRENCY, RATE, VARIANT, Cell, Column, Line, Sheet

#: A column and how a row at one level fills it.
LevelField = tuple[Column, Callable[[Row, BenchRow], Cell]]

#: What the prefix cache answered for, where it is meant to.
HITS: LevelField = (
    Column("Cache hits, %", "Share of the prompts' tokens that the prefix cache held."),
    lambda _, c: Cell(
        text.decimal(None if c.prefix_hit_share is None else 100 * c.prefix_hit_share, 1)
    ),
)


def bench_sheet(
    matrix: Matrix, name: str, *, detailed: bool = False, intervals: bool = False
) -> Sheet:
    """One line a variant and level, the variants of a level together.

    Args:
        matrix: What to show.
        name: The benchmark's, one of `matrix.benches`.
        detailed: Add further columns, for pages that are wide enough.
        intervals: Add the ratios' 95 % intervals.
    """
    workload = matrix.benches[name]
    measured = [
        (row, cell) for row in matrix.rows for cell in row.bench_of(name, matrix.headline_bench)
    ]
    cells = [cell for _, cell in measured]
    fields = _bench_fields(matrix, workload, cells, detailed=detailed, intervals=intervals)
    lines = [
        Line(
            tuple(show(row, cell) for _, show in fields),
            section=level.figure,
            failed=row.status == "failed",
        )
        for level in sorted({cell.level for cell in cells}, key=lambda level: level.value)
        for row, cell in measured
        if cell.level == level
    ]
    columns = tuple(column for column, _ in fields)
    title = "Latency and throughput"
    if name != matrix.headline_bench:
        title += f": {name}"
    return Sheet(title, bench_caption(workload), columns, tuple(lines))


def _bench_fields(
    matrix: Matrix,
    workload: Workload,
    cells: Sequence[BenchRow],
    *,
    detailed: bool,
    intervals: bool,
) -> list[LevelField]:
    versus = f"vs {matrix.baseline}"
    among = "; with its 95 % interval over the requests measured" if intervals else ""
    over = "; with its 95 % interval over repeats" if intervals else ""

    def ratio(value: float | None, interval: tuple[float, float] | None) -> Cell:
        shown = text.ratio_interval(interval) if intervals else ""
        return Cell(text.ratio(value), f"[{shown}]" if shown else "", joint=" ")

    few = "; 'max' marks the largest where requests are too few for p95"
    fields: list[LevelField] = [
        (
            RATE if any(cell.level.is_open for cell in cells) else CONCURRENCY,
            lambda _, c: Cell(c.level.figure),
        ),
        (VARIANT, lambda r, _: Cell(r.variant)),
        (Column("n", "Requests measured.", key=True), lambda _, c: Cell(text.integer(c.n))),
        (
            Column("p50", "Time from sending a request to its first token: median.", "TTFT ms"),
            lambda _, c: Cell(text.figure(c.ttft_ms_p50)),
        ),
        (
            Column("p95", f"The same, 95th percentile{few}.", "TTFT ms"),
            lambda _, c: Cell(text.percentile(c.ttft_ms_p95, c.ttft_ms_max)),
        ),
        (
            Column(
                versus, f"Ratio of the medians; below 1 is faster{among}.", "TTFT ms", ratio=True
            ),
            lambda _, c: ratio(c.ratio.ttft, c.ratio.ttft_interval),
        ),
        (
            Column(
                "p50",
                "Time per output token after the first, (E2E - TTFT) / (tokens - 1) of each "
                "request: median.",
                "TPOT ms",
            ),
            lambda _, c: Cell(text.figure(c.tpot_ms_p50)),
        ),
        (
            Column("p95", f"The same, 95th percentile{few}.", "TPOT ms"),
            lambda _, c: Cell(text.percentile(c.tpot_ms_p95, c.tpot_ms_max)),
        ),
        (
            Column(
                versus, f"Ratio of the medians; below 1 is faster{among}.", "TPOT ms", ratio=True
            ),
            lambda _, c: ratio(c.ratio.tpot, c.ratio.tpot_interval),
        ),
        (
            Column("all", "Output tokens of all requests over the whole measured time.", "tok/s"),
            lambda _, c: Cell(text.figure(c.output_tok_per_s)),
        ),
        (
            Column("steady", "The same while every slot was busy.", "tok/s"),
            lambda _, c: Cell(text.figure(c.steady_tok_per_s)),
        ),
        (
            Column(versus, f"Ratio of 'all'; above 1 is faster{over}.", "tok/s", ratio=True),
            lambda _, c: ratio(c.ratio.output_tok_per_s, c.ratio.output_tok_per_s_interval),
        ),
    ]
    if detailed:
        fields += _detail_fields()
    if any(cell.goodput_req_per_s is not None for cell in cells):
        fields += _objective_fields()
    if any(cell.failed for cell in cells):
        failed = Column("Failed", "Requests that failed; they are in no other figure.", key=True)
        fields.insert(3, (failed, lambda _, c: Cell(text.integer(c.failed))))
    if workload.hits_expected:
        fields.append(HITS)
    if not workload.ignore_eos:
        length = Column("Tokens out", "Mean output tokens a request; answers end by themselves.")
        fields.append((length, lambda _, c: Cell(text.decimal(c.output_tokens_mean, 1))))
    return fields


def _objective_fields() -> list[LevelField]:
    return [
        (
            Column("req/s", "Requests a second that keep every limit by themselves.", "Goodput"),
            lambda _, c: Cell(text.figure(c.goodput_req_per_s)),
        ),
        (
            Column("met", "Whether the level's own statistics meet the objective.", "Goodput"),
            lambda _, c: Cell({None: text.MISSING, True: "yes", False: "no"}[c.slo_met]),
        ),
    ]


def _detail_fields() -> list[LevelField]:
    return [
        (
            Column("p50", "Gap between chunks that carry tokens, all requests: median.", "ITL ms"),
            lambda _, c: Cell(text.figure(c.itl_ms_p50)),
        ),
        (
            Column("p95", "The same, 95th percentile; a chunk can hold several tokens.", "ITL ms"),
            lambda _, c: Cell(text.figure(c.itl_ms_p95)),
        ),
        (
            Column("p50", "Time from sending a request to its last token: median.", "E2E ms"),
            lambda _, c: Cell(text.figure(c.e2e_ms_p50)),
        ),
        (
            Column("p95", "The same, 95th percentile.", "E2E ms"),
            lambda _, c: Cell(text.figure(c.e2e_ms_p95)),
        ),
        (
            Column("Requests/s", "Successful requests over the whole measured time."),
            lambda _, c: Cell(text.figure(c.req_per_s)),
        ),
        (
            Column(
                "tok/s",
                "Tokens per second over those of the same variant at concurrency 1.",
                "x of concurrency 1",
            ),
            lambda _, c: Cell(text.ratio(c.tok_per_s_scaling)),
        ),
        (
            Column("TPOT", "Median TPOT likewise; 1 is no slower.", "x of concurrency 1"),
            lambda _, c: Cell(text.ratio(c.tpot_scaling)),
        ),
    ]


def bench_caption(load: Workload) -> str:
    """Return what is sent and how, in one line."""
    sampling = ", ".join(f"{name} {value:g}" for name, value in load.sampling.items())
    ending = "exactly" if load.ignore_eos else "at most"
    arrivals = {"poisson": "Poisson arrivals", "constant": "arrivals at equal gaps"}
    parts = [
        *([arrivals[load.arrival]] if load.arrival else []),
        f"{load.endpoint} endpoint, streaming",
        load.description or f"{load.input_tokens} tokens in, {ending} {load.output_tokens} out",
        *([sampling] if sampling else []),
    ]
    return "; ".join(parts)
