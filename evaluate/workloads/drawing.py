"""Draws random prompts: seeded, and never the same one twice in a sweep."""

from __future__ import annotations

import random

from qkit.errors import InputError
from qkit.evaluate.workloads.vocabulary import Vocabulary

_DRAWS = 100


class Drawer:
    """Draws prompts from a vocabulary by seed and name.

    A name gives the same prompt whatever else is drawn, unless chance makes it one that was drawn
    before; then it gives the next.

    Args:
        vocabulary: The tokens to draw from.
        seed: The suite's.
        as_text: Draw words and give text, for the chat endpoint, instead of token ids.
    """

    def __init__(self, vocabulary: Vocabulary, seed: int, *, as_text: bool) -> None:
        self.as_text = as_text
        self._vocabulary = vocabulary
        self._seed = seed
        self._ids = vocabulary.words if as_text else vocabulary.ordinary
        self._seen: set[tuple[int, ...] | str] = set()

    def rng(self, name: str) -> random.Random:
        """Return the generator of a name; a string seeds alike in every Python version."""
        return random.Random(f"{self._seed}/{name}")

    def prompt(self, name: str, length: int) -> tuple[int, ...] | str:
        """Draw a prompt that was not drawn before: `length` ids, or text of about that many tokens.

        Raises:
            InputError: The length is too small for that many different prompts.
        """
        for attempt in range(_DRAWS):
            drawn = self._draw(f"{name}/{attempt}", length)
            if drawn and drawn not in self._seen:
                self._seen.add(drawn)
                return drawn
        raise InputError(
            f"a vocabulary of {len(self._ids)} tokens does not give enough different prompts of "
            f"{length} tokens",
            where="bench",
            fix="ask for longer prompts (bench.input_tokens, or the workload's lengths), or for "
            "fewer (bench.min_requests, bench.requests_per_slot, bench.concurrency)",
        )

    def repeated(self, name: str, length: int) -> tuple[int, ...] | str:
        """Draw what a name stands for, the same every time it is asked for."""
        return self._draw(name, length)

    def _draw(self, name: str, length: int) -> tuple[int, ...] | str:
        drawn = tuple(self.rng(name).choices(self._ids, k=length))
        return self._vocabulary.text(drawn) if self.as_text else drawn
