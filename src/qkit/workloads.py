"""Workloads a benchmark may name: what its prompts are and how long its answers get.

One class a kind, told apart by `kind`. Where a kind alone is enough, a recipe may write its name
(`workload: short-chat`). A kind's `PROFILE` is what a benchmark with it means unless it says
otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, model_validator

from qkit.errors import nearest

#: Tokens of the longest question of `short-chat` with a chat template, generously.
_SHORT_CHAT_TOKENS = 128


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Fixed(_Strict):
    """Always the same length."""

    shape: Literal["fixed"] = "fixed"
    tokens: int = Field(ge=1)


class Uniform(_Strict):
    """Every length from `low` to `high`, both included, is as likely as any other."""

    shape: Literal["uniform"] = "uniform"
    low: int = Field(ge=1)
    high: int = Field(ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")
        return self


class _Spread(_Strict):
    #: Mean and standard deviation of the lengths themselves, in tokens, before they are clipped.
    mean: float = Field(gt=0)
    std: float = Field(ge=0)
    low: int = Field(1, ge=1)
    #: None is bounded by the served length alone.
    high: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.high is not None and self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")
        return self


class Normal(_Spread):
    """Normally distributed, clipped to `low` and `high`."""

    shape: Literal["normal"] = "normal"


class LogNormal(_Spread):
    """Log-normally distributed, as lengths of real prompts nearly are; clipped likewise."""

    shape: Literal["lognormal"] = "lognormal"


def _plain_number(value: object) -> object:
    """Read a bare number as a fixed length."""
    return {"shape": "fixed", "tokens": value} if isinstance(value, int) else value


#: Length of a prompt or an answer in tokens; a bare number is a fixed one.
Length = Annotated[
    Annotated[Fixed | Uniform | Normal | LogNormal, Discriminator("shape")],
    BeforeValidator(_plain_number),
]


class RandomTokens(_Strict):
    """Random tokens: prompts that share nothing, of exact or distributed lengths."""

    PROFILE: ClassVar[dict[str, Any]] = {}
    READS: ClassVar[frozenset[str]] = frozenset({"input_tokens"})

    kind: Literal["random"] = "random"
    #: Prompt length; None is always the benchmark's `input_tokens`.
    input: Length | None = None
    #: Answer length; None is always the benchmark's `output_tokens`.
    output: Length | None = None


class ShortChat(_Strict):
    """Eight short everyday questions in English, Chinese and code, asked again and again.

    Its profile is a published measurement's: up to 128 tokens a reply, temperature 0.3, natural
    stopping, 8, 8, 8, 16 and 32 requests at 1, 2, 4, 8 and 16 at once.
    """

    PROFILE: ClassVar[dict[str, Any]] = {
        "endpoint": "chat",
        "output_tokens": 128,
        "ignore_eos": False,
        "sampling": {"temperature": 0.3},
        "min_requests": 8,
        "requests_per_slot": 2,
    }
    READS: ClassVar[frozenset[str]] = frozenset()

    kind: Literal["short-chat"] = "short-chat"


class SharedPrefix(_Strict):
    """A few long beginnings, such as documents or agent instructions, each with many endings.

    The server's prefix cache is meant to answer for the beginnings.
    """

    PROFILE: ClassVar[dict[str, Any]] = {}
    READS: ClassVar[frozenset[str]] = frozenset()

    kind: Literal["shared-prefix"] = "shared-prefix"
    #: Different beginnings; requests take them in turn.
    prefixes: int = Field(4, ge=1)
    prefix_tokens: int = Field(1024, ge=1)
    #: What follows the beginning and is never the same.
    tail: Length = Field(Fixed(tokens=128), validate_default=True)


class MultiTurn(_Strict):
    """Conversations whose turns are sent one after another, each with all that was said before.

    The assistant's earlier turns are scripted, so that every variant gets the same prompts.
    """

    PROFILE: ClassVar[dict[str, Any]] = {"endpoint": "chat"}
    READS: ClassVar[frozenset[str]] = frozenset()

    kind: Literal["multi-turn"] = "multi-turn"
    #: Questions of a conversation; each is one request.
    turns: int = Field(4, ge=1)
    #: Tokens of a question.
    question: Length = Field(Fixed(tokens=64), validate_default=True)
    #: Tokens of a scripted answer.
    answer: Length = Field(Fixed(tokens=128), validate_default=True)


#: Formats of a file of prompts; "auto" tells them apart by suffix and keys.
FileFormat = Literal["auto", "sharegpt", "vllm", "openai", "trace"]


class FromFile(_Strict):
    """Prompts, or their lengths and arrival times, from a file."""

    PROFILE: ClassVar[dict[str, Any]] = {}
    READS: ClassVar[frozenset[str]] = frozenset()

    kind: Literal["file"] = "file"
    #: ShareGPT's JSON, vLLM's custom JSONL (`prompt`, perhaps `output_tokens`), JSONL of OpenAI
    #: `messages`, or a CSV trace (TIMESTAMP, ContextTokens, GeneratedTokens).
    path: str
    format: FileFormat = "auto"
    #: Answer length: the file's own where a row has one, or always the benchmark's
    #: `output_tokens`.
    output: Literal["file", "suite"] = "file"
    #: Which questions of a conversation are asked. None is the first of ShareGPT's and the last of
    #: OpenAI's.
    turns: Literal["first", "last", "all"] | None = None
    #: Take rows again when there are too few for every prompt to be a new one.
    repeat: bool = False


#: Every kind by its name.
KINDS: dict[str, type[RandomTokens | ShortChat | SharedPrefix | MultiTurn | FromFile]] = {
    "random": RandomTokens,
    "short-chat": ShortChat,
    "shared-prefix": SharedPrefix,
    "multi-turn": MultiTurn,
    "file": FromFile,
}


def _named_kind(value: object) -> object:
    """Read a bare name as a kind, and refuse kinds there are not with the nearest one."""
    given = {"kind": value} if isinstance(value, str) else value
    if isinstance(given, dict):
        kind = given.get("kind")
        if kind is None:
            raise ValueError(f"needs a `kind`, one of {', '.join(KINDS)}")
        if kind not in KINDS:
            raise ValueError(
                f"there is no workload {kind!r}{nearest(str(kind), KINDS)}; "
                f"there are {', '.join(KINDS)}"
            )
    return given


#: Any workload.
Workload = Annotated[
    Annotated[
        RandomTokens | ShortChat | SharedPrefix | MultiTurn | FromFile, Discriminator("kind")
    ],
    BeforeValidator(_named_kind),
]


def profile_of(workload: object) -> dict[str, Any]:
    """Return what a benchmark with this workload, as written in a recipe, means by default."""
    kind = workload if isinstance(workload, str) else None
    if isinstance(workload, dict):
        kind = workload.get("kind")
    elif isinstance(workload, BaseModel):
        kind = getattr(workload, "kind", None)
    found = KINDS.get(kind) if isinstance(kind, str) else None
    return dict(found.PROFILE) if found else {}


@dataclass(frozen=True, slots=True)
class Span:
    """Fewest and most tokens of something; `most` is None where nothing bounds it."""

    fewest: int
    most: int | None

    def __add__(self, other: Span) -> Span:
        """Return the span of both together."""
        known = self.most is not None and other.most is not None
        return Span(
            self.fewest + other.fewest, (self.most or 0) + (other.most or 0) if known else None
        )

    def times(self, count: int) -> Span:
        """Return the span of `count` of them."""
        return Span(self.fewest * count, None if self.most is None else self.most * count)


def span_of(length: Length) -> Span:
    """Return the fewest and most tokens a length can have."""
    if isinstance(length, Fixed):
        return Span(length.tokens, length.tokens)
    return Span(length.low, length.high)


def longest_request(workload: Workload, input_tokens: int, output_tokens: int) -> Span:
    """Return the tokens of a workload's longest prompt and its answer together.

    Args:
        workload: The workload.
        input_tokens: The benchmark's.
        output_tokens: The benchmark's.
    """
    answer = Span(output_tokens, output_tokens)
    match workload:
        case RandomTokens():
            prompt = span_of(workload.input) if workload.input else Span(input_tokens, input_tokens)
            return prompt + (span_of(workload.output) if workload.output else answer)
        case ShortChat():
            return Span(1, _SHORT_CHAT_TOKENS) + answer
        case SharedPrefix():
            prefix = Span(workload.prefix_tokens, workload.prefix_tokens)
            return prefix + span_of(workload.tail) + answer
        case MultiTurn():
            questions = span_of(workload.question).times(workload.turns)
            return questions + span_of(workload.answer).times(workload.turns - 1) + answer
        case FromFile():
            return Span(1, None)
