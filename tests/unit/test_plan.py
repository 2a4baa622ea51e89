from __future__ import annotations

from qkit.measurements import Hardware
from qkit.plan import make_plan, measure_key, quantize_key
from qkit.recipe import BENCH_AGAIN, Calibration, Recipe, Variant

RECIPE = Recipe(name="a", model="m")
HARDWARE = Hardware(accelerator="cpu", name="c", memory_bytes=1, cpu="c", cpu_cores=1)


def test_the_baseline_is_measured_first_and_benchmarked_again_last():
    groups = make_plan(RECIPE).groups
    assert [group.label for group in groups] == [
        "bf16", "awq", "gptq", "fp8", "smoothquant", "bf16",
    ]  # fmt: skip
    assert [cell.suite for cell in groups[0].cells] == ["mmlu", "bench"]
    assert [cell.suite for cell in groups[-1].cells] == [BENCH_AGAIN]


def test_what_is_not_asked_for_is_not_planned():
    no_bench = RECIPE.model_copy(update={"bench": ()})
    assert all(cell.suite == "mmlu" for group in make_plan(no_bench).groups for cell in group.cells)
    nothing = RECIPE.model_copy(update={"bench": (), "accuracy": ()})
    assert make_plan(nothing).groups == ()
    alone = RECIPE.model_copy(update={"variants": ()})
    assert [group.label for group in make_plan(alone).groups] == ["bf16"]


def test_several_benchmarks_are_cells_and_the_first_is_repeated():
    names = ("rag", "chat")
    benches = tuple(RECIPE.bench[0].model_copy(update={"name": name}) for name in names)
    groups = make_plan(RECIPE.model_copy(update={"bench": benches, "accuracy": ()})).groups
    assert [cell.suite for cell in groups[0].cells] == ["rag", "chat"]
    assert [(c.suite, c.settings.name) for c in groups[-1].cells] == [("bench-again", "rag")]


def key(**change):
    arguments = {
        "source_hash": "s",
        "variant": Variant(method="awq"),
        "calibration": Calibration(source="a.jsonl"),
        "calibration_hash": "c",
        "environment": "e",
        "accelerator": "cpu",
    }
    return quantize_key(**{**arguments, **change})


def test_a_variants_key_follows_what_shapes_it_and_nothing_else():
    assert key() == key()
    assert key(variant=Variant(method="awq", name="other")) == key()
    assert key(calibration=Calibration(source="moved/a.jsonl")) == key()
    changes = [
        {"source_hash": "t"},
        {"variant": Variant(method="gptq")},
        {"variant": Variant(method="awq", group_size=64)},
        {"calibration": Calibration(source="a.jsonl", samples=3)},
        {"calibration_hash": "d"},
        {"environment": "f"},
        {"accelerator": "cuda"},
    ]
    keys = [key(**change) for change in changes]
    assert len({key(), *keys}) == len(changes) + 1


def test_a_hub_data_sets_name_is_part_of_the_key():
    named = [
        key(calibration=Calibration(source=name), calibration_hash=None) for name in ("a/b", "c/d")
    ]
    assert named[0] != named[1]


def test_a_measurements_key_follows_what_shapes_it():
    bench = make_plan(RECIPE).groups[0].cells[1]

    def of(**change):
        arguments = {
            "cell": bench,
            "variant_hash": "v",
            "flags": ("--a",),
            "variables": {"A": "1"},
            "environment": "e",
            "hardware": HARDWARE,
            "harness": "0.4.13",
            "data": None,
        }
        return measure_key(**{**arguments, **change})

    other = make_plan(
        RECIPE.model_copy(update={"bench": (RECIPE.bench[0].model_copy(update={"seed": 1}),)})
    )
    changes = [
        {"cell": other.groups[0].cells[1]},
        {"variant_hash": "w"},
        {"flags": ("--b",)},
        {"variables": {"A": "2"}},
        {"environment": "f"},
        {"hardware": HARDWARE.model_copy(update={"name": "d"})},
        {"harness": "0.4.14"},
        {"data": "/data"},
    ]
    assert len({of(), *(of(**change) for change in changes)}) == len(changes) + 1


def test_the_baseline_is_scored_again_last_where_asked_for():
    repeated = RECIPE.model_copy(update={"repeat_baseline": True})
    plan = make_plan(repeated)
    assert [cell.suite for cell in plan.groups[-1].cells] == ["mmlu-again", BENCH_AGAIN]
    assert plan.groups[-1].cells[0].settings == repeated.accuracy[0]
    alone = repeated.model_copy(update={"variants": (), "bench": ()})
    assert [[c.suite for c in g.cells] for g in make_plan(alone).groups] == [
        ["mmlu"], ["mmlu-again"],
    ]  # fmt: skip
