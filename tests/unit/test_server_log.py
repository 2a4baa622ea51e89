from __future__ import annotations

from pathlib import Path

import pytest

from qkit.kernel_log import KERNEL_LINES, LOUD, kernel_mismatch
from qkit.server_log import GIB, advice_on, failure_reason, parse_log

LOGS = Path(__file__).parents[1] / "golden" / "logs"


def log(name):
    return (LOGS / f"{name}.log").read_text()


@pytest.mark.parametrize(
    ("name", "kernels", "quantization"),
    [
        ("v0.6-cuda-awq-marlin", ("awq_marlin",), "awq_marlin"),
        ("v0.6-cuda-awq-slow", ("AWQ GEMM (slow path)",), "awq"),
        ("v0.6-cuda-awq-forced", ("AWQ GEMM (slow path)",), "awq"),
        ("v0.18-cuda-awq-forced", ("AWQ GEMM (slow path)",), "awq"),
        ("v0.6.0-cuda-gptq-marlin", ("gptq_marlin",), "gptq_marlin"),
        ("v0.6-cuda-w4a16-machete", ("MacheteLinearKernel",), "compressed-tensors"),
        ("v0.7-cuda-int8-cutlass", ("CutlassScaledMMLinearKernel",), "compressed-tensors"),
        ("v0.9-cuda-w8a16-allspark", ("AllSparkLinearKernel",), "gptq_marlin"),
        ("v0.9-cuda-gptq-exllama", ("ExllamaLinearKernel",), "compressed-tensors"),
        ("v0.9-cuda-awq-layer-fallback", ("awq_marlin", "AWQ GEMM (slow path)"), "awq_marlin"),
        ("v0.14-cuda-fp8-unnamed", (), "compressed-tensors"),
        ("v0.18-cuda-fp8-cutlass", ("CutlassFP8ScaledMMLinearKernel",), "compressed-tensors"),
        ("v0.18-cuda-int8-triton", ("TritonInt8ScaledMMLinearKernel",), "compressed-tensors"),
        ("v0.22-cuda-awq", ("MarlinLinearKernel",), "awq_marlin"),
        ("v0.33-cuda-w4a16-marlin", ("MarlinLinearKernel",), "compressed-tensors"),
        ("v0.33-cuda-fp8-marlin", ("MarlinFP8ScaledMMLinearKernel",), "compressed-tensors"),
        ("v0.33-cuda-fp8-block", ("TritonFp8BlockScaledMMKernel",), "compressed-tensors"),
        ("v0.33-cuda-int8-cutlass", ("CutlassInt8ScaledMMLinearKernel",), "compressed-tensors"),
        ("v0.32-cpu-w4a16", ("CPUWNA16LinearKernel",), "compressed-tensors"),
        ("v0.32-cpu-fp8", ("ChannelWiseTorchFP8ScaledMMLinearKernel",), "compressed-tensors"),
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
        ("v0.6.0-cuda-gptq-marlin", 5.1932, 60211 * 16, None, None, None),
        ("v0.7-cuda-int8-cutlass", 8.1145, 72083 * 16, 281.57, 61.59, 0.21),
        ("v0.18-cuda-fp8-cutlass", 8.12, 1136736, 277.52, 60.71, 0),
        ("v0.9-cuda-fp8-a800", 8.118, 1159616, 141.55, 61.93, 0.52),
        ("v0.33-cuda-w4a16-machete", 5.2, 1181760, 144.26, 63.11, 0.61),
        ("v0.32-cpu-bf16", None, 524288, 512.0, 1.0, None),
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


@pytest.mark.parametrize(
    ("line", "gib"),
    [
        (
            "Initial free memory 78.35 GiB, reserved 4.0 GiB memory for KV Cache as specified by "
            "kv_cache_memory_bytes config and skipped memory profiling.",
            4.0,
        ),
        (
            "Auto set (9.41/23.54) GiB for KV cache on node 0, with 10.2 GiB requested memory",
            9.41,
        ),
    ],
)
def test_a_cache_of_a_set_size_is_read(line, gib):
    assert parse_log(f"INFO 12-01 05:44:03 [worker.py:1] {line}\n").kv_cache_bytes == round(
        gib * GIB
    )


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


def test_the_reason_of_a_death_after_the_start_is_the_workers():
    """Engine and API server each log a traceback of their own for the worker's."""
    assert failure_reason(log("v0.32-cpu-w4a16-no-avx512")) == (
        "AttributeError: '_OpNamespace' '_C' object has no attribute 'cpu_gemm_wna16'"
    )


@pytest.mark.parametrize(
    ("reason", "fix"),
    [
        ("NotImplementedError: FP8 KV cache on CPU requires x86 with AVX-512 or AMX.", "kv_cache"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.", "nvidia-smi"),
        ("ValueError: the model's max seq len (32768) is larger than the KV cache", None),
    ],
)
def test_advice_is_given_where_the_reason_has_none(reason, fix):
    advice = advice_on(reason)
    if fix is None:
        assert advice is None
    else:
        assert advice.plainly is None
        assert fix in advice.fix


@pytest.mark.parametrize(
    ("asked", "kernels", "marked"),
    [
        ("marlin", ("MarlinLinearKernel",), False),
        ("marlin", ("awq_marlin",), False),
        ("marlin", ("MarlinFP8 (weight-only)",), False),
        ("marlin", ("MacheteLinearKernel",), True),
        ("exllama", ("AllSparkLinearKernel",), True),
        ("marlin", ("AWQ GEMM (slow path)",), True),
        ("auto", ("MacheteLinearKernel",), False),
        ("marlin", (), False),
    ],
)
def test_another_kernel_than_asked_for_is_a_loud_mark(asked, kernels, marked):
    mark = kernel_mismatch(asked, kernels)
    assert (mark is not None) == marked
    if mark:
        assert mark.startswith(f"KERNEL: asked for {asked}, ran ")


@pytest.mark.parametrize("asked", ["flashinfer_cutlass", "FlashInfer_Cutlass"])
def test_a_family_of_two_words_is_recognised(asked):
    assert kernel_mismatch(asked, ("FlashInferCutlassMxfp8LinearKernel",)) is None
    assert kernel_mismatch(asked, ("CutlassFP8ScaledMMLinearKernel",)) is not None


def test_every_line_of_the_table_is_in_a_log():
    texts = [path.read_text() for path in LOGS.glob("*.log")]
    elsewhere = ("dequantize", "gptq_bitblas", "gptq quantization")
    for line in KERNEL_LINES:
        if not any(words in line.pattern.pattern for words in elsewhere):
            assert any(line.pattern.search(text) for text in texts), line.pattern.pattern


def test_a_method_that_the_table_has_no_log_of_is_read_too():
    text = "Using dequantize + batch-invariant matmul for CompressedTensorsWNA16"
    assert parse_log(text).kernels == ("dequantize + batch-invariant matmul",)
    assert parse_log("Using gptq_bitblas kernel.").kernels == ("gptq_bitblas",)
    text = "gptq quantization is not fully optimized yet. The speed can be slower than"
    assert parse_log(text).kernels == ("GPTQ Exllama (slow path)",)


@pytest.mark.parametrize("name", ["v0.6-cuda-awq-forced", "v0.18-cuda-awq-forced"])
def test_a_flag_that_forces_the_slow_path_is_a_loud_mark(name):
    (mark,) = parse_log(log(name)).marks
    assert mark.startswith(f"{LOUD} --quantization awq forces vLLM's slow awq path")
    assert "awq_marlin" in mark


@pytest.mark.parametrize("name", ["v0.6-cuda-awq-slow", "v0.9-cuda-awq-layer-fallback"])
def test_a_slow_path_is_a_loud_mark(name):
    (mark,) = parse_log(log(name)).marks
    assert mark.startswith(f"{LOUD} AWQ GEMM (slow path) ran")


@pytest.mark.parametrize("name", ["v0.9-cuda-fp8-a800", "v0.33-cuda-fp8-marlin"])
def test_weight_only_fp8_is_told_apart(name):
    (mark,) = parse_log(log(name)).marks
    assert mark.startswith("FP8 weight-only")


def test_a_version_that_names_no_kernel_says_so():
    assert parse_log(log("v0.14-cuda-fp8-unnamed")).marks == (
        "this vLLM's log does not name the linear kernel",
    )


def test_plain_awq_on_a_cpu_is_no_slow_path():
    text = "quantization=awq\n[cpu_worker.py:12] ready\n"
    assert parse_log(text).kernels == ()


def test_a_backend_without_a_kernel_for_the_layer_is_marked():
    facts = parse_log(log("v0.33-cuda-int8-cutlass"))
    assert len(facts.marks) == 1
    assert "no marlin kernel" in facts.marks[0]
