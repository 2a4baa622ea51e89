"""A hand-written run for the matrix and its reports: five variants, one of which failed.

The figures are made up, of a size that a 7B model on an A800 could show. Parts can be replaced to
test one rule at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

from qkit.evaluate.matrix import VariantInput
from qkit.measurements import (
    AccuracyResult,
    BenchCell,
    BenchResult,
    Distribution,
    FailureRecord,
    GpuUse,
    Hardware,
    Measurement,
    RequestRecord,
    Sample,
    ServerRecord,
    ServerSide,
    TaskScore,
    VariantRecord,
)
from qkit.recipe import PublishedScore

GIB = 1024**3
QUESTIONS = 1140
RIGHT = 846
SUBJECTS = ("abstract_algebra", "anatomy", "astronomy", "business_ethics")
INPUT_TOKENS, OUTPUT_TOKENS = 512, 128
LEVELS = (1, 2, 4, 8, 16)

HARDWARE = Hardware(
    accelerator="cuda",
    name="NVIDIA A800-SXM4-80GB",
    memory_bytes=80 * GIB,
    cpu="AMD EPYC 7763 64-Core Processor",
    cpu_cores=64,
    compute_capability="8.0",
    driver="580.95.05",
)
SERVER = ServerRecord(
    version="0.33.0",
    flags=("--max-model-len", "4096", "--gpu-memory-utilization", "0.9"),
    environment={"VLLM_USE_V1": "1"},
    max_model_len=4096,
    kernels=(),
    weight_bytes=15_302_000_000,
    kv_cache_tokens=1_014_288,
    max_concurrency=247.6,
    startup_s=71.5,
)


def distribution(p50: float, n: int, spread: float = 0.04) -> Distribution:
    """Percentiles of a made-up spread around a median; p95 only from 20 values on."""
    return Distribution(
        n=n,
        mean=round(p50 * (1 + spread / 4), 3),
        p50=p50,
        p90=round(p50 * (1 + spread), 3),
        p95=round(p50 * (1 + 1.5 * spread), 3) if n >= 20 else None,
        p99=round(p50 * (1 + 2 * spread), 3) if n >= 100 else None,
        max=round(p50 * (1 + 2.5 * spread), 3),
    )


def bench_cell(
    concurrency: int,
    ttft_ms: float,
    tpot_ms: float,
    tok_per_s: float,
    n: int | None = None,
    marks: tuple[str, ...] = (),
    failed: int = 0,
    jitter: float = 0.02,
) -> BenchCell:
    """One concurrency level, with requests whose TPOT alternates by `jitter` around the median."""
    count = n or max(20, 4 * concurrency)
    requests = []
    for index in range(count):
        tpot_s = tpot_ms / 1000 * (1 + jitter * (-1) ** index)
        start = index // concurrency * (ttft_ms + OUTPUT_TOKENS * tpot_ms) / 1000
        first = start + ttft_ms / 1000
        last = first + (OUTPUT_TOKENS - 1) * tpot_s
        requests.append(
            RequestRecord(
                index=index,
                status="ok",
                start_s=start,
                first_token_s=first,
                last_token_s=last,
                end_s=last,
                prompt_tokens=INPUT_TOKENS,
                output_tokens=OUTPUT_TOKENS,
                finish_reason="length",
            )
        )
    return BenchCell(
        concurrency=concurrency,
        n=count,
        failed=failed,
        duration_s=round(count * OUTPUT_TOKENS / tok_per_s, 3),
        ttft_ms=distribution(ttft_ms, count, spread=0.2),
        tpot_ms=distribution(tpot_ms, count),
        itl_ms=distribution(tpot_ms, count * (OUTPUT_TOKENS - 1), spread=0.1),
        e2e_ms=distribution(round(ttft_ms + (OUTPUT_TOKENS - 1) * tpot_ms, 1), count),
        output_tok_per_s=tok_per_s,
        total_tok_per_s=tok_per_s * (INPUT_TOKENS + OUTPUT_TOKENS) / OUTPUT_TOKENS,
        req_per_s=round(tok_per_s / OUTPUT_TOKENS, 3),
        steady_tok_per_s=round(tok_per_s * 1.03, 1),
        output_tokens_mean=float(OUTPUT_TOKENS),
        input_tokens_mean=float(INPUT_TOKENS),
        prefix_hit_tokens=0.0,
        preemptions=0.0,
        client_lag_ms_max=1.4,
        client_lag_ms_p99=0.6,
        client_cpu_share=0.11,
        marks=marks,
        requests=tuple(requests),
    )


def bench(cells: Sequence[BenchCell], **changes: object) -> BenchResult:
    """A sweep of the given levels."""
    result = BenchResult(
        endpoint="completions",
        input_tokens=INPUT_TOKENS,
        output_tokens=OUTPUT_TOKENS,
        ignore_eos=True,
        sampling={"temperature": 0.0, "top_p": 1.0, "repetition_penalty": 1.0},
        seed=0,
        prompt_hash="7f3a" + "0" * 60,
        cells=tuple(cells),
        duration_s=212.0,
    )
    return result.model_copy(update=changes)


def sweep(figures: Sequence[tuple[float, float, float]], **changes: object) -> BenchResult:
    """A sweep from (TTFT ms, TPOT ms, tok/s) of every level."""
    cells = [bench_cell(level, *row) for level, row in zip(LEVELS, figures, strict=True)]
    return bench(cells, **changes)


def accuracy(
    to_wrong: int = 0, to_right: int = 0, questions: int = QUESTIONS, **changes: object
) -> AccuracyResult:
    """MMLU-like answers: the first ones right, with flips both ways where the two parts meet."""
    right = RIGHT * questions // QUESTIONS
    values = [
        float(index < right - to_wrong or right <= index < right + to_right)
        for index in range(questions)
    ]
    mean = sum(values) / questions
    result = AccuracyResult(
        suite="mmlu",
        harness="0.4.13",
        headline=TaskScore(
            task="mmlu",
            alias="mmlu",
            metric="acc,none",
            value=mean,
            stderr=round((mean * (1 - mean) / (questions - 1)) ** 0.5, 6),
            n=questions,
            is_group=True,
            version="2",
        ),
        scores=parts(values),
        samples=tuple(
            Sample(
                task=f"mmlu_{SUBJECTS[index % len(SUBJECTS)]}",
                doc_hash=f"{index:064x}",
                value=value,
            )
            for index, value in enumerate(values)
        ),
        num_fewshot=5,
        limit=20,
        chat_template=False,
        tokenizer_hash="c0ffee" + "0" * 58,
        duration_s=310.0,
        requests=questions,
        prompt_tokens=884_000,
        cached_tokens=612_000,
    )
    return result.model_copy(update=changes)


def parts(values: Sequence[float]) -> tuple[TaskScore, ...]:
    """The group's own score, those of two categories, and those of the subjects."""

    def score(task: str, alias: str, own: list[float], subtasks: Sequence[str]) -> TaskScore:
        mean = sum(own) / len(own)
        return TaskScore(
            task=task,
            alias=alias,
            metric="acc",
            value=mean,
            stderr=round((mean * (1 - mean) / (len(own) - 1)) ** 0.5, 6),
            n=len(own),
            is_group=bool(subtasks),
            subtasks=tuple(subtasks),
        )

    of_subject = {
        f"mmlu_{name}": list(values[index :: len(SUBJECTS)]) for index, name in enumerate(SUBJECTS)
    }
    names = list(of_subject)
    categories = {"stem": names[:1] + names[2:3], "other": names[1:2] + names[3:]}
    return (
        score("mmlu", "mmlu", list(values), [f"mmlu_{name}" for name in categories]),
        *(
            score(f"mmlu_{name}", name, [v for m in members for v in of_subject[m]], members)
            for name, members in categories.items()
        ),
        *(score(name, name.removeprefix("mmlu_"), own, ()) for name, own in of_subject.items()),
    )


def measurement(
    variant: str,
    suite: str,
    *,
    server: ServerRecord = SERVER,
    hardware: Hardware = HARDWARE,
    bench: BenchResult | None = None,
    accuracy: AccuracyResult | None = None,
    created: str = "2026-11-30T22:10:00Z",
    variant_hash: str | None = None,
) -> Measurement:
    """One measurement file."""
    return Measurement(
        key=f"{variant}-{suite}",
        suite=suite,
        variant=variant,
        variant_hash=variant_hash or f"hash-of-{variant}",
        created=created,
        hardware=hardware,
        server=server,
        versions={"qkit": "0.1.0", "lm_eval": "0.4.13", "torch": "2.14.0"},
        accuracy=accuracy,
        bench=bench,
    )


def both(
    variant: str,
    server: ServerRecord,
    figures: Sequence[tuple[float, float, float]],
    flips: tuple[int, int] = (0, 0),
) -> tuple[Measurement, ...]:
    """Both suites of one variant."""
    return (
        measurement(variant, "mmlu", server=server, accuracy=accuracy(*flips)),
        measurement(variant, "bench", server=server, bench=sweep(figures)),
    )


def record(method: str, scheme: str, quantized: int, unquantized: int) -> VariantRecord:
    """A variant's `qkit.json`."""
    return VariantRecord(
        key=f"key-of-{method}",
        content_hash=f"hash-of-{method}",
        source="Qwen/Qwen2.5-7B-Instruct",
        source_hash="hash-of-bf16",
        method=method,
        scheme=scheme,
        backend="llm-compressor",
        versions={"llmcompressor": "0.14.0.1", "torch": "2.14.0"},
        calibration=None,
        settings={},
        ignored_modules=("lm_head",),
        skipped_mappings=(),
        load_check="loads",
        mean_kl=0.02,
        top1_agreement=0.96,
        quantized_bytes=quantized,
        unquantized_bytes=unquantized,
        weight_bytes=quantized + unquantized,
        seed=0,
        duration_s=1210.0,
        peak_memory_bytes=31 * GIB,
        created="2026-11-30T20:00:00Z",
    )


def failure(variant: str, step: str, reason: str, detail: str = "") -> FailureRecord:
    """A step that failed."""
    return FailureRecord(
        variant=variant, step=step, reason=reason, detail=detail, created="2026-11-30T21:00:00Z"
    )


REFERENCES = (
    PublishedScore(
        name="Red Hat BF16",
        variant="bf16",
        task="mmlu",
        value=74.24,
        num_fewshot=5,
        source="model card RedHatAI/Qwen2.5-7B-Instruct-quantized.w8a8",
    ),
    PublishedScore(
        name="Red Hat W8A8",
        variant="smoothquant",
        task="mmlu",
        value=73.87,
        num_fewshot=5,
        source="model card RedHatAI/Qwen2.5-7B-Instruct-quantized.w8a8",
    ),
    PublishedScore(
        name="Red Hat W4A16",
        variant="gptq",
        task="mmlu",
        value=73.19,
        num_fewshot=5,
        source="model card RedHatAI/Qwen2.5-7B-Instruct-quantized.w4a16",
    ),
)

BF16_FIGURES = (
    (38.2, 12.41, 79.3),
    (41.0, 12.63, 155.6),
    (52.7, 13.02, 299.8),
    (81.4, 13.88, 554.1),
    (133.9, 15.6, 967.4),
)
AWQ_FIGURES = (
    (31.5, 6.52, 148.9),
    (35.2, 6.71, 287.0),
    (50.3, 7.18, 532.6),
    (88.6, 8.24, 902.8),
    (152.0, 10.91, 1331.0),
)
FP8_FIGURES = (
    (35.9, 7.74, 126.3),
    (39.4, 7.9, 246.1),
    (55.6, 8.36, 459.0),
    (90.1, 9.2, 811.5),
    (149.3, 11.36, 1289.2),
)
W8A8_FIGURES = (
    (27.3, 8.4, 117.2),
    (29.6, 8.55, 230.1),
    (36.1, 8.83, 440.7),
    (53.8, 9.41, 820.6),
    (88.7, 10.62, 1419.5),
)


def server_side() -> ServerSide:
    """What the server and its GPU did at one level."""
    gpu = GpuUse(
        count=1, utilisation_percent=97.1, power_w_mean=291.0, power_w_max=322.0,
        energy_j=1802.0, memory_bytes_max=77_300_000_000,
    )  # fmt: skip
    return ServerSide(
        duration_s=6.3, samples=12, scrape_ms=4.1, running_mean=15.2, running_max=16.0,
        waiting_mean=0.1, waiting_max=1.0, kv_cache_usage_max=0.0086, prompt_tokens=32_768.0,
        generation_tokens=8192.0, prefix_query_tokens=32_768.0, prefix_hit_tokens=0.0,
        preemptions=0.0, draft_tokens=None, accepted_tokens=None, gpu=gpu,
    )  # fmt: skip


def scored_twice() -> Measurement:
    """The baseline's second score: three answers flipped."""
    return measurement(
        "bf16", "mmlu-again", accuracy=accuracy(2, 1), created="2026-12-01T01:30:00Z"
    )


def baseline(*, scored_again: bool = False) -> VariantInput:
    """The BF16 row, benchmarked first and again last, and scored twice where asked for."""
    again = sweep([(ttft, tpot * 1.004, rate / 1.004) for ttft, tpot, rate in BF16_FIGURES])
    return VariantInput(
        name="bf16",
        method="bf16",
        scheme="BF16",
        measurements=(
            *both("bf16", SERVER, BF16_FIGURES),
            measurement("bf16", "bench-again", bench=again, created="2026-12-01T01:40:00Z"),
            *((scored_twice(),) if scored_again else ()),
        ),
        weight_bytes=15_231_233_024,
        quantized_bytes=0,
        unquantized_bytes=15_231_233_024,
        predicted_bytes=15_231_233_024,
        read_bytes=14_141_237_248,
        kv_bytes_per_token=57_344,
    )


def quantized() -> tuple[VariantInput, ...]:
    """The quantized rows; GPTQ failed."""
    awq = SERVER.model_copy(
        update={
            "kernels": ("MarlinLinearKernel",),
            "kernel_asked": "marlin",
            "kv_cache_bytes": 68_000_000_000,
            "graph_memory_bytes": 560_000_000,
            "weight_bytes": 5_580_000_000,
            "kv_cache_tokens": 1_188_512,
            "max_concurrency": 290.2,
        }
    )
    fp8 = SERVER.model_copy(
        update={
            "kernels": ("MarlinFP8ScaledMMLinearKernel",),
            "weight_bytes": 8_720_000_000,
            "kv_cache_tokens": 1_132_096,
            "max_concurrency": 276.4,
            "marks": ("FP8 weight-only: compute capability 8.0 has no FP8 arithmetic",),
        }
    )
    w8a8 = SERVER.model_copy(
        update={
            "kernels": ("CutlassInt8ScaledMMLinearKernel",),
            "weight_bytes": 8_710_000_000,
            "kv_cache_tokens": 1_132_304,
            "max_concurrency": 276.4,
            "kernel_asked": "marlin",
            "marks": ("KERNEL: asked for marlin, ran CutlassInt8ScaledMMLinearKernel",),
        }
    )
    marked = list(both("awq", awq, AWQ_FIGURES, (31, 22)))
    cells = [bench_cell(level, *row) for level, row in zip(LEVELS, AWQ_FIGURES, strict=True)]
    cells[4] = bench_cell(16, *AWQ_FIGURES[4], marks=("client was busy 93 % of the time",))
    cells[4] = cells[4].model_copy(update={"server": server_side()})
    marked[1] = measurement("awq", "bench", server=awq, bench=bench(cells))
    return (
        VariantInput(
            name="awq",
            method="awq",
            scheme="W4A16_ASYM g128",
            record=record("awq", "W4A16_ASYM g128", 3_398_000_000, 2_180_000_000),
            predicted_bytes=5_577_900_000,
            read_bytes=4_488_000_000,
            kv_bytes_per_token=57_344,
            measurements=tuple(marked),
        ),
        VariantInput(
            name="gptq",
            method="gptq",
            scheme="W4A16 g128",
            failures=(
                failure(
                    "gptq",
                    "quantize",
                    "the Hessian of model.layers.27.mlp.down_proj is not positive definite",
                    "dampening_frac 0.01, 0.02 and 0.04 were tried",
                ),
            ),
        ),
        VariantInput(
            name="fp8",
            method="fp8",
            scheme="FP8_DYNAMIC",
            record=record("fp8", "FP8_DYNAMIC", 6_526_000_000, 2_180_000_000),
            measurements=both("fp8", fp8, FP8_FIGURES, (4, 3)),
        ),
        VariantInput(
            name="smoothquant",
            method="smoothquant",
            scheme="W8A8_INT8",
            record=record("smoothquant", "W8A8_INT8", 6_528_000_000, 2_180_000_000),
            measurements=both("smoothquant", w8a8, W8A8_FIGURES, (61, 24)),
        ),
    )
