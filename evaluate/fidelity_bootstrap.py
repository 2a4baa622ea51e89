"""Bootstrap intervals of figures over tokens, by drawing their documents. Pure.

Tokens of a document depend on each other, so whole documents are drawn, with replacement, each
with all its tokens: the cluster bootstrap (Davison and Hinkley, Bootstrap Methods and their
Application, 1997, section 3.8), with percentile intervals. Resamples are the same for all figures
and variants of the same text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
RESAMPLES = 1000
SEED = 0
CONFIDENCE = 0.95
#: Resamples whose token weights are held at once.
CHUNK = 50
#: Fewer than this many units say nothing about their spread.
FEWEST_UNITS = 3


@dataclass(frozen=True)
class Bounds:
    """A figure and its interval; the interval is None where units are too few."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, eq=False)
class Bootstrap:
    """Resamples of a text's units.

    Args:
        unit: The unit each of N tokens belongs to, any integers.
    """

    unit: NDArray[np.int32]

    @cached_property
    def _index(self) -> NDArray[np.intp]:
        return np.unique(self.unit, return_inverse=True)[1].reshape(-1)

    @cached_property
    def _counts(self) -> Array:
        return np.bincount(self._index).astype(np.float64)

    @cached_property
    def _draws(self) -> Array:
        """How often each unit is drawn, RESAMPLES x units."""
        units = len(self._counts)
        random = np.random.default_rng(SEED)
        return random.multinomial(units, np.full(units, 1 / units), RESAMPLES).astype(np.float64)

    def mean(self, values: Array, then: Callable[[Array], Array] = np.asarray) -> Bounds:
        """Return a function of the mean of N values: `np.exp`, `np.sqrt`, or the mean itself."""
        sums = np.bincount(self._index, weights=values)
        resampled = (self._draws @ sums) / (self._draws @ self._counts)
        return self._bounds(float(then(np.asarray(values.mean()))), then(resampled))

    def quantile(self, values: Array, share: float) -> Bounds:
        """Return the smallest of N values that at least `share` of them do not exceed."""
        order = np.argsort(values, kind="stable")
        ranked, index = values[order], self._index[order]
        ones = np.ones((1, len(self._counts)))
        (value,) = _quantiles(ranked, index, ones, share)
        resampled = [
            _quantiles(ranked, index, self._draws[start : start + CHUNK], share)
            for start in range(0, RESAMPLES, CHUNK)
        ]
        return self._bounds(float(value), np.concatenate(resampled))

    def _bounds(self, value: float, resampled: Array) -> Bounds:
        if len(self._counts) < FEWEST_UNITS:
            return Bounds(value, None, None)
        tail = 100 * (1 - CONFIDENCE) / 2
        low, high = np.percentile(resampled, [tail, 100 - tail])
        return Bounds(value, float(low), float(high))


def _quantiles(ranked: Array, index: NDArray[np.intp], draws: Array, share: float) -> Array:
    """Return the quantile of each draw: `ranked` values, weighted by how often they are drawn."""
    reached = np.cumsum(draws[:, index], axis=1)
    enough = reached >= share * reached[:, -1:] - 1e-9
    return np.asarray(ranked[enough.argmax(axis=1)])
