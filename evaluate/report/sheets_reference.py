"""Published scores in the sheets: theirs beside ours, and where they come from."""

from __future__ import annotations

from qkit.evaluate.matrix_values import Matrix, Reference
from qkit.evaluate.report import text
from qkit.evaluate.report.sheet import Cell, Column, Line, Sheet

_COLUMNS = (
    Column("Published", "Whose score it is, and of what.", numeric=False, key=True),
    Column("Task", "Task and few-shot count it was scored with.", numeric=False),
    Column("Theirs", "Published score: shares in percent."),
    Column("Ours", "Score of our row, with its name."),
    Column(
        "Difference",
        "Ours minus theirs, in the score's unit; - where not scored alike. Far off: more than 2 "
        "points, and more than our 95 % interval explains.",
    ),
    Column("Source", "Where it was published.", numeric=False),
)


def reference_sheet(matrix: Matrix) -> Sheet | None:
    """One line a published score; None where the recipe has none."""
    if not matrix.references:
        return None
    caption = "scores that others published; another harness, server or prompt can explain a point"
    lines = tuple(_line(reference) for reference in matrix.references)
    return Sheet("Published scores", caption, _COLUMNS, lines)


def _line(reference: Reference) -> Line:
    shots = "" if reference.num_fewshot is None else f"{reference.num_fewshot}-shot"
    difference = Cell(text.MISSING, "; ".join(reference.differs))
    if reference.difference is not None:
        note = "far off" if reference.off else ""
        difference = Cell(text.signed(reference.difference), note, tone="bad")
    return Line(
        (
            Cell(reference.name, "published"),
            Cell(reference.task, shots),
            Cell(text.decimal(reference.value, 2)),
            Cell(text.decimal(reference.ours, 2), reference.variant or ""),
            difference,
            Cell(reference.source),
        )
    )
