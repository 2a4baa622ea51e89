"""Suites a recipe may name: what is measured on every variant.

One class a kind; `Suite` is any of them. A suite's name is that of its measurement's file.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from qkit.errors import nearest
from qkit.evaluate.slo import Objective, parse_objective
from qkit.levels import Level
from qkit.workloads import RandomTokens, Span, Workload, longest_request, profile_of

#: Name of a benchmark that is given none.
BENCH_SUITE = "bench"
#: The fewest values at which a percentile is not just the largest of them.
FEWEST_VALUES = {"p90": 10, "p95": 20, "p99": 100}
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
    #: Open loop: requests sent a second, whether others have ended or not; instead of
    #: `concurrency`.
    rates: tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...] = ()
    #: Closed loop: requests kept in flight.
    concurrency: tuple[Annotated[int, Field(ge=1)], ...] = (1, 2, 4, 8, 16)
    #: Measured requests per level; the larger of this and `requests_per_slot` * concurrency.
    min_requests: int = Field(20, ge=1)
    requests_per_slot: int = Field(4, ge=1)
    #: Closed loop: the slots' first requests are spread over so many seconds.
    ramp_s: float = Field(0, ge=0)
    #: Open loop: gaps between requests, random (independent users) or all the same.
    arrival: Literal["poisson", "constant"] = "poisson"
    #: Open loop: requests are sent for so long, but at least `min_requests`.
    duration_s: float = Field(30, gt=0)
    #: Open loop: a request that is due while so many are under way waits, and its wait counts.
    max_in_flight: int | None = Field(None, ge=1)
    #: An objective such as `ttft_p95<200ms,tpot_p95<30ms`: goodput of every cell, and a search
    #: for the largest load that meets it.
    slo: str | None = None
    #: Cells that the search may add to those named.
    search_cells: int = Field(6, ge=0)
    #: Times a cell is measured, each with prompts of its own.
    repeats: int = Field(1, ge=1)
    #: It is repeated up to so many times until throughput and median TPOT are known to
    #: `target_percent` (half width of the 95 % interval). None: `repeats`.
    max_repeats: int | None = Field(None, ge=1)
    target_percent: float = Field(5, gt=0)
    #: Client processes; "auto" adds some when one is too slow for the streams.
    clients: Literal["auto"] | Annotated[int, Field(ge=1, le=64)] = "auto"
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

    @model_validator(mode="before")
    @classmethod
    def _one_loop(cls, value: Any) -> Any:
        """Let rates stand for themselves: the default concurrency is that of a closed loop."""
        if isinstance(value, dict) and value.get("rates") and "concurrency" not in value:
            return {**value, "concurrency": ()}
        return value

    @field_validator("rates", "concurrency")
    @classmethod
    def _levels(cls, value: tuple[float, ...], info: ValidationInfo) -> tuple[float, ...]:
        if len(set(value)) != len(value):
            raise ValueError("names a level twice")
        if info.field_name == "concurrency":
            if not value and not info.data.get("rates"):
                raise ValueError("needs at least one level")
            if value and info.data.get("rates"):
                raise ValueError(
                    "a benchmark has either `concurrency` (closed loop) or `rates` (open loop); "
                    "make a second one for the other"
                )
        return value

    @field_validator("slo")
    @classmethod
    def _objective(cls, value: str | None) -> str | None:
        return value if value is None else str(parse_objective(value))

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.max_repeats is not None and self.max_repeats < self.repeats:
            raise ValueError(f"max_repeats {self.max_repeats} is below repeats {self.repeats}")
        for limit in self.objective.limits if self.objective else ():
            fewest = FEWEST_VALUES.get(limit.statistic, 1)
            if limit.metric != "itl" and self.min_requests < fewest:
                raise ValueError(
                    f"slo: {limit.statistic} needs {fewest} requests; raise min_requests"
                )
        return self

    @property
    def levels(self) -> tuple[Level, ...]:
        """The loads that are named, in their order."""
        if self.rates:
            return tuple(Level(request_rate=rate) for rate in self.rates)
        return tuple(Level(concurrency=slots) for slots in self.concurrency)

    @property
    def objective(self) -> Objective | None:
        """The objective, parsed."""
        return None if self.slo is None else parse_objective(self.slo)

    @property
    def repeats_max(self) -> int:
        """Times a cell is measured at most."""
        return self.max_repeats or self.repeats

    @property
    def request_tokens(self) -> Span:
        """Tokens of the longest prompt and its answer together."""
        return longest_request(self.workload, self.input_tokens, self.output_tokens)


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
Suite = AccuracySuite | BenchSuite | FidelitySuite
