"""The arithmetic of sizes and lower bounds, against published figures and by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fakes.checkpoints import TinyQwen2, bf16, write_safetensors, write_variant
from fakes.qwen_configs import SIZES, config_folder

from qkit.quantize.checkpoint import Checkpoint, describe_config, inspect_checkpoint, split_bytes
from qkit.quantize.devices import Device, find_device
from qkit.quantize.estimate import (
    card_bytes,
    disk_bytes,
    kv_bytes_per_token,
    memory_bytes,
    parameter_count,
    read_bytes_per_step,
    reserve_bytes,
    serving,
    tpot_floor_s,
    weight_bytes,
)
from qkit.recipe import METHODS, Calibration, Variant

# Parameters in billions: the model cards, https://huggingface.co/Qwen/Qwen2.5-7B-Instruct and so
# on. Bytes: `metadata.total_size` of each model.safetensors.index.json; the two one-file models'
# (0.5B, 1.5B) are their parameters twice, the file being some KB of header longer.
PUBLISHED = {
    "0.5B": (0.49, 988_065_536),
    "1.5B": (1.54, 3_087_428_608),
    "3B": (3.09, 6_171_877_376),
    "7B": (7.61, 15_231_233_024),
    "14B": (14.7, 29_540_067_328),
    "32B": (32.5, 65_527_752_704),
    "72B": (72.7, 145_412_407_296),
}
# 2 x layers x key/value heads x head size x 2 bytes, from the same configs by hand.
KV_BYTES = {
    "0.5B": 2 * 24 * 2 * 64 * 2,
    "1.5B": 2 * 28 * 2 * 128 * 2,
    "3B": 2 * 36 * 2 * 128 * 2,
    "7B": 2 * 28 * 4 * 128 * 2,
    "14B": 2 * 48 * 8 * 128 * 2,
    "32B": 2 * 64 * 8 * 128 * 2,
    "72B": 2 * 80 * 8 * 128 * 2,
}


@pytest.fixture
def qwen(tmp_path: Path):
    """Return a function from a size to the checkpoint its config describes."""
    return lambda size: describe_config(config_folder(tmp_path, size))


def variant(method: str, **settings: object) -> Variant:
    return Variant.model_validate({"method": method, **settings})


@pytest.mark.parametrize("size", SIZES)
def test_parameters_and_bytes_are_the_published_ones(qwen, size: str) -> None:
    billions, published_bytes = PUBLISHED[size]
    checkpoint = qwen(size)
    # Cards round differently: 14.77 is called 14.7, 32.76 is called 32.5.
    assert parameter_count(checkpoint) / 1e9 == pytest.approx(billions, rel=0.01)
    assert checkpoint.weight_bytes == published_bytes
    assert weight_bytes(checkpoint, None).total == published_bytes
    assert kv_bytes_per_token(checkpoint) == KV_BYTES[size]


def test_4_bit_bytes_are_those_of_the_published_repository(qwen) -> None:
    """AutoAWQ's GEMM format has another layout and the same bytes: weights, zeros, scales."""
    # Files of https://huggingface.co/Qwen/Qwen2.5-7B-Instruct-AWQ: 4.00 GB and 1.57 GB.
    predicted = weight_bytes(qwen("7B"), variant("awq"))
    assert predicted.total == pytest.approx(5.57e9, rel=0.002)
    # Embeddings and head, both 152,064 x 3,584 in 16 bits, are most of what stays.
    assert predicted.unquantized == pytest.approx(2 * 152_064 * 3_584 * 2, rel=0.001)


@pytest.mark.parametrize("size", SIZES)
def test_8_bit_layers_take_half_and_the_rest_stays(qwen, size: str) -> None:
    checkpoint = qwen(size)
    eight, four = (
        weight_bytes(checkpoint, variant("fp8")),
        weight_bytes(checkpoint, variant("gptq")),
    )
    assert eight.unquantized == four.unquantized
    linear_bytes = checkpoint.weight_bytes - eight.unquantized
    assert eight.quantized == pytest.approx(linear_bytes / 2, rel=0.002)
    # 4.125 bits: 4 and a 16-bit scale for 128 weights.
    assert four.quantized == pytest.approx(linear_bytes * 4.125 / 16, rel=1e-4)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("tied", [True, False])
def test_the_prediction_is_what_a_stored_variant_takes(
    tmp_path: Path, method: str, tied: bool
) -> None:
    source = TinyQwen2(hidden=128, intermediate=384, tied=tied).write(tmp_path / "model")
    made = variant(method)
    stored = split_bytes(inspect_checkpoint(write_variant(source, tmp_path / "v", made)))
    predicted = weight_bytes(inspect_checkpoint(source), made)
    assert (predicted.quantized, predicted.unquantized) == stored


def test_ignored_layers_stay_in_16_bits(qwen) -> None:
    checkpoint = qwen("0.5B")
    all_layers = weight_bytes(checkpoint, variant("fp8"))
    without = weight_bytes(checkpoint, variant("fp8", ignore=["lm_head", "re:.*down_proj$"]))
    down = 24 * 896 * 4864
    assert without.unquantized - all_layers.unquantized == 2 * down
    assert all_layers.quantized - without.quantized == down + 24 * 896 * 2


def test_a_head_beside_tied_embeddings_is_not_counted_in_a_variant(tmp_path: Path) -> None:
    model = TinyQwen2(hidden=128)
    folder = model.write(tmp_path / "model")
    plain = inspect_checkpoint(folder)
    write_safetensors(
        folder / "model.safetensors",
        {**model.tensors(), "lm_head.weight": bf16(np.zeros((320, 128)))},
    )
    redundant = inspect_checkpoint(folder)
    assert redundant.weight_bytes - plain.weight_bytes == 320 * 128 * 2
    assert weight_bytes(redundant, variant("fp8")) == weight_bytes(plain, variant("fp8"))
    assert parameter_count(redundant) == parameter_count(plain)
    assert card_bytes(redundant, None) == card_bytes(plain, None)


# ------------------------------------------------------------------------------- on several cards


@pytest.mark.parametrize("method", [None, *METHODS])
def test_one_card_holds_everything(qwen, method: str | None) -> None:
    checkpoint = qwen("7B")
    made = variant(method) if method else None
    assert card_bytes(checkpoint, made) == weight_bytes(checkpoint, made).total


@pytest.mark.parametrize(("size", "cards"), [("7B", 4), ("72B", 8), ("1.5B", 2)])
def test_cards_share_the_weights(qwen, size: str, cards: int) -> None:
    checkpoint = qwen(size)
    part = card_bytes(checkpoint, variant("fp8"), tensor_parallel=cards)
    # Norms, biases and the scales of row-split layers are on every card.
    assert part == pytest.approx(weight_bytes(checkpoint, variant("fp8")).total / cards, rel=0.004)


def test_key_value_heads_are_split_and_then_repeated(qwen) -> None:
    checkpoint = qwen("1.5B")  # two key/value heads
    per_token = [kv_bytes_per_token(checkpoint, tensor_parallel=n) for n in (1, 2, 4)]
    assert per_token == [28_672, 14_336, 14_336]
    four = card_bytes(checkpoint, None, tensor_parallel=4)
    assert four > card_bytes(checkpoint, None) / 4


# --------------------------------------------------------------------------------- lower bounds


def test_an_input_embedding_of_its_own_is_not_read_for_every_token(qwen) -> None:
    untied, tied = qwen("7B"), qwen("0.5B")
    table = 152_064 * 3_584 * 2
    assert read_bytes_per_step(untied, None) == untied.weight_bytes - table
    assert read_bytes_per_step(tied, None) == tied.weight_bytes


def test_tpot_floor_by_hand(qwen) -> None:
    # 14 GB of weights at 2 TB/s are 7 ms; 10 caches of 1,000 tokens of 50 kB add 0.25 ms.
    floor = tpot_floor_s(14 * 10**9, 50_000, concurrency=10, length=1_000, bandwidth=2e12)
    assert floor == pytest.approx(7.25e-3)
    checkpoint, card = qwen("7B"), find_device("A800-80")
    figures = serving(
        checkpoint,
        None,
        card,
        tensor_parallel=1,
        length=1000,
        concurrency=16,
        gpu_memory_utilization=0.9,
    )
    read = 15_231_233_024 - 152_064 * 3_584 * 2
    assert figures.tpot_floor_s == pytest.approx((read + 1000 * 57_344) / 2039e9)
    assert figures.tpot_floor_loaded_s == pytest.approx((read + 16_000 * 57_344) / 2039e9)


def ask(checkpoint: Checkpoint, device: Device, **changes: object):
    asked = {
        "tensor_parallel": 1,
        "length": 4096,
        "concurrency": 16,
        "gpu_memory_utilization": 0.9,
        **changes,
    }
    return serving(checkpoint, None, device, **asked)  # type: ignore[arg-type]


def test_what_fits_is_what_weights_and_reserve_leave(qwen) -> None:
    checkpoint, card = qwen("7B"), find_device("A100-80")
    figures = ask(checkpoint, card)
    room = 0.9 * 80e9 - 15_231_233_024 - figures.reserve_bytes
    assert figures.kv_tokens == pytest.approx(room / 57_344, rel=1e-3)
    assert figures.kv_tokens % 16 == 0
    assert figures.requests == figures.kv_tokens // 4096
    assert figures.fits
    # A request of 17 tokens takes two blocks of 16.
    assert ask(checkpoint, card, length=17).requests == figures.kv_tokens // 32


def test_the_reserve_follows_the_step_vllm_takes_on_the_card(qwen) -> None:
    checkpoint = qwen("7B")
    small = reserve_bytes(checkpoint, find_device("A100-80"))
    large = reserve_bytes(checkpoint, find_device("A800-80"))
    per_token = (3 * 18_944 + 4 * 3_584) * 2
    assert large - small == (8192 - 2048) * per_token + 2 * (1024 - 256) * 152_064 * 4
    fewer = reserve_bytes(checkpoint, find_device("A800-80"), max_num_seqs=64)
    assert large - fewer == 2 * (1024 - 64) * 152_064 * 4


def test_what_does_not_fit_has_no_room_and_no_floor(qwen) -> None:
    figures = ask(qwen("72B"), find_device("A800-80"))
    assert (figures.kv_tokens, figures.requests, figures.fits) == (0, 0, False)
    assert figures.tpot_floor_s is None
    split = ask(qwen("32B"), find_device("A800-40"), tensor_parallel=4)
    assert split.fits
    assert split.tpot_floor_s is not None


def test_a_load_that_does_not_fit_has_no_floor(qwen) -> None:
    figures = ask(qwen("14B"), find_device("A800-40"), length=16_384, concurrency=16)
    assert 0 < figures.requests < 16
    assert figures.tpot_floor_s is not None
    assert figures.tpot_floor_loaded_s is None


def test_without_a_bandwidth_there_is_no_floor(qwen) -> None:
    figures = ask(qwen("0.5B"), Device("unknown", 80 * 10**9, None, (12, 0)))
    assert figures.fits
    assert figures.tpot_floor_s is None


# ------------------------------------------------------------------ what quantizing itself takes


def test_disk_counts_weights_and_calibration(qwen) -> None:
    checkpoint = qwen("0.5B")
    data = Calibration(samples=100, seq_len=1000)
    fp8, gptq = (disk_bytes(checkpoint, variant(m), data) for m in ("fp8", "gptq"))
    assert fp8 - weight_bytes(checkpoint, variant("fp8")).total == 20_000_000
    assert gptq - weight_bytes(checkpoint, variant("gptq")).total == 20_000_000 + 800_000


def test_memory_grows_with_what_calibration_holds(qwen) -> None:
    checkpoint = qwen("7B")
    few, many = (
        memory_bytes(checkpoint, variant("gptq"), Calibration(samples=n, seq_len=2048))
        for n in (128, 512)
    )
    assert many - few == 2 * (512 - 128) * 2048 * 3584 * 2
    free = memory_bytes(checkpoint, variant("fp8"), Calibration())
    assert checkpoint.weight_bytes < free < few


def test_an_fp8_cache_halves_the_bytes_of_a_token_and_stores_two_scales_a_layer(qwen) -> None:
    checkpoint = qwen("7b")
    plain, cached = variant("fp8"), variant("fp8", kv_cache="fp8")
    assert 2 * kv_bytes_per_token(checkpoint, cached) == kv_bytes_per_token(checkpoint, plain)
    more = (
        weight_bytes(checkpoint, cached).unquantized - weight_bytes(checkpoint, plain).unquantized
    )
    assert more == 28 * 2 * 2
