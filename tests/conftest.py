"""Shared fixtures: the fakes are importable, and the backends' interpreters are found once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def quantize_python() -> Path:
    """Return the interpreter of the quantize environment (made with `qkit env create`)."""
    from qkit.environments import python_of

    return python_of("quantize", "cpu")


@pytest.fixture(scope="session")
def serve_python() -> Path:
    """Return the interpreter of the serve environment (made with `qkit env create`)."""
    from qkit.environments import python_of

    return python_of("serve", "cpu")
