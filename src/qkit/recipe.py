"""Typed recipes: what to quantize, how to serve it and what to measure.

A recipe is a YAML file. Unknown keys are refused with the nearest known one, and every error
names the field. `load_recipe` takes a path or the name of a recipe that ships with qkit.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from qkit.errors import InputError, nearest
from qkit.suites import (
    BENCH_SUITE,
    FIDELITY_AGAIN,
    FIDELITY_SUITE,
    AccuracySuite,
    BenchSuite,
    FidelitySuite,
    Name,
    Sampling,
    Strict,
    builtin_bench,
)
from qkit.workloads import KINDS

Method = Literal["awq", "gptq", "fp8", "smoothquant", "rtn"]
METHODS: tuple[Method, ...] = get_args(Method)
#: Libraries that quantize; `qkit.quantize.backends` says what each does.
Backend = Literal["llmcompressor", "autoawq", "gptqmodel", "autogptq"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
#: What is made when nothing is chosen. Round-to-nearest is a yardstick, not a form to serve.
DEFAULT_METHODS: tuple[Method, ...] = ("awq", "gptq", "fp8", "smoothquant")
BASELINE = "bf16"
#: Names of measurements and steps that no suite may have.
BENCH_AGAIN = "bench-again"
RESERVED_SUITES = (BENCH_AGAIN, FIDELITY_SUITE, FIDELITY_AGAIN, "quantize", "serve")
#: End of the name of a suite's second measurement of the baseline; no suite's own name has it.
AGAIN_SUFFIX = "-again"
RECIPES_DIR = Path(__file__).resolve().parent / "recipes"
#: A model or data path with this prefix lies beside the recipes that ship with qkit.
BUILTIN_PREFIX = "qkit:"

#: Settings of a variant and the methods that read them.
VARIANT_FIELDS: dict[str, tuple[Method, ...]] = {
    "weight_bits": ("gptq", "rtn"),
    "group_size": ("awq", "gptq", "rtn"),
    "symmetric": ("awq", "gptq", "rtn"),
    "actorder": ("gptq", "smoothquant"),
    "dampening_frac": ("gptq", "smoothquant"),
    "smoothing_strength": ("smoothquant",),
    "rounding": ("smoothquant",),
    "scales": ("fp8", "smoothquant"),
}


class Calibration(Strict):
    """Where calibration text comes from and how much of it is used."""

    #: Local .jsonl/.json/.parquet/.csv/.txt file or folder, or a hub data set's name.
    source: str = "HuggingFaceH4/ultrachat_200k"
    split: str = "train_sft"
    #: Column to read; None finds "messages", "conversations" or "text".
    column: str | None = None
    samples: int = Field(512, ge=1)
    seq_len: int = Field(2048, ge=8)
    seed: int = 0


class Variant(Strict):
    """One quantized form of the model."""

    method: Method
    #: Row's name; by default the method's, and the backend's where it is not llmcompressor.
    name: Name | None = None
    #: Library that makes it, in an environment of its own.
    backend: Backend = "llmcompressor"
    #: Bits of a weight, of gptq and rtn. 8-bit weights have one scale a row instead of groups.
    weight_bits: Literal[4, 8] = 4
    #: Weight group size of the W4A16 schemes.
    group_size: Literal[32, 64, 128] = 128
    #: Weights without zero point; by default False for awq and True for gptq and rtn.
    symmetric: bool | None = None
    #: GPTQ activation order.
    actorder: Literal["static", "group"] | None = "static"
    dampening_frac: float = Field(0.01, gt=0, lt=1)
    #: SmoothQuant's migration strength (alpha).
    smoothing_strength: float = Field(0.8, ge=0, le=1)
    #: How SmoothQuant's smoothed weights are rounded: by GPTQ or to the nearest.
    rounding: Literal["gptq", "rtn"] = "gptq"
    #: Scales of fp8 and smoothquant. "dynamic": weights per channel, inputs per token as they come.
    #: "static": one calibrated scale for a layer's inputs, and for its weight too in fp8. "block"
    #: (fp8): weights in 128 x 128 blocks, inputs in groups of 128 as they come.
    scales: Literal["dynamic", "static", "block"] = "dynamic"
    #: Calibrated scales for a KV cache in FP8, which vLLM then takes by itself; any method.
    kv_cache: Literal["fp8"] | None = None
    #: Modules left in 16 bits; names or `re:` patterns.
    ignore: tuple[str, ...] = ("lm_head",)
    #: Calibration of this variant alone.
    calibration: Calibration | None = None

    @model_validator(mode="after")
    def _read(self) -> Variant:
        """Refuse a setting the method does not read: it would be taken for an effect."""
        for field, methods in VARIANT_FIELDS.items():
            if self.method not in methods and self._is_changed(field):
                verb = "do" if len(methods) > 1 else "does"
                raise ValueError(f"{self.method} does not read `{field}`; {_and(methods)} {verb}")
        if self.weight_bits == 8 and self._is_changed("group_size"):
            raise ValueError("8-bit weights have one scale a row: leave `group_size` out")
        if self.method == "smoothquant" and self.scales == "block":
            raise ValueError("smoothquant has no block scales: `scales` is dynamic or static")
        if self.rounding == "rtn":
            for field in ("actorder", "dampening_frac"):
                if self._is_changed(field):
                    raise ValueError(f"rounding to the nearest does not read `{field}`; gptq does")
        return self

    def _is_changed(self, field: str) -> bool:
        return bool(getattr(self, field) != type(self).model_fields[field].default)

    @property
    def label(self) -> str:
        """Name of the row and of the folder."""
        if self.name or self.backend == "llmcompressor":
            return self.name or self.method
        return f"{self.method}-{self.backend}"


class Serve(Strict):
    """How every variant is served; the same for all rows of a run."""

    #: Served length in tokens; the checkpoint's own by default.
    max_model_len: int | None = Field(None, ge=16)
    #: Linear kernel asked for on CUDA; "auto" leaves the choice to vLLM.
    kernel: str = "marlin"
    gpu_memory_utilization: float = Field(0.90, gt=0, le=1)
    tensor_parallel_size: int = Field(1, ge=1)
    #: KV cache on a CPU, in GiB.
    kv_cache_gib: int = Field(4, ge=1)
    max_num_seqs: int | None = Field(None, ge=1)
    enforce_eager: bool = False
    startup_timeout_s: float = Field(1800, gt=0)
    #: Further flags for vLLM, as typed on its command line.
    args: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)


class PublishedScore(Strict):
    """A score that someone published, to stand beside ours."""

    #: What was scored, such as "Red Hat W8A8".
    name: str = Field(min_length=1)
    #: Our row it is compared with; None shows it only.
    variant: Name | None = None
    task: Name
    metric: str = "acc"
    #: As published: accuracies in percent (74.24).
    value: float
    #: Questions it was scored on.
    n: int | None = Field(None, ge=1)
    num_fewshot: int | None = Field(None, ge=0)
    #: Where it was published.
    source: str = Field(min_length=1)


class Recipe(Strict):
    """A whole job: one model, its variants, and what is measured on each."""

    name: Name
    #: Checkpoint folder or hub name.
    model: str
    #: Branch, tag or commit on the hub.
    revision: str | None = None
    trust_remote_code: bool = False
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    calibration: Calibration = Calibration()
    variants: tuple[Variant, ...] = tuple(Variant(method=method) for method in DEFAULT_METHODS)
    serve: Serve = Serve()
    accuracy: tuple[AccuracySuite, ...] = (AccuracySuite(task="mmlu", num_fewshot=5),)
    fidelity: FidelitySuite | None = None
    #: Benchmarks; one mapping stands for a list of one. The first is the matrix's headline, and is
    #: measured on the baseline again at the end.
    bench: tuple[BenchSuite, ...] = (BenchSuite(),)
    #: Loss in points up to which a variant counts as non-inferior.
    margin_points: float = Field(1.0, gt=0, lt=100)
    #: Score the baseline once more at the end, to see how far scores move by themselves.
    repeat_baseline: bool = False
    #: Published scores that the matrix shows beside ours.
    references: tuple[PublishedScore, ...] = ()
    #: What an hour of the machine costs, for the capacity table.
    price_per_hour: float | None = Field(None, gt=0)
    currency: str = Field("USD", min_length=1, max_length=8)
    #: Output tokens of a request there; None takes the benchmark's own.
    tokens_per_request: float | None = Field(None, gt=0)

    @field_validator("bench", mode="before")
    @classmethod
    def _benches(cls, value: object) -> object:
        if value is None:
            return ()
        listed = value if isinstance(value, (list, tuple)) else (value,)
        return tuple(builtin_bench(item) if isinstance(item, str) else item for item in listed)

    @model_validator(mode="after")
    def _unique(self) -> Recipe:
        labels = [variant.label for variant in self.variants]
        for label in labels:
            if label == BASELINE:
                raise ValueError(f"variants: {BASELINE!r} is the baseline's name; choose another")
            if labels.count(label) > 1:
                raise ValueError(f"variants: {label!r} is there twice; give one a `name`")
        if BENCH_SUITE in (suite.task for suite in self.accuracy):
            raise ValueError(f"accuracy: {BENCH_SUITE!r} is the benchmark's name, not a task")
        names = [*(suite.task for suite in self.accuracy), *(suite.name for suite in self.bench)]
        for suite in names:
            if names.count(suite) > 1:
                raise ValueError(f"two suites are called {suite!r}; give one benchmark a `name`")
            if suite in RESERVED_SUITES or is_again(suite):
                raise ValueError(f"{suite!r} cannot be a suite's name")
        return self

    def calibration_of(self, variant: Variant) -> Calibration:
        """Return the calibration of a variant: its own, else the recipe's."""
        return variant.calibration or self.calibration


def again(suite: str) -> str:
    """Return the name of a suite's second measurement of the baseline."""
    return f"{suite}{AGAIN_SUFFIX}"


def is_again(suite: str) -> bool:
    """Whether a measurement or step is the baseline's second one, a check and no row's figure."""
    return suite.endswith(AGAIN_SUFFIX)


def builtin_recipes() -> dict[str, Path]:
    """Return the recipes that ship with qkit, name to path."""
    return {path.stem: path for path in sorted(RECIPES_DIR.glob("*.yaml"))}


def resolve_builtin(value: str) -> str:
    """Turn `qkit:PATH` into the path of a file that ships with qkit; leave other values."""
    if value.startswith(BUILTIN_PREFIX):
        return str(RECIPES_DIR / value.removeprefix(BUILTIN_PREFIX))
    return value


def find_recipe(name_or_path: str) -> Path:
    """Return the path of a recipe file, or of the shipped recipe of that name.

    Raises:
        InputError: There is neither.
    """
    path = Path(name_or_path)
    if path.is_file():
        return path
    builtin = builtin_recipes()
    if name_or_path in builtin:
        return builtin[name_or_path]
    if path.parent == Path("recipes") and path.stem in builtin:
        return builtin[path.stem]
    raise InputError(
        f"there is no recipe {name_or_path!r}{nearest(name_or_path, builtin)}",
        fix=f"give a YAML file or one of: {', '.join(builtin)}",
    )


def load_recipe(name_or_path: str) -> Recipe:
    """Read and validate a recipe.

    Paths inside it are relative to the current folder; `qkit:` paths lie beside the shipped
    recipes.

    Raises:
        InputError: The file is missing, not YAML, or has a wrong, unknown or missing field.
    """
    path = find_recipe(name_or_path)
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"the recipe is not valid YAML: {error}", where=path) from error
    if not isinstance(data, dict):
        raise InputError("the recipe is not a mapping of keys to values", where=path)
    return parse_recipe(data, where=str(path))


def parse_recipe(data: dict[str, Any], *, where: str) -> Recipe:
    """Validate a recipe's mapping.

    Raises:
        InputError: With one line for every wrong field.
    """
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        lines = [_explain(item, data) for item in error.errors(include_url=False)]
        raise InputError(
            f"the recipe has {len(lines)} wrong field{'s' if len(lines) > 1 else ''}",
            where=where,
            detail="\n".join(lines),
            fix="correct the fields above; `qkit recipes show demo` prints a working recipe",
        ) from None
    return recipe.model_copy(
        update={
            "model": resolve_builtin(recipe.model),
            "fidelity": _resolved_text(recipe.fidelity),
            "calibration": _resolved(recipe.calibration),
            "variants": tuple(
                v.model_copy(update={"calibration": _resolved(v.calibration)})
                if v.calibration
                else v
                for v in recipe.variants
            ),
        }
    )


def _and(names: tuple[str, ...]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _resolved(calibration: Calibration) -> Calibration:
    return calibration.model_copy(update={"source": resolve_builtin(calibration.source)})


def _resolved_text(suite: FidelitySuite | None) -> FidelitySuite | None:
    if suite is None or suite.text is None:
        return suite
    return suite.model_copy(update={"text": resolve_builtin(suite.text)})


def _explain(item: Any, data: dict[str, Any]) -> str:
    """Turn one of pydantic's errors into `field: what is wrong`."""
    location = item["loc"]
    if isinstance(data.get("bench"), dict) and location[:2] == ("bench", 0):
        location = ("bench", *location[2:])  # as it was written: without a list
    field = ".".join(str(part) for part in location) or "recipe"
    if item["type"] == "extra_forbidden":
        known = _known_keys(location[:-1])
        return f"{field}: unknown key{nearest(str(location[-1]), known)}"
    if item["type"] == "missing":
        return f"{field}: missing"
    message = re.sub(r"^Value error, ", "", item["msg"])
    shown = item.get("input")
    if shown is data or isinstance(shown, dict):
        return f"{field}: {message}" if location else message
    return f"{field}: {message} (found {shown!r})"


def _known_keys(location: tuple[Any, ...]) -> list[str]:
    """Return the keys the model at `location` has."""
    parts: dict[str, type[BaseModel]] = {
        "calibration": Calibration,
        "variants": Variant,
        "serve": Serve,
        "accuracy": AccuracySuite,
        "fidelity": FidelitySuite,
        "bench": BenchSuite,
        "sampling": Sampling,
        **KINDS,
        "references": PublishedScore,
    }
    model: type[BaseModel] = Recipe
    for part in location:
        if isinstance(part, str) and part in parts:
            model = parts[part]
    return list(model.model_fields)
