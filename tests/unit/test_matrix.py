"""The matrix's rules: order, failures, ratios, accuracy differences, weight memory, marks."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from golden import matrix_input as given

from qkit.evaluate.derived import Price
from qkit.evaluate.matrix import Matrix, Row, VariantInput, build_matrix
from qkit.evaluate.report import csv_file
from qkit.evaluate.report.sheets import sheets
from qkit.measurements import CalibrationRecord, Measurement, MemoryUse, Sample


def build(*variants: VariantInput, **options: Any) -> Matrix:
    return build_matrix(
        run="a-run", created="2026-12-01T02:00:00Z", baseline="bf16", variants=variants, **options
    )


def row_of(matrix: Matrix, name: str) -> Row:
    return next(row for row in matrix.rows if row.variant == name)


def variant(name: str = "awq", *measurements: Measurement, **changes: Any) -> VariantInput:
    """A quantized variant with both suites, unless others are given."""
    chosen = measurements or given.both(name, given.SERVER, given.AWQ_FIGURES, (31, 22))
    fields: dict[str, Any] = {
        "record": given.record(name, "W4A16", 3_000, 2_000),
        "measurements": chosen,
    }
    return VariantInput(name=name, method=name, scheme="W4A16", **(fields | changes))


def changed(measurements: tuple[Measurement, ...], **server: Any) -> tuple[Measurement, ...]:
    """The same measurements from a server with other fields."""
    return tuple(
        m.model_copy(update={"server": m.server.model_copy(update=server)}) for m in measurements
    )


# ----------------------------------------------------------------------------- order and failures


def test_the_baseline_comes_first_and_the_others_keep_their_order() -> None:
    matrix = build(variant("fp8"), variant("awq"), given.baseline(), variant("gptq"))
    assert [row.variant for row in matrix.rows] == ["bf16", "fp8", "awq", "gptq"]


def test_a_failed_variant_is_a_row_with_its_reason_and_the_others_go_on() -> None:
    failed = variant(
        "gptq",
        measurements=(),
        record=None,
        failures=(given.failure("gptq", "quantize", "no\nmemory"),),
    )
    matrix = build(given.baseline(), failed, variant("awq"))
    row = row_of(matrix, "gptq")
    assert (row.status, row.reason) == ("failed", "quantize: no memory")
    assert (row.weight_bytes, row.kernel, row.kv_cache_tokens) == (None, None, None)
    assert (row.bench, row.accuracy) == ((), {})
    assert row_of(matrix, "awq").bench[0].ratio.tpot is not None


def test_a_failed_suite_fails_the_row_but_keeps_what_was_measured() -> None:
    bench = given.both("awq", given.SERVER, given.AWQ_FIGURES)[1]
    failed = variant("awq", bench, failures=(given.failure("awq", "mmlu", "the server died"),))
    row = row_of(build(given.baseline(), failed), "awq")
    assert (row.status, row.reason) == ("failed", "mmlu: the server died")
    assert row.bench[4].ratio.output_tok_per_s == pytest.approx(1331.0 / 967.4, rel=1e-5)
    assert row.marks == ()


def test_a_variant_without_anything_is_not_passed_off_as_measured() -> None:
    row = row_of(build(given.baseline(), variant("awq", measurements=())), "awq")
    assert (row.status, row.reason) == ("failed", "run: not measured yet")


def test_a_suite_that_only_the_baseline_has_is_named() -> None:
    bench = given.both("awq", given.SERVER, given.AWQ_FIGURES)[1]
    row = row_of(build(given.baseline(), variant("awq", bench)), "awq")
    assert (row.status, row.marks) == ("ok", ("not measured: mmlu",))


def test_without_a_baseline_nothing_is_compared_and_the_table_says_so() -> None:
    matrix = build(variant("awq"))
    row = matrix.rows[0]
    assert row.bench[0].output_tok_per_s == 148.9
    assert row.bench[0].ratio.output_tok_per_s is None
    assert (row.weight_ratio, row.accuracy["mmlu"].delta_points) == (None, None)
    assert matrix.notes == ("There is no bf16 row, so nothing is compared.",)


def test_a_suite_that_the_baseline_lacks_is_not_compared() -> None:
    mmlu = given.both("bf16", given.SERVER, given.BF16_FIGURES)[0]
    base = replace(given.baseline(), measurements=(mmlu,))
    row = row_of(build(base, variant("awq")), "awq")
    assert row.bench[0].ratio.tpot is None
    assert row.accuracy["mmlu"].delta_points is not None
    assert row.marks == ("not compared (bench): there is no bench measurement of bf16",)


def test_the_latest_measurement_of_a_suite_counts() -> None:
    old = given.measurement(
        "awq", "bench", bench=given.sweep(given.FP8_FIGURES), created="2026-11-01"
    )
    row = row_of(build(given.baseline(), variant("awq", *variant().measurements, old)), "awq")
    assert row.bench[0].output_tok_per_s == given.AWQ_FIGURES[0][2]


def test_suites_of_different_builds_of_a_variant_are_marked() -> None:
    mmlu, bench = given.both("awq", given.SERVER, given.AWQ_FIGURES)
    other = bench.model_copy(update={"variant_hash": "another-build"})
    row = row_of(build(given.baseline(), variant("awq", mmlu, other)), "awq")
    assert row.marks == (
        "suites were measured on different checkpoints: mmlu on hash-of-awq; bench on another-buil",
    )


# ----------------------------------------------------------------------------------------- ratios


def test_ratios_are_variant_over_baseline_at_the_same_concurrency() -> None:
    matrix = build(given.baseline(), variant("awq"))
    for cell, mine, base in zip(
        row_of(matrix, "awq").bench, given.AWQ_FIGURES, given.BF16_FIGURES, strict=True
    ):
        assert cell.ratio.ttft == pytest.approx(mine[0] / base[0], rel=1e-5)
        assert cell.ratio.tpot == pytest.approx(mine[1] / base[1], rel=1e-5)
        assert cell.ratio.output_tok_per_s == pytest.approx(mine[2] / base[2], rel=1e-5)
    assert {cell.ratio.tpot for cell in row_of(matrix, "bf16").bench} == {1.0}


def test_a_level_or_figure_that_either_side_lacks_has_no_ratio() -> None:
    fast, silent = given.bench_cell(32, 90.0, 9.0, 2000.0), given.bench_cell(1, 30.0, 6.0, 150.0)
    silent = silent.model_copy(
        update={
            "output_tok_per_s": None,
            "tpot_ms": given.distribution(6.0, 20).model_copy(update={"p50": None}),
        }
    )
    cells = given.bench([silent, fast])
    row = row_of(
        build(given.baseline(), variant("awq", given.measurement("awq", "bench", bench=cells))),
        "awq",
    )
    first, second = row.bench
    assert (first.ratio.tpot, first.ratio.output_tok_per_s) == (None, None)
    assert first.ratio.ttft == pytest.approx(30.0 / 38.2, rel=1e-5)
    assert first.ratio.tpot_interval is None
    assert set(second.ratio.model_dump().values()) == {None}


OTHER_HARDWARE = given.HARDWARE.model_copy(update={"name": "NVIDIA A800-SXM4-40GB"})


@pytest.mark.parametrize(
    ("server", "bench", "hardware", "field"),
    [
        ({"version": "0.32.0"}, {}, None, "server version 0.32.0 vs 0.33.0 (baseline)"),
        (
            {"flags": ("--max-model-len", "2048", "--gpu-memory-utilization", "0.9")},
            {},
            None,
            "server flags --max-model-len 2048 vs --max-model-len 4096 (baseline)",
        ),
        ({"environment": {}}, {}, None, "environment VLLM_USE_V1 none vs 1 (baseline)"),
        ({"max_model_len": 2048}, {}, None, "max_model_len 2048 vs 4096 (baseline)"),
        (
            {},
            {"prompt_hash": "ab" * 32},
            None,
            "prompt set abababababab vs 7f3a00000000 (baseline)",
        ),
        ({}, {"output_tokens": 64}, None, "output tokens 64 vs 128 (baseline)"),
        ({}, {"ignore_eos": False}, None, "ignore_eos off vs on (baseline)"),
        (
            {},
            {"sampling": {"temperature": 0.3}},
            None,
            "sampling repetition_penalty none vs 1.0 (baseline); sampling temperature 0.3 vs 0.0 "
            "(baseline); sampling top_p none vs 1.0 (baseline)",
        ),
        (
            {},
            {},
            OTHER_HARDWARE,
            "hardware name NVIDIA A800-SXM4-40GB vs NVIDIA A800-SXM4-80GB (baseline)",
        ),
    ],
)
def test_benchmarks_that_differ_are_not_compared_unless_allowed(
    server: dict[str, Any], bench: dict[str, Any], hardware: Any, field: str
) -> None:
    mine = given.measurement(
        "awq",
        "bench",
        server=given.SERVER.model_copy(update=server),
        hardware=hardware or given.HARDWARE,
        bench=given.sweep(given.AWQ_FIGURES, **bench),
    )
    base = replace(given.baseline(), measurements=given.baseline().measurements[1:])
    row = row_of(build(base, variant("awq", mine)), "awq")
    assert row.marks == (f"not compared: {field}",)
    assert all(set(cell.ratio.model_dump().values()) == {None} for cell in row.bench)
    assert row.bench[0].output_tok_per_s == given.AWQ_FIGURES[0][2]

    allowed = row_of(build(base, variant("awq", mine), allow_incomparable=True), "awq")
    assert allowed.marks == (f"compared although not comparable: {field}",)
    assert allowed.bench[0].ratio.tpot == pytest.approx(6.52 / 12.41, rel=1e-5)


def test_one_mark_names_a_field_that_all_suites_differ_in() -> None:
    older = changed(variant().measurements, version="0.32.0")
    row = row_of(build(given.baseline(), variant("awq", *older)), "awq")
    assert row.marks == ("not compared: server version 0.32.0 vs 0.33.0 (baseline)",)
    assert row.accuracy["mmlu"].delta_points is None
    assert row.weight_ratio is None, "what another server version logs is not comparable either"


# --------------------------------------------------------------------------------------- accuracy


def test_the_difference_is_paired_in_points_with_interval_flips_and_verdict() -> None:
    accuracy = row_of(build(given.baseline(), variant("awq")), "awq").accuracy["mmlu"]
    assert accuracy.delta_points == pytest.approx(100 * (22 - 31) / 1140, rel=1e-5)
    assert accuracy.recovery_percent == pytest.approx(100 * (846 - 9) / 846, rel=1e-5)
    assert accuracy.flips is not None
    assert (accuracy.flips.to_wrong, accuracy.flips.to_right) == (31, 22)
    assert accuracy.delta_interval is not None
    low, high = accuracy.delta_interval
    assert low < -1 < accuracy.delta_points < high
    assert accuracy.verdict == "inconclusive"


@pytest.mark.parametrize(
    ("margin", "verdict"), [(1, "inferior"), (3, "inconclusive"), (6, "non-inferior")]
)
def test_the_verdict_is_against_the_margin(margin: float, verdict: str) -> None:
    worse = variant("w8a8", *given.both("w8a8", given.SERVER, given.W8A8_FIGURES, (61, 24)))
    matrix = build(given.baseline(), worse, margin_points=margin)
    assert (matrix.margin_points, row_of(matrix, "w8a8").accuracy["mmlu"].verdict) == (
        margin,
        verdict,
    )


def test_the_baselines_own_difference_is_zero_by_definition_without_a_verdict() -> None:
    accuracy = build(given.baseline()).rows[0].accuracy["mmlu"]
    assert (accuracy.delta_points, accuracy.recovery_percent) == (0.0, 100.0)
    assert (accuracy.delta_interval, accuracy.verdict, accuracy.mcnemar_p) == (None, None, None)


HEADLINE = given.accuracy().headline


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"harness": "0.4.12"}, "harness version 0.4.12 vs 0.4.13 (baseline)"),
        ({"num_fewshot": 0}, "few-shot 0 vs 5 (baseline)"),
        ({"limit": None}, "limit none vs 20 (baseline)"),
        ({"chat_template": True}, "chat template on vs off (baseline)"),
        ({"tokenizer_hash": "dd" * 32}, "tokenizer hash dddddddddddd vs c0ffee000000 (baseline)"),
        (
            {"headline": HEADLINE.model_copy(update={"version": "1"})},
            "task version 1 vs 2 (baseline)",
        ),
        (
            {"headline": HEADLINE.model_copy(update={"metric": "acc_norm,none"})},
            "metric acc_norm,none vs acc,none (baseline)",
        ),
    ],
)
def test_scores_made_otherwise_are_not_subtracted_unless_allowed(
    change: dict[str, Any], field: str
) -> None:
    bench = given.both("awq", given.SERVER, given.AWQ_FIGURES)[1]
    mmlu = given.measurement("awq", "mmlu", accuracy=given.accuracy(**change))
    row = row_of(build(given.baseline(), variant("awq", mmlu, bench)), "awq")
    accuracy = row.accuracy["mmlu"]
    assert row.marks == (f"not compared (mmlu): {field}",)
    assert (accuracy.delta_points, accuracy.delta_interval, accuracy.verdict) == (None, None, None)
    assert row.bench[0].ratio.tpot is not None, "the benchmark is comparable all the same"

    allowed = row_of(
        build(given.baseline(), variant("awq", mmlu, bench), allow_incomparable=True), "awq"
    )
    assert allowed.marks == (f"compared although not comparable (mmlu): {field}",)
    assert allowed.accuracy["mmlu"].delta_points == 0.0


def test_other_questions_cannot_be_paired_even_when_allowed() -> None:
    mmlu = given.measurement("awq", "mmlu", accuracy=given.accuracy(questions=1000))
    row = row_of(build(given.baseline(), variant("awq", mmlu), allow_incomparable=True), "awq")
    assert row.accuracy["mmlu"].delta_points is None
    assert row.marks[0].startswith("not compared: the results were scored on different questions")


def perplexities(name: str, metric: str, values: tuple[float, ...], weight: float) -> Measurement:
    samples = tuple(
        Sample(task="wikitext", doc_hash=str(i), value=value, weight=weight if i == 0 else 1.0)
        for i, value in enumerate(values)
    )
    headline = HEADLINE.model_copy(update={"metric": metric, "value": 11.2, "is_group": False})
    result = given.accuracy(suite="wikitext", headline=headline, samples=samples)
    return given.measurement(name, "wikitext", accuracy=result)


def test_perplexities_have_a_ratio_over_the_same_documents_and_no_points() -> None:
    results = [
        perplexities("bf16", "word_perplexity,none", (10.0, 12.0, 8.0), 2.0),
        perplexities("awq", "word_perplexity,none", (11.0, 12.0, 8.0), 2.0),
    ]
    base = replace(given.baseline(), measurements=(results[0],))
    row = row_of(build(base, variant("awq", results[1])), "awq")
    accuracy = row.accuracy["wikitext"]
    assert (accuracy.fraction, accuracy.value, accuracy.delta_points) == (False, 11.2, None)
    assert accuracy.ratio == pytest.approx(1.1 ** (2 / 4), rel=1e-5)  # two of four words
    assert accuracy.ratio_interval == (1.0, 1.1)
    assert (accuracy.verdict, row.marks) == (None, ())


def test_a_metric_that_is_no_fraction_has_no_points() -> None:
    results = [perplexities(name, "chrf,none", (31.0, 12.0), 1.0) for name in ("bf16", "awq")]
    base = replace(given.baseline(), measurements=(results[0],))
    row = row_of(build(base, variant("awq", results[1])), "awq")
    assert row.accuracy["wikitext"].delta_points is None
    assert row.marks == ("wikitext: no difference in points, chrf,none is not a fraction",)


def test_a_score_that_weighs_questions_unevenly_is_marked() -> None:
    headline = HEADLINE.model_copy(update={"value": 0.75})
    mmlu = given.measurement("awq", "mmlu", accuracy=given.accuracy(headline=headline))
    row = row_of(build(given.baseline(), variant("awq", mmlu)), "awq")
    assert "mmlu: the difference weighs questions alike, the score does not" in row.marks


# ----------------------------------------------------------------------- memory, kernels and marks


def test_weights_are_the_servers_own_figure_when_every_row_has_it() -> None:
    mine = changed(variant().measurements, weight_bytes=5_000_000_000)
    failed = variant("gptq", measurements=(), failures=(given.failure("gptq", "serve", "no port"),))
    matrix = build(given.baseline(), variant("awq", *mine), failed)
    assert matrix.weight_source == "vllm-log"
    assert row_of(matrix, "awq").weight_bytes == 5_000_000_000
    assert row_of(matrix, "awq").weight_ratio == pytest.approx(5 / 15.302, rel=1e-5)
    assert row_of(matrix, "gptq").weight_bytes is None, "bytes on disk are another figure"


def test_one_row_without_the_servers_figure_turns_all_to_checkpoint_bytes() -> None:
    mine = changed(variant().measurements, weight_bytes=None)
    matrix = build(given.baseline(), variant("awq", *mine))
    assert {row.weight_source for row in matrix.rows} == {"checkpoint"}
    assert [row.weight_bytes for row in matrix.rows] == [15_231_233_024, 5_000]
    assert row_of(matrix, "awq").weight_ratio == pytest.approx(5_000 / 15_231_233_024, rel=1e-5)


def test_kernels_are_joined_and_none_is_null() -> None:
    mmlu, bench = changed(variant().measurements, kernels=("MarlinLinearKernel",))
    other = changed((bench,), kernels=("MarlinLinearKernel", "ExllamaLinearKernel"))[0]
    matrix = build(given.baseline(), variant("awq", mmlu, other))
    assert matrix.rows[0].kernel is None
    assert row_of(matrix, "awq").kernel == "MarlinLinearKernel + ExllamaLinearKernel"


def test_marks_come_from_server_accuracy_and_bench_cells() -> None:
    cells = [
        given.bench_cell(level, *row, marks=("few hits",) if level > 4 else ())
        for level, row in zip(given.LEVELS, given.AWQ_FIGURES, strict=True)
    ]
    server = given.SERVER.model_copy(update={"marks": ("another kernel ran",)})
    mine = (
        given.measurement(
            "awq", "mmlu", server=server, accuracy=given.accuracy(marks=("2 prompts cut",))
        ),
        given.measurement("awq", "bench", server=server, bench=given.bench(cells)),
    )
    row = row_of(build(given.baseline(), variant("awq", *mine)), "awq")
    assert row.marks == (
        "another kernel ran",
        "mmlu: 2 prompts cut",
        "concurrency 8, 16: few hits",
    )
    assert [cell.marks for cell in row.bench] == [(), (), (), ("few hits",), ("few hits",)]


def test_versions_name_every_version_that_was_used() -> None:
    older = changed(variant().measurements, version="0.32.0")
    matrix = build(given.baseline(), variant("awq", *older))
    assert matrix.versions["vllm"] == "0.33.0, 0.32.0"
    assert matrix.versions["lm_eval"] == "0.4.13"


# ------------------------------------------------------------------------------------------- JSON

LEAST_KEYS = {
    "": "schema_version run created hardware versions baseline rows",
    "row": "variant method scheme backend status reason kernel weight_bytes quantized_bytes "
    "unquantized_bytes weight_ratio kv_cache_tokens accuracy bench marks",
    "accuracy": "value stderr n delta_points",
    "bench": "concurrency n failed ttft_ms_p50 ttft_ms_p95 tpot_ms_p50 tpot_ms_p95 "
    "output_tok_per_s req_per_s ratio",
    "ratio": "ttft tpot output_tok_per_s",
}


def test_the_json_has_every_key_of_its_least_form_and_reads_back() -> None:
    matrix = build(given.baseline(), *given.quantized())
    text = matrix.model_dump_json()
    data = json.loads(text)
    rows = data["rows"]
    parts = {
        "": [data],
        "row": rows,
        "accuracy": [a for row in rows for a in row["accuracy"].values()],
        "bench": [b for row in rows for b in row["bench"]],
        "ratio": [b["ratio"] for row in rows for b in row["bench"]],
    }
    for part, keys in LEAST_KEYS.items():
        assert parts[part]
        assert all(set(keys.split()) <= value.keys() for value in parts[part])
    assert Matrix.model_validate_json(text) == matrix


def test_what_is_not_known_is_null_and_never_zero() -> None:
    failed = json.loads(build(given.baseline(), *given.quantized()).model_dump_json())["rows"][2]
    assert failed["variant"] == "gptq"
    figures = [
        "weight_bytes",
        "quantized_bytes",
        "unquantized_bytes",
        "weight_ratio",
        "kv_cache_tokens",
    ]
    assert [failed[name] for name in figures] == [None] * len(figures)


def test_a_second_benchmark_has_its_own_levels_ratios_and_settings():
    slow, fast = given.bench_cell(4, 80.0, 20.0, 100.0), given.bench_cell(4, 60.0, 10.0, 150.0)
    variants = [
        VariantInput(
            name=name,
            method=name,
            scheme="",
            measurements=[
                given.measurement(name, "bench", bench=given.bench([slow])),
                given.measurement(name, "rag", bench=given.bench([cell])),
            ],
        )
        for name, cell in (("bf16", slow), ("awq", fast))
    ]
    matrix = build_matrix(run="r", created="now", baseline="bf16", variants=variants)
    row = row_of(matrix, "awq")
    assert list(matrix.benches) == ["bench", "rag"]
    assert row.bench[0].ratio.output_tok_per_s == 1.0
    assert row.further_benches["rag"][0].ratio.output_tok_per_s == 1.5
    assert [sheet.title for sheet in sheets(matrix)][1:] == [
        "Latency and throughput",
        "Latency and throughput: rag",
        "Memory",
    ]
    lines = csv_file.render(matrix).splitlines()
    assert len(lines) == 1 + 2 * 2
    by_name = build_matrix(
        run="r", created="now", baseline="bf16", variants=variants, headline_bench="rag"
    )
    assert row_of(by_name, "awq").bench[0].ratio.output_tok_per_s == 1.5


def test_a_warning_of_calibration_data_is_told_once_for_all_it_concerns() -> None:
    calibration = CalibrationRecord(
        source="chats",
        tokens_hash="0",
        requested_samples=1,
        used_samples=1,
        seq_len=8,
        total_tokens=8,
        rows_read=1,
        rows_skipped=0,
        seed=0,
        warning="all of it is Latin",
    )

    def calibrated(name: str, record: CalibrationRecord | None) -> VariantInput:
        made = given.record(name, "W4A16", 3_000, 2_000)
        return variant(name, record=made.model_copy(update={"calibration": record}))

    matrix = build(
        given.baseline(),
        calibrated("awq", calibration),
        calibrated("fp8", None),
        calibrated("gptq", calibration),
        calibrated("rtn", calibration.model_copy(update={"warning": None})),
    )
    notes = [note for note in matrix.notes if "Calibration" in note]
    assert notes == ["Calibration of awq, gptq: all of it is Latin."]


# ------------------------------------------------------------------------- derived: memory, roof


def test_a_levels_roof_intervals_and_capacity_are_in_its_row() -> None:
    price = Price(per_hour=15, currency="CNY", tokens_per_request=200)
    matrix = build(given.baseline(), *given.quantized(), price=price)
    loaded = row_of(matrix, "awq").bench[4]
    assert loaded.tpot_floor_ms == pytest.approx(
        1000 * (4_488_000_000 + 57_344 * 16 * (512 + 64)) / 2039e9, rel=1e-5
    )
    assert loaded.roofline_share == pytest.approx((loaded.tpot_floor_ms or 0) / 10.91, rel=1e-5)
    low, high = loaded.ratio.tpot_interval or (0, 0)
    assert low <= (loaded.ratio.tpot or 0) <= high
    assert loaded.ratio.output_tok_per_s_interval is None, "there was one repeat"
    assert loaded.capacity is not None
    assert loaded.capacity.req_per_s == pytest.approx(1331 / 200)
    assert loaded.server is not None
    assert loaded.server.gpu_energy_j_per_output_token == pytest.approx(1802 / 8192, rel=1e-5)
    assert row_of(matrix, "fp8").bench[4].tpot_floor_ms is None, "its bytes are not known"


def test_a_card_nobody_knows_has_no_roof() -> None:
    unknown = given.HARDWARE.model_copy(update={"name": "NVIDIA Z9000"})
    measured = given.measurement(
        "bf16", "bench", bench=given.sweep(given.BF16_FIGURES), hardware=unknown
    )
    (row,) = build(replace(given.baseline(), measurements=(measured,))).rows
    assert row.bench[0].tpot_floor_ms is None


def test_the_memory_account_holds_the_plan_against_what_was_measured() -> None:
    (row,) = build(variant("awq", predicted_bytes=4_000, weight_bytes=None)).rows
    assert row.memory is not None
    assert row.memory.predicted_difference_percent == pytest.approx(
        100 * (15_302_000_000 / 4_000 - 1), rel=1e-5
    )
    assert (row.memory.peak_bytes, row.memory.peak_source) == (None, None)


def test_one_cards_part_is_not_held_against_the_whole_plan() -> None:
    flags = ("--tensor-parallel-size", "2")
    measured = changed(given.both("awq", given.SERVER, given.AWQ_FIGURES), flags=flags)
    (row,) = build(variant("awq", *measured, predicted_bytes=4_000)).rows
    assert row.memory is not None
    assert row.memory.predicted_difference_percent is None


def test_peak_memory_says_what_it_is_of() -> None:
    use = MemoryUse(rss_peak_bytes=5_000, pss_bytes=3_000, processes=3)
    measured = given.both("awq", given.SERVER, given.AWQ_FIGURES)
    on_cpu = tuple(m.model_copy(update={"memory": use}) for m in measured)
    (row,) = build(variant("awq", *on_cpu)).rows
    assert row.memory is not None
    assert (row.memory.peak_bytes, row.memory.peak_source, row.memory.pss_bytes) == (
        5_000, "processes", 3_000,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "kernels", "as_asked"),
    [
        ("marlin", ("MarlinLinearKernel",), True),
        ("marlin", ("MacheteLinearKernel",), False),
        ("auto", ("MacheteLinearKernel",), None),
        ("marlin", (), None),
    ],
)
def test_a_row_says_whether_its_kernel_is_what_was_asked_for(
    asked: str, kernels: tuple[str, ...], as_asked: bool | None
) -> None:
    measured = changed(
        given.both("awq", given.SERVER, given.AWQ_FIGURES), kernels=kernels, kernel_asked=asked
    )
    (row,) = build(variant("awq", *measured)).rows
    assert row.kernel_as_asked is as_asked
