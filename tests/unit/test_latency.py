from __future__ import annotations

import random
import statistics

import pytest

from qkit.evaluate import latency
from qkit.evaluate.cell_marks import ClientLoad
from qkit.evaluate.latency import distribution, steady_figures
from qkit.evaluate.server_metrics import Counters
from qkit.evaluate.summary import summarize
from qkit.levels import Level
from qkit.measurements import BenchCell, RequestRecord

IDLE = ClientLoad(lag_ms_max=1.0, lag_ms_p99=0.5, cpu_share=0.05)
CLEAN = Counters(prefix_hit_tokens=0, preemptions=0)


def record(index: int, start: float, *arrivals: float, tokens: int | None = None) -> RequestRecord:
    return RequestRecord(
        index=index,
        status="ok",
        start_s=start,
        first_token_s=arrivals[0],
        last_token_s=arrivals[-1],
        end_s=arrivals[-1],
        prompt_tokens=10,
        output_tokens=len(arrivals) if tokens is None else tokens,
        chunk_s=arrivals,
    )


def failed(index: int, status: str = "http") -> RequestRecord:
    return RequestRecord(
        index=index,
        status=status,
        error="HTTP 503: busy",
        start_s=0.0,
        first_token_s=None,
        last_token_s=None,
        end_s=0.001,
        prompt_tokens=10,
        output_tokens=None,
    )


def cell(*records: RequestRecord, concurrency: int = 1, **more: object) -> BenchCell:
    return summarize(Level(concurrency), records, **{"server": CLEAN, "client": IDLE} | more)  # type: ignore[arg-type]


def tok_per_s(concurrency: int, records: list[RequestRecord]) -> float | None:
    steady = steady_figures(concurrency, [records])
    return None if steady is None else steady.output_tok_per_s


# Percentiles


def test_percentiles_agree_with_the_standard_library() -> None:
    rng = random.Random(1)
    values = [rng.expovariate(1.0) for _ in range(250)]
    got = distribution(values)
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    assert (got.n, got.max) == (250, max(values))
    assert got.mean == pytest.approx(statistics.fmean(values))
    assert [got.p50, got.p90, got.p95, got.p99] == pytest.approx(
        [cuts[i] for i in (49, 89, 94, 98)]
    )


@pytest.mark.parametrize(
    ("n", "known"),
    [
        (1, {"p50"}),
        (9, {"p50"}),
        (10, {"p50", "p90"}),
        (19, {"p50", "p90"}),
        (20, {"p50", "p90", "p95"}),
        (99, {"p50", "p90", "p95"}),
        (100, {"p50", "p90", "p95", "p99"}),
    ],
)
def test_a_percentile_needs_enough_values(n: int, known: set[str]) -> None:
    got = distribution(float(i) for i in range(n))
    assert {p for p in ("p50", "p90", "p95", "p99") if getattr(got, p) is not None} == known


def test_nothing_gives_nothing() -> None:
    assert distribution([]).model_dump(exclude={"n"}) == dict.fromkeys(
        ("mean", "p50", "p90", "p95", "p99", "max")
    )


# Definitions


def test_definitions_of_one_request() -> None:
    one = record(0, 1.0, 1.5, 1.7, 2.1, tokens=7)  # 7 tokens in 3 chunks
    assert latency.ttft_ms(one) == pytest.approx(500)
    assert latency.e2e_ms(one) == pytest.approx(1100)
    assert latency.tpot_ms(one) == pytest.approx(600 / 6)
    assert latency.itl_ms(one) == pytest.approx([200, 400])


def test_tpot_is_undefined_below_two_tokens() -> None:
    assert latency.tpot_ms(record(0, 0.0, 0.5)) is None
    assert cell(record(0, 0.0, 0.5)).tpot_ms.n == 0
    assert cell(record(0, 0.0, 0.5), record(1, 0.5, 1.0, 1.1)).tpot_ms.n == 1


def test_itl_is_pooled_and_tpot_is_over_requests() -> None:
    got = cell(record(0, 0.0, 1.0, 1.1), record(1, 2.0, 3.0, 3.4, 3.8, 4.2))
    assert got.itl_ms.mean == pytest.approx((100 + 3 * 400) / 4)
    assert got.tpot_ms.mean == pytest.approx((100 + 400) / 2)


def test_throughput_runs_from_first_start_to_last_token() -> None:
    first = record(0, 10.0, 10.5, 11.0)
    second = record(1, 11.0, 11.5, 12.0, tokens=8).model_copy(update={"end_s": 12.5})
    got = cell(first, second)
    assert got.output_tok_per_s == pytest.approx((2 + 8) / 2.0)
    assert got.total_tok_per_s == pytest.approx((2 + 8 + 20) / 2.0)
    assert got.req_per_s == pytest.approx(1.0)
    assert got.duration_s == pytest.approx(2.5)
    assert (got.output_tokens_mean, got.input_tokens_mean) == (5, 10)


def test_steady_figure_counts_only_while_all_slots_are_busy() -> None:
    # Two slots; the window is 1.0 (second slot starts) to 4.0 (first end after the last start).
    records = [
        record(0, 0.0, 0.5, 1.5, 2.0),  # 2 of 3 chunks inside
        record(1, 1.0, 2.0, 3.0, 4.0),  # 3 inside
        record(2, 2.0, 3.0, 5.0, 6.0, tokens=6),  # 1 of 3 chunks inside, 2 tokens each
    ]
    assert tok_per_s(2, records) == pytest.approx((2 + 3 + 2) / 3.0)


def test_no_steady_figure_where_the_slots_were_never_all_busy() -> None:
    assert tok_per_s(4, [record(0, 0.0, 1.0, 2.0)]) is None
    apart = [record(0, 0.0, 0.5), record(1, 1.0, 1.5)]
    assert tok_per_s(1, apart) is not None
    assert cell(*apart, concurrency=4).steady_tok_per_s is None


def test_unknown_prompt_length_leaves_only_the_total_unknown() -> None:
    got = cell(record(0, 0.0, 1.0, 2.0).model_copy(update={"prompt_tokens": None}))
    assert got.total_tok_per_s is None
    assert got.input_tokens_mean is None
    assert got.output_tok_per_s == pytest.approx(1.0)


# Failures


def many(n: int) -> list[RequestRecord]:
    return [record(i, float(i), i + 0.5, i + 0.6) for i in range(n)]


def test_one_per_cent_of_failures_is_left_out_of_the_figures() -> None:
    got = cell(*many(99), failed(99))
    assert (got.n, got.failed, got.ttft_ms.n) == (100, 1, 99)
    assert got.ttft_ms.p50 == pytest.approx(500)
    assert got.marks == (
        "1 of 100 requests failed (1 http), left out of the figures; the first: HTTP 503: busy",
    )


def test_above_one_per_cent_a_cell_has_no_figures_and_says_why() -> None:
    got = cell(*many(98), failed(98), failed(99, "cut"))
    assert (got.n, got.failed) == (100, 2)
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        assert getattr(got, name).p50 is None
        assert getattr(got, name).n == 0
    for name in ("output_tok_per_s", "total_tok_per_s", "req_per_s", "steady_tok_per_s"):
        assert getattr(got, name) is None
    assert "2 of 100 requests failed (1 http, 1 cut), above 1 %: no figures" in got.marks[0]


def test_a_cell_in_which_everything_failed() -> None:
    got = cell(failed(0), failed(1))
    assert (got.n, got.failed, got.output_tokens_mean) == (2, 2, None)
    assert got.duration_s == pytest.approx(0.001)


# Marks


def test_a_clean_cell_has_no_marks() -> None:
    assert cell(*many(3)).marks == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"server": Counters(prefix_hit_tokens=128, preemptions=0)}, "prefix cache served 128"),
        ({"server": Counters(prefix_hit_tokens=0, preemptions=2)}, "preempted 2 requests"),
        ({"client": ClientLoad(lag_ms_max=1.0, lag_ms_p99=0.5, cpu_share=0.93)}, "93% of a core"),
        ({"client": ClientLoad(lag_ms_max=80.0, lag_ms_p99=60.0, cpu_share=0.1)}, "starved"),
    ],
)
def test_marks_of_server_and_client(change: dict[str, object], words: str) -> None:
    (mark,) = cell(*many(3), **change).marks
    assert words in mark


def test_a_stall_that_is_small_beside_the_latency_is_no_mark() -> None:
    # The median time to first token is 500 ms; a tenth of it is the limit.
    assert cell(*many(3), client=ClientLoad(900.0, 49.0, cpu_share=0.1)).marks == ()


def test_unknown_counters_are_no_mark_and_stay_unknown() -> None:
    got = cell(*many(3), server=Counters())
    assert got.marks == ()
    assert got.prefix_hit_tokens is None
    assert got.preemptions is None


def test_a_shared_template_may_hit_the_cache() -> None:
    server = Counters(prefix_hit_tokens=96, preemptions=0)
    assert cell(*many(3), server=server, shared_prefix_tokens=32).marks == ()
    assert cell(*many(3), server=server, shared_prefix_tokens=31).marks != ()


def test_estimated_and_wrong_lengths_are_marked() -> None:
    guessed = record(0, 0.0, 0.5, 0.6).model_copy(update={"tokens_estimated": True})
    assert "1 of 2 requests are estimated" in cell(guessed, record(1, 1.0, 1.5)).marks[0]
    short = record(0, 0.0, 0.5).model_copy(update={"status": "length", "error": "1, not 2"})
    assert any("another length than asked" in mark for mark in cell(short, *many(3)).marks)
