"""Objectives: how they are read, when a cell meets one and when a request keeps it."""

from __future__ import annotations

import re

import pytest

from qkit.evaluate.slo import Limit, Objective, parse_objective, statistic_of
from qkit.suites import BenchSuite


def test_limits_are_read_with_their_units() -> None:
    objective = parse_objective("ttft_p95<200ms, tpot_mean < 0.03s,e2e_p99<=2s")
    assert objective.limits == (
        Limit("ttft", "p95", 200.0),
        Limit("tpot", "mean", 30.0),
        Limit("e2e", "p99", 2000.0),
    )
    assert parse_objective(str(objective)) == objective


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "an objective without a limit"),
        ("ttft_p95", "'ttft_p95' is not a limit; write it as ttft_p95<200ms"),
        ("ttft_p95>200ms", "is not a limit"),
        ("ttft<200ms", "is not a limit"),
        ("latency_p95<200ms", "unknown metric 'latency'; there are ttft, tpot, itl, e2e"),
        ("ttft_p75<200ms", "unknown statistic 'p75'; there are mean, p50, p90, p95, p99"),
        ("ttft_p95<200", "the limit needs a unit, ms or s, not 'none'"),
        ("ttft_p95<200us", "the limit needs a unit, ms or s, not 'us'"),
        ("ttft_p95<1.2.3ms", "'1.2.3' is not a number"),
        ("ttft_p95<0ms", "must be above 0"),
        ("ttft_p95<1ms,ttft_p95<2ms", "ttft_p95 is limited twice"),
    ],
)
def test_what_cannot_be_read_says_why(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        parse_objective(text)


BOTH = parse_objective("ttft_p95<200ms,tpot_p50<30ms")


@pytest.mark.parametrize(
    ("ttft", "tpot", "met"),
    [
        (199.9, 29.9, True),
        (200.0, 29.9, False),  # below means below
        (199.9, 30.1, False),
        (None, 29.9, None),
        (None, 30.1, False),  # broken, whatever the other is
    ],
)
def test_a_cell_meets_all_limits_or_none_is_known(
    ttft: float | None, tpot: float | None, met: bool | None
) -> None:
    figures = {("ttft", "p95"): ttft, ("tpot", "p50"): tpot}
    assert BOTH.is_met(lambda metric, statistic: figures[metric, statistic]) is met


def test_a_request_keeps_the_limits_by_its_own_figures() -> None:
    def kept(objective: Objective, **figures: list[float]) -> bool:
        return objective.is_kept(lambda metric: figures[metric])

    assert kept(BOTH, ttft=[150.0], tpot=[29.0])
    assert not kept(BOTH, ttft=[250.0], tpot=[29.0])
    assert kept(BOTH, ttft=[150.0], tpot=[])  # a single token has no TPOT to break
    gaps = [10.0] * 9 + [100.0]
    assert not kept(parse_objective("itl_p95<40ms"), itl=gaps)
    assert kept(parse_objective("itl_p50<40ms"), itl=gaps)


def test_statistics_of_one_requests_gaps() -> None:
    assert statistic_of([3.0, 1.0, 2.0], "mean") == 2.0
    assert statistic_of([3.0, 1.0, 2.0, 4.0], "p50") == 2.5
    assert statistic_of([7.0], "p99") == 7.0


def test_a_suite_keeps_its_objective_and_refuses_too_few_requests() -> None:
    assert BenchSuite(slo="ttft_p95<0.2s").slo == "ttft_p95<200ms"
    with pytest.raises(ValueError, match="p99 needs 100 requests; raise min_requests"):
        BenchSuite(slo="ttft_p99<1s", min_requests=50)
