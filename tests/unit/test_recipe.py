from __future__ import annotations

import pytest

from qkit.errors import InputError
from qkit.recipe import DEFAULT_METHODS, METHODS, Recipe, builtin_recipes, load_recipe, parse_recipe

SMALL = {"name": "a", "model": "m"}


@pytest.mark.parametrize("name", sorted(builtin_recipes()))
def test_every_shipped_recipe_is_valid_and_says_how_to_run_it(name):
    recipe = load_recipe(name)
    assert recipe.name == name
    assert {variant.method for variant in recipe.variants} == set(DEFAULT_METHODS)
    assert f"qkit run {name}" in builtin_recipes()[name].read_text()


def test_the_defaults_are_those_of_a_gpu_node():
    recipe = Recipe(**SMALL)
    assert [variant.method for variant in recipe.variants] == ["awq", "gptq", "fp8", "smoothquant"]
    assert recipe.calibration.source == "HuggingFaceH4/ultrachat_200k"
    assert recipe.serve.kernel == "marlin"
    assert recipe.bench[0].concurrency == (1, 2, 4, 8, 16)
    assert (recipe.accuracy[0].task, recipe.accuracy[0].num_fewshot) == ("mmlu", 5)
    assert recipe.variants[0].ignore == ("lm_head",)
    assert recipe.variants[3].smoothing_strength == 0.8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"modle": "x"}, "modle: unknown key, did you mean 'model'?"),
        ({"model": None}, "model: Input should be a valid string"),
        ({"variants": [{"method": "gtpq"}]}, "variants.0.method: Input should be 'awq', 'gptq'"),
        ({"variants": [{"methods": "gptq"}]}, "did you mean 'method'?"),
        ({"variants": [{"method": "awq"}] * 2}, "'awq' is there twice; give one a `name`"),
        ({"variants": [{"method": "awq", "name": "bf16"}]}, "'bf16' is the baseline's name"),
        ({"variants": [{"method": "awq", "name": "../x"}]}, "variants.0.name: String should match"),
        ({"variants": [{"method": "awq", "group_size": 100}]}, "group_size: Input should be 32"),
        (
            {"variants": [{"method": "fp8", "group_size": 64}]},
            "variants.0: fp8 does not read `group_size`; awq, gptq and rtn do",
        ),
        (
            {"variants": [{"method": "rtn", "weight_bits": 8, "group_size": 64}]},
            "variants.0: 8-bit weights have one scale a row",
        ),
        (
            {"variants": [{"method": "awq", "scales": "static"}]},
            "variants.0: awq does not read `scales`; fp8 and smoothquant do",
        ),
        (
            {"variants": [{"method": "smoothquant", "scales": "block"}]},
            "variants.0: smoothquant has no block scales",
        ),
        (
            {"variants": [{"method": "smoothquant", "rounding": "rtn", "dampening_frac": 0.1}]},
            "variants.0: rounding to the nearest does not read `dampening_frac`; gptq does",
        ),
        (
            {"variants": [{"method": "gptq", "kv_cache": "int8"}]},
            "variants.0.kv_cache: Input should be 'fp8'",
        ),
        ({"calibration": {"sample": 3}}, "calibration.sample: unknown key, did you mean 'samples'"),
        ({"calibration": {"samples": 0}}, "calibration.samples: Input should be greater than"),
        ({"serve": {"kernal": "x"}}, "serve.kernal: unknown key, did you mean 'kernel'?"),
        ({"bench": {"concurrency": []}}, "bench.concurrency: needs at least one level"),
        ({"bench": {"concurrency": [2, 2]}}, "bench.concurrency: names a level twice"),
        ({"bench": {"concurrency": [0]}}, "bench.concurrency.0: Input should be greater than"),
        ({"accuracy": [{"task": "bench"}]}, "'bench' is the benchmark's name, not a task"),
        ({"bench": [{}, {}]}, "two suites are called 'bench'; give one benchmark a `name`"),
        ({"bench": {"name": "bench-again"}}, "'bench-again' cannot be a suite's name"),
        (
            {"bench": {"concurency": [1]}},
            "bench.concurency: unknown key, did you mean 'concurrency'",
        ),
        ({"bench": [{}, {"name": "rag", "seed": "x"}]}, "bench.1.seed: "),
        ({"accuracy": [{"task": "mmlu"}] * 2}, "two suites are called 'mmlu'"),
        ({"accelerator": "tpu"}, "accelerator: Input should be 'auto', 'cpu' or 'cuda'"),
    ],
)
def test_a_wrong_field_is_named_with_what_is_wrong(change, message):
    with pytest.raises(InputError) as caught:
        parse_recipe({**SMALL, **change}, where="my.yaml")
    assert message in str(caught.value)
    assert "my.yaml" in str(caught.value)


def test_all_wrong_fields_are_told_at_once():
    with pytest.raises(InputError, match="2 wrong fields"):
        parse_recipe({"name": "a", "bench": {"seeed": 1}}, where="my.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [", "not valid YAML"), ("- a", "not a mapping"), ("", "not a mapping")],
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path, text, message):
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        load_recipe(str(path))


def test_round_to_nearest_is_made_only_when_asked_for():
    assert set(METHODS) - set(DEFAULT_METHODS) == {"rtn"}


def test_an_unknown_recipe_gets_the_nearest_name():
    with pytest.raises(InputError, match="did you mean 'demo'"):
        load_recipe("dmo")


def test_a_variant_may_have_calibration_of_its_own():
    recipe = parse_recipe(
        {
            **SMALL,
            "calibration": {"source": "a.jsonl"},
            "variants": [
                {"method": "awq"},
                {"method": "gptq", "calibration": {"source": "qkit:demo/calibration.jsonl"}},
            ],
        },
        where="x",
    )
    own, other = (recipe.calibration_of(variant).source for variant in recipe.variants)
    assert own == "a.jsonl"
    assert other.endswith("/recipes/demo/calibration.jsonl")


def test_one_benchmark_needs_no_list_and_several_have_names():
    assert [suite.name for suite in Recipe(**SMALL, bench={"seed": 1}).bench] == ["bench"]
    assert Recipe(**SMALL, bench=None).bench == ()
    several = Recipe(**SMALL, bench=[{}, {"name": "rag"}])
    assert [suite.name for suite in several.bench] == ["bench", "rag"]
