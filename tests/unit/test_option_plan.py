"""Options of several tokens: exact whichever way they are asked, and asked the cheaper way."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from fakes.scoring_server import best, logprob

from qkit.evaluate.option_plan import Option, Tokens, in_chunks, plan_options, scores_of
from qkit.evaluate.prefix_order import minimum_prefill
from qkit.evaluate.scoring_requests import (
    MAX_TOKEN_IDS,
    Answer,
    OptionRequest,
    PromptRequest,
    Request,
    TokenScore,
)

BLOCK = 16
LONG = tuple(range(500))
SHORT = tuple(range(20))


def score(before: Sequence[int], token: int) -> TokenScore:
    value = logprob(before, token)
    return TokenScore(value, is_greedy=value >= logprob(before, best(before)))


def answer(request: Request) -> Answer:
    """What an exact server answers."""
    match request:
        case OptionRequest(prompt, token_ids):
            return tuple(score(prompt, token) for token in token_ids)
        case PromptRequest(prompt, scored_from):
            return tuple(
                score(prompt[:position], prompt[position])
                for position in range(scored_from, len(prompt))
            )
    raise AssertionError(request)


def expected(option: Option) -> list[TokenScore]:
    context, tokens = option
    return [score((*context, *tokens[:n]), token) for n, token in enumerate(tokens)]


def requests_of(options: Sequence[Option], block_size: int | None = BLOCK) -> list[Request]:
    parts = (part for planned in plan_options(options, block_size) for part in planned)
    return list(dict.fromkeys(part.request for part in parts))


def options_after(*contexts: Tokens, tokens: int = 5, number: int = 4) -> list[Option]:
    return [
        (context, tuple(300 + (7 * n + t * (n > 1)) % 13 for t in range(tokens)))
        for context in contexts
        for n in range(number)
    ]


class TestExact:
    @pytest.mark.parametrize("block_size", [None, 1, 16, 128])
    @pytest.mark.parametrize("seed", range(5))
    def test_any_mixture_of_options(self, block_size: int | None, seed: int) -> None:
        rng = random.Random(seed)
        shots = tuple(rng.randrange(50) for _ in range(60))
        contexts = [shots + tuple(rng.randrange(9) for _ in range(rng.randrange(40)))] * 2 + [
            tuple(rng.randrange(9) for _ in range(rng.randrange(1, 300))) for _ in range(8)
        ]
        options = [
            (context, tuple(rng.randrange(3) for _ in range(rng.choice([1, 1, 2, 3, 9]))))
            for context in contexts
            for _ in range(5)
        ]
        planned = plan_options(options, block_size)
        answers = {request: answer(request) for request in requests_of(options, block_size)}
        for option, parts in zip(options, planned, strict=True):
            assert scores_of(parts, answers) == expected(option)

    def test_more_branches_than_a_request_takes(self) -> None:
        options = [(LONG, (token, 1, 2)) for token in range(200)]
        requests = requests_of(options)
        answers = {request: answer(request) for request in requests}
        assert all(
            len(r.token_ids) <= MAX_TOKEN_IDS for r in requests if isinstance(r, OptionRequest)
        )
        for option, parts in zip(options, plan_options(options, BLOCK), strict=True):
            assert scores_of(parts, answers) == expected(option)


class TestCheaper:
    def test_a_long_context_is_computed_once(self) -> None:
        requests = requests_of(options_after(LONG))
        assert all(isinstance(request, OptionRequest) for request in requests)
        prefilled = minimum_prefill([request.prompt for request in requests], BLOCK)
        assert prefilled < 1.5 * len(LONG)

    def test_the_same_beginning_of_options_is_asked_once(self) -> None:
        options = [(LONG, (1, 2, 3)), (LONG, (1, 2, 4)), (LONG, (1, 5))]
        asked = {
            request.prompt[len(LONG) :]: request.token_ids
            for request in requests_of(options)
            if isinstance(request, OptionRequest)
        }
        assert asked == {(): (1,), (1,): (2, 5), (1, 2): (3, 4)}

    def test_a_short_context_goes_whole_with_each_option(self) -> None:
        requests = requests_of(options_after(SHORT))
        assert len(requests) == 4
        assert all(isinstance(request, PromptRequest) for request in requests)

    def test_without_a_prefix_cache_nothing_is_branched(self) -> None:
        requests = requests_of(options_after(LONG), None)
        assert all(isinstance(request, PromptRequest) for request in requests)

    def test_few_shot_examples_that_questions_share_count_once(self) -> None:
        # By itself the question is short; what is shared is in the cache when its turn comes.
        questions = [(*LONG, *(n + 600 for n in range(m, m + 8))) for m in range(10)]
        requests = requests_of(options_after(*questions))
        assert all(isinstance(request, OptionRequest) for request in requests)
        whole = sum(len(context) + len(option) for context, option in options_after(*questions))
        assert minimum_prefill([request.prompt for request in requests], BLOCK) < whole / 5

    def test_large_blocks_are_reckoned_with(self) -> None:
        # What lies after the last whole block is computed again for every token of an option.
        options = options_after(LONG[:250], tokens=12, number=2)
        assert isinstance(requests_of(options, 256)[0], PromptRequest)
        assert isinstance(requests_of(options_after(LONG[:250], tokens=3), 16)[0], OptionRequest)

    def test_single_tokens_are_one_request(self) -> None:
        options = [(SHORT, (token,)) for token in (4, 5, 6, 7)]
        assert requests_of(options) == [OptionRequest(SHORT, (4, 5, 6, 7))]


class TestChunks:
    def test_every_option_is_in_one_chunk_and_contexts_are_whole(self) -> None:
        contexts = [(n % 3, n, n) for n in range(30)]
        options = [(context, (1, 2, 3)) for context in contexts for _ in range(2)]
        random.Random(0).shuffle(options)
        chunks = list(in_chunks(options, most=50))
        assert sorted(n for chunk in chunks for n in chunk) == list(range(60))
        where = {options[n][0]: i for i, chunk in enumerate(chunks) for n in chunk}
        assert all(where[options[n][0]] == i for i, chunk in enumerate(chunks) for n in chunk)
        assert len(chunks) > 5
        order = [options[n][0] for chunk in chunks for n in chunk]
        assert order == sorted(order)

    def test_a_context_over_the_limit_is_a_chunk_of_its_own(self) -> None:
        assert [len(c) for c in in_chunks([(LONG, (1, 2)), (SHORT, (1,))], most=3)] == [1, 1]

    def test_nothing_is_no_chunk(self) -> None:
        assert list(in_chunks([])) == []
