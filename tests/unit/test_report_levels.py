"""The table of a single variant's benchmark, with a published measurement in it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from golden import matrix_input as given

from qkit.evaluate.matrix import Matrix, build_matrix
from qkit.evaluate.pairing import VariantInput
from qkit.evaluate.report import markdown
from qkit.measurements import BenchCell, Distribution

ROWS = Path(__file__).parent.parent / "golden" / "short_chat_a800.json"


def times(n: int, p50: float, p95: float) -> Distribution:
    """Return a distribution whose p95 is a maximum where n is too small for one."""
    shown = p95 if n >= 20 else None
    return Distribution(n=n, mean=p50, p50=p50, p90=None, p95=shown, p99=None, max=p95)


def published_cells() -> list[BenchCell]:
    rows = json.loads(ROWS.read_text(encoding="utf-8"))["rows"]
    return [
        given.bench_cell(
            row["concurrency"], row["ttft_ms_p50"], row["tpot_ms_p50"], 1.0
        ).model_copy(
            update={
                "n": row["n"],
                "duration_s": row["wall_s"],
                "req_per_s": row["req_per_s"],
                "output_tok_per_s": row["output_tok_per_s"],
                "ttft_ms": times(row["n"], row["ttft_ms_p50"], row["ttft_ms_p95"]),
                "tpot_ms": times(row["n"], row["tpot_ms_p50"], row["tpot_ms_p95"]),
                "prefix_hit_tokens": 0.25 * row["n"] * given.INPUT_TOKENS,
            }
        )
        for row in rows
    ]


def matrix_of(**changes: object) -> Matrix:
    bench = given.bench(published_cells(), workload="eight questions", **changes)
    alone = VariantInput(
        name="bf16",
        method="bf16",
        scheme="BF16",
        measurements=(given.measurement("bf16", "bench", bench=bench),),
    )
    return build_matrix(run="r", created="2026-12-01", baseline="bf16", variants=[alone])


def lines_of(matrix: Matrix) -> list[str]:
    text = markdown.render(matrix)
    return [re.sub(r"\s+", " ", line) for line in text.splitlines() if line.startswith("|")]


def test_one_variant_is_shown_as_levels_with_their_scaling() -> None:
    shown = "\n".join(lines_of(matrix_of()))
    assert "| 1 | 8 | 20.11 | 0.40 | 46.8 | 1.00x | 45.0 | 388.5 max | 20.7 | 21.4 max |" in shown
    assert "| 16 | 32 | 6.34 | 5.05 | 588.5 | 12.57x | 120.6 | 152.7 | 24.3 | 25.6 |" in shown
    assert "eight questions" in markdown.render(matrix_of())


def test_hits_are_shown_only_where_they_are_meant() -> None:
    assert "Cache hits" not in "\n".join(lines_of(matrix_of()))
    assert "Cache hits" in "\n".join(lines_of(matrix_of(hits_expected=True)))
    assert "| 25.0 |" in "\n".join(lines_of(matrix_of(hits_expected=True)))
