"""Distances between two sets of next-token distributions on the same text. Pure functions.

Of every position both sides are known at their K most likely tokens and at the text's own token.
What is not known is put into buckets, which can only make two distributions look more alike
(data-processing inequality: Cover and Thomas, Elements of Information Theory, section 2.8; also
Kullback and Leibler 1951, theorem 4.1). So the divergence computed here is a lower bound of the
true one, and exact where the buckets are empty.

Probabilities are natural-logarithm log-probabilities, divergences are in nats.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qkit.evaluate.fidelity_scores import NO_TOKEN, Scores

Array = NDArray[np.float64]
#: Least probability of a bucket: log-probabilities are float32, so that sums near 1 are known to
#: about this much.
FLOOR = 1e-6
#: Positions compared at once; bounds memory, which grows with K squared.
CHUNK = 2048


@dataclass(frozen=True)
class Divergence:
    """Kullback-Leibler divergence KL(baseline || variant) of each of N positions, in nats.

    Attributes:
        lower: Lower bound, N.
        estimate: With the estimated divergence within the bucket of unknown tokens, N.
        unknown: Baseline's probability of tokens that are not known of both, N.
    """

    lower: Array
    estimate: Array
    unknown: Array


def divergence(baseline: Scores, variant: Scores) -> Divergence:
    """Return the divergence of a variant from the baseline at every position.

    With S the tokens known of both sides, M those of the baseline's K that the variant does not
    list, and R all others, the lower bound is that of three kinds of bucket:

        sum over S of p log(p/q)  +  p_M log(p_M/q_M)  +  p_R log(p_R/q_R)

    Of q_M only its most is known: |M| times the variant's K-th probability, as none of M is among
    its K. The bound takes the q_M within that limit which makes the sum smallest.

    The estimate adds what lies within the buckets: (p_M + p_R) times half the variance, weighted by
    p, of log(p/q) over the less likely half of S. That is the second-order term of a divergence
    whose log-ratios are spread like those of the least likely tokens that are known.

    Args:
        baseline: Scores, N positions of K tokens.
        variant: Of the same tokens.

    Raises:
        ValueError: They are of different tokens.
    """
    if not np.array_equal(baseline.token, variant.token):
        raise ValueError("the two sides scored different tokens")
    count = len(baseline.token)
    parts = [
        _divergence(baseline, variant, slice(start, start + CHUNK))
        for start in range(0, count, CHUNK)
    ]
    lower, estimate, unknown = (np.concatenate(values) for values in zip(*parts, strict=True))
    return Divergence(lower, estimate, unknown)


def _divergence(baseline: Scores, variant: Scores, part: slice) -> tuple[Array, Array, Array]:
    token = baseline.token[part]
    ids, base = baseline.top_ids[part], baseline.top_logprobs[part].astype(np.float64)
    other_ids, other = variant.top_ids[part], variant.top_logprobs[part].astype(np.float64)
    # Columns: the baseline's K tokens, and the text's own where it is not one of them.
    is_own = ids == token[:, None]
    columns = np.column_stack([ids, token])
    log_p = np.column_stack([base, baseline.logprob[part].astype(np.float64)])
    real = np.column_stack([np.ones_like(is_own), ~is_own.any(axis=1)])
    found = columns[:, :, None] == other_ids[:, None, :]
    log_q = np.take_along_axis(other, found.argmax(axis=2), axis=1)
    own_q = variant.logprob[part].astype(np.float64)[:, None]
    is_token = columns == token[:, None]
    log_q = np.where(is_token, own_q, log_q)
    known = real & (found.any(axis=2) | is_token)
    missing = real & ~known

    p = np.exp(log_p)
    p_known = np.where(known, p, 0.0)
    q_known = np.where(known, np.exp(log_q), 0.0)
    log_ratio = np.where(known, log_p - log_q, 0.0)
    p_missing = np.where(missing, p, 0.0).sum(axis=1)
    p_rest = np.maximum(1 - p_known.sum(axis=1) - p_missing, FLOOR)
    q_left = np.maximum(1 - q_known.sum(axis=1), FLOOR)
    most = missing.sum(axis=1) * np.exp(other.min(axis=1))
    q_missing = np.minimum(q_left * p_missing / (p_missing + p_rest), most)
    q_rest = np.maximum(q_left - q_missing, FLOOR)
    within_missing = _term(p_missing, q_missing)
    lower = (p_known * log_ratio).sum(axis=1) + within_missing + _term(p_rest, q_rest)
    lower = np.maximum(lower, 0.0)
    unknown = p_missing + p_rest
    estimate = lower + unknown * _spread(p_known, log_ratio, known) / 2
    return np.asarray(lower), np.asarray(estimate), np.asarray(unknown)


def _term(p: Array, q: Array) -> Array:
    """Return p log(p/q), 0 where p is 0."""
    positive = p > 0
    ratio = np.divide(p, q, out=np.ones_like(p), where=positive & (q > 0))
    return np.asarray(np.where(positive, p * np.log(ratio), 0.0))


def _spread(p: Array, log_ratio: Array, known: NDArray[np.bool_]) -> Array:
    """Return the variance of log-ratios over the less likely half of each row's known tokens."""
    count = known.sum(axis=1)
    order = np.argsort(np.where(known, p, np.inf), axis=1)  # the least likely first
    ranked_p = np.take_along_axis(p, order, axis=1)
    ranked = np.take_along_axis(log_ratio, order, axis=1)
    half = np.arange(known.shape[1])[None, :] < (count // 2)[:, None]
    weight = np.where(half, ranked_p, 0.0)
    total = np.maximum(weight.sum(axis=1), np.finfo(float).tiny)
    mean = (weight * ranked).sum(axis=1) / total
    variance = (weight * (ranked - mean[:, None]) ** 2).sum(axis=1) / total
    # A variance around the mean of few values is too small by the share that they are.
    effective = total**2 / np.maximum((weight**2).sum(axis=1), np.finfo(float).tiny)
    usable = effective > 1.5
    correction = np.divide(effective, effective - 1, out=np.zeros_like(effective), where=usable)
    return np.asarray(np.where(usable, variance * correction, 0.0))


def top1_agreement(baseline: Scores, variant: Scores) -> Array:
    """Return 1 where both sides' most likely token is the same, else 0, N.

    16-bit logits have ties. Where a side gives its largest probability to several tokens, it agrees
    with another that prefers any of them.
    """
    same = baseline.top_ids[:, 0] == variant.top_ids[:, 0]
    agrees = same | _ties(baseline, variant) | _ties(variant, baseline)
    return np.asarray(agrees, np.float64)


def _ties(one: Scores, other: Scores) -> NDArray[np.bool_]:
    """Whether `one` gives `other`'s favourite the largest probability too."""
    best = one.top_logprobs == one.top_logprobs[:, :1]
    is_favourite = one.top_ids == other.top_ids[:, :1]
    return np.asarray((best & is_favourite).any(axis=1))


def probability_changes(baseline: Scores, variant: Scores) -> Array:
    """Return how much the probability of the text's own token changed, variant - baseline, N.

    Their root mean square is what llama.cpp's perplexity tool prints as "RMS delta p"
    (tools/perplexity/README.md).
    """
    p = np.exp(baseline.logprob.astype(np.float64))
    return np.asarray(np.exp(variant.logprob.astype(np.float64)) - p)


def first_differences(baseline: Scores, variant: Scores) -> list[int | None]:
    """Return where greedy generations first differ, by prompt; None where they never do.

    A generation that ended differs at its end from one that goes on.
    """
    width = max(baseline.generated.shape[1], variant.generated.shape[1])
    one, other = (
        np.pad(s.generated, ((0, 0), (0, width - s.generated.shape[1])), constant_values=NO_TOKEN)
        for s in (baseline, variant)
    )
    differs = one != other
    return [int(row.argmax()) if row.any() else None for row in differs]
