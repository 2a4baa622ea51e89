"""How many requests to keep in flight: as many as the server works on at once, and few waiting.

A server that computes one thing at a time gains nothing from a long queue, and one that batches
hundreds starves with a short one. vLLM says in `/metrics` how many requests it runs and how many
wait. The limit doubles while none waits, as TCP's does at the start, shrinks towards what the
server runs once a queue builds up, and then grows by small steps (additive increase,
multiplicative decrease: Chiu and Jain, 1989). Which request goes next stays the prefix scheduler's
business.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Requests in flight at first, where the server's own limit is not known.
START = 32
#: The limit is never cut below this: short requests come and go between two looks at the server.
LEAST = 8
#: More than any server batches; one process has to hold them all.
MOST = 512
#: Waiting requests, as a share of the running ones, that keep the batch full between two replies.
QUEUE_SHARE = 0.25
#: What a cut leaves of the limit at least.
CUT_SHARE = 0.75
#: Growth after the first cut, as a share of the limit.
STEP_SHARE = 0.125
#: A reply that takes this share of the time-out means that too much is in flight.
SLOW_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Load:
    """What the server says it is doing; None where it does not say."""

    running: float | None = None
    waiting: float | None = None


class ConcurrencyLimit:
    """The number of requests to keep in flight.

    Args:
        start: Limit at first.
        most: Limit never passed.
        timeout_s: Seconds of silence after which a request has failed.
    """

    def __init__(self, start: int = START, *, most: int = MOST, timeout_s: float = 600.0) -> None:
        self.value = max(1, min(start, most))
        self._most = most
        self._timeout_s = timeout_s
        self._probing = True
        self._slowest_s = 0.0

    def replied(self, seconds: float) -> None:
        """Say how long a reply took."""
        self._slowest_s = max(self._slowest_s, seconds)

    def observe(self, load: Load, in_flight: int) -> None:
        """Adapt the limit to the server's load, and to the slowest reply since the last call.

        Args:
            load: What the server says.
            in_flight: Requests of ours it has now.
        """
        slowest, self._slowest_s = self._slowest_s, 0.0
        if slowest > SLOW_SHARE * self._timeout_s:
            self._cut(self.value // 2)
        elif load.running is None or load.waiting is None:
            return
        elif load.waiting > max(1.0, QUEUE_SHARE * load.running):
            self._cut(
                max(math.ceil(CUT_SHARE * self.value), math.ceil((1 + QUEUE_SHARE) * load.running))
            )
        elif load.waiting == 0 and in_flight >= self.value:
            step = self.value if self._probing else math.ceil(STEP_SHARE * self.value)
            self.value = min(self.value + step, self._most)

    def _cut(self, value: int) -> None:
        self._probing = False
        self.value = min(self.value, max(LEAST, value))


def starting_limit(flags: tuple[str, ...]) -> int:
    """Return the limit to start with on a server of these flags.

    Where `--max-num-seqs` says how many requests it runs at once, that and a short queue.
    """
    for position, flag in enumerate(flags):
        name, _, value = flag.partition("=")
        if name == "--max-num-seqs":
            value = value or next(iter(flags[position + 1 :]), "")
            if value.isdecimal() and int(value):
                return min(MOST, math.ceil((1 + QUEUE_SHARE) * int(value)))
    return START
