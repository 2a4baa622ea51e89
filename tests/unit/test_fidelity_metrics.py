"""Divergences against brute force over whole distributions, and intervals against loops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from qkit.evaluate.fidelity_bootstrap import RESAMPLES, SEED, Bootstrap
from qkit.evaluate.fidelity_metrics import (
    divergence,
    first_differences,
    probability_changes,
    top1_agreement,
)
from qkit.evaluate.fidelity_scores import Scores


def log_softmax(logits: Any) -> Any:
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def scores(logprobs: Any, tokens: Any, top: int, generated: Any = ((),)) -> Scores:
    """What a server would return of whole distributions (N x vocabulary)."""
    ids = np.argsort(-logprobs, axis=1, kind="stable")[:, :top]
    rows = np.arange(len(tokens))
    return Scores(
        key="",
        document=np.zeros(len(tokens), np.int32),
        window=np.zeros(len(tokens), np.int32),
        token=np.asarray(tokens, np.int32),
        logprob=logprobs[rows, tokens].astype(np.float32),
        top_ids=ids.astype(np.int32),
        top_logprobs=np.take_along_axis(logprobs, ids, axis=1).astype(np.float32),
        generated=np.asarray(generated, np.int32),
    )


def pair(noise: float, *, positions: int = 400, vocabulary: int = 500, seed: int = 0) -> Any:
    random = np.random.default_rng(seed)
    logits = random.normal(0, 2.5, (positions, vocabulary))
    p = log_softmax(logits)
    q = log_softmax(logits + random.normal(0, noise, logits.shape))
    return p, q, random.integers(0, vocabulary, positions)


def exact_kl(p: Any, q: Any) -> Any:
    return (np.exp(p) * (p - q)).sum(axis=1)


@pytest.mark.parametrize("noise", [0.02, 0.3, 2.0])
@pytest.mark.parametrize("top", [1, 5, 20, 100])
def test_the_bound_is_below_the_exact_divergence_everywhere(noise: float, top: int) -> None:
    p, q, tokens = pair(noise)
    found = divergence(scores(p, tokens, top), scores(q, tokens, top))
    exact = exact_kl(p, q)
    assert (found.lower <= exact + 1e-5).all()
    assert (found.lower >= 0).all()
    assert (found.estimate >= found.lower).all()


def test_more_tokens_tighten_the_bound_up_to_the_exact_value() -> None:
    p, q, tokens = pair(0.3)
    means = [
        divergence(scores(p, tokens, top), scores(q, tokens, top)).lower.mean()
        for top in (1, 5, 20, 100, 500)
    ]
    assert means == sorted(means)
    assert means[-1] == pytest.approx(exact_kl(p, q).mean(), rel=1e-3)


@pytest.mark.parametrize("noise", [0.05, 0.3])
def test_the_estimate_is_nearer_to_the_exact_mean(noise: float) -> None:
    p, q, tokens = pair(noise, positions=3000)
    found = divergence(scores(p, tokens, 20), scores(q, tokens, 20))
    exact = exact_kl(p, q).mean()
    assert found.lower.mean() < 0.9 * exact
    assert found.estimate.mean() == pytest.approx(exact, rel=0.1)


def test_two_tokens_by_hand() -> None:
    p, q = np.log([[0.75, 0.25]]), np.log([[0.5, 0.5]])
    found = divergence(scores(p, [0], 2), scores(q, [0], 2))
    by_hand = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert found.lower[0] == pytest.approx(by_hand, abs=1e-5)
    # Only the text's own token of each is known: the other bucket is the other token.
    found = divergence(scores(p, [1], 1), scores(q, [1], 1))
    assert found.lower[0] == pytest.approx(by_hand, abs=1e-5)


def test_a_favourite_that_the_variant_does_not_list_is_not_hidden_in_the_rest() -> None:
    """Its probability is at most the variant's last listed one, whatever the rest adds up to."""
    p = np.log([[0.6, 0.1, 0.1, *[0.02] * 10]])
    q = np.log([[0.001, 0.3, 0.3, *[0.0399] * 10]])
    found = divergence(scores(p, [1], 2), scores(q, [1], 2))
    one_bucket = 0.1 * math.log(0.1 / 0.3) + 0.9 * math.log(0.9 / 0.7)
    limit = 0.1 * math.log(0.1 / 0.3) + 0.6 * math.log(0.6 / 0.3) + 0.3 * math.log(0.3 / 0.4)
    assert one_bucket < limit
    assert found.lower[0] == pytest.approx(limit, rel=1e-4)
    assert found.lower[0] < exact_kl(p, q)[0]


def test_equal_sides_do_not_diverge() -> None:
    p, _, tokens = pair(0.1)
    one = scores(p, tokens, 20)
    found = divergence(one, one)
    assert found.lower.max() == 0
    assert found.estimate.max() == 0
    assert top1_agreement(one, one).all()
    assert not probability_changes(one, one).any()


def test_other_tokens_are_refused() -> None:
    p, q, tokens = pair(0.1)
    with pytest.raises(ValueError, match="different tokens"):
        divergence(scores(p, tokens, 5), scores(q, (tokens + 1) % 500, 5))


def test_agreement_is_that_of_the_whole_distributions() -> None:
    p, q, tokens = pair(1.0)
    expected = (p.argmax(axis=1) == q.argmax(axis=1)).mean()
    assert 0.1 < expected < 0.9
    assert top1_agreement(scores(p, tokens, 5), scores(q, tokens, 5)).mean() == expected


def test_a_tie_agrees_with_either() -> None:
    tied, clear = np.log([[0.4, 0.4, 0.2]]), np.log([[0.3, 0.5, 0.2]])
    other = np.log([[0.3, 0.2, 0.5]])
    one = scores(tied, [2], 2)
    assert top1_agreement(one, scores(clear, [2], 2)).tolist() == [1]
    assert top1_agreement(scores(clear, [2], 2), one).tolist() == [1]
    assert top1_agreement(one, scores(other, [2], 2)).tolist() == [0]


def test_changes_of_the_own_tokens_probability() -> None:
    p, q = np.log([[0.75, 0.25]]), np.log([[0.5, 0.5]])
    change = probability_changes(scores(p, [0], 1), scores(q, [0], 1))
    assert change == pytest.approx([-0.25], abs=1e-6)


def test_where_generations_part() -> None:
    p, _, tokens = pair(0.1, positions=3)
    one = scores(p, tokens, 2, [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, -1, -1]])
    other = scores(p, tokens, 2, [[1, 2, 3, 4, 5], [1, 9, 3, 4, 5], [1, 2, -1, -1, -1]])
    assert first_differences(one, other) == [4, 1, None]


# ------------------------------------------------------------------------------------- bootstrap


def test_intervals_are_those_of_a_loop_over_resampled_documents() -> None:
    random = np.random.default_rng(1)
    unit = np.repeat([5, 2, 9, 4], [3, 40, 10, 25]).astype(np.int32)
    values = random.exponential(1, len(unit)) + unit
    bootstrap = Bootstrap(unit)
    by_document = [values[unit == u] for u in np.unique(unit)]
    draws = np.random.default_rng(SEED).multinomial(4, np.full(4, 0.25), RESAMPLES)
    means, quantiles = [], []
    for counts in draws:
        drawn = np.concatenate(
            [np.tile(part, n) for part, n in zip(by_document, counts, strict=True)]
        )
        means.append(np.exp(drawn.mean()))
        quantiles.append(np.quantile(drawn, 0.9, method="inverted_cdf"))
    mean, quantile = bootstrap.mean(values, np.exp), bootstrap.quantile(values, 0.9)
    assert mean.value == pytest.approx(np.exp(values.mean()))
    assert (mean.low, mean.high) == pytest.approx(tuple(np.percentile(means, [2.5, 97.5])))
    assert quantile.value == np.quantile(values, 0.9, method="inverted_cdf")
    expected = tuple(np.percentile(quantiles, [2.5, 97.5]))
    assert (quantile.low, quantile.high) == pytest.approx(expected)


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    """Tokens of a document share its level: an interval over tokens would be far too narrow."""
    random = np.random.default_rng(2)
    covered = 0
    for _ in range(200):
        levels = random.normal(0, 1, 40)
        unit = np.repeat(np.arange(40), 30).astype(np.int32)
        bounds = Bootstrap(unit).mean(levels[unit] + random.normal(0, 1, len(unit)))
        assert bounds.low is not None
        assert bounds.high is not None
        covered += bounds.low <= 0 <= bounds.high
    assert 176 <= covered <= 198


def test_two_documents_have_no_interval() -> None:
    bounds = Bootstrap(np.array([0, 0, 1], np.int32)).mean(np.array([1.0, 2.0, 6.0]))
    assert (bounds.value, bounds.low, bounds.high) == (3.0, None, None)
