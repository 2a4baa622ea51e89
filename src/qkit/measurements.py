"""What is stored of a measurement: pydantic models of the JSON files under `artifacts/`.

Every file names the variant's hash, the server's version, flags and kernels, the hardware, and
the raw records its figures were computed from. A figure that is not known is None, never 0.
Times are seconds unless the name says otherwise; sizes are bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION = 1


class Stored(BaseModel):
    """Base of every stored value: immutable, and strict about unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="null")


class Hardware(Stored):
    """The machine a measurement was made on."""

    accelerator: Literal["cpu", "cuda"]
    #: Name of the GPU, or of the CPU where there is none.
    name: str
    count: int = 1
    #: GPU memory, or the machine's where there is no GPU.
    memory_bytes: int
    cpu: str
    cpu_cores: int
    compute_capability: str | None = None
    driver: str | None = None


class CalibrationRecord(Stored):
    """What a variant was calibrated with."""

    source: str
    #: SHA-256 of the token ids, in order.
    tokens_hash: str
    requested_samples: int
    used_samples: int
    seq_len: int
    total_tokens: int
    #: Rows in the seed's order, up to the one that made the tokens enough.
    rows_read: int
    #: Those of them without text.
    rows_skipped: int
    seed: int
    #: Rows in the whole source.
    rows_there: int | None = None
    #: Rows with tokens in the samples.
    rows_used: int | None = None
    #: Rows of which tokens were left out: the surplus of the last one.
    rows_truncated: int | None = None
    tokens_left_out: int | None = None
    #: Share of the letters by Unicode script, the largest first, chat templates not counted.
    scripts: dict[str, float] = Field(default_factory=dict)
    #: Why the data may not be right for the model; None where nothing is known against it.
    warning: str | None = None


class VariantRecord(Stored):
    """`qkit.json` in a variant's folder: what it is and how it was made."""

    schema_version: int = SCHEMA_VERSION
    #: Key of the inputs: source hash, method settings, calibration hash, backend's pins.
    key: str
    #: Hash of this folder's weights and configuration.
    content_hash: str
    source: str
    source_hash: str
    method: str
    scheme: str
    backend: str
    versions: dict[str, str]
    calibration: CalibrationRecord | None
    settings: dict[str, str | int | float | bool | tuple[str, ...] | None]
    ignored_modules: tuple[str, ...]
    skipped_mappings: tuple[str, ...]
    notes: tuple[str, ...] = ()
    #: What was checked after saving.
    load_check: str
    #: Mean divergence from the source's next-token distributions on a short text, in nats.
    mean_kl: float
    #: Share of that text's positions with the source's most likely token.
    top1_agreement: float
    quantized_bytes: int
    unquantized_bytes: int
    weight_bytes: int
    seed: int
    duration_s: float
    peak_memory_bytes: int
    created: str


class Subject(Stored):
    """A checkpoint to be served and measured, stored as `subject.json`.

    Attributes:
        label: Name of its row.
        path: Checkpoint folder; the tokenizer's for a server that someone else started.
        method: How it was quantized; None for a 16-bit checkpoint.
        scheme: For example "BF16" or "W4A16 sym g128".
        content_hash: Hash of weights, configuration and tokenizer.
        record: qkit.json, where qkit made it.
        weight_bytes: Bytes of all tensors.
        quantized_bytes: Bytes of quantized layers, scales included.
        unquantized_bytes: The rest.
    """

    label: str
    path: Path
    method: str | None
    scheme: str
    content_hash: str
    record: VariantRecord | None = None
    weight_bytes: int | None = None
    quantized_bytes: int | None = None
    unquantized_bytes: int | None = None


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


class Sample(Stored):
    """One scored question of an accuracy task."""

    task: str
    #: lm-eval's hash of the document; the same question has the same hash in every variant.
    doc_hash: str
    #: Metric's value on this document (0 or 1 for accuracy).
    value: float
    #: Log-likelihood of each option, natural logarithm, in the order of the options.
    loglikelihoods: tuple[float, ...] = ()
    target: str = ""


class TaskScore(Stored):
    """The score of one task, or of a group as lm-eval weighs it."""

    task: str
    alias: str
    metric: str
    value: float
    #: Standard error as lm-eval computes it.
    stderr: float | None
    n: int
    #: Whether `value` is the weighted mean of other tasks.
    is_group: bool = False
    version: str | None = None
    num_fewshot: int | None = None


class AccuracyResult(Stored):
    """Result of one accuracy suite: the headline score, its parts and every sample."""

    suite: str
    harness: str
    headline: TaskScore
    scores: tuple[TaskScore, ...]
    samples: tuple[Sample, ...]
    num_fewshot: int | None
    limit: int | None
    chat_template: bool
    #: SHA-256 of the served tokenizer's files.
    tokenizer_hash: str
    duration_s: float
    requests: int
    prompt_tokens: int
    #: Prompt tokens the server found in its prefix cache; None where it does not say.
    cached_tokens: int | None
    marks: tuple[str, ...] = ()


class RequestRecord(Stored):
    """One request of the load generator, client side, seconds on the run's monotonic clock."""

    index: int
    #: "ok", or what went wrong in one word: "http", "stream", "empty", "cut", "timeout",
    #: "refused", "length".
    status: str
    error: str | None = None
    start_s: float
    first_token_s: float | None
    last_token_s: float | None
    end_s: float
    prompt_tokens: int | None
    output_tokens: int | None
    #: Whether `output_tokens` is the tokenizer's count because the server sent no usage.
    tokens_estimated: bool = False
    finish_reason: str | None = None
    #: Arrival of every chunk that carried a token.
    chunk_s: tuple[float, ...] = ()


class Distribution(Stored):
    """Percentiles of a set of n values. p95 needs n >= 20 and p99 n >= 100, else None."""

    n: int
    mean: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    max: float | None


class BenchCell(Stored):
    """One concurrency level: figures and the requests they were computed from."""

    concurrency: int
    #: Measured requests, failed ones included.
    n: int
    failed: int
    duration_s: float
    ttft_ms: Distribution
    tpot_ms: Distribution
    #: Gap between chunks that carry tokens, pooled over requests; a chunk can hold several tokens.
    itl_ms: Distribution
    e2e_ms: Distribution
    output_tok_per_s: float | None
    total_tok_per_s: float | None
    req_per_s: float | None
    #: Output tokens per second while all `concurrency` slots were busy.
    steady_tok_per_s: float | None
    output_tokens_mean: float | None
    input_tokens_mean: float | None
    #: Prefix-cache hits (tokens) the server counted during the cell.
    prefix_hit_tokens: float | None
    preemptions: float | None
    #: Largest delay of the client's own event loop.
    client_lag_ms_max: float
    client_lag_ms_p99: float
    client_cpu_share: float
    marks: tuple[str, ...] = ()
    requests: tuple[RequestRecord, ...]


class BenchResult(Stored):
    """A sweep over concurrency levels."""

    endpoint: str
    input_tokens: int
    output_tokens: int
    ignore_eos: bool
    #: Sampling parameters as sent.
    sampling: dict[str, float]
    seed: int
    prompt_hash: str
    cells: tuple[BenchCell, ...]
    duration_s: float


class Measurement(Stored):
    """One file: one suite on one variant."""

    schema_version: int = SCHEMA_VERSION
    #: Key of everything that shaped the result; equal keys need no new run.
    key: str
    suite: str
    variant: str
    variant_hash: str
    created: str
    hardware: Hardware
    server: ServerRecord
    versions: dict[str, str]
    accuracy: AccuracyResult | None = None
    bench: BenchResult | None = None


class FailureRecord(Stored):
    """A cell that failed, kept until it succeeds."""

    schema_version: int = SCHEMA_VERSION
    variant: str
    #: "quantize", "serve", or a suite's name.
    step: str
    reason: str
    detail: str
    created: str
