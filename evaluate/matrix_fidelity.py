"""Fidelity in the matrix: a variant's distance from the baseline on a fixed text. Pure."""

from __future__ import annotations

import statistics

import numpy as np

from qkit.evaluate.fidelity_bootstrap import Bootstrap, Bounds
from qkit.evaluate.fidelity_metrics import (
    divergence,
    first_differences,
    probability_changes,
    top1_agreement,
)
from qkit.evaluate.fidelity_scores import Scores
from qkit.evaluate.figures import figure
from qkit.evaluate.matrix_values import Distance, Estimate, Fidelity, Greedy
from qkit.evaluate.pairing import Pairing, VariantInput
from qkit.measurements import FidelityResult
from qkit.suites import FIDELITY_AGAIN, FIDELITY_SUITE

P99 = 0.99


def fidelity_row(
    variant: VariantInput, baseline: VariantInput | None, pairing: Pairing | None
) -> Fidelity | None:
    """Return a row's perplexity and its distance from the baseline; None where not measured.

    Args:
        variant: The row.
        baseline: The row it is compared with.
        pairing: Its fidelity suite, paired with the baseline's where they are comparable.
    """
    result = pairing.measurement.fidelity if pairing else None
    if pairing is None or result is None:
        return None
    mine = variant.scores.get(FIDELITY_SUITE)
    compared = baseline is not None and pairing.baseline is not None
    base = baseline.scores.get(FIDELITY_SUITE) if baseline and compared else None
    is_baseline = baseline is not None and variant.name == baseline.name
    return _fidelity(result, mine, None if is_baseline else base)


def noise_floor(baseline: VariantInput | None) -> Fidelity | None:
    """Return the baseline's distance from itself; None where it was not measured twice alike."""
    suites = baseline.suites if baseline else {}
    first, again = suites.get(FIDELITY_SUITE), suites.get(FIDELITY_AGAIN)
    if baseline is None or first is None or again is None or again.fidelity is None:
        return None
    scores, other = (baseline.scores.get(suite) for suite in (FIDELITY_SUITE, FIDELITY_AGAIN))
    if scores is None or other is None or not _same_tokens(scores, other):
        return None
    return _fidelity(again.fidelity, other, scores)


def _fidelity(result: FidelityResult, mine: Scores | None, base: Scores | None) -> Fidelity:
    perplexity = Estimate(value=result.perplexity, low=None, high=None)
    if mine is not None:
        perplexity = _estimate(_bootstrap(result, mine).mean(_surprise(mine), np.exp))
    comparable = mine is not None and base is not None and _same_tokens(mine, base)
    return Fidelity(
        text=result.text,
        scored_tokens=result.scored_tokens,
        documents=result.documents,
        unit=result.unit,
        window_tokens=result.window_tokens,
        top_logprobs=result.top_logprobs,
        perplexity=perplexity,
        distance=_distance(result, mine, base) if comparable and mine and base else None,
        greedy=_greedy(result, mine, base) if comparable and mine and base else None,
    )


def _distance(result: FidelityResult, mine: Scores, base: Scores) -> Distance:
    bootstrap = _bootstrap(result, mine)
    kl = divergence(base, mine)
    return Distance(
        perplexity_ratio=_estimate(bootstrap.mean(_surprise(mine) - _surprise(base), np.exp)),
        kl_mean=_estimate(bootstrap.mean(kl.lower)),
        kl_mean_estimate=_estimate(bootstrap.mean(kl.estimate)),
        kl_median=_estimate(bootstrap.quantile(kl.lower, 0.5)),
        kl_p99=_estimate(bootstrap.quantile(kl.lower, P99)),
        kl_max=_rounded(float(kl.lower.max())),
        unknown_probability=_rounded(float(kl.unknown.mean())),
        top1_agreement=_estimate(bootstrap.mean(top1_agreement(base, mine))),
        rms_probability_change=_estimate(
            bootstrap.mean(probability_changes(base, mine) ** 2, np.sqrt)
        ),
    )


def _greedy(result: FidelityResult, mine: Scores, base: Scores) -> Greedy | None:
    if mine.generated.shape[0] == 0 or mine.generated.shape[0] != base.generated.shape[0]:
        return None
    places = first_differences(base, mine)
    identical = sum(place is None for place in places)
    # Where they agree to the end, the difference lies somewhere after it.
    ordered = [len(base.generated[0]) + 1 if p is None else p for p in places]
    median = statistics.median(ordered)
    return Greedy(
        prompts=len(places),
        tokens=result.greedy_tokens,
        identical=identical,
        first_difference_median=median if identical < len(places) / 2 else None,
    )


def _bootstrap(result: FidelityResult, scores: Scores) -> Bootstrap:
    return Bootstrap(scores.document if result.unit == "document" else scores.window)


def _surprise(scores: Scores) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return -scores.logprob.astype(np.float64)


def _same_tokens(one: Scores, other: Scores) -> bool:
    return np.array_equal(one.token, other.token) and np.array_equal(one.window, other.window)


def _estimate(bounds: Bounds) -> Estimate:
    return Estimate(value=_rounded(bounds.value), low=figure(bounds.low), high=figure(bounds.high))


def _rounded(value: float) -> float:
    return float(figure(value) or 0.0)
