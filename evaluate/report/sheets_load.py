"""The sheet of the largest loads that meet an objective."""

from __future__ import annotations

from qkit.evaluate.matrix_values import Matrix
from qkit.evaluate.report import text
from qkit.evaluate.report.sheet import VARIANT, Cell, Column, Line, Sheet
from qkit.measurements import LoadSearch


def load_sheets(matrix: Matrix) -> tuple[Sheet, ...]:
    """Return one sheet for each benchmark that searched; rows are variants."""
    names = dict.fromkeys(name for row in matrix.rows for name in row.load_searches)
    return tuple(_sheet(matrix, name) for name in names)


def _sheet(matrix: Matrix, name: str) -> Sheet:
    found = [(row, row.load_searches[name]) for row in matrix.rows if name in row.load_searches]
    first = found[0][1]
    unit = "requests/s" if first.over == "request_rate" else "concurrency"
    columns = (
        VARIANT,
        Column(
            "Largest load",
            f"Largest {unit} that met the objective, one step below one that did not.",
        ),
        Column("met at", f"Highest {unit} tried that met it, and all below.", "Bracket"),
        Column("not met at", f"Lowest {unit} tried that did not.", "Bracket"),
        Column("Outcome", "What the search found.", numeric=False),
    )
    lines = tuple(
        Line(
            (
                Cell(row.variant),
                Cell(_load(search.largest_load)),
                Cell(_load(search.highest_met)),
                Cell(_load(search.lowest_unmet)),
                Cell(search.outcome),
            ),
            failed=row.status == "failed",
        )
        for row, search in found
    )
    title = "Largest load"
    if name != matrix.headline_bench:
        title += f": {name}"
    return Sheet(title, f"{unit}; objective {_written(first)}", columns, lines)


def _written(search: LoadSearch) -> str:
    return ", ".join(search.slo.split(","))


def _load(value: float | None) -> str:
    return text.MISSING if value is None else f"{value:g}"
