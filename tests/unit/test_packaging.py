"""The two conditions that keep `import evaluate` Hugging Face's (see CONTRIBUTING)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("quantize", "evaluate", "recipes")
HEAVY = (
    *("torch", "transformers", "datasets", "lm_eval", "aiohttp", "pandas", "numpy", "scipy"),
    *("pydantic", "rich", "yaml"),
)


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.mark.parametrize("folder", [*FOLDERS, "tests"])
def test_the_top_folders_are_no_regular_packages(folder):
    assert list((ROOT / folder).rglob("__init__.py")) == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_source_folder_holds_relative_symlinks(folder):
    link = ROOT / "src" / "qkit" / folder
    assert link.is_symlink()
    assert link.readlink() == Path("..") / ".." / folder


def test_evaluate_is_hugging_faces_from_the_root():
    where = python("import evaluate; print(evaluate.__file__, hasattr(evaluate, 'load'))")
    assert "site-packages" in where
    assert where.strip().endswith("True")


def test_our_evaluate_is_qkits():
    assert "qkit/evaluate" in python("import qkit.evaluate as e; print(list(e.__path__)[0])")


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from click.testing import CliRunner; from qkit.cli import cli;"
        "assert CliRunner().invoke(cli, ['--help']).exit_code == 0;"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    assert python(code).strip() == "[]"


def test_a_backends_worker_needs_only_the_standard_library():
    code = (
        "import sys, importlib; from pathlib import Path;"
        "import qkit.protocol, qkit.errors;"
        f"print([name for name in (*{HEAVY!r}, 'click') if name in sys.modules])"
    )
    assert python(code).strip() == "[]"
