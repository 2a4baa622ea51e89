"""A reporter that draws steps and a progress bar on the terminal, or plain lines in a log."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from qkit.errors import EXIT_CELLS_FAILED
from qkit.run import Outcome


class TerminalReporter:
    """Writes one line a finished step to standard error, and a live bar where it is a terminal."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)
        self._bar = Progress(
            TextColumn("  {task.description}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None, visible=False)
        self._began = time.monotonic()

    def __enter__(self) -> TerminalReporter:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def started(self, label: str, step: str) -> None:
        """Begin a step."""
        self._began = time.monotonic()
        self._bar.reset(self._task, description=f"{label} {step}", total=None, visible=True)

    def progress(self, stage: str, done: int, total: int) -> None:
        """Move the bar."""
        self._bar.update(self._task, description=stage, completed=done, total=total or None)

    def finished(self, label: str, step: str, note: str) -> None:
        """Write the line of a step that succeeded."""
        self._line("[green]done[/]   ", label, step, f"{note}  [dim]{self._elapsed()}[/]")

    def skipped(self, label: str, step: str) -> None:
        """Write the line of a step found done."""
        self._line("[dim]kept[/]   ", label, step, "[dim]unchanged, not run again[/]")

    def failed(self, label: str, step: str, reason: str) -> None:
        """Write why a step failed."""
        self._line("[bold red]failed[/] ", label, step, escape(reason))

    def _line(self, mark: str, label: str, step: str, note: str) -> None:
        self._bar.update(self._task, visible=False)
        self.console.print(f"{mark}{label:<12} {step:<12} {note}", soft_wrap=True)

    def _elapsed(self) -> str:
        return f"{time.monotonic() - self._began:.1f} s"


def exit_code(outcome: Outcome) -> int:
    """Return the process's exit code for what a job did."""
    return EXIT_CELLS_FAILED if outcome.failures else 0
