"""Suites a recipe may name: what is measured on every variant.

One class a kind; `Suite` is any of them. A suite's name is that of its measurement's file.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

#: Name of a benchmark that is given none.
BENCH_SUITE = "bench"

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80)]


class Strict(BaseModel):
    """Base of the recipe's parts: immutable, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class AccuracySuite(Strict):
    """One lm-eval task or group."""

    task: Name
    #: Folder with lm-eval task files of your own, which define the task.
    task_dir: str | None = None
    #: None takes what the field reports the task with (qkit.evaluate.conventions), else its own.
    num_fewshot: int | None = Field(None, ge=0)
    #: Documents per task, drawn evenly over its subjects; every subject of a group is a task, as
    #: for lm-eval's own limit. None is all.
    limit: int | None = Field(None, ge=1)
    #: Of the documents drawn, of few-shot examples and of sampled answers.
    seed: int = Field(0, ge=0)
    chat_template: bool = False
    #: Few-shot examples as turns of the conversation; with `chat_template` only.
    fewshot_as_multiturn: bool = True
    #: Text of the system turn, or before the prompt where there is no chat template.
    system_prompt: str | None = None
    #: Whether prompts begin with BOS; None does what the tokenizer does by itself.
    add_bos_token: bool | None = None
    #: Cut prompts over the served length at their beginning and list them, instead of refusing.
    truncate: bool = False


class BenchSuite(Strict):
    """A benchmark: a load on the server, and what is measured under it."""

    #: Name of its measurement, and of its table where there are several.
    name: Name = BENCH_SUITE
    concurrency: tuple[Annotated[int, Field(ge=1)], ...] = (1, 2, 4, 8, 16)
    #: Measured requests per level; the larger of this and `requests_per_slot` * concurrency.
    min_requests: int = Field(20, ge=1)
    requests_per_slot: int = Field(4, ge=1)
    input_tokens: int = Field(512, ge=1)
    output_tokens: int = Field(128, ge=1)
    #: Natural stopping (False) compares different lengths; the table then shows them.
    ignore_eos: bool = True
    endpoint: Literal["completions", "chat"] = "completions"
    seed: int = 0
    timeout_s: float = Field(600, gt=0)
    #: Measure the baseline once more at the end, to see whether the machine drifted.
    repeat_baseline: bool = True

    @field_validator("concurrency")
    @classmethod
    def _levels(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if not value:
            raise ValueError("needs at least one level")
        if len(set(value)) != len(value):
            raise ValueError("names a level twice")
        return value


#: Any suite.
Suite = AccuracySuite | BenchSuite
