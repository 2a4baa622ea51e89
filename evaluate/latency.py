"""From the records of requests to the figures of a cell: pure arithmetic.

Definitions, per request and on the client's side:

- ttft: request sent to the first chunk that carries a token.
- e2e: request sent to the last chunk that carries a token.
- tpot: (e2e - ttft) / (output tokens - 1); undefined below two tokens.
- itl: gaps between chunks that carry a token, pooled over requests; per chunk, not per token.

Only requests with status "ok" enter a figure. Every stored figure can be computed again from the
stored records with `summarize`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from qkit.evaluate.server_metrics import Counters
from qkit.measurements import BenchCell, Distribution, RequestRecord

#: Share of failed requests above which a cell has no headline figures.
FAILED_SHARE_MAX = 0.01
#: A single-threaded client above this share of one core falls behind its streams.
CLIENT_CPU_SHARE_MAX = 0.8
#: A client whose loop is, 1 % of the time, late by more than both this and a tenth of the median
#: time to first token has distorted what it stamped. One late wake-up touches one chunk.
CLIENT_LAG_MS_MAX = 10.0
CLIENT_LAG_TTFT_SHARE = 0.1
#: The smallest n at which a percentile is not just the maximum.
_FEWEST = {90: 10, 95: 20, 99: 100}
_EMPTY = Distribution(n=0, mean=None, p50=None, p90=None, p95=None, p99=None, max=None)


@dataclass(frozen=True, slots=True)
class ClientLoad:
    """How busy the load generator itself was during a cell."""

    lag_ms_max: float
    lag_ms_p99: float
    #: CPU time of the process / wall time; 1.0 is one whole core.
    cpu_share: float


def distribution(values: Iterable[float]) -> Distribution:
    """Return mean, maximum and percentiles (linear interpolation between order statistics).

    A percentile that n values do not support (p90 below 10, p95 below 20, p99 below 100) is None.
    """
    ordered = sorted(values)
    n = len(ordered)
    if n == 0:
        return _EMPTY

    def percentile(q: int) -> float | None:
        if n < _FEWEST.get(q, 1):
            return None
        position = (n - 1) * q / 100
        low = math.floor(position)
        high = min(low + 1, n - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (position - low)

    return Distribution(
        n=n,
        mean=math.fsum(ordered) / n,
        p50=percentile(50),
        p90=percentile(90),
        p95=percentile(95),
        p99=percentile(99),
        max=ordered[-1],
    )


def ttft_ms(record: RequestRecord) -> float | None:
    """Time to first token in milliseconds, or None without a token."""
    if record.first_token_s is None:
        return None
    return (record.first_token_s - record.start_s) * 1000


def e2e_ms(record: RequestRecord) -> float | None:
    """Time to the last token in milliseconds, or None without a token."""
    if record.last_token_s is None:
        return None
    return (record.last_token_s - record.start_s) * 1000


def tpot_ms(record: RequestRecord) -> float | None:
    """Time per output token after the first in milliseconds, or None below two tokens."""
    if record.first_token_s is None or record.last_token_s is None:
        return None
    if record.output_tokens is None or record.output_tokens < 2:
        return None
    return (record.last_token_s - record.first_token_s) * 1000 / (record.output_tokens - 1)


def itl_ms(record: RequestRecord) -> list[float]:
    """Gaps between token-carrying chunks in milliseconds."""
    return [(later - earlier) * 1000 for earlier, later in pairwise(record.chunk_s)]


def steady_tok_per_s(concurrency: int, records: Sequence[RequestRecord]) -> float | None:
    """Return output tokens per second while all slots were busy, or None if they never were.

    The window opens when the last slot gets its first request and closes at the first end after
    the last request was sent. A chunk counts as output tokens / chunks of its request, at its
    arrival.
    """
    starts = sorted(record.start_s for record in records)
    if len(starts) < concurrency:
        return None
    opens = starts[concurrency - 1]
    # Strictly after: the end that made room for the last request may bear the same time stamp.
    closes = min((r.end_s for r in records if r.end_s > starts[-1]), default=opens)
    if closes <= opens:
        return None
    tokens = 0.0
    for record in records:
        if record.status == "ok" and record.chunk_s and record.output_tokens is not None:
            inside = sum(opens < arrival <= closes for arrival in record.chunk_s)
            tokens += record.output_tokens * inside / len(record.chunk_s)
    return tokens / (closes - opens)


def summarize(
    concurrency: int,
    records: Sequence[RequestRecord],
    *,
    server: Counters,
    client: ClientLoad,
    shared_prefix_tokens: int = 0,
    reusable_tokens: float = 0,
) -> BenchCell:
    """Compute a cell from the records of its measured requests.

    Args:
        concurrency: Slots of the closed loop.
        records: All measured requests, failed ones included, at least one.
        server: Growth of the server's counters during the cell.
        client: The client's watch on itself.
        shared_prefix_tokens: Prompt tokens per request that may come from the prefix cache
            without a mark; a chat template's own beginning is the same in every request.
        reusable_tokens: Prompt tokens of all requests that may, by the workload's design.

    Returns:
        The cell. Throughput is taken over the time from the first request's start to the last
        token of a successful one. Above 1 % failed requests all headline figures are None.
    """
    ok = [record for record in records if record.status == "ok"]
    failed = len(records) - len(ok)
    usable = ok if failed <= FAILED_SHARE_MAX * len(records) else []
    first_start = min(record.start_s for record in records)
    window = max((r.last_token_s or r.end_s for r in usable), default=first_start) - first_start
    output = _total(record.output_tokens for record in usable)
    prompt = _total(record.prompt_tokens for record in usable)
    total = None if output is None or prompt is None else output + prompt
    ttft = distribution(_known(map(ttft_ms, usable)))
    return BenchCell(
        concurrency=concurrency,
        n=len(records),
        failed=failed,
        duration_s=max(record.end_s for record in records) - first_start,
        ttft_ms=ttft,
        tpot_ms=distribution(_known(map(tpot_ms, usable))),
        itl_ms=distribution(gap for record in usable for gap in itl_ms(record)),
        e2e_ms=distribution(_known(map(e2e_ms, usable))),
        output_tok_per_s=_rate(output, window),
        total_tok_per_s=_rate(total, window),
        req_per_s=_rate(len(usable) or None, window),
        steady_tok_per_s=steady_tok_per_s(concurrency, records) if usable else None,
        output_tokens_mean=_mean(record.output_tokens for record in ok),
        input_tokens_mean=_mean(record.prompt_tokens for record in ok),
        prefix_hit_tokens=server.prefix_hit_tokens,
        preemptions=server.preemptions,
        client_lag_ms_max=client.lag_ms_max,
        client_lag_ms_p99=client.lag_ms_p99,
        client_cpu_share=client.cpu_share,
        marks=(
            *_failure_marks(records),
            *_server_marks(server, allowed=shared_prefix_tokens * len(records) + reusable_tokens),
            *_client_marks(client, ttft.p50),
        ),
        requests=tuple(records),
    )


def _failure_marks(records: Sequence[RequestRecord]) -> list[str]:
    """Marks that the records themselves give."""
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


def _server_marks(server: Counters, *, allowed: float) -> list[str]:
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


def _client_marks(client: ClientLoad, ttft_ms_p50: float | None) -> list[str]:
    marks = []
    if client.cpu_share > CLIENT_CPU_SHARE_MAX:
        marks.append(
            f"the client used {client.cpu_share:.0%} of a core and may have been the bottleneck"
        )
    limit = max(CLIENT_LAG_MS_MAX, CLIENT_LAG_TTFT_SHARE * (ttft_ms_p50 or 0.0))
    if client.lag_ms_p99 > limit:
        marks.append(
            "the client was starved of CPU time: its event loop ran late, so may the times"
        )
    return marks


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _total(values: Iterable[int | None]) -> int | None:
    """Sum, or None if there is nothing to sum or one of them is not known."""
    items = list(values)
    known = [item for item in items if item is not None]
    return sum(known) if known and len(known) == len(items) else None


def _mean(values: Iterable[int | None]) -> float | None:
    items = list(values)
    total = _total(items)
    return None if total is None else total / len(items)


def _rate(amount: int | None, window_s: float) -> float | None:
    return None if amount is None or window_s <= 0 else amount / window_s
