"""Which backend does what, what each is refused, and the proof of what the packed formats hold."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.checkpoints import (
    Array,
    TinyQwen2,
    array,
    bf16,
    read_json,
    write_json,
    write_safetensors,
    write_weights,
)

from qkit import environments
from qkit.cli.options import variants_for
from qkit.errors import EnvironmentMissingError, InputError, MeasurementError
from qkit.protocol import QuantizeRequest, QuantizeResult
from qkit.quantize import job
from qkit.quantize.backend_autoawq import _notes
from qkit.quantize.backend_check import old_rope_settings
from qkit.quantize.backend_shared import skipped_mappings
from qkit.quantize.backends import BACKENDS, DEFAULT_BACKEND, check_backend
from qkit.quantize.checkpoint import inspect_checkpoint, split_bytes
from qkit.quantize.estimate import weight_bytes
from qkit.quantize.job import quantize_variant
from qkit.quantize.safetensors_header import read_bytes
from qkit.quantize.verify_gptq_awq import verify_packed_variant
from qkit.recipe import BACKENDS as RECIPE_BACKENDS
from qkit.recipe import METHODS, Calibration, Recipe, Variant
from qkit.run import Job
from qkit.store import RunStore
from qkit.worker import WorkerResult

MODEL = TinyQwen2(hidden=128, intermediate=256, heads=2, kv_heads=1)
LAYER = "model.layers.0.mlp.gate_proj"


def variant_of(method: str, backend: str, **settings: Any) -> Variant:
    return Variant.model_validate({"method": method, "backend": backend, **settings})


# -------------------------------------------------------------------------------------- the table


def test_the_table_is_whole() -> None:
    assert tuple(BACKENDS) == RECIPE_BACKENDS
    assert BACKENDS[DEFAULT_BACKEND].methods == METHODS
    assert Variant(method="awq").backend == DEFAULT_BACKEND
    for name, backend in BACKENDS.items():
        assert set(backend.methods) <= set(METHODS)
        assert (backend.settings or frozenset()) <= Variant.model_fields.keys()
        purpose = environments.BACKENDS[backend.environment]
        assert ("archived" in purpose) == backend.archived == (name in ("autoawq", "autogptq"))
        assert backend.successor is None or not BACKENDS[backend.successor].archived
        assert environments.runs_on(backend.environment, "cpu") != backend.needs_cuda


@pytest.mark.parametrize("name", BACKENDS)
def test_every_entry_is_a_worker_that_imports_without_its_library(name: str) -> None:
    module_name, _, function = BACKENDS[name].entry.partition(":")
    module = importlib.import_module(module_name)
    assert callable(getattr(module, function))
    assert module.REQUEST is QuantizeRequest
    assert module.PACKAGES


def test_a_row_is_named_after_its_backend() -> None:
    assert Variant(method="awq").label == "awq"
    assert Variant(method="awq", backend="autoawq").label == "awq-autoawq"
    assert Variant(method="awq", backend="autoawq", name="mine").label == "mine"


def test_what_the_backend_option_chooses() -> None:
    recipe = Recipe(
        name="r",
        model="m",
        variants=(
            Variant(method="awq", group_size=64),
            Variant(method="gptq", name="own", backend="gptqmodel", group_size=32),
            Variant(method="gptq"),
        ),
    )

    def chosen(methods: tuple[str, ...], backend: str | None) -> list[tuple[str, str, int]]:
        found = variants_for(recipe, methods, backend)
        return [(variant.label, variant.backend, variant.group_size) for variant in found]

    assert chosen(("awq",), None) == [("awq", "llmcompressor", 64)]
    assert chosen((), "autoawq") == [("awq-autoawq", "autoawq", 64)]
    assert chosen((), "gptqmodel") == [
        ("awq-gptqmodel", "gptqmodel", 64),
        ("own", "gptqmodel", 32),
    ]
    # Asked for what it cannot do: kept, to be refused with a reason.
    assert chosen(("fp8",), "autoawq") == [("fp8-autoawq", "autoawq", 128)]


# ------------------------------------------------------------------------------------ the refusals

REFUSED: list[tuple[str, Variant, str, str]] = [
    (
        "another method",
        variant_of("gptq", "autoawq"),
        "backend 'autoawq' does not do gptq; it does awq",
        "for gptq use backend llmcompressor or gptqmodel or autogptq",
    ),
    (
        "fp8",
        variant_of("fp8", "gptqmodel"),
        "backend 'gptqmodel' does not do fp8; it does awq, gptq",
        "for fp8 use backend llmcompressor",
    ),
    (
        "no GPU",
        variant_of("gptq", "autogptq"),
        "backend 'autogptq' quantizes on an NVIDIA GPU only, and this job runs on the CPU",
        "use backend llmcompressor or gptqmodel, or run where there is a GPU",
    ),
    (
        "a KV cache in FP8",
        variant_of("awq", "autoawq", kv_cache="fp8"),
        "backend 'autoawq' does not read `kv_cache`",
        "leave `kv_cache` out, or use backend llmcompressor",
    ),
    (
        "AWQ without zero point",
        variant_of("awq", "autoawq", symmetric=True),
        "vLLM serves the AWQ format that backend 'autoawq' writes only with a zero point",
        "leave `symmetric` out, or use backend llmcompressor",
    ),
    (
        "GPTQ with zero point",
        variant_of("gptq", "gptqmodel", symmetric=False),
        "vLLM serves the GPTQ format that backend 'gptqmodel' writes only without a zero point",
        "leave `symmetric` out, or use backend llmcompressor",
    ),
    (
        "a layer left out",
        variant_of("awq", "gptqmodel", ignore=("lm_head", "re:.*down_proj$")),
        "backend 'gptqmodel' cannot leave out model.layers.0.mlp.down_proj",
        "use ignore: [lm_head], or backend llmcompressor",
    ),
    (
        "the head",
        variant_of("awq", "autoawq", ignore=()),
        "backend 'autoawq' cannot quantize lm_head",
        "use ignore: [lm_head], or backend llmcompressor",
    ),
]


@pytest.mark.parametrize(
    ("variant", "what", "fix"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_what_a_backend_cannot_do_is_refused(
    tmp_path: Path, variant: Variant, what: str, fix: str
) -> None:
    checkpoint = inspect_checkpoint(MODEL.write(tmp_path / "model"))
    with pytest.raises(InputError) as caught:
        check_backend(checkpoint, variant, "cpu")
    assert what in caught.value.what
    assert caught.value.fix == fix


def test_layers_of_odd_sizes_are_refused(tmp_path: Path) -> None:
    # Key heads of 32: AutoAWQ searches 64 rows at a time.
    small = replace(MODEL, heads=4)
    checkpoint = inspect_checkpoint(small.write(tmp_path / "model"))
    with pytest.raises(InputError) as caught:
        check_backend(checkpoint, variant_of("awq", "autoawq"), "cpu")
    assert caught.value.what == (
        "model.layers.0.self_attn.k_proj has 32 outputs; backend 'autoawq' needs a multiple of 64"
    )
    check_backend(checkpoint, variant_of("awq", "gptqmodel"), "cpu")


@pytest.mark.parametrize(
    ("variant", "accelerator"),
    [
        *[(Variant.model_validate({"method": method}), "cpu") for method in METHODS],
        (variant_of("awq", "autoawq", group_size=32), "cpu"),
        (variant_of("awq", "gptqmodel", name="x", symmetric=False), "cpu"),
        (variant_of("gptq", "gptqmodel", weight_bits=8, actorder=None), "cpu"),
        (variant_of("gptq", "autogptq", dampening_frac=0.1), "cuda"),
    ],
)
def test_what_a_backend_can_do_passes(tmp_path: Path, variant: Variant, accelerator: str) -> None:
    checkpoint = inspect_checkpoint(MODEL.write(tmp_path / "model"))
    check_backend(checkpoint, variant, accelerator)


def test_a_job_refuses_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QKIT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("some text\n" * 100)

    def check(variant: Variant) -> None:
        recipe = Recipe(
            name="r",
            model=str(tmp_path / "model"),
            accelerator="cpu",
            calibration=Calibration(source=str(tmp_path / "text.txt"), samples=2, seq_len=16),
            variants=(variant,),
            accuracy=(),
            bench=None,
        )
        Job(recipe, RunStore(tmp_path / "run")).run()

    MODEL.write(tmp_path / "model")
    with pytest.raises(InputError, match="backend 'autogptq' quantizes on an NVIDIA GPU only"):
        check(variant_of("gptq", "autogptq"))
    with pytest.raises(EnvironmentMissingError) as caught:
        check(variant_of("awq", "autoawq"))
    assert caught.value.fix == "run `qkit env create autoawq --accelerator cpu`"
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------------------ the packed formats


def packed_layer(variant: Variant, outputs: int, inputs: int) -> dict[str, Array]:
    """Return a layer's tensors by suffix, as the libraries write them (see tests/e2e)."""
    bits = variant.weight_bits
    groups = inputs // variant.group_size if bits == 4 else 1
    if variant.method == "awq":
        words = np.ones((inputs, outputs * bits // 32), dtype=np.int32)
    else:
        words = np.ones((inputs * bits // 32, outputs), dtype=np.int32)
    tensors = {
        "qweight": array(words),
        "qzeros": array(np.ones((groups, outputs * bits // 32), dtype=np.int32)),
        "scales": array(np.full((groups, outputs), 0.01, dtype=np.float16)),
    }
    if variant.method == "gptq":
        tensors["g_idx"] = array((np.arange(inputs) // (inputs // groups)).astype(np.int32))
    return tensors


def packed_config(variant: Variant) -> dict[str, Any]:
    size = variant.group_size if variant.weight_bits == 4 else -1
    settings = {"bits": variant.weight_bits, "group_size": size, "quant_method": variant.method}
    if variant.method == "awq":
        return {**settings, "zero_point": True, "version": "GEMM", "modules_to_not_convert": None}
    return {**settings, "sym": True, "desc_act": False}


def write_packed(source: Path, folder: Path, variant: Variant) -> Path:
    import shutil

    checkpoint = inspect_checkpoint(source)
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = stored(source)
    for linear in checkpoint.linears:
        if linear.name == "lm_head":
            continue
        del tensors[f"{linear.name}.weight"]
        if bias := tensors.get(f"{linear.name}.bias"):
            tensors[f"{linear.name}.bias"] = Array("F16", bias.shape, bias.data)
        for suffix, tensor in packed_layer(
            variant, linear.out_features, linear.in_features
        ).items():
            tensors[f"{linear.name}.{suffix}"] = tensor
    write_weights(folder, tensors)
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", {**config, "quantization_config": packed_config(variant)})
    return folder


def stored(folder: Path) -> dict[str, Array]:
    return {
        name: Array(tensor.dtype, tensor.shape, read_bytes(tensor))
        for name, tensor in inspect_checkpoint(folder).tensors.items()
    }


AWQ = variant_of("awq", "autoawq")
GPTQ = variant_of("gptq", "gptqmodel")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "variant",
    [
        AWQ,
        variant_of("awq", "gptqmodel", group_size=32),
        GPTQ,
        variant_of("gptq", "autogptq", weight_bits=8),
    ],
    ids=lambda variant: f"{variant.label} {variant.weight_bits} {variant.group_size}",
)
def test_right_variants_pass(tmp_path: Path, variant: Variant, tied: bool) -> None:
    source = replace(MODEL, tied=tied).write(tmp_path / "model")
    folder = write_packed(source, tmp_path / "variant", variant)
    sizes = verify_packed_variant(folder, inspect_checkpoint(source), variant)
    assert sizes.quantized_bytes == sizes.predicted_bytes
    assert sizes.weight_bytes == sizes.quantized_bytes + sizes.unquantized_bytes
    assert sizes.weight_bytes == inspect_checkpoint(folder).weight_bytes


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "variant",
    [
        AWQ,
        GPTQ,
        variant_of("awq", "gptqmodel", group_size=32),
        variant_of("gptq", "gptqmodel", weight_bits=8),
    ],
    ids=lambda variant: f"{variant.label} {variant.weight_bits} {variant.group_size}",
)
def test_the_prediction_is_what_the_packed_formats_take(
    tmp_path: Path, variant: Variant, tied: bool
) -> None:
    source = replace(MODEL, tied=tied).write(tmp_path / "model")
    stored_bytes = split_bytes(inspect_checkpoint(write_packed(source, tmp_path / "v", variant)))
    predicted = weight_bytes(inspect_checkpoint(source), variant)
    assert (predicted.quantized, predicted.unquantized) == stored_bytes


def set_config(**settings: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = read_json(folder / "config.json")
        config["quantization_config"] |= settings
        write_json(folder / "config.json", config)

    return change


def set_tensors(**changes: Array | None) -> Callable[[Path], None]:
    """Replace or take away tensors of the layer, by suffix."""

    def change(folder: Path) -> None:
        tensors = stored(folder)
        for suffix, value in changes.items():
            if value is None:
                del tensors[f"{LAYER}.{suffix}"]
            else:
                tensors[f"{LAYER}.{suffix}"] = value
        write_safetensors(folder / "model.safetensors", tensors)

    return change


def scales(value: float) -> Array:
    values = np.full((1, 256), 0.01, dtype=np.float16)
    values[0, 3] = value
    return array(values)


def unquantize(folder: Path) -> None:
    tensors = {n: t for n, t in stored(folder).items() if not n.startswith(f"{LAYER}.")}
    tensors[f"{LAYER}.weight"] = bf16(np.zeros((256, 128)))
    write_safetensors(folder / "model.safetensors", tensors)


def quantize_head(folder: Path) -> None:
    tensors = stored(folder)
    for suffix, tensor in packed_layer(AWQ, 320, 128).items():
        tensors[f"lm_head.{suffix}"] = tensor
    write_safetensors(folder / "model.safetensors", tensors)


WRONG: list[tuple[str, Variant, Callable[[Path], object], str]] = [
    (
        "another method",
        AWQ,
        set_config(quant_method="gptq"),
        "config.json says quant_method 'gptq', asked was 'awq'",
    ),
    ("other bits", AWQ, set_config(bits=8), "config.json says bits 8, asked was 4"),
    (
        "another group size",
        GPTQ,
        set_config(group_size=64),
        "config.json says group_size 64, asked was 128",
    ),
    (
        "no zero point",
        AWQ,
        set_config(zero_point=False),
        "config.json says zero_point False, asked was True",
    ),
    (
        "another version",
        AWQ,
        set_config(version="gemv"),
        "config.json says version 'gemv', asked was 'gemm'",
    ),
    ("with zero points", GPTQ, set_config(sym=False), "config.json says sym False, asked was True"),
    (
        "reordered",
        GPTQ,
        set_config(desc_act=True),
        "config.json says desc_act True, asked was False",
    ),
    (
        "layers excepted",
        AWQ,
        set_config(modules_to_not_convert=["mlp.up_proj"]),
        "config.json excepts layers from being quantized: ['mlp.up_proj']",
    ),
    (
        "layers excepted by pattern",
        GPTQ,
        set_config(dynamic={"-:.*up_proj": {}}),
        "config.json excepts layers from being quantized",
    ),
    (
        "no quantization_config",
        AWQ,
        lambda f: write_json(
            f / "config.json",
            {k: v for k, v in read_json(f / "config.json").items() if k != "quantization_config"},
        ),
        "config.json has no quantization_config",
    ),
    ("a layer left in 16 bits", AWQ, unquantize, f"{LAYER} is not quantized"),
    ("the head quantized", AWQ, quantize_head, "lm_head is quantized, though to be left alone"),
    ("no scales", AWQ, set_tensors(scales=None), f"{LAYER} has no scales"),
    ("no zeros", GPTQ, set_tensors(qzeros=None), f"{LAYER} has no qzeros"),
    ("no order", GPTQ, set_tensors(g_idx=None), f"{LAYER} has no g_idx"),
    (
        "the 16-bit weight still there",
        AWQ,
        set_tensors(weight=bf16(np.zeros((256, 128)))),
        f"{LAYER} has its 16-bit weight still",
    ),
    (
        "packed along the other axis",
        AWQ,
        set_tensors(qweight=array(np.ones((16, 256), dtype=np.int32))),
        f"{LAYER}.qweight is I32 [16, 256], expected was I32 [128, 32]",
    ),
    (
        "scales of another group size",
        GPTQ,
        set_tensors(scales=array(np.ones((2, 256), dtype=np.float16))),
        f"{LAYER}.scales is F16 [2, 256], expected was F16 or BF16 [1, 256]",
    ),
    (
        "scales in 32 bits",
        AWQ,
        set_tensors(scales=array(np.ones((1, 256), dtype=np.float32))),
        f"{LAYER}.scales is F32 [1, 256], expected was F16 or BF16 [1, 256]",
    ),
    (
        "a scale that is not a number",
        AWQ,
        set_tensors(scales=scales(math.nan)),
        f"{LAYER}.scales has values that are not finite",
    ),
    (
        "an infinite scale",
        GPTQ,
        set_tensors(scales=scales(math.inf)),
        f"{LAYER}.scales has values that are not finite",
    ),
    (
        "an order that config.json denies",
        variant_of("gptq", "gptqmodel", group_size=64),
        set_tensors(g_idx=array((np.arange(128) % 2).astype(np.int32))),
        f"{LAYER}.g_idx reorders the inputs",
    ),
    (
        "a bias the source has not",
        GPTQ,
        set_tensors(bias=array(np.zeros(256, dtype=np.float16))),
        f"{LAYER}.bias is there, though the source has no such tensor",
    ),
    (
        "a norm in another dtype",
        AWQ,
        lambda f: write_safetensors(
            f / "model.safetensors",
            {**stored(f), "model.norm.weight": Array("F16", (128,), bytes(256))},
        ),
        "model.norm.weight is F16 [128], the source's is BF16 [128]",
    ),
    (
        "another tokenizer",
        AWQ,
        lambda f: (f / "tokenizer_config.json").write_text("{}"),
        "tokenizer_config.json is not the source's",
    ),
]


@pytest.mark.parametrize(
    ("variant", "damage", "message"),
    [case[1:] for case in WRONG],
    ids=[case[0] for case in WRONG],
)
def test_wrong_variants_are_named(
    tmp_path: Path, variant: Variant, damage: Callable[[Path], object], message: str
) -> None:
    source = MODEL.write(tmp_path / "model")
    folder = write_packed(source, tmp_path / "variant", variant)
    damage(folder)
    with pytest.raises(MeasurementError) as caught:
        verify_packed_variant(folder, inspect_checkpoint(source), variant)
    assert caught.value.what.startswith("the variant is not what was asked for: ")
    assert message in caught.value.what
    assert str(folder) in (caught.value.where or "")


# ----------------------------------------------------------------------------------------- the job


@pytest.mark.parametrize("variant", [AWQ, GPTQ], ids=lambda variant: variant.label)
def test_a_job_runs_the_backends_worker_and_its_verification(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: Variant
) -> None:
    source = MODEL.write(tmp_path / "model")
    (tmp_path / "text.txt").write_text("A paragraph of plain text for calibration.\n\n" * 10)
    started: list[tuple[str, dict[str, str]]] = []
    damaged = False

    def worker(
        python: Path, entry: str, request: QuantizeRequest, *_: Any, env: dict[str, str], **__: Any
    ) -> WorkerResult[QuantizeResult]:
        started.append((entry, env))
        write_packed(source, Path(request.out_path), variant)
        if damaged:
            set_tensors(scales=scales(math.nan))(Path(request.out_path))
        result = QuantizeResult("W4A16", (LAYER,), ("lm_head",), (), (), "loads", 0.1, 0.9, 1)
        return WorkerResult(result, {variant.backend: "1"}, 1.0)

    monkeypatch.setattr(job, "run_worker", worker)
    monkeypatch.setattr("os.cpu_count", lambda: 2)

    def make() -> Any:
        return quantize_variant(
            variant=variant,
            calibration=Calibration(source=str(tmp_path / "text.txt"), samples=2, seq_len=32),
            source=source,
            source_hash="hash",
            out=tmp_path / "out" / "variant",
            work=tmp_path / "work",
            python=Path("python"),
            accelerator="cpu",
            key="key",
            trust_remote_code=False,
        )

    record = make()
    ((entry, env),) = started
    assert entry == f"qkit.quantize.backend_{variant.backend}:run"
    assert env["HF_HUB_OFFLINE"] == "1"
    assert ("GPTQMODEL_CPU_WORKERS" in env) == (variant.backend == "gptqmodel")
    assert record.backend == variant.backend
    damaged = True
    with pytest.raises(MeasurementError, match="values that are not finite"):
        make()
    # The older one is still there, whole.
    assert read_json(tmp_path / "out" / "variant" / "qkit.json")["backend"] == variant.backend
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["variant"]


# -------------------------------------------------------------------------- parts of the workers


@pytest.mark.parametrize(
    ("config", "version", "settings"),
    [
        ({"rope_theta": 1e6}, (4, 51), {}),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, (5, 17), {}),
        (
            {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
            (4, 51),
            {"rope_theta": 1e6},
        ),
        (
            {"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0}},
            (4, 44),
            {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        ),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, (4, 51), {}),
    ],
)
def test_old_transformers_are_told_of_new_rotary_settings(
    tmp_path: Path, config: dict[str, Any], version: tuple[int, int], settings: dict[str, Any]
) -> None:
    write_json(tmp_path / "config.json", config)
    assert old_rope_settings(tmp_path, version) == settings


def test_what_awq_leaves_unscaled_under_grouped_query_attention(tmp_path: Path) -> None:
    assert skipped_mappings(MODEL.write(tmp_path / "grouped")) == tuple(
        f"model.layers.{layer}.self_attn.v_proj: its outputs are fewer than o_proj's inputs"
        " (grouped-query attention)"
        for layer in range(MODEL.layers)
    )
    assert skipped_mappings(replace(MODEL, kv_heads=2).write(tmp_path / "full")) == ()


def test_calibration_that_fills_no_block_is_told() -> None:
    assert _notes([[1] * 8, [1] * 8]) == ()
    (note,) = _notes([[1] * 8, [1] * 8, [1] * 3])
    assert note == "AutoAWQ left out the last 3 calibration tokens, too few for a block"
