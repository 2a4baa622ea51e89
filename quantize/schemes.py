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
BF16_BYTES = 2
INT32_BITS = 32


@dataclass(frozen=True)
class WeightFormat:
    """How a Linear layer's weight is stored.

    Attributes:
        num_bits: Bits of one weight.
        type: "int" or "float" (E4M3 at 8 bits).
        strategy: "group" (one scale per `group_size` inputs of a row) or "channel" (one a row).
        group_size: Inputs that share a scale, for "group".
        symmetric: Whether there is no zero point.
        actorder: Order in which GPTQ quantized the columns, "static" or None.
    """

    num_bits: int
    type: Literal["int", "float"]
    strategy: Literal["group", "channel"]
    group_size: int | None
    symmetric: bool
    actorder: str | None = None


@dataclass(frozen=True)
class ActivationFormat:
    """How a Linear layer's input is quantized while serving."""

    num_bits: int
    type: Literal["int", "float"]
    strategy: Literal["token"] = "token"
    symmetric: bool = True
    dynamic: bool = True


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


def scheme_for(
    method: str, *, group_size: int, symmetric: bool, actorder: str | None, weight_bits: int = 4
) -> Scheme:
    """Return the scheme of a method.

    AWQ, GPTQ and round-to-nearest write W4A16 in groups, the last two also W8A16 per channel; FP8
    writes E4M3 weights per channel with dynamic inputs per token; SmoothQuant writes INT8 weights
    per channel with dynamic INT8 inputs per token.
    The activation order applies to the two that run GPTQ.

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
        return Scheme(WeightFormat(8, "float", "channel", None, True), ActivationFormat(8, "float"))
    if method == "smoothquant":
        return Scheme(
            WeightFormat(8, "int", "channel", None, True, actorder), ActivationFormat(8, "int")
        )
    raise ValueError(f"unknown method {method!r}; known: {', '.join(METHODS)}")


def tensor_suffixes(scheme: Scheme) -> frozenset[str]:
    """Return the tensors a quantized layer must have, as suffixes of the layer's name."""
    if not scheme.packed:
        return frozenset({"weight", "weight_scale"})
    suffixes = {"weight_packed", "weight_scale", "weight_shape"}
    return frozenset(suffixes if scheme.weights.symmetric else suffixes | {"weight_zero_point"})


def layer_bytes(scheme: Scheme, out_features: int, in_features: int) -> int:
    """Return the bytes of one quantized layer as compressed-tensors stores it, bias left out.

    Packed weights take whole 32-bit words along the input axis, zero points along the output
    axis; scales are 16-bit; a packed layer also stores its two-number shape as int64.
    """
    weights = scheme.weights
    if not scheme.packed:
        return out_features * in_features * weights.num_bits // 8 + out_features * BF16_BYTES
    per_word = INT32_BITS // weights.num_bits
    groups = in_features // (weights.group_size or in_features)
    size = out_features * _ceil(in_features, per_word) * 4 + out_features * groups * BF16_BYTES + 16
    if not weights.symmetric:
        size += _ceil(out_features, per_word) * groups * 4
    return size


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
