"""Figures derived from measurements: intervals of ratios, the memory roof, capacity and cost. Pure.

What cannot be derived (too few requests, an unknown card, no price) is None.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy import stats

from qkit.evaluate.figures import figure
from qkit.measurements import RequestRecord, Stored
from qkit.quantize.estimate import tpot_floor_s

CONFIDENCE = 0.95
#: Resamples of the bootstrap; the ends of a 95 % interval move by less than a hundredth between
#: seeds.
RESAMPLES = 2000
SEED = 0
#: Below so many requests a resampled median says nothing about the spread.
FEWEST_REQUESTS = 8
FEWEST_REPEATS = 2
SECONDS_PER_HOUR = 3600
SECONDS_PER_DAY = 86_400
#: The month that prices are quoted for.
HOURS_PER_MONTH = 720

Ends = tuple[float, float]
Values = Sequence[float]


class Price(Stored):
    """What an hour of the machine costs, and what a request is."""

    per_hour: float
    currency: str
    #: Output tokens of a request; None takes what the benchmark's requests had.
    tokens_per_request: float | None = None


class Capacity(Stored):
    """What a level's throughput amounts to, kept up all day."""

    tokens_per_request: float
    req_per_s: float
    req_per_day: float
    #: Of one month of 720 hours, whatever the load; None without a price, as the two below.
    cost_per_month: float | None
    cost_per_request: float | None
    #: Per million output tokens.
    cost_per_million_tokens: float | None


def capacity(
    output_tok_per_s: float | None, tokens_per_request: float | None, price: Price | None
) -> Capacity | None:
    """Return what a throughput serves and costs; None where throughput or length is unknown.

    requests/s = tokens/s / tokens a request; cost of a request = price per second / requests/s.

    Args:
        output_tok_per_s: Output tokens a second of all requests together.
        tokens_per_request: Mean output tokens measured; a price's own figure takes precedence.
        price: None leaves the costs out.
    """
    tokens = price.tokens_per_request if price and price.tokens_per_request else tokens_per_request
    if not output_tok_per_s or not tokens:
        return None
    rate = output_tok_per_s / tokens
    per_second = price.per_hour / SECONDS_PER_HOUR if price else None
    return Capacity(
        tokens_per_request=tokens,
        req_per_s=rate,
        req_per_day=rate * SECONDS_PER_DAY,
        cost_per_month=price.per_hour * HOURS_PER_MONTH if price else None,
        cost_per_request=None if per_second is None else per_second / rate,
        cost_per_million_tokens=None if per_second is None else per_second / output_tok_per_s * 1e6,
    )


# ----------------------------------------------------------------------------- intervals of ratios


def median_ratio_interval(
    variant: Values, baseline: Values, *, seed: int = SEED, resamples: int = RESAMPLES
) -> Ends | None:
    """Return the 95 % interval of median(variant) / median(baseline).

    Percentile bootstrap (Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter
    13): requests of both cells are drawn again with replacement, independently of each other. It
    tells how far the ratio depends on which requests were measured. Requests of a cell share
    batches, and the machine may have changed between two cells, so it is the least uncertainty
    there is; the baseline's drift shows the rest.

    Args:
        variant: A figure of each request, for example TPOT in milliseconds.
        baseline: The same of the baseline's requests.
        seed: Of the resampling; the same seed gives the same interval.
        resamples: How many.

    Returns:
        Lower and upper end; None below 8 requests on a side or where a median is 0.
    """
    if min(len(variant), len(baseline)) < FEWEST_REQUESTS:
        return None
    generator = np.random.default_rng(seed)
    upper = _medians(variant, generator, resamples)
    lower = _medians(baseline, generator, resamples)
    if not np.all(lower > 0):
        return None
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(upper / lower, [tail, 100 - tail])
    return float(low), float(high)


def mean_ratio_interval(variant: Values, baseline: Values) -> Ends | None:
    """Return the 95 % interval of the ratio of two means over repeats.

    Welch's t-interval of the difference of logarithms, turned back: rates of repeats of one cell
    scatter by a factor, and a ratio of rates is a difference of logarithms. None below two repeats
    on a side: one figure has no spread to go by.

    Args:
        variant: A rate of each repeat, for example output tokens a second.
        baseline: The same of the baseline's repeats.
    """
    if min(len(variant), len(baseline)) < FEWEST_REPEATS or min(*variant, *baseline) <= 0:
        return None
    ours, theirs = np.log(variant), np.log(baseline)
    difference = float(ours.mean() - theirs.mean())
    parts = [float(side.var(ddof=1)) / len(side) for side in (ours, theirs)]
    error = math.sqrt(sum(parts))
    if error == 0:
        return math.exp(difference), math.exp(difference)
    freedom = sum(parts) ** 2 / sum(
        part**2 / (len(side) - 1) for part, side in zip(parts, (ours, theirs), strict=True)
    )
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * error
    return math.exp(difference - half), math.exp(difference + half)


def repeat_rates(records: Sequence[RequestRecord]) -> list[float]:
    """Return the output tokens a second of every repeat of a cell.

    From the first request's start to the last token of a successful one, as a cell's own; a repeat
    with a failed request or an unknown count has none and is left out.
    """
    rates = []
    for number in sorted({record.repeat for record in records}):
        own = [record for record in records if record.repeat == number]
        tokens = [record.output_tokens for record in own if record.status == "ok"]
        known = [count for count in tokens if count is not None]
        ends = [r.last_token_s for r in own if r.last_token_s is not None]
        if len(known) < len(own) or not ends:
            continue
        window = max(ends) - min(record.start_s for record in own)
        if window > 0:
            rates.append(sum(known) / window)
    return rates


def _medians(
    values: Values, generator: np.random.Generator, resamples: int
) -> npt.NDArray[np.float64]:
    ordered = np.asarray(values, dtype=np.float64)
    drawn = generator.integers(0, len(ordered), size=(resamples, len(ordered)))
    return np.asarray(np.median(ordered[drawn], axis=1), dtype=np.float64)


# ---------------------------------------------------------------------------------- the memory roof


def tpot_floor_ms(
    *,
    read_bytes: int | None,
    kv_bytes_per_token: int | None,
    concurrency: float | None,
    input_tokens: float | None,
    output_tokens: float | None,
    bandwidth: float | None,
    cards: int = 1,
) -> float | None:
    """Return the least mean time per output token that a card's memory allows, in milliseconds.

    `tpot_floor_s` at the mean length of a request's cache while it decodes: its prompt and half
    of its answer. Over several cards, weights and cache are taken as split evenly, which none of
    them can undercut.

    Args:
        read_bytes: Weights read for one step.
        kv_bytes_per_token: Of the KV cache.
        concurrency: Requests decoding at once.
        input_tokens: Mean prompt tokens of a request.
        output_tokens: Mean output tokens of a request.
        bandwidth: Bytes a second of one card; None for a CPU or an unknown card.
        cards: Tensor-parallel size.
    """
    if (
        read_bytes is None
        or kv_bytes_per_token is None
        or concurrency is None
        or input_tokens is None
        or output_tokens is None
        or not bandwidth
    ):
        return None
    seconds = tpot_floor_s(
        read_bytes,
        round(kv_bytes_per_token * concurrency * (input_tokens + output_tokens / 2)),
        concurrency=1,
        length=1,
        bandwidth=bandwidth * cards,
    )
    return figure(1000 * seconds)
