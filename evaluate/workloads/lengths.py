"""Draws lengths from the distributions a recipe may name. Pure: the generator is given."""

from __future__ import annotations

import math
import random

from qkit.workloads import Fixed, Length, LogNormal, Normal, Uniform


def draw_length(length: Length, rng: random.Random, *, at_most: int) -> int:
    """Return one length in tokens.

    Normal and log-normal lengths are rounded and clipped to the distribution's own bounds. All
    but fixed ones are then clipped to `at_most`; a fixed length is what was asked for or an error,
    which the caller gives.

    Args:
        length: The distribution.
        rng: Where chance comes from.
        at_most: The largest length that can be served, at least 1.
    """
    match length:
        case Fixed():
            return length.tokens
        case Uniform():
            drawn = rng.randint(length.low, length.high)
        case Normal():
            drawn = _clipped(rng.normalvariate(length.mean, length.std), length)
        case LogNormal():
            mu, sigma = log_parameters(length.mean, length.std)
            drawn = _clipped(rng.lognormvariate(mu, sigma), length)
    return max(1, min(drawn, at_most))


def log_parameters(mean: float, std: float) -> tuple[float, float]:
    """Return mu and sigma of the log-normal distribution with this mean and standard deviation.

    From E = exp(mu + sigma² / 2) and Var = (exp(sigma²) - 1) E².
    """
    variance = math.log1p((std / mean) ** 2)
    return math.log(mean) - variance / 2, math.sqrt(variance)


def describe(length: Length) -> str:
    """Return a length in words, without a unit: `512`, `100 to 500`, `512 ± 128 (lognormal)`."""
    match length:
        case Fixed():
            return str(length.tokens)
        case Uniform():
            return f"{length.low} to {length.high} (uniform)"
        case Normal() | LogNormal():
            return f"{length.mean:g} ± {length.std:g} ({length.shape})"


def _clipped(value: float, length: Normal | LogNormal) -> int:
    high = math.inf if length.high is None else length.high
    return round(max(length.low, min(value, high)))
