"""The server a measurement was taken from."""

from __future__ import annotations

from pydantic import Field

from qkit.measurements.base import Stored


class ServerRecord(Stored):
    """The running server a measurement was taken from."""

    engine: str = "vllm"
    version: str | None
    #: Command-line flags after the module name, model path and port left out.
    flags: tuple[str, ...]
    #: Environment variables that change results.
    environment: dict[str, str] = Field(default_factory=dict)
    #: Linear kernel family asked for, or "auto"; its flag or variable is not among the above.
    kernel_asked: str = "auto"
    max_model_len: int | None
    #: Linear kernels named in the log, in order of appearance, without repeats.
    kernels: tuple[str, ...]
    #: Quantization method vLLM says it loads the checkpoint as.
    quantization: str | None = None
    #: vLLM's own "Model loading took" line on CUDA; None where it does not print one.
    weight_bytes: int | None = None
    kv_cache_tokens: int | None = None
    #: vLLM's "Maximum concurrency for N tokens per request".
    max_concurrency: float | None = None
    kv_cache_bytes: int | None = None
    graph_memory_bytes: int | None = None
    startup_s: float | None = None
    marks: tuple[str, ...] = ()


class MemoryUse(Stored):
    """Memory of a server's processes. vLLM fills what it is given, so it is no saving."""

    #: Sum of every process's largest resident set so far; pages that they share count repeatedly.
    rss_peak_bytes: int | None
    #: Proportional set size when measured: shared pages count once.
    pss_bytes: int | None
    processes: int
