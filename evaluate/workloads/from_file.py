"""Workloads whose prompts, or whose lengths and arrival times, come from a file."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from qkit.errors import InputError
from qkit.evaluate.workloads.drawing import Drawer
from qkit.evaluate.workloads.rows import ChatRow, Rows, TraceRow, read_rows
from qkit.evaluate.workloads.source import Part
from qkit.evaluate.workloads.units import ANY_HITS, Message, Prompt, Turn, Unit
from qkit.evaluate.workloads.vocabulary import Vocabulary
from qkit.suites import BenchSuite
from qkit.workloads import FileFormat, FromFile


def rows_of(workload: FromFile) -> Rows:
    """Read a workload's file; one that has not changed is read once.

    Raises:
        InputError: It is missing, or a row of it is broken.
    """
    path = Path(workload.path).expanduser()
    try:
        state = path.stat()
    except OSError:
        return read_rows(path, workload.format)  # says what is wrong
    return _read_once(path, workload.format, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=2)
def _read_once(path: Path, file_format: FileFormat, _modified: int, _size: int) -> Rows:
    return read_rows(path, file_format)


class ChatFileSource:
    """Rows of a file in an order by seed, each taken once in a sweep unless the workload repeats.

    A row that does not fit the served length is left out, never cut. Which parts of a file's texts
    are alike is not known, so prefix-cache hits are shown but not judged.
    """

    fewest_warmups = 0

    def __init__(
        self,
        rows: tuple[ChatRow, ...],
        suite: BenchSuite,
        workload: FromFile,
        vocabulary: Vocabulary,
        drawer: Drawer,
        room: int,
        *,
        turns: str,
    ) -> None:
        self.hits_expected = workload.repeat or turns == "all"
        self._rows = drawer.rng("file").sample(rows, len(rows))
        self._suite = suite
        self._workload = workload
        self._vocabulary = vocabulary
        self._room = room
        self._turns = turns
        self._left_out: set[int] = set()
        self._units = self._next_units()

    @property
    def description(self) -> str:
        """The workload in one line; what was left out is known after the last unit."""
        left_out = (
            f" ({len(self._left_out)} drawn but left out: longer than the served length)"
            if self._left_out
            else ""
        )
        return f"{Path(self._workload.path).name}: {len(self._rows):,} rows{left_out}, " + (
            "answers as long as the file's"
            if self._workload.output == "file"
            else f"{self._suite.output_tokens} tokens out"
        )

    def unit(self, cell: str, part: Part, index: int) -> Unit:  # noqa: ARG002  (in the rows' order)
        """Return the next row's requests."""
        found = next(self._units, None)
        if found is None:
            raise _too_few(self._workload, len(self._rows) - len(self._left_out))
        return found

    def _next_units(self) -> Iterator[Unit]:
        while True:
            usable = False
            for number, row in enumerate(self._rows):
                if number not in self._left_out:
                    unit = self._unit(row)
                    if unit is None:
                        self._left_out.add(number)
                        continue
                    usable = True
                    yield unit
            if not usable or not self._workload.repeat:
                return

    def _unit(self, row: ChatRow) -> Unit | None:
        """Return a row's requests, or None where not even one fits the served length."""
        turns: list[Turn] = []
        for position in _asked(row.messages, self._turns):
            said = row.messages[: position + 1]
            output = self._output_tokens(row, position)
            tokens = sum(self._vocabulary.count(message.content) for message in said)
            if tokens + output > self._room:
                break
            turns.append(Turn(self._prompt(said), output, ANY_HITS))
        return Unit(tuple(turns)) if turns else None

    def _output_tokens(self, row: ChatRow, position: int) -> int:
        if self._workload.output == "suite":
            return self._suite.output_tokens
        answers = row.messages[position + 1 : position + 2]
        if answers and answers[0].role == "assistant":
            return max(1, self._vocabulary.count(answers[0].content))
        last = position == len(row.messages) - 1
        return (row.output_tokens if last else None) or self._suite.output_tokens

    def _prompt(self, said: tuple[Message, ...]) -> Prompt:
        if self._suite.endpoint == "chat":
            return said
        if len(said) > 1:
            raise InputError(
                "the workload's file has conversations, which the completions endpoint cannot take",
                where=self._workload.path,
                fix="set bench.endpoint: chat, or bench.workload.turns: first",
            )
        return said[0].content


class TraceSource:
    """Requests of a trace: its lengths and arrival times, with random tokens as prompts.

    Every cell begins at the trace's beginning, with prompts of its own.
    """

    hits_expected = False
    fewest_warmups = 0

    def __init__(
        self,
        rows: tuple[TraceRow, ...],
        suite: BenchSuite,
        workload: FromFile,
        drawer: Drawer,
        room: int,
    ) -> None:
        fixed = suite.output_tokens if workload.output == "suite" else None
        self._rows = [
            row for row in rows if row.input_tokens + (fixed or row.output_tokens) <= room
        ]
        self._left_out = len(rows) - len(self._rows)
        self._output_tokens = fixed
        self._workload = workload
        self._drawer = drawer

    @property
    def description(self) -> str:
        """The workload in one line."""
        left_out = f", {self._left_out:,} longer than the served length left out"
        return (
            f"{Path(self._workload.path).name}: lengths of a trace of "
            f"{len(self._rows) + self._left_out:,} requests{left_out if self._left_out else ''}"
        )

    def unit(self, cell: str, part: Part, index: int) -> Unit:
        """Return one request of the trace."""
        rows = self._rows
        again = index // len(rows) if rows else 0
        if not rows or (again and not self._workload.repeat):
            raise _too_few(self._workload, len(rows))
        row = rows[index % len(rows)]
        # A trace that begins again goes on at its mean rate.
        gap_s = rows[-1].at_s / max(1, len(rows) - 1)
        at_s = row.at_s - rows[0].at_s + again * (rows[-1].at_s - rows[0].at_s + gap_s)
        prompt = self._drawer.prompt(f"{cell}/{part}/{index}", row.input_tokens)
        return Unit((Turn(prompt, self._output_tokens or row.output_tokens),), at_s)


def _asked(messages: tuple[Message, ...], turns: str) -> tuple[int, ...]:
    """Return the positions of the questions that are asked."""
    questions = tuple(i for i, message in enumerate(messages) if message.role == "user")
    return {"first": questions[:1], "last": questions[-1:], "all": questions}[turns]


def _too_few(workload: FromFile, usable: int) -> InputError:
    return InputError(
        f"the workload's file has {usable:,} prompts that can be used, fewer than the benchmark "
        "sends",
        where=workload.path,
        fix="set bench.workload.repeat: true (the prefix cache then answers for a part), or lower "
        "bench.min_requests, bench.requests_per_slot or bench.concurrency",
    )
