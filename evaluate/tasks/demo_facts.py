"""Questions of the task `demo_facts`, which ship beside the demo's recipe."""

from __future__ import annotations

import json
from typing import Any

import datasets

from qkit.recipe import RECIPES_DIR

SOURCE = RECIPES_DIR / "demo" / "facts.jsonl"


def load(**_: Any) -> dict[str, datasets.Dataset]:
    """Return the questions as the split `test`: question, choices and the right one's index."""
    lines = SOURCE.read_text(encoding="utf-8").splitlines()
    return {"test": datasets.Dataset.from_list([json.loads(line) for line in lines])}
