"""How throughput and latency grow with concurrency, against concurrency 1. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qkit.evaluate.figures import ratio


@dataclass(frozen=True, slots=True)
class LevelFigures:
    """What is known of a concurrency level; None where it has no figure."""

    concurrency: int
    output_tok_per_s: float | None
    ttft_ms_p50: float | None
    tpot_ms_p50: float | None


@dataclass(frozen=True, slots=True)
class Scaling:
    """A level over concurrency 1; None where either has no figure."""

    concurrency: int
    #: Tokens per second over those at concurrency 1.
    throughput: float | None
    #: `throughput` / concurrency: 1 is perfect scaling.
    efficiency: float | None
    #: Of the medians.
    ttft: float | None
    #: Of the medians.
    tpot: float | None


def scaling(levels: Sequence[LevelFigures]) -> tuple[Scaling, ...]:
    """Return how each level compares with concurrency 1, in the order of the levels.

    Without a level of concurrency 1, nothing is known.
    """
    one = next((level for level in levels if level.concurrency == 1), None)
    return tuple(_against(level, one) for level in levels)


def _against(level: LevelFigures, one: LevelFigures | None) -> Scaling:
    throughput = ratio(level.output_tok_per_s, one.output_tok_per_s) if one else None
    return Scaling(
        concurrency=level.concurrency,
        throughput=throughput,
        efficiency=None if throughput is None else throughput / level.concurrency,
        ttft=ratio(level.ttft_ms_p50, one.ttft_ms_p50) if one else None,
        tpot=ratio(level.tpot_ms_p50, one.tpot_ms_p50) if one else None,
    )
