"""Content hashes of checkpoints and values, the keys by which work is found done.

A checkpoint's hash covers its weights, configuration, tokenizer and chat template. Reading a
large model's weights takes minutes, so a file's digest is remembered by path, size, inode and
modification time.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from qkit.cache import cache_dir
from qkit.protocol import write_json

BLOCK = 1 << 22
#: Files beside the weights that change what a served checkpoint answers.
CONTENT_PATTERNS = ("*.safetensors", "*.safetensors.index.json", "config.json")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)


def hash_value(value: Any) -> str:
    """Return the SHA-256 of a JSON-able value in canonical form."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def hash_file(path: Path) -> str:
    """Return a file's SHA-256, remembered while size, inode and modification time stay."""
    stat = path.stat()
    stamp = [str(path.resolve()), stat.st_size, stat.st_ino, stat.st_mtime_ns]
    memory = cache_dir() / "digests" / f"{hash_value(stamp)}.json"
    try:
        return str(json.loads(memory.read_text())["sha256"])
    except (OSError, ValueError, KeyError):
        pass
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(BLOCK):
            digest.update(block)
    # Small files are read faster than remembered.
    if stat.st_size > BLOCK:
        memory.parent.mkdir(parents=True, exist_ok=True)
        write_json(memory, {"sha256": digest.hexdigest(), "path": os.fspath(path)})
    return digest.hexdigest()


def hash_files(folder: Path, names: list[Path]) -> str:
    """Return one hash over files' names and contents, in the order of their names."""
    return hash_value([[path.relative_to(folder).as_posix(), hash_file(path)] for path in names])


def hash_checkpoint(folder: Path) -> str:
    """Return the content hash of a checkpoint folder: weights, configuration and tokenizer."""
    files = {path for pattern in CONTENT_PATTERNS for path in folder.glob(pattern)}
    files |= {folder / name for name in TOKENIZER_FILES if (folder / name).is_file()}
    files |= {folder / name for name in ("generation_config.json",) if (folder / name).is_file()}
    return hash_files(folder, sorted(files))


def hash_tokenizer(folder: Path) -> str:
    """Return the hash of a checkpoint's tokenizer and chat template."""
    return hash_files(
        folder, sorted(folder / name for name in TOKENIZER_FILES if (folder / name).is_file())
    )
