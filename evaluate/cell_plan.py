"""What is sent at a level: how many requests, with which prompts, and when. Pure."""

from __future__ import annotations

import hashlib
import math

from qkit.evaluate.load import Load, Unit
from qkit.evaluate.prompts import CellPrompts, Vocabulary, plan_prompts
from qkit.evaluate.schedule import arrival_times, ramp_delays
from qkit.levels import Level
from qkit.suites import BenchSuite

#: An open loop is warmed up for so long at its own rate.
_WARMUP_S = 3.0


class CellPlanner:
    """Prompts and schedules of a suite's cells, each a function of the suite, level and repeat.

    The first repeats of the named closed-loop levels are drawn together, so that no prompt comes
    twice among them. Any other cell has a seed of its own.
    """

    def __init__(self, suite: BenchSuite, vocabulary: Vocabulary) -> None:
        self._suite = suite
        self._vocabulary = vocabulary
        named: tuple[CellPrompts, ...]
        if suite.rates:
            named = tuple(self._draw(level, 0) for level in suite.levels)
        else:
            named = plan_prompts(suite, vocabulary)
        self._named = dict(zip(suite.levels, named, strict=True))

    @property
    def named(self) -> tuple[CellPrompts, ...]:
        """The prompts of every named level's first repeat."""
        return tuple(self._named.values())

    def prompts(self, level: Level, repeat: int) -> CellPrompts:
        """Return the prompts of one repeat of a level."""
        if repeat == 0 and level in self._named:
            return self._named[level]
        return self._draw(level, repeat)

    def load(self, level: Level, repeat: int, url: str, units: tuple[Unit, ...]) -> Load:
        """Return when the units of one repeat are sent; a warm-up has the repeat -1."""
        suite = self._suite
        closed = level.concurrency is not None
        return Load(
            url=url,
            units=units,
            timeout_s=suite.timeout_s,
            concurrency=level.concurrency,
            delays_s=ramp_delays(level.concurrency, suite.ramp_s) if level.concurrency else (),
            due_s=()
            if closed
            else arrival_times(
                len(units), level.value, suite.arrival, _seed_text(suite, level, repeat)
            ),
            max_in_flight=None if closed else suite.max_in_flight,
        )

    def _draw(self, level: Level, repeat: int) -> CellPrompts:
        warmup, measured = _counts(self._suite, level)
        settings = {
            "seed": _seed(self._suite, level, repeat),
            "rates": (),
            "concurrency": (warmup,),
            "min_requests": measured,
            "requests_per_slot": 1,
        }
        (cell,) = plan_prompts(self._suite.model_copy(update=settings), self._vocabulary)
        return cell


def _counts(suite: BenchSuite, level: Level) -> tuple[int, int]:
    """Return the requests of a warm-up and of a repeat at a level."""
    if level.concurrency is not None:
        slots = level.concurrency
        return slots, max(suite.min_requests, suite.requests_per_slot * slots)
    measured = max(suite.min_requests, round(level.value * suite.duration_s))
    return min(measured, math.ceil(level.value * _WARMUP_S)), measured


def _seed_text(suite: BenchSuite, level: Level, repeat: int) -> str:
    return f"{suite.seed}/{level.name}/{repeat}"


def _seed(suite: BenchSuite, level: Level, repeat: int) -> int:
    """Return a seed of a cell's own; the first repeat of a closed loop has the suite's."""
    if repeat == 0 and not level.is_open:
        return suite.seed
    digest = hashlib.sha256(_seed_text(suite, level, repeat).encode()).digest()
    return int.from_bytes(digest[:6], "big")
