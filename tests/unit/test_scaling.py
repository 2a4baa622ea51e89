"""The seed's raw rows must give the figures that were derived from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qkit.evaluate.scaling import LevelFigures, scaling

ROWS = Path(__file__).parent.parent / "golden" / "short_chat_a800.json"


def rows() -> list[LevelFigures]:
    stored = json.loads(ROWS.read_text(encoding="utf-8"))["rows"]
    return [
        LevelFigures(
            concurrency=row["concurrency"],
            output_tok_per_s=row["output_tok_per_s"],
            ttft_ms_p50=row["ttft_ms_p50"],
            tpot_ms_p50=row["tpot_ms_p50"],
        )
        for row in stored
    ]


def test_a_published_measurement_gives_its_published_scaling() -> None:
    levels = scaling(rows())
    assert [level.concurrency for level in levels] == [1, 2, 4, 8, 16]
    shown = [f"{level.throughput:.1f}" for level in levels if level.throughput]
    assert shown == ["1.0", "1.8", "3.5", "6.8", "12.6"]
    shares = [round(100 * level.efficiency) for level in levels if level.efficiency]
    assert shares == [100, 90, 88, 84, 79]
    tpot = [f"{level.tpot:.2f}" for level in levels if level.tpot]
    assert tpot == ["1.00", "1.04", "1.06", "1.10", "1.17"]
    ttft = [f"{level.ttft:.2f}" for level in levels if level.ttft]
    assert ttft == ["1.00", "1.00", "1.21", "1.88", "2.68"]


def test_its_rows_agree_with_one_another() -> None:
    # Requests/s is n / wall time, and tokens/s / requests/s the mean length, below the limit.
    for row in json.loads(ROWS.read_text(encoding="utf-8"))["rows"]:
        assert row["n"] / row["wall_s"] == pytest.approx(row["req_per_s"], abs=0.01)
        assert 100 < row["output_tok_per_s"] / (row["n"] / row["wall_s"]) <= 128


def test_without_concurrency_one_nothing_is_known() -> None:
    levels = scaling(rows()[1:])
    assert {(x.throughput, x.efficiency, x.tpot, x.ttft) for x in levels} == {(None,) * 4}


def test_an_unknown_figure_stays_unknown() -> None:
    lost = LevelFigures(4, output_tok_per_s=None, ttft_ms_p50=50.0, tpot_ms_p50=None)
    (_, found) = scaling([rows()[0], lost])
    assert (found.throughput, found.efficiency, found.tpot) == (None, None, None)
    assert found.ttft == pytest.approx(50 / 45, rel=1e-5)


def test_order_does_not_matter() -> None:
    assert scaling(rows()[::-1]) == scaling(rows())[::-1]
