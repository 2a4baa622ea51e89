"""Which variants and suites `qkit eval` measures."""

from __future__ import annotations

import pytest
from fakes.checkpoints import TinyQwen2
from fakes.openai_server import FakeServer

from qkit.errors import InputError
from qkit.recipe import Recipe
from qkit.selection import attach_group, choose_suites, folder_groups, run_groups
from qkit.store import RunStore
from qkit.suites import AccuracySuite, BenchSuite

RECIPE = Recipe(
    name="r",
    model="m",
    accuracy=(AccuracySuite(task="mmlu", num_fewshot=5), AccuracySuite(task="arc_easy")),
)


def test_without_names_the_recipes_suites_are_kept():
    assert choose_suites(RECIPE, None) == RECIPE


def test_a_named_suite_keeps_the_recipes_settings_and_others_get_the_defaults():
    chosen = choose_suites(RECIPE, "mmlu, hellaswag")
    assert [(s.task, s.num_fewshot) for s in chosen.accuracy] == [("mmlu", 5), ("hellaswag", None)]
    assert chosen.bench == ()


def test_values_typed_beside_the_names_win():
    chosen = choose_suites(RECIPE, "mmlu,bench", concurrency="2,8", num_fewshot=0, limit=3)
    assert (chosen.accuracy[0].num_fewshot, chosen.accuracy[0].limit) == (0, 3)
    assert chosen.bench[0].concurrency == (2, 8)
    assert chosen.bench[0].input_tokens == RECIPE.bench[0].input_tokens


@pytest.mark.parametrize(
    ("names", "levels", "message"),
    [
        (",", None, "no suite to measure"),
        ("bench", "1-4", "not a list of numbers"),
        ("bench", "4,4", "names a level twice"),
        ("a b", None, "String should match pattern"),
    ],
)
def test_what_cannot_be_measured_is_refused(names, levels, message):
    with pytest.raises(InputError, match=message):
        choose_suites(RECIPE, names, concurrency=levels)


def test_of_a_run_all_that_were_made_are_measured(tmp_path):
    store = RunStore(tmp_path)
    assert [group.label for group in run_groups(RECIPE, store, ())] == ["bf16"]
    with pytest.raises(InputError, match="variant 'awq' was not made yet"):
        run_groups(RECIPE, store, ("awq",))
    with pytest.raises(InputError, match="did you mean 'gptq'"):
        run_groups(RECIPE, store, ("gtpq",))


def test_folders_are_named_after_their_variants_and_the_baseline_comes_first(tmp_path):
    paths = [tmp_path / "awq" / "model", tmp_path / "w4"]
    for path in (*paths, tmp_path / "base"):
        path.mkdir(parents=True)
    groups, folders = folder_groups(RECIPE, [str(path) for path in paths], tmp_path / "base")
    assert [group.label for group in groups] == ["bf16", "awq", "w4"]
    assert folders == {"bf16": tmp_path / "base", "awq": paths[0], "w4": paths[1]}


def test_two_folders_of_one_name_are_refused(tmp_path):
    for name in ("a/w4", "b/w4"):
        (tmp_path / name).mkdir(parents=True)
    with pytest.raises(InputError, match="two folders are called 'w4'"):
        folder_groups(RECIPE, [str(tmp_path / "a/w4"), str(tmp_path / "b/w4")], None)


def test_a_running_server_needs_a_tokenizer(tmp_path):
    with FakeServer() as server:
        with pytest.raises(InputError, match="tokenizer of the served model is not on this"):
            attach_group(RECIPE, server.url, None, None)
        folder = TinyQwen2().write(tmp_path / "model")
        attached = attach_group(RECIPE, server.url, None, folder)
    assert attached.subject.path == folder
    assert attached.subject.weight_bytes is None
    assert [cell.suite for cell in attached.group.cells] == ["mmlu", "arc_easy", "bench"]


def test_a_benchmark_of_the_recipe_is_chosen_by_its_name():
    recipe = RECIPE.model_copy(
        update={"bench": (BenchSuite(), BenchSuite(name="rag", concurrency=(2,)))}
    )
    chosen = choose_suites(recipe, "rag,mmlu")
    assert [suite.name for suite in chosen.bench] == ["rag"]
    assert [suite.task for suite in chosen.accuracy] == ["mmlu"]
    assert [suite.name for suite in choose_suites(recipe, None).bench] == ["bench", "rag"]


def test_rates_and_an_objective_are_typed_beside_the_names():
    chosen = choose_suites(RECIPE, "bench", rates="0.5,2", slo="ttft_p95<0.2s").bench[0]
    assert (chosen.rates, chosen.concurrency, chosen.slo) == ((0.5, 2.0), (), "ttft_p95<200ms")
    opened = RECIPE.model_copy(update={"bench": (BenchSuite(rates=(1.0,)),)})
    closed = choose_suites(opened, "bench", concurrency="4").bench[0]
    assert (closed.rates, closed.concurrency) == ((), (4,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rates": "fast"}, "--rate 'fast' is not a list of numbers"),
        ({"rates": "1", "concurrency": "1"}, "--concurrency is a closed loop and --rate an open"),
        ({"slo": "ttft_p95<200"}, "--slo: 'ttft_p95<200': the limit needs a unit"),
        ({"rates": "-1"}, "greater than 0"),
    ],
)
def test_a_load_that_is_none_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        choose_suites(RECIPE, "bench", **options)
