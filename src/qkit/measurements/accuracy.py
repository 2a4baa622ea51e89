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
    #: lm-eval's hash of the whole prompt, few-shot examples and template included.
    prompt_hash: str = ""
    #: Filter the value was computed after, where the task generates text.
    filter: str | None = None
    #: Text the model generated, and what the filter left of it; None for scored options.
    generated: str | None = None
    filtered: str | None = None
    #: Tokens cut off the beginning of the prompt to fit the served length.
    truncated_tokens: int = 0


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
    #: Filter of the metric, for example "strict-match".
    filter: str = "none"
    #: SHA-256 of the task's configuration: prompts, options, metrics and their code. None for a
    #: group.
    config_hash: str | None = None


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
    #: Seed of drawn documents, few-shot examples and sampled answers.
    seed: int = 0
    fewshot_as_multiturn: bool = True
    system_prompt: str | None = None
    #: Whether prompts began with BOS; None where it was not recorded.
    add_bos_token: bool | None = None
    #: SHA-256 of the chat template's text; None where it has none or was not recorded.
    template_hash: str | None = None
    truncate: bool = False
    #: Documents whose prompt lost its beginning.
    truncated: int = 0
    #: Answers an interrupted attempt had left; they are not in the four figures below.
    resumed: int = 0
    duration_s: float
    requests: int
    prompt_tokens: int
    #: Prompt tokens the server found in its prefix cache; None where it does not say.
    cached_tokens: int | None
    marks: tuple[str, ...] = ()
