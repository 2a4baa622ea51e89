"""The public Qwen2.5-Instruct configs, as folders with a config.json and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

CONFIGS = Path(__file__).parents[1] / "golden" / "configs"
SIZES = ("0.5B", "1.5B", "3B", "7B", "14B", "32B", "72B")


def config_folder(parent: Path, size: str) -> Path:
    """Make a folder with the config of Qwen2.5-SIZE-Instruct in `parent` and return it."""
    folder = parent / f"Qwen2.5-{size}-Instruct"
    folder.mkdir()
    shutil.copyfile(CONFIGS / f"qwen2.5-{size.lower()}-instruct.json", folder / "config.json")
    return folder
