"""Marks of a benchmark's cell: what a reader must know before believing its figures. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from qkit.evaluate.server_metrics import Counters
from qkit.measurements import Distribution, RequestRecord

#: Share of failed requests above which a cell has no headline figures.
FAILED_SHARE_MAX = 0.01
#: A single-threaded client above this share of one core falls behind its streams.
CLIENT_CPU_SHARE_MAX = 0.8
#: A client whose loop is, 1 % of the time, late by more than both this and a tenth of the median
#: time to first token has distorted what it stamped. One late wake-up touches one chunk.
CLIENT_LAG_MS_MAX = 10.0
CLIENT_LAG_TTFT_SHARE = 0.1
#: The client's own delay of the median request, sending and stamping, that is let pass: so many
#: milliseconds, or this share of the median time to first token if that is more.
CLIENT_DELAY_MS_MAX = 1.0
CLIENT_DELAY_TTFT_SHARE = 0.01
#: In an open loop, a median dispatch later than this is no longer the load that was asked for.
DISPATCH_MS_MAX = 10.0


@dataclass(frozen=True, slots=True)
class ClientLoad:
    """How busy the load generator itself was during a cell."""

    lag_ms_max: float
    lag_ms_p99: float
    #: CPU time of the process / wall time; 1.0 is one whole core.
    cpu_share: float
    lag_ms_p50: float | None = None
    #: Client processes; the other figures are of the one that was worst.
    processes: int = 1

    @property
    def is_bottleneck(self) -> bool:
        """Whether it had too little CPU time for its streams, whatever the server did."""
        return (
            self.cpu_share > CLIENT_CPU_SHARE_MAX or (self.lag_ms_p50 or 0.0) > CLIENT_DELAY_MS_MAX
        )


def failure_marks(records: Sequence[RequestRecord]) -> list[str]:
    """Return the marks that the records themselves give."""
    marks = []
    n = len(records)
    failed = [record for record in records if record.status != "ok"]
    if failed:
        kinds = ", ".join(
            f"{count} {kind}"
            for kind, count in Counter(record.status for record in failed).most_common()
        )
        over = len(failed) > FAILED_SHARE_MAX * n
        effect = "above 1 %: no figures" if over else "left out of the figures"
        marks.append(
            f"{len(failed)} of {n} requests failed ({kinds}), {effect}; "
            f"the first: {failed[0].error or failed[0].status}"
        )
    lengths = sum(record.status == "length" for record in failed)
    if lengths:
        marks.append(
            f"{lengths} of {n} answers have another length than asked although ignore_eos was "
            "sent; a server that does not know it needs bench.ignore_eos: false"
        )
    estimated = sum(record.tokens_estimated for record in records if record.status == "ok")
    if estimated:
        marks.append(
            f"output tokens of {estimated} of {n} requests are estimated with the tokenizer, "
            "because the server sent no usage"
        )
    return marks


def server_marks(server: Counters, *, allowed: float) -> list[str]:
    """Return the marks of the server's counters; `allowed` prefix hits (tokens) are no mark."""
    marks = []
    if server.prefix_hit_tokens is not None and server.prefix_hit_tokens > allowed:
        marks.append(
            f"the prefix cache served {server.prefix_hit_tokens:.0f} prompt tokens, more than "
            "the prompts have in common: something else uses the server, or its cache was not empty"
        )
    if server.preemptions:
        marks.append(
            f"the server preempted {server.preemptions:.0f} requests: its KV cache is too small "
            "for this concurrency"
        )
    return marks


def client_marks(
    client: ClientLoad, ttft_ms_p50: float | None, dispatch_ms: Distribution, *, is_open: bool
) -> list[str]:
    """Return the marks of the client's watch on itself.

    Args:
        client: What it saw.
        ttft_ms_p50: Median time to first token, against which its delays are judged.
        dispatch_ms: Delays until the requests were sent.
        is_open: Whether there was a schedule to keep.
    """
    marks = []
    ttft = ttft_ms_p50 or 0.0
    if client.cpu_share > CLIENT_CPU_SHARE_MAX:
        marks.append(
            f"the client used {client.cpu_share:.0%} of a core and may have been the bottleneck"
        )
    if client.lag_ms_p99 > max(CLIENT_LAG_MS_MAX, CLIENT_LAG_TTFT_SHARE * ttft):
        marks.append(
            "the client was starved of CPU time: its event loop ran late, so may the times"
        )
    dispatch = dispatch_ms.p50 or 0.0
    delay = dispatch + (client.lag_ms_p50 or 0.0)
    if is_open and dispatch > max(DISPATCH_MS_MAX, CLIENT_LAG_TTFT_SHARE * ttft):
        marks.append(
            f"the client lagged behind its schedule: half of the requests were sent more than "
            f"{dispatch:.0f} ms late"
        )
    elif delay > max(CLIENT_DELAY_MS_MAX, CLIENT_DELAY_TTFT_SHARE * ttft):
        marks.append(
            f"the client's own delays are about {delay:.1f} ms of the median time to first token"
        )
    return marks
