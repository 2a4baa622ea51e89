"""Scores of lm-eval tasks, and every question they were computed from."""

from __future__ import annotations

from qkit.measurements.base import Stored


class Sample(Stored):
    """One scored question of an accuracy task."""

    task: str
    #: lm-eval's hash of the document; the same question has the same hash in every variant.
    doc_hash: str
    #: Metric's value on this document (0 or 1 for accuracy).
    value: float
    #: Log-likelihood of each option, natural logarithm, in the order of the options.
    loglikelihoods: tuple[float, ...] = ()
    target: str = ""


class TaskScore(Stored):
    """The score of one task, or of a group as lm-eval weighs it."""

    task: str
    alias: str
    metric: str
    value: float
    #: Standard error as lm-eval computes it.
    stderr: float | None
    n: int
    #: Whether `value` is the weighted mean of other tasks.
    is_group: bool = False
    version: str | None = None
    num_fewshot: int | None = None


class AccuracyResult(Stored):
    """Result of one accuracy suite: the headline score, its parts and every sample."""

    suite: str
    harness: str
    headline: TaskScore
    scores: tuple[TaskScore, ...]
    samples: tuple[Sample, ...]
    num_fewshot: int | None
    limit: int | None
    chat_template: bool
    #: SHA-256 of the served tokenizer's files.
    tokenizer_hash: str
    duration_s: float
    requests: int
    prompt_tokens: int
    #: Prompt tokens the server found in its prefix cache; None where it does not say.
    cached_tokens: int | None
    marks: tuple[str, ...] = ()
