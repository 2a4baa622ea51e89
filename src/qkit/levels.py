"""A level of a benchmark's load: how much of it, and what it is called wherever it is shown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, order=True, slots=True)
class Level:
    """One load: requests kept in flight (closed loop), or requests sent a second (open loop).

    Exactly one of the two is set. Levels are equal, and so paired between variants, when both
    agree.
    """

    concurrency: int | None = None
    request_rate: float | None = None

    @property
    def value(self) -> float:
        """The number, whichever it is."""
        found = self.request_rate if self.concurrency is None else self.concurrency
        if found is None:
            raise ValueError("a level has a concurrency or a request rate")
        return found

    @property
    def is_open(self) -> bool:
        """Whether requests are sent by the clock and not when others have ended."""
        return self.concurrency is None

    @property
    def figure(self) -> str:
        """The number alone: "16", or "2.5"."""
        return f"{self.value:g}"

    @property
    def name(self) -> str:
        """Its name: "concurrency 16", or "rate 2.5 req/s"."""
        return names([self])


def names(levels: Iterable[Level]) -> str:
    """Name several levels of one kind: "concurrency 1, 2, 4", or "rate 0.5, 1 req/s"."""
    found = list(levels)
    figures = ", ".join(level.figure for level in found)
    if any(level.is_open for level in found):
        return f"rate {figures} req/s"
    return f"concurrency {figures}"
