"""Shared fixtures: the fakes are importable, and the backends' interpreters are found once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def own_lock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the tests' lock apart from that of a qkit in use on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QKIT_LOCK_DIR", str(tmp_path_factory.mktemp("locks")))
        yield


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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs a GPU unless it is asked for with `-m gpu`."""
    if "gpu" in config.getoption("markexpr"):
        return
    left_out = [item for item in items if item.get_closest_marker("gpu")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
