"""The values a matrix consists of; their JSON is `matrix.json`.

A figure that is not known is None, never 0. Units are in the names; fractions are fractions
(0.70), points are percentage points, and `_percent` is percent of the baseline.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from qkit.evaluate.derived import Capacity, Price
from qkit.evaluate.drift import Drift
from qkit.evaluate.memory import MemoryAccount, WeightSource
from qkit.evaluate.statistics import Verdict
from qkit.levels import Level
from qkit.measurements import Ends, Hardware, LoadSearch, Stored
from qkit.suites import BENCH_SUITE

SCHEMA_VERSION = 1


class Flips(Stored):
    """Questions answered otherwise than by the baseline."""

    to_wrong: int
    to_right: int


class NoiseFloor(Stored):
    """The baseline's score measured twice: what differs without any quantization."""

    n: int
    #: None where answers are not right or wrong.
    flips: Flips | None
    #: Second minus first.
    delta_points: float
    #: How far the score moves by such flips alone, 95 % of the time; at least `delta_points`.
    spread_points: float


class AccuracyPart(Stored):
    """One task or group of a group, as in `Accuracy`; all values are shares."""

    task: str
    alias: str
    is_group: bool
    n: int
    value: float
    stderr: float | None
    interval: tuple[float, float] | None
    delta_points: float | None
    delta_interval: tuple[float, float] | None
    flips: Flips | None


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
    #: 95 % interval of `value`, in its unit.
    interval: tuple[float, float] | None = None
    #: Percentage points, variant minus baseline, over the same questions.
    delta_points: float | None
    #: 95 % interval of `delta_points`.
    delta_interval: tuple[float, float] | None
    #: How `delta_interval` was computed: "tango-score", "paired-t", "paired-stratified", or
    #: "unpaired-normal" where no samples are known.
    delta_method: str | None = None
    #: 100 * variant / baseline.
    recovery_percent: float | None
    #: 95 % interval of `recovery_percent`.
    recovery_interval: tuple[float, float] | None = None
    flips: Flips | None
    #: Exact, two-sided.
    mcnemar_p: float | None
    #: The same, adjusted over the table's variants by Holm's method.
    mcnemar_p_holm: float | None = None
    #: Against the matrix's margin, from `delta_interval` as it is: not adjusted.
    verdict: Verdict | None
    #: Questions that would settle an inconclusive verdict with 80 % power, if the difference stayed
    #: as it is; None where it is settled, or lies on the margin.
    questions_to_settle: int | None = None
    #: Whether the difference is within the noise floor; None where that was not measured.
    within_noise: bool | None = None
    #: Of perplexities: variant / baseline over the same documents; above 1 is worse.
    ratio: float | None = None
    #: 95 % interval of `ratio`, a bootstrap over documents.
    ratio_interval: tuple[float, float] | None = None
    #: Tasks and groups that a group consists of.
    parts: tuple[AccuracyPart, ...] = ()


class Average(Stored):
    """The mean of several suites' scores, each with the same weight, against the baseline's."""

    #: Suites averaged: all of the baseline whose score is a fraction.
    suites: tuple[str, ...]
    #: A fraction.
    value: float
    #: Percentage points, variant minus baseline, over the same questions.
    delta_points: float
    #: 95 % interval of `delta_points`; None for the baseline.
    delta_interval: tuple[float, float] | None
    #: 100 * variant / baseline, what model cards call the recovery.
    recovery_percent: float | None
    #: 95 % interval of `recovery_percent`.
    recovery_interval: tuple[float, float] | None
    #: Against the matrix's margin; None for the baseline.
    verdict: Verdict | None


class Ratio(Stored):
    """Variant over baseline at the same level; below 1 is faster for ttft and tpot."""

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
    """One level of load on one variant; definitions are those of `BenchCell`."""

    #: None in an open loop.
    concurrency: int | None
    #: None in a closed loop.
    request_rate: float | None = None
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
    #: 95 % interval over the cell's repeats; None with one repeat.
    output_tok_per_s_interval: Ends | None = None
    tpot_ms_p50_interval: Ends | None = None
    #: Requests a second that keep every limit of the objective; None without one.
    goodput_req_per_s: float | None = None
    #: Whether the level meets the objective.
    slo_met: bool | None = None
    input_tokens_mean: float | None
    output_tokens_mean: float | None
    prefix_hit_tokens: float | None
    preemptions: float | None
    #: `prefix_hit_tokens` / prompt tokens of all requests; None where a request failed.
    prefix_hit_share: float | None = None
    #: Tokens per second and median TPOT over those at concurrency 1 of the same variant.
    tok_per_s_scaling: float | None = None
    tpot_scaling: float | None = None
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

    @property
    def level(self) -> Level:
        """The load."""
        return Level(self.concurrency, self.request_rate)


class Estimate(Stored):
    """A figure and its 95 % bootstrap interval, None where documents are too few for one."""

    value: float
    low: float | None
    high: float | None


class Distance(Stored):
    """How far next-token distributions are from the baseline's, over the scored tokens.

    Divergences are KL(baseline || variant) in nats. All but the estimate are lower bounds: each
    side's most likely tokens and the text's own are told apart, the rest is one bucket.
    """

    #: Variant over baseline.
    perplexity_ratio: Estimate
    kl_mean: Estimate
    #: With the estimated divergence within the bucket.
    kl_mean_estimate: Estimate
    kl_median: Estimate
    kl_p99: Estimate
    #: A bootstrap says nothing about a maximum, so it has no interval.
    kl_max: float
    #: Baseline's mean probability of the bucket.
    unknown_probability: float
    #: Share of positions with the same most likely token.
    top1_agreement: Estimate
    #: Root mean square change of the probability of the text's own token; a fraction.
    rms_probability_change: Estimate


class Greedy(Stored):
    """Greedy generations compared with the baseline's, token by token."""

    prompts: int
    #: Most tokens of each.
    tokens: int
    #: Prompts whose generations are the same to the end.
    identical: int
    #: Median count of tokens before the first difference; None where half or more have none.
    first_difference_median: float | None


class Fidelity(Stored):
    """One variant on a fixed text, and its distance from the baseline."""

    text: str
    scored_tokens: int
    documents: int
    #: What is drawn for the intervals.
    unit: Literal["document", "window"]
    window_tokens: int
    top_logprobs: int
    perplexity: Estimate
    #: None for the baseline itself, and where it may not be compared.
    distance: Distance | None
    greedy: Greedy | None


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
    #: None below two suites, and where one of them is missing or not comparable.
    average: Average | None = None
    #: None where it was not measured.
    fidelity: Fidelity | None = None
    #: Levels of the headline benchmark.
    bench: tuple[BenchRow, ...]
    #: Levels of the other benchmarks, by name.
    further_benches: dict[str, tuple[BenchRow, ...]] = Field(default_factory=dict)
    #: Largest load that meets the objective, by benchmark; only where one was searched for.
    load_searches: dict[str, LoadSearch] = Field(default_factory=dict)
    marks: tuple[str, ...]

    def bench_of(self, name: str, headline: str) -> tuple[BenchRow, ...]:
        """Return the levels of a benchmark by its name; none where it was not measured."""
        return self.bench if name == headline else self.further_benches.get(name, ())


class Workload(Stored):
    """The benchmark's settings, as run on the first row that has one."""

    endpoint: str
    #: What is sent, in one line; None in older measurements.
    description: str | None = None
    #: Whether the prefix cache is meant to answer for a part of the prompts.
    hits_expected: bool = False
    input_tokens: int
    output_tokens: int
    ignore_eos: bool
    sampling: dict[str, float]
    seed: int
    prompt_hash: str
    #: Open loop: gaps between requests, "poisson" or "constant".
    arrival: str | None = None


class Reference(Stored):
    """A published score, and ours beside it."""

    name: str
    #: Row it is compared with; None where it is only shown.
    variant: str | None
    task: str
    metric: str
    #: As published: shares in percent.
    value: float
    n: int | None
    num_fewshot: int | None
    source: str
    #: In the same unit; None where it was not measured.
    ours: float | None
    #: `ours` - `value`; None where the two were not scored alike.
    difference: float | None
    #: What differs in how they were scored.
    differs: tuple[str, ...]
    #: Whether the two are further apart than two points and our own interval.
    off: bool


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
    #: The baseline's fidelity to itself, None where it was not measured twice.
    fidelity_noise: Fidelity | None = None
    #: Empty where the baseline was not measured twice.
    drift: tuple[Drift, ...]
    #: By task; empty where the baseline's accuracy was not measured twice.
    noise_floors: dict[str, NoiseFloor] = Field(default_factory=dict)
    #: Published scores attached to the recipe.
    references: tuple[Reference, ...] = ()
    #: What a reader of the whole table has to know.
    notes: tuple[str, ...]
    rows: tuple[Row, ...]

    @property
    def benches(self) -> dict[str, Workload]:
        """Settings of every benchmark that was measured, by name, the headline first."""
        first = {self.headline_bench: self.workload} if self.workload else {}
        return {**first, **self.further_workloads}
