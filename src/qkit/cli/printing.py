"""Print a matrix and say where its files are."""

from __future__ import annotations

import click
from rich.console import Console

from qkit.assemble import load_matrix, write_matrix
from qkit.evaluate.derived import Price
from qkit.evaluate.report import terminal
from qkit.store import RunStore

#: Width of a table that is written to a file or a pipe.
PLAIN_WIDTH = 100


def table_console() -> Console:
    """Return the console tables are printed on: the terminal's width, 100 columns in a pipe."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


def show_matrix(
    store: RunStore,
    *,
    allow_incomparable: bool = False,
    margin_points: float | None = None,
    price: Price | None = None,
) -> None:
    """Compute a run's matrix, write its files and print its table."""
    matrix = load_matrix(
        store, allow_incomparable=allow_incomparable, margin_points=margin_points, price=price
    )
    write_matrix(store, matrix)
    console = table_console()
    console.print(terminal.render(matrix, width=console.width))
    files = ", ".join(str(store.matrix_file(suffix)) for suffix in ("html", "json", "csv", "md"))
    click.echo(f"written: {files}", err=True)
