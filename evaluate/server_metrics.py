"""What the server counts itself: prefix-cache hits and preemptions, from `/metrics`.

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
#: Names over vLLM's versions, newest first.
_PREFIX_HITS = ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total")
_PREEMPTIONS = ("vllm:num_preemptions_total",)
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
    totals: dict[str, float] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line.strip())
        if match is None:
            continue
        try:
            value = float(match[2])
        except ValueError:
            continue
        totals[match[1]] = totals.get(match[1], 0.0) + value
    return totals


def parse_counters(text: str) -> Counters:
    """Return vLLM's counters from its `/metrics` text, summed over engines."""
    samples = parse_samples(text)

    def first(names: tuple[str, ...]) -> float | None:
        return next((samples[name] for name in names if name in samples), None)

    return Counters(prefix_hit_tokens=first(_PREFIX_HITS), preemptions=first(_PREEMPTIONS))


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
