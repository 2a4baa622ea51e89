"""Fidelity in the sheets: perplexity, divergence and agreement with the baseline, a line a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from qkit.evaluate.matrix_values import Distance, Estimate, Fidelity, Greedy, Matrix
from qkit.evaluate.report import text
from qkit.evaluate.report.sheet import VARIANT, Cell, Column, Line, Sheet

#: A column and how one measurement fills it; None stands for the baseline itself.
Field = tuple[Column, Callable[[Fidelity], Cell]]


def fidelity_sheets(matrix: Matrix) -> tuple[Sheet, ...]:
    """Return the fidelity sheet; none where no row has such a measurement."""
    measured = [row.fidelity for row in matrix.rows if row.fidelity]
    return (_sheet(matrix, measured[0]),) if measured else ()


def _sheet(matrix: Matrix, first: Fidelity) -> Sheet:
    fields = _fields(matrix)
    lines = []
    for row in matrix.rows:
        lines.append(_line(row.variant, row.fidelity, fields, failed=row.status == "failed"))
        if row.variant == matrix.baseline and matrix.fidelity_noise:
            lines.append(_line(f"{row.variant} again", matrix.fidelity_noise, fields))
    columns = (VARIANT, *(column for column, _ in fields))
    return Sheet("Fidelity", _caption(matrix, first), columns, tuple(lines))


def _line(
    name: str, fidelity: Fidelity | None, fields: Sequence[Field], *, failed: bool = False
) -> Line:
    cells = (show(fidelity) if fidelity else Cell(text.MISSING) for _, show in fields)
    return Line((Cell(name), *cells), failed=failed)


def _caption(matrix: Matrix, first: Fidelity) -> str:
    source = "the text that ships with qkit" if first.text == "qkit" else first.text
    unknown = [
        row.fidelity.distance.unknown_probability
        for row in matrix.rows
        if row.fidelity and row.fidelity.distance
    ]
    rest = f", {100 * max(unknown):.1f} % of {matrix.baseline}'s probability" if unknown else ""
    return (
        f"{text.integer(first.scored_tokens)} tokens of {first.documents} documents of {source}, "
        f"windows of {first.window_tokens}; 95 % bootstrap intervals over {first.unit}s; "
        f"divergence in nats, of the {first.top_logprobs} likeliest tokens and one bucket for the "
        f"rest{rest}: a lower bound"
    )


def _fields(matrix: Matrix) -> list[Field]:
    base = matrix.baseline
    drawn = "with its interval from drawing documents (or windows, where documents are few) anew"
    return [
        (
            Column(
                "Perplexity",
                f"exp of the mean negative log-probability of the text's own tokens, {drawn}.",
            ),
            lambda f: _cell(f.perplexity, _number),
        ),
        (
            Column(
                f"vs {base}",
                f"Perplexity over that of {base} on the same tokens.",
                "Perplexity",
                ratio=True,
            ),
            _of_distance(lambda d: _cell(d.perplexity_ratio, lambda v: f"{v:.4f}x")),
        ),
        (
            Column(
                "mean",
                f"Kullback-Leibler divergence of next-token distributions from those of {base}: a "
                "lower bound, as tokens outside both sides' likeliest are one bucket. The line "
                f"'{base} again' is {base} against itself, scored twice in opposite order: "
                "figures of that size are noise.",
                "KL",
            ),
            _of_distance(lambda d: _cell(d.kl_mean, _small)),
        ),
        (
            Column(
                "estimate",
                "The mean with an estimate of what the bucket hides, from the spread of the less "
                "likely tokens that are known.",
                "KL",
            ),
            _of_distance(lambda d: Cell(_small(d.kl_mean_estimate.value))),
        ),
        (
            Column("median", "Half of the tokens are above it.", "KL"),
            _of_distance(lambda d: Cell(_small(d.kl_median.value))),
        ),
        (
            Column("p99", "One token in a hundred is above it.", "KL"),
            _of_distance(lambda d: _cell(d.kl_p99, _small)),
        ),
        (
            Column("max", "Of all tokens; it grows with their number.", "KL"),
            _of_distance(lambda d: Cell(_small(d.kl_max))),
        ),
        (
            Column(
                "Same top token, %",
                f"Positions where the likeliest token is that of {base}; ties count as the same.",
            ),
            _of_distance(lambda d: _cell(d.top1_agreement, _percent)),
        ),
        (
            Column(
                "RMS Δp, %",
                "Root mean square change of the probability of the text's own token, in points.",
            ),
            _of_distance(lambda d: _cell(d.rms_probability_change, _percent)),
        ),
        (
            Column(
                "Greedy same",
                f"Greedy generations that are those of {base} to the last token, and below it the "
                "median count of tokens before the first difference.",
            ),
            lambda f: _greedy_cell(f.greedy),
        ),
    ]


def _of_distance(show: Callable[[Distance], Cell]) -> Callable[[Fidelity], Cell]:
    return lambda fidelity: show(fidelity.distance) if fidelity.distance else Cell(text.MISSING)


def _cell(estimate: Estimate, show: Callable[[float], str]) -> Cell:
    if estimate.low is None or estimate.high is None:
        return Cell(show(estimate.value))
    return Cell(show(estimate.value), f"[{show(estimate.low)}, {show(estimate.high)}]", joint=" ")


def _greedy_cell(greedy: Greedy | None) -> Cell:
    if greedy is None:
        return Cell(text.MISSING)
    median = greedy.first_difference_median
    below = "" if median is None else f"after {median:g} of {greedy.tokens}"
    return Cell(f"{greedy.identical}/{greedy.prompts}", below)


def _number(value: float) -> str:
    return f"{value:.4g}" if value < 10_000 else f"{value:.2e}"


def _small(value: float) -> str:
    """Return a divergence: three digits, or the power of ten of a tiny one."""
    if value == 0:
        return "0"
    return f"{value:.1e}" if value < 1e-4 else f"{value:.3g}"


def _percent(value: float) -> str:
    return f"{100 * value:.2f}"
