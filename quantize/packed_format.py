"""The layout of AutoAWQ's GEMM format and of GPTQ's: tensors, shapes, bytes and configuration.

The size estimate and the verification of what was saved read the same description.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from qkit.quantize.checkpoint import Linear
from qkit.quantize.methods import is_symmetric, scheme_of
from qkit.quantize.schemes import BF16_BYTES, INT32_BITS
from qkit.recipe import Variant


@dataclass(frozen=True)
class PackedFormat:
    """AutoAWQ's GEMM format ("awq") or GPTQ's ("gptq") for one bit width and group size.

    Both keep a layer as `qweight`, `qzeros` and `scales`; AWQ packs its weights along the outputs,
    GPTQ along the inputs. GPTQ adds `g_idx`, the group of every input.

    Attributes:
        method: "awq" or "gptq".
        bits: Bits of one weight.
        group_size: Inputs that share a scale; None for all of a row.
    """

    method: str
    bits: int
    group_size: int | None

    def shapes(self, layer: Linear) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a layer's tensors, by suffix."""
        per_word = INT32_BITS // self.bits
        outputs, inputs = layer.out_features, layer.in_features
        groups = inputs // (self.group_size or inputs)
        awq = self.method == "awq"
        shapes: dict[str, tuple[int, ...]] = {
            "qweight": (inputs, outputs // per_word) if awq else (inputs // per_word, outputs),
            "qzeros": (groups, outputs // per_word),
            "scales": (groups, outputs),
        }
        return shapes if awq else {**shapes, "g_idx": (inputs,)}

    def layer_bytes(self, layer: Linear) -> int:
        """Return the bytes of a layer, bias left out: 32-bit words and 16-bit scales."""
        sizes = {suffix: math.prod(shape) for suffix, shape in self.shapes(layer).items()}
        return sum(
            size * (BF16_BYTES if suffix == "scales" else INT32_BITS // 8)
            for suffix, size in sizes.items()
        )

    def config(self, variant: Variant) -> dict[str, Any]:
        """Return what config.json's `quantization_config` must say."""
        general = {
            "quant_method": self.method,
            "bits": self.bits,
            "group_size": self.group_size or -1,
        }
        if self.method == "awq":
            return {**general, "zero_point": not is_symmetric(variant), "version": "gemm"}
        return {**general, "sym": is_symmetric(variant), "desc_act": False}


def packed_format_of(variant: Variant) -> PackedFormat:
    """Return the format of a variant whose backend writes AutoAWQ's or GPTQ's."""
    weights = scheme_of(variant).weights
    return PackedFormat(variant.method, weights.num_bits, weights.group_size)
