"""`qkit run RECIPE`: the whole job."""

from __future__ import annotations

from pathlib import Path

import click

from qkit.cli import options


@click.command()
@click.argument("recipe_name", metavar="RECIPE")
@click.option("--model", help="Checkpoint folder or hub name, in place of the recipe's.")
@options.accelerator
@options.data
@options.margin
@options.repeat_baseline
@options.run_name
@options.wait
@options.force
def run(
    recipe_name: str,
    model: str | None,
    accelerator: str | None,
    data: Path | None,
    margin_points: float | None,
    repeat_baseline: bool,
    run_name: str | None,
    wait_s: float,
    force: bool,
) -> None:
    """Do a whole recipe: quantize, serve, measure, and print the matrix.

    RECIPE is a YAML file, or the name of one that ships with qkit (`qkit recipes`). Steps found
    done are kept; a failed variant becomes a row with its reason and the others go on.

    Exit code: 0 all done, 1 or 2 nothing could be started, 3 a step failed, 75 another qkit uses
    the accelerator.
    """
    from qkit.cli.printing import show_matrix
    from qkit.cli.progress import TerminalReporter, exit_code
    from qkit.recipe import load_recipe
    from qkit.run import Job
    from qkit.store import RunStore, artifacts_dir

    recipe = options.with_values(
        load_recipe(recipe_name),
        model=model,
        accelerator=accelerator,
        margin_points=margin_points,
        repeat_baseline=repeat_baseline or None,
    )
    store = RunStore(artifacts_dir() / (run_name or recipe.name))
    with TerminalReporter() as reporter:
        job = Job(recipe, store, reporter, data=data, wait_s=wait_s, force=force)
        outcome = job.run()
    show_matrix(store)
    click.echo(f"{outcome.done} steps done, {outcome.skipped} kept", err=True)
    raise SystemExit(exit_code(outcome))
