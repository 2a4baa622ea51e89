"""The server's own figures during a cell, against the fake server's truth."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from fakes.openai_server import FakeServer
from golden import matrix_input as given

from qkit.evaluate.server_metrics import Reading, parse_reading
from qkit.evaluate.server_watch import (
    TIMELINE_MAX,
    combine_sides,
    summarize_side,
    token_mark,
    watching_server,
)
from qkit.measurements import GpuUse, ServerSide

OLD = """\
vllm:gpu_cache_usage_perc{model_name="m"} 0.25
vllm:gpu_prefix_cache_queries_total{model_name="m"} 200
vllm:gpu_prefix_cache_hits_total{model_name="m"} 50
vllm:num_requests_swapped{model_name="m"} 0
"""
NEW = """\
vllm:num_requests_running{engine="0"} 2
vllm:num_requests_running{engine="1"} 3
vllm:num_requests_waiting{engine="0"} 1
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 1
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.5
vllm:prefix_cache_queries_total{engine="0"} 300
vllm:prefix_cache_hits_total{engine="0"} 30
vllm:spec_decode_num_draft_tokens_total{engine="0"} 40
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 30
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 20
"""


def test_names_of_old_and_new_versions() -> None:
    old = parse_reading(OLD)
    assert (old.kv_cache_usage, old.prefix_query_tokens, old.prefix_hit_tokens) == (0.25, 200, 50)
    assert (old.running, old.draft_tokens) == (None, None)
    new = parse_reading(NEW)
    assert (new.running, new.waiting) == (5, 1)
    assert new.kv_cache_usage == 0.5, "of two engines the fuller one"
    assert (new.draft_tokens, new.accepted_tokens) == (40, 30)


def side(**changes: Any) -> ServerSide:
    readings = [
        Reading(
            running=0, prompt_tokens=10, generation_tokens=5, draft_tokens=0, accepted_tokens=0
        ),
        Reading(running=4, waiting=2, kv_cache_usage=0.1),
        Reading(running=8, waiting=0, kv_cache_usage=0.3),
        Reading(
            running=0, prompt_tokens=74, generation_tokens=37, draft_tokens=8, accepted_tokens=6
        ),
    ]
    found = summarize_side([10.0, 10.5, 11.0, 12.0], readings, took_s=[0.004, 0.002])
    return found.model_copy(update=changes)


def test_gauges_are_of_the_samples_inside_and_counters_of_the_ends() -> None:
    found = side()
    assert (found.running_mean, found.running_max) == (6, 8)
    assert (found.waiting_mean, found.waiting_max) == (1, 2)
    assert found.kv_cache_usage_max == 0.3
    assert (found.prompt_tokens, found.generation_tokens) == (64, 32)
    assert found.acceptance_rate == 0.75
    assert found.prefix_hit_rate is None
    assert found.preemptions is None
    assert [sample.at_s for sample in found.timeline] == [0.5, 1.0]
    assert found.scrape_ms == pytest.approx(3)


def test_a_cell_without_a_sample_inside_has_no_gauges() -> None:
    found = summarize_side([0.0, 0.1], [Reading(running=0), Reading(running=0)])
    assert (found.samples, found.running_mean, found.running_max) == (0, None, None)


def test_a_restarted_server_has_no_growth() -> None:
    found = summarize_side([0, 1], [Reading(prompt_tokens=9), Reading(prompt_tokens=3)])
    assert found.prompt_tokens is None


def test_a_long_timeline_is_thinned_out() -> None:
    times = [float(k) for k in range(1000)]
    found = summarize_side(times, [Reading(running=1)] * 1000)
    assert found.samples == 998
    assert len(found.timeline) <= TIMELINE_MAX


def test_repeats_are_combined() -> None:
    gpu = GpuUse(
        count=1, utilisation_percent=80, power_w_mean=200, power_w_max=220, energy_j=400,
        memory_bytes_max=10,
    )  # fmt: skip
    hot = gpu.model_copy(update={"power_w_mean": 400, "power_w_max": 450})
    both = combine_sides(
        [side(gpu=gpu), side(samples=6, running_mean=2, running_max=9, preemptions=None, gpu=hot)]
    )
    assert both is not None
    assert both.running_mean == pytest.approx((6 * 2 + 2 * 6) / 8)
    assert both.running_max == 9
    assert both.generation_tokens == 64
    assert both.preemptions is None
    assert both.gpu is not None
    assert (both.gpu.energy_j, both.gpu.power_w_mean, both.gpu.power_w_max) == (800, 300, 450)
    assert combine_sides([]) is None


def test_a_difference_in_tokens_is_a_mark() -> None:
    requests = given.bench_cell(1, 50, 10, 100, n=2).requests
    right = side(generation_tokens=2.0 * given.OUTPUT_TOKENS)
    assert token_mark(right, requests) is None
    mark = token_mark(side(generation_tokens=250.0), requests)
    assert mark is not None
    assert "250 generated tokens and the client 256" in mark
    assert token_mark(side(generation_tokens=None), requests) is None
    failed = (requests[0].model_copy(update={"status": "cut"}), requests[1])
    assert token_mark(side(generation_tokens=250.0), failed) is None


# ------------------------------------------------------------------------------- against the fake


async def load(url: str, requests: int, tokens: int) -> None:
    body = {"model": "m", "prompt": "a b", "max_tokens": tokens, "stream": True}
    async with aiohttp.ClientSession() as session:

        async def one() -> None:
            async with session.post(f"{url}/v1/completions", data=json.dumps(body)) as reply:
                await reply.read()

        await asyncio.gather(*(one() for _ in range(requests)))


def watched(server: FakeServer, requests: int, tokens: int) -> ServerSide:
    async def run() -> ServerSide:
        async with watching_server(server.url) as watch:
            await load(server.url, requests, tokens)
        return watch.result()

    return asyncio.run(run())


def test_what_the_server_did_is_seen() -> None:
    with FakeServer(first_token_s=0.7, token_gap_s=0.03) as server:
        found = watched(server, 3, 20)
    assert found.generation_tokens == 60
    assert found.prompt_tokens == 9
    assert found.samples >= 1
    assert found.running_max == 3
    assert found.duration_s >= 0.7
    assert found.gpu is None


def test_a_server_without_metrics_is_unknown() -> None:
    with FakeServer(metrics=False) as server:
        found = watched(server, 1, 2)
    assert (found.generation_tokens, found.running_max, found.samples) == (None, None, 0)


def test_a_server_that_dies_takes_nothing_with_it() -> None:
    async def run(server: FakeServer) -> ServerSide:
        async with watching_server(server.url) as watch:
            server.kill()
        return watch.result()

    with FakeServer() as server:
        found = asyncio.run(run(server))
    assert found.generation_tokens is None
