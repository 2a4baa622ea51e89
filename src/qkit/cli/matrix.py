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
@click.option(
    "--price",
    type=click.FloatRange(min=0, min_open=True),
    metavar="PER_HOUR",
    help="What an hour of the machine costs; adds a table of capacity and cost.",
)
@click.option("--currency", metavar="CODE", help="Of --price. Default: the recipe's, else USD.")
@click.option(
    "--tokens-per-request",
    type=click.FloatRange(min=0, min_open=True),
    help="Output tokens of a request in that table. Default: the benchmark's own.",
)
def matrix(
    run_name: str | None,
    style: str,
    allow_incomparable: bool,
    records: Path | None,
    margin_points: float | None,
    price: float | None,
    currency: str | None,
    tokens_per_request: float | None,
) -> None:
    """Print the matrix of a run again, from its stored files.

    RUN is the name of a folder under artifacts/, or its path. Without it, the run that was
    written to last.
    """
    from qkit.assemble import load_matrix, price_of, write_matrix
    from qkit.cli.printing import show_matrix
    from qkit.store import latest_run, open_run

    store = open_run(run_name) if run_name else latest_run()
    if records:
        from qkit.assemble import write_records

        write_records(store, records)
    chosen = price_of(
        store.read_recipe(),
        per_hour=price,
        currency=currency,
        tokens_per_request=tokens_per_request,
    )
    if style == "table":
        show_matrix(
            store,
            allow_incomparable=allow_incomparable,
            margin_points=margin_points,
            price=chosen,
        )
        return
    found = load_matrix(
        store,
        allow_incomparable=allow_incomparable,
        margin_points=margin_points,
        price=chosen,
    )
    write_matrix(store, found)
    click.echo(store.matrix_file(style).read_text(encoding="utf-8"), nl=False)
