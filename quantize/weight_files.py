"""Which files of a checkpoint folder hold its weights, and what is wrong with them.

Shards are held against their index: missing, truncated, extra, of another version. Weights in
other formats are named for what they are. Only headers are read. Standard library only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from qkit.errors import InputError
from qkit.quantize.safetensors_header import TensorInfo, read_header

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
#: Files that hold weights, in any format.
WEIGHT_PATTERNS = ("*.safetensors", INDEX_FILE, "*.gguf", "*.bin", "*.pt", "*.pth")
#: Mistral's own copy of the weights, which loaders of the sharded form pass over.
CONSOLIDATED = "consolidated"
_SHOWN = 3


def has_weights(path: Path) -> bool:
    """Tell whether a folder holds any weights, whole or not, in any format."""
    return any(next(path.glob(pattern), None) is not None for pattern in WEIGHT_PATTERNS)


def read_tensors(folder: Path) -> dict[str, TensorInfo]:
    """Return the stored tensors of a checkpoint folder by name, the data left unread.

    Raises:
        InputError: No safetensors weights, a shard missing, truncated, extra or at odds with the
            index.
    """
    if (folder / INDEX_FILE).is_file():
        return _read_sharded(folder)
    if (folder / WEIGHTS_FILE).is_file():
        _check_extra(folder, {WEIGHTS_FILE})
        return read_header(folder / WEIGHTS_FILE)
    return explain_no_weights(folder)


def _read_sharded(folder: Path) -> dict[str, TensorInfo]:
    path = folder / INDEX_FILE
    index = read_json_file(path)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(
            f"{INDEX_FILE} has no weight_map", where=path, fix="download or copy this file again"
        )
    shards = sorted({str(name) for name in weight_map.values()})
    missing = [name for name in shards if not (folder / name).is_file()]
    if missing:
        raise InputError(
            f"{len(missing)} of {len(shards)} shards are missing: {_some(missing)}",
            where=folder,
            fix="download or copy the missing files",
        )
    headers = {name: read_header(folder / name) for name in shards}
    absent = [name for name, shard in weight_map.items() if name not in headers[str(shard)]]
    if absent:
        raise InputError(
            f"{INDEX_FILE} names {len(absent)} tensors that are not in the shard it gives for"
            f" them: {_some(sorted(absent))}",
            where=path,
            fix="the index and the shards are of different versions: download both again",
        )
    _check_extra(folder, set(shards))
    tensors = {name: info for header in headers.values() for name, info in header.items()}
    if unlisted := sorted(set(tensors) - set(weight_map)):
        raise InputError(
            f"the shards hold {len(unlisted)} tensors that {INDEX_FILE} does not name:"
            f" {_some(unlisted)}",
            where=path,
            fix="the index and the shards are of different versions: download both again",
        )
    return tensors


def _check_extra(folder: Path, listed: set[str]) -> None:
    """Refuse safetensors files that belong to none of the listed: some loaders would take them."""
    extra = sorted(
        path.name
        for path in folder.glob("*.safetensors")
        if path.name not in listed and not path.name.startswith(CONSOLIDATED)
    )
    if extra:
        raise InputError(
            f"{len(extra)} safetensors files do not belong to the checkpoint: {_some(extra)}",
            where=folder,
            fix="left over from another version? move them out of the folder; loaders differ in"
            " which files they take",
        )


def explain_no_weights(folder: Path) -> NoReturn:
    """Raise an InputError that says what a folder without safetensors weights holds instead."""
    convert = "load it in transformers and save it with save_pretrained (safetensors)"
    if stray := sorted(folder.glob("*.safetensors")):
        raise InputError(
            f"there are {len(stray)} safetensors files but neither {WEIGHTS_FILE} nor {INDEX_FILE}",
            where=folder,
            fix="download the missing index file",
        )
    if found := sorted(folder.glob("*.gguf")):
        raise InputError(
            f"the weights are GGUF ({found[0].name}), which is quantized for llama.cpp",
            where=folder,
            fix="give the original Hugging Face checkpoint",
        )
    if found := sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]):
        raise InputError(
            f"the weights are pickled PyTorch files ({found[0].name}), which can run code when"
            " they are loaded",
            where=folder,
            fix=f"take the model's safetensors version, or convert it: {convert}",
        )
    raise InputError(
        f"{folder.name!r} has no weights (*.safetensors)",
        where=folder,
        fix="download the checkpoint completely",
    )


def read_json_file(path: Path) -> Any:
    """Return a JSON file's value.

    Raises:
        InputError: It is not valid JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(
            f"{path.name} is not valid JSON: {error}",
            where=path,
            fix="download or copy this file again",
        ) from error


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown
