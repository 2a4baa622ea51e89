"""The text that fidelity is measured on: the bundled one, or a person's own files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from qkit.errors import InputError
from qkit.hashing import hash_value

#: Name of the bundled text in results.
BUNDLED = "qkit"
BUNDLED_FILE = Path(__file__).parent / "texts" / "fidelity.jsonl"
SUFFIXES = (".txt", ".md", ".jsonl")
_FIX = "give a .txt file, a .jsonl file with a `text` in every line, or a folder of such files"


@dataclass(frozen=True)
class Document:
    """One piece of text whose tokens depend on each other; `name` says where it is from."""

    name: str
    text: str


def read_documents(source: str | None) -> tuple[Document, ...]:
    """Return the documents of a text.

    Args:
        source: A .txt or .md file, which is one document; a .jsonl file, whose lines are documents
            with a `text`; a folder of such files; None for the bundled text.

    Raises:
        InputError: It is missing or empty, or a line cannot be used; file and line are named.
    """
    path = BUNDLED_FILE if source is None else Path(source).expanduser()
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and p.suffix in SUFFIXES)
        if not files:
            raise InputError("the folder has no .txt, .md or .jsonl file", where=path, fix=_FIX)
    elif not path.is_file():
        raise InputError(f"there is no text {str(source)!r}", fix=f"check `fidelity.text`: {_FIX}")
    elif path.suffix not in SUFFIXES:
        raise InputError(f"a {path.suffix or 'nameless'} file is no text", where=path, fix=_FIX)
    else:
        files = [path]
    documents = tuple(document for file in files for document in _read(file))
    if not documents:
        raise InputError("the text is empty", where=path, fix=_FIX)
    return documents


def hash_documents(documents: tuple[Document, ...]) -> str:
    """Return the SHA-256 of the documents' texts; their names and files do not matter."""
    return hash_value([document.text for document in documents])


def _read(path: Path) -> Iterator[Document]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        number = error.object[: error.start].count(b"\n") + 1
        raise InputError(
            f"line {number} is not UTF-8", where=path, fix="save the file as UTF-8"
        ) from None
    if path.suffix != ".jsonl":
        if text.strip():
            yield Document(path.name, text)
        return
    # Not splitlines: JSON strings may hold other line separators than a line feed.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _parse(line, f"{path}:{number}", f"{path.stem}:{number}")


def _parse(line: str, where: str, name: str) -> Document:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise InputError(
            "a line is not JSON", where=where, detail=str(error), fix="one JSON object a line"
        ) from None
    text = value.get("text") if isinstance(value, dict) else None
    if not isinstance(text, str) or not text.strip():
        found = sorted(value) if isinstance(value, dict) else type(value).__name__
        raise InputError(
            f"a line has no `text` (found {found})",
            where=where,
            fix='write each line as {"text": "..."}',
        )
    return Document(str(value.get("id", name)), text)
