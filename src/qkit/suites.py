"""Suites a recipe may name: what is measured on every variant.

One class a kind; `Suite` is any of them. A suite's name is that of its measurement's file.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from qkit.errors import nearest
from qkit.workloads import RandomTokens, Span, Workload, longest_request, profile_of

#: Name of a benchmark that is given none.
BENCH_SUITE = "bench"

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


class Sampling(Strict):
    """How the server picks tokens.

    Sent with every request: vLLM otherwise takes what the checkpoint's generation_config.json says.
    """

    temperature: float = Field(0, ge=0)
    top_p: float = Field(1, gt=0, le=1)
    #: -1 is all tokens.
    top_k: int = Field(-1, ge=-1)
    repetition_penalty: float = Field(1, gt=0)

    def sent(self) -> dict[str, float]:
        """Return the parameters as they are sent; those without effect at temperature 0 are not."""
        always = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "repetition_penalty": self.repetition_penalty,
        }
        return {**always, "top_k": self.top_k, "min_p": 0.0} if self.temperature else always


class BenchSuite(Strict):
    """A benchmark: a load on the server, and what is measured under it."""

    #: Name of its measurement, and of its table where there are several.
    name: Name = BENCH_SUITE
    concurrency: tuple[Annotated[int, Field(ge=1)], ...] = (1, 2, 4, 8, 16)
    #: Measured requests per level; the larger of this and `requests_per_slot` * concurrency.
    min_requests: int = Field(20, ge=1)
    requests_per_slot: int = Field(4, ge=1)
    #: What is sent. A kind brings a profile: its values for the fields below and above that are
    #: not given.
    workload: Workload = RandomTokens()
    #: Tokens of a prompt; read by the workload `random` alone.
    input_tokens: int = Field(512, ge=1)
    #: Tokens of an answer, where the workload does not say.
    output_tokens: int = Field(128, ge=1)
    sampling: Sampling = Sampling()
    #: Natural stopping (False) compares different lengths; the table then shows them.
    ignore_eos: bool = True
    endpoint: Literal["completions", "chat"] = "completions"
    seed: int = 0
    timeout_s: float = Field(600, gt=0)
    #: Measure the baseline once more at the end, to see whether the machine drifted.
    repeat_baseline: bool = True

    @model_validator(mode="before")
    @classmethod
    def _profile(cls, value: Any) -> Any:
        """Fill in what the workload's profile says and the recipe does not."""
        if isinstance(value, dict) and "workload" in value:
            return {**profile_of(value["workload"]), **value}
        return value

    @model_validator(mode="after")
    def _read(self) -> Self:
        default = type(self).model_fields["input_tokens"].default
        if "input_tokens" not in self.workload.READS and self.input_tokens != default:
            raise ValueError(
                f"workload {self.workload.kind!r} has lengths of its own and does not read "
                "input_tokens"
            )
        return self

    @field_validator("concurrency")
    @classmethod
    def _levels(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if not value:
            raise ValueError("needs at least one level")
        if len(set(value)) != len(value):
            raise ValueError("names a level twice")
        return value

    @property
    def request_tokens(self) -> Span:
        """Tokens of the longest prompt and its answer together."""
        return longest_request(self.workload, self.input_tokens, self.output_tokens)


#: Benchmarks that can be named without a recipe that describes them.
BUILTIN_BENCHES: dict[str, BenchSuite] = {
    name: BenchSuite.model_validate({"name": name, "workload": name})
    for name in ("short-chat", "shared-prefix", "multi-turn")
}


def builtin_bench(name: str) -> BenchSuite:
    """Return a benchmark by its name alone.

    Raises:
        ValueError: There is none of that name.
    """
    if name not in BUILTIN_BENCHES:
        raise ValueError(
            f"there is no built-in benchmark {name!r}{nearest(name, BUILTIN_BENCHES)}; "
            f"there are {', '.join(BUILTIN_BENCHES)}"
        )
    return BUILTIN_BENCHES[name]


#: Any suite.
Suite = AccuracySuite | BenchSuite
