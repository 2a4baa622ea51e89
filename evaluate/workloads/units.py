"""What a workload hands to the load generator: requests, and which belong together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat."""

    role: str
    content: str


#: Token ids (completions endpoint only), text (a chat of one message), or a chat.
Prompt = tuple[int, ...] | str | tuple[Message, ...]

#: Prefix-cache hits of a prompt that nobody can foretell, such as one of a file.
ANY_HITS = math.inf


@dataclass(frozen=True, slots=True)
class Turn:
    """One request.

    Attributes:
        prompt: What is asked.
        output_tokens: Tokens of the answer: exactly so many under `ignore_eos`, else at most.
        reusable_tokens: Tokens of the prompt that the prefix cache may hold by the workload's
            design; `ANY_HITS` where that is not known. A chat template's own are not counted.
    """

    prompt: Prompt
    output_tokens: int
    reusable_tokens: float = 0


@dataclass(frozen=True, slots=True)
class Unit:
    """Requests that one slot sends one after another: one, or the turns of a conversation.

    Attributes:
        turns: The requests, at least one.
        at_s: When the unit arrives, seconds after the cell's first one; None where the workload
            has no schedule.
    """

    turns: tuple[Turn, ...]
    at_s: float | None = None


@dataclass(frozen=True)
class CellPrompts:
    """Units of one cell, in the order they are sent."""

    warmup: tuple[Unit, ...]
    measured: tuple[Unit, ...]

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The measured requests, in the order of the units."""
        return tuple(turns_of(self.measured))

    @property
    def reusable_tokens(self) -> float:
        """Prompt tokens of the measured requests that may come from the prefix cache."""
        return sum(turn.reusable_tokens for turn in self.turns)


def turns_of(units: tuple[Unit, ...]) -> Iterator[Turn]:
    """Yield the requests of all units."""
    for unit in units:
        yield from unit.turns
