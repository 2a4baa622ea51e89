"""`qkit recipes`: list, print and validate recipes."""

from __future__ import annotations

import click

from qkit.recipe import builtin_recipes, find_recipe, load_recipe


@click.group(invoke_without_command=True)
@click.pass_context
def recipes(ctx: click.Context) -> None:
    """List, print and validate recipes."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_)


@recipes.command("list")
def list_() -> None:
    """List the recipes that ship with qkit."""
    for name in builtin_recipes():
        recipe = load_recipe(name)
        methods = ", ".join(variant.label for variant in recipe.variants)
        click.echo(f"{name:<20} {recipe.model.rsplit('/', 2)[-1]:<28} {methods}")


@recipes.command()
@click.argument("recipe")
def show(recipe: str) -> None:
    """Print a recipe, to be copied and changed."""
    click.echo(find_recipe(recipe).read_text(encoding="utf-8"), nl=False)


@recipes.command()
@click.argument("recipe")
def validate(recipe: str) -> None:
    """Check a recipe without running it."""
    found = load_recipe(recipe)
    click.echo(f"{found.name}: valid, {len(found.variants)} variants")
