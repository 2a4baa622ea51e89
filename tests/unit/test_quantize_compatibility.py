"""Schemes against compute capability, and layers against numbers of cards."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.qwen_configs import SIZES, config_folder

from qkit.quantize.checkpoint import Checkpoint, describe_config
from qkit.quantize.compatibility import (
    TENSOR_PARALLEL_SIZES,
    check_capability,
    check_tensor_parallel,
    padded_size,
    split_linear,
)
from qkit.quantize.methods import scheme_of
from qkit.recipe import Variant


@pytest.fixture
def qwen(tmp_path: Path):
    """Return a function from a size to the checkpoint its config describes."""
    return lambda size: describe_config(config_folder(tmp_path, size))


def variant(method: str, **settings: object) -> Variant:
    return Variant.model_validate({"method": method, **settings})


#: The baseline, a W4A16, an FP8 and an INT8 W8A8 variant.
METHODS = (None, "gptq", "fp8", "smoothquant")


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        # V100 and T4: vLLM serves BF16, hence the baseline, from 8.0 on.
        ((7, 0), "refused refused refused refused"),
        ((7, 5), "refused refused refused refused"),
        # A800 and A100, RTX 3090.
        ((8, 0), "native weight-only weight-only native"),
        ((8, 6), "native weight-only weight-only native"),
        # L40S and RTX 4090, H100 and H200.
        ((8, 9), "native weight-only native native"),
        ((9, 0), "native weight-only native native"),
        # B200, RTX 5090, GB10: no INT8 kernels in vLLM.
        ((10, 0), "native weight-only native refused"),
        ((12, 0), "native weight-only native refused"),
        ((12, 1), "native weight-only native refused"),
    ],
)
def test_what_runs_on_a_compute_capability(capability: tuple[int, int], expected: str) -> None:
    for method, support in zip(METHODS, expected.split(), strict=True):
        scheme = scheme_of(variant(method)) if method else None
        verdict = check_capability(scheme, capability)
        assert verdict.support == support, method
        assert (verdict.fix is not None) == (support == "refused")


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_8_bit_zero_points_run_where_machete_does(capability: tuple[int, int]) -> None:
    verdict = check_capability(
        scheme_of(variant("gptq", weight_bits=8, symmetric=False)), capability
    )
    assert verdict.support == ("weight-only" if capability == (9, 0) else "refused")
    four = check_capability(scheme_of(variant("gptq", symmetric=False)), capability)
    assert four.support == "weight-only"
    symmetric = check_capability(scheme_of(variant("gptq", weight_bits=8)), capability)
    assert symmetric.support == "weight-only"


def test_the_reasons_name_what_is_missing() -> None:
    ampere = check_capability(scheme_of(variant("fp8")), (8, 0))
    assert ampere.reason == "no FP8 units: FP8 Marlin, 16-bit arithmetic"
    turing = check_capability(scheme_of(variant("fp8")), (7, 5))
    assert "from compute capability 8.0 on; this is 7.5" in turing.reason
    blackwell = check_capability(scheme_of(variant("smoothquant")), (12, 0))
    assert blackwell.reason == "vLLM has no INT8 W8A8 kernels for compute capability 12.0"
    assert "use fp8" in (blackwell.fix or "")


def sizes_that_fit(checkpoint: Checkpoint, made: Variant | None) -> list[int]:
    return [n for n in TENSOR_PARALLEL_SIZES if check_tensor_parallel(checkpoint, made, n).ok]


@pytest.mark.parametrize(
    ("size", "heads", "group_128", "group_64", "group_32"),
    [
        # Heads decide for the model itself: 14, 12, 16, 28, 40, 40 and 64 of them.
        ("0.5B", [1, 2], [1], [1, 2], [1, 2]),
        ("1.5B", [1, 2, 4], [1, 2], [1, 2, 4], [1, 2, 4]),
        ("3B", [1, 2, 4, 8], [1, 2], [1, 2, 4], [1, 2, 4, 8]),
        ("7B", [1, 2, 4], [1, 2, 4], [1, 2, 4], [1, 2, 4]),
        ("14B", [1, 2, 4, 8], [1, 2, 4], [1, 2, 4, 8], [1, 2, 4, 8]),
        ("32B", [1, 2, 4, 8], [1, 2, 4, 8], [1, 2, 4, 8], [1, 2, 4, 8]),
        ("72B", [1, 2, 4, 8], [1], [1, 2], [1, 2, 4]),
    ],
)
def test_which_sizes_can_be_split_over_how_many_cards(
    qwen,
    size: str,
    heads: list[int],
    group_128: list[int],
    group_64: list[int],
    group_32: list[int],
) -> None:
    checkpoint = qwen(size)
    assert sizes_that_fit(checkpoint, None) == heads
    assert sizes_that_fit(checkpoint, variant("fp8")) == heads
    assert sizes_that_fit(checkpoint, variant("smoothquant")) == heads
    assert sizes_that_fit(checkpoint, variant("gptq", group_size=128)) == group_128
    assert sizes_that_fit(checkpoint, variant("awq", group_size=64)) == group_64
    assert sizes_that_fit(checkpoint, variant("awq", group_size=32)) == group_32


def test_the_72b_trap_names_the_layer_and_the_ways_out(qwen) -> None:
    checkpoint = qwen("72B")
    two = check_tensor_parallel(checkpoint, variant("awq"), 2)
    assert two.obstacles == ("down_proj: 29,568 / 2 = 14,784 inputs, not whole groups of 128",)
    assert two.fix == (
        "group_size 64; or pad the MLP from 29,568 to 29,696 with zeros before quantizing; or"
        " tensor parallel 1; or a method with channel scales (fp8, smoothquant)"
    )
    eight = check_tensor_parallel(checkpoint, variant("awq"), 8)
    # 3,696 inputs a card are not whole groups of any size: only padding keeps eight cards.
    assert "group_size" not in (eight.fix or "")
    assert "29,696" in (eight.fix or "")


def test_qwens_own_padding_of_the_72b_model() -> None:
    assert padded_size(29_568, 128, 8) == 29_696
    assert padded_size(29_696, 128, 8) == 29_696


def test_the_half_b_trap_is_attention_which_cannot_be_padded(qwen) -> None:
    verdict = check_tensor_parallel(qwen("0.5B"), variant("gptq"), 2)
    assert verdict.obstacles == ("o_proj: 896 / 2 = 448 inputs, not whole groups of 128",)
    assert "pad" not in (verdict.fix or "")
    assert (verdict.fix or "").startswith("group_size 64; or tensor parallel 1")


def test_a_layer_left_in_16_bits_has_no_groups_to_split(qwen) -> None:
    kept = variant("gptq", ignore=["lm_head", "re:.*down_proj$"])
    assert check_tensor_parallel(qwen("72B"), kept, 8).ok


def test_heads_that_do_not_divide_are_nobodys_group_size(qwen) -> None:
    verdict = check_tensor_parallel(qwen("7B"), variant("awq"), 8)
    assert verdict.obstacles[0] == "28 attention heads are not divisible by 8"
    assert verdict.fix == "use one of --tensor-parallel 1, 2, 4"
    three = check_tensor_parallel(qwen("72B"), None, 3)
    assert "64 attention heads are not divisible by 3" in three.obstacles
    assert "8 key/value heads and 3 cards do not divide" in three.obstacles


@pytest.mark.parametrize("size", SIZES)
def test_parts_make_up_the_layer(qwen, size: str) -> None:
    checkpoint = qwen(size)
    for linear in checkpoint.linears:
        out, inputs = split_linear(linear, checkpoint, 2)
        assert out * inputs * 2 == linear.out_features * linear.in_features
        row = linear.name.endswith(("o_proj", "down_proj"))
        assert (inputs < linear.in_features) == row


def test_blocks_are_whole_on_every_card(qwen) -> None:
    """vLLM refuses a card's part of a layer that is not made of whole FP8 blocks."""
    block = variant("fp8", scales="block")
    # 18,944 MLP columns are 37 blocks a card on 4 cards, and 18.5 on 8.
    small, large = qwen("7b"), qwen("72b")
    assert all(check_tensor_parallel(small, block, size).ok for size in (1, 2, 4))
    assert not check_tensor_parallel(small, block, 8).ok
    broken = check_tensor_parallel(large, block, 2)
    assert broken.obstacles == (
        "down_proj: 8,192 x 14,784 a card, not whole blocks of 128 x 128",
        "gate_proj: 14,784 x 8,192 a card, not whole blocks of 128 x 128",
        "up_proj: 14,784 x 8,192 a card, not whole blocks of 128 x 128",
    )
    assert broken.fix == "scales: dynamic (one scale a row)"
    assert check_tensor_parallel(large, variant("fp8"), 2).ok
