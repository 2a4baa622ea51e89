"""Read safetensors headers and single tensors without torch.

A file is an 8-byte little-endian header length, a JSON header (tensor name to dtype, shape and
data offsets), then the data; see https://github.com/huggingface/safetensors#format.
Standard library only, so that a checkpoint is checked in milliseconds wherever it lies.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkit.errors import InputError

LENGTH_BYTES = 8
#: The format's own limit, which keeps a file of another kind from being read as a header.
MAX_HEADER_BYTES = 100_000_000
CHUNK_BYTES = 1 << 24
LFS_POINTER = b"version https://git-lfs"
DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
}
_FETCH_AGAIN = "download or copy this file again"


@dataclass(frozen=True)
class TensorInfo:
    """A stored tensor: its shape, dtype as safetensors names it, bytes and place.

    Attributes:
        file: File the tensor is in.
        offset: Position of its first byte in the file.
    """

    shape: tuple[int, ...]
    dtype: str
    bytes: int
    file: Path
    offset: int


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors of one safetensors file by name, the data left unread.

    Raises:
        InputError: The file is a Git LFS pointer, truncated, longer than its header says, or not
            safetensors.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        start = stream.read(LENGTH_BYTES)
        if LFS_POINTER.startswith(start) and start:
            raise InputError(
                f"{path.name} is a Git LFS pointer, not the weights",
                where=path,
                fix="run `git lfs pull` in the checkpoint's folder, or download it with"
                " `hf download`",
            )
        length = int.from_bytes(start, "little")
        if len(start) < LENGTH_BYTES:
            raise InputError(
                f"{path.name} is truncated: it has {size} bytes, too few for a safetensors file",
                where=path,
                fix=_FETCH_AGAIN,
            )
        if length > MAX_HEADER_BYTES:
            raise InputError(f"{path.name} is not a safetensors file", where=path, fix=_FETCH_AGAIN)
        if LENGTH_BYTES + length > size:
            raise InputError(
                f"{path.name} is truncated inside its header: it has {size} bytes, the header"
                f" alone takes {LENGTH_BYTES + length}",
                where=path,
                fix=_FETCH_AGAIN,
            )
        raw = stream.read(length)
    tensors = _parse(raw, path, data_start=LENGTH_BYTES + length)
    promised = max((t.offset + t.bytes for t in tensors.values()), default=LENGTH_BYTES + length)
    if size != promised:
        kind = "truncated" if size < promised else "longer than it should be"
        raise InputError(
            f"{path.name} is {kind}: it has {size} bytes, its header promises {promised}",
            where=path,
            fix=_FETCH_AGAIN,
        )
    return tensors


def read_bytes(tensor: TensorInfo) -> bytes:
    """Return a tensor's raw little-endian data."""
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.offset)
        return stream.read(tensor.bytes)


def same_data(first: TensorInfo, second: TensorInfo) -> bool:
    """Tell whether two tensors have the same bytes, without holding them in memory."""
    if first.bytes != second.bytes:
        return False
    with first.file.open("rb") as one, second.file.open("rb") as other:
        one.seek(first.offset)
        other.seek(second.offset)
        left = first.bytes
        while left:
            size = min(left, CHUNK_BYTES)
            if one.read(size) != other.read(size):
                return False
            left -= size
    return True


def _parse(raw: bytes, path: Path, *, data_start: int) -> dict[str, TensorInfo]:
    try:
        header = json.loads(raw)
    except ValueError as error:
        raise InputError(
            f"{path.name} is not a safetensors file: its header is not JSON",
            where=path,
            fix=_FETCH_AGAIN,
        ) from error
    if not isinstance(header, dict):
        raise InputError(f"{path.name} is not a safetensors file", where=path, fix=_FETCH_AGAIN)
    return {
        name: _tensor(name, entry, path, data_start)
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _tensor(name: str, entry: Any, path: Path, data_start: int) -> TensorInfo:
    try:
        dtype, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
        begin, end = (int(n) for n in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path.name} is damaged: its header's entry for {name!r} is not complete",
            where=path,
            fix=_FETCH_AGAIN,
        ) from error
    bits = DTYPE_BITS.get(dtype)
    if bits is not None and math.prod(shape) * bits // 8 != end - begin:
        raise InputError(
            f"{path.name} is damaged: {name!r} has {end - begin} bytes, its shape"
            f" {list(shape)} in {dtype} takes {math.prod(shape) * bits // 8}",
            where=path,
            fix=_FETCH_AGAIN,
        )
    return TensorInfo(shape, dtype, end - begin, path, data_start + begin)
