"""Geometry of the page's charts: figures end up where the axis says."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from golden import matrix_input as given

from qkit.evaluate.matrix import Matrix, VariantInput, build_matrix
from qkit.evaluate.report import charts


def build(*variants: VariantInput) -> Matrix:
    return build_matrix(run="r", created="2026-12-01", baseline="bf16", variants=variants)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 967.4, (0, 200, 400, 600, 800, 1000)),
        (0, 15.6, (0, 5, 10, 15, 20)),
        (-4.9, 0.5, (-6, -4, -2, 0, 2)),
        (70.96, 76.8, (70, 72, 74, 76, 78)),
        (0, 0, (0, 0.2)),
        (5, 5, (5, 6)),
    ],
)
def test_ticks_are_round_and_cover_the_range(
    low: float, high: float, expected: tuple[float, ...]
) -> None:
    assert charts.nice_ticks(low, high) == pytest.approx(expected)


def test_ticks_of_an_empty_range_are_refused() -> None:
    with pytest.raises(ValueError, match="below"):
        charts.nice_ticks(1, 0)


def test_points_lie_where_the_axes_put_them() -> None:
    matrix = build(given.baseline())
    throughput, _ = charts.line_charts(matrix)
    points = throughput.series[0].points
    # Levels double, so they are evenly spaced on the logarithmic axis, at their ticks.
    assert [p.x for p in points] == pytest.approx([tick.at for tick in throughput.x_ticks])
    steps = [b.x - a.x for a, b in itertools.pairwise(points)]
    assert steps == pytest.approx([steps[0]] * len(steps))
    zero, one = throughput.y_ticks[0], throughput.y_ticks[1]
    scale = (one.at - zero.at) / float(one.label.replace(",", ""))
    for point, (_, _, rate) in zip(points, given.BF16_FIGURES, strict=True):
        assert point.y == pytest.approx(zero.at + scale * rate)


def test_a_single_level_and_missing_figures_are_drawn_without_them() -> None:
    cells = [given.bench_cell(4, 50.0, 9.0, 300.0), given.bench_cell(8, 60.0, 10.0, 500.0)]
    cells[1] = cells[1].model_copy(update={"output_tok_per_s": None})
    measurement = given.measurement("bf16", "bench", bench=given.bench(cells))
    throughput, tpot = charts.line_charts(
        build(replace(given.baseline(), measurements=(measurement,)))
    )
    assert [len(chart.series[0].points) for chart in (throughput, tpot)] == [1, 2]
    assert [tick.label for tick in throughput.x_ticks] == ["4"]


def test_without_measurements_there_are_no_charts() -> None:
    matrix = build(replace(given.baseline(), measurements=()))
    assert charts.line_charts(matrix) == ()
    assert charts.interval_charts(matrix) == ()


def test_intervals_and_the_margin_lie_where_the_axis_puts_them() -> None:
    matrix = build(given.baseline(), *given.quantized())
    score, difference = charts.interval_charts(matrix)
    assert [bar.name for bar in score.bars] == ["bf16", "awq", "fp8", "smoothquant"]
    assert [bar.name for bar in difference.bars] == ["awq", "fp8", "smoothquant"]

    first, last = difference.x_ticks[0], difference.x_ticks[-1]
    scale = (last.at - first.at) / (float(last.label) - float(first.label))

    def x_of(points: float) -> float:
        return first.at + (points - float(first.label)) * scale

    assert [line.at for line in difference.references] == pytest.approx([x_of(0), x_of(-1)])
    accuracy = next(row for row in matrix.rows if row.variant == "smoothquant").accuracy["mmlu"]
    assert accuracy.delta_points is not None
    assert accuracy.delta_interval is not None
    bar = difference.bars[2]
    assert bar.x == pytest.approx(x_of(accuracy.delta_points))
    assert (bar.low, bar.high) == pytest.approx(tuple(map(x_of, accuracy.delta_interval)))


def test_a_variant_keeps_its_style_and_the_baselines_is_its_own() -> None:
    variants = [VariantInput(name=f"v{index}", method="awq", scheme="W4A16") for index in range(12)]
    matrix = build(given.baseline(), *variants)
    styles = [charts.style_of(matrix, row.variant) for row in matrix.rows]
    assert styles[:8] == list(range(8))
    assert 0 not in styles[1:]
    assert max(styles) < charts.STYLES
