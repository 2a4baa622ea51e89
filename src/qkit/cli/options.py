"""Options several commands share, and what they turn into."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import click

from qkit.recipe import DEFAULT_METHODS, Recipe, Variant, load_recipe
from qkit.suites import Strict

S = TypeVar("S", bound=Strict)
#: Recipe taken in the current folder when none is given.
LOCAL_RECIPE = "qkit.yaml"
DEFAULT_RECIPE = "demo"

accelerator = click.option(
    "--accelerator",
    type=click.Choice(["auto", "cpu", "cuda"]),
    help="What to run on. Default: the recipe's, which is `auto`: a GPU where there is one.",
)
wait = click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="SECONDS",
    help="How long to wait for another qkit that uses the accelerator.",
)
force = click.option("--force", is_flag=True, help="Do again what is found done.")
data = click.option(
    "--data",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder with local copies of hub data sets, such as DIR/cais/mmlu.",
)
margin = click.option(
    "--margin",
    "margin_points",
    type=click.FloatRange(min=0, max=100, min_open=True, max_open=True),
    metavar="POINTS",
    help="Loss in points that a verdict allows. Default: the recipe's, which is 1.",
)
repeat_baseline = click.option(
    "--repeat-baseline",
    is_flag=True,
    help="Score the baseline once more at the end: the noise floor of every difference.",
)
recipe = click.option(
    "--recipe",
    "recipe_name",
    metavar="RECIPE",
    help=f"Recipe file or name. Default: ./{LOCAL_RECIPE}, else the demo.",
)
run_name = click.option(
    "--run", "run_name", metavar="NAME", help="Folder under artifacts/. Default: the recipe's name."
)


def chosen_recipe(name: str | None, model: str | None) -> Recipe:
    """Return the recipe a command works with.

    Args:
        name: `--recipe`; None takes ./qkit.yaml, else the demo, else, with a model, the defaults.
        model: `--model`; replaces the recipe's.
    """
    if name is None and model is not None:
        return Recipe(name=slug(model), model=model)
    if name is None:
        name = LOCAL_RECIPE if Path(LOCAL_RECIPE).is_file() else DEFAULT_RECIPE
        click.echo(f"recipe: {name}", err=True)
    found = load_recipe(name)
    return with_values(found, model=model) if model else found


def with_values(part: S, **values: Any) -> S:
    """Return a copy of a recipe's part with the values that are given (not None), validated."""
    given = {key: value for key, value in values.items() if value is not None}
    if not given:
        return part
    return type(part).model_validate({**part.model_dump(), **given})


def slug(text: str) -> str:
    """Return a run's name for a model's path or hub name."""
    last = text.rstrip("/").rsplit("/", 1)[-1]
    kept = "".join(c if c.isalnum() or c in "._-" else "-" for c in last).strip("._-")
    return kept[:80] or "model"


def variants_for(
    recipe: Recipe, methods: tuple[str, ...], backend: str | None = None
) -> tuple[Variant, ...]:
    """Return the recipe's variants of some methods; a method it lacks gets the defaults.

    Args:
        recipe: The recipe.
        methods: By default the usual ones, or with a backend all that it does.
        backend: `--backend`; None takes each variant's own.
    """
    if backend and not methods:
        from qkit.quantize.backends import BACKENDS

        methods = tuple(m for m in BACKENDS[backend].methods if m in DEFAULT_METHODS)
    found: list[Variant] = []
    for method in methods or DEFAULT_METHODS:
        own = [variant for variant in recipe.variants if variant.method == method]
        own = own or [Variant.model_validate({"method": method})]
        if backend:
            made_by_it = [variant for variant in own if variant.backend == backend]
            own = made_by_it or [v.model_copy(update={"backend": backend}) for v in own]
        found += own
    return tuple(found)
