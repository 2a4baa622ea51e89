"""When requests are sent: arrivals of an open loop, staggered starts of a closed one. Pure."""

from __future__ import annotations

import math
import random
from typing import Literal

Arrival = Literal["poisson", "constant"]


def arrival_times(n: int, rate: float, arrival: Arrival, seed: str) -> tuple[float, ...]:
    """Return when each of n requests is due, in seconds after the first, which is due at 0.

    "constant" sends one every 1 / rate seconds. "poisson" draws the gaps from an exponential
    distribution (mean 1 / rate, coefficient of variation 1), which is how independent users
    arrive. The gaps are not rescaled, so that they stay independent; the rate that was really
    offered differs from `rate` by about 1 / sqrt(n) of it.

    Args:
        n: Requests.
        rate: Requests a second, above 0.
        arrival: The gaps' distribution.
        seed: Equal seeds give equal times, in every version of Python.
    """
    if arrival == "constant":
        return tuple(index / rate for index in range(n))
    rng = random.Random(seed)
    times, now = [], 0.0
    for _ in range(n):
        times.append(now)
        # Not expovariate, whose algorithm is not promised to stay.
        now -= math.log(1.0 - rng.random()) / rate
    return tuple(times)


def ramp_delays(slots: int, ramp_s: float) -> tuple[float, ...]:
    """Return how long each slot of a closed loop waits before its first request.

    The starts are spread evenly over `ramp_s`, so that the server is not hit by all prompts at
    one moment and answers do not stay in step.
    """
    return tuple(ramp_s * slot / slots for slot in range(slots))
