"""What lm-eval asks of a model, as three kinds of request, and their answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: vLLM's `MAX_LOGPROB_TOKEN_IDS`.
MAX_TOKEN_IDS = 128


@dataclass(frozen=True, slots=True)
class OptionRequest:
    """Log-probabilities of single tokens that could follow a prompt, all in one request.

    Attributes:
        prompt: Token ids.
        token_ids: Different token ids to score, at most `MAX_TOKEN_IDS`.
    """

    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """Log-probabilities of the prompt's own tokens from a position on.

    Attributes:
        prompt: Token ids.
        scored_from: Position of the first token to score, at least 1.
    """

    prompt: tuple[int, ...]
    scored_from: int


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Text that follows a prompt.

    Attributes:
        prompt: Token ids.
        max_tokens: Most tokens to generate.
        stop: Texts at which generation ends; they are not part of the answer.
        temperature: 0 is greedy.
        seed: Of sampling, where the temperature is above 0.
        extra: Further sampling parameters by name, which replace those of `SAMPLING`.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    stop: tuple[str, ...] = ()
    temperature: float = 0.0
    seed: int = 0
    extra: tuple[tuple[str, Any], ...] = ()


Request = OptionRequest | PromptRequest | GenerateRequest


@dataclass(frozen=True, slots=True)
class TokenScore:
    """Natural log-probability of a token, and whether greedy decoding would have chosen it."""

    logprob: float
    is_greedy: bool


#: An `OptionRequest` gives its tokens' scores in their order, a `PromptRequest` those of the
#: scored positions, a `GenerateRequest` the text.
Answer = tuple[TokenScore, ...] | str


@dataclass
class Usage:
    """What was sent so far.

    Attributes:
        requests: Requests that were answered.
        prompt_tokens: Tokens of their prompts.
        cached_tokens: Prompt tokens the server found in its prefix cache; None where it does not
            say.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int | None = 0


@dataclass(frozen=True)
class ServedModel:
    """What the server says about itself.

    Attributes:
        name: Name to send as `model`.
        max_model_len: Served length in tokens; None where the server does not say.
        block_size: Tokens in a block of its prefix cache.
        caches_prefixes: Whether it says that it has one.
    """

    name: str
    max_model_len: int | None
    block_size: int
    caches_prefixes: bool
