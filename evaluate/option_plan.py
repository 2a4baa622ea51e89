"""How answer options of several tokens are asked: token by token after their context, or whole.

vLLM gives exact log-probabilities in two ways. Those of named tokens that could follow a prompt:
one request for every place at which options branch, and the server takes the context from its
prefix cache. Or those of the prompt itself, an option written at its end: one request an option,
but the whole context is computed again each time, because vLLM leaves its prefix cache unread for
these (the rows of cached tokens would be missing). Both are the same sums of the same numbers.
Which costs less depends on how long the context is against its options, so every context is decided
by itself: 25-shot ARC goes token by token, 0-shot HellaSwag whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from qkit.evaluate.scoring_requests import (
    MAX_TOKEN_IDS,
    Answer,
    OptionRequest,
    PromptRequest,
    Request,
    TokenScore,
)

Tokens = tuple[int, ...]
#: A context and what could follow it.
Option = tuple[Tokens, Tokens]

#: What a request costs besides the tokens it computes, in tokens: parsing, scheduling, sampling and
#: replying take a server about a millisecond, in which a 7B model computes some tens of tokens on a
#: data-centre GPU.
REQUEST_TOKENS = 32
#: Prompt tokens held at a time, 8 bytes each; 10-shot HellaSwag would have a thousand million.
CHUNK_TOKENS = 16_000_000


@dataclass(frozen=True, slots=True)
class Part:
    """Scores of an option that one request gives.

    Attributes:
        request: What is sent.
        index: Position of the score in its answer; None takes all of them.
    """

    request: Request
    index: int | None = None


@dataclass
class _Context:
    """One context's options, as a trie of their tokens.

    Attributes:
        tokens: The context.
        options: What could follow it, without repeats.
        branches: By what of an option was said so far, the tokens that could be next.
    """

    tokens: Tokens
    options: dict[Tokens, None]

    @property
    def branches(self) -> dict[Tokens, dict[int, None]]:
        found: dict[Tokens, dict[int, None]] = {}
        for option in self.options:
            for position, token in enumerate(option):
                found.setdefault(option[:position], {})[token] = None
        return found


def in_chunks(options: Sequence[Option], most: int = CHUNK_TOKENS) -> Iterator[list[int]]:
    """Yield the numbers of options in groups of about `most` prompt tokens at the most.

    Options of one context are in one group, contexts in the order of their tokens, so that those
    that share a prefix are together.
    """
    by_context: dict[Tokens, list[int]] = {}
    for number, (context, _) in enumerate(options):
        by_context.setdefault(context, []).append(number)
    chunk: list[int] = []
    held = 0
    for context in sorted(by_context):
        numbers = by_context[context]
        steps = sum(len(options[number][1]) - 1 for number in numbers)
        tokens = (len(context) + 1) * (1 + steps)
        if chunk and held + tokens > most:
            yield chunk
            chunk, held = [], 0
        chunk += numbers
        held += tokens
    if chunk:
        yield chunk


def plan_options(options: Sequence[Option], block_size: int | None) -> list[tuple[Part, ...]]:
    """Return the requests that score each option, and which of their scores are its own.

    Args:
        options: Contexts with what could follow them, at least one token.
        block_size: Tokens in a block of the server's prefix cache; None where it has none.
    """
    contexts: dict[Tokens, _Context] = {}
    for tokens, option in options:
        contexts.setdefault(tokens, _Context(tokens, {})).options[option] = None
    planned: dict[Option, tuple[Part, ...]] = {}
    previous: Tokens = ()
    for tokens in sorted(contexts):
        context = contexts[tokens]
        branching = _is_branching_cheaper(context, previous, block_size)
        planned |= _branching(context) if branching else _whole(context)
        previous = tokens
    return [planned[option] for option in options]


def scores_of(parts: Sequence[Part], answers: Mapping[Request, Answer]) -> list[TokenScore]:
    """Return the scores of an option's tokens, in order."""
    scores: list[TokenScore] = []
    for part in parts:
        answer = answers[part.request]
        if isinstance(answer, str):
            raise TypeError("a text is no score")
        scores += answer if part.index is None else [answer[part.index]]
    return scores


def _is_branching_cheaper(context: _Context, previous: Tokens, block_size: int | None) -> bool:
    """Compare what the server computes for a context's options, in tokens.

    Args:
        context: The context.
        previous: The one asked before it; its whole blocks are in the cache.
        block_size: Tokens in a block; None without a cache.
    """
    several = [option for option in context.options if len(option) > 1]
    if not several or block_size is None:
        return False
    length = len(context.tokens)
    root = REQUEST_TOKENS + _uncached(length, _common(context.tokens, previous), block_size)
    whole = sum(REQUEST_TOKENS + length + len(option) for option in several)
    if len(several) < len(context.options):  # single tokens are asked after the context anyway
        whole += root
    branches = sum(
        REQUEST_TOKENS + _uncached(length + len(said), length + len(said) - 1, block_size)
        for said in context.branches
        if said
    )
    return root + branches < whole


def _uncached(length: int, cached: int, block_size: int) -> int:
    """Return the tokens of a prompt to compute: whole blocks are reused, the last token never."""
    return length - min(cached, length - 1) // block_size * block_size


def _common(one: Tokens, other: Tokens) -> int:
    """Return how many tokens two texts begin with in common."""
    for position, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return position
    return min(len(one), len(other))


def _branching(context: _Context) -> dict[Option, tuple[Part, ...]]:
    """Ask for every place at which options could go on: which tokens, with what probability."""
    parts: dict[tuple[Tokens, int], Part] = {}
    for said, following in context.branches.items():
        parts |= {
            (said, token): part
            for token, part in _next_tokens((*context.tokens, *said), tuple(following)).items()
        }
    return {
        (context.tokens, option): tuple(
            parts[option[:position], token] for position, token in enumerate(option)
        )
        for option in context.options
    }


def _whole(context: _Context) -> dict[Option, tuple[Part, ...]]:
    """Ask for single tokens together, for longer options one by one at the prompt's end."""
    single = tuple(option[0] for option in context.options if len(option) == 1)
    following = _next_tokens(context.tokens, single)
    return {
        (context.tokens, option): (
            following[option[0]]
            if len(option) == 1
            else Part(PromptRequest((*context.tokens, *option), len(context.tokens))),
        )
        for option in context.options
    }


def _next_tokens(prompt: Tokens, tokens: Tokens) -> dict[int, Part]:
    """Return the requests for tokens that could follow a prompt, as many as one takes at a time."""
    parts: dict[int, Part] = {}
    for start in range(0, len(tokens), MAX_TOKEN_IDS):
        some = tokens[start : start + MAX_TOKEN_IDS]
        request = OptionRequest(prompt, some)
        parts |= {token: Part(request, index) for index, token in enumerate(some)}
    return parts
