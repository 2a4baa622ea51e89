"""Starting, failing and stopping, against a fake interpreter that fails in a chosen way."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from fakes.openai_server import FakeServer
from fakes.scoring_server import ScoringServer
from fakes.vllm_process import executable

from qkit import processes
from qkit.errors import InputError, ServerError
from qkit.kernel_switch import DISABLED, KernelChoice
from qkit.recipe import Serve
from qkit.server import (
    ServerSpec,
    asked_kernel,
    attach,
    flags_of,
    instance_of,
    kernel_choice,
    serve,
    variables_of,
)


def spec_of(folder, **change):
    arguments = {
        "python": Path("/nowhere/bin/python"),
        "model_path": folder / "model",
        "name": "awq",
        "method": "awq",
        "accelerator": "cpu",
        "serve": Serve(startup_timeout_s=60),
        "log": folder / "server.log",
    }
    return ServerSpec(**{**arguments, **change})


@pytest.fixture
def fake(tmp_path):
    return executable(tmp_path)


def test_a_server_is_started_read_and_gone_afterwards_with_its_children(tmp_path, fake):
    with serve(spec_of(tmp_path, python=fake)) as server:
        with urllib.request.urlopen(f"{server.base_url}/health") as reply:
            assert reply.status == 200
        group = server._process.pid
        assert len(processes.group_members(group)) > 1
        assert server.base_url.startswith("http://127.0.0.1:")
        assert server.record.kernels == ("unquantized (bfloat16)",)
        assert server.record.kv_cache_tokens == 524288
        assert server.record.startup_s > 0
        memory = server.memory_use()
        assert memory.processes > 1
        assert memory.rss_peak_bytes >= memory.pss_bytes > 0
    assert processes.group_members(group) == []
    assert "--host 127.0.0.1" in (tmp_path / "server.log").read_text()


def test_a_server_is_gone_after_an_error_in_the_block(tmp_path, fake):
    groups = []

    def fail():
        with serve(spec_of(tmp_path, python=fake)) as server:
            groups.append(server._process.pid)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert processes.group_members(groups[0]) == []


def test_a_failed_start_shows_the_servers_own_reason(tmp_path, fake, monkeypatch):
    monkeypatch.setenv("QKIT_FAKE_VLLM", "die")
    with pytest.raises(ServerError) as caught, serve(spec_of(tmp_path, python=fake)):
        pass
    assert caught.value.what == (
        "the server did not start (exit code 1): "
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 260.00 MiB."
    )
    assert "lower serve.gpu_memory_utilization" in caught.value.fix


def test_a_kernel_the_cpu_lacks_is_told_in_plain_words(tmp_path, fake, monkeypatch):
    monkeypatch.setenv("QKIT_FAKE_VLLM", "die:v0.32-cpu-w4a16-no-avx512")
    with pytest.raises(ServerError) as caught, serve(spec_of(tmp_path, python=fake)):
        pass
    assert caught.value.what == (
        "the server did not start (exit code 1): vLLM's CPU build serves 4-bit weights with"
        " AVX-512 only, which this CPU lacks"
    )
    assert caught.value.fix == "serve it on a GPU, or on a CPU with AVX-512"
    assert "cpu_gemm_wna16" in caught.value.detail


def test_a_server_that_never_gets_ready_is_ended(tmp_path, fake, monkeypatch):
    monkeypatch.setenv("QKIT_FAKE_VLLM", "hang")
    spec = spec_of(tmp_path, python=fake, serve=Serve(startup_timeout_s=3))
    with pytest.raises(ServerError, match="not ready within 3 s"), serve(spec):
        pass


def test_a_taken_port_is_refused_before_anything_starts(tmp_path, fake):
    with FakeServer() as other:
        port = int(other.url.rsplit(":", 1)[1])
        spec = spec_of(tmp_path, python=fake, port=port)
        with pytest.raises(InputError, match=f"port {port} cannot be used"), serve(spec):
            pass
    assert not (tmp_path / "server.log").exists()


def test_a_dead_server_is_told_apart_from_a_live_one(tmp_path, fake, monkeypatch):
    monkeypatch.setenv("QKIT_FAKE_VLLM", "die_after:1")
    body = b'{"model": "m", "prompt": "a", "max_tokens": 1}'
    with serve(spec_of(tmp_path, python=fake)) as server:
        assert server.is_alive()
        for _ in range(2):
            request = urllib.request.Request(
                f"{server.base_url}/v1/completions", body, {"Content-Type": "application/json"}
            )
            with contextlib.suppress(OSError):
                urllib.request.urlopen(request, timeout=10).close()
        server._process.wait(timeout=30)
        assert not server.is_alive()
        with pytest.raises(ServerError, match=r"died .* CUDA out of memory"):
            server.check_alive()


def test_sigterm_ends_the_server_before_the_process(tmp_path, fake):
    """Batch schedulers end a job with SIGTERM."""
    code = f"""
import os, signal
from pathlib import Path
import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from unit.test_server import spec_of
from qkit.processes import interruptible
from qkit.server import serve
with interruptible(), serve(spec_of(Path({str(tmp_path)!r}), python=Path({str(fake)!r}))) as server:
    print(server._process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 143, done.stderr
    assert processes.group_members(int(done.stdout)) == []


# ------------------------------------------------------------------------------ what is asked for


@pytest.mark.parametrize(
    ("method", "capability", "kernel"),
    [
        (None, "8.0", "auto"),
        ("awq", "8.0", "marlin"),
        ("gptq", "9.0", "marlin"),
        ("fp8", "8.0", "marlin"),
        ("fp8", "8.9", "auto"),
        ("fp8", "9.0", "auto"),
        ("smoothquant", "8.0", "auto"),
    ],
)
def test_marlin_is_asked_for_where_it_is_the_kernel_to_want(tmp_path, method, capability, kernel):
    spec = spec_of(tmp_path, method=method, accelerator="cuda", compute_capability=capability)
    assert asked_kernel(spec) == kernel


def test_nothing_is_asked_for_on_a_cpu(tmp_path):
    assert kernel_choice(spec_of(tmp_path)) == KernelChoice()


def environment_with(folder, version, arguments="", variables=""):
    """A serve environment whose interpreter finds a vLLM of a few lines."""
    site = folder / "site"
    (site / "vllm" / "engine").mkdir(parents=True)
    (site / "vllm" / "__init__.py").write_text("raise RuntimeError('it must not be imported')")
    (site / "vllm" / "engine" / "arg_utils.py").write_text(arguments)
    (site / "vllm" / "envs.py").write_text(variables)
    (site / f"vllm-{version}.dist-info").mkdir()
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    (site / f"vllm-{version}.dist-info" / "METADATA").write_text(metadata)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


def test_each_vllm_is_asked_in_its_own_way(tmp_path):
    def choice(folder, kernel="marlin", **vllm):
        python = environment_with(tmp_path / folder, **vllm)
        serve_settings = Serve(kernel=kernel)
        return kernel_choice(
            spec_of(tmp_path, accelerator="cuda", python=python, serve=serve_settings)
        )

    new = {"version": "0.33.0", "arguments": '"--linear-backend"', "variables": DISABLED}
    assert choice("new", **new) == KernelChoice(flags=("--linear-backend", "marlin"))
    old = {"version": "0.9.2", "variables": DISABLED}
    (variable,) = choice("old", **old).variables
    assert variable[0] == DISABLED
    assert "MacheteLinearKernel" in variable[1]
    assert "MarlinLinearKernel" not in variable[1]
    (variable,) = choice("exllama", "exllama", **old).variables
    assert "MarlinLinearKernel" in variable[1]
    assert "ExllamaLinearKernel" not in variable[1]
    assert choice("oldest", version="0.6.0") == KernelChoice()
    mark = choice("none", "triton", **old).mark
    assert mark == "KERNEL: vLLM 0.9.2 has no switch for 'triton'; it chose the kernel itself"
    assert choice("oldest-exllama", "exllama", version="0.6.0").mark.startswith("KERNEL:")


def test_an_interpreter_that_cannot_run_is_a_clear_error(tmp_path):
    spec = spec_of(tmp_path, accelerator="cuda")
    with pytest.raises(ServerError, match="cannot be asked for its vLLM"):
        kernel_choice(spec)


def test_flags_and_variables_are_the_same_for_all_variants_of_a_run(tmp_path):
    specs = [
        spec_of(tmp_path, method=method, accelerator="cuda", compute_capability="8.0")
        for method in (None, "awq", "fp8")
    ]
    assert len({tuple(flags_of(spec)) for spec in specs}) == 1
    assert len({tuple(variables_of(spec).items()) for spec in specs}) == 1


def test_the_recipes_settings_become_flags(tmp_path):
    settings = Serve(
        max_model_len=4096, max_num_seqs=64, tensor_parallel_size=2, enforce_eager=True,
        gpu_memory_utilization=0.8, args=("--kv-cache-dtype", "fp8"),
    )  # fmt: skip
    flags = " ".join(flags_of(spec_of(tmp_path, serve=settings, accelerator="cuda")))
    for expected in (
        "--max-model-len 4096", "--max-num-seqs 64", "--tensor-parallel-size 2",
        "--enforce-eager", "--gpu-memory-utilization 0.8", "--kv-cache-dtype fp8",
    ):  # fmt: skip
        assert expected in flags
    assert "--trust-remote-code" not in flags


# ---------------------------------------------------------------------------------------- attach


def test_a_running_server_is_attached_to_and_left_running():
    with FakeServer(max_model_len=2048) as fake:
        server = attach(f"{fake.url}/v1")
        assert server.base_url == fake.url
        assert server.record.max_model_len == 2048
        assert "attached server" in server.record.marks[0]
        server.check_alive()
        with pytest.raises(InputError, match="does not serve 'other'"):
            attach(fake.url, model="other")


def test_a_server_is_the_same_while_its_process_and_model_are():
    with ScoringServer(started=1.0) as fake:
        server = attach(fake.url)
        first = instance_of(server)
        assert first == instance_of(attach(fake.url))
        fake.started = 2.0
        assert instance_of(server) not in (first, None)
    with FakeServer(max_model_len=2048) as silent:
        assert instance_of(attach(silent.url)) is None


def test_nothing_at_the_address_is_a_clear_error():
    with pytest.raises(ServerError, match="the server does not answer"):
        attach("http://127.0.0.1:9")
