"""`qkit matrix`: print a run's matrix again."""

from __future__ import annotations

from pathlib import Path

import click

from qkit.cli import options


@click.command()
@click.argument("run_name", metavar="[RUN]", required=False)
@click.option(
    "--format",
    "style",
    type=click.Choice(["table", "json", "csv", "md", "html"]),
    default="table",
    show_default=True,
    help="What to print.",
)
@click.option(
    "--allow-incomparable",
    is_flag=True,
    help="Compare rows of different hardware, versions or settings, and say so in the table.",
)
@click.option(
    "--records",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write every request of every benchmark to FILE, one JSON object a line.",
)
@options.margin
def matrix(
    run_name: str | None,
    style: str,
    allow_incomparable: bool,
    records: Path | None,
    margin_points: float | None,
) -> None:
    """Print the matrix of a run again, from its stored files.

    RUN is the name of a folder under artifacts/, or its path. Without it, the run that was
    written to last.
    """
    from qkit.assemble import load_matrix, write_matrix
    from qkit.cli.printing import show_matrix
    from qkit.store import latest_run, open_run

    store = open_run(run_name) if run_name else latest_run()
    if records:
        from qkit.assemble import write_records

        write_records(store, records)
    if style == "table":
        show_matrix(store, allow_incomparable=allow_incomparable, margin_points=margin_points)
        return
    found = load_matrix(store, allow_incomparable=allow_incomparable, margin_points=margin_points)
    write_matrix(store, found)
    click.echo(store.matrix_file(style).read_text(encoding="utf-8"), nl=False)
