"""Figures of a benchmark, and every request they were computed from."""

from __future__ import annotations

from qkit.measurements.base import Stored
from qkit.measurements.server_side import ServerSide


class RequestRecord(Stored):
    """One request of the load generator, client side, seconds on the run's monotonic clock."""

    index: int
    #: Which repeat of its cell it belongs to, from 0.
    repeat: int = 0
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
    #: What the server and its GPUs did meanwhile.
    server: ServerSide | None = None
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
