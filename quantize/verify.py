"""Prove that a saved variant is what was asked for, from its files alone.

config.json must say the scheme asked for, every layer that should be quantized must be stored so
and no other, scales must be finite, the weights must take the bytes predicted and fewer than the
source's, and the source's tokenizer files must be there unchanged. Nothing is loaded into a model,
and no torch is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qkit.errors import MeasurementError
from qkit.quantize.checkpoint import (
    CONFIG_FILE,
    EMBEDDINGS,
    HEAD_WEIGHT,
    Checkpoint,
    bytes_by_layer,
    inspect_checkpoint,
    quantized_layers,
    split_bytes,
)
from qkit.quantize.methods import scheme_of
from qkit.quantize.safetensors_header import TensorInfo, read_bytes, same_data
from qkit.quantize.schemes import (
    KV_CACHE_FP8,
    ActivationFormat,
    KvCacheFormat,
    Scheme,
    WeightFormat,
    is_ignored,
    layer_bytes,
    tensor_suffixes,
)
from qkit.quantize.source_files import differing_files
from qkit.recipe import Variant

#: compressed-tensors writes "weight" for what it also calls "static".
_ACTORDER_ALIASES = {"weight": "static"}
_FIX = (
    "the backend did not write what was asked for: run the step again, and look at the worker log"
)
#: Calibrated scales of an attention module's keys and values.
KV_CACHE_SCALES = ("k_scale", "v_scale")
_SCALES = ("weight_scale", "input_scale", *KV_CACHE_SCALES)
#: Largest difference of a quantized layer's bytes from the prediction.
TOLERANCE = 0.02
_SHOWN = 3


@dataclass(frozen=True)
class VariantSizes:
    """Bytes of a variant's weights.

    Attributes:
        quantized_bytes: Quantized layers: weights, scales, zero points.
        unquantized_bytes: Embeddings, head, norms and biases.
        weight_bytes: Both.
        predicted_bytes: What the scheme's arithmetic gives for the quantized layers.
    """

    quantized_bytes: int
    unquantized_bytes: int
    weight_bytes: int
    predicted_bytes: int


def verify_variant(path: Path, source: Checkpoint, variant: Variant) -> VariantSizes:
    """Check a saved variant against its source and the recipe.

    Raises:
        MeasurementError: Names the layer, file or setting that is not as it should be.
        InputError: The folder is not a readable checkpoint.
    """
    saved = inspect_checkpoint(path)
    scheme = scheme_of(variant)
    expected = {
        linear.name: layer_bytes(scheme, linear.out_features, linear.in_features)
        for linear in source.linears
        if not is_ignored(linear.name, variant.ignore)
    }
    _check_config(saved, scheme, variant)
    _check_layers(saved, scheme, frozenset(expected))
    _check_kv_cache(saved, variant)
    _check_scales(saved)
    check_rest(saved, source, frozenset(expected))
    if changed := differing_files(source.path, path):
        raise wrong(f"{changed[0]} is not the source's", path)
    return check_bytes(saved, source, expected)


def wrong(what: str, where: Path, detail: str | None = None) -> MeasurementError:
    """Return the error for a variant that is not as it should be."""
    return MeasurementError(
        f"the variant is not what was asked for: {what}", where=where, detail=detail, fix=_FIX
    )


def _check_config(saved: Checkpoint, scheme: Scheme, variant: Variant) -> None:
    where = saved.path / CONFIG_FILE
    settings = saved.config.get("quantization_config")
    if not isinstance(settings, dict):
        raise wrong("config.json has no quantization_config", where)
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise wrong("quantization_config does not have one group of layers", where)
    group = next(iter(groups.values()))
    _compare("quant_method", settings.get("quant_method"), "compressed-tensors", where)
    _compare("format", settings.get("format"), scheme.format, where)
    _compare("targets", group.get("targets"), ["Linear"], where)
    _compare_part("weights", group.get("weights"), scheme.weights, where)
    _compare_part("input_activations", group.get("input_activations"), scheme.activations, where)
    cache = KV_CACHE_FP8 if variant.kv_cache else None
    _compare_part("kv_cache_scheme", settings.get("kv_cache_scheme"), cache, where)
    ignored = tuple(settings.get("ignore") or ())
    for name in saved.linear_names:
        if is_ignored(name, variant.ignore) and not is_ignored(name, ignored):
            raise wrong(f"config.json does not list {name} among the ignored layers", where)


def _compare_part(
    name: str,
    found: Any,
    wanted: WeightFormat | ActivationFormat | KvCacheFormat | None,
    where: Path,
) -> None:
    """Compare one part of the configuration, whose keys are the fields of ours."""
    if wanted is None or not isinstance(found, dict):
        _compare(name, found, None if wanted is None else asdict(wanted), where)
        return
    for key, value in asdict(wanted).items():
        there = found.get(key)
        if key == "actorder":
            there = _ACTORDER_ALIASES.get(str(there), there)
        _compare(f"{name}.{key}", there, list(value) if isinstance(value, tuple) else value, where)


def _compare(key: str, found: Any, wanted: Any, where: Path) -> None:
    if found != wanted:
        raise wrong(f"config.json says {key} {found!r}, asked was {wanted!r}", where)


def _check_layers(saved: Checkpoint, scheme: Scheme, expected: frozenset[str]) -> None:
    found = frozenset(quantized_layers(saved))
    if missing := sorted(expected - found):
        raise wrong(f"{some(missing)} not quantized in the saved weights", saved.path)
    if extra := sorted(found - expected):
        raise wrong(f"{some(extra)} quantized, though to be left alone", saved.path)
    for layer in sorted(expected):
        for suffix in sorted(tensor_suffixes(scheme)):
            if f"{layer}.{suffix}" not in saved.tensors:
                raise wrong(f"{layer} has no {suffix}", saved.path)


def _check_kv_cache(saved: Checkpoint, variant: Variant) -> None:
    """Check that every layer has a scale for its keys and values, or that none has."""
    wanted = {
        f"model.layers.{layer}.self_attn.{scale}"
        for layer in range(saved.num_layers if variant.kv_cache else 0)
        for scale in KV_CACHE_SCALES
    }
    found = {name for name in saved.tensors if name.endswith(KV_CACHE_SCALES)}
    if missing := sorted(wanted - found):
        raise wrong(f"{missing[0]} is missing", saved.path)
    if extra := sorted(found - wanted):
        raise wrong(f"{extra[0]} is there, though the cache was to stay in 16 bits", saved.path)


def _check_scales(saved: Checkpoint) -> None:
    for name, tensor in sorted(saved.tensors.items()):
        if name.endswith(_SCALES) and not all_finite(tensor):
            raise wrong(
                f"{name} has values that are not finite",
                tensor.file,
                detail="a layer whose scale is infinite or not a number answers nonsense",
            )


def all_finite(tensor: TensorInfo) -> bool:
    """Tell whether a stored 16- to 64-bit float tensor has no infinite value and no NaN."""
    data = read_bytes(tensor)
    if tensor.dtype == "BF16":
        # The upper half of a float32; numpy has no bfloat16 of its own.
        values = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    else:
        values = np.frombuffer(data, {"F16": "<f2", "F32": "<f4", "F64": "<f8"}[tensor.dtype])
    return bool(np.isfinite(values).all())


def check_rest(
    saved: Checkpoint,
    source: Checkpoint,
    quantized: frozenset[str],
    *,
    biases_in: tuple[str, ...] = (),
) -> None:
    """Check that everything that is not quantized is there, in the source's shape and dtype.

    Embeddings and head must be the source's byte for byte; norms, biases and layers left alone may
    have been smoothed.

    Args:
        saved: The variant.
        source: What it was made from.
        quantized: Names of the quantized layers.
        biases_in: Further dtypes the biases of these layers may have.
    """
    weights = {f"{layer}.weight" for layer in quantized}
    biases = {f"{layer}.bias" for layer in quantized}
    for name, tensor in source.tensors.items():
        if name in weights or (name == HEAD_WEIGHT and saved.tied):
            continue
        kept: Mapping[str, TensorInfo] = saved.tensors
        if name not in kept:
            raise wrong(f"{name} is missing", saved.path)
        dtypes = (tensor.dtype, *(biases_in if name in biases else ()))
        if kept[name].shape != tensor.shape or kept[name].dtype not in dtypes:
            raise wrong(
                f"{name} is {kept[name].dtype} {list(kept[name].shape)}, the source's is"
                f" {tensor.dtype} {list(tensor.shape)}",
                saved.path,
            )
        if name in (EMBEDDINGS, HEAD_WEIGHT) and not same_data(kept[name], tensor):
            raise wrong(f"{name} was changed, though to be left alone", kept[name].file)


def check_bytes(saved: Checkpoint, source: Checkpoint, expected: Mapping[str, int]) -> VariantSizes:
    """Check that every quantized layer takes the bytes predicted, and all of it fewer than before.

    Args:
        saved: The variant.
        source: What it was made from.
        expected: Bytes by quantized layer, bias left out.

    Raises:
        MeasurementError: Names the first layer that takes more or less.
    """
    found = bytes_by_layer(saved)
    for layer, size in sorted(expected.items()):
        if abs(found[layer] - size) > TOLERANCE * size:
            raise wrong(f"{layer} takes {found[layer]} bytes, predicted were {size}", saved.path)
    if saved.weight_bytes >= source.weight_bytes:
        raise wrong(
            f"the weights take {saved.weight_bytes} bytes, no fewer than the source's"
            f" {source.weight_bytes}",
            saved.path,
        )
    quantized, rest = split_bytes(saved)
    return VariantSizes(quantized, rest, saved.weight_bytes, sum(expected.values()))


def some(names: list[str]) -> str:
    """Return names for a message, the first few of many, with the verb that follows."""
    shown = ", ".join(names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{shown}{more} {'is' if len(names) == 1 else 'are'}"
