"""Open loops, objectives, repeats and client processes against servers with a known truth.

What must hold on a busy machine too is asserted without tolerance; timings have the width of
another definition.
"""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fakes.openai_server import MODEL, FakeServer
from fakes.paced_server import PacedServer
from fakes.tokenizers_for_tests import write_byte_tokenizer

from qkit.evaluate import clients
from qkit.evaluate.bench import run_bench
from qkit.evaluate.bench_requests import to_record
from qkit.evaluate.cell_marks import ClientLoad
from qkit.evaluate.latency import due_s
from qkit.evaluate.server_metrics import Counters
from qkit.evaluate.server_watch import token_mark
from qkit.evaluate.summary import summarize
from qkit.measurements import BenchCell, BenchResult, RequestRecord
from qkit.suites import BenchSuite

SMALL: dict[str, Any] = {
    "min_requests": 4,
    "requests_per_slot": 1,
    "input_tokens": 40,
    "output_tokens": 4,
    "duration_s": 0.1,
    "timeout_s": 30,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"), words=True)


def bench(
    url: str, tokenizer: Path, more: dict[str, Any] | None = None, **changes: Any
) -> BenchResult:
    return run_bench(
        BenchSuite(**SMALL | changes),
        base_url=url,
        model=MODEL,
        tokenizer_path=tokenizer,
        max_model_len=None,
        **more or {},
    )


def again(cell: BenchCell, suite: BenchSuite) -> BenchCell:
    """Compute a cell from its stored records; the server's own side is not made from them."""
    found = summarize(
        cell.level,
        cell.requests,
        server=Counters(cell.prefix_hit_tokens, cell.preemptions),
        client=ClientLoad(
            lag_ms_max=cell.client_lag_ms_max,
            lag_ms_p99=cell.client_lag_ms_p99,
            lag_ms_p50=cell.client_lag_ms_p50,
            cpu_share=cell.client_cpu_share,
            processes=cell.client_processes,
        ),
        objective=suite.objective,
    )
    assert cell.server is not None
    mark = token_mark(cell.server, found.requests)
    marks = (*found.marks, *([mark] if mark else []))
    return found.model_copy(update={"server": cell.server, "marks": marks})


# Open loop


def test_an_open_loop_sends_by_the_clock_not_by_the_answers(tokenizer: Path) -> None:
    # Eight requests, one every 50 ms, each answered after 300 ms: most are under way at once.
    with FakeServer(first_token_s=0.3) as server:
        result = bench(
            server.url, tokenizer, rates=(20,), arrival="constant", min_requests=8, output_tokens=1
        )
    (cell,) = result.cells
    assert (cell.concurrency, cell.request_rate, result.arrival) == (None, 20, "constant")
    assert (cell.n, cell.failed) == (8, 0)
    due = [record.scheduled_s for record in cell.requests]
    gaps = [b - a for a, b in itertools.pairwise(due) if a is not None and b is not None]
    assert gaps == pytest.approx([0.05] * 7, abs=2e-6)
    assert all(record.start_s >= due_s(record) for record in cell.requests)
    assert cell.in_flight_max is not None
    assert cell.in_flight_max >= 4
    assert cell.ttft_ms.p50 == pytest.approx(300, abs=40)


def test_latency_counts_from_when_a_request_was_due(tokenizer: Path) -> None:
    # One at a time, 100 ms each, but due every 20 ms: the k-th waits 80 k ms, and it counts.
    with FakeServer(first_token_s=0.1) as server:
        (cell,) = bench(
            server.url,
            tokenizer,
            rates=(50,),
            arrival="constant",
            max_in_flight=1,
            min_requests=6,
            output_tokens=1,
        ).cells
    assert cell.in_flight_max == 1
    assert cell.ttft_ms.max is not None
    assert cell.ttft_ms.max >= 6 * 100 - 5 * 20
    assert cell.dispatch_ms is not None
    assert cell.dispatch_ms.max is not None
    assert cell.dispatch_ms.max >= 5 * 80
    assert any("lagged behind its schedule" in mark for mark in cell.marks)
    assert {record.index: record.scheduled_s for record in cell.requests}.keys() == set(range(6))


def test_a_dead_server_ends_an_open_loop(tokenizer: Path) -> None:
    # A warm-up of 30, then the server dies at the third measured request.
    with FakeServer(die_after=32) as server:
        (cell,) = bench(server.url, tokenizer, rates=(10,), min_requests=40).cells
    assert (cell.n, cell.output_tok_per_s) == (40, None)
    assert {record.status for record in cell.requests} <= {"ok", "cut", "refused"}
    # Three unanswered requests, and the other thirty-odd are not waited for.
    assert sum("not sent" in (r.error or "") for r in cell.requests) >= 30
    assert max(r.end_s for r in cell.requests) - min(r.start_s for r in cell.requests) < 3


# Objectives


@pytest.mark.parametrize(
    ("slo", "outcome", "largest", "tried"),
    [
        # Two slots of 240 ms: a third request waits for one of them, 120 ms in the mean.
        ("ttft_p90<110ms", "found", 2, (1, 2, 3, 4)),
        ("ttft_p90<20ms", "not met at the lowest", None, (1,)),
        ("e2e_p90<20s", "met at the highest tried", None, (1, 2, 4)),
    ],
)
def test_the_largest_load_is_searched_for(
    tokenizer: Path, slo: str, outcome: str, largest: int | None, tried: tuple[int, ...]
) -> None:
    suite = {"concurrency": (1,), "min_requests": 10, "output_tokens": 2, "slo": slo}
    cells = 3 if largest else 2
    with FakeServer(first_token_s=0.03, token_gap_s=0.21, slots=2) as server:
        result = bench(server.url, tokenizer, **suite, search_cells=cells)
    assert result.search is not None
    assert (result.search.outcome, result.search.largest_load) == (outcome, largest)
    assert result.search.tried == tried


def test_goodput_counts_the_requests_that_keep_all_limits(tokenizer: Path) -> None:
    # Four at once, two slots of 200 ms: half of the requests wait for a slot.
    suite = BenchSuite(
        **SMALL | {"concurrency": (4,), "min_requests": 12, "search_cells": 0},
        slo="ttft_p90<120ms",
    )
    with FakeServer(first_token_s=0.02, token_gap_s=0.06, slots=2) as server:
        (cell,) = bench(server.url, tokenizer, **suite.model_dump()).cells
    assert cell.goodput is not None
    fast = sum((r.first_token_s or 9) - r.start_s < 0.12 for r in cell.requests)
    assert (cell.goodput.n, cell.goodput.share) == (fast, fast / 12)
    assert 0 < fast < 12
    assert cell.goodput.met is False
    assert cell.goodput.req_per_s == pytest.approx((cell.req_per_s or 0) * fast / 12)
    assert again(cell, suite) == cell


def test_failed_requests_keep_no_limit(tokenizer: Path) -> None:
    with FakeServer(fault="http_503", fault_on=lambda number: number == 3) as server:
        result = bench(server.url, tokenizer, concurrency=(1,), min_requests=20, slo="ttft_p95<10s")
    (cell,) = result.cells
    assert cell.goodput is not None
    assert (cell.goodput.met, cell.goodput.n, cell.goodput.req_per_s) == (None, 0, None)
    assert result.search is not None
    assert result.search.outcome == "not met at the lowest"


# Repeats, ramp, steady window


def test_repeats_have_prompts_of_their_own_and_are_pooled(tokenizer: Path) -> None:
    suite = BenchSuite(**SMALL | {"concurrency": (2,), "repeats": 3, "max_repeats": 3})
    with FakeServer(first_token_s=0.05, token_gap_s=0.02) as server:
        (cell,) = bench(server.url, tokenizer, **suite.model_dump()).cells
    prompts = [tuple(seen.body["prompt"]) for seen in server.requests]
    assert len(prompts) == len(set(prompts)) == 3 * (2 + 4)
    assert server.resets == 3
    assert (cell.n, len(cell.repeats)) == (12, 3)
    assert [record.index for record in cell.requests] == list(range(12))
    rates = [repeat.output_tok_per_s or 0.0 for repeat in cell.repeats]
    assert cell.output_tok_per_s_interval is not None
    low, high = cell.output_tok_per_s_interval
    assert (low + high) / 2 == pytest.approx(statistics.fmean(rates))
    # Student's quantile for two degrees of freedom.
    assert (high - low) / 2 == pytest.approx(4.3027 * statistics.stdev(rates) / 3**0.5, rel=1e-3)
    assert min(rates) <= (cell.output_tok_per_s or 0) <= max(rates)
    assert again(cell, suite) == cell


def test_repeats_stop_when_the_interval_is_narrow(tokenizer: Path) -> None:
    load = {"concurrency": (1,), "output_tokens": 2}
    with FakeServer(first_token_s=0.02, token_gap_s=0.05) as server:
        (easy,) = bench(
            server.url, tokenizer, **load, repeats=2, max_repeats=9, target_percent=500
        ).cells
        (hard,) = bench(
            server.url, tokenizer, **load, repeats=2, max_repeats=4, target_percent=1e-9
        ).cells
        (once,) = bench(server.url, tokenizer, **load).cells
    assert (len(easy.repeats), len(hard.repeats), len(once.repeats)) == (2, 4, 1)
    assert (once.output_tok_per_s_interval, once.tpot_ms_p50_interval) == (None, None)


def test_a_ramp_staggers_the_first_requests(tokenizer: Path) -> None:
    with FakeServer(first_token_s=0.1) as server:
        (cell,) = bench(
            server.url, tokenizer, concurrency=(4,), min_requests=8, ramp_s=0.4, output_tokens=1
        ).cells
    first = min(record.start_s for record in cell.requests)
    starts = sorted(record.start_s - first for record in cell.requests)
    # The fourth slot starts 300 ms after the first, which by then has sent at least two more.
    assert sum(start < 0.29 for start in starts) >= 4
    assert cell.steady is not None
    assert cell.steady.duration_s < cell.duration_s
    assert 0 < cell.steady.n <= 8


# Several client processes


def test_client_processes_send_everything_once(tokenizer: Path) -> None:
    suite = BenchSuite(**SMALL | {"concurrency": (5,), "min_requests": 15, "clients": 2})
    with FakeServer(first_token_s=0.05, token_gap_s=0.01) as server:
        (cell,) = bench(server.url, tokenizer, **suite.model_dump()).cells
    assert (cell.n, cell.failed, cell.client_processes) == (15, 0, 2)
    sent = [tuple(seen.body["prompt"]) for seen in server.requests]
    assert len(sent) == len(set(sent)) == 5 + 15
    assert server.running_max == 5
    assert cell.ttft_ms.p50 == pytest.approx(50, abs=25)
    assert again(cell, suite) == cell


def test_the_requests_of_a_killed_client_process_are_failed_not_lost(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children: list[Any] = []
    made = clients._Child.__init__

    def note(self: Any) -> None:
        made(self)
        children.append(self)

    monkeypatch.setattr(clients._Child, "__init__", note)
    with FakeServer(token_gap_s=0.2) as server:

        def kill_one() -> None:
            while len(server.requests) < 4 + 4:  # the warm-up, and the measured ones under way
                time.sleep(0.01)
            os.kill(children[1]._process.pid, signal.SIGKILL)

        killer = threading.Thread(target=kill_one)
        killer.start()
        result = bench(server.url, tokenizer, concurrency=(4, 2), min_requests=8, clients=2)
        killer.join()
    first, second = result.cells
    assert (first.n, first.failed) == (8, 4)
    lost = [record for record in first.requests if record.status != "ok"]
    assert {record.status for record in lost} == {"client"}
    assert "ended with exit code -9" in (lost[0].error or "")
    assert "4 of 8 requests failed (4 client)" in first.marks[0]
    # The next level has a new process in its place.
    assert (second.failed, second.client_processes) == (0, 2)


def test_a_slow_client_gets_help_and_measures_again(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4)))
    # With one process its share of a core counts as too much, with two it does not.
    monkeypatch.setattr(ClientLoad, "is_bottleneck", property(lambda load: load.processes == 1))
    with FakeServer() as server:
        (cell,) = bench(server.url, tokenizer, concurrency=(2,)).cells
    assert (cell.n, cell.client_processes) == (4, 2)
    assert len(server.requests) == 2 * (2 + 4)


# The client's own truth


@pytest.mark.parametrize("processes", [1, 2])
def test_times_are_the_servers_within_a_millisecond_or_the_cell_is_marked(
    tokenizer: Path, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 60 streams of 20 ms; the server stamps what it really did on the same clock."""
    origins: set[float] = set()

    def noting(*args: Any, origin_s: float, **more: Any) -> RequestRecord:
        origins.add(origin_s)
        return to_record(*args, origin_s=origin_s, **more)

    monkeypatch.setattr("qkit.evaluate.bench.to_record", noting)
    with PacedServer(first_token_s=0.05, token_gap_s=0.02) as server:
        (cell,) = bench(
            server.url,
            tokenizer,
            concurrency=(60,),
            min_requests=120,
            output_tokens=40,
            ramp_s=0.6,
            clients=processes,
        ).cells
    answers = [answer for answer in server.answers if answer.max_tokens == 40]
    assert (cell.failed, len(answers)) == (0, cell.n)
    (origin,) = origins  # records count from there, on the clock of both
    # Paired by order of the first token: what the client stamped against when it was written.
    stamped = sorted(origin + (record.first_token_s or 0.0) for record in cell.requests)
    written = sorted(answer.first_s for answer in answers)
    late_ms = statistics.median((a - b) * 1000 for a, b in zip(stamped, written, strict=True))
    assert late_ms >= 0
    assert cell.dispatch_ms is not None
    assert cell.dispatch_ms.p50 is not None
    ttft_error_ms = cell.dispatch_ms.p50 + late_ms  # what the client added before and after
    truth_tpot = statistics.median((a.last_s - a.first_s) * 1000 / 39 for a in answers)
    assert cell.tpot_ms.p50 is not None
    right = abs(ttft_error_ms) <= 1.0 and abs(cell.tpot_ms.p50 - truth_tpot) <= 1.0
    assert right or any("the client" in mark for mark in cell.marks)
    assert all((record.written_s or 0.0) >= record.start_s for record in cell.requests)


# Interrupted sweeps


def test_finished_cells_are_handed_over_and_taken_over(tokenizer: Path) -> None:
    parts: list[BenchResult] = []
    with FakeServer() as server:
        whole = bench(server.url, tokenizer, {"on_cell": parts.append}, concurrency=(1, 2, 4))
    assert [len(part.cells) for part in parts] == [1, 2, 3]
    assert [part.complete for part in (*parts, whole)] == [False, False, False, True]
    with FakeServer() as server:
        resumed = bench(server.url, tokenizer, {"earlier": parts[1]}, concurrency=(1, 2, 4))
    assert resumed.cells[:2] == whole.cells[:2]
    assert len(server.requests) == 4 + 4  # the third level alone: its warm-up and four measured
    assert resumed.complete


def test_what_another_suite_left_is_not_taken_over(tokenizer: Path) -> None:
    with FakeServer() as server:
        other = bench(server.url, tokenizer, concurrency=(1,), seed=1)
        before = len(server.requests)
        bench(server.url, tokenizer, {"earlier": other}, concurrency=(1,))
    assert len(server.requests) == before + 1 + 4
