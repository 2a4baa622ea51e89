"""The main job on an NVIDIA GPU: `scripts/test -m gpu`, with the cuda environments made."""

from __future__ import annotations

import pytest

from qkit.assemble import load_matrix
from qkit.recipe import DEFAULT_METHODS as METHODS
from qkit.recipe import Serve, load_recipe
from qkit.run import Job
from qkit.store import RunStore
from qkit.suites import BenchSuite

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Rows of the demo's matrix, run on the GPU with the kernel left at its default, Marlin."""
    recipe = load_recipe("demo").model_copy(
        update={
            "accelerator": "cuda",
            "serve": Serve(max_model_len=1024, gpu_memory_utilization=0.5),
            "bench": (BenchSuite(concurrency=(1, 8), min_requests=20, repeat_baseline=False),),
        }
    )
    store = RunStore(tmp_path_factory.mktemp("artifacts") / "demo")
    outcome = Job(recipe, store).run()
    assert outcome.failures == []
    return {row.variant: row for row in load_matrix(store).rows}


def test_every_variant_is_served(rows):
    assert {name: row.status for name, row in rows.items()} == dict.fromkeys(
        ["bf16", *METHODS], "ok"
    )


def test_marlin_runs_where_it_was_asked_for(rows):
    for method in ("awq", "gptq"):
        assert "Marlin" in rows[method].kernel
        assert not [mark for mark in rows[method].marks if mark.startswith("KERNEL")]


def test_memory_is_vllms_own_figure(rows):
    for method in METHODS:
        assert rows[method].weight_bytes < rows["bf16"].weight_bytes
        assert rows[method].kv_cache_tokens > 0
