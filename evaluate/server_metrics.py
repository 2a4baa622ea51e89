"""What the server counts itself, from `/metrics`, by the names of vLLM's versions.

Also the two other calls beside a benchmark: `/health` and `/reset_prefix_cache`.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from qkit.evaluate.adaptive import Load

_SAMPLE = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{.*\})?\s+(\S+)(?:\s+\d+)?$")
#: What each figure is called over vLLM's versions, newest first. The client library adds `_total`
#: to every counter that lacks it. V0 is engine/metrics.py (0.6 to 0.10), V1 is
#: v1/metrics/loggers.py (0.7.3 on); speculative decoding is in spec_decode/metrics.py.
METRICS: dict[str, tuple[str, ...]] = {
    # V0 and V1, 0.6 to 0.33. V1 before 0.8 has no preemptions.
    "running": ("vllm:num_requests_running",),
    "waiting": ("vllm:num_requests_waiting",),
    # V1 from 0.9.2 on; V0, and V1 up to 0.11, say gpu_cache_usage_perc. A fraction in spite of
    # its name.
    "kv_cache_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "prompt_tokens": ("vllm:prompt_tokens_total",),
    "generation_tokens": ("vllm:generation_tokens_total",),
    # V1 from 0.9.2 on; V1 of 0.7.3 to 0.11. V0 has only a rate since the server's start.
    "prefix_query_tokens": (
        "vllm:prefix_cache_queries_total",
        "vllm:gpu_prefix_cache_queries_total",
    ),
    "prefix_hit_tokens": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    "preemptions": ("vllm:num_preemptions_total",),
    # V0 and V1, where speculative decoding is on.
    "draft_tokens": ("vllm:spec_decode_num_draft_tokens_total",),
    "accepted_tokens": ("vllm:spec_decode_num_accepted_tokens_total",),
}
#: Of several engines the fullest counts; all other figures add up.
_LARGEST = frozenset({"kv_cache_usage"})
_TIMEOUT = aiohttp.ClientTimeout(total=10)
_RESET_TRIES = 3


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals since the server's start; None where the server does not say."""

    #: Prompt tokens found in the prefix cache.
    prefix_hit_tokens: float | None = None
    preemptions: float | None = None

    def since(self, before: Counters) -> Counters:
        """Return how much each counter grew; None where unknown or where it was set back."""
        return Counters(
            prefix_hit_tokens=_growth(before.prefix_hit_tokens, self.prefix_hit_tokens),
            preemptions=_growth(before.preemptions, self.preemptions),
        )


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at `/metrics`: gauges as they were, counters since the server's start."""

    running: float | None = None
    waiting: float | None = None
    #: Fraction.
    kv_cache_usage: float | None = None
    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    prefix_query_tokens: float | None = None
    prefix_hit_tokens: float | None = None
    preemptions: float | None = None
    draft_tokens: float | None = None
    accepted_tokens: float | None = None


def total(parts: Sequence[Counters]) -> Counters:
    """Sum growths, such as those of a cell's repeats; None where one of them is not known."""

    def add(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return math.fsum(known) if known and len(known) == len(values) else None

    return Counters(
        prefix_hit_tokens=add([part.prefix_hit_tokens for part in parts]),
        preemptions=add([part.preemptions for part in parts]),
    )


def _growth(before: float | None, after: float | None) -> float | None:
    if before is None or after is None or after < before:
        return None
    return after - before


def parse_samples(text: str) -> dict[str, float]:
    """Return the samples of Prometheus' text format by name, summed over their labels."""
    return {name: sum(values) for name, values in _series(text).items()}


def parse_reading(text: str) -> Reading:
    """Return vLLM's figures from its `/metrics` text, over all its engines."""
    series = _series(text)

    def figure(field: str) -> float | None:
        values = next((series[name] for name in METRICS[field] if name in series), None)
        if values is None:
            return None
        return max(values) if field in _LARGEST else sum(values)

    return Reading(**{field: figure(field) for field in METRICS})


def parse_counters(text: str) -> Counters:
    """Return the counters that mark a cell."""
    reading = parse_reading(text)
    return Counters(reading.prefix_hit_tokens, reading.preemptions)


def _series(text: str) -> dict[str, list[float]]:
    """Return the values of every name, one for each set of labels."""
    found: dict[str, list[float]] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line.strip())
        if match is None:
            continue
        try:
            value = float(match[2])
        except ValueError:
            continue
        found.setdefault(match[1], []).append(value)
    return found


async def scrape(session: aiohttp.ClientSession, root: str) -> Counters:
    """Read `/metrics`; a server that has none, or does not answer, gives unknown counters."""
    try:
        async with session.get(f"{root}/metrics", timeout=_TIMEOUT) as response:
            return parse_counters(await response.text()) if response.status == 200 else Counters()
    except (aiohttp.ClientError, OSError, TimeoutError):
        return Counters()


async def scrape_load(session: aiohttp.ClientSession, root: str) -> Load:
    """Read how many requests the server runs and how many wait, summed over engines."""
    try:
        async with session.get(f"{root}/metrics", timeout=_TIMEOUT) as response:
            samples = parse_samples(await response.text()) if response.status == 200 else {}
    except (aiohttp.ClientError, OSError, TimeoutError):
        samples = {}
    return Load(
        running=samples.get("vllm:num_requests_running"),
        waiting=samples.get("vllm:num_requests_waiting"),
    )


async def reset_prefix_cache(session: aiohttp.ClientSession, root: str) -> bool:
    """Empty the prefix cache; False where the server does not offer that or is not able to.

    vLLM offers it with VLLM_SERVER_DEV_MODE=1 and refuses while a request still holds blocks,
    hence the second and third try.
    """
    for attempt in range(_RESET_TRIES):
        try:
            async with session.post(f"{root}/reset_prefix_cache", timeout=_TIMEOUT) as response:
                if response.status != 200:
                    return False
                # vLLM before 0.10 answers with an empty body once it is done.
                if '"success":false' not in (await response.text()).replace(" ", ""):
                    return True
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False
        await asyncio.sleep(0.1 * (attempt + 1))
    return False


async def why_dead(session: aiohttp.ClientSession, root: str) -> str | None:
    """Return why the server cannot be used, or None if it answers.

    A server without `/health` (404) is alive; vLLM's 503 says that its engine is dead.
    """
    try:
        async with session.get(f"{root}/health", timeout=_TIMEOUT) as response:
            if response.status >= 500:
                return f"/health answers HTTP {response.status}"
            return None
    except TimeoutError:
        return f"/health does not answer within {_TIMEOUT.total:.0f} s"
    except (aiohttp.ClientError, OSError) as error:
        return f"{type(error).__name__}: {error}"
