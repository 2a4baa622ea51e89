"""Levels, arrival times, repeats and the search for the largest load: pure, against known truth."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping

import pytest
from fakes.tokenizers_for_tests import write_byte_tokenizer
from pydantic import ValidationError
from scipy import stats

from qkit.evaluate.cell_plan import CellPlanner
from qkit.evaluate.clients import Clients, split
from qkit.evaluate.load import Load
from qkit.evaluate.load_search import RATE_RATIO_MIN, bracket, conclude, next_level
from qkit.evaluate.repeats import half_width_percent, interval_95, is_enough
from qkit.evaluate.schedule import arrival_times, ramp_delays
from qkit.evaluate.workloads.vocabulary import load_vocabulary
from qkit.levels import Level, names
from qkit.suites import BenchSuite

# Levels


def test_a_level_is_named_by_what_it_is() -> None:
    assert Level(concurrency=16).name == "concurrency 16"
    assert Level(request_rate=2.5).name == "rate 2.5 req/s"
    assert names([Level(1), Level(4)]) == "concurrency 1, 4"
    assert names([Level(None, 0.5), Level(None, 2)]) == "rate 0.5, 2 req/s"
    assert Level(1) != Level(request_rate=1)
    with pytest.raises(ValueError, match="a level has"):
        _ = Level().value


def test_a_suite_is_a_closed_or_an_open_loop() -> None:
    assert BenchSuite().levels == tuple(map(Level, (1, 2, 4, 8, 16)))
    assert BenchSuite(rates=(0.5, 2)).levels == (Level(None, 0.5), Level(None, 2.0))
    for wrong, words in (
        ({"rates": (1,), "concurrency": (1,)}, "either `concurrency`"),
        ({"rates": (0,)}, "greater than 0"),
        ({"rates": (1, 1)}, "names a level twice"),
        ({"repeats": 3, "max_repeats": 2}, "max_repeats 2 is below repeats 3"),
    ):
        with pytest.raises(ValidationError, match=words):
            BenchSuite.model_validate(wrong)


# Arrivals


def test_constant_arrivals_are_evenly_spaced() -> None:
    assert arrival_times(4, 2.0, "constant", "any") == (0.0, 0.5, 1.0, 1.5)


def test_poisson_gaps_are_exponential() -> None:
    n, rate = 20_000, 8.0
    times = arrival_times(n, rate, "poisson", "seed")
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = statistics.fmean(gaps)
    # An exponential distribution has mean and deviation 1 / rate; five standard errors.
    assert mean == pytest.approx(1 / rate, rel=5 / math.sqrt(n))
    assert statistics.stdev(gaps) / mean == pytest.approx(1.0, rel=5 * math.sqrt(2 / n))
    assert stats.kstest(gaps, "expon", args=(0, 1 / rate)).pvalue > 0.001


def test_poisson_counts_have_the_variance_of_their_mean() -> None:
    times = arrival_times(20_000, 10.0, "poisson", "seed")
    counts = [0] * int(times[-1])
    for moment in times:
        if moment < len(counts):
            counts[int(moment)] += 1
    assert statistics.fmean(counts) == pytest.approx(10, rel=0.03)
    assert statistics.variance(counts) == pytest.approx(10, rel=0.15)


def test_arrivals_depend_on_their_seed_alone() -> None:
    assert arrival_times(5, 1.0, "poisson", "a") == arrival_times(5, 1.0, "poisson", "a")
    assert arrival_times(5, 1.0, "poisson", "a") != arrival_times(5, 1.0, "poisson", "b")
    # In units of the mean gap, the same at every rate.
    fast, slow = (arrival_times(5, rate, "poisson", "a") for rate in (10.0, 1.0))
    assert [10 * moment for moment in fast] == pytest.approx(slow)


def test_a_ramp_spreads_the_slots_starts() -> None:
    assert ramp_delays(4, 2.0) == (0.0, 0.5, 1.0, 1.5)
    assert ramp_delays(3, 0.0) == (0.0, 0.0, 0.0)


# Prompts of cells


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    return load_vocabulary(write_byte_tokenizer(tmp_path_factory.mktemp("t"), words=True))


def test_every_repeat_and_level_has_prompts_of_its_own(vocabulary) -> None:  # type: ignore[no-untyped-def]
    suite = BenchSuite(concurrency=(2, 4), min_requests=6, requests_per_slot=1, input_tokens=24)
    planner = CellPlanner(suite, vocabulary)
    cells = [planner.prompts(Level(level), repeat) for level in (2, 4, 8) for repeat in range(3)]
    prompts = [prompt for cell in cells for prompt in (*cell.warmup, *cell.measured)]
    assert len(set(prompts)) == len(prompts)
    assert [len(cell.measured) for cell in cells] == [6] * 6 + [8] * 3
    again = CellPlanner(suite, vocabulary)
    assert again.prompts(Level(8), 2) == cells[-1]


def test_an_open_loop_sends_for_its_duration(vocabulary) -> None:  # type: ignore[no-untyped-def]
    suite = BenchSuite(
        rates=(0.5, 20.0), duration_s=4, min_requests=5, input_tokens=16, arrival="constant"
    )
    planner = CellPlanner(suite, vocabulary)
    slow, fast = (planner.prompts(level, 0) for level in suite.levels)
    assert (len(slow.measured), len(fast.measured)) == (5, 80)
    assert (len(slow.warmup), len(fast.warmup)) == (2, 60)
    bodies = tuple((b"x",) for _ in fast.measured)
    load = planner.load(suite.levels[1], 0, "url", fast.measured, bodies)
    assert (load.concurrency, load.due_s[:3]) == (None, (0.0, 0.05, 0.1))


# Client processes


def test_a_load_is_dealt_out_whole() -> None:
    units = tuple((bytes([k]),) for k in range(7))
    load = Load("url", units, 1.0, concurrency=5, delays_s=(0.0, 0.1, 0.2, 0.3, 0.4))
    parts = split(load, 2)
    assert sorted(unit for part in parts for unit in part.units) == sorted(units)
    assert [part.concurrency for part in parts] == [3, 2]
    assert [part.delays_s for part in parts] == [(0.0, 0.2, 0.4), (0.1, 0.3)]
    opened = Load("url", units, 1.0, None, due_s=tuple(map(float, range(7))), max_in_flight=3)
    assert [part.due_s for part in split(opened, 2)] == [(0, 2, 4, 6), (1, 3, 5)]
    assert [part.max_in_flight for part in split(opened, 2)] == [2, 1]


def test_processes_are_counted_by_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    auto = Clients("auto")
    assert [auto.processes(streams) for streams in (1, 250, 251, 1000, 10_000)] == [1, 1, 2, 4, 8]
    assert auto.add(16)
    assert auto.processes(16) == 2
    assert Clients(3).processes(1) == 3
    assert not Clients(3).add(1)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    assert not Clients("auto").add(1000)


# Repeats


def test_the_interval_is_students() -> None:
    # Mean 10, standard deviation 1, n = 4: t(0.975, 3) = 3.182, half width 1.591.
    values = [9.0, 11.0, 10 - math.sqrt(0.5), 10 + math.sqrt(0.5)]
    assert interval_95(values) == pytest.approx((10 - 1.5912, 10 + 1.5912), abs=1e-3)
    assert half_width_percent(values) == pytest.approx(15.91, abs=0.01)


def test_one_repeat_or_an_unknown_one_has_no_interval() -> None:
    assert interval_95([10.0]) is None
    assert interval_95([10.0, None, 10.0]) is None
    assert half_width_percent([]) is None


def test_repeats_end_when_every_figure_is_known_well_enough() -> None:
    steady, spread = [100.0, 101.0, 100.5], [10.0, 13.0, 9.0]
    assert is_enough([steady, steady], 5.0)
    assert not is_enough([steady, spread], 5.0)
    assert not is_enough([[100.0], [10.0]], 5.0)
    assert is_enough([steady, [None, None, None]], 5.0)  # single tokens have no TPOT
    assert not is_enough([[None, None]], 5.0)


# The search


def search(
    named: list[Level], meets: Callable[[float], bool], cells: int
) -> dict[Level, bool | None]:
    verdicts: dict[Level, bool | None] = {level: meets(level.value) for level in named}
    for _ in range(cells):
        level = next_level(verdicts)
        if level is None:
            break
        assert level not in verdicts
        verdicts[level] = meets(level.value)
    return verdicts


@pytest.mark.parametrize("truth", [1, 2, 3, 7, 8, 23, 24, 100])
def test_the_largest_concurrency_is_found_exactly(truth: int) -> None:
    verdicts = search([Level(1), Level(2)], lambda value: value <= truth, cells=20)
    found = conclude("ttft_p95<1ms", verdicts)
    assert (found.outcome, found.largest_load) == ("found", truth)
    assert (found.highest_met, found.lowest_unmet) == (truth, truth + 1)
    assert found.over == "concurrency"


@pytest.mark.parametrize("truth", [0.6, 3.3, 47.0])
def test_the_largest_rate_is_found_to_a_tenth(truth: float) -> None:
    verdicts = search([Level(None, 0.5), Level(None, 1.0)], lambda v: v <= truth, cells=30)
    found = conclude("ttft_p95<1ms", verdicts)
    assert found.over == "request_rate"
    assert found.highest_met is not None
    assert found.lowest_unmet is not None
    assert found.highest_met <= truth < found.lowest_unmet
    assert found.lowest_unmet / found.highest_met <= RATE_RATIO_MIN


def test_loads_beyond_what_was_tried_are_outcomes_not_numbers() -> None:
    low = conclude("x", search([Level(4), Level(8)], lambda _: False, cells=5))
    assert (low.outcome, low.largest_load, low.lowest_unmet) == ("not met at the lowest", None, 4)
    assert low.tried == (4, 8)  # nothing below the lowest is tried
    high = conclude("x", search([Level(4)], lambda _: True, cells=2))
    assert (high.outcome, high.largest_load) == ("met at the highest tried", None)
    assert (high.highest_met, high.tried) == (16, (4, 8, 16))


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ({1: True, 2: False, 4: True}, (1, 2)),  # luck above a failure is not counted
        ({1: True, 2: None, 4: True}, (1, 2)),  # nor is a load that could not be judged
        ({1: False}, (None, 1)),
    ],
)
def test_the_bracket_ends_at_the_first_failure(
    verdicts: Mapping[int, bool | None], expected: tuple[int | None, int | None]
) -> None:
    met, unmet = bracket({Level(level): met for level, met in verdicts.items()})
    assert (met and met.concurrency, unmet and unmet.concurrency) == expected
