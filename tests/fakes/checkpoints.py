"""Tiny Qwen2 checkpoints with a real tokenizer, written without torch.

Random weights, but every file a served checkpoint has: config, BF16 safetensors, a byte-level
tokenizer with Qwen's ChatML tokens, a chat template and a generation config.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB_SIZE = 320


@dataclass(frozen=True)
class Array:
    """A tensor to be written: dtype as safetensors names it, shape and raw data."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True)
class TinyQwen2:
    """Sizes of a tiny checkpoint; `config` adds or replaces keys of config.json."""

    hidden: int = 64
    intermediate: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    tied: bool = True
    shards: int = 1
    seed: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """Write the checkpoint into a new folder and return it."""
        folder.mkdir(parents=True)
        write_json(folder / "config.json", {**self.config_json(), **self.config})
        write_json(
            folder / "generation_config.json",
            {"bos_token_id": 256, "eos_token_id": [258, 256], "do_sample": False},
        )
        write_tokenizer(folder)
        write_weights(folder, self.tensors(), shards=self.shards)
        return folder

    def config_json(self) -> dict[str, Any]:
        return {
            "architectures": ["Qwen2ForCausalLM"],
            "attention_dropout": 0.0,
            "bos_token_id": 256,
            "eos_token_id": 258,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": 2048,
            "max_window_layers": self.layers,
            "model_type": "qwen2",
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "sliding_window": None,
            "tie_word_embeddings": self.tied,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": VOCAB_SIZE,
        }

    def tensors(self) -> dict[str, Array]:
        random = np.random.default_rng(self.seed)
        head_dim = self.hidden // self.heads
        query, key = self.heads * head_dim, self.kv_heads * head_dim

        def matrix(out: int, inputs: int) -> Array:
            # Wide enough that the context decides the next token, as in a trained model.
            return bf16(random.normal(0, 1.5 / np.sqrt(inputs), (out, inputs)))

        def ones() -> Array:
            return bf16(np.ones(self.hidden) + random.normal(0, 0.1, self.hidden))

        def bias(out: int) -> Array:
            return bf16(random.normal(0, 0.1, out))

        tensors = {"model.embed_tokens.weight": matrix(VOCAB_SIZE, self.hidden)}
        for index in range(self.layers):
            layer = f"model.layers.{index}."
            tensors |= {
                f"{layer}input_layernorm.weight": ones(),
                f"{layer}post_attention_layernorm.weight": ones(),
                f"{layer}self_attn.q_proj.weight": matrix(query, self.hidden),
                f"{layer}self_attn.q_proj.bias": bias(query),
                f"{layer}self_attn.k_proj.weight": matrix(key, self.hidden),
                f"{layer}self_attn.k_proj.bias": bias(key),
                f"{layer}self_attn.v_proj.weight": matrix(key, self.hidden),
                f"{layer}self_attn.v_proj.bias": bias(key),
                f"{layer}self_attn.o_proj.weight": matrix(self.hidden, query),
                f"{layer}mlp.gate_proj.weight": matrix(self.intermediate, self.hidden),
                f"{layer}mlp.up_proj.weight": matrix(self.intermediate, self.hidden),
                f"{layer}mlp.down_proj.weight": matrix(self.hidden, self.intermediate),
            }
        tensors["model.norm.weight"] = ones()
        if not self.tied:
            tensors["lm_head.weight"] = matrix(VOCAB_SIZE, self.hidden)
        return tensors


def bf16(values: np.ndarray) -> Array:
    """Return values rounded to bfloat16 (to nearest, ties to even)."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return Array("BF16", values.shape, rounded.astype("<u2").tobytes())


def array(values: np.ndarray) -> Array:
    """Return a numpy array as it is."""
    names = {
        "float32": "F32",
        "float16": "F16",
        "int8": "I8",
        "int32": "I32",
        "int64": "I64",
    }
    return Array(names[values.dtype.name], values.shape, np.ascontiguousarray(values).tobytes())


def write_safetensors(path: Path, tensors: Mapping[str, Array]) -> None:
    """Write a safetensors file: header length, JSON header, data."""
    header, offset = {}, 0
    for name, tensor in tensors.items():
        end = offset + len(tensor.data)
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    raw = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little"))
        stream.write(raw)
        for tensor in tensors.values():
            stream.write(tensor.data)


def write_weights(folder: Path, tensors: Mapping[str, Array], *, shards: int = 1) -> None:
    """Write tensors as model.safetensors, or as shards with their index."""
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return
    names = list(tensors)
    weight_map = {}
    for index in range(shards):
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[index::shards]}
        write_safetensors(folder / file, part)
        weight_map |= dict.fromkeys(part, file)
    size = sum(len(tensor.data) for tensor in tensors.values())
    write_json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": size}, "weight_map": weight_map},
    )


def write_tokenizer(
    folder: Path, *, chat_template: str | None = CHAT_TEMPLATE, words: tuple[str, ...] = ()
) -> None:
    """Write a tokenizer of the 256 bytes and Qwen's ChatML tokens (256, 257, 258).

    Args:
        folder: Where to.
        chat_template: Its template.
        words: Further entries of the vocabulary, before the ChatML tokens; no text gives them.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet += [level.pre_tokenize_str(word)[0][0] for word in words]
    vocab = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / "tokenizer_config.json", settings)
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def write_variant(source: Path, folder: Path, variant: Any) -> Path:
    """Write what a backend would make of a tiny checkpoint: right names, shapes and config.

    The weights are random; the files around them are the source's.
    """
    import shutil

    from qkit.quantize.checkpoint import inspect_checkpoint
    from qkit.quantize.methods import scheme_of
    from qkit.quantize.safetensors_header import read_bytes
    from qkit.quantize.schemes import is_ignored

    checkpoint, scheme = inspect_checkpoint(source), scheme_of(variant)
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = {
        name: Array(tensor.dtype, tensor.shape, read_bytes(tensor))
        for name, tensor in checkpoint.tensors.items()
    }
    for linear in checkpoint.linears:
        if not is_ignored(linear.name, variant.ignore):
            del tensors[f"{linear.name}.weight"]
            tensors |= quantized_layer(linear.name, linear.out_features, linear.in_features, scheme)
    if variant.kv_cache:
        for layer in range(checkpoint.num_layers):
            for scale in ("k_scale", "v_scale"):
                tensors[f"model.layers.{layer}.self_attn.{scale}"] = bf16(np.full(1, 0.01))
    write_weights(folder, tensors)
    config = read_json(folder / "config.json")
    config["quantization_config"] = quantization_config(scheme, variant.ignore, variant.kv_cache)
    write_json(folder / "config.json", config)
    return folder


def write_record(folder: Path, *, key: str = "key") -> Path:
    """Give a variant's folder the qkit.json of a finished one."""
    from qkit.hashing import hash_checkpoint
    from qkit.measurements import VariantRecord

    record = VariantRecord(
        key=key,
        content_hash=hash_checkpoint(folder),
        source="source",
        source_hash="hash",
        method="rtn",
        scheme="W4A16",
        backend="llmcompressor",
        versions={},
        calibration=None,
        settings={},
        ignored_modules=("lm_head",),
        skipped_mappings=(),
        load_check="loads",
        mean_kl=0.1,
        top1_agreement=0.9,
        quantized_bytes=1,
        unquantized_bytes=1,
        weight_bytes=2,
        seed=0,
        duration_s=1.0,
        peak_memory_bytes=1,
        created="now",
    )
    write_json(folder / "qkit.json", record.model_dump(mode="json"))
    return folder


def quantized_layer(name: str, out: int, inputs: int, scheme: Any) -> dict[str, Array]:
    """Return the tensors compressed-tensors stores for one Linear layer."""
    random = np.random.default_rng(0)
    if not scheme.packed:
        data = random.integers(0, 100, (out, inputs), dtype=np.int8)
        dtype = "F8_E4M3" if scheme.weights.type == "float" else "I8"
        shape = {
            "tensor": (1,),
            "channel": (out, 1),
            "block": (-(-out // 128), -(-inputs // 128)),
        }[scheme.weights.strategy]
        tensors = {
            f"{name}.weight": Array(dtype, (out, inputs), data.tobytes()),
            f"{name}.weight_scale": bf16(np.full(shape, 0.01)),
        }
        if scheme.static_inputs:
            tensors[f"{name}.input_scale"] = bf16(np.full(1, 0.01))
        return tensors
    per_word = 32 // scheme.weights.num_bits
    groups = inputs // (scheme.weights.group_size or inputs)
    words = random.integers(0, 2**31, (out, inputs // per_word), dtype=np.int32)
    tensors = {
        f"{name}.weight_packed": array(words),
        f"{name}.weight_scale": bf16(np.full((out, groups), 0.01)),
        f"{name}.weight_shape": array(np.array([out, inputs], dtype=np.int64)),
    }
    if not scheme.weights.symmetric:
        zeros = np.zeros((-(-out // per_word), groups), dtype=np.int32)
        tensors[f"{name}.weight_zero_point"] = array(zeros)
    return tensors


def quantization_config(
    scheme: Any, ignore: tuple[str, ...], kv_cache: str | None = None
) -> dict[str, Any]:
    """Return config.json's part as llm-compressor writes it."""
    weights, inputs = scheme.weights, scheme.activations
    group = {
        "format": scheme.format,
        "input_activations": None
        if inputs is None
        else {
            "dynamic": inputs.dynamic,
            "group_size": inputs.group_size,
            "num_bits": inputs.num_bits,
            "strategy": inputs.strategy,
            "symmetric": inputs.symmetric,
            "type": inputs.type,
        },
        "targets": ["Linear"],
        "weights": {
            "actorder": weights.actorder,
            "block_structure": weights.block_structure,
            "group_size": weights.group_size,
            "num_bits": weights.num_bits,
            "strategy": weights.strategy,
            "symmetric": weights.symmetric,
            "type": weights.type,
        },
    }
    return {
        "config_groups": {"group_0": group},
        "format": scheme.format,
        "ignore": list(ignore),
        "kv_cache_scheme": kv_cache
        and {
            "dynamic": False,
            "group_size": None,
            "num_bits": 8,
            "strategy": "tensor",
            "symmetric": True,
            "type": "float",
        },
        "quant_method": "compressed-tensors",
    }
