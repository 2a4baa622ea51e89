"""Figures of a benchmark, and every request they were computed from."""

from __future__ import annotations

from typing import Literal

from qkit.levels import Level
from qkit.measurements.base import Stored
from qkit.measurements.server_side import ServerSide


class RequestRecord(Stored):
    """One request of the load generator, client side, seconds on the run's monotonic clock."""

    index: int
    #: Which repeat of its cell it belongs to, from 0.
    repeat: int = 0
    #: "ok", or what went wrong in one word: "http", "stream", "empty", "cut", "timeout",
    #: "refused", "length", "client" (the client process died).
    status: str
    error: str | None = None
    #: When it was due in an open loop, from which its latency counts; None in a closed one.
    scheduled_s: float | None = None
    start_s: float
    #: When its body had been handed to the operating system; None where that never happened.
    written_s: float | None = None
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


class SteadyWindow(Stored):
    """Figures of the part of a cell in which the load was full, over all its repeats.

    Closed loop: from the last slot's first request to the first end after the last request was
    sent. Open loop: from the first request's end to the last one's sending.
    """

    #: Length in seconds, summed over repeats.
    duration_s: float
    #: Successful requests whose first token came inside.
    n: int
    ttft_ms: Distribution
    tpot_ms: Distribution
    output_tok_per_s: float


class Goodput(Stored):
    """Requests that keep every limit of an objective by themselves; failed ones keep none."""

    slo: str
    #: Whether the cell's own statistics meet the objective; None where one is not known.
    met: bool | None
    n: int
    #: n / measured requests.
    share: float
    #: n / measured time; None where the cell has no throughput.
    req_per_s: float | None


class Repeat(Stored):
    """One repeat of a cell: the figures whose spread tells how far the cell's can be trusted."""

    n: int
    failed: int
    duration_s: float
    ttft_ms_p50: float | None
    tpot_ms_p50: float | None
    output_tok_per_s: float | None
    req_per_s: float | None


#: Ends of a 95 % interval, in the unit of its figure.
Ends = tuple[float, float]


class BenchCell(Stored):
    """One level of load: figures and the requests they were computed from.

    With several repeats, percentiles are over the requests of all of them and rates over the sum
    of their times.
    """

    #: Requests kept in flight; None in an open loop.
    concurrency: int | None
    #: Requests offered a second; None in a closed loop.
    request_rate: float | None = None
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
    #: Output tokens per second in the steady window.
    steady_tok_per_s: float | None
    #: None where the load was never full.
    steady: SteadyWindow | None = None
    goodput: Goodput | None = None
    repeats: tuple[Repeat, ...] = ()
    #: Student's 95 % intervals over the repeats; None with one repeat.
    ttft_ms_p50_interval: Ends | None = None
    tpot_ms_p50_interval: Ends | None = None
    output_tok_per_s_interval: Ends | None = None
    req_per_s_interval: Ends | None = None
    #: From when a request was due (open loop) or begun (closed) until its body had been handed
    #: to the operating system.
    dispatch_ms: Distribution | None = None
    #: Most requests under way at one moment.
    in_flight_max: int | None = None
    output_tokens_mean: float | None
    input_tokens_mean: float | None
    #: Prefix-cache hits (tokens) the server counted during the cell.
    prefix_hit_tokens: float | None
    preemptions: float | None
    #: What the server and its GPUs did meanwhile.
    server: ServerSide | None = None
    #: Largest delay of the client's own event loop, of the process that was worst.
    client_lag_ms_max: float
    client_lag_ms_p99: float
    client_lag_ms_p50: float | None = None
    client_cpu_share: float
    client_processes: int = 1
    marks: tuple[str, ...] = ()
    requests: tuple[RequestRecord, ...]

    @property
    def level(self) -> Level:
        """The load."""
        return Level(self.concurrency, self.request_rate)


class LoadSearch(Stored):
    """The search for the largest load that meets an objective."""

    slo: str
    over: Literal["concurrency", "request_rate"]
    outcome: Literal["found", "not met at the lowest", "met at the highest tried"]
    #: None unless it was found: bracketed by a load that meets the objective and one that does not.
    largest_load: float | None
    highest_met: float | None
    lowest_unmet: float | None
    tried: tuple[float, ...]


class BenchResult(Stored):
    """A sweep over levels of load."""

    endpoint: str
    #: The workload in one line.
    workload: str | None = None
    #: Whether the prefix cache was meant to answer for a part of the prompts.
    hits_expected: bool = False
    #: Of the workload `random`.
    input_tokens: int
    output_tokens: int
    ignore_eos: bool
    #: Sampling parameters as sent.
    sampling: dict[str, float]
    seed: int
    #: Of all prompts that the suite itself names: every level's first repeat.
    prompt_hash: str
    #: Gaps of the open loop's arrivals, "poisson" or "constant"; None for a closed loop.
    arrival: str | None = None
    cells: tuple[BenchCell, ...]
    search: LoadSearch | None = None
    #: False in what an interrupted sweep leaves: cells are missing.
    complete: bool = True
    duration_s: float
