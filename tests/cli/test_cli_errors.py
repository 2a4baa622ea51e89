"""What a person reads after a mistake: one message, what to do, no traceback, non-zero exit."""

from __future__ import annotations

import json
import socket

import pytest
from click.testing import CliRunner
from fakes.checkpoints import TinyQwen2

from qkit.cli import cli
from qkit.recipe import DEFAULT_METHODS


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Work in an empty folder with no environments, no hub and a lock of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("QKIT_LOCK_DIR", str(tmp_path / "locks"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("QKIT_SERVE_PYTHON", raising=False)
    monkeypatch.delenv("QKIT_QUANTIZE_PYTHON", raising=False)


def qkit(*arguments):
    """Run the command line and return (exit code, everything it printed)."""
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


@pytest.fixture
def checkpoint(tmp_path):
    return TinyQwen2(hidden=128).write(tmp_path / "model")


CASES = {
    "unknown command": (["quantise"], "no command 'quantise', did you mean 'quantize'?"),
    "unknown method": (["quantize", "--method", "gtpq"], "'gtpq' is not one of 'awq', 'gptq'"),
    "unknown recipe": (["run", "dmo"], "there is no recipe 'dmo', did you mean 'demo'?"),
    "missing folder": (
        ["quantize", "--model", "./nowhere", "--method", "fp8"],
        "there is no checkpoint folder './nowhere'",
    ),
    "hub unreachable": (
        ["quantize", "--model", "Qwen/Qwen2.5-0.5B", "--method", "fp8"],
        "model 'Qwen/Qwen2.5-0.5B' is not on this machine and the hub is switched off",
    ),
    "no run": (["matrix", "x"], "there is no run 'x'"),
    "no run at all": (["matrix"], "there is no run here yet"),
    "unknown variant": (["eval", "awk", "--recipe", "demo"], "'awk' is neither a folder nor a"),
    "variant not made": (["eval", "awq", "--recipe", "demo"], "variant 'awq' was not made yet"),
    "unknown suite": (
        ["eval", "bf16", "--recipe", "demo", "--suite", "mmlu_dve"],
        "did you mean 'mmlu_dev'",
    ),
    "no suite": (["eval", "bf16", "--recipe", "demo", "--suite", ","], "no suite to measure"),
    "bad levels": (
        ["eval", "bf16", "--recipe", "demo", "--suite", "bench", "--concurrency", "1;2"],
        "--concurrency '1;2' is not a list of numbers",
    ),
    "level 0": (
        ["eval", "bf16", "--recipe", "demo", "--suite", "bench", "--concurrency", "0"],
        "--suite or its options: Input should be greater than or equal to 1",
    ),
    "no server": (
        ["eval", "--url", "http://127.0.0.1:9", "--suite", "bench"],
        "the server does not answer",
    ),
    "url and folder": (["eval", "x", "--url", "http://127.0.0.1:9"], "give either --url or"),
    "unknown backend": (["env", "create", "serv"], "no backend 'serv', did you mean 'serve'?"),
    "environment not made": (
        ["env", "check", "serve", "--accelerator", "cpu"],
        "the environment of backend 'serve' is missing (cpu)",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_gets_one_clear_message(case):
    arguments, message = CASES[case]
    code, output = qkit(*arguments)
    assert code in (1, 2)
    assert message in output
    assert "Traceback" not in output


def test_without_an_environment_it_says_how_to_make_one(checkpoint):
    code, output = qkit("quantize", "--model", checkpoint, "--method", "fp8")
    assert code == 1
    assert "the environment of backend 'quantize' is missing (cpu)" in output
    assert "run `qkit env create quantize --accelerator cpu`" in output


def test_a_folder_without_config_is_named(checkpoint):
    (checkpoint / "config.json").unlink()
    code, output = qkit("quantize", "--model", checkpoint, "--method", "fp8")
    assert code == 2
    assert "config.json" in output
    assert str(checkpoint) in output


def test_an_already_quantized_checkpoint_is_refused(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (checkpoint / "config.json").write_text(json.dumps(config))
    code, output = qkit("quantize", "--model", checkpoint, "--method", "awq")
    assert code == 2
    assert "is quantized already: gptq" in output
    assert "gptq" in output


def test_a_missing_calibration_file_is_found_before_anything_starts(checkpoint):
    code, output = qkit(
        "quantize", "--model", checkpoint, "--method", "awq", "--calibration", "./chats.jsonl"
    )
    assert code == 2
    assert "there is no calibration file './chats.jsonl'" in output


def test_out_takes_one_variant(checkpoint):
    code, output = qkit("quantize", "--model", checkpoint, "--out", "here")
    assert code == 2
    assert f"--out takes one variant, and this makes {len(DEFAULT_METHODS)}" in output


def test_a_taken_port_is_named(checkpoint, tmp_path, monkeypatch):
    from fakes.vllm_process import executable

    monkeypatch.setenv("QKIT_SERVE_PYTHON", str(executable(tmp_path)))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, output = qkit("serve", checkpoint, "--port", port, "--accelerator", "cpu")
    assert code == 2
    assert f"port {port} cannot be used: Address already in use" in output
    assert "leave --port out" in output
