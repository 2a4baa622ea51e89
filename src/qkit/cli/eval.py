"""`qkit eval`: measure variants, or a running server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from qkit.cli import options

if TYPE_CHECKING:
    from qkit.recipe import Recipe


@click.command("eval")
@click.argument("variants", metavar="[VARIANT]...", nargs=-1)
@click.option(
    "--suite",
    "suites",
    metavar="NAMES",
    help="`bench` or another benchmark of the recipe, a built-in one (short-chat, shared-prefix, "
    "multi-turn), `fidelity`, and lm-eval tasks or groups, separated by commas: "
    "mmlu,fidelity,bench. Default: all of the recipe's.",
)
@options.recipe
@click.option("--url", help="Measure the server at this address instead of starting one.")
@click.option("--served-model", metavar="NAME", help="With --url: the model, if it serves several.")
@click.option(
    "--tokenizer",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="With --url: folder with the model's tokenizer. Default: the server's model folder.",
)
@click.option(
    "--baseline",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="With folders: the 16-bit checkpoint to compare with.",
)
@click.option("--concurrency", metavar="LEVELS", help="Levels of the benchmark: 1,2,4,8,16.")
@click.option(
    "--rate",
    "rates",
    metavar="RATES",
    help="Requests a second, in place of --concurrency: 0.5,1,2.",
)
@click.option(
    "--slo",
    metavar="LIMITS",
    help="Goodput, and the largest load that meets the limits: ttft_p95<200ms,tpot_p95<30ms.",
)
@click.option("--num-fewshot", type=click.IntRange(min=0), help="Examples before each question.")
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    help="Questions per task (of a group, per subject), drawn with a seed, to try it out.",
)
@click.option(
    "--text",
    type=click.Path(exists=True),
    help="With fidelity: your own .txt or .jsonl file, or a folder of them.",
)
@options.data
@options.margin
@options.repeat_baseline
@options.run_name
@options.accelerator
@options.wait
@options.force
def evaluate(
    variants: tuple[str, ...],
    suites: str | None,
    recipe_name: str | None,
    url: str | None,
    served_model: str | None,
    tokenizer: Path | None,
    baseline: Path | None,
    concurrency: str | None,
    rates: str | None,
    slo: str | None,
    num_fewshot: int | None,
    limit: int | None,
    text: str | None,
    data: Path | None,
    margin_points: float | None,
    repeat_baseline: bool,
    run_name: str | None,
    accelerator: str | None,
    wait_s: float,
    force: bool,
) -> None:
    """Measure variants, or a running server, and print the matrix.

    VARIANT is a variant of the recipe's run, such as `awq` or `bf16`, or a checkpoint folder.
    Without any, all variants of the recipe that were made, and the baseline.

    \b
    qkit eval --suite mmlu,bench --recipe qwen2.5-7b-a800
    qkit eval --suite mmlu_dev,bench ./my-awq ./my-gptq --baseline ./Qwen2.5-7B-Instruct
    qkit eval --suite bench --url http://127.0.0.1:8000 --tokenizer ./my-awq
    qkit eval --suite short-chat ./my-awq
    """  # noqa: D301  (\b keeps click from rewrapping)
    from qkit.cli.printing import show_matrix
    from qkit.cli.progress import TerminalReporter, exit_code
    from qkit.errors import InputError
    from qkit.run import Job
    from qkit.selection import attach_group, choose_suites, folder_groups, run_groups
    from qkit.store import RunStore, artifacts_dir

    if url and repeat_baseline:
        raise InputError(
            "--repeat-baseline needs a fresh server, and --url measures one that runs already",
            fix="measure it twice under two names (--run) and give both to `qkit compare`",
        )
    if url and (variants or baseline):
        raise InputError(
            "--url measures one running server; folders and variants are served by qkit itself",
            fix="give either --url or variants",
        )
    folders = tuple(variant for variant in variants if Path(variant).is_dir())
    if folders and len(folders) != len(variants):
        missing = next(variant for variant in variants if variant not in folders)
        raise InputError(
            f"there is no checkpoint folder {missing!r}",
            fix="give folders only, or names of the recipe's variants only",
        )
    recipe = _recipe(recipe_name, url, folders, baseline)
    recipe = options.with_values(
        recipe,
        accelerator=accelerator,
        margin_points=margin_points,
        repeat_baseline=repeat_baseline or None,
    )
    recipe = choose_suites(
        recipe,
        suites,
        concurrency=concurrency,
        rates=rates,
        slo=slo,
        num_fewshot=num_fewshot,
        limit=limit,
        text=text,
    )
    store = RunStore(artifacts_dir() / (run_name or recipe.name))
    with TerminalReporter() as reporter:
        if url:
            group = attach_group(recipe, url, served_model, tokenizer)
            job = Job(recipe, store, reporter, data=data, wait_s=wait_s, force=force)
            outcome = job.measure_attached(group)
        else:
            groups, paths = (
                folder_groups(recipe, folders, baseline)
                if folders
                else (run_groups(recipe, store, variants), {})
            )
            job = Job(recipe, store, reporter, data, wait_s, force, paths)
            outcome = job.measure(groups)
    show_matrix(store)
    raise SystemExit(exit_code(outcome))


def _recipe(
    name: str | None, url: str | None, folders: tuple[str, ...], baseline: Path | None
) -> Recipe:
    """Return the recipe; folders and servers that belong to none get one of their own."""
    from qkit.recipe import Recipe, load_recipe

    if name or not (url or folders):
        return options.chosen_recipe(name, None)
    if url:
        title = options.slug(url.split("//")[-1].replace(":", "-"))
        return Recipe(name=f"url-{title}", model=url, variants=())
    model = str((baseline or Path(folders[0])).resolve())
    local = Path(options.LOCAL_RECIPE)
    if local.is_file():
        found = load_recipe(str(local))
        return options.with_values(found, name="eval", model=model, variants=())
    return Recipe(name="eval", model=model, variants=())
