"""The matrix as one self-contained HTML page: tables and inline SVG charts, no script, no links."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from jinja2 import Environment, StrictUndefined, Template

from qkit.evaluate.matrix_values import Matrix, Row
from qkit.evaluate.report import charts, text
from qkit.evaluate.report.remarks import drift, legend, machine, remarks, versions
from qkit.evaluate.report.sheet import Column, Line, Sheet, opens_group
from qkit.evaluate.report.sheets import sheets

TEMPLATE = Path(__file__).with_name("matrix.html.jinja")


@dataclass(frozen=True)
class _Span:
    """Columns side by side under one heading; `group` is empty where there is none."""

    group: str
    columns: tuple[Column, ...]


@dataclass(frozen=True)
class _Section:
    """Lines that belong together; where they have a name, it stands for their first cells."""

    name: str
    lines: tuple[Line, ...]
    columns: tuple[Column, ...]


def render(matrix: Matrix) -> str:
    """Return the page. Everything that comes from the matrix is escaped."""
    shown = sheets(matrix, detailed=True)
    return _template().render(
        matrix=matrix,
        sheets=shown,
        line_charts=charts.line_charts(matrix),
        interval_charts=charts.interval_charts(matrix),
        styles={row.variant: charts.style_of(matrix, row.variant) for row in matrix.rows},
        remarks=remarks(matrix),
        drift=drift(matrix),
        legend=legend(shown),
        machine=machine(matrix),
        versions=versions(matrix),
    )


@cache
def _template() -> Template:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["capitalize_first"] = lambda sentence: sentence[:1].upper() + sentence[1:]
    environment.globals |= {
        "geometry": charts,
        "header_spans": _header_spans,
        "humps": text.humps,
        "integer": text.integer,
        "opens_group": opens_group,
        "missing": text.MISSING,
        "sections": _sections,
        "served": _served,
        "size": text.size,
        "zip": zip,
    }
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8"))


def _header_spans(sheet: Sheet) -> tuple[_Span, ...]:
    grouped = itertools.groupby(sheet.columns, key=lambda column: column.group)
    return tuple(_Span(group, tuple(columns)) for group, columns in grouped)


def _sections(sheet: Sheet) -> tuple[_Section, ...]:
    grouped = itertools.groupby(sheet.lines, key=lambda line: line.section)
    return tuple(_section(name, tuple(lines), sheet.columns) for name, lines in grouped)


def _section(name: str, lines: tuple[Line, ...], columns: tuple[Column, ...]) -> _Section:
    start = 1 if name else 0
    rest = tuple(replace(line, cells=line.cells[start:]) for line in lines)
    return _Section(name, rest, columns[start:])


def _served(row: Row) -> str:
    """Return environment and flags as they would be typed."""
    environment = [f"{name}={value}" for name, value in (row.server_environment or {}).items()]
    return " ".join([*environment, *(row.server_flags or ())]) or text.MISSING
