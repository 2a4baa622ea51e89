"""The memory account, capacity, and the server's side as sheets."""

from __future__ import annotations

from collections.abc import Callable

from qkit.evaluate.matrix_values import BenchRow, Matrix, Row, ServerFigures
from qkit.evaluate.report import text
from qkit.evaluate.report.sheet import (
    CONCURRENCY,
    RATE,
    VARIANT,
    Cell,
    Column,
    Line,
    RowField,
    Sheet,
    row_sheet,
)

LevelField = tuple[Column, Callable[[BenchRow], Cell]]


def memory_sheet(matrix: Matrix) -> Sheet:
    """One line a variant: where its memory goes, and whether the plan foretold it."""
    fields: list[RowField] = [
        (VARIANT, lambda row: Cell(row.variant)),
        (
            Column("Quantized", "Bytes of quantized layers in the checkpoint, scales included."),
            lambda row: Cell(text.size(row.memory.quantized_bytes if row.memory else None)),
        ),
        (
            Column("16-bit rest", "Bytes of embeddings, head, norms and biases, left in 16 bits."),
            lambda row: Cell(text.size(row.memory.unquantized_bytes if row.memory else None)),
        ),
        (
            Column(
                "Weights planned",
                "What `qkit plan` predicts, and how far the weight memory of the overview is off.",
            ),
            _planned,
        ),
        (
            Column("KV cache", "Memory of the KV cache, where the server's log tells it."),
            lambda row: Cell(text.size(row.memory.kv_cache_bytes if row.memory else None)),
        ),
        (
            Column("Requests at once", "Requests of the served length that the KV cache can hold."),
            lambda row: Cell(
                text.figure(row.max_concurrency),
                f"of {text.integer(row.max_model_len)}" if row.max_model_len else "",
                joint=" ",
            ),
        ),
        (
            Column("CUDA graphs", "Memory that captured CUDA graphs take."),
            lambda row: Cell(text.size(row.memory.graph_memory_bytes if row.memory else None)),
        ),
        (
            Column(
                "Peak, no saving",
                "Most memory that was taken: of the GPUs by NVML, else the sum of the processes' "
                "largest resident sets. The server fills what it is given, so a smaller model "
                "does not show here.",
            ),
            lambda row: Cell(
                text.size(row.memory.peak_bytes if row.memory else None),
                (row.memory.peak_source or "") if row.memory else "",
            ),
        ),
    ]
    caption = (
        "what a smaller model frees, the KV cache takes: weights and KV tokens tell the saving"
    )
    # What a server does not tell of any row, as a CPU's of CUDA graphs, takes no column.
    known = [
        field for field in fields if any(field[1](row).main != text.MISSING for row in matrix.rows)
    ]
    return row_sheet("Memory", caption, known, matrix.rows)


def _planned(row: Row) -> Cell:
    memory = row.memory
    if memory is None or memory.predicted_bytes is None:
        return Cell(text.MISSING)
    off = memory.predicted_difference_percent
    return Cell(text.size(memory.predicted_bytes), "" if off is None else f"{off:+.1f} %")


def capacity_sheet(matrix: Matrix) -> Sheet | None:
    """One line a variant and level: what it serves in a day and costs; None without a benchmark."""
    price = matrix.price
    fields: list[LevelField] = [
        (
            Column("tok/s", "Output tokens of all requests over the whole measured time."),
            lambda c: Cell(text.figure(c.output_tok_per_s)),
        ),
        (
            Column("Tokens a request", "Output tokens that a request is reckoned with."),
            lambda c: Cell(text.figure(c.capacity.tokens_per_request if c.capacity else None)),
        ),
        (
            Column("Requests/s", "Output tokens a second / tokens a request."),
            lambda c: Cell(text.figure(c.capacity.req_per_s if c.capacity else None)),
        ),
        (
            Column("Requests/day", "The same over 86,400 seconds of this load."),
            lambda c: Cell(text.thousands(c.capacity.req_per_day if c.capacity else None)),
        ),
    ]
    caption = "at this load all day long, as measured"
    if price is not None:
        money = price.currency
        monthly = text.integer(price.per_hour * 720)
        caption += f"; {price.per_hour:g} {money} an hour, {monthly} {money} a month of 720 hours"
        fields += [
            (
                Column(f"{money} a request", "Price of an hour / requests served in it."),
                lambda c: Cell(text.money(c.capacity.cost_per_request if c.capacity else None)),
            ),
            (
                Column(f"{money} per M tokens", "Per million output tokens."),
                lambda c: Cell(
                    text.money(c.capacity.cost_per_million_tokens if c.capacity else None)
                ),
            ),
        ]
    return _level_sheet(matrix, "Capacity", caption, fields)


def server_sheet(matrix: Matrix) -> Sheet | None:
    """One line a variant and level: the server's own figures and the memory roof."""

    def of(show: Callable[[ServerFigures], str]) -> Callable[[BenchRow], Cell]:
        return lambda cell: Cell(show(cell.server) if cell.server else text.MISSING)

    fields: list[LevelField] = [
        (
            Column("mean", "Requests being computed, sampled while the load ran.", "Running"),
            of(lambda s: text.figure(s.running_mean)),
        ),
        (
            Column("max", "The most at one sample.", "Running"),
            of(lambda s: text.integer(s.running_max)),
        ),
        (
            Column("max", "Requests waiting for a place: the most at one sample.", "Waiting"),
            of(lambda s: text.integer(s.waiting_max)),
        ),
        (
            Column("KV cache used", "Largest share of the KV cache in use, in percent."),
            of(lambda s: text.percent(s.kv_cache_usage_max)),
        ),
        (
            Column("Prefix hits", "Share of prompt tokens found in the prefix cache, in percent."),
            of(lambda s: text.percent(s.prefix_hit_rate)),
        ),
        (
            Column("Preempted", "Requests thrown back because the KV cache was full."),
            lambda c: Cell(text.integer(c.preemptions)),
        ),
        (
            Column("Drafts taken", "Speculative decoding: accepted / proposed tokens, in percent."),
            of(lambda s: text.percent(s.acceptance_rate)),
        ),
        (
            Column("busy", "Share of time in which the GPUs ran a kernel, in percent.", "GPU"),
            of(lambda s: text.decimal(s.gpu_utilisation_percent, 0)),
        ),
        (
            Column("W", "Mean power of all GPUs.", "GPU"),
            of(lambda s: text.decimal(s.gpu_power_w_mean, 0)),
        ),
        (
            Column("J/token", "Energy of all GPUs / output tokens.", "GPU"),
            of(lambda s: text.figure(s.gpu_energy_j_per_output_token)),
        ),
        (
            Column(
                "TPOT floor ms",
                "Bytes of weights and cache that a token has to read / memory bandwidth.",
            ),
            lambda c: Cell(text.figure(c.tpot_floor_ms)),
        ),
        (
            Column(
                "Of the roof", "TPOT floor / median TPOT, in percent: 100 is the memory's limit."
            ),
            lambda c: Cell(text.percent(c.roofline_share)),
        ),
    ]
    return _level_sheet(
        matrix, "Server and GPU", "as the server and NVML say; - is unknown", fields
    )


def _level_sheet(
    matrix: Matrix, title: str, caption: str, fields: list[LevelField]
) -> Sheet | None:
    """Return a sheet of the headline benchmark, the variants of a level together."""
    cells = [(row, cell) for row in matrix.rows for cell in row.bench]
    levels = sorted({cell.level for _, cell in cells}, key=lambda level: level.value)
    lines = [
        Line(
            (
                Cell(level.figure),
                Cell(row.variant),
                *(show(cell) for _, show in fields),
            ),
            section=level.figure,
            failed=row.status == "failed",
        )
        for level in levels
        for row, cell in cells
        if cell.level == level
    ]
    first = RATE if any(level.is_open for level in levels) else CONCURRENCY
    columns = (first, VARIANT, *(column for column, _ in fields))
    return Sheet(title, caption, columns, tuple(lines)) if lines else None
