"""Checkpoints as they are found, and every way of being broken with the message it gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fakes.checkpoints import (
    TinyQwen2,
    array,
    bf16,
    read_json,
    write_json,
    write_safetensors,
    write_variant,
)

from qkit.errors import EXIT_USAGE, InputError
from qkit.quantize.preflight import (
    check_blocks,
    check_group_size,
    check_ignore,
    check_source,
    check_variant,
    inspect_checkpoint,
    quantized_layers,
    split_bytes,
)
from qkit.quantize.safetensors_header import read_header
from qkit.recipe import Variant

SHARD = "model-00002-of-00003.safetensors"


def edit_config(folder: Path, **changes: object) -> None:
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", {**config, **changes})


def truncate(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def rename_weights(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)


def break_header(path: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[:8] + b"}" + raw[9:])


def break_offsets(path: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b'"data_offsets": [0, ', b'"data_offsets": [2, ', 1))


def drop_tensor(folder: Path, name: str) -> None:
    tensors = dict(TinyQwen2().tensors())
    del tensors[name]
    write_safetensors(folder / "model.safetensors", tensors)


def reshape_tensor(folder: Path, name: str, shape: tuple[int, ...]) -> None:
    tensors = dict(TinyQwen2().tensors())
    tensors[name] = bf16(np.zeros(shape))
    write_safetensors(folder / "model.safetensors", tensors)


def rename_in_index(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = read_json(path)
    index["weight_map"]["model.ghost.weight"] = SHARD
    write_json(path, index)


def test_describes_a_whole_checkpoint(tmp_path: Path) -> None:
    source = TinyQwen2(hidden=64, intermediate=128, layers=2, heads=4, kv_heads=2)
    checkpoint = inspect_checkpoint(source.write(tmp_path / "model"))
    assert checkpoint.architecture == "Qwen2ForCausalLM"
    assert (checkpoint.num_layers, checkpoint.num_heads, checkpoint.num_kv_heads) == (2, 4, 2)
    assert (checkpoint.hidden_size, checkpoint.head_dim, checkpoint.dtype) == (64, 16, "BF16")
    assert checkpoint.tied
    assert not checkpoint.quantized
    # 7 projections a layer; the tied head is a module without a tensor of its own.
    assert len(checkpoint.linears) == 14
    assert checkpoint.linear_names[-1] == "lm_head"
    parameters = sum(np.prod(tensor.shape) for tensor in source.tensors().values())
    assert checkpoint.weight_bytes == 2 * parameters
    assert split_bytes(checkpoint) == (0, checkpoint.weight_bytes)


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    whole = inspect_checkpoint(TinyQwen2(tied=False).write(tmp_path / "one"))
    sharded = inspect_checkpoint(TinyQwen2(tied=False, shards=3).write(tmp_path / "three"))
    assert sharded.weight_bytes == whole.weight_bytes
    assert {n: t.shape for n, t in sharded.tensors.items()} == {
        n: t.shape for n, t in whole.tensors.items()
    }
    assert "lm_head" in {linear.name for linear in sharded.linears}


def test_a_quantized_folder_is_described_and_split(tmp_path: Path) -> None:
    source = TinyQwen2(hidden=128, intermediate=128).write(tmp_path / "model")
    variant = Variant(method="awq")
    saved = inspect_checkpoint(write_variant(source, tmp_path / "awq", variant))
    assert saved.quantization == "compressed-tensors (pack-quantized)"
    assert len(quantized_layers(saved)) == 14
    quantized, rest = split_bytes(saved)
    names = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")
    assert quantized == sum(
        tensor.bytes for name, tensor in saved.tensors.items() if name.endswith(names)
    )
    assert rest == sum(
        tensor.bytes
        for name, tensor in saved.tensors.items()
        if "norm" in name or "embed" in name or name.endswith(".bias")
    )


BROKEN: list[tuple[str, TinyQwen2, Callable[[Path], object], str, str]] = [
    (
        "no config",
        TinyQwen2(),
        lambda f: (f / "config.json").unlink(),
        "'model' has no config.json, so it is not a checkpoint folder",
        "give the folder that holds config.json",
    ),
    (
        "config cut short",
        TinyQwen2(),
        lambda f: truncate(f / "config.json", 40),
        "config.json is not valid JSON",
        "download or copy this file again",
    ),
    (
        "config is a list",
        TinyQwen2(),
        lambda f: (f / "config.json").write_text("[]"),
        "config.json is not a JSON object",
        "",
    ),
    (
        "config in UTF-16",
        TinyQwen2(),
        lambda f: (f / "config.json").write_text("{}", encoding="utf-16"),
        "config.json is not valid JSON",
        "",
    ),
    (
        "no hidden size",
        TinyQwen2(),
        lambda f: edit_config(f, hidden_size=None),
        "config.json: 'hidden_size' is missing",
        "",
    ),
    (
        "a size that is text",
        TinyQwen2(),
        lambda f: edit_config(f, num_hidden_layers="2"),
        "config.json: 'num_hidden_layers' is '2', not a positive number",
        "",
    ),
    (
        "no weights",
        TinyQwen2(),
        lambda f: (f / "model.safetensors").unlink(),
        "'model' has no weights (*.safetensors)",
        "download the checkpoint completely",
    ),
    (
        "pickled weights only",
        TinyQwen2(),
        lambda f: rename_weights(f, "pytorch_model.bin"),
        "the weights are pickled PyTorch files (pytorch_model.bin)",
        "save_pretrained",
    ),
    (
        "GGUF only",
        TinyQwen2(),
        lambda f: rename_weights(f, "model-q4_k_m.gguf"),
        "the weights are GGUF (model-q4_k_m.gguf)",
        "give the original Hugging Face checkpoint",
    ),
    (
        "GGUF only, without config",
        TinyQwen2(),
        lambda f: [rename_weights(f, "model.gguf"), (f / "config.json").unlink()],
        "the weights are GGUF (model.gguf), which is quantized for llama.cpp",
        "give the original Hugging Face checkpoint",
    ),
    (
        "shards without index",
        TinyQwen2(shards=3),
        lambda f: (f / "model.safetensors.index.json").unlink(),
        "there are 3 safetensors files but neither model.safetensors nor",
        "download the missing index file",
    ),
    (
        "a shard missing",
        TinyQwen2(shards=3),
        lambda f: (f / SHARD).unlink(),
        f"1 of 3 shards are missing: {SHARD}",
        "download or copy the missing files",
    ),
    (
        "a shard truncated",
        TinyQwen2(shards=3),
        lambda f: truncate(f / SHARD, 10_000),
        f"{SHARD} is truncated: it has 10000 bytes, its header promises ",
        "download or copy this file again",
    ),
    (
        "a shard truncated in its header",
        TinyQwen2(shards=3),
        lambda f: truncate(f / SHARD, 100),
        f"{SHARD} is truncated inside its header: it has 100 bytes",
        "",
    ),
    (
        "an empty shard",
        TinyQwen2(shards=3),
        lambda f: truncate(f / SHARD, 0),
        f"{SHARD} is truncated: it has 0 bytes",
        "",
    ),
    (
        "bytes after the end",
        TinyQwen2(),
        lambda f: (f / "model.safetensors").open("ab").write(b"more"),
        "model.safetensors is longer than it should be",
        "",
    ),
    (
        "a Git LFS pointer",
        TinyQwen2(),
        lambda f: (f / "model.safetensors").write_text("version https://git-lfs.github.com/spec"),
        "model.safetensors is a Git LFS pointer, not the weights",
        "git lfs pull",
    ),
    (
        "another kind of file",
        TinyQwen2(),
        lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 200),
        "model.safetensors is not a safetensors file",
        "",
    ),
    (
        "a damaged header",
        TinyQwen2(),
        lambda f: break_header(f / "model.safetensors"),
        "model.safetensors is not a safetensors file: its header is not JSON",
        "",
    ),
    (
        "damaged offsets",
        TinyQwen2(),
        lambda f: break_offsets(f / "model.safetensors"),
        "model.safetensors is damaged: 'model.embed_tokens.weight' has 40958 bytes",
        "",
    ),
    (
        "an index without map",
        TinyQwen2(shards=2),
        lambda f: write_json(f / "model.safetensors.index.json", {"metadata": {}}),
        "model.safetensors.index.json has no weight_map",
        "",
    ),
    (
        "an index that names a tensor too many",
        TinyQwen2(shards=3),
        rename_in_index,
        "names 1 tensors that are not in the shard it gives for them: model.ghost.weight",
        "different versions",
    ),
    (
        "a layer missing",
        TinyQwen2(),
        lambda f: edit_config(f, num_hidden_layers=3),
        "tensor model.layers.2.input_layernorm.weight is missing; config.json describes 3 layers",
        "",
    ),
    (
        "a bias missing",
        TinyQwen2(),
        lambda f: drop_tensor(f, "model.layers.1.self_attn.k_proj.bias"),
        "tensor model.layers.1.self_attn.k_proj.bias is missing",
        "download the checkpoint completely",
    ),
    (
        "another vocabulary",
        TinyQwen2(),
        lambda f: edit_config(f, vocab_size=321),
        "tensor model.embed_tokens.weight is [320, 64]; config.json describes [321, 64]",
        "different models",
    ),
    (
        "another number of key heads",
        TinyQwen2(),
        lambda f: edit_config(f, num_key_value_heads=4),
        "self_attn.k_proj.weight is [32, 64]; config.json describes [64, 64]",
        "",
    ),
    (
        "a tensor of another shape",
        TinyQwen2(),
        lambda f: reshape_tensor(f, "model.norm.weight", (65,)),
        "tensor model.norm.weight is [65]; config.json describes [64]",
        "",
    ),
    (
        "a head that is neither stored nor tied",
        TinyQwen2(),
        lambda f: edit_config(f, tie_word_embeddings=False),
        "lm_head.weight is not stored and config.json does not say that the embeddings are tied",
        '"tie_word_embeddings": true',
    ),
]


@pytest.mark.parametrize(
    ("model", "damage", "message", "fix"),
    [case[1:] for case in BROKEN],
    ids=[case[0] for case in BROKEN],
)
def test_broken_checkpoints(
    tmp_path: Path, model: TinyQwen2, damage: Callable[[Path], object], message: str, fix: str
) -> None:
    folder = model.write(tmp_path / "model")
    damage(folder)
    with pytest.raises(InputError) as caught:
        inspect_checkpoint(folder)
    assert message in caught.value.what
    assert fix in (caught.value.fix or "")
    assert str(folder) in (caught.value.where or "")
    assert caught.value.exit_code == EXIT_USAGE


def test_a_missing_folder_and_a_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the model folder 'nowhere' is not there"):
        inspect_checkpoint(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="'file' is a file, not a checkpoint folder"):
        inspect_checkpoint(tmp_path / "file")


COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
REFUSED: list[tuple[str, Callable[[Path], object], str, str]] = [
    (
        "compressed-tensors",
        lambda f: edit_config(f, quantization_config=COMPRESSED),
        "'model' is quantized already: compressed-tensors (pack-quantized)",
        "give the original BF16 or FP16 checkpoint",
    ),
    (
        "GPTQ",
        lambda f: edit_config(f, quantization_config={"quant_method": "gptq", "bits": 4}),
        "'model' is quantized already: gptq (4 bit)",
        "",
    ),
    (
        "AutoAWQ's side file",
        lambda f: write_json(f / "quant_config.json", {"w_bit": 4}),
        "'model' is quantized already: awq (quant_config.json)",
        "",
    ),
    (
        "another architecture",
        lambda f: edit_config(f, architectures=["LlamaForCausalLM"]),
        "LlamaForCausalLM is not an architecture qkit can quantize",
        "supported: Qwen2ForCausalLM",
    ),
    (
        "no tokenizer",
        lambda f: (f / "tokenizer.json").unlink(),
        "the checkpoint has no tokenizer",
        "copy the tokenizer's files",
    ),
]


@pytest.mark.parametrize(
    ("change", "message", "fix"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_refused_sources(
    tmp_path: Path, change: Callable[[Path], object], message: str, fix: str
) -> None:
    folder = TinyQwen2().write(tmp_path / "model")
    change(folder)
    with pytest.raises(InputError) as caught:
        check_source(inspect_checkpoint(folder))
    assert message in caught.value.what
    assert fix in (caught.value.fix or "")


def test_32_bit_weights_are_refused(tmp_path: Path) -> None:
    folder = TinyQwen2().write(tmp_path / "model")
    tensors = {
        name: array(np.zeros(tensor.shape, dtype=np.float32))
        for name, tensor in TinyQwen2().tensors().items()
    }
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(InputError, match="the weights are F32; qkit quantizes from 16 bits"):
        check_source(inspect_checkpoint(folder))


@pytest.mark.parametrize(
    ("sizes", "group_size", "suggested"),
    [
        # 192 = 1.5 groups of 128 = 3 of 64; 96 = 3 groups of 32.
        ({"hidden": 128, "intermediate": 192}, 128, "use group_size 64"),
        ({"hidden": 128, "intermediate": 96}, 64, "use group_size 32"),
        ({"hidden": 128, "intermediate": 80}, 32, "add 're:.*down_proj$' to ignore"),
    ],
)
def test_group_size_must_divide_every_layer(
    tmp_path: Path, sizes: dict[str, int], group_size: int, suggested: str
) -> None:
    checkpoint = inspect_checkpoint(TinyQwen2(**sizes).write(tmp_path / "model"))
    variant = SimpleNamespace(
        method="gptq", weight_bits=4, group_size=group_size, ignore=("lm_head",)
    )
    with pytest.raises(InputError) as caught:
        check_group_size(checkpoint, variant)
    assert caught.value.what == (
        f"group size {group_size} does not divide the {sizes['intermediate']} inputs of"
        " model.layers.0.mlp.down_proj and 1 more"
    )
    assert suggested in (caught.value.fix or "")


def test_group_size_matters_to_grouped_methods_and_layers_alone(tmp_path: Path) -> None:
    model = TinyQwen2(hidden=128, intermediate=192).write(tmp_path / "model")
    checkpoint = inspect_checkpoint(model)
    check_group_size(checkpoint, Variant(method="fp8"))
    check_group_size(checkpoint, Variant(method="awq", group_size=64))
    check_group_size(checkpoint, Variant(method="awq", ignore=("lm_head", "re:.*down_proj$")))


def test_blocks_must_be_whole(tmp_path: Path) -> None:
    model = TinyQwen2(hidden=256, intermediate=192).write(tmp_path / "model")
    checkpoint = inspect_checkpoint(model)
    with pytest.raises(InputError) as caught:
        check_blocks(checkpoint, Variant(method="fp8", scales="block"))
    assert caught.value.what == (
        "model.layers.0.mlp.down_proj is 256 x 192, not whole blocks of 128 x 128"
    )
    assert "use scales: dynamic" in (caught.value.fix or "")
    check_blocks(checkpoint, Variant(method="fp8"))
    without_mlp = ("lm_head", "re:.*mlp.*")
    check_blocks(checkpoint, Variant(method="fp8", scales="block", ignore=without_mlp))


def test_ignore_must_name_layers(tmp_path: Path) -> None:
    checkpoint = inspect_checkpoint(TinyQwen2().write(tmp_path / "model"))
    check_ignore(checkpoint, Variant(method="fp8", ignore=("lm_head", "re:.*layers[.]0[.].*")))
    with pytest.raises(InputError, match=r"'ln_head', which is no Linear layer.*'lm_head'"):
        check_ignore(checkpoint, Variant(method="fp8", ignore=("ln_head",)))
    with pytest.raises(InputError, match=r"'re:foo', which is no Linear layer of the model\n"):
        check_ignore(checkpoint, Variant(method="fp8", ignore=("re:foo",)))
    with pytest.raises(InputError, match=r"'re:\(' is not a regular expression"):
        check_ignore(checkpoint, Variant(method="fp8", ignore=("re:(",)))
    with pytest.raises(InputError, match="nothing would be quantized"):
        check_ignore(checkpoint, Variant(method="fp8", ignore=("re:.*",)))


def test_an_activation_order_that_is_gone_is_refused(tmp_path: Path) -> None:
    checkpoint = inspect_checkpoint(
        TinyQwen2(hidden=128, intermediate=128).write(tmp_path / "model")
    )
    check_variant(checkpoint, Variant(method="gptq"))
    with pytest.raises(InputError, match="actorder 'group' was removed from llm-compressor"):
        check_variant(checkpoint, Variant(method="gptq", actorder="group"))


def test_headers_agree_with_the_safetensors_library(tmp_path: Path) -> None:
    from safetensors import safe_open

    path = TinyQwen2().write(tmp_path / "model") / "model.safetensors"
    ours = read_header(path)
    with safe_open(path, framework="numpy") as theirs:
        assert set(ours) == set(theirs.keys())
        for name, tensor in ours.items():
            entry = theirs.get_slice(name)
            assert (tensor.shape, tensor.dtype) == (tuple(entry.get_shape()), entry.get_dtype())
