"""A variant's log-probabilities on a fixed text: what was scored, and where the figures are."""

from __future__ import annotations

from typing import Literal

from qkit.measurements.base import Stored


class FidelityResult(Stored):
    """What was scored. The log-probabilities themselves lie in a file of their own.

    Distances from the baseline are no part of it: the matrix computes them from both sides' files.
    """

    #: File or folder as given, or "qkit" for the text that ships with qkit.
    text: str
    #: SHA-256 of the documents' texts, in order.
    text_hash: str
    tokenizer_hash: str
    #: SHA-256 of the token ids sent, windows and generation prompts.
    tokens_hash: str
    #: Documents that have scored tokens.
    documents: int
    windows: int
    window_tokens: int
    #: Every token of a window but its first, which has nothing before it.
    scored_tokens: int
    top_logprobs: int
    #: What is resampled for intervals: documents, or windows where documents are too few.
    unit: Literal["document", "window"]
    greedy_prompts: int
    greedy_prompt_tokens: int
    greedy_tokens: int
    #: exp(-mean log-probability of the text's own tokens).
    perplexity: float
    #: SHA-256 of the file of log-probabilities.
    scores_hash: str
    #: Without what was scored before an interruption.
    duration_s: float
    marks: tuple[str, ...] = ()
