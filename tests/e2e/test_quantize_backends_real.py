"""AutoAWQ and GPTQModel for real, through the whole job, and what they write in the real vLLM."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fakes import gptq_unpacking
from fakes.checkpoints import TinyQwen2, bf16, read_json, write_weights

from qkit import protocol
from qkit.environments import python_of, variables_of
from qkit.errors import WorkerError
from qkit.evaluate.accuracy import run_accuracy
from qkit.hardware import has_avx512
from qkit.hashing import hash_checkpoint, hash_tokenizer
from qkit.measurements import VariantRecord
from qkit.quantize.backends import BACKENDS
from qkit.quantize.checkpoint import inspect_checkpoint, quantized_layers
from qkit.quantize.compatibility import cpu_obstacle
from qkit.quantize.job import quantize_variant
from qkit.quantize.verify_gptq_awq import verify_packed_variant
from qkit.recipe import RECIPES_DIR, Calibration, Variant, load_recipe
from qkit.server import ServerSpec, serve
from qkit.smoke import smoke_check
from qkit.suites import AccuracySuite
from qkit.worker import run_worker

pytestmark = pytest.mark.e2e

TESTS = Path(__file__).resolve().parents[1]
DEMO = RECIPES_DIR / "demo"
CALIBRATION = Calibration(source=str(DEMO / "calibration.jsonl"), samples=8, seq_len=256)


def make(
    variant: Variant, source: Path, out: Path, calibration: Calibration = CALIBRATION
) -> VariantRecord:
    return quantize_variant(
        variant=variant,
        calibration=calibration,
        source=source,
        source_hash=hash_checkpoint(source),
        out=out,
        work=out.parent / f"{out.name}-work",
        python=python_of(BACKENDS[variant.backend].environment, "cpu"),
        accelerator="cpu",
        key="key",
        trust_remote_code=False,
    )


@pytest.mark.parametrize(
    ("backend", "method", "ratio", "served_by"),
    # Of the quantized layers' 16-bit bytes, by the format's arithmetic: 4 bits, per group of 128
    # a 16-bit scale and a 4-bit zero point; GPTQ adds 32 bits an input, for 288 outputs on average.
    [
        ("autoawq", "awq", (4 + 20 / 128) / 16, "AutoAWQMarlinLinearMethod"),
        ("gptqmodel", "awq", (4 + 20 / 128) / 16, "AutoAWQMarlinLinearMethod"),
        ("gptqmodel", "gptq", (4 + 20 / 128 + 32 / 288) / 16, "AutoGPTQLinearMethod"),
    ],
)
def test_each_backend_makes_what_vllm_serves(
    tmp_path: Path, serve_python: Path, backend: str, method: str, ratio: float, served_by: str
) -> None:
    source, out = DEMO / "model", tmp_path / "variant"
    variant = Variant.model_validate({"method": method, "backend": backend})
    record = make(variant, source, out)

    checkpoint, saved = inspect_checkpoint(source), inspect_checkpoint(out)
    sizes = verify_packed_variant(out, checkpoint, variant)
    assert sizes.quantized_bytes == sizes.predicted_bytes == record.quantized_bytes
    bf16_bytes = sum(2 * lin.out_features * lin.in_features for lin in checkpoint.linears)
    assert sizes.quantized_bytes / bf16_bytes == pytest.approx(ratio, rel=0.02)
    assert sizes.unquantized_bytes == checkpoint.weight_bytes - bf16_bytes
    assert quantized_layers(saved) == tuple(lin.name for lin in checkpoint.linears)

    assert VariantRecord.model_validate(read_json(out / "qkit.json")) == record
    assert (record.backend, record.method) == (backend, method)
    assert record.content_hash == hash_checkpoint(out)
    assert hash_tokenizer(out) == hash_tokenizer(source)
    assert record.versions.keys() >= {backend, "torch", "transformers"}
    assert record.calibration is not None
    assert record.calibration.total_tokens == 8 * 256
    # 4 bits from two thousand tokens cost something; noise or another model would cost it all.
    assert 0 < record.mean_kl < 0.5
    assert record.top1_agreement > 0.6
    # Fewer key heads than query heads: AWQ cannot scale v_proj for o_proj, and says so.
    assert len(record.skipped_mappings) == (checkpoint.num_layers if method == "awq" else 0)
    assert {path.name for path in tmp_path.iterdir()} == {"variant", "variant-work"}
    assert {p.name for p in out.iterdir()} == {p.name for p in source.iterdir()} | {"qkit.json"}

    if obstacle := cpu_obstacle(variant, has_avx512()):
        pytest.skip(f"made and verified, not served: {obstacle}")
    spec = ServerSpec(
        python=serve_python,
        model_path=out,
        name="variant",
        method=method,
        accelerator="cpu",
        serve=load_recipe("demo").serve,
        log=tmp_path / "server.log",
    )
    with serve(spec) as server:
        smoke_check(server.base_url, server.model)
        # Weights unpacked in another order than they were packed would be a coin with four sides.
        score = run_accuracy(
            AccuracySuite(task="demo_facts", limit=48),
            base_url=server.base_url,
            model=server.model,
            tokenizer_path=out,
            max_model_len=server.record.max_model_len,
        ).headline
    assert server.record.kernels == ("CPUWNA16LinearKernel",)
    assert f"Using CPUWNA16LinearKernel for {served_by}" in (tmp_path / "server.log").read_text()
    assert score.value > 0.5


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibration") / "text.txt"
    path.write_text(
        "\n\n".join(f"Paragraph {i} tells of the river and the mill." for i in range(9))
    )
    return path


def test_autoawq_drops_no_sample_and_names_the_rest(tmp_path: Path, text: Path) -> None:
    # Untied, sharded, rows longer than its own limit of 512 tokens would be silently dropped.
    model = TinyQwen2(hidden=256, intermediate=384, tied=False, shards=2, layers=1)
    source = model.write(tmp_path / "model")
    out = tmp_path / "awq"
    calibration = Calibration(source=str(text), samples=2, seq_len=1000)
    variant = Variant(method="awq", backend="autoawq", group_size=64)
    # 9 paragraphs are fewer than 1,000 tokens: one sample of them all.
    record = make(variant, source, out, calibration)
    assert record.calibration is not None
    assert record.calibration.used_samples == 1
    assert not [note for note in record.notes if "left out" in note]
    assert "lm_head.weight" in inspect_checkpoint(out).tensors

    shorter = calibration.model_copy(update={"samples": 9, "seq_len": 100})
    record = make(variant, source, out, shorter)
    assert record.calibration is not None
    left = record.calibration.total_tokens % 100
    assert left > 0
    assert f"AutoAWQ left out the last {left} calibration tokens" in " ".join(record.notes)


@pytest.mark.parametrize("bits", [4, 8])
def test_autogptqs_check_reads_gptq_as_gptqmodel_does(
    tmp_path: Path, text: Path, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AutoGPTQ itself needs CUDA; how its worker reads what it wrote does not."""
    source = TinyQwen2(hidden=256, intermediate=512, layers=1).write(tmp_path / "model")
    variant = Variant.model_validate(
        {"method": "gptq", "backend": "gptqmodel", "weight_bits": bits}
    )
    calibration = Calibration(source=str(text), samples=4, seq_len=64)
    monkeypatch.chdir(tmp_path)
    record = make(variant, source, tmp_path / "gptq", calibration)
    settings = read_json(tmp_path / "gptq" / "config.json")["quantization_config"]
    size = 128 if bits == 4 else -1
    assert (settings["bits"], settings["group_size"], settings["sym"]) == (bits, size, True)
    assert record.mean_kl < {4: 1.0, 8: 0.01}[bits]
    assert not (tmp_path / "logs").exists()  # GPTQModel would leave them where it is started

    written = read_json(tmp_path / "gptq-work" / "request.json")
    request = protocol.load(
        protocol.QuantizeRequest, {**written, "out_path": str(tmp_path / "gptq")}
    )
    compared = run_worker(
        python_of("gptqmodel", "cpu"),
        "fakes.gptq_unpacking:compare",
        gptq_unpacking.Request(request),
        gptq_unpacking.Result,
        tmp_path / "compare",
        env={"PYTHONPATH": str(TESTS), **variables_of("gptqmodel")},
    ).value
    # Ours are rounded to bfloat16 once more.
    assert compared.difference < 0.02 * compared.spread, compared


def test_a_broken_source_is_refused_and_nothing_left(tmp_path: Path, text: Path) -> None:
    model = TinyQwen2(hidden=256, intermediate=512, layers=1)
    source = model.write(tmp_path / "model")
    weight = np.full((512, 256), 0.01)
    weight[5, 7] = np.inf
    tensors = {**model.tensors(), "model.layers.0.mlp.up_proj.weight": bf16(weight)}
    write_weights(source, tensors)
    out = tmp_path / "variants" / "awq"
    variant = Variant(method="awq", backend="autoawq")
    with pytest.raises(WorkerError) as caught:
        make(variant, source, out, Calibration(source=str(text), samples=4, seq_len=64))
    assert "the source checkpoint is broken: its logits are not finite" in str(caught.value)
    assert {path.name for path in out.parent.iterdir()} == {"awq-work"}
