"""What must hold after `qkit quantize` was killed: the judgements of `kill_quantize.py`."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from qkit.errors import EXIT_CELLS_FAILED, QkitError
from qkit.hashing import hash_checkpoint
from qkit.quantize.backends import BACKENDS
from qkit.quantize.checkpoint import inspect_checkpoint
from qkit.quantize.job import VERIFICATIONS
from qkit.recipe import Variant
from qkit.store import RunStore, read_variant


def readers_it_passes_for(folder: Path) -> list[str]:
    """Name the readers that would take a folder for a checkpoint, whatever is in its files."""
    readers = []
    with contextlib.suppress(QkitError):
        if read_variant(folder) is not None:
            readers.append("qkit")
    index = folder / "model.safetensors.index.json"
    shards = (
        {folder / name for name in json.loads(index.read_text())["weight_map"].values()}
        if index.is_file()
        else {folder / "model.safetensors"}
    )
    if (folder / "config.json").is_file() and all(shard.is_file() for shard in shards):
        readers.append("transformers")
    return readers


def what_is_wrong(folder: Path, source: Path, variant: Variant) -> str | None:
    """Return why a folder is not a finished variant, None where it is one."""
    try:
        record = read_variant(folder)
        if record is None:
            return "it has no qkit.json"
        if hash_checkpoint(folder) != record.content_hash:
            return "its files are not those its qkit.json describes"
        VERIFICATIONS[BACKENDS[variant.backend].storage](
            folder, inspect_checkpoint(source), variant
        )
    except QkitError as error:
        return error.what
    return None


def judge_folder(folder: Path, source: Path, variant: Variant, *, had_one: bool) -> list[str]:
    """Return the violations a variant's folder shows after a kill.

    Args:
        folder: The folder under its final name.
        source: What it was made from.
        variant: What was being made.
        had_one: Whether a whole variant was there before the killed run.
    """
    if folder.exists():
        wrong = what_is_wrong(folder, source, variant)
        readers = readers_it_passes_for(folder)
        passes = f"passes for finished with {' and '.join(readers)}" if readers else "is there"
        return [] if wrong is None else [f"an unfinished folder {passes}: {wrong}"]
    # Cut between the two renames, the earlier variant is beside it and put back by the next run.
    aside = folder.parent.glob(f".{folder.name}.old-*")
    if had_one and not any(what_is_wrong(path, source, variant) is None for path in aside):
        return ["the earlier variant is gone"]
    return []


def left_behind(root: Path) -> list[str]:
    """Return temporary files and folders in a run's folder, relative to it."""
    hidden = (path for path in sorted(root.rglob(".*")) if path.name != ".lock")
    return [path.relative_to(root).as_posix() for path in hidden]


def judge_rerun(
    code: int, output: str, store: RunStore, source: Path, variant: Variant, content_hash: str
) -> list[str]:
    """Return the violations of a run that followed a killed one."""
    if code:
        return [f"the next run ended with {code}: {output.strip()[-400:]}"]
    folder = store.model_dir(variant.label)
    found = []
    if not folder.exists():
        found.append("the next run made no variant")
    elif wrong := what_is_wrong(folder, source, variant):
        found.append(f"the next run's variant is not whole: {wrong}")
    elif hash_checkpoint(folder) != content_hash:
        found.append("the next run's variant is not the undisturbed run's")
    if left := left_behind(store.root):
        found.append(f"left after the next run: {', '.join(left)}")
    return found


def judge_worker_death(code: int, output: str) -> list[str]:
    """Return what is wrong with how qkit reported that its worker was killed."""
    found = []
    if code != EXIT_CELLS_FAILED:
        found.append(
            f"qkit ended with {code}, not {EXIT_CELLS_FAILED}, after its worker was killed"
        )
    if "the worker was killed by SIGKILL" not in output:
        found.append(f"qkit did not say that its worker was killed: {output.strip()[-400:]}")
    if "Traceback" in output:
        found.append("qkit printed a traceback")
    return found
