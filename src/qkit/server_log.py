"""What vLLM's log says: kernels, memory and the reason of a failed start. Pure.

The wording is vLLM's own, from 0.6.x (CUDA graphs and KV blocks) to 0.33; `tests/golden/logs`
holds lines of each.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

GIB = 1 << 30

#: Lines that name the kernel of a linear layer type.
#: "Using MarlinLinearKernel for CompressedTensorsWNA16" · "Using MacheteLinearKernel for
#: GPTQMarlinLinearMethod" · "Selected CutlassFP8ScaledMMLinearKernel for CompressedTensorsW8A8Fp8"
_KERNEL = re.compile(r"\b(?:Using|Selected) (\w*LinearKernel) for (\w+)")
#: Kernels that older versions announce without a class name.
_WORDED_KERNELS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"Using awq_marlin kernel"), "awq_marlin"),
    (re.compile(r"Using gptq_marlin kernel"), "gptq_marlin"),
    (
        re.compile(r"Weight-only FP8 compression will be used leveraging the Marlin kernel"),
        "MarlinFP8 (weight-only)",
    ),
    (re.compile(r"awq quantization is not fully optimized yet"), "AWQ GEMM (slow path)"),
    (re.compile(r"gptq quantization is not fully optimized yet"), "GPTQ Exllama (slow path)"),
)
_QUANTIZATION = re.compile(r"\bquantization=(\w[\w-]*)")
_DTYPE = re.compile(r"\bdtype=torch\.(\w+)")
#: "Model loading took 5.2 GiB memory and 3.1 seconds" (0.7+) · "Loading model weights took
#: 5.7916 GB" (0.6.x; the number was divided by 2^30 there too).
_WEIGHTS = re.compile(r"(?:Model loading took|Loading model weights took) ([\d.]+) Gi?B")
_KV_TOKENS = re.compile(r"KV cache size: ([\d,]+) tokens")
#: 0.6.x: "# GPU blocks: 24834, # CPU blocks: 2048" of 16 tokens each by default.
_KV_BLOCKS = re.compile(r"# (?:GPU|CUDA|cuda|cpu) blocks: (\d+)")
_BLOCK_SIZE = re.compile(r"block_size['\"]?[=:] ?(\d+)")
_CONCURRENCY = re.compile(r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x")
_KV_BYTES = re.compile(r"Available KV cache memory: ([\d.]+) GiB")
_GRAPHS = re.compile(r"Graph capturing finished in [\d.]+ secs?, took ([\d.]+) GiB")
_NO_BACKEND_KERNEL = re.compile(r"--linear-backend=\w+ has no kernel for this linear layer type")

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
    kernels = [match.group(1) for match in _KERNEL.finditer(text)]
    kernels += [name for pattern, name in _WORDED_KERNELS if pattern.search(text)]
    quantization = _last(_QUANTIZATION, text)
    quantization = None if quantization in (None, "None") else quantization
    dtype = _last(_DTYPE, text)
    if not kernels and quantization is None and dtype:
        # vLLM names no kernel for plain 16-bit layers; its configuration line says what they are.
        kernels = [f"unquantized ({dtype})"]
    tokens = _last(_KV_TOKENS, text)
    kv_tokens = int(tokens.replace(",", "")) if tokens else _tokens_of_blocks(text)
    concurrency = _last(_CONCURRENCY, text)
    marks = []
    if _NO_BACKEND_KERNEL.search(text):
        marks.append("vLLM has no kernel of the asked backend for this layer type; it chose itself")
    return LogFacts(
        kernels=tuple(dict.fromkeys(kernels)),
        quantization=quantization,
        weight_bytes=_gib(_last(_WEIGHTS, text)),
        kv_cache_tokens=kv_tokens,
        kv_cache_bytes=_gib(_last(_KV_BYTES, text)),
        max_concurrency=float(concurrency) if concurrency else None,
        graph_memory_bytes=_gib(_last(_GRAPHS, text)),
        marks=tuple(marks),
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


def kernel_mismatch(asked: str, kernels: tuple[str, ...]) -> str | None:
    """Return a loud mark where a kernel was asked for and another one ran.

    Args:
        asked: Kernel family asked for on the command line, for example "marlin", or "auto".
        kernels: Kernels the log names.
    """
    if asked == "auto" or not kernels:
        return None
    wrong = [name for name in kernels if asked.replace("_", "") not in name.lower()]
    if not wrong:
        return None
    return f"KERNEL: asked for {asked}, ran {', '.join(wrong)}"


def _last(pattern: re.Pattern[str], text: str) -> str | None:
    matches = pattern.findall(text)
    return str(matches[-1]) if matches else None


def _gib(number: str | None) -> int | None:
    return round(float(number) * GIB) if number else None


def _tokens_of_blocks(text: str) -> int | None:
    blocks = _last(_KV_BLOCKS, text)
    if blocks is None:
        return None
    return int(blocks) * int(_last(_BLOCK_SIZE, text) or 16)
