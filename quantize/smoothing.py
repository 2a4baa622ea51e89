"""The smoothing mappings of AWQ and SmoothQuant for Qwen2: which layers are scaled for which.

A mapping moves a scale from the inputs of some layers into the layer before them. The tables are
those of llm-compressor 0.14 (`AWQ_MAPPING_REGISTRY`, `MAPPINGS_REGISTRY`); AutoAWQ's and
GPTQModel's for Qwen2 are the same. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

from qkit.quantize.checkpoint import Checkpoint
from qkit.quantize.schemes import is_ignored
from qkit.recipe import Variant


@dataclass(frozen=True)
class Mapping:
    """One mapping of a decoder layer.

    Attributes:
        smoothed: What takes the scale, a norm or a Linear layer.
        balanced: Linear layers whose inputs are scaled, as paths within the decoder layer.
    """

    smoothed: str
    balanced: tuple[str, ...]

    def __str__(self) -> str:
        """Return the mapping as short names."""
        names = [name.rpartition(".")[2] for name in (self.smoothed, *self.balanced)]
        return f"{names[0]} → {', '.join(names[1:])}"


_ATTENTION = tuple(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj"))
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
SMOOTHQUANT = (
    Mapping("input_layernorm", _ATTENTION),
    Mapping("post_attention_layernorm", _GATE_UP),
)
V_TO_O = Mapping("self_attn.v_proj", ("self_attn.o_proj",))
AWQ = (
    SMOOTHQUANT[0],
    V_TO_O,
    SMOOTHQUANT[1],
    Mapping("mlp.up_proj", ("mlp.down_proj",)),
)
MAPPINGS: dict[str, tuple[Mapping, ...]] = {"awq": AWQ, "smoothquant": SMOOTHQUANT}


@dataclass(frozen=True)
class Smoothing:
    """The mappings of a variant: those applied, and those skipped with the reason.

    A mapping counts as skipped where it is in every decoder layer.
    """

    applied: tuple[Mapping, ...]
    skipped: tuple[tuple[Mapping, str], ...]


def smoothing_of(checkpoint: Checkpoint, variant: Variant) -> Smoothing | None:
    """Return the mappings a variant's method applies to a model; None for a method without any."""
    if variant.method not in MAPPINGS:
        return None
    applied: list[Mapping] = []
    skipped: list[tuple[Mapping, str]] = []
    for mapping in MAPPINGS[variant.method]:
        if reason := _obstacle(mapping, checkpoint, variant):
            skipped.append((mapping, reason))
        else:
            applied.append(mapping)
    return Smoothing(tuple(applied), tuple(skipped))


def _obstacle(mapping: Mapping, checkpoint: Checkpoint, variant: Variant) -> str | None:
    if mapping == V_TO_O and checkpoint.num_kv_heads != checkpoint.num_heads:
        outputs, inputs = (
            heads * checkpoint.head_dim for heads in (checkpoint.num_kv_heads, checkpoint.num_heads)
        )
        return (
            f"grouped-query attention, v_proj's {outputs:,} outputs are not o_proj's {inputs:,}"
            " inputs"
        )
    layers = (
        f"model.layers.{index}.{name}"
        for index in range(checkpoint.num_layers)
        for name in mapping.balanced
    )
    if all(is_ignored(layer, variant.ignore) for layer in layers):
        return "all its layers are ignored"
    return None
