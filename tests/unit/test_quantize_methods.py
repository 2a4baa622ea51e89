"""Schemes, their names and sizes, and what a worker is asked for."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from fakes.checkpoints import TinyQwen2, write_variant

from qkit import protocol
from qkit.protocol import QuantizeRequest
from qkit.quantize.checkpoint import inspect_checkpoint, split_bytes
from qkit.quantize.methods import (
    build_request,
    needs_calibration,
    scheme_label,
    scheme_of,
    settings_of,
)
from qkit.quantize.schemes import METHODS, is_ignored, layer_bytes, scheme_for
from qkit.recipe import METHODS as RECIPE_METHODS
from qkit.recipe import Variant


@pytest.mark.parametrize(
    ("variant", "label", "storage"),
    [
        (Variant(method="awq"), "W4A16 asym g128", "pack-quantized"),
        (Variant(method="awq", symmetric=True, group_size=32), "W4A16 sym g32", "pack-quantized"),
        (Variant(method="gptq"), "W4A16 sym g128 actorder=static", "pack-quantized"),
        (Variant(method="gptq", actorder=None), "W4A16 sym g128", "pack-quantized"),
        (
            Variant(method="gptq", symmetric=False, group_size=64),
            "W4A16 asym g64 actorder=static",
            "pack-quantized",
        ),
        (
            Variant(method="gptq", weight_bits=8),
            "W8A16 sym per channel actorder=static",
            "pack-quantized",
        ),
        (Variant(method="rtn"), "W4A16 sym g128 (round to nearest)", "pack-quantized"),
        (
            Variant(method="rtn", weight_bits=8, symmetric=False),
            "W8A16 asym per channel (round to nearest)",
            "pack-quantized",
        ),
        (Variant(method="fp8"), "FP8 dynamic (W8A8)", "float-quantized"),
        (Variant(method="fp8", scales="static"), "FP8 static (W8A8)", "float-quantized"),
        (
            Variant(method="fp8", scales="block", kv_cache="fp8"),
            "FP8 block (W8A8), FP8 KV cache",
            "float-quantized",
        ),
        (
            Variant(method="smoothquant"),
            "INT8 W8A8 (SmoothQuant 0.8 + GPTQ)",
            "int-quantized",
        ),
        (
            Variant(method="smoothquant", scales="static", rounding="rtn"),
            "INT8 W8A8 static (SmoothQuant 0.8 + round to nearest)",
            "int-quantized",
        ),
    ],
)
def test_schemes_and_their_names(variant: Variant, label: str, storage: str) -> None:
    assert scheme_label(variant) == label
    assert scheme_of(variant).format == storage


def test_the_recipe_and_the_schemes_know_the_same_methods() -> None:
    assert METHODS == RECIPE_METHODS
    with pytest.raises(ValueError, match="unknown method 'nf4'"):
        scheme_for("nf4", group_size=128, symmetric=True, actorder=None)


def test_dynamic_fp8_and_round_to_nearest_need_no_calibration() -> None:
    free = [method for method in RECIPE_METHODS if not needs_calibration(Variant(method=method))]
    assert free == ["fp8", "rtn"]
    assert not needs_calibration(Variant(method="fp8", scales="block"))
    assert needs_calibration(Variant(method="fp8", scales="static"))
    assert needs_calibration(Variant(method="rtn", kv_cache="fp8"))


def test_layer_bytes_by_hand() -> None:
    out, inputs = 512, 256

    def size(method: str, *, symmetric: bool = True, group_size: int = 128) -> int:
        scheme = scheme_for(method, group_size=group_size, symmetric=symmetric, actorder=None)
        return layer_bytes(scheme, out, inputs)

    # Half a byte a weight, two bf16 scales a row, two int64 of shape.
    assert size("gptq") == 512 * 256 // 2 + 512 * 2 * 2 + 16
    # Two groups of 4-bit zero points, eight rows to a word.
    assert size("awq", symmetric=False) == size("gptq") + (512 // 8) * 2 * 4
    assert size("gptq", group_size=32) == 512 * 256 // 2 + 512 * 8 * 2 + 16
    assert size("fp8") == size("smoothquant") == 512 * 256 + 512 * 2


def test_bytes_of_other_scales_by_hand() -> None:
    def size(method: str, scales: str, shape: tuple[int, int] = (512, 256)) -> int:
        scheme = scheme_for(method, group_size=128, symmetric=True, actorder=None, scales=scales)
        return layer_bytes(scheme, *shape)

    # One scale for the weight and one for the inputs.
    assert size("fp8", "static") == 512 * 256 + 2 * 2
    # 4 x 2 blocks; those at the edges count whole.
    assert size("fp8", "block") == 512 * 256 + 4 * 2 * 2
    assert size("fp8", "block", (130, 256)) == 130 * 256 + 2 * 2 * 2
    assert size("smoothquant", "static") == 512 * 256 + 512 * 2 + 2


def test_bits_per_weight_of_a_large_layer() -> None:
    """4-bit groups of 128 cost 16/128 bits for the scale and 4/128 for a zero point."""
    shape = (18944, 3584)
    weights = shape[0] * shape[1]
    awq = scheme_for("awq", group_size=128, symmetric=False, actorder=None)
    gptq = scheme_for("gptq", group_size=128, symmetric=True, actorder="static")
    assert layer_bytes(awq, *shape) * 8 / weights == pytest.approx(4.15625, rel=1e-4)
    assert layer_bytes(gptq, *shape) * 8 / weights == pytest.approx(4.125, rel=1e-4)


@pytest.mark.parametrize(
    "variant",
    [
        *(Variant(method=method) for method in RECIPE_METHODS),
        Variant(method="gptq", weight_bits=8),
        Variant(method="rtn", weight_bits=8, symmetric=False),
        Variant(method="rtn", symmetric=False, group_size=32),
        Variant(method="fp8", scales="static", kv_cache="fp8"),
        Variant(method="fp8", scales="block"),
        Variant(method="smoothquant", scales="static"),
    ],
    ids=scheme_label,
)
def test_predicted_bytes_are_those_of_a_stored_layer(tmp_path: Path, variant: Variant) -> None:
    source = TinyQwen2(hidden=128, intermediate=384).write(tmp_path / "model")
    stored, _ = split_bytes(inspect_checkpoint(write_variant(source, tmp_path / "v", variant)))
    scheme = scheme_of(variant)
    assert stored == sum(
        layer_bytes(scheme, linear.out_features, linear.in_features)
        for linear in inspect_checkpoint(source).linears
    )


def test_ignored_names_and_patterns() -> None:
    assert is_ignored("lm_head", ("lm_head",))
    assert not is_ignored("model.lm_head", ("lm_head",))
    assert is_ignored("model.layers.0.mlp.down_proj", ("re:.*down_proj$",))
    # Patterns start at the beginning of the name, as vLLM reads them.
    assert not is_ignored("model.layers.0.mlp.down_proj", ("re:down_proj",))


def test_a_request_carries_every_setting_and_survives_json() -> None:
    variant = Variant(
        method="gptq",
        group_size=64,
        symmetric=False,
        actorder=None,
        dampening_frac=0.05,
        ignore=("lm_head", "re:.*down_proj$"),
    )
    request = build_request(
        variant,
        source=Path("/models/qwen"),
        out=Path("/out/gptq"),
        calibration=Path("/data/calibration.jsonl"),
        seed=7,
        device="cpu",
        trust_remote_code=True,
    )
    assert request == QuantizeRequest(
        method="gptq",
        model_path="/models/qwen",
        out_path="/out/gptq",
        calibration_path="/data/calibration.jsonl",
        weight_bits=4,
        group_size=64,
        symmetric=False,
        actorder=None,
        dampening_frac=0.05,
        smoothing_strength=0.8,
        rounding="gptq",
        scales="dynamic",
        kv_cache=None,
        ignore=("lm_head", "re:.*down_proj$"),
        seed=7,
        device="cpu",
        trust_remote_code=True,
    )
    assert protocol.load(QuantizeRequest, protocol.dump(request)) == request
    assert {field.name for field in dataclasses.fields(request)} >= set(settings_of(variant))


def test_settings_are_those_the_method_reads() -> None:
    assert set(settings_of(Variant(method="awq"))) == {"ignore", "group_size", "symmetric"}
    assert set(settings_of(Variant(method="fp8"))) == {"ignore", "scales"}
    assert settings_of(Variant(method="rtn", kv_cache="fp8"))["kv_cache"] == "fp8"
    assert settings_of(Variant(method="smoothquant", rounding="rtn")) == {
        "ignore": ("lm_head",),
        "smoothing_strength": 0.8,
        "rounding": "rtn",
        "scales": "dynamic",
    }
    assert set(settings_of(Variant(method="rtn", weight_bits=8))) == {
        "ignore",
        "weight_bits",
        "symmetric",
    }
    assert settings_of(Variant(method="smoothquant"))["smoothing_strength"] == 0.8
    assert settings_of(Variant(method="gptq"))["symmetric"] is True
    assert settings_of(Variant(method="awq"))["symmetric"] is False
