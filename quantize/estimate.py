"""Arithmetic of a variant before it is made: bytes, what fits on a card, how fast it can be.

Pure functions of a checkpoint's shapes. Bytes of quantized layers come from `layer_bytes`, which
the verification holds against what was saved; everything about time is a lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from qkit.quantize.backends import BACKENDS
from qkit.quantize.checkpoint import (
    EMBEDDINGS,
    HEAD_WEIGHT,
    Checkpoint,
    Linear,
    split_bytes,
)
from qkit.quantize.compatibility import kv_heads_per_card, split_linear
from qkit.quantize.devices import Device
from qkit.quantize.methods import needs_calibration, scheme_of
from qkit.quantize.packed_format import packed_format_of
from qkit.quantize.safetensors_header import DTYPE_BITS
from qkit.quantize.schemes import BF16_BYTES, is_ignored, layer_bytes
from qkit.recipe import Calibration, Variant

#: Tokens of a KV-cache block on CUDA; the cache holds whole blocks.
BLOCK_TOKENS = 16
#: CUDA context, communication buffers, attention workspace and CUDA graphs.
FIXED_RESERVE_BYTES = int(1.5 * 2**30)
#: vLLM's default step of its API server, as (tokens, sequences): on large cards that are not an
#: A100, and on all others (`EngineArgs.get_batch_defaults`).
LARGE_CARD_BYTES = 70 * 2**30
LARGE_CARD_STEP = (8192, 1024)
STEP = (2048, 256)
FP32_BYTES = 4
#: Logits of a step exist twice while a token is sampled.
LOGIT_COPIES = 2
#: Python, torch and the quantizer's libraries, as measured on a model of 5 MB.
LIBRARIES_BYTES = 6 * 10**8
#: Tokenizer, configs and licence beside the weights; Qwen2.5's take 11 MB.
SIDE_FILES_BYTES = 2 * 10**7
#: A token id of the calibration file as JSON: up to six digits, comma and space.
CALIBRATION_BYTES_PER_TOKEN = 8


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of a checkpoint's weights as stored.

    Attributes:
        quantized: Quantized layers: weights, scales, zero points.
        unquantized: Embeddings, head, norms, biases and ignored layers.
    """

    quantized: int
    unquantized: int

    @property
    def total(self) -> int:
        """All bytes."""
        return self.quantized + self.unquantized


@dataclass(frozen=True)
class Serving:
    """What a variant does on a number of equal cards, by arithmetic.

    Attributes:
        weight_bytes: Weights on one card.
        reserve_bytes: Assumed for activations, CUDA graphs and the context on one card.
        kv_tokens: Tokens the KV cache holds, in whole blocks; negative room gives 0.
        requests: Requests of the asked length that fit at once.
        tpot_floor_s: Lower bound of the time per output token of one request alone; None where the
            card's bandwidth is not known.
        tpot_floor_loaded_s: The same at the asked concurrency; None too where so many do not fit.
    """

    weight_bytes: int
    reserve_bytes: int
    kv_tokens: int
    requests: int
    tpot_floor_s: float | None
    tpot_floor_loaded_s: float | None

    @property
    def fits(self) -> bool:
        """Whether at least one request of the asked length can be served."""
        return self.requests > 0


def parameter_count(checkpoint: Checkpoint) -> int:
    """Return the model's parameters, a head beside tied embeddings not counted."""
    return sum(
        math.prod(tensor.shape)
        for name, tensor in checkpoint.tensors.items()
        if not _is_dropped(name, checkpoint)
    )


def weight_bytes(checkpoint: Checkpoint, variant: Variant | None) -> WeightBytes:
    """Return the bytes a variant's weights will take on disk; None is the source itself.

    As `split_bytes` counts them in what was saved, in the format of the variant's backend: biases
    are not quantized, a head stored beside tied embeddings is not kept, and KV-cache scales are two
    numbers a layer.
    """
    if variant is None:
        quantized, rest = split_bytes(checkpoint)
        return WeightBytes(quantized, rest)
    targets = list(_targets(checkpoint, variant))
    replaced = {f"{linear.name}.weight" for linear in targets}
    return WeightBytes(
        sum(stored_bytes(variant, linear) for linear in targets),
        sum(
            tensor.bytes
            for name, tensor in checkpoint.tensors.items()
            if name not in replaced and not _is_dropped(name, checkpoint)
        )
        + (2 * checkpoint.num_layers * BF16_BYTES if variant.kv_cache else 0),
    )


def stored_bytes(variant: Variant, linear: Linear) -> int:
    """Return the bytes of one quantized layer in the format its backend writes, bias left out."""
    if BACKENDS[variant.backend].storage == "packed":
        return packed_format_of(variant).layer_bytes(linear)
    return layer_bytes(scheme_of(variant), linear.out_features, linear.in_features)


def kv_bytes_per_token(
    checkpoint: Checkpoint, variant: Variant | None = None, *, tensor_parallel: int = 1
) -> int:
    """Return the KV-cache bytes of one token on one card.

    2 (key and value) x layers x key/value heads of the card x head size x 2 bytes, or 1 byte where
    the variant has FP8 scales for its cache.
    """
    heads = kv_heads_per_card(checkpoint, tensor_parallel)
    size = 1 if variant is not None and variant.kv_cache else BF16_BYTES
    return 2 * checkpoint.num_layers * heads * checkpoint.head_dim * size


def card_bytes(checkpoint: Checkpoint, variant: Variant | None, *, tensor_parallel: int = 1) -> int:
    """Return the bytes of weights one card holds.

    Layers are split as vLLM splits them, embeddings and head by vocabulary; norms and biases, a
    thousandth of the whole, are counted in full on every card.
    """
    return sum(size for _, size in _card_tensors(checkpoint, variant, tensor_parallel))


def read_bytes_per_step(
    checkpoint: Checkpoint, variant: Variant | None, *, tensor_parallel: int = 1
) -> int:
    """Return the bytes of weights one card reads to make one token for every running request.

    Everything but an input embedding table of its own, of which a token needs one row. Tied
    embeddings are read as the output head.
    """
    return sum(
        size
        for name, size in _card_tensors(checkpoint, variant, tensor_parallel)
        if name != EMBEDDINGS or checkpoint.tied
    )


def reserve_bytes(
    checkpoint: Checkpoint,
    device: Device,
    *,
    tensor_parallel: int = 1,
    max_num_seqs: int | None = None,
) -> int:
    """Return what is assumed to be needed beside weights and KV cache on one card.

    A step's tokens hold the MLP's two inputs to its product and the product (3 x intermediate /
    cards) and four hidden states in 16 bits; the logits of its sequences are float32, twice; the
    rest is fixed. vLLM measures the real figure when it starts.
    """
    large = device.memory_bytes >= LARGE_CARD_BYTES and "A100" not in device.name
    tokens, sequences = LARGE_CARD_STEP if large else STEP
    per_token = 3 * checkpoint.intermediate_size // tensor_parallel + 4 * checkpoint.hidden_size
    activations = tokens * per_token * BF16_BYTES
    logits = LOGIT_COPIES * (max_num_seqs or sequences) * checkpoint.vocab_size * FP32_BYTES
    return FIXED_RESERVE_BYTES + activations + logits


def tpot_floor_s(
    step_bytes: int, kv_bytes: int, *, concurrency: int, length: int, bandwidth: float
) -> float:
    """Return the least time between two tokens of a request, in seconds.

    (weight bytes read + concurrency x length x KV bytes per token) / memory bandwidth: every step
    reads all weights once and each request's cache of `length` tokens. Arithmetic, communication
    and launch times are left out, so no server that makes one token a step can be faster.

    The memory roof of Williams, Waterman and Patterson, "Roofline" (CACM 52(4), 2009), applied to
    decoding as in Pope et al., "Efficiently Scaling Transformer Inference" (arXiv:2211.05102,
    section 2).

    Args:
        step_bytes: Weights one card reads in a step.
        kv_bytes: KV-cache bytes of a token on one card.
        concurrency: Requests decoding at once.
        length: Tokens in each request's cache.
        bandwidth: Bytes a second of one card.
    """
    return (step_bytes + concurrency * length * kv_bytes) / bandwidth


def serving(
    checkpoint: Checkpoint,
    variant: Variant | None,
    device: Device,
    *,
    tensor_parallel: int,
    length: int,
    concurrency: int,
    gpu_memory_utilization: float,
    max_num_seqs: int | None = None,
) -> Serving:
    """Return what fits and how fast it can be at most, for equal cards.

    KV room of a card = memory x `gpu_memory_utilization` - weights - reserve.
    """
    weights = card_bytes(checkpoint, variant, tensor_parallel=tensor_parallel)
    reserve = reserve_bytes(
        checkpoint, device, tensor_parallel=tensor_parallel, max_num_seqs=max_num_seqs
    )
    kv_bytes = kv_bytes_per_token(checkpoint, variant, tensor_parallel=tensor_parallel)
    room = int(device.memory_bytes * gpu_memory_utilization) - weights - reserve
    blocks = max(0, room) // (kv_bytes * BLOCK_TOKENS)
    requests = blocks // -(-length // BLOCK_TOKENS)

    def floor(running: int) -> float | None:
        if device.bandwidth is None or running > requests:
            return None
        step = read_bytes_per_step(checkpoint, variant, tensor_parallel=tensor_parallel)
        return tpot_floor_s(
            step, kv_bytes, concurrency=running, length=length, bandwidth=device.bandwidth
        )

    return Serving(
        weight_bytes=weights,
        reserve_bytes=reserve,
        kv_tokens=blocks * BLOCK_TOKENS,
        requests=requests,
        tpot_floor_s=floor(1),
        tpot_floor_loaded_s=floor(concurrency),
    )


def disk_bytes(checkpoint: Checkpoint, variant: Variant, calibration: Calibration) -> int:
    """Return what making a variant writes: weights, the files beside them, calibration tokens."""
    tokens = calibration.samples * calibration.seq_len if needs_calibration(variant) else 0
    return (
        weight_bytes(checkpoint, variant).total
        + SIDE_FILES_BYTES
        + tokens * CALIBRATION_BYTES_PER_TOKEN
    )


def memory_bytes(checkpoint: Checkpoint, variant: Variant, calibration: Calibration) -> int:
    """Return about what the quantizer needs in the machine's memory at its peak.

    The source, the compressed weights beside it while they are saved, and the libraries. With
    calibration also the hidden states of all samples between two layers (in and out, 16 bits) and,
    for GPTQ, the float32 Hessian of the widest layer with its inverse. A rough figure: it decides
    about a warning, not about a refusal.
    """
    total = LIBRARIES_BYTES + checkpoint.weight_bytes + weight_bytes(checkpoint, variant).quantized
    if not needs_calibration(variant):
        return total
    tokens = calibration.samples * calibration.seq_len
    states = 2 * tokens * checkpoint.hidden_size * BF16_BYTES
    widest = max((linear.in_features for linear in _targets(checkpoint, variant)), default=0)
    return total + states + 2 * widest**2 * FP32_BYTES


def _targets(checkpoint: Checkpoint, variant: Variant) -> Iterator[Linear]:
    """Yield the layers a variant quantizes: the stored ones it does not ignore."""
    for linear in checkpoint.linears:
        name = f"{linear.name}.weight"
        if not is_ignored(linear.name, variant.ignore) and not _is_dropped(name, checkpoint):
            yield linear


def _is_dropped(name: str, checkpoint: Checkpoint) -> bool:
    return name == HEAD_WEIGHT and checkpoint.redundant_head is not None


def _card_tensors(
    checkpoint: Checkpoint, variant: Variant | None, size: int
) -> Iterator[tuple[str, int]]:
    """Yield (tensor or layer, bytes) of one card's part of the weights."""
    quantized = set() if variant is None else {lin.name for lin in _targets(checkpoint, variant)}
    linears = {linear.name: linear for linear in checkpoint.linears}
    for name, tensor in checkpoint.tensors.items():
        layer = name.removesuffix(".weight")
        if _is_dropped(name, checkpoint):
            continue
        if name in {EMBEDDINGS, HEAD_WEIGHT} and layer not in quantized:
            yield name, tensor.bytes // size
        elif name.endswith(".weight") and layer in linears:
            out, inputs = split_linear(linears[layer], checkpoint, size)
            if variant is not None and layer in quantized:
                yield name, stored_bytes(variant, Linear(layer, out, inputs))
            else:
                yield name, out * inputs * DTYPE_BITS[tensor.dtype] // 8
        else:
            yield name, tensor.bytes
