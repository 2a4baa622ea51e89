"""What travels between qkit and a worker: frozen stdlib dataclasses and their JSON form.

This module is imported by workers inside other environments, so it needs nothing but the
standard library (Python 3.10 or newer). `dump` and `load` turn dataclasses into plain JSON values
and back; `load` refuses unknown and missing keys, so that two qkit versions never misread each
other silently.
"""

from __future__ import annotations

import dataclasses
import json
import os
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

SCHEMA_VERSION = 1
REQUEST_FILE = "request.json"
RESULT_FILE = "result.json"
PROGRESS_FILE = "progress.jsonl"
LOG_FILE = "worker.log"

T = TypeVar("T")


class SchemaError(ValueError):
    """A JSON value does not have the shape of the dataclass it is read as."""


# --------------------------------------------------------------------------- requests and results


@dataclass(frozen=True)
class QuantizeRequest:
    """One checkpoint to quantize with one method.

    Attributes:
        method: "awq", "gptq", "fp8", "smoothquant" or "rtn".
        model_path: Source checkpoint folder.
        out_path: Folder the worker writes the checkpoint to; it must not exist.
        calibration_path: JSON Lines file, one list of token ids a line, or None for data-free
            methods.
        weight_bits: Bits of a weight of "gptq" and "rtn", 4 or 8.
        group_size: Weight group size of the W4A16 schemes.
        symmetric: Whether W4A16 weights have no zero point.
        actorder: GPTQ activation order, "static", "group" or None.
        dampening_frac: GPTQ dampening as a fraction of the Hessian's mean diagonal.
        smoothing_strength: SmoothQuant's alpha.
        rounding: How "smoothquant" rounds weights, "gptq" or "rtn".
        scales: Scales of "fp8" and "smoothquant", "dynamic", "static" or "block".
        kv_cache: "fp8" for calibrated KV-cache scales, None for a 16-bit cache.
        ignore: Module names, or `re:` patterns, left unquantized.
        seed: Seed of every random choice.
        device: "cpu" or "cuda".
        trust_remote_code: Whether the checkpoint's own Python code may run.
    """

    method: str
    model_path: str
    out_path: str
    calibration_path: str | None
    weight_bits: int
    group_size: int
    symmetric: bool
    actorder: str | None
    dampening_frac: float
    smoothing_strength: float
    rounding: str
    scales: str
    kv_cache: str | None
    ignore: tuple[str, ...]
    seed: int
    device: str
    trust_remote_code: bool


@dataclass(frozen=True)
class QuantizeResult:
    """What a quantize worker did.

    Attributes:
        scheme: Scheme as the field names it, for example "W4A16_ASYM g128".
        quantized_modules: Names of the Linear layers that were quantized.
        ignored_modules: Names of the Linear layers that were kept.
        skipped_mappings: Smoothing or AWQ mappings the model's architecture could not take, with
            the reason.
        notes: Other things a person should know (a retry, a work-round).
        load_check: What was checked after saving.
        mean_kl: Mean Kullback-Leibler divergence from the source's next-token distributions, in
            nats, on a short text.
        top1_agreement: Share of positions of that text with the source's most likely token.
        peak_memory_bytes: Peak resident memory (CPU) or allocated device memory (CUDA).
    """

    scheme: str
    quantized_modules: tuple[str, ...]
    ignored_modules: tuple[str, ...]
    skipped_mappings: tuple[str, ...]
    notes: tuple[str, ...]
    load_check: str
    mean_kl: float
    top1_agreement: float
    peak_memory_bytes: int


@dataclass(frozen=True)
class Failure:
    """An exception inside a worker."""

    type: str
    message: str
    traceback: str


@dataclass(frozen=True)
class Envelope:
    """`result.json`: a status, then either a value or a failure.

    Attributes:
        schema_version: `SCHEMA_VERSION` of the writer.
        status: "ok" or "error".
        value: The result as plain JSON, read with `load` by whoever knows its type.
        error: The failure, if any.
        versions: Installed versions of the packages that shaped the result.
        duration_s: Wall-clock seconds of the work, imports included.
    """

    schema_version: int
    status: Literal["ok", "error"]
    value: dict[str, Any] | None
    error: Failure | None
    versions: dict[str, str]
    duration_s: float


@dataclass(frozen=True)
class Progress:
    """One line of `progress.jsonl`: `done` of `total` steps of a named stage."""

    stage: str
    done: int
    total: int


# ------------------------------------------------------------------------------------- JSON codec


def dump(value: Any) -> Any:
    """Return plain JSON values for a dataclass (or a tuple, list, dict or scalar of them)."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: dump(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [dump(item) for item in value]
    if isinstance(value, dict):
        return {str(key): dump(item) for key, item in value.items()}
    return value


def load(cls: type[T], value: Any, at: str = "") -> T:
    """Read plain JSON values as the dataclass `cls`.

    Raises:
        SchemaError: A key is unknown or missing, or a value has another type; the message names
            the place.
    """
    where = at or cls.__name__
    if not isinstance(value, dict):
        raise SchemaError(f"{where}: expected an object, found {type(value).__name__}")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in value:
        if key not in fields:
            raise SchemaError(f"{where}: unknown key {key!r}")
    arguments = {}
    for name, field in fields.items():
        if name in value:
            arguments[name] = _read(hints[name], value[name], f"{where}.{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise SchemaError(f"{where}: missing key {name!r}")
    return cls(**arguments)


def _read(hint: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _read(next(a for a in args if a is not type(None)), value, where)
    if origin is Literal:
        if value not in args:
            raise SchemaError(f"{where}: {value!r} is none of {', '.join(map(repr, args))}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise SchemaError(f"{where}: expected a list, found {type(value).__name__}")
        return tuple(_read(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise SchemaError(f"{where}: expected an object, found {type(value).__name__}")
        return {key: _read(args[1], item, f"{where}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(hint):
        return load(typing.cast(type, hint), value, where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise SchemaError(f"{where}: expected {hint.__name__}, found {type(value).__name__}")
    return value


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file whole or not at all (temporary file, fsync, rename)."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        json.dump(dump(value), stream, indent=1, sort_keys=False, allow_nan=False)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        SchemaError: The file is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise SchemaError(f"{path}: not valid JSON ({error})") from error
