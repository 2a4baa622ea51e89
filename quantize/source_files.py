"""Give a quantized folder the source's own tokenizer, chat template and configuration.

Libraries re-serialize these files when they save, differently from version to version. Copied
byte for byte, all variants of a checkpoint share one tokenizer hash, and readers other than the
library that wrote the weights still understand them. Standard library only: workers import it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from qkit.hashing import TOKENIZER_FILES
from qkit.protocol import write_json
from qkit.quantize.checkpoint import CONFIG_FILE

GENERATION_CONFIG = "generation_config.json"
#: Files a variant has exactly as its source has them.
KEPT_FILES = (*TOKENIZER_FILES, GENERATION_CONFIG)
#: Licence texts go where the weights go.
LICENCE_PATTERNS = ("LICENSE*", "NOTICE*")


def keep_source_files(source: Path, folder: Path) -> None:
    """Make the kept files of `folder` those of `source`, and its config the source's.

    config.json becomes the source's with what quantizing added or changed: `quantization_config`,
    and whether the embeddings are tied in the saved tensors.
    """
    for name in KEPT_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
        else:
            (folder / name).unlink(missing_ok=True)
    for pattern in LICENCE_PATTERNS:
        for path in source.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, folder / path.name)
    config = json.loads((source / CONFIG_FILE).read_text(encoding="utf-8"))
    saved = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    for key in ("quantization_config", "tie_word_embeddings"):
        if key in saved:
            config[key] = saved[key]
    write_json(folder / CONFIG_FILE, config)


def differing_files(source: Path, folder: Path) -> list[str]:
    """Return the kept files that are missing, extra or different in `folder`."""
    return [name for name in KEPT_FILES if _content(source / name) != _content(folder / name)]


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
