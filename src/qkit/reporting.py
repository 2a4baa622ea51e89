"""How a running job tells a person what it does; the command line draws it."""

from __future__ import annotations

from typing import Protocol


class Reporter(Protocol):
    """Receives what happens in a run, in order."""

    def started(self, label: str, step: str) -> None:
        """A step of a variant begins."""

    def progress(self, stage: str, done: int, total: int) -> None:
        """The step got to `done` of `total` of a stage."""

    def finished(self, label: str, step: str, note: str) -> None:
        """The step succeeded; the note is one line about what came out."""

    def skipped(self, label: str, step: str) -> None:
        """The step was found done."""

    def failed(self, label: str, step: str, reason: str) -> None:
        """The step failed; the run goes on."""


class Silent:
    """A reporter that says nothing."""

    def started(self, label: str, step: str) -> None:
        """Say nothing."""

    def progress(self, stage: str, done: int, total: int) -> None:
        """Say nothing."""

    def finished(self, label: str, step: str, note: str) -> None:
        """Say nothing."""

    def skipped(self, label: str, step: str) -> None:
        """Say nothing."""

    def failed(self, label: str, step: str, reason: str) -> None:
        """Say nothing."""
