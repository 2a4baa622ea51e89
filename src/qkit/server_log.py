"""What vLLM's log says: kernels, memory and the reason of a failed start. Pure.

The wording is vLLM's own, from 0.6.x (CUDA graphs and KV blocks) to 0.33; `tests/golden/logs`
holds lines of each. Kernels have a table of their own, `qkit.kernel_log`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from qkit.kernel_log import find_kernels, kernel_marks

GIB = 1 << 30

_QUANTIZATION = re.compile(r"\bquantization=(\w[\w-]*)")
_DTYPE = re.compile(r"\bdtype=torch\.(\w+)")
#: "Model loading took 5.2 GiB memory and 3.1 seconds" (0.14 on) · "Model loading took 8.1180 GiB
#: and 2.9 seconds" (0.8 on) · "Loading model weights took 5.7916 GB" (0.6, 0.7; the number was
#: divided by 2^30 there too).
_WEIGHTS = re.compile(r"(?:Model loading took|Loading model weights took) ([\d.]+) Gi?B")
#: "GPU KV cache size: 1,159,616 tokens" (0.8 on, V1), "CPU KV cache size: ..." (0.32).
_KV_TOKENS = re.compile(r"KV cache size: ([\d,]+) tokens")
#: "# GPU blocks: 24834, # CPU blocks: 2048" (0.6), "# cuda blocks: ..." (0.7 to 0.10, V0), of 16
#: tokens each by default. On CUDA the second figure is swap space.
_KV_BLOCKS = re.compile(r"# (?:GPU|CUDA|cuda|cpu) blocks: (\d+)")
#: A CPU's only figure (0.6): "# CPU blocks: 2048".
_CPU_BLOCKS = re.compile(r"\] # CPU blocks: (\d+)")
_BLOCK_SIZE = re.compile(r"block_size['\"]?[=:] ?(\d+)")
#: "Maximum concurrency for 4096 tokens per request: 196.22x" (0.6.2 on; thousands have commas from
#: 0.8 on).
_CONCURRENCY = re.compile(r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x")
#: "Available KV cache memory: 61.93 GiB" (0.9 on, V1) · "the rest of the memory reserved for KV
#: Cache is 55.02GiB." (0.7 to 0.10, V0) · with --kv-cache-memory-bytes "reserved 4.0 GiB memory for
#: KV Cache as specified by kv_cache_memory_bytes config" (0.11 on) · on a CPU "Explicitly set
#: (1.0/23.54) GiB for KV cache on node 0." or "Auto set (...) GiB ..." (0.32).
_KV_BYTES = (
    re.compile(r"(?:Available KV cache memory: |reserved for KV Cache is )([\d.]+) ?GiB"),
    re.compile(r"reserved ([\d.]+) ?GiB memory for KV Cache"),
    re.compile(r"(?:Explicitly|Auto) set \(([\d.]+)/[\d.]+\) GiB for KV cache"),
)
#: "Graph capturing finished in 22 secs, took 0.52 GiB" (0.6.5 on; 0.6.0 tells no size).
_GRAPHS = re.compile(r"Graph capturing finished in [\d.]+ secs?, took (-?[\d.]+) GiB")

#: A last line of a Python traceback, possibly behind vLLM's log prefix.
_EXCEPTION = re.compile(
    r"(?:^|\s)((?:\w+\.)*\w*(?:Error|Exception|Interrupt)(?:\(\w+\))?): (?P<message>.+)$"
)
#: Messages that only report that another process failed.
_SECONDHAND = (
    "Engine core initialization failed",
    "Engine process failed to start",
    "WorkerProc initialization failed",
    "See root cause above",
)


@dataclass(frozen=True)
class Advice:
    """What to do about a server's reason for dying.

    Attributes:
        fix: As an instruction.
        plainly: The reason in words that a person can act on; None where the server's own do.
    """

    fix: str
    plainly: str | None = None


_ADVICE = (
    (
        # The library of operators for CPUs without AVX-512 comes without this one (0.32).
        re.compile(r"no attribute 'cpu_gemm_wna16'"),
        Advice(
            "serve it on a GPU, or on a CPU with AVX-512",
            "vLLM's CPU build serves 4-bit weights with AVX-512 only, which this CPU lacks",
        ),
    ),
    (
        re.compile(r"FP8 KV cache on CPU requires"),
        Advice("serve it on a GPU or such a CPU, or make the variant without kv_cache: fp8"),
    ),
    (
        re.compile(r"CUDA out of memory"),
        Advice(
            "see in nvidia-smi whether something else is on the GPU; if not, lower"
            " serve.gpu_memory_utilization, serve.max_num_seqs or serve.max_model_len, or use more"
            " cards (serve.tensor_parallel_size)"
        ),
    ),
)


@dataclass(frozen=True)
class LogFacts:
    """Figures read from a server's log; None where the log does not say."""

    kernels: tuple[str, ...]
    quantization: str | None
    weight_bytes: int | None
    kv_cache_tokens: int | None
    kv_cache_bytes: int | None
    max_concurrency: float | None
    graph_memory_bytes: int | None
    marks: tuple[str, ...]


def parse_log(text: str) -> LogFacts:
    """Read kernels and memory from the log of a vLLM server that has started."""
    quantization = _last(_QUANTIZATION, text)
    quantization = None if quantization in (None, "None") else quantization
    kernels = find_kernels(text, quantization)
    dtype = _last(_DTYPE, text)
    if not kernels and quantization is None and dtype:
        # vLLM names no kernel for plain 16-bit layers; its configuration line says what they are.
        kernels = (f"unquantized ({dtype})",)
    tokens = _last(_KV_TOKENS, text)
    kv_tokens = int(tokens.replace(",", "")) if tokens else _tokens_of_blocks(text)
    concurrency = _last(_CONCURRENCY, text)
    marks = kernel_marks(text, kernels)
    if not kernels and text and quantization is not None:
        marks += ("this vLLM's log does not name the linear kernel",)
    return LogFacts(
        kernels=kernels,
        quantization=quantization,
        weight_bytes=_gib(_last(_WEIGHTS, text)),
        kv_cache_tokens=kv_tokens,
        kv_cache_bytes=_gib(_last_of_any(_KV_BYTES, text)),
        max_concurrency=float(concurrency) if concurrency else None,
        graph_memory_bytes=_gib(_last(_GRAPHS, text)),
        marks=marks,
    )


def failure_reason(text: str) -> str | None:
    """Return the server's own reason for dying: the first exception that is not second-hand."""
    secondhand = None
    for line in text.splitlines():
        match = _EXCEPTION.search(line)
        if not match:
            continue
        reason = f"{match.group(1)}: {match.group('message').strip()}"
        if not any(words in reason for words in _SECONDHAND):
            return reason
        secondhand = secondhand or reason
    return secondhand


def advice_on(reason: str) -> Advice | None:
    """Return what to do about a server's reason for dying, None where nothing is known."""
    return next((advice for pattern, advice in _ADVICE if pattern.search(reason)), None)


def _last(pattern: re.Pattern[str], text: str) -> str | None:
    matches = pattern.findall(text)
    return str(matches[-1]) if matches else None


def _last_of_any(patterns: tuple[re.Pattern[str], ...], text: str) -> str | None:
    return next((found for pattern in patterns if (found := _last(pattern, text))), None)


def _gib(number: str | None) -> int | None:
    # What a worker frees while it captures can exceed what its graphs take.
    return max(0, round(float(number) * GIB)) if number else None


def _tokens_of_blocks(text: str) -> int | None:
    blocks = _last(_KV_BLOCKS, text) or _last(_CPU_BLOCKS, text)
    if blocks is None:
        return None
    return int(blocks) * int(_last(_BLOCK_SIZE, text) or 16)
