"""Prove that a variant in AutoAWQ's GEMM or in GPTQ's format is what was asked for.

The counterpart of `verify` for the packed formats of AutoAWQ, GPTQModel and AutoGPTQ: config.json,
tensors and shapes of every layer, the order of GPTQ's columns, finite scales, bytes, and the files
of the source. Nothing is loaded into a model, and no torch is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from qkit.quantize.checkpoint import (
    CONFIG_FILE,
    Checkpoint,
    Linear,
    inspect_checkpoint,
    quantized_layers,
)
from qkit.quantize.packed_format import PackedFormat, packed_format_of
from qkit.quantize.safetensors_header import TensorInfo, read_bytes
from qkit.quantize.schemes import is_ignored
from qkit.quantize.source_files import differing_files
from qkit.quantize.verify import (
    VariantSizes,
    all_finite,
    check_bytes,
    check_rest,
    some,
    wrong,
)
from qkit.recipe import Variant

SCALES_DTYPES = ("F16", "BF16")


def verify_packed_variant(path: Path, source: Checkpoint, variant: Variant) -> VariantSizes:
    """Check a saved variant against its source and the recipe.

    Raises:
        MeasurementError: Names the layer, file or setting that is not as it should be.
        InputError: The folder is not a readable checkpoint.
    """
    saved = inspect_checkpoint(path)
    packed = packed_format_of(variant)
    layers = [lin for lin in source.linears if not is_ignored(lin.name, variant.ignore)]
    _check_config(saved, packed.config(variant))
    _check_names(saved, frozenset(layer.name for layer in layers))
    for layer in layers:
        _check_layer(saved, packed, layer)
    parts = {f"{layer.name}.{suffix}" for layer in layers for suffix in packed.shapes(layer)}
    if extra := sorted(saved.tensors.keys() - source.tensors.keys() - parts):
        raise wrong(f"{extra[0]} is there, though the source has no such tensor", path)
    check_rest(saved, source, frozenset(layer.name for layer in layers), biases_in=("F16",))
    if changed := differing_files(source.path, path):
        raise wrong(f"{changed[0]} is not the source's", path)
    return check_bytes(saved, source, {lin.name: packed.layer_bytes(lin) for lin in layers})


def _check_config(saved: Checkpoint, wanted: dict[str, Any]) -> None:
    where = saved.path / CONFIG_FILE
    settings = saved.config.get("quantization_config")
    if not isinstance(settings, dict):
        raise wrong("config.json has no quantization_config", where)
    for key, value in wanted.items():
        found = settings.get(key)
        if (found.lower() if isinstance(found, str) else found) != value:
            raise wrong(f"config.json says {key} {found!r}, asked was {value!r}", where)
    if left := settings.get("modules_to_not_convert") or settings.get("dynamic"):
        raise wrong(f"config.json excepts layers from being quantized: {left!r}", where)


def _check_names(saved: Checkpoint, expected: frozenset[str]) -> None:
    found = frozenset(quantized_layers(saved))
    if missing := sorted(expected - found):
        raise wrong(f"{some(missing)} not quantized in the saved weights", saved.path)
    if extra := sorted(found - expected):
        raise wrong(f"{some(extra)} quantized, though to be left alone", saved.path)


def _check_layer(saved: Checkpoint, packed: PackedFormat, layer: Linear) -> None:
    if f"{layer.name}.weight" in saved.tensors:
        raise wrong(f"{layer.name} has its 16-bit weight still", saved.path)
    for suffix, shape in packed.shapes(layer).items():
        name = f"{layer.name}.{suffix}"
        tensor = saved.tensors.get(name)
        if tensor is None:
            raise wrong(f"{layer.name} has no {suffix}", saved.path)
        dtypes = SCALES_DTYPES if suffix == "scales" else ("I32",)
        if tensor.shape != shape or tensor.dtype not in dtypes:
            raise wrong(
                f"{name} is {tensor.dtype} {list(tensor.shape)}, expected was"
                f" {' or '.join(dtypes)} {list(shape)}",
                tensor.file,
            )
        if suffix == "scales" and not all_finite(tensor):
            raise wrong(
                f"{name} has values that are not finite",
                tensor.file,
                detail="a layer whose scale is infinite or not a number answers nonsense",
            )
        if suffix == "g_idx":
            _check_order(name, tensor, packed.group_size or layer.in_features)


def _check_order(name: str, tensor: TensorInfo, group_size: int) -> None:
    """Check that every input is in the group of its place; servers go by that without desc_act."""
    found = np.frombuffer(read_bytes(tensor), "<i4")
    if not np.array_equal(found, np.arange(len(found)) // group_size):
        raise wrong(
            f"{name} reorders the inputs, and config.json says that nothing is reordered",
            tensor.file,
        )
