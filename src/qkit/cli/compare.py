"""`qkit compare A B`: the paired difference of any two results."""

from __future__ import annotations

import click

from qkit.cli import options

#: Exit code where something was not subtracted because it differs.
EXIT_REFUSED = 3


@click.command()
@click.argument("names", metavar="A B [C]...", nargs=-1, required=True)
@click.option(
    "--allow-incomparable",
    is_flag=True,
    help="Subtract what differs in settings all the same, and say so.",
)
@options.margin
@click.option(
    "--format",
    "style",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="What to print.",
)
def compare(
    names: tuple[str, ...], allow_incomparable: bool, margin_points: float | None, style: str
) -> None:
    """Compare results with the first one, question by question.

    A, B and further ones are measurement files or folders, RUN/VARIANT such as demo/awq, or result
    files of lm-eval (with --log_samples). What was scored otherwise is not subtracted, and the
    field that differs is named; the exit code is then 3.

    \b
    qkit compare demo/bf16 demo/awq
    qkit compare lm-eval-out/bf16 artifacts/demo/measurements/awq/mmlu.json
    """  # noqa: D301  (\b keeps click from rewrapping)
    from qkit.cli.printing import table_console
    from qkit.compared import load_sides
    from qkit.errors import InputError
    from qkit.evaluate.compare import compare_sides
    from qkit.evaluate.report import terminal
    from qkit.evaluate.statistics import MARGIN_POINTS
    from qkit.store import now

    if len(names) < 2:
        raise InputError("there is nothing to compare it with", fix="give two results or more")
    found = compare_sides(
        load_sides(names),
        created=now(),
        allow_incomparable=allow_incomparable,
        margin_points=margin_points or MARGIN_POINTS,
    )
    if style == "json":
        click.echo(found.matrix.model_dump_json(indent=1))
    else:
        console = table_console()
        console.print(terminal.render_scores(found.matrix, width=console.width))
    if found.refused:
        raise SystemExit(EXIT_REFUSED)
