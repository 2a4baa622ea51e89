"""What `qkit eval` measures: which variants, which suites, on which server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from qkit.errors import InputError, nearest
from qkit.evaluate.slo import parse_objective
from qkit.measurements import Subject
from qkit.plan import Group, cells_of, score_again
from qkit.recipe import BASELINE, Recipe
from qkit.server import RunningServer, attach, instance_of, model_root
from qkit.store import RunStore
from qkit.subjects import attached_subject, label_of, subject_of
from qkit.suites import (
    BENCH_SUITE,
    BUILTIN_BENCHES,
    FIDELITY_SUITE,
    AccuracySuite,
    BenchSuite,
    FidelitySuite,
)


@dataclass(frozen=True)
class Attached:
    """A running server, what it serves, and what is measured on it.

    Attributes:
        server: The server.
        subject: What it serves.
        group: What is measured.
        instance: What tells this process of the server from any other; None where it does not say.
    """

    server: RunningServer
    subject: Subject
    group: Group
    instance: str | None


def choose_suites(
    recipe: Recipe,
    names: str | None,
    *,
    concurrency: str | None = None,
    rates: str | None = None,
    slo: str | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    text: str | None = None,
) -> Recipe:
    """Return a recipe that measures the named suites, with the values typed beside them.

    Args:
        recipe: Where a suite's settings are taken from; a suite it lacks gets the defaults.
        names: `bench`, other benchmarks of the recipe, built-in benchmarks, `fidelity`, lm-eval
            tasks and groups, separated by commas; None keeps the recipe's.
        concurrency: Levels of the benchmarks, separated by commas.
        rates: Request rates of the benchmarks, instead of `concurrency`.
        slo: Objective of the benchmarks, as `ttft_p95<200ms,tpot_p95<30ms`.
        num_fewshot: Examples before each question.
        limit: Questions per task.
        text: Text of the fidelity suite, a file or folder.

    Raises:
        InputError: A name or value cannot be used.
    """
    accuracy = {suite.task: suite for suite in recipe.accuracy}
    own = {suite.name: suite for suite in recipe.bench}
    benches = {BENCH_SUITE: BenchSuite(), **BUILTIN_BENCHES, **own}
    wanted = (
        [name.strip() for name in names.split(",") if name.strip()]
        if names is not None
        else [*accuracy, *([FIDELITY_SUITE] if recipe.fidelity else []), *own]
    )
    if not wanted:
        raise InputError("no suite to measure", fix="give --suite mmlu,bench")
    load = _load(concurrency, rates, slo)
    given = {"num_fewshot": num_fewshot, "limit": limit}
    values = {key: value for key, value in given.items() if value is not None}
    try:
        tasks = tuple(
            AccuracySuite.model_validate(
                {**(accuracy[name].model_dump() if name in accuracy else {"task": name}), **values}
            )
            for name in dict.fromkeys(wanted)
            if name != FIDELITY_SUITE and name not in benches
        )
        fidelity = (recipe.fidelity or FidelitySuite()) if FIDELITY_SUITE in wanted else None
        if fidelity and text is not None:
            fidelity = fidelity.model_copy(update={"text": text})
        chosen = tuple(benches[name] for name in dict.fromkeys(wanted) if name in benches)
        if load:
            chosen = tuple(
                BenchSuite.model_validate({**suite.model_dump(), **load}) for suite in chosen
            )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise InputError(f"--suite or its options: {first['msg']}") from None
    return recipe.model_copy(update={"accuracy": tasks, "bench": chosen, "fidelity": fidelity})


def run_groups(recipe: Recipe, store: RunStore, labels: Sequence[str]) -> list[Group]:
    """Return the groups of a run: of the named variants, or of all that were made.

    Raises:
        InputError: A name is none of the recipe's, or that variant was not made.
    """
    known = [BASELINE, *(variant.label for variant in recipe.variants)]
    for label in labels:
        if label not in known:
            raise InputError(
                f"{label!r} is neither a folder nor a variant{nearest(label, known)}",
                fix=f"variants of recipe {recipe.name!r}: {', '.join(known)}",
            )
        if label != BASELINE and store.variant(label) is None:
            raise InputError(
                f"variant {label!r} was not made yet",
                where=store.model_dir(label),
                fix=f"run `qkit quantize --method {label}` with the same recipe first",
            )
    made = [label for label in known if label == BASELINE or store.variant(label)]
    return _with_repeat(recipe, labels or made)


def folder_groups(
    recipe: Recipe, folders: Sequence[str], baseline: Path | None
) -> tuple[list[Group], Mapping[str, Path]]:
    """Return the groups of checkpoint folders, the baseline first, and where each folder is.

    Raises:
        InputError: Two folders would have the same name.
    """
    paths: dict[str, Path] = {BASELINE: baseline.resolve()} if baseline else {}
    for folder in folders:
        path = Path(folder).resolve()
        if path in paths.values():
            continue
        label = label_of(path)
        if label in paths:
            raise InputError(
                f"two folders are called {label!r}", where=path, fix="rename one of them"
            )
        paths[label] = path
    return _with_repeat(recipe, list(paths)), paths


def _with_repeat(recipe: Recipe, labels: Sequence[str]) -> list[Group]:
    """Return the groups of some rows, and last the baseline's scores again where asked for."""
    groups = [Group(label, cells_of(recipe, label)) for label in labels]
    repeated = score_again(recipe) if BASELINE in labels else ()
    return [*groups, Group(BASELINE, repeated)] if repeated else groups


def attach_group(recipe: Recipe, url: str, model: str | None, tokenizer: Path | None) -> Attached:
    """Attach to a running server.

    Raises:
        InputError: The tokenizer's folder is not known.
        ServerError: The server does not answer.
    """
    server = attach(url, model=model)
    root = model_root(server)
    folder = tokenizer or root
    if folder is None:
        raise InputError(
            "the tokenizer of the served model is not on this machine",
            where=url,
            fix="give its folder with --tokenizer",
        )
    label = Path(server.model).name
    if root is not None and tokenizer is None:
        subject = subject_of(label, root)
    else:
        subject = attached_subject(label, url, server.model, folder)
    return Attached(server, subject, Group(label, cells_of(recipe, label)), instance_of(server))


def _load(concurrency: str | None, rates: str | None, slo: str | None) -> dict[str, object]:
    """Return the fields of a benchmark that were typed."""
    if concurrency and rates:
        raise InputError(
            "--concurrency is a closed loop and --rate an open one",
            fix="give one of them; run again for the other",
        )
    found: dict[str, object] = {}
    if concurrency is not None:
        found = {"concurrency": _numbers("--concurrency", concurrency, int), "rates": ()}
    if rates is not None:
        found = {"rates": _numbers("--rate", rates, float), "concurrency": ()}
    if slo is not None:
        try:
            found["slo"] = str(parse_objective(slo))
        except ValueError as error:
            raise InputError(f"--slo: {error}") from None
    return found


def _numbers(option: str, text: str, kind: type[int] | type[float]) -> list[float]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        example = "1,2,4,8,16" if kind is int else "0.5,1,2"
        raise InputError(
            f"{option} {text!r} is not a list of numbers", fix=f"write it as {example}"
        ) from None
