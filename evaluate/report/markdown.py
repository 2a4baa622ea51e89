"""The matrix as GitHub-flavoured Markdown: the same sheets, every cell on one line."""

from __future__ import annotations

import re
from collections.abc import Iterable

from qkit.evaluate.marks import one_line
from qkit.evaluate.matrix_values import Matrix
from qkit.evaluate.report.remarks import drift, legend, machine, remarks, versions
from qkit.evaluate.report.sheet import Sheet
from qkit.evaluate.report.sheets import sheets

#: What Markdown would take for formatting, HTML or a link; single brackets and underscores inside
#: words are left, so that the text stays readable as it is.
_SPECIAL = re.compile(
    r"[\\`*|~]|(?<!\w)_|_(?!\w)|<(?=[A-Za-z/!?])|&(?=#?\w+;)|\[(?=[^\]]*\][(\[:])"
)


def render(matrix: Matrix) -> str:
    """Return the matrix as Markdown that ends with a line break."""
    shown = sheets(matrix, intervals=True)
    blocks = [
        f"# {_escape(matrix.run)}",
        f"Against {_escape(matrix.baseline)}, {_escape(matrix.created)}.",
        _list((f"Machine: {_escape(machine(matrix))}", f"Versions: {_escape(versions(matrix))}")),
    ]
    for sheet in shown:
        blocks.append(f"## {_escape(sheet.title)}")
        if sheet.caption:
            blocks.append(_escape(sheet.caption[0].upper() + sheet.caption[1:]) + ".")
        blocks.append(_table(sheet))
    found = [_escape(remark.line) for remark in remarks(matrix)]
    if drifted := drift(matrix):
        found.append(_escape(drifted))
    if found:
        blocks += ["## Remarks", _list(found)]
    blocks.append("## What the columns mean")
    blocks.append(_list(f"**{_escape(c.name)}**: {_escape(c.meaning)}" for c in legend(shown)))
    return "\n\n".join(blocks) + "\n"


def _table(sheet: Sheet) -> str:
    """Return an aligned table, readable as plain text too."""
    rows = [[column.name for column in sheet.columns]]
    rows += [[cell.inline for cell in line.cells] for line in sheet.lines]
    escaped = [[_escape(text) for text in row] for row in rows]
    widths = [max(3, *(len(row[i]) for row in escaped)) for i in range(len(sheet.columns))]
    numeric = [column.numeric for column in sheet.columns]
    rule = ["-" * (w - 1) + ":" if n else "-" * w for w, n in zip(widths, numeric, strict=True)]
    lines = [
        [
            text.rjust(w) if n else text.ljust(w)
            for text, w, n in zip(row, widths, numeric, strict=True)
        ]
        for row in escaped
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in (lines[0], rule, *lines[1:]))


def _list(items: Iterable[str]) -> str:
    return "\n".join(f"- {item}" for item in items)


def _escape(text: str) -> str:
    """Return text that Markdown shows as it is, on one line."""
    return _SPECIAL.sub(r"\\\g<0>", one_line(text))
