"""Errors a person can act on: what happened, where, and what to do.

The command line prints them without a traceback and exits with their `exit_code`. Anything that
is not a `QkitError` is a defect of qkit and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

#: Process exit codes. 75 is EX_TEMPFAIL of sysexits.h, which schedulers read as "try later".
EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_CELLS_FAILED = 3
EXIT_LOCKED = 75
EXIT_INTERRUPTED = 130


class QkitError(Exception):
    """Base of every error that is the world's fault or the person's, not qkit's.

    Args:
        what: One sentence that names the thing and says what is wrong with it.
        where: File, folder, URL or recipe field the error is about.
        fix: What to do about it, as an instruction.
        detail: Longer evidence, such as the last lines of a log.
    """

    exit_code = EXIT_ERROR

    def __init__(
        self,
        what: str,
        *,
        where: str | Path | None = None,
        fix: str | None = None,
        detail: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = None if where is None else str(where)
        self.fix = fix
        self.detail = detail

    def __str__(self) -> str:
        """Return the message as printed: what, where, evidence, and what to do."""
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.detail:
            lines.extend(f"  | {line}" for line in self.detail.rstrip().splitlines())
        if self.fix:
            lines.append(f"  fix:   {self.fix}")
        return "\n".join(lines)


class InputError(QkitError):
    """An argument, recipe, checkpoint or data file that cannot be used as it is."""

    exit_code = EXIT_USAGE


class EnvironmentMissingError(QkitError):
    """A backend's environment does not exist, is incomplete, or does not import."""


class WorkerError(QkitError):
    """A worker process failed; `kind` tells how.

    `kind` is one of "error" (it reported an exception), "exit" (non-zero exit without a result),
    "killed" (ended by a signal), "timeout", "missing" (no result file), "schema" (a result this
    version cannot read).
    """

    def __init__(
        self,
        what: str,
        *,
        kind: str,
        where: str | Path | None = None,
        fix: str | None = None,
        detail: str | None = None,
    ) -> None:
        super().__init__(what, where=where, fix=fix, detail=detail)
        self.kind = kind


class ServerError(QkitError):
    """The server did not start, died, or answered something that cannot be used."""


class MeasurementError(QkitError):
    """A measurement could not be completed; nothing may be reported from it."""


class HubUnreachableError(QkitError):
    """A model or data set has to come from the Hugging Face hub and does not."""


class LockedError(QkitError):
    """Another qkit process holds the accelerator or the run folder."""

    exit_code = EXIT_LOCKED


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `", did you mean 'x'?"` for the closest known name, or an empty string."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f", did you mean {matches[0]!r}?" if matches else ""
