"""The values a matrix consists of; their JSON is `matrix.json`.

A figure that is not known is None, never 0. Units are in the names; fractions are fractions
(0.70), points are percentage points, and `_percent` is percent of the baseline.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from qkit.evaluate.derived import Capacity, Ends, Price
from qkit.evaluate.drift import Drift
from qkit.evaluate.memory import MemoryAccount, WeightSource
from qkit.evaluate.statistics import Verdict
from qkit.measurements import Hardware, Stored
from qkit.suites import BENCH_SUITE

SCHEMA_VERSION = 1


class Flips(Stored):
    """Questions answered otherwise than by the baseline."""

    to_wrong: int
    to_right: int


class Accuracy(Stored):
    """One task's score and its paired difference from the baseline.

    The baseline's own difference is 0 points by definition, and has no interval or verdict.
    """

    metric: str
    #: Whether `value` is a fraction of 1; only then is there a difference in points.
    fraction: bool
    value: float
    #: As lm-eval computes it, in the unit of `value`.
    stderr: float | None
    n: int
    num_fewshot: int | None
    limit: int | None
    chat_template: bool
    #: Percentage points, variant minus baseline, over the same questions.
    delta_points: float | None
    #: 95 % interval of `delta_points`.
    delta_interval: tuple[float, float] | None
    #: 100 * variant / baseline.
    recovery_percent: float | None
    flips: Flips | None
    #: Exact, two-sided.
    mcnemar_p: float | None
    #: Against the matrix's margin.
    verdict: Verdict | None


class Ratio(Stored):
    """Variant over baseline at the same concurrency; below 1 is faster for ttft and tpot."""

    #: Of the medians.
    ttft: float | None
    #: Of the medians.
    tpot: float | None
    output_tok_per_s: float | None
    #: 95 % intervals: over requests for the medians, over repeats for throughput. They leave out
    #: that the machine may have changed in between.
    ttft_interval: Ends | None = None
    tpot_interval: Ends | None = None
    output_tok_per_s_interval: Ends | None = None


class ServerFigures(Stored):
    """What the server and its GPUs did during a level; None where they do not say."""

    running_mean: float | None
    running_max: float | None
    waiting_mean: float | None
    waiting_max: float | None
    #: Fractions.
    kv_cache_usage_max: float | None
    prefix_hit_rate: float | None
    #: Of speculative decoding.
    acceptance_rate: float | None
    prompt_tokens: float | None
    generation_tokens: float | None
    gpu_utilisation_percent: float | None
    #: Watts and joules of all GPUs together.
    gpu_power_w_mean: float | None
    gpu_energy_j_per_output_token: float | None


class BenchRow(Stored):
    """One concurrency level of one variant; definitions are those of `BenchCell`."""

    concurrency: int
    n: int
    failed: int
    duration_s: float
    ttft_ms_p50: float | None
    ttft_ms_p95: float | None
    ttft_ms_max: float | None
    tpot_ms_p50: float | None
    tpot_ms_p95: float | None
    tpot_ms_max: float | None
    itl_ms_p50: float | None
    itl_ms_p95: float | None
    e2e_ms_p50: float | None
    e2e_ms_p95: float | None
    output_tok_per_s: float | None
    total_tok_per_s: float | None
    steady_tok_per_s: float | None
    req_per_s: float | None
    input_tokens_mean: float | None
    output_tokens_mean: float | None
    prefix_hit_tokens: float | None
    preemptions: float | None
    ratio: Ratio
    server: ServerFigures | None = None
    #: Least time per output token that the card's memory bandwidth allows; None for a CPU and for
    #: cards qkit does not know.
    tpot_floor_ms: float | None = None
    #: `tpot_floor_ms` / median TPOT.
    roofline_share: float | None = None
    #: What the throughput serves in a day, and with a price what that costs.
    capacity: Capacity | None = None
    marks: tuple[str, ...]


class FailedStep(Stored):
    """A step of a variant that failed."""

    #: "quantize", "serve", or a suite's name.
    step: str
    reason: str
    detail: str


class Row(Stored):
    """One variant."""

    variant: str
    method: str
    scheme: str
    #: Quantization backend; None for the baseline and where quantization failed.
    backend: str | None
    #: "failed" when any step failed; what was measured all the same is kept.
    status: Literal["ok", "failed"]
    reason: str | None
    failures: tuple[FailedStep, ...]
    variant_hash: str | None
    #: Linear kernels the server's log named, joined by " + "; None where it named none.
    kernel: str | None
    #: Kernel family asked for, or "auto".
    kernel_asked: str | None = None
    #: Whether what was asked for ran; None where nothing was, or the log names no kernel.
    kernel_as_asked: bool | None = None
    weight_bytes: int | None
    weight_source: WeightSource
    quantized_bytes: int | None
    unquantized_bytes: int | None
    #: Variant over baseline.
    weight_ratio: float | None
    memory: MemoryAccount | None = None
    kv_cache_tokens: int | None
    #: Requests of the served length that fit in the KV cache, by vLLM's own reckoning.
    max_concurrency: float | None
    max_model_len: int | None
    server_flags: tuple[str, ...] | None
    server_environment: dict[str, str] | None
    accuracy: dict[str, Accuracy]
    #: Levels of the headline benchmark.
    bench: tuple[BenchRow, ...]
    #: Levels of the other benchmarks, by name.
    further_benches: dict[str, tuple[BenchRow, ...]] = Field(default_factory=dict)
    marks: tuple[str, ...]

    def bench_of(self, name: str, headline: str) -> tuple[BenchRow, ...]:
        """Return the levels of a benchmark by its name; none where it was not measured."""
        return self.bench if name == headline else self.further_benches.get(name, ())


class Workload(Stored):
    """The benchmark's settings, as run on the first row that has one."""

    endpoint: str
    input_tokens: int
    output_tokens: int
    ignore_eos: bool
    sampling: dict[str, float]
    seed: int
    prompt_hash: str


class Matrix(Stored):
    """The whole comparison: `matrix.json`."""

    schema_version: int = SCHEMA_VERSION
    run: str
    #: ISO 8601.
    created: str
    #: Machine of the first row that was measured.
    hardware: Hardware | None
    #: Package to version, over all measurements; several versions are joined by ", ".
    versions: dict[str, str]
    baseline: str
    #: Where `weight_bytes` of all rows come from.
    weight_source: WeightSource
    #: Loss that the verdicts allow.
    margin_points: float
    #: What the costs in `capacity` are computed from.
    price: Price | None = None
    #: Name of the benchmark that `bench` of a row is.
    headline_bench: str = BENCH_SUITE
    workload: Workload | None
    #: Settings of the other benchmarks, by name.
    further_workloads: dict[str, Workload] = Field(default_factory=dict)
    #: Empty where the baseline was not measured twice.
    drift: tuple[Drift, ...]
    #: What a reader of the whole table has to know.
    notes: tuple[str, ...]
    rows: tuple[Row, ...]

    @property
    def benches(self) -> dict[str, Workload]:
        """Settings of every benchmark that was measured, by name, the headline first."""
        first = {self.headline_bench: self.workload} if self.workload else {}
        return {**first, **self.further_workloads}
