"""What all workloads have in common."""

from __future__ import annotations

from typing import Literal, Protocol

from qkit.evaluate.workloads.units import Unit

#: Prompts that are not measured, and prompts that are.
Part = Literal["warmup", "measured"]


class Source(Protocol):
    """Where the units of a sweep come from: one class for each kind of workload."""

    @property
    def description(self) -> str:
        """The workload in one line, for the table's caption."""

    @property
    def hits_expected(self) -> bool:
        """Whether the prefix cache is meant to answer for a part of the prompts."""

    @property
    def fewest_warmups(self) -> int:
        """Units that a warm-up needs at least, so that the cache is in its steady state."""

    def unit(self, cell: str, part: Part, index: int) -> Unit:
        """Return one unit of a cell.

        Args:
            cell: Name of the cell, different for each one of a sweep.
            part: Whether it is measured.
            index: Its number within the part, from 0; asked for in ascending order.

        Raises:
            InputError: The workload cannot give that many different units.
        """
