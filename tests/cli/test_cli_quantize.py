"""What `qkit quantize` says of the calibration when a variant is done, and what it stores of it.

The worker is replaced by one that writes a right folder; the real ones run in tests/e2e.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fakes.checkpoints import TinyQwen2, read_json, write_tokenizer, write_variant

from qkit.cli import cli
from qkit.protocol import QuantizeRequest, QuantizeResult
from qkit.quantize import job
from qkit.recipe import Variant
from qkit.worker import WorkerResult

RESULT = QuantizeResult("W4A16", (), ("lm_head",), (), (), "loads", 0.1, 0.9, 1)


def write_what_was_asked_for(
    _python: Path, _entry: str, request: QuantizeRequest, *_: Any, **__: Any
) -> WorkerResult[QuantizeResult]:
    variant = Variant.model_validate({"method": request.method})
    write_variant(Path(request.model_path), Path(request.out_path), variant)
    return WorkerResult(RESULT, {}, 1.0)


@pytest.fixture(autouse=True)
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(job, "run_worker", write_what_was_asked_for)
    monkeypatch.delenv("QKIT_ARTIFACTS", raising=False)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho '{}'\n")
    python.chmod(0o755)
    monkeypatch.setenv("QKIT_QUANTIZE_PYTHON", str(python))
    TinyQwen2(hidden=128, intermediate=256).write(tmp_path / "model")
    rows = [{"text": f"{n:02} forty letters and some digits"} for n in range(10)] + [{"text": ""}]
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def quantize(*arguments: str) -> tuple[str, list[str]]:
    """Return what is printed to standard output, and the lines of standard error."""
    command = ["quantize", "--model", "./model", "--accelerator", "cpu", *arguments]
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 0, result.output
    return result.stdout, [line.strip() for line in result.stderr.splitlines()]


CALIBRATED = ("--method", "awq", "--calibration", "data.jsonl")


def test_the_calibration_is_told_in_figures() -> None:
    stdout, lines = quantize(*CALIBRATED, "--samples", "20", "--seq-len", "32")
    folder = Path(stdout.strip())
    stored = read_json(folder / "qkit.json")["calibration"]
    # Ten rows of 32 tokens each, and one that is blank.
    assert lines[-3:] == [
        "awq: calibrated with 10 of 20 samples of 32 tokens (320 tokens), seed 0, sha256"
        f" {stored['tokens_hash'][:12]}",
        "awq: rows: 11 of 11 read, 10 used, 1 skipped without text",
        "awq: scripts: Latin 100 %",
    ]
    assert stored["scripts"] == {"Latin": 1.0}
    assert (stored["rows_truncated"], stored["tokens_left_out"], stored["warning"]) == (0, 0, None)


def test_a_row_that_was_cut_and_a_warning_are_told() -> None:
    write_tokenizer(Path("model"), words=("на", "的"))
    stdout, lines = quantize(*CALIBRATED, "--samples", "1", "--seq-len", "40")
    assert "2 used, 1 of them cut at the end" in lines[-3]
    assert lines[-1].startswith("awq: warning: 100 % of the calibration's letters are Latin, and")
    stored = read_json(Path(stdout.strip()) / "qkit.json")["calibration"]
    assert lines[-1] == f"awq: warning: {stored['warning']}"
    assert stored["tokens_left_out"] == 24


def test_a_data_free_method_tells_of_no_calibration() -> None:
    _, lines = quantize("--method", "fp8")
    assert not [line for line in lines if "calibrated" in line]
