"""The main job on real parts: llm-compressor makes five variants, vLLM serves all six.

Where the CPU has no AVX-512, vLLM has no kernel for 4-bit weights: those rows then say so.
"""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from qkit.cli import cli
from qkit.hardware import has_avx512
from qkit.quantize.compatibility import cpu_obstacle
from qkit.recipe import METHODS, Variant, load_recipe
from qkit.reporting import Silent
from qkit.run import Job
from qkit.store import RunStore
from qkit.suites import BenchSuite, FidelitySuite

pytestmark = pytest.mark.e2e

KERNELS = {
    "bf16": "unquantized (bfloat16)",
    "awq": "CPUWNA16LinearKernel",
    "gptq": "CPUWNA16LinearKernel",
    "fp8": "ChannelWiseTorchFP8ScaledMMLinearKernel",
    "smoothquant": "CPUInt8ScaledMMLinearKernel",
    "rtn": "CPUWNA16LinearKernel",
}
NOT_SERVED = {method for method in METHODS if cpu_obstacle(Variant(method=method), has_avx512())}
SERVED = [name for name in KERNELS if name not in NOT_SERVED]
QUESTIONS = 100


class Kept(Silent):
    """A reporter that keeps which steps were done."""

    def __init__(self):
        self.done = []

    def finished(self, label, step, note):
        self.done.append((label, step))


@pytest.fixture(scope="module")
def recipe():
    demo = load_recipe("demo")
    bench = BenchSuite(
        concurrency=(1, 2), min_requests=4, requests_per_slot=1, input_tokens=32,
        output_tokens=8, repeat_baseline=False,
    )  # fmt: skip
    questions = demo.accuracy[0].model_copy(update={"limit": QUESTIONS})
    fidelity = FidelitySuite(
        tokens=1000, window_tokens=101, greedy_prompts=4, greedy_prompt_tokens=16, greedy_tokens=8
    )
    variants = (*demo.variants, Variant(method="rtn"))
    assert {variant.method for variant in variants} == set(METHODS)
    return demo.model_copy(
        update={
            "bench": (bench,),
            "accuracy": (questions,),
            "fidelity": fidelity,
            "variants": variants,
        }
    )


@pytest.fixture(scope="module")
def finished(recipe, tmp_path_factory, quantize_python, serve_python):
    """A run of the demo, and what it said."""
    store = RunStore(tmp_path_factory.mktemp("artifacts") / "demo")
    reporter = Kept()
    outcome = Job(recipe, store, reporter).run()
    assert {failure.variant for failure in outcome.failures} == NOT_SERVED
    for failure in outcome.failures:
        assert "serves 4-bit weights with AVX-512 only, which this CPU lacks" in failure.reason
    return store, reporter.done


@pytest.fixture(scope="module")
def matrix(finished):
    store, _ = finished
    shown = CliRunner().invoke(cli, ["matrix", str(store.root), "--format", "json"])
    assert shown.exit_code == 0, shown.output
    return json.loads(shown.stdout)


@pytest.fixture(scope="module")
def served(matrix):
    """The rows of what this CPU serves, the baseline's first."""
    return [row for row in matrix["rows"] if row["variant"] in SERVED]


def test_every_variant_is_a_row_with_the_kernel_that_ran(matrix, served):
    assert {row["variant"]: row["status"] for row in matrix["rows"]} == {
        name: "ok" if name in SERVED else "failed" for name in KERNELS
    }
    assert {row["variant"]: row["kernel"] for row in served} == {
        name: KERNELS[name] for name in SERVED
    }
    assert matrix["rows"][0]["variant"] == matrix["baseline"] == "bf16"


def test_memory_is_that_of_the_weights(matrix, served):
    baseline, *variants = matrix["rows"]
    for row in variants:
        assert row["weight_bytes"] == row["quantized_bytes"] + row["unquantized_bytes"]
        assert row["weight_bytes"] < baseline["weight_bytes"]
        assert row["weight_ratio"] == pytest.approx(row["weight_bytes"] / baseline["weight_bytes"])
    assert len({row["kv_cache_tokens"] for row in served}) == 1


def test_accuracy_is_paired_and_the_baseline_knows_its_facts(served):
    baseline, *variants = (row["accuracy"]["demo_facts"] for row in served)
    assert 0.5 < baseline["value"] < 1.0
    for score in (baseline, *variants):
        assert score["n"] == QUESTIONS
        assert 0 < score["stderr"] < 0.06
    for score in variants:
        assert score["delta_points"] == pytest.approx(100 * (score["value"] - baseline["value"]))


def test_fidelity_tells_noise_from_coarse_and_fine_quantization(matrix, served):
    """Against the same text: nothing for the baseline itself, more for 4 bits than for 8."""
    baseline, *variants = (row["fidelity"] for row in served)
    assert (baseline["scored_tokens"], baseline["documents"]) == (1000, 10)
    assert baseline["distance"] is None
    noise = matrix["fidelity_noise"]["distance"]
    distances = {}
    for row, fidelity in zip(served[1:], variants, strict=True):
        distance = distances[row["method"]] = fidelity["distance"]
        ratio = fidelity["perplexity"]["value"] / baseline["perplexity"]["value"]
        assert distance["perplexity_ratio"]["value"] == pytest.approx(ratio, rel=1e-4)
        assert distance["kl_mean"]["low"] < distance["kl_mean"]["value"]
        assert distance["kl_mean"]["value"] > 10 * noise["kl_mean"]["value"]
        assert 0.5 < distance["top1_agreement"]["value"] < noise["top1_agreement"]["value"]
        assert fidelity["greedy"]["prompts"] == 4
    for method in {"awq", "gptq", "rtn"} & distances.keys():
        assert distances[method]["kl_mean"]["value"] > distances["fp8"]["kl_mean"]["value"]
    assert noise["top1_agreement"]["value"] > 0.98


def test_every_level_has_latency_throughput_and_ratios(served):
    for row in served:
        assert [cell["concurrency"] for cell in row["bench"]] == [1, 2]
        for cell in row["bench"]:
            assert (cell["n"], cell["failed"]) == (4, 0)
            assert cell["ttft_ms_p50"] > 0
            assert cell["ttft_ms_p95"] is None, "four requests have no 95th percentile"
            assert cell["output_tok_per_s"] > 0
            assert cell["ratio"]["output_tok_per_s"] > 0


def test_nothing_is_done_again(recipe, finished):
    store, done = finished
    assert len(done) == 5 + len(SERVED) * 4 + 1  # the baseline's fidelity is measured twice
    reporter = Kept()
    outcome = Job(recipe, store, reporter).run()
    assert reporter.done == []
    assert (outcome.done, outcome.skipped) == (0, 5 + len(SERVED) * 3 + 1)


def test_a_variant_says_how_it_was_made(finished):
    store, _ = finished
    for method in METHODS:
        record = store.variant(method)
        assert record.method == method
        assert record.versions["llmcompressor"]
        assert record.ignored_modules == ("lm_head",)
        assert (record.calibration is None) == (method in ("fp8", "rtn"))
        assert 0.5 < record.top1_agreement <= 1
        assert record.mean_kl > 0


def test_all_files_of_the_matrix_are_there(finished, matrix):
    store, _ = finished
    for suffix in ("json", "csv", "md", "html"):
        text = store.matrix_file(suffix).read_text()
        for method in METHODS:
            assert method in text
