"""Reports of a hand-written run, compared whole with the files in tests/golden.

After a change that is meant, write them again and read the difference:

    QKIT_UPDATE_GOLDEN=1 python -m pytest tests/unit/test_report_golden.py; git diff tests/golden
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from golden import matrix_input as given
from rich.console import Console

from qkit.evaluate.derived import Price
from qkit.evaluate.matrix import Matrix, build_matrix
from qkit.evaluate.report import csv_file, html, markdown, terminal

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
UPDATE = os.environ.get("QKIT_UPDATE_GOLDEN") == "1"


def golden_matrix() -> Matrix:
    return build_matrix(
        run="qwen2.5-7b-a800",
        created="2026-12-01T02:00:00Z",
        baseline="bf16",
        variants=[given.baseline(scored_again=True), *given.quantized()],
        references=given.REFERENCES,
        price=Price(per_hour=15, currency="CNY", tokens_per_request=200),
    )


def on_terminal(matrix: Matrix, width: int = 100) -> str:
    """Return what a terminal without colours shows; padding at the ends of lines left out."""
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, force_terminal=False)
    console.print(terminal.render(matrix, width))
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


RENDERERS: dict[str, Callable[[Matrix], str]] = {
    "matrix.json": lambda matrix: matrix.model_dump_json(indent=2) + "\n",
    "matrix.md": markdown.render,
    "matrix.csv": csv_file.render,
    "matrix.tasks.csv": csv_file.render_tasks,
    "matrix.html": html.render,
    "matrix_100_columns.txt": on_terminal,
}


@pytest.mark.parametrize("name", RENDERERS)
def test_report_is_as_before(name: str) -> None:
    text = RENDERERS[name](golden_matrix())
    path = GOLDEN / name
    if UPDATE:
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", RENDERERS)
def test_a_matrix_read_from_its_json_gives_the_same_report(name: str) -> None:
    read = Matrix.model_validate_json((GOLDEN / "matrix.json").read_text(encoding="utf-8"))
    assert RENDERERS[name](read) == (GOLDEN / name).read_text(encoding="utf-8")
