"""What other load generators wrote, in qkit's definitions, and whether the figures agree.

Pure, for scripts/bench_peers.py. Milliseconds and output tokens per second, one set a repeat:

- TTFT: request sent to the first chunk with a token, the median over requests;
- TPOT: (last token - first token) / (output tokens - 1) of a request, the median over requests;
- throughput: output tokens / (end of the last request - start of the first).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

#: Largest difference of medians of TPOT and throughput, in percent.
AGREE_PERCENT = 5.0

Word = Literal["within", "undecided", "not within"]


@dataclass(frozen=True, slots=True)
class Figures:
    """One repeat of one tool."""

    ttft_ms: float
    tpot_ms: float
    output_tok_per_s: float


@dataclass(frozen=True, slots=True)
class GuidellmFigures:
    """One repeat of guidellm."""

    figures: Figures
    #: Median of guidellm's own `time_per_output_token_ms`, which is another quantity:
    #: (last token - request sent) / output tokens.
    own_tpot_ms: float
    #: Requests whose first chunk had a token without text, which guidellm's own time to first
    #: token passes over.
    textless_first: int


@dataclass(frozen=True, slots=True)
class Agreement:
    """One figure of qkit beside another tool's, over repeats."""

    ours: float
    theirs: float
    our_spread_percent: float
    their_spread_percent: float
    difference_percent: float
    limit_percent: float
    word: Word

    @property
    def verdict(self) -> str:
        """The word with its limit, and the repeats' spread where that is wider."""
        spread = max(self.our_spread_percent, self.their_spread_percent)
        limit = f"{self.limit_percent:.1f} %"
        noise = f"repeats spread over {spread:.1f} %"
        if self.word == "undecided":
            side = "within" if abs(self.difference_percent) <= self.limit_percent else "not within"
            return f"undecided: medians {side} {limit}, {noise}"
        return f"{self.word} {limit}" + (f"; {noise}" if spread > self.limit_percent else "")


class UnfitOutputError(ValueError):
    """A tool's output says that it did not measure what was asked for."""


def read_bench_serve(result: Mapping[str, Any], *, requests: int, output_tokens: int) -> Figures:
    """Return the figures of a result of `vllm bench serve`, whose definitions are qkit's.

    Raises:
        UnfitOutputError: Requests failed, or answers had another length.
    """
    _check("bench serve", int(result["completed"]), requests)
    if result["total_output_tokens"] != requests * output_tokens:
        raise UnfitOutputError(
            f"bench serve got {result['total_output_tokens']} tokens, "
            f"asked for {requests} times {output_tokens}"
        )
    return Figures(result["median_ttft_ms"], result["median_tpot_ms"], result["output_throughput"])


def read_guidellm(
    report: Mapping[str, Any],
    *,
    warmups: int,
    requests: int,
    input_tokens: int,
    output_tokens: int,
) -> GuidellmFigures:
    """Return the figures of a JSON report of guidellm 0.8, from its record of every request.

    Its summary is not used: it covers the warm-up too, and its time per output token begins when
    the request is sent. The first `warmups` requests by their start are left out here. The first
    token is the first event of the stream, since the completions endpoint sends no chunk ahead of
    it; the last is the last chunk with text. guidellm's times are those of the wall clock.

    Raises:
        UnfitOutputError: Requests failed, or prompts or answers had another length.
    """
    (benchmark,) = report["benchmarks"]
    records = sorted(
        benchmark["requests"]["successful"],
        key=lambda record: record["info"]["timings"]["request_start"],
    )
    _check("guidellm", len(records), warmups + requests)
    for record in records:
        lengths = record["prompt_tokens"], record["output_tokens"]
        if lengths != (input_tokens, output_tokens):
            raise UnfitOutputError(
                f"guidellm had a request of {lengths[0]} tokens in and {lengths[1]} out, "
                f"asked for {input_tokens} and {output_tokens}"
            )
    measured = records[warmups:]
    times = [record["info"]["timings"] for record in measured]
    first = [time["first_request_iteration"] for time in times]
    last = [time["last_token_iteration"] for time in times]
    start = [time["request_start"] for time in times]
    ttft_ms = [1000 * (f - s) for f, s in zip(first, start, strict=True)]
    tpot_ms = [1000 * (e - f) / (output_tokens - 1) for e, f in zip(last, first, strict=True)]
    return GuidellmFigures(
        Figures(
            statistics.median(ttft_ms),
            statistics.median(tpot_ms),
            output_tokens * len(measured) / (max(last) - min(start)),
        ),
        statistics.median(record["time_per_output_token_ms"] for record in measured),
        sum(time["first_token_iteration"] > time["first_request_iteration"] for time in times),
    )


def as_guidellm_tpot(figures: Figures, output_tokens: int) -> float:
    """Return what guidellm would call the time per output token: from sending, over all tokens.

    Made of two medians, so it is close to the median of the requests' own, not equal to it.
    """
    return (figures.ttft_ms + figures.tpot_ms * (output_tokens - 1)) / output_tokens


def spread_percent(values: Sequence[float]) -> float:
    """Return the range of repeats in percent of their median."""
    return 100 * (max(values) - min(values)) / statistics.median(values)


def agreement(
    ours: Sequence[float], theirs: Sequence[float], *, limit_percent: float | None = AGREE_PERCENT
) -> Agreement:
    """Compare the medians of two tools' repeats.

    Args:
        ours: qkit's figure, one a repeat.
        theirs: The other tool's.
        limit_percent: Largest difference. None: the larger of the two tools' spreads.

    Returns:
        The comparison. Its word is "undecided" where a tool differs from itself by more than a
        fixed limit, and by no less than from the other tool: then neither verdict would be sound.
    """
    mine, other = statistics.median(ours), statistics.median(theirs)
    spreads = spread_percent(ours), spread_percent(theirs)
    limit = max(spreads) if limit_percent is None else limit_percent
    difference = 100 * (mine - other) / other
    word: Word = "within"
    if abs(difference) > max(limit, *spreads):
        word = "not within"
    elif max(spreads) > limit:
        word = "undecided"
    return Agreement(mine, other, *spreads, difference, limit, word)


def _check(tool: str, got: int, asked: int) -> None:
    if got != asked:
        raise UnfitOutputError(f"{tool} completed {got} of {asked} requests")
