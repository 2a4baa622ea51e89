"""What each kind of workload sends: what is alike, in which order, what may be hit."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from fakes.tokenizers_for_tests import write_byte_tokenizer

from qkit.errors import InputError
from qkit.evaluate.cell_plan import CellPlanner
from qkit.evaluate.workloads.short_chat import PROMPTS
from qkit.evaluate.workloads.units import ANY_HITS, Message
from qkit.evaluate.workloads.vocabulary import Vocabulary, load_vocabulary
from qkit.suites import BUILTIN_BENCHES, BenchSuite

SMALL = {"concurrency": (1, 2), "min_requests": 4, "requests_per_slot": 1, "output_tokens": 8}


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return load_vocabulary(write_byte_tokenizer(tmp_path_factory.mktemp("words"), words=True))


def planned(
    vocabulary: Vocabulary, workload: Any, *, served: int | None = None, **changes: Any
) -> CellPlanner:
    suite = BenchSuite.model_validate({**SMALL, "workload": workload, **changes})
    return CellPlanner(suite, vocabulary, max_model_len=served)


def test_short_chat_is_the_published_profile(vocabulary: Vocabulary) -> None:
    suite = BUILTIN_BENCHES["short-chat"]
    sweep = CellPlanner(suite, vocabulary)
    counts = [len(cell.turns) for cell in sweep.named]
    assert list(zip(suite.concurrency, counts, strict=True)) == [
        (1, 8),
        (2, 8),
        (4, 8),
        (8, 16),
        (16, 32),
    ]
    assert len(set(PROMPTS)) == 8
    assert [turn.prompt for turn in sweep.named[-1].turns] == [*PROMPTS] * 4
    assert {turn.output_tokens for turn in sweep.named[0].turns} == {128}
    assert (suite.endpoint, suite.ignore_eos, suite.sampling.temperature) == ("chat", False, 0.3)
    assert sweep.hits_expected
    assert sweep.named[0].reusable_tokens == math.inf


def test_random_lengths_are_within_bounds_and_differ(vocabulary: Vocabulary) -> None:
    sweep = planned(
        vocabulary,
        {
            "kind": "random",
            "input": {"shape": "uniform", "low": 5, "high": 40},
            "output": {"shape": "lognormal", "mean": 20, "std": 30},
        },
        min_requests=200,
        served=48,
    )
    turns = sweep.named[0].turns
    lengths = {len(turn.prompt) for turn in turns}
    assert lengths <= set(range(5, 41))
    assert len(lengths) > 20
    assert max(len(turn.prompt) + turn.output_tokens for turn in turns) == 48
    assert len({turn.output_tokens for turn in turns}) > 10
    assert sweep.description == ("5 to 40 (uniform) tokens in, exactly 20 ± 30 (lognormal) out")
    assert sweep.named[0].reusable_tokens == 0


def test_beginnings_are_shared_within_a_cell_and_nothing_else_is(vocabulary: Vocabulary) -> None:
    sweep = planned(
        vocabulary,
        {"kind": "shared-prefix", "prefixes": 3, "prefix_tokens": 30, "tail": 6},
    )
    beginnings = []
    for cell in sweep.named:
        sent = [unit.turns[0].prompt for unit in (*cell.warmup, *cell.measured)]
        assert {len(prompt) for prompt in sent} == {36}
        beginnings.append({prompt[:30] for prompt in sent})
        assert len({prompt[30:] for prompt in sent}) == len(sent)
        # The warm-up has met every beginning, so each measured one may be hit.
        assert {unit.turns[0].prompt[:30] for unit in cell.warmup} == beginnings[-1]
        assert cell.reusable_tokens == 30 * len(cell.turns)
    assert [len(found) for found in beginnings] == [3, 3]
    assert not beginnings[0] & beginnings[1]


def test_a_shared_beginning_is_the_system_message_of_a_chat(vocabulary: Vocabulary) -> None:
    sweep = planned(vocabulary, "shared-prefix", endpoint="chat")
    first, second = sweep.named[0].turns[0].prompt, sweep.named[0].turns[4 - 4].prompt
    assert first == second
    system, user = first
    assert isinstance(system, Message)
    assert (system.role, user.role) == ("system", "user")
    assert vocabulary.count(" " + system.content) == 1024


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_each_turn_repeats_all_that_was_said(vocabulary: Vocabulary, endpoint: str) -> None:
    sweep = planned(
        vocabulary,
        {"kind": "multi-turn", "turns": 3, "question": 5, "answer": 7},
        endpoint=endpoint,
    )
    # Four requests at concurrency 1 are two conversations; three turns each.
    assert [len(cell.measured) for cell in sweep.named] == [2, 2]
    for unit in sweep.named[0].measured:
        prompts = [turn.prompt for turn in unit.turns]
        assert [prompt[: len(prompts[0])] for prompt in prompts] == [prompts[0]] * 3
        assert prompts[2][: len(prompts[1])] == prompts[1]
        expected = [1, 3, 5] if endpoint == "chat" else [5, 17, 29]
        assert [len(prompt) for prompt in prompts] == expected
        assert [turn.reusable_tokens for turn in unit.turns] == [0, 5, 17]
    if endpoint == "chat":
        roles = [message.role for message in sweep.named[0].measured[0].turns[2].prompt]
        assert roles == ["user", "assistant", "user", "assistant", "user"]


def test_a_conversation_ends_before_it_outgrows_the_served_length(vocabulary: Vocabulary) -> None:
    sweep = planned(
        vocabulary,
        {"kind": "multi-turn", "question": {"shape": "uniform", "low": 1, "high": 30}, "answer": 9},
        endpoint="completions",
        served=60,
        min_requests=60,
    )
    turns = sweep.named[0].turns
    assert max(len(turn.prompt) + 8 for turn in turns) <= 60
    assert {len(unit.turns) for unit in sweep.named[0].measured} >= {2, 3}


# Files


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_vllms_rows_with_lengths_of_their_own(vocabulary: Vocabulary, tmp_path: Path) -> None:
    rows = [{"prompt": f"question {i}", "output_tokens": 3 + i} for i in range(30)]
    path = write(tmp_path / "p.jsonl", *rows, {"prompt": "question x"})
    sweep = planned(vocabulary, {"kind": "file", "path": path})
    sent = [unit.turns[0] for cell in sweep.named for unit in (*cell.warmup, *cell.measured)]
    assert len({turn.prompt for turn in sent}) == len(sent) == 11
    lengths = {f"question {i}": 3 + i for i in range(30)} | {"question x": 8}
    assert all(turn.output_tokens == lengths[str(turn.prompt)] for turn in sent)
    assert [turn.prompt for turn in sent] != sorted(str(turn.prompt) for turn in sent)
    assert sweep.description == "p.jsonl: 31 rows, answers as long as the file's"
    again = planned(vocabulary, {"kind": "file", "path": path, "output": "suite"})
    assert {turn.output_tokens for turn in again.named[0].turns} == {8}
    other = planned(vocabulary, {"kind": "file", "path": path}, seed=1)
    assert other.named[0].turns != sweep.named[0].turns


def test_too_few_rows_are_refused_or_repeated(vocabulary: Vocabulary, tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "one"}, {"prompt": "two"})
    with pytest.raises(InputError, match="has 2 prompts that can be used, fewer"):
        planned(vocabulary, {"kind": "file", "path": path})
    sweep = planned(vocabulary, {"kind": "file", "path": path, "repeat": True})
    assert {turn.prompt for turn in sweep.named[1].turns} == {"one", "two"}
    assert sweep.hits_expected


def test_rows_longer_than_the_served_length_are_left_out_and_counted(
    vocabulary: Vocabulary, tmp_path: Path
) -> None:
    rows = [{"prompt": f"q{i}" * (1 + 40 * (i % 2)), "output_tokens": 4} for i in range(40)]
    path = write(tmp_path / "p.jsonl", *rows)
    sweep = planned(vocabulary, {"kind": "file", "path": path}, served=30)
    assert all(len(str(turn.prompt)) < 27 for cell in sweep.named for turn in cell.turns)
    assert "drawn but left out: longer than the served length" in sweep.description
    with pytest.raises(InputError, match="has 0 prompts that can be used"):
        planned(vocabulary, {"kind": "file", "path": path, "repeat": True}, served=5)


CHAT = [
    {"from": "system", "value": "Be kind."},
    {"from": "human", "value": "Hi"},
    {"from": "gpt", "value": "Hello there"},
    {"from": "human", "value": "Bye"},
    {"from": "gpt", "value": "See you"},
]


@pytest.mark.parametrize(
    ("turns", "asked"), [(None, [2]), ("first", [2]), ("last", [4]), ("all", [2, 4])]
)
def test_which_questions_of_a_conversation_are_asked(
    vocabulary: Vocabulary, tmp_path: Path, turns: str | None, asked: list[int]
) -> None:
    path = tmp_path / "share.json"
    path.write_text(json.dumps([{"id": "a", "conversations": CHAT}]), encoding="utf-8")
    workload = {"kind": "file", "path": str(path), "repeat": True, "turns": turns}
    sweep = planned(vocabulary, workload, endpoint="chat")
    unit = sweep.named[0].measured[0]
    assert [len(turn.prompt) for turn in unit.turns] == asked
    answers = {2: "Hello there", 4: "See you"}
    assert [t.output_tokens for t in unit.turns] == [vocabulary.count(answers[n]) for n in asked]
    assert {turn.reusable_tokens for turn in unit.turns} == {ANY_HITS}
    with pytest.raises(InputError, match="completions endpoint cannot take"):
        planned(vocabulary, workload)


def test_a_trace_gives_lengths_and_arrival_times(vocabulary: Vocabulary, tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,12,5\n"
        "2023-11-16 18:17:04.2299600,900,5\n"
        "2023-11-16 18:17:05.4799600,7,6\n",
        encoding="utf-8",
    )
    with pytest.raises(InputError, match="has 2 prompts that can be used"):
        planned(vocabulary, {"kind": "file", "path": str(path)}, served=100)
    workload = {"kind": "file", "path": str(path), "repeat": True}
    sweep = planned(vocabulary, workload, served=100)
    for cell in sweep.named:
        assert [len(turn.prompt) for turn in cell.turns] == [12, 7, 12, 7]
        assert [turn.output_tokens for turn in cell.turns] == [5, 6, 5, 6]
        assert [unit.at_s for unit in cell.measured] == pytest.approx([0, 1.5, 3.0, 4.5])
    assert len({turn.prompt for cell in sweep.named for turn in cell.turns}) == 8
    assert sweep.description == (
        "azure.csv: lengths of a trace of 3 requests, 1 longer than the served length left out"
    )


def test_an_open_loop_keeps_a_traces_gaps_at_the_rate_asked_for(
    vocabulary: Vocabulary, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"2024-05-10 00:00:{at:02d}.0000000,8,4" for at in (0, 1, 3, 3, 10)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    suite = BenchSuite.model_validate(
        {
            "workload": {"kind": "file", "path": str(trace)},
            "rates": (2.0,),
            "duration_s": 1,
            "min_requests": 5,
        }
    )
    planner = CellPlanner(suite, vocabulary)
    (level,) = suite.levels
    units = planner.prompts(level, 0).measured
    bodies = tuple((b"{}",) for _ in units)
    load = planner.load(level, 0, "http://127.0.0.1", units, bodies)
    # Four gaps whose mean is half a second, in the trace's proportions.
    assert load.due_s == pytest.approx((0.0, 0.2, 0.6, 0.6, 2.0))
    assert load.concurrency is None
