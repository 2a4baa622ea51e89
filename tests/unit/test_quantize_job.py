"""The job around a backend: nothing is in place before it is whole, and nothing is lost.

The worker is replaced by one that writes a right, a wrong or no folder; the real ones run in
tests/e2e.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.checkpoints import TinyQwen2, read_json, write_json, write_variant

from qkit.errors import InputError, MeasurementError, WorkerError
from qkit.hashing import hash_checkpoint
from qkit.measurements import VariantRecord
from qkit.protocol import Progress, QuantizeRequest, QuantizeResult
from qkit.quantize import job
from qkit.quantize.job import put_in_place, quantize_variant, remove_stale
from qkit.quantize.source_files import KEPT_FILES, keep_source_files
from qkit.recipe import Calibration, Variant
from qkit.worker import WorkerResult

RESULT = QuantizeResult(
    scheme="W4A16_ASYM g128",
    quantized_modules=("model.layers.0.mlp.up_proj",),
    ignored_modules=("lm_head",),
    skipped_mappings=("model.layers.0.self_attn.v_proj: its outputs are fewer",),
    notes=("a note",),
    load_check="loaded",
    mean_kl=0.01,
    top1_agreement=0.97,
    peak_memory_bytes=123,
)


class FakeWorker:
    """Stands in for `run_worker`: records the request and writes what `write` writes."""

    def __init__(self, write: Callable[[Path, Path], object]) -> None:
        self.write = write
        self.requests: list[QuantizeRequest] = []

    def __call__(
        self,
        python: Path,
        entry: str,
        request: QuantizeRequest,
        result_type: type[QuantizeResult],
        folder: Path,
        *,
        on_progress: Callable[[Progress], None] | None = None,
        env: dict[str, str] | None = None,
    ) -> WorkerResult[QuantizeResult]:
        assert entry == "qkit.quantize.backend_llmcompressor:run"
        assert not Path(request.out_path).exists()
        assert env is not None
        assert env["HF_HUB_OFFLINE"] == "1"
        self.requests.append(request)
        self.write(Path(request.model_path), Path(request.out_path))
        if on_progress:
            on_progress(Progress("save", 1, 1))
        return WorkerResult(RESULT, {"llmcompressor": "0.14.0.1"}, 1.5)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return TinyQwen2(hidden=128, intermediate=256).write(tmp_path / "model")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "calibration.txt"
    path.write_text("A paragraph of plain text for calibration.\n\n" * 10)
    return path


def make(
    source: Path,
    text: Path,
    out: Path,
    worker: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    **settings: Any,
) -> VariantRecord:
    monkeypatch.setattr(job, "run_worker", worker)
    return quantize_variant(
        variant=Variant(**{"method": "awq", **settings}),
        calibration=Calibration(source=str(text), samples=100, seq_len=32, seed=3),
        source=source,
        source_hash="source",
        out=out,
        work=out.parent / "work",
        python=Path("python"),
        accelerator="cpu",
        key="key",
        trust_remote_code=False,
    )


def right(source: Path, out: Path) -> None:
    write_variant(source, out, Variant(method="awq"))


def wrong(source: Path, out: Path) -> None:
    write_variant(source, out, Variant(method="gptq"))


def failing(source: Path, out: Path) -> None:
    right(source, out)
    (out / "model.safetensors").write_bytes(b"half")
    raise WorkerError("the worker was killed by SIGKILL", kind="killed")


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_variant_is_made_recorded_and_put_in_place(
    tmp_path: Path, source: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = FakeWorker(right)
    out = tmp_path / "variants" / "awq"
    record = make(source, text, out, worker, monkeypatch)
    assert names_in(out.parent) == {"awq", "work"}
    assert VariantRecord.model_validate(read_json(out / "qkit.json")) == record
    assert record.content_hash == hash_checkpoint(out)
    assert record.scheme == "W4A16 asym g128"
    assert record.versions["llmcompressor"] == "0.14.0.1"
    assert record.weight_bytes == record.quantized_bytes + record.unquantized_bytes
    assert record.calibration is not None
    # Ten rows of 42 tokens fill 13 samples of 32 and a last one of 4, too short to count.
    assert (record.calibration.used_samples, record.calibration.requested_samples) == (13, 100)
    assert record.notes == (
        "calibration data was short: 13 of 100 samples, 416 tokens in all 10 rows",
        "a note",
    )
    (request,) = worker.requests
    assert request.seed == 3
    assert Path(request.out_path).parent == out.parent
    assert request.calibration_path == str(tmp_path / "variants" / "work" / "calibration.jsonl")


def test_a_data_free_method_reads_no_calibration(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = FakeWorker(lambda s, o: write_variant(s, o, Variant(method="fp8")))
    record = make(
        source, tmp_path / "none.txt", tmp_path / "fp8", worker, monkeypatch, method="fp8"
    )
    assert record.calibration is None
    assert worker.requests[0].calibration_path is None


@pytest.mark.parametrize(("write", "error"), [(wrong, MeasurementError), (failing, WorkerError)])
def test_a_failed_variant_leaves_nothing(
    tmp_path: Path,
    source: Path,
    text: Path,
    monkeypatch: pytest.MonkeyPatch,
    write: Callable[[Path, Path], object],
    error: type[Exception],
) -> None:
    out = tmp_path / "variants" / "awq"
    with pytest.raises(error):
        make(source, text, out, FakeWorker(write), monkeypatch)
    assert names_in(out.parent) == {"work"}


@pytest.mark.parametrize("write", [wrong, failing])
def test_an_older_variant_stays_until_the_new_one_is_right(
    tmp_path: Path,
    source: Path,
    text: Path,
    monkeypatch: pytest.MonkeyPatch,
    write: Callable[[Path, Path], object],
) -> None:
    out = tmp_path / "variants" / "awq"
    first = make(source, text, out, FakeWorker(right), monkeypatch)
    with pytest.raises((MeasurementError, WorkerError)):
        make(source, text, out, FakeWorker(write), monkeypatch)
    assert VariantRecord.model_validate(read_json(out / "qkit.json")) == first
    assert hash_checkpoint(out) == first.content_hash


def test_a_new_variant_replaces_an_older_one(
    tmp_path: Path, source: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "variants" / "awq"
    make(source, text, out, FakeWorker(right), monkeypatch)
    (out / "left-over").touch()
    make(source, text, out, FakeWorker(right), monkeypatch)
    assert not (out / "left-over").exists()
    assert names_in(out.parent) == {"awq", "work"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ignore": ("lm_haed",)}, "ignore names 'lm_haed'"),
        ({"method": "gptq", "actorder": "group"}, "actorder 'group' was removed"),
    ],
)
def test_wrong_input_never_starts_a_worker(
    tmp_path: Path,
    source: Path,
    text: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    message: str,
) -> None:
    worker = FakeWorker(right)
    with pytest.raises(InputError, match=message):
        make(source, text, tmp_path / "awq", worker, monkeypatch, **settings)
    with pytest.raises(InputError, match="there is no calibration file"):
        make(source, tmp_path / "none.txt", tmp_path / "awq", worker, monkeypatch)
    assert worker.requests == []
    assert not (tmp_path / "awq").exists()


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def folder_with(path: Path, content: str) -> Path:
    path.mkdir(parents=True)
    (path / "qkit.json").write_text(content)
    return path


def test_what_killed_runs_left_is_cleared(tmp_path: Path) -> None:
    out = folder_with(tmp_path / "awq", "finished")
    running = folder_with(tmp_path / f".awq.partial-{os.getppid()}", "another run, at work")
    other = folder_with(tmp_path / f".gptq.partial-{dead_pid()}", "another variant")
    folder_with(tmp_path / f".awq.partial-{dead_pid()}", "half")
    folder_with(tmp_path / f".awq.old-{dead_pid()}", "replaced")
    remove_stale(out)
    assert names_in(tmp_path) == {"awq", running.name, other.name}


def test_a_replacement_cut_in_two_is_undone(tmp_path: Path) -> None:
    """Killed between the two renames: the older variant is the only whole one."""
    folder_with(tmp_path / f".awq.old-{dead_pid()}", "older")
    folder_with(tmp_path / f".awq.partial-{dead_pid()}", "newer")
    remove_stale(tmp_path / "awq")
    assert names_in(tmp_path) == {"awq"}
    assert (tmp_path / "awq" / "qkit.json").read_text() == "older"


def test_files_in_place_can_be_read_by_other_users(tmp_path: Path) -> None:
    partial = folder_with(tmp_path / "partial", "x")
    (partial / "qkit.json").chmod(0o600)
    put_in_place(partial, tmp_path / "out")
    assert (tmp_path / "out" / "qkit.json").stat().st_mode & 0o777 == 0o644


def test_source_files_are_kept_byte_for_byte(tmp_path: Path, source: Path) -> None:
    (source / "LICENSE").write_text("a licence")
    folder = write_variant(source, tmp_path / "variant", Variant(method="awq"))
    (folder / "LICENSE").unlink()
    (folder / "tokenizer_config.json").write_text("re-serialized")
    (folder / "special_tokens_map.json").write_text("made up by the library")
    config = read_json(folder / "config.json")
    config |= {"rope_parameters": {"rope_theta": 1.0}, "tie_word_embeddings": False}
    write_json(folder / "config.json", config)
    keep_source_files(source, folder)
    for name in KEPT_FILES:
        kept, original = folder / name, source / name
        assert kept.exists() == original.exists()
        assert not kept.exists() or kept.read_bytes() == original.read_bytes()
    assert (folder / "LICENSE").read_text() == "a licence"
    assert read_json(folder / "config.json") == {
        **read_json(source / "config.json"),
        "quantization_config": config["quantization_config"],
        # Whether they are tied is what the saved tensors say.
        "tie_word_embeddings": False,
    }
