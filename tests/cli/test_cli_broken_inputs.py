"""Every kind of broken input through the real command line: one message, and nothing left behind.

A checkpoint, a calibration file or a recipe is broken in one way, and `qkit quantize` must refuse
it before a worker is started: exit code 1 or 2, the message of the table, no traceback, and nothing
of a variant left. The interpreter is a stand-in that notes when a worker is started; the first test
shows that it is started where nothing is broken.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from fakes.checkpoints import (
    TinyQwen2,
    array,
    bf16,
    read_json,
    write_json,
    write_safetensors,
    write_tokenizer,
    write_weights,
)

from qkit.cli import cli

MODEL = TinyQwen2(hidden=128, intermediate=256, shards=2)
FIRST, SECOND = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
INDEX = "model.safetensors.index.json"
TEXT = "".join(json.dumps({"text": f"Sentence {n} of the data."}) + "\n" for n in range(20))
#: Answers what is installed; anything else is a worker's start.
PYTHON = """#!/bin/sh
case "$2" in -c) echo '{}' ;; *) touch "$0.started"; exit 1 ;; esac
"""


@dataclass
class World:
    """A folder where everything is as it should be, until a case breaks something.

    Attributes:
        root: The folder; `model/` and `data.jsonl` are in it.
        recipe: What is written to `recipe.yaml`.
    """

    root: Path
    recipe: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> Path:
        return self.root / "model"

    def variant(self, **settings: Any) -> None:
        """Replace the recipe's one variant."""
        self.recipe["variants"] = [settings]

    def config(self, **changes: Any) -> None:
        """Change keys of config.json; None takes one away."""
        config = {**read_json(self.model / "config.json"), **changes}
        kept = {key: value for key, value in config.items() if value is not None}
        write_json(self.model / "config.json", kept)

    def rewrite(self, source: TinyQwen2 = MODEL, **tensors: Any) -> None:
        """Write the weights anew in one file, with some tensors replaced (None: left out)."""
        for path in self.model.glob("model*"):
            path.unlink()
        values = {**source.tensors(), **tensors}
        write_weights(self.model, {name: t for name, t in values.items() if t is not None})

    def data(self, content: str | bytes | list[Any], name: str = "data.jsonl") -> None:
        """Write the calibration file; a list is one JSON value a line."""
        if isinstance(content, list):
            content = "".join(json.dumps(row) + "\n" for row in content)
        raw = content.encode() if isinstance(content, str) else content
        (self.root / name).write_bytes(raw)
        self.recipe["calibration"]["source"] = f"./{name}"

    def run(self, *command: str) -> tuple[int, str]:
        """Run a command and return its exit code and what it printed, white space collapsed."""
        (self.root / "recipe.yaml").write_text(yaml.safe_dump(self.recipe))
        result = CliRunner().invoke(cli, list(command))
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception  # a person would see a traceback
        assert "Traceback" not in result.output
        return result.exit_code, " ".join(result.output.split())

    def worker_started(self) -> bool:
        return (self.root / "python.started").exists()

    def variants(self) -> list[Path]:
        """Return every folder of a variant, whole or partial."""
        return [path for path in self.root.glob("artifacts/*/variants/*/*") if path.is_dir()]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """Work in an empty folder, with a stand-in for the quantizer and without the hub."""
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    for backend in ("QUANTIZE", "AUTOAWQ", "GPTQMODEL"):
        monkeypatch.setenv(f"QKIT_{backend}_PYTHON", str(python))
    monkeypatch.setenv("QKIT_LOCK_DIR", str(tmp_path / "locks"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("QKIT_ARTIFACTS", raising=False)
    monkeypatch.chdir(tmp_path)
    MODEL.write(tmp_path / "model")
    made = World(
        tmp_path,
        {
            "name": "r",
            "model": "./model",
            "accelerator": "cpu",
            "calibration": {"samples": 2, "seq_len": 32},
            "variants": [{"method": "awq"}],
        },
    )
    made.data(TEXT)
    return made


def test_what_is_not_broken_reaches_the_worker(world: World) -> None:
    code, output = world.run("quantize", "--recipe", "recipe.yaml")
    assert world.worker_started()
    assert code == 3, output  # the stand-in quantizes nothing
    # Request, result and log of the step are kept; of the variant there is nothing.
    assert {path.name for path in world.variants()} == {"quantize"}


def refused(world: World, message: str) -> None:
    code, output = world.run("quantize", "--recipe", "recipe.yaml")
    assert code in (1, 2), output
    assert message in output
    assert not world.worker_started()
    assert world.variants() == []


def truncate(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def index_names(world: World, tensor: str, shard: str) -> None:
    index = read_json(world.model / INDEX)
    index["weight_map"][tensor] = shard
    write_json(world.model / INDEX, index)


def only(world: World, name: str) -> None:
    """Leave the model's folder with weights of another kind alone."""
    for path in world.model.glob("model*"):
        path.unlink()
    (world.model / name).write_bytes(b"weights of another kind")


def remote_tokenizer(world: World) -> None:
    settings = read_json(world.model / "tokenizer_config.json")
    settings |= {
        "auto_map": {"AutoTokenizer": ["tokenization_x.XTokenizer", None]},
        "tokenizer_class": "XTokenizer",
    }
    write_json(world.model / "tokenizer_config.json", settings)
    code = "import pathlib; pathlib.Path('code-was-run').touch()\nclass XTokenizer: ...\n"
    (world.model / "tokenization_x.py").write_text(code)
    (world.model / "tokenizer.json").unlink()
    (world.model / "vocab.json").write_text("{}")


Case = tuple[Callable[[World], object], str]

CHECKPOINTS: dict[str, Case] = {
    "no config": (
        lambda w: (w.model / "config.json").unlink(),
        "'model' has no config.json, so it is not a checkpoint folder",
    ),
    "config cut short": (
        lambda w: truncate(w.model / "config.json", 60),
        "config.json is not valid JSON",
    ),
    "config in UTF-16": (
        lambda w: (w.model / "config.json").write_text("{}", encoding="utf-16"),
        "config.json is not valid JSON",
    ),
    "a size missing": (
        lambda w: w.config(hidden_size=None),
        "config.json: 'hidden_size' is missing",
    ),
    "a size that is text": (
        lambda w: w.config(num_hidden_layers="2"),
        "config.json: 'num_hidden_layers' is '2', not a positive number",
    ),
    "another vocabulary": (
        lambda w: w.config(vocab_size=152_064),
        "tensor model.embed_tokens.weight is [320, 128]; config.json describes [152064, 128]",
    ),
    "another number of heads": (
        lambda w: w.config(num_attention_heads=2),
        "self_attn.k_proj.weight is [64, 128]; config.json describes [128, 128]",
    ),
    "another number of key heads": (
        lambda w: w.config(num_key_value_heads=4),
        "self_attn.k_proj.weight is [64, 128]; config.json describes [128, 128]",
    ),
    "more layers than weights": (
        lambda w: w.config(num_hidden_layers=3),
        "tensor model.layers.2.input_layernorm.weight is missing; config.json describes 3 layers",
    ),
    "a head neither tied nor stored": (
        lambda w: w.config(tie_word_embeddings=False),
        "lm_head.weight is not stored and config.json does not say that the embeddings are tied",
    ),
    "a bias missing": (
        lambda w: w.rewrite(**{"model.layers.1.self_attn.k_proj.bias": None}),
        "tensor model.layers.1.self_attn.k_proj.bias is missing",
    ),
    "a norm of another size": (
        lambda w: w.rewrite(**{"model.norm.weight": bf16(np.zeros(64))}),
        "tensor model.norm.weight is [64]; config.json describes [128]",
    ),
    "32-bit weights": (
        lambda w: w.rewrite(
            **{
                name: array(np.zeros(tensor.shape, dtype=np.float32))
                for name, tensor in MODEL.tensors().items()
            }
        ),
        "the weights are F32; qkit quantizes from 16 bits",
    ),
    "a shard missing": (
        lambda w: (w.model / SECOND).unlink(),
        f"1 of 2 shards are missing: {SECOND}",
    ),
    "a shard truncated": (
        lambda w: truncate(w.model / SECOND, 9_000),
        f"{SECOND} is truncated: it has 9000 bytes, its header promises",
    ),
    "a shard truncated in its header": (
        lambda w: truncate(w.model / FIRST, 100),
        f"{FIRST} is truncated inside its header: it has 100 bytes",
    ),
    "an empty shard": (
        lambda w: truncate(w.model / FIRST, 0),
        f"{FIRST} is truncated: it has 0 bytes",
    ),
    "bytes after a shard's end": (
        lambda w: (w.model / FIRST).open("ab").write(b"more"),
        f"{FIRST} is longer than it should be",
    ),
    "a Git LFS pointer": (
        lambda w: (w.model / FIRST).write_text("version https://git-lfs.github.com/spec/v1"),
        f"{FIRST} is a Git LFS pointer, not the weights",
    ),
    "a shard that is no safetensors": (
        lambda w: (w.model / FIRST).write_bytes(b"\xff" * 200),
        f"{FIRST} is not a safetensors file",
    ),
    "a shard too many": (
        lambda w: write_safetensors(w.model / "extra.safetensors", {"x": bf16(np.zeros(4))}),
        "1 safetensors files do not belong to the checkpoint: extra.safetensors",
    ),
    "an index that names a shard that is not there": (
        lambda w: index_names(w, "model.norm.weight", "model-00003-of-00003.safetensors"),
        "1 of 3 shards are missing: model-00003-of-00003.safetensors",
    ),
    "an index that names a tensor that is not there": (
        lambda w: index_names(w, "model.ghost.weight", SECOND),
        "names 1 tensors that are not in the shard it gives for them: model.ghost.weight",
    ),
    "an index without a map": (
        lambda w: write_json(w.model / INDEX, {"metadata": {}}),
        f"{INDEX} has no weight_map",
    ),
    "shards without an index": (
        lambda w: (w.model / INDEX).unlink(),
        "there are 2 safetensors files but neither model.safetensors nor",
    ),
    "no weights": (
        lambda w: [path.unlink() for path in w.model.glob("model*")],
        "'model' has no weights (*.safetensors)",
    ),
    "pickled weights": (
        lambda w: only(w, "pytorch_model.bin"),
        "the weights are pickled PyTorch files (pytorch_model.bin)",
    ),
    "GGUF": (
        lambda w: only(w, "model-q4_k_m.gguf"),
        "the weights are GGUF (model-q4_k_m.gguf), which is quantized for llama.cpp",
    ),
    "GGUF without a config": (
        lambda w: [only(w, "model.gguf"), (w.model / "config.json").unlink()],
        "the weights are GGUF (model.gguf), which is quantized for llama.cpp",
    ),
    "quantized by compressed-tensors": (
        lambda w: w.config(quantization_config={"quant_method": "compressed-tensors"}),
        "'model' is quantized already: compressed-tensors",
    ),
    "quantized by GPTQ": (
        lambda w: w.config(quantization_config={"quant_method": "gptq", "bits": 4}),
        "'model' is quantized already: gptq (4 bit)",
    ),
    "quantized by AutoAWQ, of old": (
        lambda w: write_json(w.model / "quant_config.json", {"w_bit": 4}),
        "'model' is quantized already: awq (quant_config.json)",
    ),
    "another architecture": (
        lambda w: w.config(architectures=["LlamaForCausalLM"]),
        "LlamaForCausalLM is not an architecture qkit can quantize",
    ),
    "an architecture of the checkpoint's own code": (
        lambda w: w.config(
            architectures=["QWenLMHeadModel"],
            model_type="qwen",
            auto_map={"AutoModelForCausalLM": "modeling_qwen.QWenLMHeadModel"},
        ),
        "QWenLMHeadModel is not an architecture qkit can quantize",
    ),
    "no tokenizer": (
        lambda w: (w.model / "tokenizer.json").unlink(),
        "the checkpoint has no tokenizer (tokenizer.json, or vocab.json with merges.txt)",
    ),
    "groups that do not divide": (
        lambda w: [w.config(intermediate_size=192), w.rewrite(TinyQwen2(128, 192))],
        "group size 128 does not divide the 192 inputs of model.layers.0.mlp.down_proj",
    ),
}

#: Found with the tokenizer, which `qkit plan` does not load.
TOKENIZERS: dict[str, Case] = {
    "a broken tokenizer": (
        lambda w: (w.model / "tokenizer.json").write_text("{}"),
        "the checkpoint's tokenizer cannot be loaded",
    ),
    "a tokenizer of the checkpoint's own code": (
        remote_tokenizer,
        "the checkpoint's tokenizer cannot be loaded",
    ),
    "chats without a template": (
        lambda w: [
            (w.model / "chat_template.jinja").unlink(),
            write_tokenizer(w.model, chat_template=None),
            w.data([{"messages": [{"role": "user", "content": "hello"}]}]),
        ],
        "the calibration rows are chats and the checkpoint's tokenizer has no chat template",
    ),
    "a template that refuses": (
        lambda w: [
            (w.model / "chat_template.jinja").write_text("{{ raise_exception('no system') }}"),
            w.data([{"messages": [{"role": "user", "content": "hello"}]}]),
        ],
        "the chat template refuses this row: no system where: data.jsonl:1",
    ),
}

CALIBRATION: dict[str, Case] = {
    "not there": (
        lambda w: (w.root / "data.jsonl").unlink(),
        "there is no calibration file './data.jsonl'",
    ),
    "empty": (lambda w: w.data(""), "the calibration file is empty where: data.jsonl"),
    "blank": (lambda w: w.data(" \n\n"), "the calibration file is blank where: data.jsonl"),
    "blank rows": (
        lambda w: w.data([{"text": ""}, {"text": " "}, {"text": None}]),
        "the calibration data holds 0 tokens in 3 rows (3 of them without text)",
    ),
    "too short": (
        lambda w: w.data([{"text": "abc"}]),
        "the calibration data holds 3 tokens in 1 rows",
    ),
    "a broken line": (
        lambda w: w.data('{"text": "fine"}\n\n{"text": "cut\n'),
        "where: data.jsonl:3",
    ),
    "a row that is a number": (
        lambda w: w.data([{"text": "fine"}, 42]),
        "a calibration row is int, not an object or a text where: data.jsonl:2",
    ),
    "a broken array": (
        lambda w: w.data('[{"text": "fine"},\n{"text": ', "data.json"),
        "the file is not valid JSON: Expecting value: line 2 column 10 (char 28)",
    ),
    "one object": (
        lambda w: w.data('{\n"text": "fine"\n}', "data.json"),
        "the JSON file holds one object, not an array of rows",
    ),
    "UTF-16": (
        lambda w: w.data(TEXT.encode("utf-16")),
        "data.jsonl is UTF-16 (or binary), not UTF-8",
    ),
    "UTF-16 without a mark": (
        lambda w: w.data("plain text".encode("utf-16-le"), "data.txt"),
        "data.txt is UTF-16 (or binary), not UTF-8",
    ),
    "a byte-order mark before a broken line": (
        lambda w: w.data(b"\xef\xbb\xbf" + TEXT.encode() + b"{\n"),
        "line 21 is not valid JSON",
    ),
    "Latin-1": (
        lambda w: w.data("first\nsecond\ncaf\u00e9\n".encode("latin-1"), "data.txt"),
        "line 3 is not UTF-8 (byte 0xe9) where: data.txt:3",
    ),
    "half a character": (
        lambda w: w.data('{"text": "fine and long enough"}\n{"text": "half \\ud83d"}\n'),
        "the text holds half a character (\\ud83d), which no tokenizer takes where: data.jsonl:2",
    ),
    "an oversized line": (
        lambda w: w.data(TEXT + json.dumps({"text": "x" * (1 << 24)})),
        "line 21 is oversized: it has 16,777,228 characters, and a row may have 16,777,216",
    ),
    "an oversized cell": (
        lambda w: w.data("text\nfine\n" + "x" * ((1 << 24) + 1), "data.csv"),
        "line 3 is not valid CSV: field larger than field limit (16777216)",
    ),
    "no known column": (
        lambda w: w.data([{"prompt": "x", "answer": "y"}]),
        "none of the columns messages, conversations, text is in the calibration data",
    ),
    "a wrong column": (
        lambda w: [
            w.data([{"text": "x", "answer": "y"}]),
            w.recipe["calibration"].update(column="answers"),
        ],
        "the calibration data has no column 'answers', did you mean 'answer'?",
    ),
    "a column of plain texts": (
        lambda w: [w.data("text", "data.txt"), w.recipe["calibration"].update(column="text")],
        "calibration.column is 'text', but the rows are plain texts",
    ),
    "a column of numbers": (
        lambda w: w.data([{"text": 5}]),
        "column 'text' holds int, not a text or a list of messages",
    ),
    "texts and objects mixed": (
        lambda w: w.data(["text", {"text": "x"}]),
        "some calibration rows are texts and this one is not where: data.jsonl:2",
    ),
    "an unknown role": (
        lambda w: w.data([{"conversations": [{"from": "alien", "value": "hello"}]}]),
        "a chat turn's role is 'alien'",
    ),
    "a turn without content": (
        lambda w: w.data([{"messages": [{"role": "user"}]}]),
        "a chat turn has no text in 'content' (or 'value')",
    ),
    "a turn that is a text": (
        lambda w: w.data([{"messages": ["hello"]}]),
        "a chat turn is str, not an object",
    ),
    "a ragged CSV": (
        lambda w: w.data("text,label\nhello,1\nhello, world,1\n", "data.csv"),
        "line 3 has another number of columns than the header",
    ),
    "a CSV with an open quote": (
        lambda w: w.data('text\n"never closed\n', "data.csv"),
        "line 2 is not valid CSV",
    ),
    "a CSV without rows": (
        lambda w: w.data("text\n", "data.csv"),
        "the calibration data holds no row",
    ),
    "a Parquet file that is none": (
        lambda w: w.data("text, but no table", "data.parquet"),
        "the Parquet file cannot be read",
    ),
    "another kind of file": (
        lambda w: w.data("x", "data.arrow"),
        "calibration files of the kind '.arrow' are not read",
    ),
    "a folder without data": (
        lambda w: [(w.root / "set").mkdir(), w.recipe["calibration"].update(source="./set")],
        "the calibration folder holds no file qkit reads",
    ),
}

RECIPES: dict[str, Case] = {
    "an unknown key": (
        lambda w: w.recipe.update(modle="x"),
        "modle: unknown key, did you mean 'model'?",
    ),
    "an unknown key of a variant": (
        lambda w: w.variant(method="awq", groupsize=64),
        "variants.0.groupsize: unknown key, did you mean 'group_size'?",
    ),
    "an unknown key of the calibration": (
        lambda w: w.recipe["calibration"].update(sample=3),
        "calibration.sample: unknown key, did you mean 'samples'?",
    ),
    "a method there is not": (
        lambda w: w.variant(method="gtpq"),
        "variants.0.method: Input should be 'awq', 'gptq', 'fp8', 'smoothquant' or 'rtn'",
    ),
    "a backend there is not": (
        lambda w: w.variant(method="awq", backend="autoqwa"),
        "variants.0.backend: Input should be 'llmcompressor', 'autoawq', 'gptqmodel' or 'autogptq'",
    ),
    "a group size there is not": (
        lambda w: w.variant(method="awq", group_size=100),
        "variants.0.group_size: Input should be 32, 64 or 128 (found 100)",
    ),
    "a setting the method does not read": (
        lambda w: w.variant(method="fp8", group_size=64),
        "fp8 does not read `group_size`; awq, gptq and rtn do",
    ),
    "no samples": (
        lambda w: w.recipe["calibration"].update(samples=0),
        "calibration.samples: Input should be greater than or equal to 1 (found 0)",
    ),
    "a row twice": (
        lambda w: w.recipe.update(variants=[{"method": "awq"}] * 2),
        "'awq' is there twice; give one a `name`",
    ),
    "a name that is a path": (
        lambda w: w.variant(method="awq", name="../elsewhere"),
        "variants.0.name: String should match pattern",
    ),
    "ignore that names nothing": (
        lambda w: w.variant(method="awq", ignore=["ln_head"]),
        "ignore names 'ln_head', which is no Linear layer of the model, did you mean 'lm_head'?",
    ),
    "ignore that is no pattern": (
        lambda w: w.variant(method="awq", ignore=["re:("]),
        "ignore: 're:(' is not a regular expression",
    ),
    "everything ignored": (
        lambda w: w.variant(method="awq", ignore=["re:.*"]),
        "ignore names every Linear layer: nothing would be quantized",
    ),
    "an activation order that is gone": (
        lambda w: w.variant(method="gptq", actorder="group"),
        "actorder 'group' was removed from llm-compressor",
    ),
    "FP8 blocks that are not whole": (
        lambda w: w.variant(method="fp8", scales="block"),
        "model.layers.0.self_attn.k_proj is 64 x 128, not whole blocks of 128 x 128",
    ),
    "a backend that does not do the method": (
        lambda w: w.variant(method="fp8", backend="gptqmodel"),
        "backend 'gptqmodel' does not do fp8; it does awq, gptq fix: for fp8 use backend"
        " llmcompressor",
    ),
    "a backend that does not read a setting": (
        lambda w: w.variant(method="awq", backend="autoawq", kv_cache="fp8"),
        "backend 'autoawq' does not read `kv_cache`",
    ),
    "a backend that needs a GPU": (
        lambda w: w.variant(method="gptq", backend="autogptq"),
        "backend 'autogptq' quantizes on an NVIDIA GPU only, and this job runs on the CPU",
    ),
    "a backend that needs other shapes": (
        lambda w: [
            w.config(num_key_value_heads=1),
            w.rewrite(TinyQwen2(128, 256, kv_heads=1)),
            w.variant(method="awq", backend="autoawq"),
        ],
        "k_proj has 32 outputs; backend 'autoawq' needs a multiple of 64",
    ),
    "a model that is not there": (
        lambda w: w.recipe.update(model="./nowhere"),
        "there is no checkpoint folder './nowhere'",
    ),
    "a model that is a file": (
        lambda w: w.recipe.update(model="./data.jsonl"),
        "there is no checkpoint folder './data.jsonl'",
    ),
    "a model the hub would have": (
        lambda w: w.recipe.update(model="Qwen/Qwen2.5-0.5B"),
        "model 'Qwen/Qwen2.5-0.5B' is not on this machine and the hub is switched off",
    ),
}


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_a_broken_checkpoint(world: World, case: str) -> None:
    damage, message = CHECKPOINTS[case]
    damage(world)
    refused(world, message)
    code, output = world.run("plan", "recipe.yaml")
    if case == "no weights":  # before a download there is a plan all the same
        assert (code, "no weights in this folder" in output) == (0, True)
    else:
        assert code in (1, 2)
        assert message in output


@pytest.mark.parametrize("case", TOKENIZERS)
def test_a_broken_tokenizer(world: World, case: str) -> None:
    damage, message = TOKENIZERS[case]
    damage(world)
    refused(world, message)
    assert not (world.root / "code-was-run").exists()
    assert "tokenization_x" not in sys.modules


@pytest.mark.parametrize("case", CALIBRATION)
def test_broken_calibration_data(world: World, case: str) -> None:
    damage, message = CALIBRATION[case]
    damage(world)
    refused(world, message)


@pytest.mark.parametrize("case", RECIPES)
def test_a_broken_recipe(world: World, case: str) -> None:
    damage, message = RECIPES[case]
    damage(world)
    refused(world, message)


def test_one_bad_file_stops_the_job_before_its_first_variant(world: World) -> None:
    world.recipe["variants"] = [{"method": "fp8"}, {"method": "awq"}]
    world.data('{"text": \n')
    refused(world, "line 1 is not valid JSON")


def test_a_recipe_that_is_no_yaml(world: World) -> None:
    (world.root / "broken.yaml").write_text("name: [")
    code, output = world.run("quantize", "--recipe", "broken.yaml")
    assert code == 2
    assert "the recipe is not valid YAML" in output
    assert world.variants() == []
