"""How a recipe names a workload, what it then means, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qkit.errors import InputError
from qkit.keys import hash_of_prompts
from qkit.plan import Cell
from qkit.recipe import Recipe, parse_recipe
from qkit.selection import choose_suites
from qkit.suites import BUILTIN_BENCHES, BenchSuite, Sampling


def bench_of(**fields: Any) -> BenchSuite:
    (suite,) = parse_recipe({"name": "r", "model": "m", "bench": fields}, where="r.yaml").bench
    return suite


def test_a_kind_brings_its_profile_and_the_recipe_overrides_it() -> None:
    suite = bench_of(workload="short-chat", output_tokens=64)
    assert (suite.endpoint, suite.output_tokens, suite.ignore_eos) == ("chat", 64, False)
    assert suite.sampling.sent() == {
        "temperature": 0.3,
        "top_p": 1,
        "repetition_penalty": 1,
        "top_k": -1,
        "min_p": 0,
    }
    assert bench_of(workload="multi-turn", endpoint="completions").endpoint == "completions"
    assert bench_of().sampling == Sampling()
    assert bench_of().sampling.sent().keys() == {"temperature", "top_p", "repetition_penalty"}


def test_settings_survive_being_stored() -> None:
    for suite in (*BUILTIN_BENCHES.values(), bench_of(workload={"kind": "random", "input": 9})):
        assert BenchSuite.model_validate(suite.model_dump()) == suite
        assert BenchSuite.model_validate_json(suite.model_dump_json()) == suite


def test_built_in_benchmarks_are_named_in_recipes_and_on_the_command_line() -> None:
    data = {"name": "r", "model": "m", "bench": ["short-chat", {"concurrency": [2]}]}
    recipe = parse_recipe(data, where="r.yaml")
    assert [suite.name for suite in recipe.bench] == ["short-chat", "bench"]
    assert recipe.bench[0] == BUILTIN_BENCHES["short-chat"]
    plain = Recipe(name="r", model="m")
    chosen = choose_suites(plain, "short-chat,mmlu", concurrency="1,4")
    assert [(suite.name, suite.concurrency) for suite in chosen.bench] == [("short-chat", (1, 4))]
    assert [suite.task for suite in chosen.accuracy] == ["mmlu"]
    assert [suite.name for suite in choose_suites(plain, None).bench] == ["bench"]
    own = plain.model_copy(update={"bench": (BenchSuite(name="short-chat", concurrency=(3,)),)})
    assert choose_suites(own, "short-chat").bench[0].concurrency == (3,)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"workload": "short-chats"}, "no workload 'short-chats', did you mean 'short-chat'?"),
        ({"workload": {"turns": 3}}, "needs a `kind`, one of random, short-chat"),
        ({"workload": {"kind": "file"}}, "workload.file.path: missing"),
        ({"workload": {"kind": "multi-turn", "turn": 3}}, "unknown key, did you mean 'turns'?"),
        ({"workload": "short-chat", "input_tokens": 9}, "does not read input_tokens"),
        ({"sampling": {"temprature": 1}}, "unknown key, did you mean 'temperature'?"),
        ({"sampling": {"top_p": 0}}, "bench.sampling.top_p: Input should be greater than 0"),
    ],
)
def test_what_is_wrong_is_named_with_its_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        bench_of(**fields)
    assert message in str(caught.value)


def test_an_unknown_built_in_benchmark() -> None:
    with pytest.raises(InputError, match="1 wrong field") as caught:
        parse_recipe({"name": "r", "model": "m", "bench": ["short_chat"]}, where="r.yaml")
    assert "no built-in benchmark 'short_chat', did you mean 'short-chat'?" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "fewest", "most"),
    [
        ({}, 640, 640),
        (
            {"workload": {"kind": "random", "output": {"shape": "uniform", "low": 1, "high": 9}}},
            513,
            521,
        ),
        ({"workload": "shared-prefix"}, 1280, 1280),
        ({"workload": "multi-turn"}, 4 * 64 + 3 * 128 + 128, 4 * 64 + 3 * 128 + 128),
        ({"workload": {"kind": "file", "path": "x"}}, 1, None),
    ],
)
def test_tokens_of_the_longest_request(
    fields: dict[str, Any], fewest: int, most: int | None
) -> None:
    span = bench_of(**fields).request_tokens
    assert (span.fewest, span.most) == (fewest, most)


def test_a_changed_file_of_prompts_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    suite = bench_of(workload={"kind": "file", "path": str(path)})
    cell = Cell("bf16", "bench", suite)
    assert hash_of_prompts(cell) is None
    path.write_text("a")
    first = hash_of_prompts(cell)
    path.write_text("b")
    assert hash_of_prompts(cell) not in (None, first)
    assert hash_of_prompts(Cell("bf16", "bench", BenchSuite())) is None
