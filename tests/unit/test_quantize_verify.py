"""What is saved must be what was asked for: right folders pass, each wrong one is named."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.checkpoints import (
    Array,
    TinyQwen2,
    array,
    bf16,
    quantized_layer,
    read_json,
    write_json,
    write_safetensors,
    write_variant,
)

from qkit.errors import MeasurementError
from qkit.quantize.backend_check import LogitsReport
from qkit.quantize.checkpoint import inspect_checkpoint
from qkit.quantize.methods import scheme_label, scheme_of
from qkit.quantize.safetensors_header import read_bytes
from qkit.quantize.verify import verify_variant
from qkit.recipe import METHODS, Variant

MODEL = TinyQwen2(hidden=128, intermediate=256)
LAYER = "model.layers.0.mlp.gate_proj"


def edit_config(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = read_json(folder / "config.json")
    change(config)
    write_json(folder / "config.json", config)


def edit_weights(folder: Path, change: Callable[[dict[str, Array]], None]) -> None:
    tensors = {
        name: Array(tensor.dtype, tensor.shape, read_bytes(tensor))
        for name, tensor in inspect_checkpoint(folder).tensors.items()
    }
    change(tensors)
    write_safetensors(folder / "model.safetensors", tensors)


def weights_of(config: dict[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = config["quantization_config"]
    weights: dict[str, Any] = settings["config_groups"]["group_0"]["weights"]
    return weights


INFINITE = bf16(np.full(1, math.inf))


def inputs_of(config: dict[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = config["quantization_config"]
    inputs: dict[str, Any] = settings["config_groups"]["group_0"]["input_activations"]
    return inputs


def set_scale(value: float) -> Callable[[Path], None]:
    def change(tensors: dict[str, Array]) -> None:
        shape = tensors[f"{LAYER}.weight_scale"].shape
        values = np.full(shape, 0.01)
        values[3, 0] = value
        tensors[f"{LAYER}.weight_scale"] = bf16(values)

    return lambda folder: edit_weights(folder, change)


def unquantize(folder: Path) -> None:
    def change(tensors: dict[str, Array]) -> None:
        for name in [name for name in tensors if name.startswith(f"{LAYER}.")]:
            del tensors[name]
        tensors[f"{LAYER}.weight"] = bf16(np.zeros((256, 128)))

    edit_weights(folder, change)


def quantize_head(folder: Path) -> None:
    scheme = scheme_of(Variant(method="awq"))
    edit_weights(folder, lambda t: t.update(quantized_layer("lm_head", 320, 128, scheme)))


def round_embeddings(tensors: dict[str, Array]) -> None:
    """Change one value: what is stored in 16 bits may have been rounded to fewer all the same."""
    name = "model.embed_tokens.weight"
    whole = tensors[name]
    tensors[name] = Array(whole.dtype, whole.shape, whole.data[:-2] + b"\0\0")


@pytest.mark.parametrize(
    "variant",
    [
        *(Variant(method=method) for method in METHODS),
        Variant(method="gptq", weight_bits=8),
        Variant(method="fp8", scales="static"),
        Variant(method="fp8", scales="block"),
        Variant(method="smoothquant", scales="static", rounding="rtn", kv_cache="fp8"),
    ],
    ids=scheme_label,
)
@pytest.mark.parametrize("tied", [True, False])
def test_right_variants_pass(tmp_path: Path, variant: Variant, tied: bool) -> None:
    source = TinyQwen2(hidden=128, intermediate=256, tied=tied).write(tmp_path / "model")
    folder = write_variant(source, tmp_path / "variant", variant)
    sizes = verify_variant(folder, inspect_checkpoint(source), variant)
    assert sizes.quantized_bytes == sizes.predicted_bytes
    assert sizes.weight_bytes == sizes.quantized_bytes + sizes.unquantized_bytes
    assert sizes.weight_bytes == inspect_checkpoint(folder).weight_bytes


def test_layers_left_alone_pass(tmp_path: Path) -> None:
    source = MODEL.write(tmp_path / "model")
    variant = Variant(method="awq", ignore=("lm_head", "re:.*layers[.]1[.].*"))
    folder = write_variant(source, tmp_path / "variant", variant)
    verify_variant(folder, inspect_checkpoint(source), variant)


def test_static_and_weight_are_one_activation_order(tmp_path: Path) -> None:
    source = MODEL.write(tmp_path / "model")
    folder = write_variant(source, tmp_path / "variant", Variant(method="gptq"))
    edit_config(folder, lambda c: weights_of(c).update(actorder="weight"))
    verify_variant(folder, inspect_checkpoint(source), Variant(method="gptq"))


WRONG: list[tuple[str, Callable[[Path], object], str]] = [
    (
        "no quantization_config",
        lambda f: edit_config(f, lambda c: c.pop("quantization_config")),
        "config.json has no quantization_config",
    ),
    (
        "no groups",
        lambda f: edit_config(f, lambda c: c["quantization_config"].pop("config_groups")),
        "quantization_config does not have one group of layers",
    ),
    (
        "another format",
        lambda f: edit_config(f, lambda c: c["quantization_config"].update(format="int-quantized")),
        "config.json says format 'int-quantized', asked was 'pack-quantized'",
    ),
    (
        "another number of bits",
        lambda f: edit_config(f, lambda c: weights_of(c).update(num_bits=8)),
        "config.json says weights.num_bits 8, asked was 4",
    ),
    (
        "another group size",
        lambda f: edit_config(f, lambda c: weights_of(c).update(group_size=64)),
        "config.json says weights.group_size 64, asked was 128",
    ),
    (
        "symmetric instead of asymmetric",
        lambda f: edit_config(f, lambda c: weights_of(c).update(symmetric=True)),
        "config.json says weights.symmetric True, asked was False",
    ),
    (
        "an activation order nobody asked for",
        lambda f: edit_config(f, lambda c: weights_of(c).update(actorder="group")),
        "config.json says weights.actorder 'group', asked was None",
    ),
    (
        "inputs quantized",
        lambda f: edit_config(
            f,
            lambda c: c["quantization_config"]["config_groups"]["group_0"].update(
                input_activations={"num_bits": 8}
            ),
        ),
        "config.json says input_activations {'num_bits': 8}, asked was None",
    ),
    (
        "the head not among the ignored",
        lambda f: edit_config(f, lambda c: c["quantization_config"].update(ignore=[])),
        "config.json does not list lm_head among the ignored layers",
    ),
    ("a layer left in 16 bits", unquantize, f"{LAYER} is not quantized in the saved weights"),
    ("the head quantized", quantize_head, "lm_head is quantized, though to be left alone"),
    (
        "a scale missing",
        lambda f: edit_weights(f, lambda t: t.pop(f"{LAYER}.weight_scale")),
        f"{LAYER} has no weight_scale",
    ),
    (
        "a zero point missing",
        lambda f: edit_weights(f, lambda t: t.pop(f"{LAYER}.weight_zero_point")),
        f"{LAYER} has no weight_zero_point",
    ),
    (
        "a scale that is not a number",
        set_scale(math.nan),
        f"{LAYER}.weight_scale has values that are not finite",
    ),
    (
        "an infinite scale",
        set_scale(math.inf),
        f"{LAYER}.weight_scale has values that are not finite",
    ),
    (
        "embeddings that were rounded",
        lambda f: edit_weights(f, round_embeddings),
        "model.embed_tokens.weight was changed, though to be left alone",
    ),
    (
        "one layer of another size among many",
        lambda f: edit_weights(
            f, lambda t: t.update({f"{LAYER}.weight_packed": array(np.ones((256, 15), np.int32))})
        ),
        f"{LAYER} takes 16016 bytes, predicted were 17040",
    ),
    (
        "a norm missing",
        lambda f: edit_weights(f, lambda t: t.pop("model.norm.weight")),
        "model.norm.weight is missing",
    ),
    (
        "a norm in another dtype",
        lambda f: edit_weights(
            f,
            lambda t: t.update({"model.norm.weight": Array("F16", (128,), bytes(256))}),
        ),
        "model.norm.weight is F16 [128], the source's is BF16 [128]",
    ),
    (
        "another tokenizer",
        lambda f: (f / "tokenizer_config.json").write_text("{}"),
        "tokenizer_config.json is not the source's",
    ),
    (
        "no chat template",
        lambda f: (f / "chat_template.jinja").unlink(),
        "chat_template.jinja is not the source's",
    ),
    (
        "no generation config",
        lambda f: (f / "generation_config.json").unlink(),
        "generation_config.json is not the source's",
    ),
    (
        "an extra tokenizer file",
        lambda f: (f / "added_tokens.json").write_text("{}"),
        "added_tokens.json is not the source's",
    ),
    (
        "more bytes than the source",
        lambda f: edit_weights(f, lambda t: t.update(ballast=bf16(np.zeros(10**6)))),
        "no fewer than the source's",
    ),
]


@pytest.mark.parametrize(
    ("damage", "message"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG]
)
def test_wrong_variants_are_named(
    tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    source = MODEL.write(tmp_path / "model")
    variant = Variant(method="awq")
    folder = write_variant(source, tmp_path / "variant", variant)
    damage(folder)
    with pytest.raises(MeasurementError) as caught:
        verify_variant(folder, inspect_checkpoint(source), variant)
    assert caught.value.what.startswith("the variant is not what was asked for: ")
    assert message in caught.value.what
    assert str(folder) in (caught.value.where or "")


STATIC = Variant(method="fp8", scales="static", kv_cache="fp8")
KEYS = "model.layers.1.self_attn.k_scale"

WRONG_STATIC: list[tuple[str, Variant, Callable[[Path], object], str]] = [
    (
        "inputs scaled while serving",
        STATIC,
        lambda f: edit_config(f, lambda c: inputs_of(c).update(dynamic=True)),
        "config.json says input_activations.dynamic True, asked was False",
    ),
    (
        "no scale for a layer's inputs",
        STATIC,
        lambda f: edit_weights(f, lambda t: t.pop(f"{LAYER}.input_scale")),
        f"{LAYER} has no input_scale",
    ),
    (
        "a scale of inputs that is not finite",
        STATIC,
        lambda f: edit_weights(f, lambda t: t.update({f"{LAYER}.input_scale": INFINITE})),
        f"{LAYER}.input_scale has values that are not finite",
    ),
    (
        "no scheme for the cache",
        STATIC,
        lambda f: edit_config(f, lambda c: c["quantization_config"].update(kv_cache_scheme=None)),
        "config.json says kv_cache_scheme None, asked was {'num_bits': 8",
    ),
    (
        "no scale for a layer's keys",
        STATIC,
        lambda f: edit_weights(f, lambda t: t.pop(KEYS)),
        f"{KEYS} is missing",
    ),
    (
        "a scale of keys that is not finite",
        STATIC,
        lambda f: edit_weights(f, lambda t: t.update({KEYS: INFINITE})),
        f"{KEYS} has values that are not finite",
    ),
    (
        "a cache nobody asked for",
        Variant(method="rtn"),
        lambda f: edit_weights(f, lambda t: t.update({KEYS: bf16(np.ones(1))})),
        f"{KEYS} is there, though the cache was to stay in 16 bits",
    ),
    (
        "blocks of another size",
        Variant(method="fp8", scales="block"),
        lambda f: edit_config(f, lambda c: weights_of(c).update(block_structure=[64, 64])),
        "config.json says weights.block_structure [64, 64], asked was [128, 128]",
    ),
    (
        "a scale for every weight",
        Variant(method="rtn"),
        lambda f: edit_weights(
            f, lambda t: t.update({f"{LAYER}.weight_scale": bf16(np.ones((256, 32)))})
        ),
        "predicted were",
    ),
]


@pytest.mark.parametrize(
    ("variant", "damage", "message"),
    [case[1:] for case in WRONG_STATIC],
    ids=[case[0] for case in WRONG_STATIC],
)
def test_wrong_scales_are_named(
    tmp_path: Path, variant: Variant, damage: Callable[[Path], object], message: str
) -> None:
    source = MODEL.write(tmp_path / "model")
    folder = write_variant(source, tmp_path / "variant", variant)
    damage(folder)
    with pytest.raises(MeasurementError) as caught:
        verify_variant(folder, inspect_checkpoint(source), variant)
    assert message in caught.value.what


def report(**changes: Any) -> LogitsReport:
    values = {
        "tokens": 256,
        "mean_kl": 0.05,
        "context_free_kl": 2.5,
        "top1_agreement": 0.9,
        "source_distinct": 80,
        "variant_distinct": 78,
        "source_repeat": 0.1,
        "variant_repeat": 0.1,
        "finite": True,
    }
    return LogitsReport(**{**values, **changes})


def test_a_normal_loss_is_no_problem() -> None:
    assert report().problem() is None
    # A source that itself repeats one token says nothing about the variant.
    same = {"source_distinct": 1, "variant_distinct": 1, "source_repeat": 1, "variant_repeat": 1}
    assert report(**same).problem() is None
    # What 4-bit weights cost a model of 3 M parameters.
    assert report(mean_kl=0.263, context_free_kl=1.15).problem() is None
    assert report().summary() == (
        "loads; 256 next-token distributions are finite, with 78 different greedy tokens; against"
        " the source: mean KL 0.05 nats (a context-free guess: 2.5), top-1 agreement 90.0 %"
    )


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"finite": False, "mean_kl": math.nan}, "its logits are not finite"),
        ({"variant_distinct": 1}, "it predicts one and the same token at all 256 positions"),
        (
            {"variant_repeat": 0.95},
            "it predicts one and the same token at 95 % of 256 positions; the source does so at"
            " 10 %",
        ),
        ({"mean_kl": 1.3}, "its predictions have little in common with the source's"),
        ({"mean_kl": math.inf}, "its predictions have little in common with the source's"),
    ],
)
def test_broken_variants_are_caught(changes: dict[str, Any], problem: str) -> None:
    assert problem in str(report(**changes).problem())
