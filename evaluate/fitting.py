"""Prompts against the served length: refused, or shortened from the left where that is asked for.

Shortening is lm-eval's own: `local-completions` keeps the last tokens of context and continuation,
and reserves one token of the served length, because the server always generates one.
"""

from __future__ import annotations

from collections.abc import Sequence

from qkit.errors import InputError

Tokens = list[int]


def cut_context(context: Tokens, continuation: Tokens, served: int) -> tuple[Tokens, int]:
    """Return a context whose continuation fits, and how many tokens it lost at its beginning.

    At least one token of context stays; a continuation that does not fit by itself is left for
    `require_fit` to refuse.
    """
    over = len(context) + len(continuation) - (served - 1)
    cut = max(0, min(over, len(context) - 1))
    return context[cut:], cut


def cut_prompt(prompt: Tokens, max_tokens: int, served: int) -> tuple[Tokens, int]:
    """Return a prompt that leaves room for generation, and how many tokens it lost."""
    over = len(prompt) + max_tokens - (served - 1)
    if over <= 0:
        return prompt, 0
    cut = min(over, len(prompt) - 1)
    return prompt[cut:], cut


def require_fit(needed: Sequence[int], served: int, *, where: str, truncate: bool) -> None:
    """Refuse prompts that leave no room for what is generated after them.

    Args:
        needed: Tokens of each prompt and of what is generated after it.
        served: Tokens that the server takes.
        where: The server, for the message.
        truncate: Whether prompts were shortened before.

    Raises:
        InputError: With how many there are and what the longest needs.
    """
    over = [length for length in needed if length > served]
    if not over:
        return
    if truncate:
        raise InputError(
            f"{len(over)} of {len(needed)} answers alone are longer than the served length of "
            f"{served} tokens; the longest needs {max(over)}",
            where=where,
            fix=f"serve with max_model_len {max(over)} or more",
        )
    raise InputError(
        f"{len(over)} of {len(needed)} prompts do not fit the served length of "
        f"{served} tokens; the longest needs {max(over)}",
        where=where,
        fix=f"serve with max_model_len {max(over)} or more, ask for fewer few-shot examples, or "
        "set `truncate: true` for the suite: what is cut is then listed",
    )
