"""Read calibration rows from local files or the hub.

A row is a text or a JSON object. Every error names the file and, where there is one, the line.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkit.errors import HubUnreachableError, InputError, nearest
from qkit.quantize.hub import hub_switched_off, why_unreachable

#: Files of a downloaded data set that hold no rows.
DESCRIPTIONS = frozenset(
    {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
)
_HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_UTF8_MARK = b"\xef\xbb\xbf"
#: Rows of a Parquet file that are looked at before the work.
_HEAD_ROWS = 256
#: A whole book in one row is fine; a file without line breaks is hardly what was meant. (The csv
#: module's own limit is 128 KiB.)
MAX_ROW_CHARACTERS = 1 << 24


@dataclass(frozen=True)
class Row:
    """One calibration row and where it stands (`FILE:LINE`, or the data set's row number)."""

    value: Any
    where: str


def load_rows(source: str, *, split: str) -> Sequence[Row]:
    """Return the rows of a local file or folder, or of a split of a hub data set.

    Args:
        source: Path of a .jsonl, .json, .parquet, .csv or .txt file, or of a folder of them; else
            the name of a data set on the Hugging Face hub.
        split: Split of a hub data set. In a folder, files named after the split (such as
            `train_sft-00000-of-00003.parquet`) are taken alone if there are any.

    Raises:
        InputError: The file cannot be read as what it says it is, or holds no row.
        HubUnreachableError: The data set is not on this machine and the hub does not answer.
    """
    path = Path(source).expanduser()
    if path.exists():
        files = _files_in(path, split) if path.is_dir() else [path]
        rows = [row for file in files for row in _read_file(file)]
        if not rows:
            raise InputError("the calibration data holds no row", where=path)
        return rows
    _check_hub_name(source)
    return _HubRows(source, split)


def sample_rows(source: str, *, split: str, max_bytes: int) -> tuple[list[Row], bool] | None:
    """Return rows from the beginning of a local source, and whether they are all.

    For a look at the data before the work: at most about `max_bytes` of it are read, and of a
    Parquet file the first rows.

    Returns:
        None for a hub data set, and for a .json file that is larger than that: an array is read
        whole or not at all.

    Raises:
        InputError: As `load_rows`, about what was read.
    """
    path = Path(source).expanduser()
    if not path.exists():
        _check_hub_name(source)
        return None
    rows: list[Row] = []
    files = _files_in(path, split) if path.is_dir() else [path]
    for file in files:
        size = file.stat().st_size
        whole = size <= max_bytes
        if file.suffix.lower() == ".json" and not whole:
            return (rows, False) if rows else None
        rows += _read_file(file, None if whole else max_bytes)
        max_bytes -= size
        if max_bytes <= 0 and (not whole or file != files[-1]):
            return rows, False
    if not rows:
        raise InputError("the calibration data holds no row", where=path)
    return rows, True


def _check_hub_name(source: str) -> None:
    """Refuse what is neither a file that is there nor a hub data set's name."""
    if Path(source).suffix.lower() in READERS or not _HUB_NAME.match(source):
        raise InputError(
            f"there is no calibration file {source!r}",
            where=Path(source).expanduser().absolute(),
            fix=f"give a file ({', '.join(READERS)}), a folder of them, or a hub data set's name",
        )


def _files_in(folder: Path, split: str) -> list[Path]:
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file()
        and path.suffix.lower() in READERS
        and path.name not in DESCRIPTIONS
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    if not files:
        raise InputError(
            "the calibration folder holds no file qkit reads",
            where=folder,
            fix=f"it needs one of {', '.join(READERS)}",
        )
    of_split = [path for path in files if re.match(rf"{re.escape(split)}([-.]|$)", path.name)]
    return of_split or files


def _read_file(path: Path, head: int | None = None) -> list[Row]:
    """Return a file's rows; with `head`, those that begin in about as many bytes."""
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise InputError(
            f"calibration files of the kind {path.suffix or path.name!r} are not read",
            where=path,
            fix=f"give one of {', '.join(READERS)}",
        )
    if path.stat().st_size == 0:
        raise InputError("the calibration file is empty", where=path)
    return list(reader(path, head))


def _read_text(path: Path, head: int | None) -> str:
    """Return a file's text, or its first lines; a UTF-8 byte-order mark is dropped.

    Raises:
        InputError: It is not UTF-8; the message says which line and how to convert it.
    """
    with path.open("rb") as stream:
        raw = stream.read(-1 if head is None else head)
    if head is not None and len(raw) == head:
        raw = raw[: raw.rfind(b"\n") + 1] or raw
    if raw.startswith(_UTF16_MARKS) or b"\0" in raw[:4096]:
        raise InputError(
            f"{path.name} is UTF-16 (or binary), not UTF-8",
            where=path,
            fix=f"convert it: iconv -f UTF-16 -t UTF-8 {path.name} > converted{path.suffix}",
        )
    try:
        text = raw.removeprefix(_UTF8_MARK).decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise InputError(
            f"line {line} is not UTF-8 (byte 0x{raw[error.start]:02x})",
            where=f"{path}:{line}",
            fix=f"convert it: iconv -f LATIN1 -t UTF-8 {path.name} > converted{path.suffix}",
        ) from error
    if not text.strip():
        raise InputError("the calibration file is blank", where=path)
    return text


def _lines(path: Path, head: int | None) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text file, numbered from 1.

    Raises:
        InputError: A line is longer than any row should be.
    """
    # Not splitlines(): U+2028 and the like are legal inside a JSON string.
    for number, line in enumerate(_read_text(path, head).split("\n"), start=1):
        if len(line) > MAX_ROW_CHARACTERS:
            raise InputError(
                f"line {number} is oversized: it has {len(line):,} characters, and a row may have"
                f" {MAX_ROW_CHARACTERS:,}",
                where=f"{path}:{number}",
                fix="write one row a line; a JSON array belongs into a .json file",
            )
        yield number, line


def _read_jsonl(path: Path, head: int | None) -> Iterator[Row]:
    for number, line in _lines(path, head):
        if not line.strip():
            continue
        try:
            yield _json_row(json.loads(line), f"{path}:{number}")
        except ValueError as error:
            raise InputError(
                f"line {number} is not valid JSON: {error}",
                where=f"{path}:{number}",
                fix="every line must be one JSON object, such as"
                ' {"text": "…"} or {"messages": […]}',
            ) from error


def _read_json(path: Path, head: int | None) -> Iterator[Row]:
    text = _read_text(path, head)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        # Many data sets name their JSON Lines files .json.
        if text.lstrip().startswith("{"):
            yield from _read_jsonl(path, head)
            return
        raise InputError(
            f"the file is not valid JSON: {error}",
            where=f"{path}:{error.lineno}",
            fix="it must be one array of rows; one object a line makes a .jsonl file",
        ) from error
    if not isinstance(value, list):
        raise InputError(
            "the JSON file holds one object, not an array of rows",
            where=path,
            fix="wrap the rows in [ ], or write one object a line in a .jsonl file",
        )
    for number, item in enumerate(value, start=1):
        yield _json_row(item, f"{path}: row {number}")


def _json_row(value: Any, where: str) -> Row:
    if not isinstance(value, (dict, str)):
        raise InputError(
            f"a calibration row is {type(value).__name__}, not an object or a text", where=where
        )
    return Row(value, where)


def _read_csv(path: Path, head: int | None) -> Iterator[Row]:
    csv.field_size_limit(MAX_ROW_CHARACTERS)
    reader = csv.DictReader(io.StringIO(_read_text(path, head), newline=""), strict=True)
    try:
        for record in reader:
            if None in record or None in record.values():
                raise InputError(
                    f"line {reader.line_num} has another number of columns than the header",
                    where=f"{path}:{reader.line_num}",
                    fix="quote cells that hold commas or line breaks",
                )
            yield Row(record, f"{path}:{reader.line_num}")
    except csv.Error as error:
        if head is not None and "unexpected end" in str(error):
            return  # the head ends inside a quoted cell
        # The inner reader's count: the outer one's stops at the last good row.
        line = reader.reader.line_num
        raise InputError(
            f"line {line} is not valid CSV: {error}", where=f"{path}:{line}"
        ) from error


def _read_parquet(path: Path, head: int | None) -> Iterator[Row]:
    # Imported when needed, as datasets below: together they take seconds.
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.parquet as pq  # noqa: PLC0415

    try:
        if head is None:
            rows = pq.read_table(path).to_pylist()
        else:
            batches = pq.ParquetFile(path).iter_batches(batch_size=_HEAD_ROWS)
            rows = next(batches, pa.RecordBatch.from_pylist([])).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"the Parquet file cannot be read: {error}", where=path) from error
    for number, record in enumerate(rows, start=1):
        yield Row(record, f"{path}: row {number}")


def _read_paragraphs(path: Path, head: int | None) -> Iterator[Row]:
    """Take every paragraph (text between blank lines) as a row."""
    start, block = 1, list[str]()
    for number, line in _lines(path, head):
        if line.strip():
            start = start if block else number
            block.append(line.rstrip("\r"))
        elif block:
            yield Row("\n".join(block), f"{path}:{start}")
            block = []
    if block:
        yield Row("\n".join(block), f"{path}:{start}")


READERS: dict[str, Callable[[Path, int | None], Iterator[Row]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
    ".txt": _read_paragraphs,
}


class _HubRows(Sequence[Row]):
    """Rows of a hub data set, read from its memory-mapped table as they are asked for."""

    def __init__(self, name: str, split: str) -> None:
        self._name = name
        self._table = _load_hub(name, split)

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: Any) -> Any:
        return Row(dict(self._table[int(index)]), f"{self._name}: row {index}")


def _load_hub(name: str, split: str) -> Any:
    import datasets  # noqa: PLC0415

    reason = why_unreachable()
    try:
        # A copy of an earlier download is used as it is where the hub is out of reach.
        with hub_switched_off() if reason else nullcontext():
            return datasets.load_dataset(name, split=split)
    except ValueError as error:
        if "split" not in str(error).lower():
            raise _unreachable(name, error, reason) from error
        splits = re.findall(r"'([\w.-]+)'", str(error).partition("among")[2]) or re.findall(
            r"'([\w.-]+)'", str(error)
        )
        raise InputError(
            f"the data set {name!r} has no split {split!r}{nearest(split, splits)}",
            where=name,
            detail=str(error),
            fix="set calibration.split to one of its splits",
        ) from error
    # datasets and the hub client raise many kinds of errors for "no network", offline mode, a
    # proxy's refusal and a private or missing repository; for the person they are one thing.
    except Exception as error:
        raise _unreachable(name, error, reason) from error


def _unreachable(name: str, error: Exception, reason: str | None) -> HubUnreachableError:
    return HubUnreachableError(
        f"the calibration data set {name!r} cannot be had from the Hugging Face hub",
        where=name,
        detail=reason or f"{type(error).__name__}: {error}",
        fix="give a local file or folder with --calibration; on a machine that reaches the hub,"
        f" `hf download --repo-type dataset {name} --local-dir DIR` makes such a folder",
    )
