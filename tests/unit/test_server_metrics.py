from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import TypeVar

import aiohttp
from fakes.openai_server import FakeServer

from qkit.evaluate.server_metrics import (
    Counters,
    parse_counters,
    parse_samples,
    reset_prefix_cache,
    scrape,
    why_dead,
)

T = TypeVar("T")

METRICS = """\
# HELP vllm:prefix_cache_hits_total Prefix cache hits, in terms of number of cached tokens.
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0",model_name="a {odd} \\"name\\""} 128.0
vllm:prefix_cache_hits_total{engine="1",model_name="m"} 1.28e+02
vllm:prefix_cache_hits_created{engine="0",model_name="m"} 1.7e+09
vllm:num_preemptions_total{engine="0",model_name="m"} 3.0 1700000000
vllm:num_requests_running 2
process_start_time_seconds NaN
not a sample line
"""


def with_session(call: Callable[[aiohttp.ClientSession], Awaitable[T]]) -> T:
    async def run() -> T:
        async with aiohttp.ClientSession() as session:
            return await call(session)

    return asyncio.run(run())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_samples_are_summed_over_labels() -> None:
    samples = parse_samples(METRICS)
    assert samples["vllm:prefix_cache_hits_total"] == 256
    assert samples["vllm:num_requests_running"] == 2
    assert "not" not in samples


def test_counters() -> None:
    assert parse_counters(METRICS) == Counters(prefix_hit_tokens=256, preemptions=3)
    assert parse_counters("") == Counters(prefix_hit_tokens=None, preemptions=None)


def test_counters_of_older_vllm() -> None:
    text = 'vllm:gpu_prefix_cache_hits_total{model_name="m"} 7.0\n'
    assert parse_counters(text).prefix_hit_tokens == 7


def test_growth_is_unknown_where_a_side_is_unknown_or_the_server_restarted() -> None:
    before = Counters(prefix_hit_tokens=5, preemptions=9)
    assert Counters(8, 9).since(before) == Counters(3, 0)
    assert Counters(None, 1).since(before) == Counters(None, None)


def test_scrape_reset_and_health() -> None:
    with FakeServer() as server:
        server.hit_tokens = 48
        server.preemptions = 2
        assert with_session(lambda s: scrape(s, server.url)) == Counters(48, 2)
        assert with_session(lambda s: reset_prefix_cache(s, server.url)) is True
        assert server.resets == 1
        assert with_session(lambda s: why_dead(s, server.url)) is None


def test_a_server_without_metrics_or_reset_is_fine() -> None:
    with FakeServer(metrics=False, reset_allowed=False) as server:
        assert with_session(lambda s: scrape(s, server.url)) == Counters(None, None)
        assert with_session(lambda s: reset_prefix_cache(s, server.url)) is False


def test_no_server() -> None:
    root = f"http://127.0.0.1:{free_port()}"
    assert with_session(lambda s: scrape(s, root)) == Counters(None, None)
    assert with_session(lambda s: reset_prefix_cache(s, root)) is False
    reason = with_session(lambda s: why_dead(s, root))
    assert reason is not None
    assert "ClientConnector" in reason
