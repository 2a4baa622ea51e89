"""The matrix as CSV: one line for each variant, benchmark and level, units in the names.

What belongs to the variant alone (weights, accuracy) is repeated on each of its lines, so that
every line can be used by itself. A variant without a benchmark has one line with these and empty
benchmark columns. An unknown figure is an empty field.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping

from qkit.evaluate.derived import Capacity
from qkit.evaluate.matrix_values import (
    Accuracy,
    AccuracyPart,
    BenchRow,
    Distance,
    Estimate,
    Fidelity,
    Matrix,
    Row,
    ServerFigures,
)
from qkit.evaluate.memory import MemoryAccount
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
    "kernel_asked",
    "kernel_as_asked",
    "weight_bytes",
    "weight_source",
    "weight_ratio",
    "quantized_bytes",
    "unquantized_bytes",
    "kv_cache_tokens",
    "max_concurrency",
    "max_model_len",
)
#: Fields of a level that are no single figure.
_COMPOUND = (
    "ratio",
    "marks",
    "server",
    "capacity",
    "output_tok_per_s_interval",
    "tpot_ms_p50_interval",
)
_BENCH_COLUMNS = tuple(name for name in BenchRow.model_fields if name not in _COMPOUND)
_SERVER_COLUMNS = tuple(ServerFigures.model_fields)
_CAPACITY_COLUMNS = tuple(Capacity.model_fields)
#: The account's fields that the row does not have itself.
_MEMORY_COLUMNS = tuple(
    name
    for name in MemoryAccount.model_fields
    if name not in ("quantized_bytes", "unquantized_bytes")
)
#: After `_BENCH_COLUMNS`: ratios to the baseline at this level, and what was seen measuring it.
_LEVEL_COLUMNS = (
    "output_tok_per_s_low",
    "output_tok_per_s_high",
    "tpot_ms_p50_low",
    "tpot_ms_p50_high",
    "ratio_ttft",
    "ratio_ttft_low",
    "ratio_ttft_high",
    "ratio_tpot",
    "ratio_tpot_low",
    "ratio_tpot_high",
    "ratio_output_tok_per_s",
    "ratio_output_tok_per_s_low",
    "ratio_output_tok_per_s_high",
    "level_marks",
)
_ACCURACY_COLUMNS = (
    "metric",
    "value",
    "stderr",
    "n",
    "low",
    "high",
    "delta_points",
    "delta_points_low",
    "delta_points_high",
    "recovery_percent",
    "recovery_percent_low",
    "recovery_percent_high",
    "flips_to_wrong",
    "flips_to_right",
    "mcnemar_p",
    "mcnemar_p_holm",
    "verdict",
    "questions_to_settle",
    "ratio",
    "ratio_low",
    "ratio_high",
    "noise_points",
)
_TASK_COLUMNS = (
    "run",
    "variant",
    "suite",
    "task",
    "is_group",
    "n",
    "value",
    "stderr",
    "low",
    "high",
    "delta_points",
    "delta_points_low",
    "delta_points_high",
    "flips_to_wrong",
    "flips_to_right",
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
        *(f"memory_{name}" for name in _MEMORY_COLUMNS),
        "bench",
        *_BENCH_COLUMNS,
        *_LEVEL_COLUMNS,
        *(f"server_{name}" for name in _SERVER_COLUMNS),
        *(f"capacity_{name}" for name in _CAPACITY_COLUMNS),
        "currency",
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
            start = {"run": matrix.run, **_row(matrix, row), "bench": name}
            writer.writerow({**start, **_bench(cell, matrix)})
    return out.getvalue()


def render_tasks(matrix: Matrix) -> str:
    """Return one line for each variant and task, and each task or group of a group."""
    out = io.StringIO()
    writer = csv.DictWriter(out, _TASK_COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    for row in matrix.rows:
        for suite, accuracy in row.accuracy.items():
            start = {"run": matrix.run, "variant": row.variant, "suite": suite}
            whole = {"task": suite, "is_group": bool(accuracy.parts)}
            writer.writerow({**start, **whole, **_figures(accuracy)})
            for part in accuracy.parts:
                named = {"task": part.task, "is_group": part.is_group}
                writer.writerow({**start, **named, **_figures(part)})
    return out.getvalue()


def _figures(score: Accuracy | AccuracyPart) -> Mapping[str, Value]:
    """Return what a whole task and a part of it have in common."""
    low, high = score.interval or (None, None)
    delta_low, delta_high = score.delta_interval or (None, None)
    return {
        "n": score.n,
        "value": score.value,
        "stderr": score.stderr,
        "low": low,
        "high": high,
        "delta_points": score.delta_points,
        "delta_points_low": delta_low,
        "delta_points_high": delta_high,
        "flips_to_wrong": score.flips.to_wrong if score.flips else None,
        "flips_to_right": score.flips.to_right if score.flips else None,
    }


def _row(matrix: Matrix, row: Row) -> Mapping[str, Value]:
    values: dict[str, Value] = {name: getattr(row, name) for name in _ROW_COLUMNS}
    if row.memory:
        values |= {f"memory_{name}": getattr(row.memory, name) for name in _MEMORY_COLUMNS}
    for task, accuracy in row.accuracy.items():
        floor = matrix.noise_floors.get(task)
        found = {**_accuracy(accuracy), "noise_points": floor.spread_points if floor else None}
        values |= {f"{task}_{name}": value for name, value in found.items()}
    if row.fidelity:
        values |= {f"fidelity_{name}": value for name, value in _fidelity(row.fidelity).items()}
    return values | {"marks": "; ".join(row.marks)}


def _accuracy(accuracy: Accuracy) -> Mapping[str, Value]:
    recovery_low, recovery_high = accuracy.recovery_interval or (None, None)
    ratio_low, ratio_high = accuracy.ratio_interval or (None, None)
    return {
        "metric": accuracy.metric,
        **_figures(accuracy),
        "recovery_percent": accuracy.recovery_percent,
        "recovery_percent_low": recovery_low,
        "recovery_percent_high": recovery_high,
        "mcnemar_p": accuracy.mcnemar_p,
        "mcnemar_p_holm": accuracy.mcnemar_p_holm,
        "verdict": accuracy.verdict,
        "questions_to_settle": accuracy.questions_to_settle,
        "ratio": accuracy.ratio,
        "ratio_low": ratio_low,
        "ratio_high": ratio_high,
    }


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


def _bench(cell: BenchRow | None, matrix: Matrix) -> Mapping[str, Value]:
    if cell is None:
        return {}
    ratio = cell.ratio
    level = (
        *(cell.output_tok_per_s_interval or (None, None)),
        *(cell.tpot_ms_p50_interval or (None, None)),
        ratio.ttft,
        *(ratio.ttft_interval or (None, None)),
        ratio.tpot,
        *(ratio.tpot_interval or (None, None)),
        ratio.output_tok_per_s,
        *(ratio.output_tok_per_s_interval or (None, None)),
        "; ".join(cell.marks),
    )
    values: dict[str, Value] = {name: getattr(cell, name) for name in _BENCH_COLUMNS}
    if cell.server:
        values |= {f"server_{name}": getattr(cell.server, name) for name in _SERVER_COLUMNS}
    if cell.capacity:
        values |= {f"capacity_{name}": getattr(cell.capacity, name) for name in _CAPACITY_COLUMNS}
        values["currency"] = matrix.price.currency if matrix.price else None
    return values | dict(zip(_LEVEL_COLUMNS, level, strict=True))
