"""Accuracy in the sheets: score and difference in the overview, and one sheet for each task."""

from __future__ import annotations

from collections.abc import Callable

from qkit.evaluate.matrix_values import Accuracy, Matrix, Row
from qkit.evaluate.report import text
from qkit.evaluate.report.sheet import VARIANT, Cell, Column, RowField, Sheet, Tone, row_sheet

_TONES: dict[str | None, Tone] = {
    "non-inferior": "good",
    "inferior": "bad",
    "inconclusive": "unsure",
}


def tasks(matrix: Matrix) -> tuple[str, ...]:
    """Return the accuracy tasks of any row, in order of appearance."""
    return tuple(dict.fromkeys(task for row in matrix.rows for task in row.accuracy))


def score_fields(matrix: Matrix, task: str) -> list[RowField]:
    """Return a task's columns of the overview: its score, and its difference with a verdict."""
    first = _first_accuracy(matrix, task)
    margin = f"{matrix.margin_points:g} point{'' if matrix.margin_points == 1 else 's'}"
    return [
        (
            Column(
                "score, %" if first.fraction else "score",
                f"Metric {_metric_name(first)}, with one standard error.",
                task,
            ),
            lambda row: _score_cell(row.accuracy.get(task)),
        ),
        (
            Column(
                f"points vs {matrix.baseline}",
                f"Difference from {matrix.baseline} in percentage points on the same questions, "
                f"with its 95 % interval. Verdict for an allowed loss of {margin}: non-inferior "
                "where the whole interval lies above it, inferior where it lies below, "
                "inconclusive where more questions are needed.",
                task,
            ),
            lambda row: _delta_cell(row.accuracy.get(task), row.variant == matrix.baseline),
        ),
    ]


def _score_cell(accuracy: Accuracy | None) -> Cell:
    if accuracy is None:
        return Cell(text.MISSING)
    scale = 100 if accuracy.fraction else 1
    digits = 2 if accuracy.n >= 1000 else 1
    error = accuracy.stderr
    return Cell(
        text.decimal(accuracy.value * scale, digits),
        "" if error is None else f"± {text.decimal(error * scale, digits)}",
        joint=" ",
    )


def _delta_cell(accuracy: Accuracy | None, is_baseline: bool) -> Cell:
    if accuracy is None:
        return Cell(text.MISSING)
    if is_baseline:
        return Cell("baseline")
    return Cell(
        text.difference(accuracy.delta_points, accuracy.delta_interval),
        accuracy.verdict or "",
        tone=_TONES.get(accuracy.verdict, ""),
    )


def accuracy_sheet(matrix: Matrix, task: str) -> Sheet:
    """One line a variant: how one task's answers changed against the baseline."""
    base = matrix.baseline

    def show(part: Callable[[Accuracy], str]) -> Callable[[Row], Cell]:
        return lambda row: Cell(part(row.accuracy[task]) if task in row.accuracy else text.MISSING)

    fields: list[RowField] = [
        (VARIANT, lambda row: Cell(row.variant)),
        (Column("Questions", "Questions scored."), show(lambda a: text.integer(a.n))),
        (
            Column("to wrong", f"Right by {base}, wrong by the variant.", "Flips"),
            show(lambda a: text.integer(a.flips.to_wrong if a.flips else None)),
        ),
        (
            Column("to right", f"Wrong by {base}, right by the variant.", "Flips"),
            show(lambda a: text.integer(a.flips.to_right if a.flips else None)),
        ),
        (
            Column(
                "McNemar p",
                "Probability of flips as one-sided as these by chance alone (exact, two-sided).",
            ),
            show(lambda a: text.probability(a.mcnemar_p)),
        ),
        (
            Column("Recovery, %", f"Score in percent (not points) of that of {base}."),
            show(lambda a: text.decimal(a.recovery_percent, 1)),
        ),
    ]
    return row_sheet(
        f"Changed answers: {task}",
        _task_settings(_first_accuracy(matrix, task)),
        fields,
        matrix.rows,
    )


def _task_settings(accuracy: Accuracy) -> str:
    shots, limit = accuracy.num_fewshot, accuracy.limit
    return ", ".join(
        (
            f"metric {_metric_name(accuracy)}",
            "few-shot as the task sets it" if shots is None else f"{shots}-shot",
            "all questions" if limit is None else f"at most {limit} questions a task",
            "chat template" if accuracy.chat_template else "no chat template",
        )
    )


def _first_accuracy(matrix: Matrix, task: str) -> Accuracy:
    return next(row.accuracy[task] for row in matrix.rows if task in row.accuracy)


def _metric_name(accuracy: Accuracy) -> str:
    """Return the metric as lm-eval names it, without its filter."""
    return accuracy.metric.split(",")[0]
