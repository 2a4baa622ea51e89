"""The parts of a sheet: a small table of formatted text that knows what its columns mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from qkit.evaluate.matrix_values import Row

Tone = Literal["", "good", "bad", "unsure"]


@dataclass(frozen=True)
class Cell:
    """One cell: the figure, and what belongs to it on a second line (or after `joint`)."""

    main: str
    sub: str = ""
    joint: str = ", "
    tone: Tone = ""

    @property
    def inline(self) -> str:
        """Both on one line."""
        return f"{self.main}{self.joint}{self.sub}" if self.sub else self.main


@dataclass(frozen=True)
class Column:
    """A column; columns side by side with the same `group` share a heading."""

    title: str
    meaning: str
    group: str = ""
    numeric: bool = True
    #: Whether the column tells which line this is; it stays where a sheet is split.
    key: bool = False

    #: Whether it is a ratio, so that its group's unit is not its own.
    ratio: bool = False

    @property
    def name(self) -> str:
        """Group and title on one line."""
        group = self.group.removesuffix(" ms") if self.ratio else self.group
        return f"{group} {self.title}".strip()


@dataclass(frozen=True)
class Line:
    """One line of a sheet; consecutive lines of the same `section` belong together."""

    cells: tuple[Cell, ...]
    section: str = ""
    failed: bool = False


@dataclass(frozen=True)
class Sheet:
    """A table with a title and what has to be known to read it."""

    title: str
    caption: str
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]


#: A column and how a row fills it.
RowField = tuple[Column, Callable[[Row], Cell]]

VARIANT = Column("Variant", "Name of the row.", numeric=False, key=True)
#: Columns that name the level; its lines belong together, and it can be a heading instead.
CONCURRENCY = Column("Concurrency", "Requests kept in flight all the time (closed loop).", key=True)

RATE = Column("Rate req/s", "Requests sent a second, by the clock (open loop).", key=True)


def opens_group(columns: Sequence[Column], index: int) -> bool:
    """Whether a column is the first of its group, and so set apart from its left neighbour."""
    group = columns[index].group
    return bool(group) and index > 0 and columns[index - 1].group != group


def row_sheet(title: str, caption: str, fields: Sequence[RowField], rows: Sequence[Row]) -> Sheet:
    """Return a sheet of one line a variant."""
    lines = (
        Line(tuple(show(row) for _, show in fields), failed=row.status == "failed") for row in rows
    )
    return Sheet(title, caption, tuple(column for column, _ in fields), tuple(lines))
