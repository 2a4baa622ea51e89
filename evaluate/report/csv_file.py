"""The matrix as CSV: one line for each variant, benchmark and level, units in the names.

What belongs to the variant alone (weights, accuracy) is repeated on each of its lines, so that
every line can be used by itself. A variant without a benchmark has one line with these and empty
benchmark columns. An unknown figure is an empty field.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping

from qkit.evaluate.matrix_values import (
    Accuracy,
    BenchRow,
    Distance,
    Estimate,
    Fidelity,
    Matrix,
    Row,
)
from qkit.evaluate.report.sheets_accuracy import tasks

Value = str | int | float | bool | None

_ROW_COLUMNS = (
    "variant",
    "method",
    "scheme",
    "backend",
    "status",
    "reason",
    "kernel",
    "weight_bytes",
    "weight_source",
    "weight_ratio",
    "quantized_bytes",
    "unquantized_bytes",
    "kv_cache_tokens",
    "max_concurrency",
    "max_model_len",
)
#: Figures of a level that are no single value.
_COMPOUND = ("ratio", "marks", "output_tok_per_s_interval", "tpot_ms_p50_interval")
_BENCH_COLUMNS = tuple(name for name in BenchRow.model_fields if name not in _COMPOUND)
#: After `_BENCH_COLUMNS`: 95 % intervals over repeats, ratios to the baseline at this level, and
#: what was seen measuring it.
_LEVEL_COLUMNS = (
    "output_tok_per_s_low",
    "output_tok_per_s_high",
    "tpot_ms_p50_low",
    "tpot_ms_p50_high",
    "ratio_ttft",
    "ratio_tpot",
    "ratio_output_tok_per_s",
    "level_marks",
)
_ACCURACY_COLUMNS = (
    "metric",
    "value",
    "stderr",
    "n",
    "delta_points",
    "delta_points_low",
    "delta_points_high",
    "recovery_percent",
    "flips_to_wrong",
    "flips_to_right",
    "mcnemar_p",
    "verdict",
)
_FIDELITY_COLUMNS = (
    "scored_tokens",
    "perplexity",
    "perplexity_low",
    "perplexity_high",
    "perplexity_ratio",
    "perplexity_ratio_low",
    "perplexity_ratio_high",
    "kl_mean",
    "kl_mean_low",
    "kl_mean_high",
    "kl_mean_estimate",
    "kl_median",
    "kl_p99",
    "kl_max",
    "unknown_probability",
    "top1_agreement",
    "top1_agreement_low",
    "top1_agreement_high",
    "rms_probability_change",
    "greedy_prompts",
    "greedy_identical",
    "greedy_first_difference_median",
)


def render(matrix: Matrix) -> str:
    """Return the matrix as CSV (RFC 4180, but lines end with a bare line feed)."""
    shown = tasks(matrix)
    has_fidelity = any(row.fidelity for row in matrix.rows)
    columns = [
        "run",
        *_ROW_COLUMNS,
        "bench",
        *_BENCH_COLUMNS,
        *_LEVEL_COLUMNS,
        *(f"{task}_{name}" for task in shown for name in _ACCURACY_COLUMNS),
        *(f"fidelity_{name}" for name in _FIDELITY_COLUMNS if has_fidelity),
        "marks",
    ]
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, restval="", lineterminator="\n")
    writer.writeheader()
    for row in matrix.rows:
        levels: list[tuple[str, BenchRow | None]] = [
            (name, cell)
            for name in matrix.benches
            for cell in row.bench_of(name, matrix.headline_bench)
        ]
        for name, cell in levels or [("", None)]:
            writer.writerow({"run": matrix.run, **_row(row), "bench": name, **_bench(cell)})
    return out.getvalue()


def _row(row: Row) -> Mapping[str, Value]:
    values: dict[str, Value] = {name: getattr(row, name) for name in _ROW_COLUMNS}
    for task, accuracy in row.accuracy.items():
        values |= {f"{task}_{name}": value for name, value in _accuracy(accuracy).items()}
    if row.fidelity:
        values |= {f"fidelity_{name}": value for name, value in _fidelity(row.fidelity).items()}
    return values | {"marks": "; ".join(row.marks)}


def _accuracy(accuracy: Accuracy) -> Mapping[str, Value]:
    low, high = accuracy.delta_interval or (None, None)
    flips = accuracy.flips
    values: tuple[Value, ...] = (
        accuracy.metric,
        accuracy.value,
        accuracy.stderr,
        accuracy.n,
        accuracy.delta_points,
        low,
        high,
        accuracy.recovery_percent,
        flips.to_wrong if flips else None,
        flips.to_right if flips else None,
        accuracy.mcnemar_p,
        accuracy.verdict,
    )
    return dict(zip(_ACCURACY_COLUMNS, values, strict=True))


def _fidelity(fidelity: Fidelity) -> Mapping[str, Value]:
    distance, greedy = fidelity.distance, fidelity.greedy
    values: dict[str, Value] = {"scored_tokens": fidelity.scored_tokens}
    values |= _estimates({"perplexity": fidelity.perplexity})
    if distance:
        figures = {name: getattr(distance, name) for name in Distance.model_fields}
        values |= _estimates(figures)
    if greedy:
        values |= {
            "greedy_prompts": greedy.prompts,
            "greedy_identical": greedy.identical,
            "greedy_first_difference_median": greedy.first_difference_median,
        }
    return {name: values.get(name) for name in _FIDELITY_COLUMNS}


def _estimates(figures: Mapping[str, Estimate | float]) -> dict[str, Value]:
    """Return figures by column: those with an interval are three."""
    values: dict[str, Value] = {}
    for name, figure in figures.items():
        if isinstance(figure, Estimate):
            values |= {name: figure.value, f"{name}_low": figure.low, f"{name}_high": figure.high}
        else:
            values[name] = figure
    return values


def _bench(cell: BenchRow | None) -> Mapping[str, Value]:
    if cell is None:
        return {}
    ratio = cell.ratio
    level = (
        *(cell.output_tok_per_s_interval or (None, None)),
        *(cell.tpot_ms_p50_interval or (None, None)),
        ratio.ttft,
        ratio.tpot,
        ratio.output_tok_per_s,
        "; ".join(cell.marks),
    )
    values: dict[str, Value] = {name: getattr(cell, name) for name in _BENCH_COLUMNS}
    return values | dict(zip(_LEVEL_COLUMNS, level, strict=True))
