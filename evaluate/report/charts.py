"""Geometry of the page's charts: plain numbers that the template draws as inline SVG.

No script and no chart library: a page that is forwarded must need nothing but itself. Every mark
carries its figure as a title, and every figure is in a table as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qkit.evaluate.matrix_values import BenchRow, Matrix, Row
from qkit.evaluate.report import text
from qkit.evaluate.report.sheets_accuracy import tasks
from qkit.levels import Level

#: Standard errors of a 95 % interval.
Z95 = 1.96

#: Drawing area of a line chart, in SVG user units.
WIDTH, HEIGHT = 520, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 18, 44
#: Height of one row of an interval chart, and the space for its names.
ROW_HEIGHT = 34
NAMES = 104
#: Colours and shapes repeat after this many variants.
STYLES = 8


@dataclass(frozen=True)
class Tick:
    """A tick on an axis: where it is, and what it says."""

    at: float
    label: str


@dataclass(frozen=True)
class Point:
    """A measured point and its figure in words."""

    x: float
    y: float
    title: str


@dataclass(frozen=True)
class Series:
    """One variant; `style` chooses colour and marker."""

    name: str
    style: int
    points: tuple[Point, ...]

    @property
    def path(self) -> str:
        """The points as an SVG polyline."""
        return " ".join(f"{point.x:.1f},{point.y:.1f}" for point in self.points)


@dataclass(frozen=True)
class LineChart:
    """A figure against the load, one line a variant."""

    title: str
    unit: str
    #: What the load is: "concurrency", or "requests/s".
    axis: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    series: tuple[Series, ...]


@dataclass(frozen=True)
class Bar:
    """One row of an interval chart; all in SVG user units."""

    name: str
    style: int
    y: float
    x: float
    low: float | None
    high: float | None
    title: str


@dataclass(frozen=True)
class IntervalChart:
    """A figure with its interval, one row a variant."""

    title: str
    unit: str
    height: float
    x_ticks: tuple[Tick, ...]
    bars: tuple[Bar, ...]
    #: Vertical lines that figures are judged by.
    references: tuple[Tick, ...]


# ---------------------------------------------------------------------------------- line charts


def line_charts(matrix: Matrix) -> tuple[LineChart, ...]:
    """Return throughput and TPOT against the load; empty without a benchmark."""
    charts = (
        _line_chart(matrix, "Output throughput", "tok/s", lambda cell: cell.output_tok_per_s),
        _line_chart(matrix, "Time per output token (median)", "ms", lambda cell: cell.tpot_ms_p50),
    )
    return tuple(chart for chart in charts if chart)


def _line_chart(
    matrix: Matrix, title: str, unit: str, value: Callable[[BenchRow], float | None]
) -> LineChart | None:
    figures = {
        row.variant: [(c.level, v) for c in row.bench if (v := value(c)) is not None]
        for row in matrix.rows
    }
    levels = sorted(
        {level for points in figures.values() for level, _ in points},
        key=lambda level: level.value,
    )
    if not levels:
        return None
    largest = max(v for points in figures.values() for _, v in points)
    ticks = nice_ticks(0, largest)
    # Levels double from one to the next, so their logarithms are evenly spaced.
    first, last = math.log2(levels[0].value), math.log2(levels[-1].value)

    def x_of(level: Level) -> float:
        share = 0.5 if last == first else (math.log2(level.value) - first) / (last - first)
        # The outer levels keep off the frame, so that markers are not cut.
        return LEFT + 14 + share * (WIDTH - LEFT - RIGHT - 28)

    def y_of(figure: float) -> float:
        return HEIGHT - BOTTOM - figure / ticks[-1] * (HEIGHT - TOP - BOTTOM)

    return LineChart(
        title=title,
        unit=unit,
        axis="requests/s" if levels[0].is_open else "concurrency",
        x_ticks=tuple(Tick(x_of(level), level.figure) for level in levels),
        y_ticks=tuple(Tick(y_of(tick), f"{tick:,g}") for tick in ticks),
        series=tuple(
            Series(
                name,
                style_of(matrix, name),
                tuple(
                    Point(
                        x_of(level),
                        y_of(figure),
                        f"{name}, {level.name}: {text.figure(figure)} {unit}",
                    )
                    for level, figure in sorted(points, key=lambda p: p[0].value)
                ),
            )
            for name, points in figures.items()
            if points
        ),
    )


# ------------------------------------------------------------------------------ interval charts


def interval_charts(matrix: Matrix) -> tuple[IntervalChart, ...]:
    """Return two charts for each task: scores, and differences from the baseline."""
    charts = []
    for task in tasks(matrix):
        charts += [_score_chart(matrix, task), _difference_chart(matrix, task)]
    return tuple(chart for chart in charts if chart)


def _score_chart(matrix: Matrix, task: str) -> IntervalChart | None:
    found: list[tuple[Row, float, float | None, float | None]] = []
    for row in matrix.rows:
        if accuracy := row.accuracy.get(task):
            scale = 100 if accuracy.fraction else 1
            value = accuracy.value * scale
            half = None if accuracy.stderr is None else Z95 * accuracy.stderr * scale
            low = None if half is None else value - half
            found.append((row, value, low, None if half is None else value + half))
    first = found[0][0].accuracy[task]
    unit = "%" if first.fraction else first.metric.split(",")[0]
    base = next((value for row, value, *_ in found if row.variant == matrix.baseline), None)
    references = [] if base is None else [(base, matrix.baseline)]
    return _interval_chart(matrix, f"{task}: score with 95 % interval", unit, found, references)


def _difference_chart(matrix: Matrix, task: str) -> IntervalChart | None:
    found: list[tuple[Row, float, float | None, float | None]] = []
    for row in matrix.rows:
        accuracy = row.accuracy.get(task)
        if accuracy and accuracy.delta_points is not None and accuracy.delta_interval:
            found.append((row, accuracy.delta_points, *accuracy.delta_interval))
    references = [(0.0, ""), (-matrix.margin_points, f"margin -{matrix.margin_points:g}")]
    title = f"{task}: difference from {matrix.baseline}, paired, with 95 % interval"
    return _interval_chart(matrix, title, "points", found, references) if found else None


def _interval_chart(
    matrix: Matrix,
    title: str,
    unit: str,
    found: Sequence[tuple[Row, float, float | None, float | None]],
    references: Sequence[tuple[float, str]],
) -> IntervalChart:
    ends = [v for _, *values in found for v in values if v is not None]
    ends += [value for value, _ in references]
    ticks = nice_ticks(min(ends), max(ends))
    span = ticks[-1] - ticks[0]

    def x_of(figure: float) -> float:
        return NAMES + (figure - ticks[0]) / span * (WIDTH - NAMES - RIGHT)

    bars = []
    for index, (row, value, low, high) in enumerate(found):
        interval = "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
        bars.append(
            Bar(
                name=row.variant,
                style=style_of(matrix, row.variant),
                y=TOP + (index + 0.5) * ROW_HEIGHT,
                x=x_of(value),
                low=None if low is None else x_of(low),
                high=None if high is None else x_of(high),
                title=f"{row.variant}: {value:.2f}{interval} {unit}",
            )
        )
    return IntervalChart(
        title=title,
        unit=unit,
        height=TOP + len(found) * ROW_HEIGHT + BOTTOM,
        x_ticks=tuple(Tick(x_of(tick), f"{tick:,g}") for tick in ticks),
        bars=tuple(bars),
        references=tuple(Tick(x_of(value), label) for value, label in references),
    )


# ---------------------------------------------------------------------------------------- small


def style_of(matrix: Matrix, variant: str) -> int:
    """Return the number of a variant's colour and marker; the baseline has 0 for itself."""
    index = [row.variant for row in matrix.rows].index(variant)
    return index if index < STYLES else 1 + (index - 1) % (STYLES - 1)


def nice_ticks(low: float, high: float, wanted: int = 5) -> tuple[float, ...]:
    """Return evenly spaced round numbers that cover low to high.

    Steps are 1, 2 or 5 times a power of ten, as in P. S. Heckbert, "Nice numbers for graph
    labels", Graphics Gems (1990).

    Raises:
        ValueError: `high` is below `low`.
    """
    if high < low:
        raise ValueError(f"{high} is below {low}")
    raw = (high - low or abs(high) or 1.0) / wanted
    power = 10 ** math.floor(math.log10(raw))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= raw * (1 - 1e-9))
    start, stop = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    stop = max(stop, start + 1)
    return tuple(round(index * step, 10) for index in range(start, stop + 1))
