"""Suites a recipe may name: what is measured on every variant.

One class a kind; `Suite` is any of them. A suite's name is that of its measurement's file.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

#: Name of a benchmark that is given none.
BENCH_SUITE = "bench"
#: Name of the fidelity suite, and of the baseline's second measurement of it.
FIDELITY_SUITE = "fidelity"
FIDELITY_AGAIN = "fidelity-again"
#: Tokens of a window where nothing else is said.
WINDOW_TOKENS = 512

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80)]


class Strict(BaseModel):
    """Base of the recipe's parts: immutable, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class AccuracySuite(Strict):
    """One lm-eval task or group."""

    task: Name
    #: None takes the task's own; `mmlu` is run with 5 by convention.
    num_fewshot: int | None = Field(None, ge=0)
    #: Documents per task; None is all.
    limit: int | None = Field(None, ge=1)
    chat_template: bool = False


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


class FidelitySuite(Strict):
    """How far a variant's next-token distributions are from the baseline's, on a fixed text."""

    #: .txt or .jsonl file, or a folder of them; None is the text that ships with qkit.
    text: str | None = None
    #: Tokens scored, spread evenly over the text's documents.
    tokens: int = Field(20_000, ge=16)
    #: Tokens of one request, each scored after all before it in the window; by default
    #: `WINDOW_TOKENS`, or what fits the served length.
    window_tokens: int | None = Field(None, ge=8)
    #: Most likely tokens kept of each position; above 20 needs `--max-logprobs` in `serve.args`.
    top_logprobs: int = Field(20, ge=1, le=1000)
    #: Greedy generations compared token by token, of different documents; 0 is none.
    greedy_prompts: int = Field(16, ge=0)
    greedy_prompt_tokens: int = Field(64, ge=1)
    greedy_tokens: int = Field(64, ge=1)
    #: Score the baseline twice, in opposite order, to see how far it is from itself.
    repeat_baseline: bool = True


#: Any suite.
Suite = AccuracySuite | BenchSuite | FidelitySuite
