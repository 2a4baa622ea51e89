"""What stands beside the tables: the machine, the versions, failures, marks and notes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from qkit.evaluate.matrix_values import Matrix
from qkit.evaluate.report import text
from qkit.evaluate.report.sheet import Column, Sheet
from qkit.kernel_log import LOUD


@dataclass(frozen=True)
class Remark:
    """One thing to know; `subject` is a variant's name, or empty for the whole table."""

    kind: Literal["note", "failed", "mark"]
    subject: str
    text: str
    #: Longer evidence, such as the end of a log.
    detail: str = ""

    @property
    def loud(self) -> bool:
        """Whether it is about a kernel that is not what was asked for."""
        return self.text.startswith(LOUD)

    @property
    def line(self) -> str:
        """The remark on one line, with what it is about."""
        if self.kind == "failed":
            return f"{self.subject} failed: {self.text}"
        return f"{self.subject}: {self.text}" if self.subject else self.text


def remarks(matrix: Matrix) -> tuple[Remark, ...]:
    """Return everything to know: failures first, then notes on the table, then rows' marks."""
    failed = [
        Remark("failed", row.variant, f"{failure.step}: {failure.reason}", failure.detail)
        for row in matrix.rows
        for failure in row.failures
    ]
    notes = [Remark("note", "", note) for note in matrix.notes]
    marks = [Remark("mark", row.variant, mark) for row in matrix.rows for mark in row.marks]
    return (*failed, *notes, *marks)


def machine(matrix: Matrix) -> str:
    """Return the hardware in one line; `unknown` where nothing was measured."""
    hardware = matrix.hardware
    if hardware is None:
        return "unknown (nothing was measured)"
    memory = text.size(hardware.memory_bytes)
    if hardware.accelerator == "cpu":
        return f"{hardware.cpu}, {hardware.cpu_cores} cores, {memory} memory, no accelerator"
    capability = hardware.compute_capability
    details = [
        f"{hardware.count} x {hardware.name}",
        f"{memory} memory",
        *([f"compute capability {capability}"] if capability else []),
        *([f"driver {hardware.driver}"] if hardware.driver else []),
        f"{hardware.cpu}, {hardware.cpu_cores} cores",
    ]
    return ", ".join(details)


def versions(matrix: Matrix) -> str:
    """Return all package versions in one line."""
    return ", ".join(f"{name} {version}" for name, version in matrix.versions.items()) or "unknown"


def drift(matrix: Matrix) -> str:
    """Return how far the baseline moved during the run; empty where it was measured once."""
    if not matrix.drift:
        return ""
    tpot = _largest(d.tpot_percent for d in matrix.drift)
    rate = _largest(d.output_tok_per_s_percent for d in matrix.drift)
    verdict = "more than the noise" if any(d.moved for d in matrix.drift) else "within the noise"
    return (
        f"{matrix.baseline} measured first and last moved by at most {tpot} (median TPOT) and "
        f"{rate} (throughput): {verdict}."
    )


def legend(sheets: Iterable[Sheet]) -> tuple[Column, ...]:
    """Return every column once, in order of appearance."""
    found: dict[str, Column] = {}
    for sheet in sheets:
        for column in sheet.columns:
            found.setdefault(column.name, column)
    return tuple(found.values())


def _largest(changes: Iterable[float | None]) -> str:
    """Return the change of largest size, with its sign."""
    known = [change for change in changes if change is not None]
    return f"{max(known, key=abs):+.1f} %" if known else "an unknown amount"
