"""From the records of a cell's requests to its figures: pure, and exact when done again.

Every stored figure can be computed again from the stored records with `summarize`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from qkit.evaluate.cell_marks import (
    FAILED_SHARE_MAX,
    ClientLoad,
    client_marks,
    failure_marks,
    server_marks,
)
from qkit.evaluate.latency import (
    dispatch_ms,
    distribution,
    e2e_ms,
    figures_ms,
    in_flight_max,
    itl_ms,
    known,
    steady_figures,
    tpot_ms,
    ttft_ms,
)
from qkit.evaluate.repeats import interval_95
from qkit.evaluate.server_metrics import Counters
from qkit.evaluate.slo import Objective
from qkit.levels import Level
from qkit.measurements import BenchCell, Goodput, Repeat, RequestRecord

Records = Sequence[RequestRecord]


def summarize(
    level: Level,
    records: Records,
    *,
    server: Counters,
    client: ClientLoad,
    shared_prefix_tokens: int = 0,
    reusable_tokens: float = 0,
    objective: Objective | None = None,
) -> BenchCell:
    """Compute a cell from the records of its measured requests.

    Args:
        level: The load.
        records: All measured requests of all repeats, failed ones included, at least one.
        server: Growth of the server's counters during the cell.
        client: The client's watch on itself.
        shared_prefix_tokens: Prompt tokens per request that may come from the prefix cache
            without a mark; a chat template's own beginning is the same in every request.
        reusable_tokens: Prompt tokens of all requests that may, by the workload's design.
        objective: What goodput is counted by.

    Returns:
        The cell. Throughput of a repeat is taken over the time from the first request's start to
        the last token of a successful one; of a cell, over the sum of these times. Above 1 %
        failed requests all headline figures are None.
    """
    ok = _ok(records)
    failed = len(records) - len(ok)
    usable = ok if failed <= FAILED_SHARE_MAX * len(records) else []
    parts = _by_repeat(records)
    repeats = tuple(map(_repeat, parts))
    window = math.fsum(map(_window_s, parts)) if usable else 0.0
    output = _total(record.output_tokens for record in usable)
    prompt = _total(record.prompt_tokens for record in usable)
    total = None if output is None or prompt is None else output + prompt
    dispatch = distribution(known(map(dispatch_ms, records)))
    steady = steady_figures(level.concurrency, parts) if usable else None
    cell = BenchCell(
        concurrency=level.concurrency,
        request_rate=level.request_rate,
        n=len(records),
        failed=failed,
        duration_s=math.fsum(repeat.duration_s for repeat in repeats),
        ttft_ms=distribution(known(map(ttft_ms, usable))),
        tpot_ms=distribution(known(map(tpot_ms, usable))),
        itl_ms=distribution(gap for record in usable for gap in itl_ms(record)),
        e2e_ms=distribution(known(map(e2e_ms, usable))),
        output_tok_per_s=_rate(output, window),
        total_tok_per_s=_rate(total, window),
        req_per_s=_rate(len(usable) or None, window),
        steady_tok_per_s=steady.output_tok_per_s if steady else None,
        steady=steady,
        repeats=repeats,
        ttft_ms_p50_interval=interval_95([repeat.ttft_ms_p50 for repeat in repeats]),
        tpot_ms_p50_interval=interval_95([repeat.tpot_ms_p50 for repeat in repeats]),
        output_tok_per_s_interval=interval_95([repeat.output_tok_per_s for repeat in repeats]),
        req_per_s_interval=interval_95([repeat.req_per_s for repeat in repeats]),
        dispatch_ms=dispatch,
        in_flight_max=max(map(in_flight_max, parts)),
        output_tokens_mean=_mean(record.output_tokens for record in ok),
        input_tokens_mean=_mean(record.prompt_tokens for record in ok),
        prefix_hit_tokens=server.prefix_hit_tokens,
        preemptions=server.preemptions,
        client_lag_ms_max=client.lag_ms_max,
        client_lag_ms_p99=client.lag_ms_p99,
        client_lag_ms_p50=client.lag_ms_p50,
        client_cpu_share=client.cpu_share,
        client_processes=client.processes,
        requests=tuple(records),
    )
    marks = (
        *failure_marks(records),
        *server_marks(server, allowed=shared_prefix_tokens * len(records) + reusable_tokens),
        *client_marks(client, cell.ttft_ms.p50, dispatch, is_open=level.is_open),
    )
    goodput = _goodput(objective, cell, usable, window) if objective else None
    return cell.model_copy(update={"marks": marks, "goodput": goodput})


def _goodput(objective: Objective, cell: BenchCell, usable: Records, window_s: float) -> Goodput:
    """Count the requests that keep every limit; none are known where a cell has no figures."""
    kept = sum(
        objective.is_kept(lambda metric, record=record: figures_ms(record, metric))  # type: ignore[misc]
        for record in usable
    )
    return Goodput(
        slo=str(objective),
        met=objective.is_met(
            lambda metric, statistic: getattr(getattr(cell, f"{metric}_ms"), statistic)
        ),
        n=kept,
        share=kept / cell.n,
        req_per_s=kept / window_s if usable and window_s > 0 else None,
    )


def _by_repeat(records: Records) -> list[Records]:
    parts: dict[int, list[RequestRecord]] = {}
    for record in records:
        parts.setdefault(record.repeat, []).append(record)
    return [parts[number] for number in sorted(parts)]


def _repeat(records: Records) -> Repeat:
    ok = _ok(records)
    failed = len(records) - len(ok)
    usable = ok if failed <= FAILED_SHARE_MAX * len(records) else []
    window = _window_s(records) if usable else 0.0
    return Repeat(
        n=len(records),
        failed=failed,
        duration_s=max(record.end_s for record in records) - _first_start(records),
        ttft_ms_p50=distribution(known(map(ttft_ms, usable))).p50,
        tpot_ms_p50=distribution(known(map(tpot_ms, usable))).p50,
        output_tok_per_s=_rate(_total(record.output_tokens for record in usable), window),
        req_per_s=_rate(len(usable) or None, window),
    )


def _ok(records: Records) -> list[RequestRecord]:
    return [record for record in records if record.status == "ok"]


def _first_start(records: Records) -> float:
    return min(record.start_s for record in records)


def _window_s(records: Records) -> float:
    """Return the time from the first start to the last token of a successful request."""
    first = _first_start(records)
    return max((r.last_token_s or r.end_s for r in _ok(records)), default=first) - first


def _total(values: Iterable[int | None]) -> int | None:
    """Sum, or None if there is nothing to sum or one of them is not known."""
    items = list(values)
    found = [item for item in items if item is not None]
    return sum(found) if found and len(found) == len(items) else None


def _mean(values: Iterable[int | None]) -> float | None:
    items = list(values)
    total = _total(items)
    return None if total is None else total / len(items)


def _rate(amount: int | None, window_s: float) -> float | None:
    return None if amount is None or window_s <= 0 else amount / window_s
