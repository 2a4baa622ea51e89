"""What is sent at a level: how many requests, with which prompts, and when. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from qkit.evaluate.load import Bodies, Load
from qkit.evaluate.prompts import draw_cell, requests_at, source_of
from qkit.evaluate.schedule import arrival_times, ramp_delays
from qkit.evaluate.workloads.units import CellPrompts, Unit
from qkit.evaluate.workloads.vocabulary import Vocabulary
from qkit.levels import Level
from qkit.suites import BenchSuite

#: An open loop is warmed up for so long at its own rate.
_WARMUP_S = 3.0


class CellPlanner:
    """Prompts and schedules of a suite's cells, each a function of the suite, level and repeat.

    All cells are drawn from one source, so that no prompt comes twice among them unless that is
    the workload's point.

    Raises:
        InputError: The workload's file cannot be used, or the workload does not give that many
            different prompts.
    """

    def __init__(
        self, suite: BenchSuite, vocabulary: Vocabulary, *, max_model_len: int | None = None
    ) -> None:
        self._suite = suite
        self._source = source_of(suite, vocabulary, max_model_len)
        self._named = {level: self._draw(level, 0) for level in suite.levels}

    @property
    def named(self) -> tuple[CellPrompts, ...]:
        """The prompts of every named level's first repeat."""
        return tuple(self._named.values())

    @property
    def description(self) -> str:
        """The workload in one line."""
        return self._source.description

    @property
    def hits_expected(self) -> bool:
        """Whether the prefix cache is meant to answer for a part of the prompts."""
        return self._source.hits_expected

    def prompts(self, level: Level, repeat: int) -> CellPrompts:
        """Return the prompts of one repeat of a level."""
        if repeat == 0 and level in self._named:
            return self._named[level]
        return self._draw(level, repeat)

    def load(
        self,
        level: Level,
        repeat: int,
        url: str,
        units: Sequence[Unit],
        bodies: tuple[Bodies, ...],
    ) -> Load:
        """Return when the units of one repeat are sent; a warm-up has the repeat -1.

        An open loop over a trace keeps the trace's own gaps, scaled to the level's rate.
        """
        suite = self._suite
        slots = level.concurrency
        return Load(
            url=url,
            units=bodies,
            timeout_s=suite.timeout_s,
            concurrency=slots,
            delays_s=ramp_delays(slots, suite.ramp_s) if slots else (),
            due_s=() if slots else self._due(level, repeat, units),
            max_in_flight=None if slots else suite.max_in_flight,
        )

    def _due(self, level: Level, repeat: int, units: Sequence[Unit]) -> tuple[float, ...]:
        recorded = [unit.at_s for unit in units if unit.at_s is not None]
        span = recorded[-1] - recorded[0] if recorded else 0.0
        if len(recorded) == len(units) and span > 0:
            # n requests have n - 1 gaps, and their mean is to be 1 / rate.
            scale = (len(units) - 1) / level.value / span
            return tuple((moment - recorded[0]) * scale for moment in recorded)
        seed = f"{self._suite.seed}/{level.name}/{repeat}"
        return arrival_times(len(units), level.value, self._suite.arrival, seed)

    def _draw(self, level: Level, repeat: int) -> CellPrompts:
        suite, slots = self._suite, level.concurrency
        # The first repeat of a closed loop is named by its concurrency alone.
        name = str(slots) if slots and repeat == 0 else f"{level.name}/{repeat}"
        if slots:
            return draw_cell(self._source, name, slots, slots, requests_at(suite, slots))
        measured = max(suite.min_requests, round(level.value * suite.duration_s))
        warmup = min(measured, math.ceil(level.value * _WARMUP_S))
        return draw_cell(self._source, name, warmup, 1, measured)
