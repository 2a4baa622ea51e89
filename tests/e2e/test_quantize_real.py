"""The real llm-compressor on a tiny checkpoint, through the whole job."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fakes.checkpoints import Array, TinyQwen2, bf16, read_json, write_weights

import qkit
from qkit.errors import WorkerError
from qkit.hardware import has_avx512
from qkit.hashing import hash_checkpoint, hash_tokenizer
from qkit.measurements import VariantRecord
from qkit.quantize.checkpoint import inspect_checkpoint, quantized_layers
from qkit.quantize.compatibility import cpu_obstacle
from qkit.quantize.estimate import kv_bytes_per_token, weight_bytes
from qkit.quantize.job import quantize_variant
from qkit.quantize.methods import needs_calibration, scheme_label, settings_of
from qkit.quantize.verify import verify_variant
from qkit.recipe import Calibration, Variant, load_recipe
from qkit.server import ServerSpec, serve
from qkit.smoke import smoke_check

pytestmark = pytest.mark.e2e

SOURCE_ROOT = Path(qkit.__file__).parents[1]
TIED = TinyQwen2(hidden=256, intermediate=512)
UNTIED = TinyQwen2(hidden=256, intermediate=384, tied=False, shards=2, seed=1)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = ("river", "stone", "market", "apple", "bridge", "winter", "seven", "letter", "paper")
    choose = random.Random(0)
    path = tmp_path_factory.mktemp("calibration") / "text.txt"
    path.write_text(
        "\n\n".join(" ".join(choose.choices(words, k=20)).capitalize() + "." for _ in range(60))
    )
    return path


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TIED.write(tmp_path_factory.mktemp("tied") / "model")


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return UNTIED.write(tmp_path_factory.mktemp("untied") / "model")


def make(
    variant: Variant,
    source: Path,
    text: Path,
    out: Path,
    python: Path,
    *,
    accelerator: str = "cpu",
    stages: list[str] | None = None,
    samples: int = 8,
) -> VariantRecord:
    return quantize_variant(
        variant=variant,
        calibration=Calibration(source=str(text), samples=samples, seq_len=128),
        source=source,
        source_hash=hash_checkpoint(source),
        out=out,
        work=out.parent / f"{out.name}-work",
        python=python,
        accelerator=accelerator,
        key="key",
        trust_remote_code=False,
        on_progress=None if stages is None else lambda p: stages.append(p.stage),
    )


@pytest.mark.parametrize(
    ("method", "ratio"),
    # Of the quantized layers' 16-bit bytes, by the scheme's arithmetic.
    [
        ("awq", 4.16 / 16),
        ("gptq", 4.13 / 16),
        ("fp8", 8.06 / 16),
        ("smoothquant", 8.06 / 16),
        ("rtn", 4.13 / 16),
    ],
)
def test_each_method_as_it_is_by_default(
    tmp_path: Path,
    quantize_python: Path,
    tied: Path,
    text: Path,
    method: str,
    ratio: float,
) -> None:
    variant = Variant.model_validate({"method": method})
    out, stages = tmp_path / method, list[str]()
    record = make(variant, tied, text, out, quantize_python, stages=stages)

    source = inspect_checkpoint(tied)
    sizes = verify_variant(out, source, variant)
    assert sizes.quantized_bytes == sizes.predicted_bytes == record.quantized_bytes
    bf16_bytes = sum(2 * lin.out_features * lin.in_features for lin in source.linears)
    assert sizes.quantized_bytes / bf16_bytes == pytest.approx(ratio, rel=0.02)
    # Embeddings, norms and biases are as they were.
    assert sizes.unquantized_bytes == source.weight_bytes - bf16_bytes
    assert quantized_layers(inspect_checkpoint(out)) == tuple(lin.name for lin in source.linears)

    assert VariantRecord.model_validate(read_json(out / "qkit.json")) == record
    assert record.scheme == scheme_label(variant)
    assert record.content_hash == hash_checkpoint(out) != hash_checkpoint(tied)
    assert hash_tokenizer(out) == hash_tokenizer(tied)
    assert record.ignored_modules == ("lm_head",)
    assert record.peak_memory_bytes > 0
    assert record.versions.keys() >= {"llmcompressor", "compressed-tensors", "torch"}
    assert (record.calibration is None) == (method in ("fp8", "rtn"))
    assert "mean KL" in record.load_check
    assert "top-1 agreement" in record.load_check
    assert 0 < record.mean_kl < 1
    # Fewer key heads than query heads: AWQ cannot scale v_proj for o_proj, and says so.
    assert len(record.skipped_mappings) == (TIED.layers if method == "awq" else 0)
    assert list(dict.fromkeys(stages)) == ["load", "reference", "quantize", "save", "check"]

    config = read_json(out / "config.json")
    assert {k: v for k, v in config.items() if k != "quantization_config"} == read_json(
        tied / "config.json"
    )
    assert {path.name for path in tmp_path.iterdir()} == {method, f"{method}-work"}

    if method == "gptq":  # the one whose sums could come out in another order
        again = make(variant, tied, text, out, quantize_python)
        assert again.content_hash == record.content_hash


@pytest.mark.parametrize(
    "variant",
    [
        Variant(method="awq", symmetric=True, group_size=64, kv_cache="fp8"),
        Variant(method="gptq", weight_bits=8),
        Variant(method="rtn", weight_bits=8, symmetric=False),
        Variant(method="fp8", scales="static"),
        Variant(method="fp8", scales="block", kv_cache="fp8"),
        Variant(method="smoothquant", scales="static", actorder=None),
        Variant(method="smoothquant", rounding="rtn", smoothing_strength=0.5),
        Variant(
            method="gptq",
            symmetric=False,
            group_size=32,
            actorder=None,
            dampening_frac=0.05,
            ignore=("lm_head", "re:.*layers[.]1[.].*down_proj$"),
        ),
    ],
    ids=scheme_label,
)
def test_other_settings_on_an_untied_sharded_checkpoint(
    tmp_path: Path, quantize_python: Path, untied: Path, text: Path, variant: Variant
) -> None:
    out = tmp_path / "variant"
    record = make(variant, untied, text, out, quantize_python)
    sizes = verify_variant(out, inspect_checkpoint(untied), variant)
    assert sizes.quantized_bytes == sizes.predicted_bytes
    saved = inspect_checkpoint(out)
    assert "lm_head.weight" in saved.tensors
    assert not saved.tied
    assert set(record.ignored_modules) == set(saved.linear_names) - set(quantized_layers(saved))
    predicted = weight_bytes(inspect_checkpoint(untied), variant)
    assert (predicted.quantized, predicted.unquantized) == (
        record.quantized_bytes,
        record.unquantized_bytes,
    )
    assert 0 < record.mean_kl < 1
    assert record.settings == dict(settings_of(variant))
    assert (record.calibration is not None) == needs_calibration(variant)


def test_gptq_takes_more_damping_where_it_must_and_says_so(
    tmp_path: Path, quantize_python: Path, tied: Path, text: Path
) -> None:
    # 128 tokens cannot give the Hessian of 256 or 512 inputs full rank.
    variant = Variant(method="gptq", dampening_frac=1e-9)
    record = make(variant, tied, text, tmp_path / "gptq", quantize_python, samples=1)
    (note,) = (note for note in record.notes if "dampening_frac" in note)
    layers = len(inspect_checkpoint(tied).linears)
    assert note.startswith(
        f"GPTQ used dampening_frac 0.01 instead of 1e-09 for {layers} layers whose Hessian was not"
        " positive definite: model.layers.0.self_attn.q_proj, "
    )
    assert not any("round-to-nearest" in note for note in record.notes)
    assert record.mean_kl < 1


def test_static_inputs_and_an_fp8_cache_are_served(
    tmp_path: Path, quantize_python: Path, serve_python: Path, tied: Path, text: Path
) -> None:
    variant = Variant(method="smoothquant", rounding="rtn", scales="static", kv_cache="fp8")
    if obstacle := cpu_obstacle(variant, has_avx512()):
        pytest.skip(obstacle)
    out = tmp_path / "variant"
    make(variant, tied, text, out, quantize_python)
    spec = ServerSpec(
        python=serve_python,
        model_path=out,
        name="variant",
        method=variant.method,
        accelerator="cpu",
        serve=load_recipe("demo").serve,
        log=tmp_path / "server.log",
    )
    with serve(spec) as server:
        smoke_check(server.base_url, server.model)
        assert server.record.kernels == ("CPUInt8ScaledMMLinearKernel",)
        one_gib = 2**30
        per_token = kv_bytes_per_token(inspect_checkpoint(tied), variant)
        assert server.record.kv_cache_tokens == one_gib // per_token


#: Loads each folder as a variant of the first and prints what is wrong with it, one line each.
CHECK_SCRIPT = """
import json, sys
from pathlib import Path
from qkit.errors import MeasurementError
from qkit.quantize.backend_check import check_saved, source_reference
source, *folders = map(Path, sys.argv[1:])
settings = {"device": "cpu", "trust_remote_code": False}
reference = source_reference(source, **settings)
for folder in folders:
    try:
        check_saved(reference, folder, **settings)
    except MeasurementError as error:
        print("found:", json.dumps(error.what))
    else:
        print("found:", json.dumps("nothing"))
"""


def noise(outputs: int, inputs: int) -> Array:
    import numpy as np

    return bf16(np.random.default_rng(5).normal(0, 0.5, (outputs, inputs)))


def test_broken_variants_do_not_pass(tmp_path: Path, quantize_python: Path, tied: Path) -> None:
    import numpy as np

    def damaged(name: str, **tensors: Any) -> Path:
        folder = TIED.write(tmp_path / name)
        write_weights(folder, {**TIED.tensors(), **tensors})
        return folder

    folders = {
        damaged("same"): "nothing",
        # Without a norm all logits are 0, and the first token is always the most likely one.
        damaged("stuck", **{"model.norm.weight": bf16(np.zeros(256))}): (
            "the variant is broken: it predicts one and the same token at all 256 positions"
        ),
        damaged("nan", **{"model.norm.weight": bf16(np.full(256, np.nan))}): (
            "the variant is broken: its logits are not finite"
        ),
        TinyQwen2(hidden=256, intermediate=512, seed=9).write(tmp_path / "another"): (
            "the variant is broken: its predictions have little in common with the source's"
        ),
        # Of two layers, one that answers noise: still finite, and of many different tokens.
        damaged("noise", **{"model.layers.1.mlp.down_proj.weight": noise(256, 512)}): (
            "the variant is broken: its predictions have little in common with the source's"
        ),
        damaged("cut"): "the saved checkpoint does not load again",
    }
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    done = subprocess.run(
        [str(quantize_python), "-P", "-c", CHECK_SCRIPT, str(tied), *map(str, folders)],
        env={**os.environ, "PYTHONPATH": str(SOURCE_ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    found = [
        json.loads(line.removeprefix("found: "))
        for line in done.stdout.splitlines()
        if line.startswith("found: ")
    ]
    for expected, message in zip(folders.values(), found, strict=True):
        assert message.startswith(expected)


def failure_of(call: Any, out: Path) -> str:
    with pytest.raises(WorkerError) as caught:
        call()
    assert caught.value.kind == "error"
    assert {path.name for path in out.parent.iterdir()} == {f"{out.name}-work"}
    return str(caught.value)


def test_a_source_with_a_value_that_is_not_finite_is_refused(
    tmp_path: Path, quantize_python: Path
) -> None:
    import numpy as np

    (tmp_path / "source").mkdir()
    folder = TIED.write(tmp_path / "source" / "model")
    tensors = dict(TIED.tensors())
    weight = np.full((512, 256), 0.01)
    weight[5, 7] = np.inf
    tensors["model.layers.1.mlp.up_proj.weight"] = bf16(weight)
    write_weights(folder, tensors)
    out = tmp_path / "variants" / "fp8"
    out.parent.mkdir()
    variant = Variant(method="fp8")
    message = failure_of(lambda: make(variant, folder, folder, out, quantize_python), out)
    assert "the source checkpoint is broken: its logits are not finite" in message


def test_cuda_without_a_gpu_is_refused(
    tmp_path: Path, quantize_python: Path, tied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    out = tmp_path / "fp8"
    variant = Variant(method="fp8")
    message = failure_of(
        lambda: make(variant, tied, tied, out, quantize_python, accelerator="cuda"), out
    )
    assert "the environment's torch sees no CUDA device" in message
