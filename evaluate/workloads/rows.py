"""Reads files of prompts: what stands in them, checked, with the line of whatever is wrong.

Formats: ShareGPT's JSON (a list of `{"conversations": [{"from", "value"}, ...]}`; also one object
a line), vLLM's custom JSONL (`{"prompt": ..., "output_tokens": ...}`), JSONL of OpenAI messages
(`{"messages": [{"role", "content"}, ...]}`), and a CSV trace with the columns TIMESTAMP,
ContextTokens and GeneratedTokens, such as the Azure LLM inference traces.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from qkit.errors import InputError
from qkit.evaluate.workloads.units import Message
from qkit.workloads import FileFormat

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}
_TRACE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class ChatRow:
    """A conversation, or a single prompt as one of one message."""

    messages: tuple[Message, ...]
    #: Length of the answer to the last message, where the file gives one.
    output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class TraceRow:
    """A request of which only lengths are known."""

    #: Seconds after the first request of the trace.
    at_s: float
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Rows:
    """The rows of a file, of one kind; the other is empty."""

    format: FileFormat
    chats: tuple[ChatRow, ...] = ()
    trace: tuple[TraceRow, ...] = ()


class _BadRowError(Exception):
    """What is wrong with a row, without its place."""


def read_rows(path: Path, file_format: FileFormat) -> Rows:
    """Read a file of prompts.

    Raises:
        InputError: It is missing, empty, of another format, or one of its rows is broken; the
            place is named as FILE:LINE, or as FILE, conversation N.
    """
    if not path.is_file():
        raise InputError(
            "the workload's file does not exist", where=path, fix="correct bench.workload.path"
        )
    try:
        found = _read(path, file_format)
    except UnicodeDecodeError as error:
        raise InputError(f"the workload's file is not UTF-8 text: {error}", where=path) from None
    if not found.chats and not found.trace:
        raise InputError("the workload's file has no prompt in it", where=path)
    return found


def _read(path: Path, file_format: FileFormat) -> Rows:
    if file_format == "trace" or (file_format == "auto" and path.suffix.lower() == ".csv"):
        return Rows("trace", trace=tuple(_trace(path)))
    chosen: FileFormat = file_format
    chats: list[ChatRow] = []
    for place, row in _objects(path):
        if chosen == "auto":
            chosen = _format_of(row, place)
        try:
            chat = _READERS[chosen](row)
        except _BadRowError as error:
            raise InputError(
                f"a row of the workload's file cannot be used: {error}",
                where=place,
                fix=f"correct or remove it; it was read as format {chosen!r}",
            ) from None
        if chat is not None:
            chats.append(chat)
    return Rows(chosen, chats=tuple(chats))


def _objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the JSON objects of a file with their places: of one list, or of one a line."""
    with path.open(encoding="utf-8-sig") as file:
        start = file.read(4096).lstrip()
        file.seek(0)
        if start.startswith("["):
            try:
                listed = json.load(file)
            except json.JSONDecodeError as error:
                raise _not_json(f"{path}:{error.lineno}", error) from None
            for number, row in enumerate(listed, 1):
                yield _object(row, f"{path}, conversation {number}")
            return
        for number, line in enumerate(file, 1):
            if line.strip():
                place = f"{path}:{number}"
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise _not_json(place, error) from None
                yield _object(row, place)


def _not_json(place: str, error: json.JSONDecodeError) -> InputError:
    return InputError(
        f"the workload's file is not valid JSON: {error.msg} at column {error.colno}",
        where=place,
        fix="give one JSON list, or one JSON object a line",
    )


def _object(row: object, place: str) -> tuple[str, dict[str, Any]]:
    if not isinstance(row, dict):
        raise InputError(
            f"a row of the workload's file is not a JSON object but {type(row).__name__}",
            where=place,
        )
    return place, row


def _format_of(row: dict[str, Any], place: str) -> FileFormat:
    keys: dict[str, FileFormat] = {
        "messages": "openai",
        "conversations": "sharegpt",
        "prompt": "vllm",
    }
    for key, found in keys.items():
        if key in row:
            return found
    raise InputError(
        "the workload's file is of no known format: its first row has none of "
        f"{', '.join(keys)}, but {', '.join(map(repr, row)) or 'nothing'}",
        where=place,
        fix="see bench.workload.format",
    )


# One reader a format: a row to a conversation, or None for one without a question.


def _sharegpt(row: dict[str, Any]) -> ChatRow | None:
    return _chat(row, key="conversations", role="from", content="value")


def _openai(row: dict[str, Any]) -> ChatRow | None:
    return _chat(row, key="messages", role="role", content="content")


def _chat(row: dict[str, Any], *, key: str, role: str, content: str) -> ChatRow | None:
    items = row.get(key)
    if not isinstance(items, list):
        raise _BadRowError(f"`{key}` is missing or not a list")
    messages = []
    for item in items:
        if not isinstance(item, dict) or role not in item or content not in item:
            raise _BadRowError(f"an item of `{key}` has not both `{role}` and `{content}`")
        known = _ROLES.get(str(item[role]))
        if known is None:
            raise _BadRowError(f"`{role}` is {item[role]!r}, not one of {', '.join(_ROLES)}")
        messages.append(Message(known, _text(item[content], content)))
    # Some ShareGPT conversations begin with the answer to a question that was cut off.
    while messages and messages[0].role == "assistant":
        messages.pop(0)
    if not any(message.role == "user" for message in messages):
        return None
    return ChatRow(tuple(messages), _tokens(row))


def _text(value: object, key: str) -> str:
    """Return a content's text: a string, or OpenAI's list of text parts."""
    if isinstance(value, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in value]
        if all(isinstance(part, str) for part in parts):
            return "".join(str(part) for part in parts)
        raise _BadRowError(f"`{key}` has parts that are not text")
    if not isinstance(value, str):
        raise _BadRowError(f"`{key}` is not text but {type(value).__name__}")
    return value


def _vllm(row: dict[str, Any]) -> ChatRow | None:
    prompt = row.get("prompt")
    if not isinstance(prompt, str) or not prompt:
        raise _BadRowError("`prompt` is missing, empty or not text")
    return ChatRow((Message("user", prompt),), _tokens(row))


def _tokens(row: dict[str, Any]) -> int | None:
    value = row.get("output_tokens")
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _BadRowError(f"`output_tokens` is {value!r}, not a whole number above 0")
    return value


_READERS: dict[FileFormat, Callable[[dict[str, Any]], ChatRow | None]] = {
    "sharegpt": _sharegpt,
    "openai": _openai,
    "vllm": _vllm,
}


def _trace(path: Path) -> Iterator[TraceRow]:
    """Yield the rows of a CSV trace; times are seconds after its first."""
    first = last = None
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in _TRACE_COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise InputError(
                f"the trace has no column {' or '.join(missing)}",
                where=f"{path}:1",
                fix=f"its first line must name {', '.join(_TRACE_COLUMNS)}",
            )
        for row in reader:
            try:
                at, tokens_in, tokens_out = _trace_row(row)
                if last is not None and at < last:
                    raise _BadRowError("TIMESTAMP lies before the one above; sort the trace")
            except _BadRowError as error:
                raise InputError(
                    f"a row of the trace cannot be used: {error}",
                    where=f"{path}:{reader.line_num}",
                    fix="correct or remove it",
                ) from None
            first, last = at if first is None else first, at
            yield TraceRow(at - first, tokens_in, tokens_out)


def _trace_row(row: dict[str | Any, str | Any]) -> tuple[float, int, int]:
    stamp, *lengths = (row.get(name) for name in _TRACE_COLUMNS)
    tokens = []
    for name, value in zip(_TRACE_COLUMNS[1:], lengths, strict=True):
        try:
            number = int(value or "")
        except ValueError:
            raise _BadRowError(f"{name} is {value!r}, not a whole number") from None
        if number < 1:
            raise _BadRowError(f"{name} is {number}, below 1")
        tokens.append(number)
    return _seconds(stamp or ""), tokens[0], tokens[1]


def _seconds(stamp: str) -> float:
    """Return a time in seconds: a number of them, or an ISO 8601 date and time."""
    try:
        return float(stamp)
    except ValueError:
        pass
    try:
        parsed = datetime.fromisoformat(stamp)
    except ValueError:
        raise _BadRowError(
            f"TIMESTAMP is {stamp!r}, neither a number of seconds nor an ISO 8601 time"
        ) from None
    return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()
