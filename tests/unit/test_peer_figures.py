"""What scripts/bench_peers.py reads of other load generators, from small outputs of their form."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
#: Asked of both tools: requests, tokens in and out.
ASKED = {"requests": 3, "output_tokens": 5}
LONG_AGO = 1_796_100_000.0  # guidellm writes Unix time


@pytest.fixture(scope="module")
def peers() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        return importlib.import_module("peer_figures")


def guidellm_record(start: float, first: float, last: float, *, text: float | None = None) -> Any:
    """One request as guidellm 0.8.1 writes it (seconds; fields nobody reads are left out)."""
    return {
        "type_": "generative_request_stats",
        "info": {
            "status": "completed",
            "timings": {
                "request_start": LONG_AGO + start,
                "first_request_iteration": LONG_AGO + first,
                "first_token_iteration": LONG_AGO + (first if text is None else text),
                "last_token_iteration": LONG_AGO + last,
                "last_request_iteration": LONG_AGO + last + 0.0001,
                "request_end": LONG_AGO + last + 0.001,
            },
        },
        "prompt_tokens": 8,
        "output_tokens": 5,
        "time_per_output_token_ms": 1000 * (last - start) / 5,
    }


@pytest.fixture
def report() -> Any:
    """Two requests of warm-up, one of them slow, then three; not in order, as guidellm has them."""
    return {
        "benchmarks": [
            {
                "requests": {
                    "successful": [
                        guidellm_record(2.02, 2.07, 2.15),
                        guidellm_record(0.0, 0.9, 1.9),
                        guidellm_record(2.0, 2.03, 2.11),
                        guidellm_record(0.01, 0.05, 1.95),
                        guidellm_record(2.12, 2.16, 2.36),
                    ],
                    "errored": [],
                    "incomplete": [],
                }
            }
        ]
    }


def read(peers: ModuleType, report: Any, **changes: int) -> Any:
    return peers.read_guidellm(report, **{"warmups": 2, "input_tokens": 8, **ASKED, **changes})


def records(report: Any) -> Any:
    return report["benchmarks"][0]["requests"]["successful"]


def test_guidellm_in_our_definitions(peers, report):
    found = read(peers, report)
    assert found.figures.ttft_ms == pytest.approx(40, abs=0.01)  # 30, 50, 40
    assert found.figures.tpot_ms == pytest.approx(20, abs=0.01)  # 80 / 4, 80 / 4, 200 / 4
    # From the first start to the last token, the warm-up's requests left out.
    assert found.figures.output_tok_per_s == pytest.approx(15 / 0.36, rel=1e-4)
    assert found.textless_first == 0


def test_guidellms_own_time_per_token_is_another_quantity(peers, report):
    found = read(peers, report)
    assert found.own_tpot_ms == pytest.approx(26)  # 110 / 5, 130 / 5, 240 / 5
    # The same conversion of our figures, for requests that are all alike.
    assert peers.as_guidellm_tpot(peers.Figures(50, 20, 1), 5) == pytest.approx(26)


def test_chunks_without_text_count_as_tokens(peers, report):
    records(report)[0] = guidellm_record(2.02, 2.07, 2.15, text=2.09)
    records(report)[1] = guidellm_record(0.0, 0.9, 1.9, text=1.0)  # warm-up: not counted
    found = read(peers, report)
    assert found.textless_first == 1
    assert found.figures.ttft_ms == pytest.approx(40, abs=0.01)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("output_tokens", 4, "8 tokens in and 4 out"),
        ("output_tokens", None, "8 tokens in and None out"),
        ("prompt_tokens", 9, "9 tokens in and 5 out"),
    ],
)
def test_other_lengths_are_refused(peers, report, field, value, message):
    records(report)[2][field] = value
    with pytest.raises(peers.UnfitOutputError, match=message):
        read(peers, report)


def test_failed_requests_are_refused(peers, report):
    failed = records(report).pop()
    report["benchmarks"][0]["requests"]["errored"].append(failed)
    with pytest.raises(peers.UnfitOutputError, match="completed 4 of 5"):
        read(peers, report)


BENCH_SERVE = {
    "completed": 3,
    "failed": 0,
    "total_output_tokens": 15,
    "output_throughput": 41.7,
    "mean_ttft_ms": 44.0,
    "median_ttft_ms": 40.0,
    "mean_tpot_ms": 31.0,
    "median_tpot_ms": 20.0,
}


def test_bench_serve(peers):
    assert peers.read_bench_serve(BENCH_SERVE, **ASKED) == peers.Figures(40.0, 20.0, 41.7)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"completed": 2}, "completed 2 of 3"), ({"total_output_tokens": 14}, "14 tokens")],
)
def test_bench_serve_that_measured_something_else(peers, change, message):
    with pytest.raises(peers.UnfitOutputError, match=message):
        peers.read_bench_serve({**copy.deepcopy(BENCH_SERVE), **change}, **ASKED)


@pytest.mark.parametrize(
    ("ours", "theirs", "limit", "verdict"),
    [
        ([10.0, 10.1, 10.2], [10.0, 10.3, 10.4], 5.0, "within 5.0 %"),
        (
            [10.0, 10.4, 10.9],
            [10.0, 10.1, 10.2],
            5.0,
            "undecided: medians within 5.0 %, repeats spread over 8.7 %",
        ),
        (
            [10.9, 11.7, 11.8],
            [10.0, 10.1, 10.2],
            5.0,
            "not within 5.0 %; repeats spread over 7.7 %",
        ),
        ([10.9, 11.0, 11.1], [10.0, 10.1, 10.2], 5.0, "not within 5.0 %"),
        (
            [9.0, 11.0, 11.1],
            [10.0, 10.1, 10.2],
            5.0,
            "undecided: medians not within 5.0 %, repeats spread over 19.1 %",
        ),
        ([9.0, 11.0, 11.1], [10.0, 10.1, 10.2], None, "within 19.1 %"),
        ([10.4, 10.4, 10.4], [10.0, 10.1, 10.2], None, "not within 2.0 %"),
    ],
)
def test_verdicts(peers, ours, theirs, limit, verdict):
    assert peers.agreement(ours, theirs, limit_percent=limit).verdict == verdict


def test_difference_is_that_of_medians(peers):
    found = peers.agreement([8.0, 9.0, 30.0], [10.0, 10.0, 10.0])
    assert (found.ours, found.theirs) == (9.0, 10.0)
    assert found.difference_percent == pytest.approx(-10)
    assert found.our_spread_percent == pytest.approx(100 * 22 / 9)
    assert found.their_spread_percent == 0
