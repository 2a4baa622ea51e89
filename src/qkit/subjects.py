"""What is measured: a checkpoint with a name, quantized or not."""

from __future__ import annotations

from pathlib import Path

from qkit.errors import InputError
from qkit.hashing import hash_checkpoint, hash_value
from qkit.measurements import Subject
from qkit.quantize.checkpoint import (
    EMBEDDINGS,
    Checkpoint,
    inspect_checkpoint,
    split_bytes,
)
from qkit.quantize.estimate import kv_bytes_per_token, weight_bytes
from qkit.recipe import Variant
from qkit.store import VARIANT_FILE, read_variant


def label_of(folder: Path) -> str:
    """Return the name of a checkpoint folder's row.

    In a run every checkpoint's folder is called "model", and the variant's name says more.
    """
    path = folder.resolve()
    return path.parent.name if path.name == "model" else path.name


def subject_of(label: str, path: Path) -> Subject:
    """Inspect a checkpoint folder and return it as something to measure.

    Raises:
        InputError: The folder is not a whole checkpoint, or is not what its qkit.json says.
    """
    checkpoint = inspect_checkpoint(path)
    record = read_variant(path)
    content_hash = hash_checkpoint(path)
    if record and record.content_hash != content_hash:
        raise InputError(
            "the checkpoint is not the one its qkit.json describes: its files were changed",
            where=path / VARIANT_FILE,
            fix="quantize it again, or remove qkit.json to measure it as an unknown checkpoint",
        )
    quantized, unquantized = split_bytes(checkpoint)
    return Subject(
        label=label,
        path=path,
        method=record.method if record else checkpoint.quantization,
        scheme=record.scheme if record else scheme_of(checkpoint),
        content_hash=content_hash,
        record=record,
        weight_bytes=quantized + unquantized,
        quantized_bytes=quantized,
        unquantized_bytes=unquantized,
        read_bytes=_read_bytes(checkpoint),
        kv_bytes_per_token=_kv_bytes(checkpoint),
    )


def predict_bytes(source: Path, variant: Variant | None) -> int:
    """Return the weight bytes that `qkit plan` predicts for a variant; None is the source."""
    return weight_bytes(inspect_checkpoint(source), variant).total


def attached_subject(label: str, url: str, model: str, tokenizer: Path) -> Subject:
    """Return a running server's model as something to measure; its weights are not known.

    Args:
        label: Name of its row.
        url: Root of the server.
        model: Name it serves the model under.
        tokenizer: Folder with the model's tokenizer.
    """
    return Subject(
        label=label,
        path=tokenizer,
        method=None,
        scheme="as served",
        content_hash=f"attached:{hash_value([url, model])}",
    )


def _read_bytes(checkpoint: Checkpoint) -> int:
    """Return the bytes of weights one decoding step reads: all but what loaders leave out.

    A token needs one row of an input embedding table of its own; tied embeddings are read as the
    output head.
    """
    unread = checkpoint.redundant_head if checkpoint.tied else checkpoint.tensors.get(EMBEDDINGS)
    return checkpoint.weight_bytes - (unread.bytes if unread else 0)


def _kv_bytes(checkpoint: Checkpoint) -> int:
    """Return the KV-cache bytes of one token, halved where the checkpoint asks for an FP8 cache."""
    size = kv_bytes_per_token(checkpoint)
    settings = checkpoint.config.get("quantization_config") or {}
    return size // 2 if settings.get("kv_cache_scheme") else size


def scheme_of(checkpoint: Checkpoint) -> str:
    """Return the scheme of a checkpoint qkit did not make."""
    if checkpoint.quantization:
        return checkpoint.quantization
    return {"F16": "FP16", "F32": "FP32"}.get(checkpoint.dtype, checkpoint.dtype)
