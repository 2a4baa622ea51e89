"""Workloads made of random tokens: independent prompts, shared beginnings, conversations."""

from __future__ import annotations

from dataclasses import dataclass

from qkit.evaluate.workloads.drawing import Drawer
from qkit.evaluate.workloads.lengths import describe, draw_length
from qkit.evaluate.workloads.source import Part
from qkit.evaluate.workloads.units import Message, Prompt, Turn, Unit
from qkit.workloads import Length, MultiTurn, SharedPrefix, span_of


@dataclass(frozen=True)
class RandomSource:
    """Prompts that share nothing.

    Attributes:
        input: Prompt length.
        output: Answer length.
        room: Tokens that a prompt and its answer may have in all.
    """

    drawer: Drawer
    input: Length
    output: Length
    ending: str
    room: int
    hits_expected: bool = False
    fewest_warmups: int = 0

    @property
    def description(self) -> str:
        """The workload in one line."""
        return f"{describe(self.input)} tokens in, {self.ending} {describe(self.output)} out"

    def unit(self, cell: str, part: Part, index: int) -> Unit:
        """Return one request."""
        name = f"{cell}/{part}/{index}"
        rng = self.drawer.rng(f"{name}/lengths")
        # A token at least is left for the other.
        output = draw_length(
            self.output, rng, at_most=max(1, self.room - span_of(self.input).fewest)
        )
        length = draw_length(self.input, rng, at_most=max(1, self.room - output))
        return Unit((Turn(self.drawer.prompt(name, length), output),))


@dataclass(frozen=True)
class SharedPrefixSource:
    """A few long beginnings, each with many endings.

    The beginnings are a cell's own, and the warm-up has them all: what is measured is a warm cache.
    """

    drawer: Drawer
    workload: SharedPrefix
    output_tokens: int
    ending: str
    room: int
    hits_expected: bool = True

    @property
    def description(self) -> str:
        """The workload in one line."""
        made = self.workload
        return (
            f"{made.prefixes} shared beginnings of {made.prefix_tokens} tokens, each prompt "
            f"{describe(made.tail)} more, {self.ending} {self.output_tokens} out"
        )

    @property
    def fewest_warmups(self) -> int:
        """One a beginning."""
        return self.workload.prefixes

    def unit(self, cell: str, part: Part, index: int) -> Unit:
        """Return one request; the beginnings take turns."""
        which = index % self.workload.prefixes
        prefix = self.drawer.repeated(f"{cell}/prefix/{which}", self.workload.prefix_tokens)
        name = f"{cell}/{part}/{index}"
        length = draw_length(
            self.workload.tail,
            self.drawer.rng(f"{name}/lengths"),
            at_most=max(1, self.room - self.workload.prefix_tokens - self.output_tokens),
        )
        tail = self.drawer.prompt(name, length)
        prompt: Prompt
        if isinstance(prefix, tuple) and isinstance(tail, tuple):
            prompt = prefix + tail
        else:
            prompt = (Message("system", str(prefix)), Message("user", str(tail)))
        return Unit((Turn(prompt, self.output_tokens, self.workload.prefix_tokens),))


@dataclass(frozen=True)
class MultiTurnSource:
    """Conversations with scripted answers."""

    drawer: Drawer
    workload: MultiTurn
    output_tokens: int
    ending: str
    room: int
    hits_expected: bool = True
    fewest_warmups: int = 0

    @property
    def description(self) -> str:
        """The workload in one line."""
        made = self.workload
        return (
            f"conversations of {made.turns} questions of {describe(made.question)} tokens, "
            f"scripted answers of {describe(made.answer)}, {self.ending} {self.output_tokens} out"
        )

    def unit(self, cell: str, part: Part, index: int) -> Unit:
        """Return one conversation.

        One that would outgrow the served length ends early: lengths that are drawn cannot all be
        foreseen. A turn may reuse all of the prompt before it, but not the answer: the server gave
        another one than the scripted.
        """
        name = f"{cell}/{part}/{index}"
        rng = self.drawer.rng(f"{name}/lengths")
        room = max(1, self.room - self.output_tokens)
        turns: list[Turn] = []
        said: list[tuple[int, ...] | str] = []
        tokens = reusable = 0
        for number in range(self.workload.turns):
            length = draw_length(self.workload.question, rng, at_most=room)
            if turns and tokens + length > room:
                break
            said.append(self.drawer.prompt(f"{name}/question/{number}", length))
            tokens += length
            turns.append(Turn(_prompt(said), self.output_tokens, reusable))
            reusable = tokens
            answer = draw_length(self.workload.answer, rng, at_most=room)
            said.append(self.drawer.prompt(f"{name}/answer/{number}", answer))
            tokens += answer
        return Unit(tuple(turns))


def _prompt(said: list[tuple[int, ...] | str]) -> Prompt:
    """Return what was said so far: a chat, or token ids in a row."""
    ids: list[int] = []
    chat: list[Message] = []
    for number, part in enumerate(said):
        if isinstance(part, str):
            chat.append(Message("assistant" if number % 2 else "user", part))
        else:
            ids += part
    return tuple(chat) if chat else tuple(ids)
