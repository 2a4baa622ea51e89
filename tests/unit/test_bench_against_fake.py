"""The benchmark against a server whose timings and faults are set, so that the truth is known.

Tolerances are wide enough for a busy machine and narrow enough that another definition (counting
the role chunk, the warm-up, chunks as tokens, the trailing usage chunk) falls outside.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from fakes.openai_server import MODEL, FakeServer
from fakes.tokenizers_for_tests import write_byte_tokenizer

from qkit.errors import InputError, MeasurementError
from qkit.evaluate.bench import run_bench
from qkit.evaluate.cell_marks import ClientLoad
from qkit.evaluate.server_metrics import Counters
from qkit.evaluate.summary import summarize
from qkit.measurements import BenchCell, BenchResult
from qkit.suites import BenchSuite

SMALL: dict[str, Any] = {
    "concurrency": (2,),
    "min_requests": 4,
    "requests_per_slot": 1,
    "input_tokens": 40,
    "output_tokens": 8,
    "timeout_s": 30,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"), words=True)


def bench(server: FakeServer, tokenizer: Path, **changes: Any) -> BenchResult:
    return run_bench(
        BenchSuite(**SMALL | changes),
        base_url=server.url,
        model=MODEL,
        tokenizer_path=tokenizer,
        max_model_len=server.max_model_len,
    )


def marks(cell: BenchCell) -> list[str]:
    """Return a cell's marks without those about the client: the machine may be busy."""
    return [mark for mark in cell.marks if not mark.startswith("the client")]


def measured(server: FakeServer, cell: BenchCell) -> list[dict[str, Any]]:
    """Return the bodies of a one-cell sweep's measured requests; the warm-up comes before."""
    return [seen.body for seen in server.requests[-cell.n :]]


# Timings


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_known_timings(tokenizer: Path, endpoint: str) -> None:
    # The role chunk comes after 20 ms, the first token after 120 ms.
    with FakeServer(first_token_s=0.12, token_gap_s=0.02, role_s=0.02) as server:
        result = bench(
            server,
            tokenizer,
            endpoint=endpoint,
            concurrency=(4,),
            min_requests=8,
            output_tokens=16,
        )
    (cell,) = result.cells
    assert marks(cell) == []
    assert (cell.n, cell.failed) == (8, 0)
    assert cell.ttft_ms.p50 == pytest.approx(120, abs=15)
    assert cell.tpot_ms.p50 == pytest.approx(20, abs=2)
    assert cell.itl_ms.mean == pytest.approx(20, abs=2)
    assert cell.itl_ms.n == 8 * 15
    assert cell.e2e_ms.p50 == pytest.approx(120 + 15 * 20, abs=30)
    # Two rounds of four requests of 420 ms.
    truth = 8 * 16 / (2 * 0.42)
    assert cell.output_tok_per_s == pytest.approx(truth, rel=0.1)
    assert cell.steady_tok_per_s == pytest.approx(truth, rel=0.15)
    assert cell.req_per_s == pytest.approx(truth / 16, rel=0.1)
    assert cell.output_tokens_mean == 16
    assert server.running_max == 4


def test_tokens_are_the_servers_count_not_chunks(tokenizer: Path) -> None:
    with FakeServer(first_token_s=0.05, token_gap_s=0.06, tokens_per_chunk=4) as server:
        (cell,) = bench(server, tokenizer, output_tokens=16).cells
    # 16 tokens in 4 chunks: three gaps of 60 ms over 15 tokens.
    assert cell.output_tokens_mean == 16
    assert cell.tpot_ms.p50 == pytest.approx(180 / 15, abs=1.5)
    assert cell.itl_ms.p50 == pytest.approx(60, abs=6)
    assert len(cell.requests[0].chunk_s) == 4


def test_the_first_reasoning_chunk_is_the_first_token(tokenizer: Path) -> None:
    with FakeServer(
        first_token_s=0.05, token_gap_s=0.05, reasoning_chunks=4, usage="final"
    ) as server:
        (cell,) = bench(server, tokenizer, endpoint="chat").cells
    assert cell.ttft_ms.p50 == pytest.approx(50, abs=15)
    assert cell.output_tokens_mean == 8
    assert len(cell.requests[0].chunk_s) == 8


def test_a_slow_first_request_falls_into_the_warmup(tokenizer: Path) -> None:
    with FakeServer(first_token_s=0.02, first_request_extra_s=0.5) as server:
        (cell,) = bench(server, tokenizer).cells
    assert cell.ttft_ms.max is not None
    assert cell.ttft_ms.max < 250
    assert cell.e2e_ms.n == 4


def test_a_single_token_has_no_tpot(tokenizer: Path) -> None:
    with FakeServer() as server:
        (cell,) = bench(server, tokenizer, output_tokens=1).cells
    assert (cell.tpot_ms.n, cell.tpot_ms.p50) == (0, None)
    assert cell.ttft_ms.n == 4


# What is sent


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_requests_are_explicit_and_prompts_unique(tokenizer: Path, endpoint: str) -> None:
    with FakeServer() as server:
        result = bench(server, tokenizer, endpoint=endpoint, concurrency=(1, 2))
    bodies = [seen.body for seen in server.requests]
    assert len(bodies) == (1 + 4) + (2 + 4)
    for body in bodies:
        assert (body["temperature"], body["top_p"], body["repetition_penalty"]) == (0, 1, 1)
        assert body["ignore_eos"] is True
        assert body["min_tokens"] == body["max_tokens"] == 8
        assert body["model"] == MODEL
        assert body["stream_options"]["include_usage"] is True
    prompts = [json.dumps(body.get("prompt") or body["messages"]) for body in bodies]
    assert len(set(prompts)) == len(prompts)
    if endpoint == "completions":
        assert {len(body["prompt"]) for body in bodies} == {40}
    assert result.sampling == {"temperature": 0, "top_p": 1, "repetition_penalty": 1}
    assert (result.endpoint, result.input_tokens, result.output_tokens) == (endpoint, 40, 8)


def test_two_variants_get_the_same_prompts(tokenizer: Path) -> None:
    sent = []
    hashes = set()
    for gap in (0.0, 0.005):
        with FakeServer(token_gap_s=gap) as server:
            result = bench(server, tokenizer, concurrency=(1, 2))
        sent.append(sorted(json.dumps(seen.body) for seen in server.requests))
        hashes.add(result.prompt_hash)
    assert sent[0] == sent[1]
    assert len(hashes) == 1


def test_natural_stopping(tokenizer: Path) -> None:
    with FakeServer(fault="early_finish") as server:
        result = bench(server, tokenizer, ignore_eos=False)
    (cell,) = result.cells
    assert "ignore_eos" not in server.requests[0].body
    assert "min_tokens" not in server.requests[0].body
    assert (cell.failed, cell.output_tokens_mean) == (0, 4)
    assert marks(cell) == []
    assert result.ignore_eos is False


def test_progress_is_reported(tokenizer: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    with FakeServer() as server:
        run_bench(
            BenchSuite(**SMALL),
            base_url=server.url + "/v1/",
            model=MODEL,
            tokenizer_path=tokenizer / "tokenizer.json",
            max_model_len=None,
            on_progress=lambda *call: calls.append(call),
        )
    assert calls == [("concurrency 2", done, 4) for done in (1, 2, 3, 4)]


# Usage, text and server counters


def test_without_usage_tokens_are_estimated_from_the_text(tokenizer: Path) -> None:
    with FakeServer(usage="none", split_writes=True, crlf=True) as server:
        (cell,) = bench(server, tokenizer).cells
    # A byte-level tokenizer without merges for these: one token a UTF-8 byte.
    text = " one zwei trois četiri пять 六 🙂 ocho"
    assert {r.output_tokens for r in cell.requests} == {len(text.encode())}
    assert all(r.tokens_estimated and r.status == "ok" for r in cell.requests)
    assert cell.input_tokens_mean == 40
    assert "4 of 4 requests are estimated" in marks(cell)[0]


@pytest.mark.parametrize("usage", ["final", "continuous"])
def test_characters_split_over_chunks(tokenizer: Path, usage: Any) -> None:
    with FakeServer(usage=usage, split_writes=True) as server:
        (cell,) = bench(server, tokenizer, endpoint="chat").cells
    assert cell.failed == 0
    assert {len(r.chunk_s) for r in cell.requests} == {8}
    assert not any(r.tokens_estimated for r in cell.requests)


def test_counters_and_reset_on_a_clean_server(tokenizer: Path) -> None:
    with FakeServer() as server:
        result = bench(server, tokenizer, concurrency=(1, 2))
    assert server.resets == 2
    for cell in result.cells:
        assert (cell.prefix_hit_tokens, cell.preemptions) == (0, 0)
        assert marks(cell) == []


def test_repeated_prompts_are_found_by_the_servers_own_counter(tokenizer: Path) -> None:
    # Without a reset, a second sweep with the same seed is served from the cache: 40 tokens are
    # two whole blocks of 16 and a rest.
    with FakeServer(reset_allowed=False) as server:
        bench(server, tokenizer)
        (cell,) = bench(server, tokenizer).cells
    assert cell.prefix_hit_tokens == 4 * 32
    assert "prefix cache served 128 prompt tokens" in marks(cell)[0]


def test_preemptions_are_marked(tokenizer: Path) -> None:
    with FakeServer(preempt_every=2) as server:
        (cell,) = bench(server, tokenizer).cells
    assert cell.preemptions == 2
    assert "preempted 2 requests" in marks(cell)[0]


def test_a_server_without_metrics_and_reset(tokenizer: Path) -> None:
    with FakeServer(metrics=False, reset_allowed=False) as server:
        (cell,) = bench(server, tokenizer).cells
    assert (cell.prefix_hit_tokens, cell.preemptions, cell.failed) == (None, None, 0)
    assert marks(cell) == []


# Faults. The warm-up has two requests (0, 1); number 3 is one of the four measured.


@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        ("http_503", "http", "HTTP 503: The engine is overloaded"),
        ("http_400", "http", "HTTP 400: This request is not"),
        ("error_in_stream", "stream", "Internal server error"),
        ("json_error_200", "stream", "out of memory"),
        ("cut", "cut", "after 4 token chunks"),
        ("short", "cut", "no finish reason and no [DONE] after 4 token chunks"),
        ("disconnect", "cut", "Server disconnected"),
        ("empty", "empty", "empty body"),
        ("no_tokens", "empty", "without a token"),
        ("stall", "timeout", "the last bytes came"),
        ("silent", "timeout", "no answer within"),
        ("early_finish", "length", "4 output tokens, not the 8"),
    ],
)
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_one_fault_is_counted_apart(
    tokenizer: Path, fault: Any, status: str, words: str, endpoint: str
) -> None:
    with FakeServer(
        token_gap_s=0.01, usage="final", fault=fault, fault_on=lambda number: number == 3
    ) as server:
        (cell,) = bench(server, tokenizer, endpoint=endpoint, timeout_s=0.8).cells
    assert (cell.n, cell.failed) == (4, 1)
    (bad,) = [r for r in cell.requests if r.status != "ok"]
    assert bad.status == status
    assert words in (bad.error or "")
    assert f"1 of 4 requests failed (1 {status}), above 1 %: no figures" in marks(cell)[0]
    assert (cell.ttft_ms.p50, cell.output_tok_per_s, cell.steady_tok_per_s) == (None, None, None)


def test_one_failure_in_a_hundred_leaves_the_figures_of_the_others(tokenizer: Path) -> None:
    with FakeServer(
        first_token_s=0.02, fault="http_503", fault_on=lambda number: number == 40
    ) as server:
        (cell,) = bench(server, tokenizer, concurrency=(10,), min_requests=100).cells
    assert (cell.n, cell.failed, cell.ttft_ms.n) == (100, 1, 99)
    # The refused request ended at once; as a fast success it would be the minimum.
    assert min(r.end_s - r.start_s for r in cell.requests if r.status == "ok") >= 0.02
    assert cell.ttft_ms.p95 is not None
    assert cell.ttft_ms.p99 is None
    assert "left out of the figures" in marks(cell)[0]


def test_a_server_that_dies_keeps_what_was_measured(tokenizer: Path) -> None:
    # Level 1 has 1 + 4 requests, level 2 has 2 + 4: number 8 is the second measured there.
    with FakeServer(token_gap_s=0.01, die_after=8) as server:
        result = bench(
            server, tokenizer, concurrency=(1, 2, 4), min_requests=6, requests_per_slot=1
        )
    first, second, third = result.cells
    assert (first.failed, marks(first)) == (0, [])
    assert first.output_tok_per_s is not None
    assert second.failed > 0
    assert {r.status for r in second.requests} <= {"ok", "cut", "refused"}
    assert (third.n, third.failed) == (6, 6)
    assert {r.status for r in third.requests} == {"refused"}
    assert "not sent" in (third.requests[0].error or "")
    assert "6 of 6 requests failed (6 refused)" in third.marks[0]
    assert len(server.requests) <= 8 + 3


def test_a_silent_server_is_given_up_after_a_round(tokenizer: Path) -> None:
    # Level 1 is answered (numbers 0 to 4), then nothing is.
    with FakeServer(fault="silent", fault_on=lambda number: number > 4) as server:
        result = bench(server, tokenizer, concurrency=(1, 2), timeout_s=0.3)
    first, second = result.cells
    assert first.failed == 0
    assert second.failed == second.n == 4
    # Three unanswered requests (two of them warm-up), at most one more under way.
    assert len(server.requests) <= 5 + 4
    assert any("went unanswered" in (r.error or "") for r in second.requests)


def test_no_server_at_all(tokenizer: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(MeasurementError, match=r"not one of 4 .*'refused'.*not sent") as caught:
        run_bench(
            BenchSuite(**SMALL),
            base_url=f"http://127.0.0.1:{port}",
            model=MODEL,
            tokenizer_path=tokenizer,
            max_model_len=None,
        )
    assert caught.value.where == f"http://127.0.0.1:{port}"


def test_nothing_succeeds(tokenizer: Path) -> None:
    with (
        FakeServer(fault="http_503") as server,
        pytest.raises(MeasurementError, match="HTTP 503: The engine is overloaded"),
    ):
        bench(server, tokenizer)


# Input errors come before any request


def test_requests_that_do_not_fit_the_served_length(tokenizer: Path) -> None:
    with FakeServer(max_model_len=47) as server, pytest.raises(InputError) as caught:
        bench(server, tokenizer)
    assert "asks for 48 tokens a request" in str(caught.value)
    for field in ("bench.input_tokens", "bench.output_tokens", "serve.max_model_len"):
        assert field in str(caught.value)
    assert server.requests == []


def test_requests_that_just_fit(tokenizer: Path) -> None:
    with FakeServer(max_model_len=48) as server:
        (cell,) = bench(server, tokenizer).cells
    assert cell.failed == 0


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://"])
def test_an_address_that_is_none(tokenizer: Path, url: str) -> None:
    with pytest.raises(InputError, match="not an http address"):
        run_bench(
            BenchSuite(**SMALL),
            base_url=url,
            model=MODEL,
            tokenizer_path=tokenizer,
            max_model_len=None,
        )


# Stored and computed again


def test_every_figure_can_be_computed_again_from_the_stored_records(tokenizer: Path) -> None:
    with FakeServer(
        first_token_s=0.01,
        token_gap_s=0.002,
        preempt_every=3,
        fault="cut",
        fault_on=lambda number: number == 50,
    ) as server:
        result = bench(server, tokenizer, concurrency=(2, 5), min_requests=120)
    stored = BenchResult.model_validate_json(result.model_dump_json())
    assert stored == result
    assert [cell.failed for cell in stored.cells] == [1, 0]
    for cell in stored.cells:
        again = summarize(
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
        )
        assert again == cell.model_copy(update={"server": None})
        assert cell.ttft_ms.p99 is not None or cell.failed
