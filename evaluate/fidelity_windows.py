"""Cuts tokenized documents into the windows that are scored and the prompts that are continued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

#: Documents from which on they, not windows, are resampled.
FEWEST_DOCUMENTS = 8
#: A window of one token has nothing to score.
SHORTEST = 2

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Window:
    """Tokens sent in one request; each but the first is scored after those before it.

    Attributes:
        document: Index of the document they are from.
        tokens: Token ids.
    """

    document: int
    tokens: Ids


@dataclass(frozen=True)
class Work:
    """All requests of a suite: windows to be scored and prompts to be continued greedily."""

    windows: tuple[Window, ...]
    prompts: tuple[Window, ...]

    @property
    def documents(self) -> int:
        """Documents that have scored tokens."""
        return len({window.document for window in self.windows})

    @property
    def scored_tokens(self) -> int:
        """Tokens that are scored."""
        return sum(len(window.tokens) - 1 for window in self.windows)


def make_windows(
    documents: Sequence[Sequence[int]], *, window_tokens: int, tokens: int
) -> tuple[Window, ...]:
    """Return disjoint windows: first every document's first, then the second ones, and so on.

    So a limit thins the documents evenly instead of dropping the last ones. The last window is cut
    where the limit falls.

    Args:
        documents: Token ids of each document.
        window_tokens: Most tokens of a window, at least 2.
        tokens: Most tokens that are scored.
    """
    cut = [
        [
            Window(index, tuple(ids[start : start + window_tokens]))
            for start in range(0, len(ids), window_tokens)
            if len(ids) - start >= SHORTEST
        ]
        for index, ids in enumerate(documents)
    ]
    chosen: list[Window] = []
    left = tokens
    for turn in zip_longest(*cut):
        for window in filter(None, turn):
            if left <= 0:
                return tuple(chosen)
            taken = Window(window.document, window.tokens[: left + 1])
            chosen.append(taken)
            left -= len(taken.tokens) - 1
    return tuple(chosen)


def make_prompts(
    windows: Sequence[Window], *, prompts: int, prompt_tokens: int
) -> tuple[Window, ...]:
    """Return beginnings of windows, of different documents as far as there are.

    Args:
        windows: As `make_windows` returns them: different documents first.
        prompts: Most prompts.
        prompt_tokens: Tokens of each; shorter windows are left out.
    """
    fitting = [window for window in windows if len(window.tokens) >= prompt_tokens]
    return tuple(Window(w.document, w.tokens[:prompt_tokens]) for w in fitting[:prompts])
