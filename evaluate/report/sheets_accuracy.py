"""Accuracy in the sheets: score and difference in the overview, and one sheet for each task."""

from __future__ import annotations

from collections.abc import Callable

from qkit.evaluate.matrix_values import Accuracy, AccuracyPart, Average, Matrix, Row
from qkit.evaluate.report import text
from qkit.evaluate.report.sheet import (
    VARIANT,
    Cell,
    Column,
    Line,
    RowField,
    Sheet,
    Tone,
    row_sheet,
)
from qkit.evaluate.scores import metric_name

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
    return [
        (
            Column(
                "score, %" if first.fraction else "score",
                f"Metric {metric_name(first.metric)}, with one standard error.",
                task,
            ),
            lambda row: _score_cell(row.accuracy.get(task)),
        ),
        _points_field(matrix, task) if first.fraction else _ratio_field(matrix, task),
    ]


def _points_field(matrix: Matrix, task: str) -> RowField:
    margin = f"{matrix.margin_points:g} point{'' if matrix.margin_points == 1 else 's'}"
    floor = matrix.noise_floors.get(task)
    noise = f"noise ± {text.decimal(floor.spread_points, 1)}" if floor else ""
    meaning = (
        f"Difference from {matrix.baseline} in percentage points on the same questions, with its "
        f"95 % interval. Verdict for an allowed loss of {margin}: non-inferior where the whole "
        "interval lies above it, inferior where it lies below, inconclusive where more questions "
        "are needed. Each variant's verdict is its own: not adjusted for there being several."
    )
    if floor:
        meaning += (
            f" Noise: how far {matrix.baseline} moves when it is measured twice, 95 % of the time."
        )
    return (
        Column(f"points vs {matrix.baseline}", meaning, task),
        lambda row: _delta_cell(row.accuracy.get(task), row.variant == matrix.baseline, noise),
    )


def _ratio_field(matrix: Matrix, task: str) -> RowField:
    return (
        Column(
            f"ratio to {matrix.baseline}",
            f"Ratio to {matrix.baseline} over the same documents, above 1 is worse, with its 95 % "
            "interval (a bootstrap over documents).",
            task,
        ),
        lambda row: _ratio_cell(row.accuracy.get(task), row.variant == matrix.baseline),
    )


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


def _delta_cell(accuracy: Accuracy | None, is_baseline: bool, noise: str) -> Cell:
    if accuracy is None:
        return Cell(text.MISSING)
    if is_baseline:
        return Cell("baseline", noise)
    unpaired = " (unpaired)" if accuracy.delta_method == "unpaired-normal" else ""
    return Cell(
        text.difference(accuracy.delta_points, accuracy.delta_interval) + unpaired,
        accuracy.verdict or "",
        tone=_TONES.get(accuracy.verdict, ""),
    )


def _ratio_cell(accuracy: Accuracy | None, is_baseline: bool) -> Cell:
    if accuracy is None:
        return Cell(text.MISSING)
    if is_baseline:
        return Cell("baseline")
    shown = text.decimal(accuracy.ratio, 3)
    return Cell(shown, text.interval(accuracy.ratio_interval, 3), joint=" ")


def accuracy_sheet(matrix: Matrix, task: str) -> Sheet:
    """One line a variant: how one task's answers changed against the baseline."""

    def show(part: Callable[[Accuracy], str]) -> Callable[[Row], Cell]:
        return lambda row: Cell(part(row.accuracy[task]) if task in row.accuracy else text.MISSING)

    first = _first_accuracy(matrix, task)
    scale, digits = (100, 1) if first.fraction else (1, 2)
    fields: list[RowField] = [
        (VARIANT, lambda row: Cell(row.variant)),
        (Column("Questions", "Questions scored."), show(lambda a: text.integer(a.n))),
        (
            Column(
                "95 % interval",
                "Of the score: Wilson's for right and wrong answers (for a group, stratified by "
                "task), Student's for other values, a bootstrap for perplexities.",
            ),
            show(lambda a: text.interval(a.interval, digits, scale) or text.MISSING),
        ),
    ]
    if first.fraction:
        fields += _flip_fields(matrix, task, show)
    title = f"Changed answers: {task}" if first.fraction else f"Score: {task}"
    return row_sheet(title, _caption(matrix, task), fields, matrix.rows)


Show = Callable[[Callable[[Accuracy], str]], Callable[[Row], Cell]]


def _flip_fields(matrix: Matrix, task: str, show: Show) -> list[RowField]:
    base = matrix.baseline
    several = sum(1 for row in matrix.rows if task in row.accuracy) > 2
    fields: list[RowField] = [
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
                "p",
                "Probability of flips as one-sided as these by chance alone (exact, two-sided).",
                "McNemar",
            ),
            show(lambda a: text.probability(a.mcnemar_p)),
        ),
    ]
    if several:
        meaning = "The same, adjusted for the number of variants in the table (Holm)."
        fields.append(
            (Column("Holm", meaning, "McNemar"), show(lambda a: text.probability(a.mcnemar_p_holm)))
        )
    fields.append(
        (
            Column(
                "Recovery, %",
                f"Score in percent (not points) of that of {base}, with its 95 % interval.",
            ),
            lambda row: _recovery_cell(row.accuracy.get(task)),
        )
    )
    if any(a.questions_to_settle for row in matrix.rows if (a := row.accuracy.get(task))):
        meaning = (
            "Questions that would settle an inconclusive verdict with 80 % power if the difference "
            "and the flips stayed as they are."
        )
        fields.append((Column("To settle", meaning), show(_settles)))
    return fields


def _recovery_cell(accuracy: Accuracy | None) -> Cell:
    if accuracy is None:
        return Cell(text.MISSING)
    shown = text.decimal(accuracy.recovery_percent, 1)
    return Cell(shown, text.interval(accuracy.recovery_interval, 1), joint=" ")


def _settles(accuracy: Accuracy) -> str:
    needed = accuracy.questions_to_settle
    if needed is None:
        return text.MISSING
    if accuracy.limit is None and needed > accuracy.n:
        return f"over {text.integer(accuracy.n)}"
    return f"about {text.about(needed)}"


def parts_sheet(matrix: Matrix, task: str, *, detailed: bool) -> Sheet | None:
    """One line a task of a group, one column a variant; None where there is nothing to show.

    Args:
        matrix: What to show.
        task: A group's name.
        detailed: Show the tasks as well as the groups they form.
    """
    found = {
        row.variant: {part.task: part for part in row.accuracy[task].parts}
        for row in matrix.rows
        if task in row.accuracy
    }
    every = {name: part for parts in found.values() for name, part in parts.items()}
    shown = [part for part in every.values() if detailed or part.is_group]
    if not shown:
        return None
    meaning = (
        f"Score in percent; below it the difference from {matrix.baseline} in points with its 95 % "
        "interval."
    )
    columns = (
        Column("Task", "Task or group of tasks.", numeric=False, key=True),
        Column("n", "Questions scored.", key=True),
        *(Column(name, meaning) for name in found),
    )
    lines = tuple(
        Line(
            (
                Cell(part.alias),
                Cell(text.integer(part.n)),
                *(
                    _part_cell(parts.get(part.task), name == matrix.baseline)
                    for name, parts in found.items()
                ),
            )
        )
        for part in shown
    )
    caption = "scores in percent, differences in points on the same questions with 95 % intervals"
    return Sheet(f"Parts: {task}", caption, columns, lines)


def _part_cell(part: AccuracyPart | None, is_baseline: bool) -> Cell:
    if part is None:
        return Cell(text.MISSING)
    score = text.decimal(100 * part.value, 1)
    if is_baseline:
        return Cell(score, text.interval(part.interval, 1, 100), joint=" ")
    return Cell(score, text.difference(part.delta_points, part.delta_interval))


def average_sheet(matrix: Matrix) -> Sheet | None:
    """One line a variant: its mean score over suites; None where no row has one."""
    suites = next((row.average.suites for row in matrix.rows if row.average), ())
    if not suites:
        return None
    base = matrix.baseline

    def show(part: Callable[[Average], Cell]) -> Callable[[Row], Cell]:
        return lambda row: part(row.average) if row.average else Cell(text.MISSING)

    fields: list[RowField] = [
        (VARIANT, lambda row: Cell(row.variant)),
        (
            Column("score, %", "Mean of the suites' scores, each with the same weight."),
            show(lambda a: Cell(text.decimal(100 * a.value, 2))),
        ),
        (
            Column(
                f"points vs {base}",
                f"Difference from {base} on the same questions, with its 95 % interval: that of "
                "the questions of these suites, not of other suites one might have chosen.",
            ),
            lambda row: _average_delta(row.average, row.variant == base),
        ),
        (
            Column("Recovery, %", f"Mean score in percent (not points) of that of {base}."),
            show(
                lambda a: Cell(
                    text.decimal(a.recovery_percent, 2),
                    text.interval(a.recovery_interval, 2),
                    joint=" ",
                )
            ),
        ),
    ]
    caption = f"mean of {', '.join(suites)}; a variant without one of them has none"
    return row_sheet(f"Average of {len(suites)} suites", caption, fields, matrix.rows)


def _average_delta(average: Average | None, is_baseline: bool) -> Cell:
    if average is None:
        return Cell(text.MISSING)
    if is_baseline:
        return Cell("baseline")
    return Cell(
        text.difference(average.delta_points, average.delta_interval),
        average.verdict or "",
        tone=_TONES.get(average.verdict, ""),
    )


def _caption(matrix: Matrix, task: str) -> str:
    settings = _task_settings(_first_accuracy(matrix, task))
    floor = noise_text(matrix, task)
    return f"{settings}; {floor} ({matrix.baseline} against itself)" if floor else settings


def noise_text(matrix: Matrix, task: str) -> str:
    """Return a task's noise floor in words; nothing where it was not measured."""
    floor = matrix.noise_floors.get(task)
    if floor is None:
        return ""
    flips = floor.flips
    seen = f"{text.counted(flips.to_wrong + flips.to_right, 'flip')}, " if flips else ""
    return f"noise floor: {seen}± {text.decimal(floor.spread_points, 1)} points"


def _task_settings(accuracy: Accuracy) -> str:
    shots, limit = accuracy.num_fewshot, accuracy.limit
    return ", ".join(
        (
            f"metric {metric_name(accuracy.metric)}",
            "few-shot as the task sets it" if shots is None else f"{shots}-shot",
            "all questions" if limit is None else f"at most {limit} questions a task",
            "chat template" if accuracy.chat_template else "no chat template",
        )
    )


def _first_accuracy(matrix: Matrix, task: str) -> Accuracy:
    return next(row.accuracy[task] for row in matrix.rows if task in row.accuracy)
