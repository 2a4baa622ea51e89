from __future__ import annotations

from pathlib import Path

import pytest

from qkit.server_log import GIB, failure_reason, kernel_mismatch, parse_log

LOGS = Path(__file__).parents[1] / "golden" / "logs"


def log(name):
    return (LOGS / f"{name}.log").read_text()


@pytest.mark.parametrize(
    ("name", "kernels", "quantization"),
    [
        ("v0.6-cuda-awq-marlin", ("awq_marlin",), "awq_marlin"),
        ("v0.6-cuda-awq-slow", ("AWQ GEMM (slow path)",), "awq"),
        ("v0.9-cuda-fp8-a800", ("MarlinFP8 (weight-only)",), "compressed-tensors"),
        ("v0.33-cuda-w4a16-machete", ("MacheteLinearKernel",), "compressed-tensors"),
        ("v0.32-cpu-int8", ("CPUInt8ScaledMMLinearKernel",), "compressed-tensors"),
        ("v0.32-cpu-bf16", ("unquantized (bfloat16)",), None),
    ],
)
def test_the_kernel_that_ran_is_read(name, kernels, quantization):
    facts = parse_log(log(name))
    assert (facts.kernels, facts.quantization) == (kernels, quantization)


@pytest.mark.parametrize(
    ("name", "weights_gib", "tokens", "concurrency", "cache_gib", "graphs_gib"),
    [
        ("v0.6-cuda-awq-marlin", 1.9551, 50233 * 16, 196.22, None, 0.22),
        ("v0.9-cuda-fp8-a800", 8.118, 1159616, 141.55, 61.93, 0.52),
        ("v0.33-cuda-w4a16-machete", 5.2, 1181760, 144.26, 63.11, 0.61),
        ("v0.32-cpu-bf16", None, 524288, 512.0, None, None),
    ],
)
def test_memory_is_read_and_what_is_not_said_is_none(
    name, weights_gib, tokens, concurrency, cache_gib, graphs_gib
):
    def size(gib):
        return None if gib is None else round(gib * GIB)

    facts = parse_log(log(name))
    assert facts.weight_bytes == size(weights_gib)
    assert facts.kv_cache_tokens == tokens
    assert facts.max_concurrency == concurrency
    assert facts.kv_cache_bytes == size(cache_gib)
    assert facts.graph_memory_bytes == size(graphs_gib)


def test_an_empty_log_says_nothing():
    facts = parse_log("")
    assert facts.kernels == ()
    assert facts.kv_cache_tokens is None
    assert failure_reason("") is None


def test_a_kernel_is_named_once():
    line = "Using MarlinLinearKernel for CompressedTensorsWNA16\n"
    assert parse_log(3 * line).kernels == ("MarlinLinearKernel",)


def test_the_servers_own_reason_is_the_root_cause():
    assert failure_reason(log("v0.32-died")) == (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 260.00 MiB."
    )
    assert failure_reason("x RuntimeError: Engine core initialization failed.") == (
        "RuntimeError: Engine core initialization failed."
    )


@pytest.mark.parametrize(
    ("asked", "kernels", "marked"),
    [
        ("marlin", ("MarlinLinearKernel",), False),
        ("marlin", ("awq_marlin",), False),
        ("marlin", ("MarlinFP8 (weight-only)",), False),
        ("marlin", ("MacheteLinearKernel",), True),
        ("marlin", ("AWQ GEMM (slow path)",), True),
        ("auto", ("MacheteLinearKernel",), False),
        ("marlin", (), False),
    ],
)
def test_another_kernel_than_asked_for_is_a_loud_mark(asked, kernels, marked):
    mark = kernel_mismatch(asked, kernels)
    assert (mark is not None) == marked
    if mark:
        assert mark.startswith("KERNEL: asked for marlin, ran ")


def test_a_backend_without_a_kernel_for_the_layer_is_marked():
    text = "--linear-backend=marlin has no kernel for this linear layer type; using automatic"
    assert len(parse_log(text).marks) == 1
