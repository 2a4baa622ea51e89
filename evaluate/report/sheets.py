"""What the reports show: the matrix as a few sheets of formatted text, the same for every format.

The terminal, Markdown and HTML renderers only lay sheets out, so that a figure reads the same
wherever it is printed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from qkit.evaluate.matrix_values import Accuracy, BenchRow, Matrix, Row
from qkit.evaluate.report import text
from qkit.evaluate.report.sheet import CONCURRENCY, VARIANT, Cell, Column, Line, Sheet, Tone

_TONES: dict[str | None, Tone] = {
    "non-inferior": "good",
    "inferior": "bad",
    "inconclusive": "unsure",
}


_WEIGHT_SOURCES = {
    "vllm-log": "what the server says loading them took",
    "checkpoint": "bytes of the checkpoint's tensors",
}

#: A column and how a row fills it.
RowField = tuple[Column, Callable[[Row], Cell]]
#: A column and how a row at one concurrency fills it.
LevelField = tuple[Column, Callable[[Row, BenchRow], Cell]]


def sheets(matrix: Matrix, *, detailed: bool = False) -> tuple[Sheet, ...]:
    """Return the matrix's sheets: the overview, one for each task, and the benchmark.

    Args:
        matrix: What to show.
        detailed: Add the benchmark's further columns, for pages that are wide enough.
    """
    found = [overview(matrix), *(accuracy_sheet(matrix, task) for task in tasks(matrix))]
    if any(row.bench for row in matrix.rows):
        found.append(bench_sheet(matrix, detailed=detailed))
    return tuple(found)


def tasks(matrix: Matrix) -> tuple[str, ...]:
    """Return the accuracy tasks of any row, in order of appearance."""
    return tuple(dict.fromkeys(task for row in matrix.rows for task in row.accuracy))


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
            lambda row: Cell(row.kernel or text.MISSING),
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
        fields += _score_fields(matrix, task)
    return Sheet(
        "Overview", _overview_caption(matrix), _columns(fields), _lines(fields, matrix.rows)
    )


def _overview_caption(matrix: Matrix) -> str:
    parts = [f"weights: {_WEIGHT_SOURCES[matrix.weight_source]}"]
    for task in tasks(matrix):
        counts = [row.accuracy[task].n for row in matrix.rows if task in row.accuracy]
        lowest, highest = text.integer(min(counts)), text.integer(max(counts))
        n = lowest if lowest == highest else f"{lowest} to {highest}"
        parts.append(f"{task}: {n} questions, one standard error, 95 % intervals")
    return "; ".join(parts)


def _score_fields(matrix: Matrix, task: str) -> list[RowField]:
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


# ------------------------------------------------------------------------------------- accuracy


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
    return Sheet(
        f"Changed answers: {task}",
        _task_settings(_first_accuracy(matrix, task)),
        _columns(fields),
        _lines(fields, matrix.rows),
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


# ---------------------------------------------------------------------------------------- bench


def bench_sheet(matrix: Matrix, *, detailed: bool = False) -> Sheet:
    """One line a variant and concurrency level, the variants of a level together."""
    cells = [cell for row in matrix.rows for cell in row.bench]
    fields = _bench_fields(matrix, cells, detailed=detailed)
    lines = [
        Line(
            tuple(show(row, cell) for _, show in fields),
            section=str(level),
            failed=row.status == "failed",
        )
        for level in sorted({cell.concurrency for cell in cells})
        for row in matrix.rows
        for cell in row.bench
        if cell.concurrency == level
    ]
    columns = tuple(column for column, _ in fields)
    return Sheet("Latency and throughput", _bench_caption(matrix), columns, tuple(lines))


def _bench_fields(matrix: Matrix, cells: Sequence[BenchRow], *, detailed: bool) -> list[LevelField]:
    versus = f"vs {matrix.baseline}"
    few = "; 'max' marks the largest where requests are too few for p95"
    fields: list[LevelField] = [
        (CONCURRENCY, lambda _, c: Cell(text.integer(c.concurrency))),
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
            Column(versus, "Ratio of the medians; below 1 is faster.", "TTFT ms", ratio=True),
            lambda _, c: Cell(text.ratio(c.ratio.ttft)),
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
            Column(versus, "Ratio of the medians; below 1 is faster.", "TPOT ms", ratio=True),
            lambda _, c: Cell(text.ratio(c.ratio.tpot)),
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
            Column(versus, "Ratio of 'all'; above 1 is faster.", "tok/s", ratio=True),
            lambda _, c: Cell(text.ratio(c.ratio.output_tok_per_s)),
        ),
    ]
    if detailed:
        fields += _detail_fields()
    if any(cell.failed for cell in cells):
        failed = Column("Failed", "Requests that failed; they are in no other figure.", key=True)
        fields.insert(3, (failed, lambda _, c: Cell(text.integer(c.failed))))
    if matrix.workload and not matrix.workload.ignore_eos:
        length = Column("Tokens out", "Mean output tokens a request; answers end by themselves.")
        fields.append((length, lambda _, c: Cell(text.decimal(c.output_tokens_mean, 1))))
    return fields


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
    ]


def _bench_caption(matrix: Matrix) -> str:
    load = matrix.workload
    if load is None:
        return ""
    sampling = ", ".join(f"{name} {value:g}" for name, value in load.sampling.items())
    ending = "exactly" if load.ignore_eos else "at most"
    parts = [
        f"{load.endpoint} endpoint, streaming",
        f"{load.input_tokens} tokens in, {ending} {load.output_tokens} out",
        *([sampling] if sampling else []),
    ]
    return "; ".join(parts)


def _columns(fields: Sequence[RowField]) -> tuple[Column, ...]:
    return tuple(column for column, _ in fields)


def _lines(fields: Sequence[RowField], rows: Sequence[Row]) -> tuple[Line, ...]:
    return tuple(
        Line(tuple(show(row) for _, show in fields), failed=row.status == "failed") for row in rows
    )
