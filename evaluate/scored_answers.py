"""Answers of a suite that are there already, on disk, so that an interrupted one goes on.

One file a variant and suite: a line for every answered request, appended as soon as the answer is
there. A process that is killed loses at most the requests in flight. Append-only text rather than
a database: one writer (the run folder is locked), no reading while it grows, and a line that was
cut off is one question to ask again, not a damaged file.

A line is some 150 bytes for a four-option question and 25 bytes per token for scored text: 2 MB
for MMLU, about 25 MB for HellaSwag. The file goes once the suite's measurement is stored.
"""

from __future__ import annotations

import json
import os
from array import array
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from qkit.evaluate.scoring_requests import (
    Answer,
    GenerateRequest,
    OptionRequest,
    PromptRequest,
    Request,
    TokenScore,
)

FORMAT = 1


def request_key(request: Request) -> str:
    """Return a hash of everything a request asks for."""
    match request:
        case OptionRequest():
            rest: tuple[Any, ...] = ("options", request.token_ids)
        case PromptRequest():
            rest = ("prompt", request.scored_from)
        case GenerateRequest():
            rest = (
                "generate", request.max_tokens, request.stop, request.temperature,
                request.seed, request.extra,
            )  # fmt: skip
    digest = sha256(repr(rest).encode())
    digest.update(array("q", request.prompt).tobytes())
    return digest.hexdigest()[:32]


class ScoredAnswers:
    """The file of answers; use it in a `with` block.

    Args:
        path: The file; made with the first answer, its folder too.
        identity: What the answers depend on besides the requests: the variant and how it is
            served. A file of another identity is started anew.
    """

    def __init__(self, path: Path, identity: str) -> None:
        self._path = path
        self._header = {"format": FORMAT, "identity": identity}
        self._known: dict[str, Answer] = {}
        self._file: int | None = None

    def __enter__(self) -> Self:
        """Read what is there."""
        end = self._read()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.ftruncate(self._file, end)  # a line that was cut off, or another identity's answers
        if not end:
            self._append(self._header)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __len__(self) -> int:
        """Return how many answers are known."""
        return len(self._known)

    def get(self, request: Request) -> Answer | None:
        """Return a request's answer, or None where it was not answered yet."""
        return self._known.get(request_key(request))

    def keep(self, request: Request, answer: Answer) -> None:
        """Store an answer; once this returns, killing the process does not lose it."""
        key = request_key(request)
        self._known[key] = answer
        self._append([key, _stored(answer)])

    def _append(self, value: Any) -> None:
        if self._file is None:
            raise RuntimeError("the file of answers is not open")
        line = json.dumps(value, separators=(",", ":"), ensure_ascii=False) + "\n"
        data = line.encode()
        while data:
            data = data[os.write(self._file, data) :]

    def _read(self) -> int:
        """Read the known answers; return where the last whole line ends, 0 to start anew."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return 0
        end = data.rfind(b"\n") + 1
        header, *lines = data[:end].split(b"\n")
        if _parsed(header) != self._header:
            return 0
        for line in lines:
            match _parsed(line):
                case [str(key), str() | list() as value]:
                    if (answer := _answer(value)) is not None:
                        self._known[key] = answer
                case _:  # damaged: the question is asked again
                    pass
        return end


def _stored(answer: Answer) -> Any:
    """Return an answer as JSON: a text as it is, of each token its score and 1 where greedy."""
    if isinstance(answer, str):
        return answer
    return [[score.logprob, int(score.is_greedy)] for score in answer]


def _answer(value: str | list[Any]) -> Answer | None:
    if isinstance(value, str):
        return value
    scores = []
    for item in value:
        match item:
            case [float(logprob) | int(logprob), 0 | 1 as greedy]:
                scores.append(TokenScore(float(logprob), bool(greedy)))
            case _:
                return None
    return tuple(scores)


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None
