"""What the reports show: the matrix as a few sheets of formatted text, the same for every format.

The terminal, Markdown and HTML renderers only lay sheets out, so that a figure reads the same
wherever it is printed.
"""

from __future__ import annotations

from qkit.evaluate.matrix_values import Matrix, Row
from qkit.evaluate.report import text
from qkit.evaluate.report.sheet import VARIANT, Cell, Column, RowField, Sheet, row_sheet
from qkit.evaluate.report.sheets_accuracy import (
    accuracy_sheet,
    average_sheet,
    noise_text,
    parts_sheet,
    score_fields,
    tasks,
)
from qkit.evaluate.report.sheets_bench import bench_sheet
from qkit.evaluate.report.sheets_fidelity import fidelity_sheets
from qkit.evaluate.report.sheets_levels import level_sheet, only_row
from qkit.evaluate.report.sheets_load import load_sheets
from qkit.evaluate.report.sheets_memory import capacity_sheet, memory_sheet, server_sheet
from qkit.evaluate.report.sheets_reference import reference_sheet

_WEIGHT_SOURCES = {
    "vllm-log": "what the server says loading them took",
    "checkpoint": "bytes of the checkpoint's tensors",
}


def sheets(matrix: Matrix, *, detailed: bool = False, intervals: bool = False) -> tuple[Sheet, ...]:
    """Return the matrix's sheets: overview, those of tasks, fidelity, one for each benchmark.

    Args:
        matrix: What to show.
        detailed: Add the tasks of groups, the benchmarks' further columns, the server's side, and
            the capacity where no price is given, for pages that are wide enough.
        intervals: Add the ratios' intervals, where a line may be as long as it likes.
    """
    found = [overview(matrix), *accuracy_sheets(matrix, detailed=detailed)]
    found += fidelity_sheets(matrix)
    found += [
        _bench_sheet(matrix, name, detailed=detailed, intervals=intervals or detailed)
        for name in matrix.benches
    ]
    found += load_sheets(matrix)
    further = [
        capacity_sheet(matrix) if matrix.price or detailed else None,
        memory_sheet(matrix),
        server_sheet(matrix) if detailed else None,
    ]
    found += [sheet for sheet in further if sheet]
    return tuple(found)


def _bench_sheet(matrix: Matrix, name: str, *, detailed: bool, intervals: bool) -> Sheet:
    alone = only_row(matrix, name)
    if alone and not detailed:
        return level_sheet(matrix, name, alone)
    return bench_sheet(matrix, name, detailed=detailed, intervals=intervals)


def score_sheets(matrix: Matrix) -> tuple[Sheet, ...]:
    """Return the sheets of a matrix that holds nothing but scores."""
    fields: list[RowField] = [(VARIANT, lambda row: Cell(row.variant))]
    for task in tasks(matrix):
        fields += score_fields(matrix, task)
    scores = row_sheet("Scores", _task_caption(matrix), fields, matrix.rows)
    return (scores, *accuracy_sheets(matrix))


def accuracy_sheets(matrix: Matrix, *, detailed: bool = False) -> tuple[Sheet, ...]:
    """Return each task's sheet, the parts of groups, and the published scores."""
    found: list[Sheet | None] = []
    for task in tasks(matrix):
        found += [accuracy_sheet(matrix, task), parts_sheet(matrix, task, detailed=detailed)]
    found += [average_sheet(matrix), reference_sheet(matrix)]
    return tuple(sheet for sheet in found if sheet)


# ------------------------------------------------------------------------------------- overview


def overview(matrix: Matrix) -> Sheet:
    """One line a variant: what it is, what ran it, how large it is and what it scores."""
    source = _WEIGHT_SOURCES[matrix.weight_source]
    fields: list[RowField] = [
        (
            VARIANT,
            lambda row: Cell(row.variant, "failed" if row.status == "failed" else ""),
        ),
        (
            Column(
                "Scheme",
                "Bits of weights (W) and activations (A); g: weights that share a scale.",
                numeric=False,
            ),
            lambda row: Cell(row.scheme),
        ),
        (
            Column(
                "Kernel",
                "Linear kernel that ran, from the server's log; - where the log names none.",
                numeric=False,
            ),
            _kernel,
        ),
        (
            Column(
                "Weights",
                f"Weight memory: {source}, and its ratio to {matrix.baseline}. Process memory is "
                "no measure of it: the server fills what it is given.",
            ),
            lambda row: Cell(text.size(row.weight_bytes), text.ratio(row.weight_ratio, missing="")),
        ),
        (
            Column("KV cache tokens", "Tokens that fit into the server's KV cache."),
            lambda row: Cell(text.integer(row.kv_cache_tokens)),
        ),
    ]
    for task in tasks(matrix):
        fields += score_fields(matrix, task)
    return row_sheet("Overview", _overview_caption(matrix), fields, matrix.rows)


def _kernel(row: Row) -> Cell:
    if row.kernel_as_asked is False:
        return Cell(row.kernel or text.MISSING, f"NOT {row.kernel_asked}", tone="bad")
    slow = "slow path" in (row.kernel or "")
    return Cell(row.kernel or text.MISSING, "SLOW PATH" if slow else "", tone="bad")


def _overview_caption(matrix: Matrix) -> str:
    weights = f"weights: {_WEIGHT_SOURCES[matrix.weight_source]}"
    return "; ".join(filter(None, (weights, _task_caption(matrix))))


def _task_caption(matrix: Matrix) -> str:
    parts = []
    for task in tasks(matrix):
        counts = [row.accuracy[task].n for row in matrix.rows if task in row.accuracy]
        lowest, highest = text.integer(min(counts)), text.integer(max(counts))
        n = lowest if lowest == highest else f"{lowest} to {highest}"
        noise = f", {floor}" if (floor := noise_text(matrix, task)) else ""
        parts.append(f"{task}: {n} questions, one standard error, 95 % intervals{noise}")
    return "; ".join(parts)
