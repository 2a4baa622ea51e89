"""Workloads sent to a server: what arrives, in which order, and which hits are marked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fakes.openai_server import MODEL, FakeServer
from fakes.tokenizers_for_tests import write_byte_tokenizer

from qkit.evaluate.bench import run_bench
from qkit.evaluate.matrix_bench import hit_share
from qkit.evaluate.workloads.short_chat import PROMPTS
from qkit.measurements import BenchResult
from qkit.suites import BenchSuite


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"), words=True)


def bench(server: FakeServer, tokenizer: Path, **fields: Any) -> BenchResult:
    suite = {"concurrency": (2,), "min_requests": 8, "requests_per_slot": 1, "timeout_s": 30}
    return run_bench(
        BenchSuite.model_validate({**suite, "output_tokens": 4, **fields}),
        base_url=server.url,
        model=MODEL,
        tokenizer_path=tokenizer,
        max_model_len=server.max_model_len,
    )


def cache_marks(result: BenchResult) -> list[str]:
    return [mark for cell in result.cells for mark in cell.marks if "prefix cache" in mark]


def test_short_chat_sends_its_questions_with_its_sampling(tokenizer: Path) -> None:
    with FakeServer(fault="early_finish") as server:
        result = bench(server, tokenizer, workload="short-chat", output_tokens=8)
    (cell,) = result.cells
    assert (cell.n, cell.failed, cell.output_tokens_mean) == (8, 0, 4)
    bodies = [seen.body for seen in server.requests[-8:]]
    assert {body["messages"][0]["content"] for body in bodies} == set(PROMPTS)
    for body in bodies:
        assert (body["temperature"], body["top_p"], body["top_k"], body["min_p"]) == (0.3, 1, -1, 0)
        assert body["max_tokens"] == 8
        assert "ignore_eos" not in body
    assert result.sampling["temperature"] == 0.3
    assert result.workload == "8 fixed short questions in turn, at most 8 tokens out"


def test_hits_of_shared_beginnings_are_expected_and_reported(tokenizer: Path) -> None:
    workload = {"kind": "shared-prefix", "prefixes": 2, "prefix_tokens": 64, "tail": 16}
    with FakeServer() as server:
        result = bench(server, tokenizer, workload=workload)
    # The fake server's cache has blocks of 16 tokens: four of each prompt's five are shared.
    (cell,) = result.cells
    assert cell.prefix_hit_tokens == 8 * 64
    assert hit_share(cell) == pytest.approx(64 / 80)
    assert cache_marks(result) == []
    assert result.hits_expected


def test_more_hits_than_the_workload_repeats_are_marked(tokenizer: Path) -> None:
    workload = {"kind": "shared-prefix", "prefixes": 2, "prefix_tokens": 64, "tail": 32}
    with FakeServer(reset_allowed=False) as server:
        assert cache_marks(bench(server, tokenizer, workload=workload)) == []
        # The same tails again: what is not shared is hit, too.
        (mark,) = cache_marks(bench(server, tokenizer, workload=workload))
    assert "more than the prompts have in common" in mark


def test_turns_of_a_conversation_are_sent_in_order(tokenizer: Path) -> None:
    workload = {"kind": "multi-turn", "turns": 4, "question": 6, "answer": 10}
    with FakeServer(token_gap_s=0.005) as server:
        result = bench(server, tokenizer, workload=workload, endpoint="completions")
    (cell,) = result.cells
    assert (cell.n, cell.failed) == (8, 0)
    seen = [tuple(request.body["prompt"]) for request in server.requests[-8:]]
    conversations: dict[tuple[int, ...], list[int]] = {}
    for prompt in seen:
        conversations.setdefault(prompt[:6], []).append(len(prompt))
    assert list(conversations.values()) == [[6, 22, 38, 54]] * 2
    assert server.running_max == 2
    assert cache_marks(result) == []
    # Records are in the order of the units, turn after turn.
    starts = [record.start_s for record in cell.requests]
    assert starts[:4] == sorted(starts[:4])
    assert [record.prompt_tokens for record in cell.requests] == [6, 22, 38, 54] * 2


def test_each_request_of_a_file_has_its_own_length(tokenizer: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    rows = ({"prompt": f"number {i}", "output_tokens": 2 + i % 3} for i in range(20))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with FakeServer() as server:
        result = bench(server, tokenizer, workload={"kind": "file", "path": str(path)})
    (cell,) = result.cells
    assert cell.failed == 0
    asked = {r.body["prompt"]: r.body["max_tokens"] for r in server.requests[-8:]}
    assert all(tokens == 2 + int(prompt.split()[1]) % 3 for prompt, tokens in asked.items())
    assert {record.output_tokens for record in cell.requests} <= {2, 3, 4}
    assert cell.output_tokens_mean == pytest.approx(sum(asked.values()) / 8)
