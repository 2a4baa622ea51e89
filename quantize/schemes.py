"""What a quantized Linear layer looks like: number formats, scales and bytes.

One description of a scheme serves the backend (which asks for it), the verification (which
compares it with what was saved) and the size estimate. Standard library only: workers import it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

#: Methods in the order of the table; every one is made by `backend_llmcompressor`.
METHODS = ("awq", "gptq", "fp8", "smoothquant", "rtn")
#: Methods that write 4-bit weights in groups.
GROUPED_METHODS = ("awq", "gptq", "rtn")
#: Methods whose weights may have 8 bits instead, with one scale a row.
EIGHT_BIT_METHODS = ("gptq", "rtn")
GROUP_SIZES = (128, 64, 32)
#: Rows and columns of a block of block-wise FP8; inputs are scaled in groups of as many columns.
FP8_BLOCK = (128, 128)
BF16_BYTES = 2
INT32_BITS = 32


@dataclass(frozen=True)
class WeightFormat:
    """How a Linear layer's weight is stored.

    Attributes:
        num_bits: Bits of one weight.
        type: "int" or "float" (E4M3 at 8 bits).
        strategy: "group" (one scale per `group_size` inputs of a row), "channel" (one a row),
            "tensor" (one in all) or "block" (one per `block_structure`).
        group_size: Inputs that share a scale, for "group".
        symmetric: Whether there is no zero point.
        actorder: Order in which GPTQ quantized the columns, "static" or None.
        block_structure: Rows and columns that share a scale, for "block".
    """

    num_bits: int
    type: Literal["int", "float"]
    strategy: Literal["group", "channel", "tensor", "block"]
    group_size: int | None
    symmetric: bool
    actorder: str | None = None
    block_structure: tuple[int, int] | None = None


@dataclass(frozen=True)
class ActivationFormat:
    """How a Linear layer's input is quantized while serving.

    Attributes:
        num_bits: Bits of one value.
        type: "int" or "float" (E4M3).
        strategy: "token" (one scale a token), "group" (one per `group_size` values of a token) or
            "tensor" (one in all).
        symmetric: Whether there is no zero point.
        dynamic: Whether scales are measured while serving; otherwise calibrated and stored.
        group_size: Values that share a scale, for "group".
    """

    num_bits: int
    type: Literal["int", "float"]
    strategy: Literal["token", "tensor", "group"] = "token"
    symmetric: bool = True
    dynamic: bool = True
    group_size: int | None = None


@dataclass(frozen=True)
class Scheme:
    """Weights and inputs of every quantized Linear layer of a variant."""

    weights: WeightFormat
    activations: ActivationFormat | None

    @property
    def format(self) -> str:
        """Name of the compressed-tensors storage format."""
        if self.weights.type == "float":
            return "float-quantized"
        return "int-quantized" if self.activations else "pack-quantized"

    @property
    def packed(self) -> bool:
        """Whether weights are packed into 32-bit words."""
        return self.format == "pack-quantized"

    @property
    def static_inputs(self) -> bool:
        """Whether a calibrated scale of its inputs is stored with every layer."""
        return self.activations is not None and not self.activations.dynamic


@dataclass(frozen=True)
class KvCacheFormat:
    """How keys and values are stored while serving: E4M3, one calibrated scale a layer each."""

    num_bits: int = 8
    type: Literal["float"] = "float"
    strategy: Literal["tensor"] = "tensor"
    symmetric: bool = True
    dynamic: bool = False


KV_CACHE_FP8 = KvCacheFormat()


def scheme_for(
    method: str,
    *,
    group_size: int,
    symmetric: bool,
    actorder: str | None,
    weight_bits: int = 4,
    scales: str = "dynamic",
    rounding: str = "gptq",
) -> Scheme:
    """Return the scheme of a method.

    AWQ, GPTQ and round-to-nearest write W4A16 in groups, the last two also W8A16 per channel. FP8
    writes E4M3 weights per channel with dynamic inputs per token, per tensor with static inputs, or
    in blocks with dynamic inputs in groups. SmoothQuant writes INT8 weights per channel with
    dynamic inputs per token or static ones. The activation order applies where GPTQ runs.

    Raises:
        ValueError: The method is not one of `METHODS`.
    """
    if method == "awq":
        return Scheme(WeightFormat(4, "int", "group", group_size, symmetric), None)
    if method in EIGHT_BIT_METHODS:
        order = actorder if method == "gptq" else None
        if weight_bits == 8:
            return Scheme(WeightFormat(8, "int", "channel", None, symmetric, order), None)
        return Scheme(WeightFormat(4, "int", "group", group_size, symmetric, order), None)
    if method == "fp8":
        return _fp8_scheme(scales)
    if method == "smoothquant":
        order = actorder if rounding == "gptq" else None
        static = ActivationFormat(8, "int", "tensor", dynamic=False)
        return Scheme(
            WeightFormat(8, "int", "channel", None, True, order),
            static if scales == "static" else ActivationFormat(8, "int"),
        )
    raise ValueError(f"unknown method {method!r}; known: {', '.join(METHODS)}")


def _fp8_scheme(scales: str) -> Scheme:
    if scales == "static":
        return Scheme(
            WeightFormat(8, "float", "tensor", None, True),
            ActivationFormat(8, "float", "tensor", dynamic=False),
        )
    if scales == "block":
        return Scheme(
            WeightFormat(8, "float", "block", None, True, block_structure=FP8_BLOCK),
            ActivationFormat(8, "float", "group", group_size=FP8_BLOCK[1]),
        )
    return Scheme(WeightFormat(8, "float", "channel", None, True), ActivationFormat(8, "float"))


def tensor_suffixes(scheme: Scheme) -> frozenset[str]:
    """Return the tensors a quantized layer must have, as suffixes of the layer's name."""
    if not scheme.packed:
        suffixes = {"weight", "weight_scale"}
        return frozenset(suffixes if not scheme.static_inputs else suffixes | {"input_scale"})
    suffixes = {"weight_packed", "weight_scale", "weight_shape"}
    return frozenset(suffixes if scheme.weights.symmetric else suffixes | {"weight_zero_point"})


def layer_bytes(scheme: Scheme, out_features: int, in_features: int) -> int:
    """Return the bytes of one quantized layer as compressed-tensors stores it, bias left out.

    Packed weights take whole 32-bit words along the input axis, zero points along the output
    axis; scales are 16-bit; a packed layer also stores its two-number shape as int64.
    """
    weights = scheme.weights
    if not scheme.packed:
        scales = _weight_scales(weights, out_features, in_features) + scheme.static_inputs
        return out_features * in_features * weights.num_bits // 8 + scales * BF16_BYTES
    per_word = INT32_BITS // weights.num_bits
    groups = in_features // (weights.group_size or in_features)
    size = out_features * _ceil(in_features, per_word) * 4 + out_features * groups * BF16_BYTES + 16
    if not weights.symmetric:
        size += _ceil(out_features, per_word) * groups * 4
    return size


def _weight_scales(weights: WeightFormat, out_features: int, in_features: int) -> int:
    """Return how many scales an unpacked layer's weight has."""
    if weights.strategy == "tensor":
        return 1
    if weights.block_structure is not None:
        rows, columns = weights.block_structure
        return _ceil(out_features, rows) * _ceil(in_features, columns)
    return out_features


def is_ignored(name: str, patterns: Iterable[str]) -> bool:
    """Tell whether a module is left unquantized.

    A pattern is a module's name or `re:` and a regular expression matched from the name's start,
    as compressed-tensors and vLLM read the list.
    """
    return any(
        re.match(pattern.removeprefix("re:"), name) is not None
        if pattern.startswith("re:")
        else pattern == name
        for pattern in patterns
    )


def _ceil(value: int, divisor: int) -> int:
    return -(-value // divisor)
