"""What `qkit plan` finds: every check with its message, and the rows that follow."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fakes.checkpoints import (
    TinyQwen2,
    bf16,
    read_json,
    write_json,
    write_safetensors,
    write_tokenizer,
)
from fakes.qwen_configs import config_folder

from qkit.errors import InputError
from qkit.measurements import Hardware
from qkit.quantize import resources
from qkit.quantize.checkpoint import describe_config, inspect_checkpoint
from qkit.quantize.devices import DEVICES, Device, find_device
from qkit.quantize.forecast import Check, Forecast, Question, make_forecast
from qkit.quantize.resources import ToMake, check_resources, disk_rooms, existing_parent
from qkit.recipe import Recipe, Variant


def forecast(
    folder: Path,
    *,
    gpus: tuple[str, ...] = ("A800-80",),
    tensor_parallel: int = 1,
    gpu_here: bool = True,
    avx512: bool | None = None,
    **recipe: object,
) -> Forecast:
    asked = Recipe.model_validate({"name": "test", "model": str(folder), **recipe})
    cards = tuple(map(find_device, gpus))
    return make_forecast(
        asked,
        folder,
        Question(
            cards, tensor_parallel, length=640, concurrency=16, gpu_here=gpu_here, avx512=avx512
        ),
        [
            ToMake(v, asked.calibration_of(v), folder.parent / "run" / v.label / "model")
            for v in asked.variants
        ],
    )


def to_make(folder: Path, *variants: Variant) -> list[ToMake]:
    recipe = Recipe(name="test", model="m")
    return [
        ToMake(v, recipe.calibration_of(v), folder.parent / "run" / v.label / "model")
        for v in variants
    ]


def check(found: Forecast, name: str, status: str) -> Check:
    matches = [c for c in found.checks if (c.name, c.status) == (name, status)]
    assert len(matches) == 1, [(c.name, c.status, c.text) for c in found.checks]
    return matches[0]


def edit_config(folder: Path, **changes: object) -> None:
    write_json(folder / "config.json", {**read_json(folder / "config.json"), **changes})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return TinyQwen2(hidden=128, intermediate=256).write(tmp_path / "model")


def test_a_whole_checkpoint_has_nothing_in_the_way(model: Path) -> None:
    found = forecast(model)
    assert found.ok
    assert {c.status for c in found.checks} == {"ok"}
    assert check(found, "calibration", "ok").text.endswith("which planning does not ask")
    assert check(found, "files", "ok").text == (
        "26 tensors in 1 safetensors file, complete, with the shapes of config.json"
    )
    assert [row.label for row in found.variants] == ["bf16", "awq", "gptq", "fp8", "smoothquant"]
    assert all(row.makeable for row in found.variants)
    baseline, awq, *_ = found.variants
    assert baseline.ratio == 1
    assert awq.weight_bytes == (awq.quantized_bytes or 0) + (awq.unquantized_bytes or 0)


def test_a_config_alone_gives_the_same_figures(model: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(model / "config.json", bare)
    found, whole = forecast(bare), forecast(model)
    assert found.ok
    assert not found.weights_stored
    assert "all shapes come from config.json" in check(found, "files", "note").text
    assert found.variants == whole.variants
    assert found.parameters == whole.parameters


def remove(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def add_shard(folder: Path) -> None:
    write_safetensors(folder / "model-00009-of-00009.safetensors", {"x": bf16(np.zeros(4))})


def add_unlisted_tensor(folder: Path) -> None:
    shard = folder / "model-00001-of-00002.safetensors"
    index = read_json(folder / "model.safetensors.index.json")
    name = next(n for n, file in index["weight_map"].items() if file == shard.name)
    del index["weight_map"][name]
    write_json(folder / "model.safetensors.index.json", index)


PROBLEMS: list[tuple[str, TinyQwen2, Callable[[Path], object], str, str, str]] = [
    (
        "a missing shard",
        TinyQwen2(hidden=128, shards=2),
        remove("model-00002-of-00002.safetensors"),
        "files",
        "1 of 2 shards are missing: model-00002-of-00002.safetensors",
        "download or copy the missing files",
    ),
    (
        "a shard too many",
        TinyQwen2(hidden=128, shards=2),
        add_shard,
        "files",
        "1 safetensors files do not belong to the checkpoint: model-00009-of-00009.safetensors",
        "move them out of the folder",
    ),
    (
        "a shard beside one whole file",
        TinyQwen2(hidden=128),
        add_shard,
        "files",
        "1 safetensors files do not belong to the checkpoint: model-00009-of-00009.safetensors",
        "move them out of the folder",
    ),
    (
        "a tensor the index does not name",
        TinyQwen2(hidden=128, shards=2),
        add_unlisted_tensor,
        "files",
        "the shards hold 1 tensors that model.safetensors.index.json does not name: model.embed",
        "different versions",
    ),
    (
        "an untied head that is missing",
        TinyQwen2(hidden=128),
        lambda folder: edit_config(folder, tie_word_embeddings=False),
        "files",
        "lm_head.weight is not stored and config.json does not say that the embeddings are tied",
        '"tie_word_embeddings": true',
    ),
    (
        "another vocabulary",
        TinyQwen2(hidden=128),
        lambda folder: edit_config(folder, vocab_size=321),
        "files",
        "tensor model.embed_tokens.weight is [320, 128]; config.json describes [321, 128]",
        "different models",
    ),
    (
        "pickled weights",
        TinyQwen2(hidden=128),
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        "files",
        "the weights are pickled PyTorch files (pytorch_model.bin), which can run code",
        "save_pretrained",
    ),
    (
        "GGUF weights",
        TinyQwen2(hidden=128),
        lambda folder: (folder / "model.safetensors").rename(folder / "q4.gguf"),
        "files",
        "the weights are GGUF (q4.gguf), which is quantized for llama.cpp",
        "give the original Hugging Face checkpoint",
    ),
    (
        "quantized already",
        TinyQwen2(hidden=128),
        lambda folder: edit_config(folder, quantization_config={"quant_method": "awq", "bits": 4}),
        "source",
        "'model' is quantized already: awq (4 bit)",
        "give the original BF16 or FP16 checkpoint",
    ),
    (
        "no tokenizer",
        TinyQwen2(hidden=128),
        remove("tokenizer.json"),
        "source",
        "the checkpoint has no tokenizer",
        "copy the tokenizer's files",
    ),
    (
        "a group size that does not divide",
        TinyQwen2(hidden=128, intermediate=192),
        Path.exists,  # the sizes alone are the trouble
        "awq",
        "group size 128 does not divide the 192 inputs of model.layers.0.mlp.down_proj",
        "use group_size 64",
    ),
]


@pytest.mark.parametrize("case", PROBLEMS, ids=[case[0] for case in PROBLEMS])
def test_what_is_in_the_way_is_a_problem_with_a_way_out(tmp_path: Path, case) -> None:
    _, source, damage, name, text, fix = case
    folder = source.write(tmp_path / "model")
    damage(folder)
    found = forecast(folder)
    assert not found.ok
    problem = check(found, name, "problem")
    assert text in problem.text
    assert fix in (problem.fix or "")


def test_a_variant_that_cannot_be_made_is_an_empty_row(tmp_path: Path) -> None:
    folder = TinyQwen2(hidden=128, intermediate=192).write(tmp_path / "model")
    rows = {row.label: row for row in forecast(folder).variants}
    assert (rows["awq"].makeable, rows["awq"].weight_bytes, rows["awq"].cards) == (False, None, ())
    assert rows["fp8"].makeable
    assert rows["fp8"].weight_bytes


def test_the_three_spellings_of_the_head(tmp_path: Path) -> None:
    tied = forecast(TinyQwen2(hidden=128).write(tmp_path / "tied"))
    assert check(tied, "embeddings", "ok").text.startswith("tied: the head is the embedding matrix")
    untied = forecast(TinyQwen2(hidden=128, tied=False).write(tmp_path / "untied"))
    assert "lm_head.weight is a matrix of its own" in check(untied, "embeddings", "ok").text
    both = TinyQwen2(hidden=128, tied=False, config={"tie_word_embeddings": True})
    note = check(forecast(both.write(tmp_path / "both")), "embeddings", "note")
    assert "config.json says they are tied, and lm_head.weight is stored too" in note.text
    assert "set tie_word_embeddings to false" in (note.fix or "")


def test_code_in_a_checkpoint_is_named_and_not_run_unless_asked(model: Path) -> None:
    edit_config(model, auto_map={"AutoModelForCausalLM": "modeling_x.XForCausalLM"})
    quiet = check(forecast(model), "remote code", "note")
    assert "(modeling_x.XForCausalLM); it is not run" in quiet.text
    loud = check(forecast(model, trust_remote_code=True), "remote code", "note")
    assert "own Python code will run, as the recipe allows: modeling_x.XForCausalLM" in loud.text


def test_a_card_that_cannot_run_a_variant_is_a_problem(model: Path, monkeypatch) -> None:
    monkeypatch.setitem(DEVICES, "RTX5090", Device("RTX5090", 32 * 10**9, 1792e9, (12, 0)))
    found = forecast(model, gpus=("RTX5090", "H100"), variants=[{"method": "smoothquant"}])
    problem = check(found, "smoothquant", "problem")
    assert problem.text.startswith("does not run on RTX5090: vLLM has no INT8 W8A8 kernels")
    [row] = [row for row in found.variants if row.label == "smoothquant"]
    assert [card.serving is None for card in row.cards] == [True, False]


def test_the_asked_number_of_cards_decides(tmp_path: Path) -> None:
    folder = config_folder(tmp_path, "72B")
    found = forecast(folder, tensor_parallel=4)
    assert not found.ok
    assert check(found, "awq", "problem").text == (
        "cannot be split over 4 cards: down_proj: 29,568 / 4 = 7,392 inputs, not whole groups of"
        " 128"
    )
    rows = {row.label: row for row in found.variants}
    assert rows["awq"].cards[0].serving is None
    fp8 = rows["fp8"].cards[0].serving
    assert fp8 is not None
    assert fp8.fits
    assert forecast(folder, tensor_parallel=4, variants=[{"method": "fp8"}]).ok


def test_what_does_not_fit_is_a_note(tmp_path: Path) -> None:
    found = forecast(config_folder(tmp_path, "72B"))
    assert found.ok
    note = check(found, "bf16", "note")
    assert note.text == "does not fit on 1 x A800-80 with one request of 640 tokens"


def test_a_folder_without_config_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no config\.json"):
        forecast(tmp_path)
    with pytest.raises(InputError, match="is not there"):
        forecast(tmp_path / "nowhere")


def test_an_unknown_architecture_needs_its_weights(tmp_path: Path) -> None:
    folder = config_folder(tmp_path, "0.5B")
    edit_config(folder, model_type="llama")
    with pytest.raises(InputError, match="tensors of a 'llama' model cannot be told"):
        describe_config(folder)


def test_the_smoothing_mappings_are_listed(model: Path, tmp_path: Path) -> None:
    found = forecast(model)
    assert check(found, "awq", "ok").text == (
        "smooths input_layernorm → q_proj, k_proj, v_proj; post_attention_layernorm → gate_proj,"
        " up_proj; up_proj → down_proj. Skipped: v_proj → o_proj (grouped-query attention, v_proj's"
        " 64 outputs are not o_proj's 128 inputs)"
    )
    assert check(found, "smoothquant", "ok").text == (
        "smooths input_layernorm → q_proj, k_proj, v_proj; post_attention_layernorm → gate_proj,"
        " up_proj"
    )
    assert not [c for c in found.checks if c.name in ("gptq", "fp8")]
    every_head = TinyQwen2(hidden=128, intermediate=256, kv_heads=4).write(tmp_path / "mha")
    without_mlp = {"method": "awq", "ignore": ["lm_head", "re:.*(gate|up)_proj$"]}
    assert check(forecast(every_head, variants=[without_mlp]), "awq", "ok").text == (
        "smooths input_layernorm → q_proj, k_proj, v_proj; v_proj → o_proj; up_proj → down_proj."
        " Skipped: post_attention_layernorm → gate_proj, up_proj (all its layers are ignored)"
    )


def test_what_a_backend_cannot_do_is_a_problem(model: Path) -> None:
    asked = [
        {"method": "gptq", "backend": "autoawq"},
        {"method": "awq", "backend": "gptqmodel", "symmetric": True},
        {"method": "gptq", "backend": "autogptq"},
    ]
    found = forecast(model, variants=asked, accelerator="cpu")
    assert check(found, "gptq-autoawq", "problem").text == (
        "backend 'autoawq' does not do gptq; it does awq"
    )
    assert "only with a zero point" in check(found, "awq-gptqmodel", "problem").text
    text = "backend 'autogptq' quantizes on an NVIDIA GPU only, and this job runs on the CPU"
    assert check(found, "gptq-autogptq", "problem").text == text
    assert [row.makeable for row in found.variants] == [True, False, False, False]
    # Left open, the plan is for the cards: what this machine lacks is a note.
    elsewhere = forecast(model, variants=asked[2:], gpu_here=False)
    assert elsewhere.ok
    note = check(elsewhere, "gptq-autogptq", "note")
    assert note.text == "backend autogptq quantizes on an NVIDIA GPU only; this machine has none"


W8A16 = {"method": "rtn", "weight_bits": 8}


NO_W8A16 = "vLLM's CPU build has no kernel for 8-bit weights with 16-bit inputs"
NO_W4A16 = "vLLM's CPU build serves 4-bit weights with AVX-512 only"
NO_FP8_CACHE = "vLLM's CPU build keeps an FP8 KV cache with AVX-512 only"
STATIC = {"method": "fp8", "scales": "static"}
# Two key heads of 32 are half a block.
BLOCK = {"method": "fp8", "scales": "block", "ignore": ["lm_head", "re:.*[kv]_proj$"]}
NO_TENSOR_SCALES = "vLLM's CPU build does not serve FP8 with one scale a tensor"
NO_BLOCK_SCALES = "vLLM's CPU build does not serve FP8 with one scale a block"


@pytest.mark.parametrize(
    ("variant", "avx512", "lacking"),
    [
        (W8A16, None, NO_W8A16),
        (W8A16, True, NO_W8A16),
        (STATIC, None, NO_TENSOR_SCALES),
        (STATIC, True, NO_TENSOR_SCALES),
        (BLOCK, None, NO_BLOCK_SCALES),
        (BLOCK, True, NO_BLOCK_SCALES),
        ({"method": "fp8"}, False, None),
        ({"method": "awq"}, None, None),
        ({"method": "awq"}, True, None),
        ({"method": "awq"}, False, NO_W4A16),
        ({"method": "smoothquant", "scales": "static"}, False, None),
        ({"method": "smoothquant", "kv_cache": "fp8"}, False, NO_FP8_CACHE),
        ({"method": "smoothquant", "kv_cache": "fp8"}, True, None),
    ],
)
def test_what_a_cpu_makes_but_does_not_serve_is_a_note(
    model: Path, variant: dict[str, object], avx512: bool | None, lacking: str | None
) -> None:
    for settings in ({"accelerator": "cpu"}, {"gpu_here": False}):
        found = forecast(model, variants=[variant], avx512=avx512, **settings)
        notes = [c.text for c in found.checks if c.name == variant["method"] and c.status == "note"]
        wanted = f"can be made without a GPU, but not served here: {lacking}"
        assert notes == ([wanted] if lacking else [])
    served = forecast(model, variants=[variant], avx512=avx512).checks
    assert not [c for c in served if c.name == variant["method"] and c.status == "note"]


def test_8_bit_zero_points_have_one_kernel_on_one_kind_of_card(model: Path) -> None:
    asked = [{**W8A16, "symmetric": False}]
    ampere = forecast(model, variants=asked)
    problem = check(ampere, "rtn", "problem")
    assert problem.text == (
        "does not run on A800-80: vLLM has no kernel for 8-bit weights with zero points on 8.0:"
        " Marlin takes none"
    )
    assert "symmetric: true" in (problem.fix or "")
    hopper = forecast(model, gpus=("H100",), variants=asked)
    assert "serve.kernel asks for Marlin" in check(hopper, "rtn", "problem").text
    machete = forecast(model, gpus=("H100",), variants=asked, serve={"kernel": "auto"})
    assert machete.ok
    [row] = [row for row in machete.variants if row.label == "rtn"]
    assert row.cards[0].verdict.reason == "8-bit weights (Machete, not Marlin)"
    assert forecast(model, variants=[W8A16]).ok


# ---------------------------------------------------------------------------------- calibration


def local_data(folder: Path, *texts: str) -> dict[str, object]:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return {"source": str(path), "samples": 2, "seq_len": 16}


def test_local_calibration_data_is_looked_at(model: Path, tmp_path: Path) -> None:
    data = local_data(tmp_path, "eighteen letters xxx", "", "十二")
    found = forecast(model, calibration=data)
    assert check(found, "calibration", "ok").text == (
        f"2 x 16 tokens of {data['source']}; 3 rows, 1 of them without text: Latin 90 %, Han 10 %"
    )
    short = forecast(model, calibration={**data, "samples": 10})
    assert short.ok
    assert check(short, "calibration", "note").text == (
        "too little text: 26 bytes, and a token takes one at least"
    )
    # Nothing is said of data that no variant needs.
    data_free = forecast(model, calibration=data, variants=[{"method": "fp8"}])
    assert not [c for c in data_free.checks if c.name == "calibration"]


def test_a_broken_calibration_file_is_a_problem(model: Path, tmp_path: Path) -> None:
    data = local_data(tmp_path, "fine")
    with Path(str(data["source"])).open("a") as stream:
        stream.write('{"text": \n')
    problem = check(forecast(model, calibration=data), "calibration", "problem")
    assert problem.text.startswith("line 2 is not valid JSON")
    assert problem.text.endswith("data.jsonl:2)")
    missing = forecast(model, calibration={**data, "source": "./none.jsonl"})
    assert "there is no calibration file" in check(missing, "calibration", "problem").text


def test_data_of_one_script_is_a_note_where_the_vocabulary_holds_more(
    model: Path, tmp_path: Path
) -> None:
    data = local_data(tmp_path, "English words and nothing but English words")
    assert check(forecast(model, calibration=data), "calibration", "ok")
    write_tokenizer(model, words=("на", "的"))
    note = check(forecast(model, calibration=data), "calibration", "note")
    assert "also holds Cyrillic, Han: text in those may lose more accuracy" in note.text


# ------------------------------------------------------------------------------------ resources


def disk_of(monkeypatch, free: int) -> None:
    monkeypatch.setattr(
        resources.shutil, "disk_usage", lambda _: SimpleNamespace(total=free, used=0, free=free)
    )


def test_a_full_disk_is_a_problem_where_the_weights_are(
    model: Path, tmp_path: Path, monkeypatch
) -> None:
    disk_of(monkeypatch, 1_000_000)
    found = forecast(model)
    assert check(found, "disk", "problem").text.endswith(f"1 MB free in {tmp_path}")
    assert not found.ok
    # Planned from a config alone, this is hardly the machine that will do the work.
    assert check(forecast(config_folder(tmp_path, "7B")), "disk", "note").fix


def test_little_memory_is_a_note(model: Path, monkeypatch) -> None:
    monkeypatch.setattr(
        resources.psutil, "virtual_memory", lambda: SimpleNamespace(available=10**8)
    )
    found = forecast(model)
    assert found.ok
    assert "100 MB available here" in check(found, "memory", "note").text


CPU = Hardware(accelerator="cpu", name="a CPU", memory_bytes=2**34, cpu="a CPU", cpu_cores=2)


def gpu(capability: str) -> Hardware:
    return CPU.model_copy(
        update={"accelerator": "cuda", "name": "NVIDIA X", "compute_capability": capability}
    )


def test_a_quantize_is_refused_before_it_fills_the_disk(model: Path, monkeypatch) -> None:
    checkpoint = inspect_checkpoint(model)
    work = to_make(model, Variant(method="fp8"), Variant(method="gptq"))
    check_resources(checkpoint, work, CPU)
    disk_of(monkeypatch, 1_000_000)
    with pytest.raises(InputError) as caught:
        check_resources(checkpoint, work, CPU)
    assert caught.value.what.startswith("the disk has 0.00 GB free; making fp8, gptq takes about")
    assert caught.value.where == str(model.parent)
    check_resources(checkpoint, [], CPU)


@pytest.mark.parametrize(
    ("method", "capability", "message"),
    [
        ("fp8", "7.5", "from compute capability 8.0 on; this is 7.5"),
        ("awq", "7.0", "from compute capability 8.0 on; this is 7.0"),
        ("smoothquant", "12.0", "no INT8 W8A8 kernels for compute capability 12.0"),
    ],
)
def test_a_quantize_is_refused_where_its_result_would_not_run(
    model: Path, method: str, capability: str, message: str
) -> None:
    checkpoint = inspect_checkpoint(model)
    work = to_make(model, Variant.model_validate({"method": method}))
    with pytest.raises(InputError, match=message) as caught:
        check_resources(checkpoint, work, gpu(capability))
    assert f"{method} does not run on this machine's X" in caught.value.what
    assert "--accelerator cpu" in (caught.value.fix or "")
    check_resources(checkpoint, work, gpu("8.9"))
    check_resources(checkpoint, work, CPU)


def test_a_successor_needs_room_beside_its_predecessor_one_at_a_time(model: Path) -> None:
    checkpoint = inspect_checkpoint(model)
    work = to_make(model, Variant(method="fp8"), Variant(method="gptq"))
    [fresh] = disk_rooms(checkpoint, work)
    for item in work:
        item.folder.mkdir(parents=True)
    [again] = disk_rooms(checkpoint, work)
    alone = [disk_rooms(checkpoint, [item])[0].needed for item in work]
    assert fresh.needed == sum(alone)
    assert again.needed == max(alone)
    assert existing_parent(model / "a" / "b" / "c") == model.resolve()
