"""What the server and its GPUs did during a cell, as they say themselves."""

from __future__ import annotations

from qkit.measurements.base import Stored


class ServerSample(Stored):
    """One look at the server's gauges."""

    #: Seconds after the watch began.
    at_s: float
    running: float | None
    waiting: float | None
    #: Share of the KV cache in use, 0 to 1.
    kv_cache_usage: float | None


class GpuUse(Stored):
    """The GPUs a server runs on, through NVML; sums over them, and means over time."""

    count: int
    #: Share of time in which a kernel ran, 0 to 100, mean over GPUs and samples.
    utilisation_percent: float | None
    power_w_mean: float | None
    power_w_max: float | None
    #: Of the whole cell: the driver's energy counter, else power integrated over the samples.
    energy_j: float | None
    #: Most memory in use at one moment, by whatever process.
    memory_bytes_max: int | None


class ServerSide(Stored):
    """Growth of the server's counters during a cell, and its gauges sampled meanwhile.

    None where the server does not say, or where no sample fell into the cell.
    """

    duration_s: float
    #: Samples taken while requests were under way.
    samples: int
    #: Mean time the server took for one of them.
    scrape_ms: float | None
    running_mean: float | None
    running_max: float | None
    waiting_mean: float | None
    waiting_max: float | None
    kv_cache_usage_max: float | None
    prompt_tokens: float | None
    generation_tokens: float | None
    prefix_query_tokens: float | None
    prefix_hit_tokens: float | None
    preemptions: float | None
    #: Tokens proposed and taken by speculative decoding; None where it is off.
    draft_tokens: float | None
    accepted_tokens: float | None
    gpu: GpuUse | None = None
    timeline: tuple[ServerSample, ...] = ()

    @property
    def prefix_hit_rate(self) -> float | None:
        """Prompt tokens found in the prefix cache / prompt tokens looked up."""
        return _share(self.prefix_hit_tokens, self.prefix_query_tokens)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / proposed tokens of speculative decoding."""
        return _share(self.accepted_tokens, self.draft_tokens)


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole
