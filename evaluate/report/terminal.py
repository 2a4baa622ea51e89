"""The matrix in a terminal: rich tables that split and fold instead of cutting anything off."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from qkit.evaluate.matrix_values import Matrix
from qkit.evaluate.report import text
from qkit.evaluate.report.remarks import Remark, drift, machine, remarks, versions
from qkit.evaluate.report.sheet import (
    CONCURRENCY,
    RATE,
    VARIANT,
    Cell,
    Column,
    Sheet,
    Tone,
    opens_group,
)
from qkit.evaluate.report.sheets import score_sheets, sheets

#: Columns of a terminal whose width is not known; what the layout is made for.
DEFAULT_WIDTH = 100
#: Longest piece of a kernel's name in one line.
NAME_WIDTH = 20
#: Spaces between columns, the first that fits.
GAPS = (2, 1)

_STYLES: dict[Tone, str] = {"": "dim", "good": "green", "bad": "bold red", "unsure": "yellow"}
_REMARK_STYLES = {"note": "yellow", "failed": "bold red", "mark": "yellow"}


def render(matrix: Matrix, width: int | None = None) -> Group:
    """Return the matrix as rich renderables.

    A table that is wider than the terminal is set closer, or else split by groups of columns.

    Args:
        matrix: What to show.
        width: Columns of the terminal; 100 where it is not known.
    """
    parts: list[RenderableType] = [_heading(matrix)]
    parts += _tables(sheets(matrix), width or DEFAULT_WIDTH)
    parts.append(Text(_reading_aid(matrix), style="dim"))
    return Group(*parts, *_remarks(matrix))


def render_scores(matrix: Matrix, width: int | None = None) -> Group:
    """Return a matrix that holds nothing but scores, as `qkit compare` makes it."""
    parts: list[RenderableType] = [Text(matrix.run, style="bold")]
    parts += _tables(score_sheets(matrix), width or DEFAULT_WIDTH)
    return Group(*parts, *_remarks(matrix))


def _tables(shown: Iterable[Sheet], room: int) -> list[RenderableType]:
    """Lay out sheets, one below the other."""
    parts: list[RenderableType] = []
    for sheet in shown:
        grid = _grid(sheet)
        fits = grid.width(min(GAPS)) <= room
        for part in (grid,) if fits else map(_grid, _split(sheet)):
            gap = next((gap for gap in GAPS if part.width(gap) <= room), min(GAPS))
            parts += [Text(), _title(part.sheet), _table(part, gap)]
    return parts


def _remarks(matrix: Matrix) -> list[RenderableType]:
    found = remarks(matrix)
    return [Text(), Text("Remarks", style="bold"), *map(_remark, found)] if found else []


# ----------------------------------------------------------------------------------------- text


def _heading(matrix: Matrix) -> Text:
    heading = Text()
    heading.append(matrix.run, style="bold")
    heading.append(f"  against {matrix.baseline}, {matrix.created}\n")
    heading.append(f"{machine(matrix)}\n{versions(matrix)}", style="dim")
    return heading


def _title(sheet: Sheet) -> Text:
    title = Text(sheet.title, style="bold")
    if sheet.caption:
        title.append(f"  {sheet.caption}", style="not bold dim")
    return title


def _reading_aid(matrix: Matrix) -> str:
    aids = []
    if any(row.bench for row in matrix.rows):
        aids.append(
            f"Ratios to {matrix.baseline} hold for their {_levels(matrix)}: below 1x is faster "
            "for TTFT and TPOT, above 1x for tok/s."
        )
    if drifted := drift(matrix):
        aids.append(drifted)
    return "\n".join(aids)


def _levels(matrix: Matrix) -> str:
    opened = any(cell.level.is_open for row in matrix.rows for cell in row.bench)
    return "rate" if opened else "concurrency"


def _remark(remark: Remark) -> RenderableType:
    line = Text()
    style = _REMARK_STYLES["failed" if remark.loud else remark.kind]
    line.append("- ", style=style)
    line.append(remark.line, style=style if remark.loud else "")
    return Padding(line, (0, 0, 0, 2))


# --------------------------------------------------------------------------------------- tables


@dataclass(frozen=True)
class _Grid:
    """A sheet laid out as text, before it is known whether it fits."""

    sheet: Sheet
    headers: tuple[Text, ...]
    #: Lines of cells; a lone cell is the heading of a section.
    rows: tuple[tuple[Text, ...], ...]

    def width(self, gap: int) -> int:
        """Return the columns of the terminal that are needed with `gap` spaces between cells."""
        widths = [_width(header) for header in self.headers]
        for row in self.rows:
            for index, cell in enumerate(row):
                widths[index] = max(widths[index], _width(cell))
        return sum(widths) + gap * (len(widths) - 1) + 2  # one space at either edge


def _grid(sheet: Sheet) -> _Grid:
    """Lay out a sheet; its sections become headings in the place of a column."""
    kept = [
        index for index, column in enumerate(sheet.columns) if column not in (CONCURRENCY, RATE)
    ]
    columns = [sheet.columns[index] for index in kept]
    opens = [opens_group(columns, index) for index in range(len(columns))]
    rows: list[tuple[Text, ...]] = []
    section = ""
    named = "rate, req/s:" if RATE in sheet.columns else "concurrency"
    for line in sheet.lines:
        if line.section != section:
            section = line.section
            rows.append((Text(f"{named} {section}", style="bold cyan"),))
        cells = (_cell(sheet.columns[index], line.cells[index], line.failed) for index in kept)
        rows.append(tuple(_indent(cell, o) for cell, o in zip(cells, opens, strict=True)))
    headers = (Text(_header(column), style="bold") for column in columns)
    return _Grid(
        replace(sheet, columns=tuple(columns)),
        tuple(_indent(header, o) for header, o in zip(headers, opens, strict=True)),
        tuple(rows),
    )


def _table(grid: _Grid, gap: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, gap - 1, 0, 0))
    for column, header in zip(grid.sheet.columns, grid.headers, strict=True):
        table.add_column(
            header,
            justify="right" if column.numeric else "left",
            vertical="top",
            overflow="fold",
        )
    for row in grid.rows:
        table.add_row(*row)
    return table


def _split(sheet: Sheet) -> tuple[Sheet, ...]:
    """Split a sheet into one for each group of columns; key columns are in all of them."""
    groups = dict.fromkeys(column.group for column in sheet.columns if not column.key)
    parts = []
    for number, group in enumerate(groups):
        kept = [i for i, column in enumerate(sheet.columns) if column.key or column.group == group]
        parts.append(
            Sheet(
                f"{sheet.title}: {group}" if group else sheet.title,
                "" if number else sheet.caption,
                tuple(sheet.columns[index] for index in kept),
                tuple(
                    replace(line, cells=tuple(line.cells[index] for index in kept))
                    for line in sheet.lines
                ),
            )
        )
    return tuple(parts)


# ---------------------------------------------------------------------------------------- cells


def _header(column: Column) -> str:
    """Return a heading of two short lines: the group above the title, or the title's words."""
    return f"{column.group}\n{column.title}" if column.group else _last_word_below(column.title)


def _last_word_below(words: str) -> str:
    return "\n".join(words.rsplit(" ", 1))


def _cell(column: Column, cell: Cell, failed: bool) -> Text:
    main = cell.main
    if column.title == "Kernel":
        main = _fold(main)
    elif column.title == "Scheme":
        main = _last_word_below(main)
    shown = Text(main)
    if cell.sub:
        style = "bold red" if failed and column == VARIANT else _STYLES[cell.tone]
        shown.append(f"\n{cell.sub}", style=style)
    return shown


def _fold(name: str) -> str:
    """Break a long CamelCase name at its humps, `CutlassFP8ScaledMM / LinearKernel`."""
    lines = [""]
    for hump in text.humps(name):
        if lines[-1] and len(lines[-1]) + len(hump) > NAME_WIDTH:
            lines.append(hump.lstrip())
        else:
            lines[-1] += hump
    return "\n".join(lines)


def _indent(cell: Text, indented: bool) -> Text:
    """Set the first column of a group apart by a space."""
    return Text("\n").join(Text(" ") + line for line in cell.split("\n")) if indented else cell


def _width(cell: Text) -> int:
    return max((line.cell_len for line in cell.split("\n", allow_blank=True)), default=0)
