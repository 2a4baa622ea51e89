"""Log-probabilities of a text's tokens: as arrays, in a file, and in a journal while they come."""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkit.evaluate.fidelity_windows import Work

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
#: Fills rows of generated token ids that ended before the others.
NO_TOKEN = -1


@dataclass(frozen=True)
class WindowScores:
    """One window: log-probabilities (natural) of its n tokens after the first.

    Attributes:
        logprobs: Of the text's own tokens, n.
        top_ids: The most likely tokens of each position, n lists of K ids, the likeliest first.
        top_logprobs: Theirs.
    """

    logprobs: Sequence[float]
    top_ids: Sequence[Sequence[int]]
    top_logprobs: Sequence[Sequence[float]]


@dataclass(frozen=True, eq=False)
class Scores:
    """All N scored positions of a text, and P greedy generations.

    Attributes:
        key: Names what was scored, of which checkpoint, on which server.
        document: Index of each position's document, N.
        window: Index of each position's window, N.
        token: The text's own token, N.
        logprob: Its natural log-probability, N.
        top_ids: Ids of the K most likely tokens, N x K, the likeliest first.
        top_logprobs: Their log-probabilities, N x K.
        generated: Generated token ids, P x longest; `NO_TOKEN` after an end.
    """

    key: str
    document: Ints
    window: Ints
    token: Ints
    logprob: Floats
    top_ids: Ints
    top_logprobs: Floats
    generated: Ints

    @property
    def perplexity(self) -> float:
        """exp(-mean log-probability of the text's own tokens)."""
        return float(np.exp(-self.logprob.astype(np.float64).mean()))


def make_scores(
    key: str,
    work: Work,
    windows: Mapping[int, WindowScores],
    generated: Mapping[int, Sequence[int]],
) -> Scores:
    """Put the answers to all of a work's requests together.

    Args:
        key: See `Scores`.
        work: What was asked.
        windows: Answers by index of the window.
        generated: Generated token ids by index of the prompt.
    """
    answers = [windows[index] for index in range(len(work.windows))]
    counts = [len(window.tokens) - 1 for window in work.windows]
    longest = max((len(ids) for ids in generated.values()), default=0)
    rows = [generated[index] for index in range(len(work.prompts))]
    return Scores(
        key=key,
        document=np.repeat([w.document for w in work.windows], counts).astype(np.int32),
        window=np.repeat(np.arange(len(counts)), counts).astype(np.int32),
        token=np.array([t for w in work.windows for t in w.tokens[1:]], np.int32),
        logprob=np.array([v for a in answers for v in a.logprobs], np.float32),
        top_ids=np.array([row for a in answers for row in a.top_ids], np.int32),
        top_logprobs=np.array([row for a in answers for row in a.top_logprobs], np.float32),
        generated=np.array(
            [[*ids, *[NO_TOKEN] * (longest - len(ids))] for ids in rows], np.int32
        ).reshape(len(rows), longest),
    )


def write_scores(path: Path, scores: Scores) -> None:
    """Write a file whole or not at all."""
    buffer = io.BytesIO()
    arrays: dict[str, Any] = {f.name: np.asarray(getattr(scores, f.name)) for f in _FIELDS}
    np.savez_compressed(buffer, **arrays)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as stream:
        stream.write(buffer.getbuffer())
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)


def hash_scores(path: Path) -> str:
    """Return the SHA-256 of a file of scores."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_scores(path: Path, expected_hash: str | None = None) -> Scores | None:
    """Return the scores of a file; None where it is missing, unreadable or another than expected.

    Args:
        path: As written by `write_scores`.
        expected_hash: Its SHA-256, where only that file will do.
    """
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if expected_hash is not None and hashlib.sha256(content).hexdigest() != expected_hash:
        return None
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            values: dict[str, Any] = {field.name: arrays[field.name] for field in _FIELDS}
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return None
    return Scores(**{**values, "key": str(values["key"])})


_FIELDS = fields(Scores)


class Journal:
    """Answers as they come, one JSON line each, so that a killed run loses none of them.

    A last line that was cut is dropped; a journal of another key is started anew.

    Args:
        path: The file.
        key: Names what is scored; an empty one is never resumed.
        resume: Whether to keep what is there.
    """

    def __init__(self, path: Path, key: str, *, resume: bool) -> None:
        self._path = path
        self.windows: dict[int, WindowScores] = {}
        self.generated: dict[int, tuple[int, ...]] = {}
        kept = self._read(key) if resume and key else 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._stream = path.open("r+b" if kept else "wb")
        self._stream.seek(kept)
        self._stream.truncate()
        if not kept:
            self._append({"key": key})

    def add_window(self, index: int, scores: WindowScores) -> None:
        """Keep a window's scores."""
        self.windows[index] = scores
        self._append(
            {
                "window": index,
                "logprobs": scores.logprobs,
                "top_ids": scores.top_ids,
                "top_logprobs": scores.top_logprobs,
            }
        )

    def add_generated(self, index: int, ids: Sequence[int]) -> None:
        """Keep the continuation of a prompt."""
        self.generated[index] = tuple(ids)
        self._append({"prompt": index, "ids": ids})

    def close(self) -> None:
        """Close the file; it stays."""
        self._stream.close()

    def remove(self) -> None:
        """Close and delete the file: everything in it is stored elsewhere."""
        self.close()
        self._path.unlink(missing_ok=True)

    def _append(self, value: dict[str, Any]) -> None:
        self._stream.write(json.dumps(value, separators=(",", ":")).encode() + b"\n")
        self._stream.flush()  # what the operating system has outlives this process

    def _read(self, key: str) -> int:
        """Read what is there and return the bytes of its whole lines; 0 to start anew."""
        try:
            lines = self._path.read_bytes().splitlines(keepends=True)
        except OSError:
            return 0
        kept = 0
        for number, line in enumerate(lines):
            try:
                value = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                value = None
            if value is None or (number == 0 and value.get("key") != key):
                break
            if "window" in value:
                self.windows[value["window"]] = WindowScores(
                    value["logprobs"], value["top_ids"], value["top_logprobs"]
                )
            elif "prompt" in value:
                self.generated[value["prompt"]] = tuple(value["ids"])
            kept += len(line)
        return kept
