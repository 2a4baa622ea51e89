"""Describe a checkpoint folder from config.json and safetensors headers, no weights loaded.

`inspect_checkpoint` takes any causal-LM folder, quantized or not, and refuses one that is not
whole; `describe_config` needs config.json alone, for a checkpoint that is not downloaded yet. Both
take well under a second, whatever the model's size. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qkit.errors import InputError
from qkit.quantize.safetensors_header import DTYPE_BITS, TensorInfo
from qkit.quantize.weight_files import (
    explain_no_weights,
    has_weights,
    read_json_file,
    read_tensors,
)

CONFIG_FILE = "config.json"
HEAD = "lm_head"
HEAD_WEIGHT = "lm_head.weight"
EMBEDDINGS = "model.embed_tokens.weight"
QWEN2 = "qwen2"
#: Suffix of the stored weight of a quantized layer, in every format qkit knows.
PACKED_SUFFIXES = (".weight_packed", ".qweight")
#: What a quantized layer stores besides its weight (a bias is not quantized).
PARAMETER_SUFFIXES = (
    ".weight_scale",
    ".weight_zero_point",
    ".weight_shape",
    ".weight_g_idx",
    ".input_scale",
    ".qzeros",
    ".scales",
    ".g_idx",
)
EIGHT_BIT_DTYPES = ("I8", "F8_E4M3")
#: config.json's `torch_dtype` (or `dtype`) as safetensors names it.
CONFIG_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True)
class Linear:
    """A Linear layer as stored: its module name and the two sizes of its weight."""

    name: str
    out_features: int
    in_features: int


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder as its config and headers describe it.

    Attributes:
        path: The folder.
        architecture: First entry of config.json's `architectures`.
        dtype: dtype of the embeddings (or of most weights), as safetensors names it.
        num_kv_heads: Key/value heads; fewer than `num_heads` under grouped-query attention.
        tied: Whether the output head is the embedding matrix.
        tensors: Stored tensors by name.
        weight_bytes: Bytes of all stored tensors.
        quantization: What config.json (or the older side files) says it is quantized as, or None.
        config: config.json as read.
        weights_stored: Whether the weights are in the folder; False where `tensors` are only what
            config.json describes.
    """

    path: Path
    architecture: str
    model_type: str
    dtype: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tied: bool
    tensors: Mapping[str, TensorInfo]
    weight_bytes: int
    quantization: str | None
    config: Mapping[str, Any]
    weights_stored: bool = True

    @property
    def quantized(self) -> bool:
        """Whether the weights are quantized already."""
        return self.quantization is not None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Linear layers with a 16-bit weight of their own, the head included if it is stored."""
        return tuple(
            Linear(name.removesuffix(".weight"), *tensor.shape)
            for name, tensor in sorted(self.tensors.items())
            if name.endswith(".weight")
            and len(tensor.shape) == 2
            and name != EMBEDDINGS
            and tensor.dtype not in EIGHT_BIT_DTYPES
        )

    @property
    def linear_names(self) -> tuple[str, ...]:
        """Names of all Linear modules: the stored ones and a tied head."""
        stored = tuple(linear.name for linear in self.linears)
        return stored if HEAD in stored else (*stored, HEAD)

    @property
    def redundant_head(self) -> TensorInfo | None:
        """A head stored beside tied embeddings: loaders pass over it, and no variant keeps it."""
        return self.tensors.get(HEAD_WEIGHT) if self.tied else None

    @property
    def remote_code(self) -> tuple[str, ...]:
        """Python modules of the checkpoint's own that config.json asks for (`auto_map`)."""
        entries = self.config.get("auto_map")
        return tuple(str(value) for value in entries.values()) if isinstance(entries, dict) else ()


def inspect_checkpoint(path: Path) -> Checkpoint:
    """Describe a checkpoint folder.

    Raises:
        InputError: No folder, no or broken config.json, no safetensors weights, a shard missing,
            truncated or at odds with the index, or tensors that are not those the config
            describes.
    """
    if not path.is_dir():
        kind = "a file, not a checkpoint folder" if path.exists() else "not there"
        raise InputError(
            f"the model folder {path.name!r} is {kind}",
            where=path,
            fix="give the folder that holds config.json and *.safetensors",
        )
    config = _read_config(path)
    tensors = read_tensors(path)
    sizes = _sizes(config, path)
    quantization = _quantization(path, config, tensors)
    checkpoint = Checkpoint(
        path=path,
        architecture=str((config.get("architectures") or ["unknown"])[0]),
        model_type=str(config.get("model_type", "unknown")),
        dtype=_dtype(tensors),
        tied=bool(config.get("tie_word_embeddings", False)),
        tensors=tensors,
        weight_bytes=sum(tensor.bytes for tensor in tensors.values()),
        quantization=quantization,
        config=config,
        weights_stored=True,
        **sizes,
    )
    if checkpoint.model_type == QWEN2:
        _check_tensors(checkpoint)
    return checkpoint


def describe_config(path: Path) -> Checkpoint:
    """Describe a checkpoint from its config.json alone; tensors are those the config describes.

    For planning before a download. The tensors have names, shapes and bytes, but no data.

    Raises:
        InputError: No folder, no or broken config.json, or an architecture whose tensors qkit does
            not know.
    """
    if not path.is_dir():
        raise InputError(f"the model folder {path.name!r} is not there", where=path)
    config = _read_config(path)
    model_type = str(config.get("model_type", "unknown"))
    if model_type != QWEN2:
        raise InputError(
            f"the tensors of a {model_type!r} model cannot be told from its config",
            where=path / CONFIG_FILE,
            fix=f"give the whole checkpoint; without weights qkit knows {QWEN2!r} only",
        )
    named = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    dtype = CONFIG_DTYPES.get(named, named)
    bare = Checkpoint(
        path=path,
        architecture=str((config.get("architectures") or ["unknown"])[0]),
        model_type=model_type,
        dtype=dtype,
        tied=bool(config.get("tie_word_embeddings", False)),
        tensors={},
        weight_bytes=0,
        quantization=_quantization(path, config, {}),
        config=config,
        weights_stored=False,
        **_sizes(config, path),
    )
    tensors = {
        name: TensorInfo(
            shape, dtype, math.prod(shape) * DTYPE_BITS.get(dtype, 16) // 8, path / CONFIG_FILE, 0
        )
        for name, shape in _expected_shapes(bare).items()
    }
    return replace(
        bare, tensors=tensors, weight_bytes=sum(tensor.bytes for tensor in tensors.values())
    )


def split_bytes(checkpoint: Checkpoint) -> tuple[int, int]:
    """Return bytes of quantized layers (weights, scales, zero points) and bytes of all the rest."""
    quantized = sum(bytes_by_layer(checkpoint).values())
    return quantized, checkpoint.weight_bytes - quantized


def bytes_by_layer(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the bytes of every quantized layer, its bias left out."""
    sizes = dict.fromkeys(quantized_layers(checkpoint), 0)
    for name, tensor in checkpoint.tensors.items():
        owner = _owner(name)
        if owner in sizes:
            sizes[owner] += tensor.bytes
    return sizes


def quantized_layers(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the names of the layers whose stored weight is quantized."""
    return _quantized_names(checkpoint.tensors)


def _quantized_names(tensors: Mapping[str, TensorInfo]) -> tuple[str, ...]:
    names = set()
    for name, tensor in tensors.items():
        for suffix in PACKED_SUFFIXES:
            if name.endswith(suffix):
                names.add(name.removesuffix(suffix))
        if name.endswith(".weight") and tensor.dtype in EIGHT_BIT_DTYPES:
            names.add(name.removesuffix(".weight"))
    return tuple(sorted(names))


def _owner(tensor_name: str) -> str | None:
    """Return the layer a quantized weight or its parameters belong to, None for a bias."""
    for suffix in (*PACKED_SUFFIXES, ".weight", *PARAMETER_SUFFIXES):
        if tensor_name.endswith(suffix):
            return tensor_name.removesuffix(suffix)
    return None


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    if not path.is_file():
        if not any(folder.glob("*.safetensors")) and has_weights(folder):
            explain_no_weights(folder)  # a GGUF folder has no config.json
        raise InputError(
            f"{folder.name!r} has no {CONFIG_FILE}, so it is not a checkpoint folder",
            where=folder,
            fix="give the folder that holds config.json and *.safetensors",
        )
    value = read_json_file(path)
    if not isinstance(value, dict):
        raise InputError(f"{CONFIG_FILE} is not a JSON object", where=path)
    return value


def _sizes(config: dict[str, Any], folder: Path) -> dict[str, int]:
    def size(key: str, default: int | None = None) -> int:
        value = config.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            shown = "is missing" if value is None else f"is {value!r}, not a positive number"
            raise InputError(f"{CONFIG_FILE}: {key!r} {shown}", where=folder / CONFIG_FILE)
        return value

    heads = size("num_attention_heads")
    return {
        "vocab_size": size("vocab_size"),
        "hidden_size": size("hidden_size"),
        "intermediate_size": size("intermediate_size"),
        "num_layers": size("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": size("num_key_value_heads", heads),
        "head_dim": size("head_dim", size("hidden_size") // heads),
    }


def _dtype(tensors: Mapping[str, TensorInfo]) -> str:
    if EMBEDDINGS in tensors:
        return tensors[EMBEDDINGS].dtype
    totals: dict[str, int] = {}
    for tensor in tensors.values():
        totals[tensor.dtype] = totals.get(tensor.dtype, 0) + tensor.bytes
    return max(totals, key=lambda dtype: totals[dtype], default="unknown")


def _quantization(
    folder: Path, config: dict[str, Any], tensors: Mapping[str, TensorInfo]
) -> str | None:
    """Say what a checkpoint is quantized as; older AutoGPTQ and AutoAWQ folders use side files."""
    settings = config.get("quantization_config") or config.get("compression_config")
    if isinstance(settings, dict):
        method = str(settings.get("quant_method", "unnamed method"))
        detail = settings.get("format") or (f"{settings['bits']} bit" if "bits" in settings else "")
        return f"{method} ({detail})" if detail else method
    for name, method in (("quantize_config.json", "gptq"), ("quant_config.json", "awq")):
        if (folder / name).is_file():
            return f"{method} ({name})"
    if packed := _quantized_names(tensors):
        return f"unnamed method ({len(packed)} packed layers)"
    return None


def _check_tensors(checkpoint: Checkpoint) -> None:
    """Compare names and shapes of the tensors with what the config describes."""
    where = checkpoint.path
    tensors = checkpoint.tensors
    if not checkpoint.tied and HEAD_WEIGHT not in tensors and not checkpoint.quantized:
        raise InputError(
            f"{HEAD_WEIGHT} is not stored and config.json does not say that the embeddings are"
            " tied; loading it would give the model a random output head",
            where=where / CONFIG_FILE,
            fix='if the model ties its embeddings, add "tie_word_embeddings": true to config.json',
        )
    for name, shape in _expected_shapes(checkpoint).items():
        tensor = tensors.get(name)
        if tensor is None and checkpoint.quantized:
            continue
        if tensor is None:
            raise InputError(
                f"tensor {name} is missing; config.json describes {checkpoint.num_layers} layers",
                where=where,
                fix="download the checkpoint completely, with the config.json that belongs to it",
            )
        if tensor.shape != shape:
            raise InputError(
                f"tensor {name} is {list(tensor.shape)}; config.json describes {list(shape)}",
                where=where,
                fix="config.json and the weights belong to different models: take both from one"
                " place",
            )


def _expected_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a Qwen2 text model by name."""
    hidden, middle = checkpoint.hidden_size, checkpoint.intermediate_size
    query = checkpoint.num_heads * checkpoint.head_dim
    key = checkpoint.num_kv_heads * checkpoint.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDINGS: (checkpoint.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not checkpoint.tied:
        shapes[HEAD_WEIGHT] = (checkpoint.vocab_size, hidden)
    for layer in range(checkpoint.num_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
            f"{prefix}self_attn.q_proj.weight": (query, hidden),
            f"{prefix}self_attn.q_proj.bias": (query,),
            f"{prefix}self_attn.k_proj.weight": (key, hidden),
            f"{prefix}self_attn.k_proj.bias": (key,),
            f"{prefix}self_attn.v_proj.weight": (key, hidden),
            f"{prefix}self_attn.v_proj.bias": (key,),
            f"{prefix}self_attn.o_proj.weight": (hidden, query),
            f"{prefix}mlp.gate_proj.weight": (middle, hidden),
            f"{prefix}mlp.up_proj.weight": (middle, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, middle),
        }
    return shapes
