"""The run folder: the only module that knows path names in artifacts/.

    artifacts/RUN/
      run.json                        the recipe as it was run
      variants/NAME/model/            a checkpoint vLLM serves as it is, with qkit.json
      variants/NAME/quantize/         the worker's request, result and log
      variants/NAME/server.log        the last server's output
      variants/NAME/subject.json      what was measured: scheme, hash, bytes
      measurements/NAME/SUITE.json    figures and the raw records they were computed from
      scored/NAME/SUITE.jsonl         answers of a suite that is not finished
      fidelity/NAME/SUITE.npz         log-probabilities of every scored token
      failures/NAME/STEP.json         a step that failed, until it succeeds
      matrix.json .csv .md .html      the table, computed from the files above
      matrix.tasks.csv                one line a variant and task, subjects of groups included

Files are written whole or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from qkit.errors import InputError, nearest
from qkit.locks import lock
from qkit.measurements import SCHEMA_VERSION, FailureRecord, Measurement, Subject, VariantRecord
from qkit.processes import is_running_since
from qkit.protocol import SchemaError, read_json, write_json
from qkit.recipe import Recipe, parse_recipe

VARIANT_FILE = "qkit.json"
M = TypeVar("M", bound=BaseModel)


def artifacts_dir() -> Path:
    """Return the folder of all runs: `$QKIT_ARTIFACTS`, else `artifacts` in the current folder."""
    return Path(os.environ.get("QKIT_ARTIFACTS") or "artifacts")


def now() -> str:
    """Return the time as stored: UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class RunStore:
    """Reads and writes one run folder.

    Args:
        root: The run's folder; made on the first write.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.root.resolve().name

    @contextmanager
    def lock(self, wait_s: float = 0.0) -> Iterator[None]:
        """Hold the run folder for writing, cleared of what killed runs were about to write.

        Raises:
            LockedError: Another process holds it.
        """
        with lock(self.root / ".lock", f"run {self.name!r}", wait_s=wait_s):
            self._remove_temporary()
            yield

    def _remove_temporary(self) -> None:
        for path in self.root.rglob(".*.tmp"):  # .NAME.PID.tmp, see write_json
            pid = path.name.split(".")[-2]
            with suppress(FileNotFoundError):
                if not (pid.isdigit() and is_running_since(int(pid), path.stat().st_mtime)):
                    path.unlink()

    # ------------------------------------------------------------------------------------ paths

    def model_dir(self, label: str) -> Path:
        """Return the folder of a variant's checkpoint."""
        return self.root / "variants" / label / "model"

    def quantize_dir(self, label: str) -> Path:
        """Return the folder of the worker that makes a variant."""
        return self.root / "variants" / label / "quantize"

    def server_log(self, label: str) -> Path:
        """Return the log file of a variant's server."""
        return self.root / "variants" / label / "server.log"

    def matrix_file(self, suffix: str) -> Path:
        """Return the matrix's file of a format: "json", "csv", "md" or "html"."""
        return self.root / f"matrix.{suffix}"

    def scored_file(self, label: str, suite: str) -> Path:
        """Return the file of answers that an unfinished accuracy suite has so far."""
        return self.root / "scored" / label / f"{suite}.jsonl"

    def drop_scored(self, label: str, suite: str) -> None:
        """Remove an accuracy suite's answers: its measurement holds what was made of them."""
        self.scored_file(label, suite).unlink(missing_ok=True)

    def scores_file(self, label: str, suite: str) -> Path:
        """Return the file of a fidelity suite's log-probabilities, which are too many for JSON."""
        return self.root / "fidelity" / label / f"{suite}.npz"

    def _subject_file(self, label: str) -> Path:
        return self.root / "variants" / label / "subject.json"

    def _measurement_file(self, label: str, suite: str) -> Path:
        return self.root / "measurements" / label / f"{suite}.json"

    def _failure_file(self, label: str, step: str) -> Path:
        return self.root / "failures" / label / f"{step}.json"

    # ----------------------------------------------------------------------------------- recipe

    def write_recipe(self, recipe: Recipe, external: Sequence[str] = ()) -> None:
        """Store the recipe as run; `created` stays that of the first time.

        Args:
            recipe: What is run.
            external: Names of rows measured besides the recipe's variants; added to those stored.
        """
        old = self._run_file()
        names = dict.fromkeys([*old.get("external", []), *external])
        self._write(
            self.root / "run.json",
            {
                "schema_version": SCHEMA_VERSION,
                "created": old.get("created") or now(),
                "recipe": recipe.model_dump(mode="json"),
                "external": list(names),
            },
        )

    def external(self) -> tuple[str, ...]:
        """Return the names of rows measured besides the recipe's variants."""
        return tuple(self._run_file().get("external", ()))

    def read_recipe(self) -> Recipe:
        """Return the recipe this folder was run with.

        Raises:
            InputError: The folder is not a run's, or was written by another version.
        """
        data = self._run_file()
        if "recipe" not in data:
            raise InputError(
                f"{str(self.root)!r} is not a run's folder: it has no run.json",
                fix=f"runs here are: {', '.join(runs()) or 'none'}",
            )
        return parse_recipe(data["recipe"], where=str(self.root / "run.json"))

    def created(self) -> str:
        """Return when the run was first started."""
        return str(self._run_file().get("created", ""))

    def _run_file(self) -> dict[str, Any]:
        path = self.root / "run.json"
        if not path.is_file():
            return {}
        data = _read(path)
        return data if isinstance(data, dict) else {}

    # ------------------------------------------------------------------- variants and measurements

    def variant(self, label: str) -> VariantRecord | None:
        """Return what a variant of this run is, or None where it was not made."""
        return read_variant(self.model_dir(label))

    def write_subject(self, subject: Subject) -> None:
        """Store what is measured under a name."""
        self._write(self._subject_file(subject.label), subject.model_dump(mode="json"))

    def subject(self, label: str) -> Subject | None:
        """Return what was last measured under a name, or None."""
        path = self._subject_file(label)
        return _parse(path, Subject) if path.is_file() else None

    def measurement(self, label: str, suite: str) -> Measurement | None:
        """Return a stored measurement, or None."""
        path = self._measurement_file(label, suite)
        return _parse(path, Measurement) if path.is_file() else None

    def measurements(self, label: str) -> list[Measurement]:
        """Return all stored measurements of a variant, by suite name."""
        return [
            _parse(path, Measurement)
            for path in sorted((self.root / "measurements" / label).glob("*.json"))
        ]

    def write_measurement(self, measurement: Measurement) -> None:
        """Store a measurement and forget the failure it replaces."""
        path = self._measurement_file(measurement.variant, measurement.suite)
        self._write(path, measurement.model_dump(mode="json"))
        self.clear_failure(measurement.variant, measurement.suite)

    def failures(self, label: str) -> list[FailureRecord]:
        """Return the steps of a variant that failed and have not succeeded since."""
        return [
            _parse(path, FailureRecord)
            for path in sorted((self.root / "failures" / label).glob("*.json"))
        ]

    def write_failure(self, failure: FailureRecord) -> None:
        """Store a failed step."""
        path = self._failure_file(failure.variant, failure.step)
        self._write(path, failure.model_dump(mode="json"))

    def clear_failure(self, label: str, step: str) -> None:
        """Forget a failed step that has succeeded."""
        self._failure_file(label, step).unlink(missing_ok=True)

    def write_text(self, path: Path, text: str) -> None:
        """Write a text file whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)

    def _write(self, path: Path, value: Any) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, value)


def runs() -> list[str]:
    """Return the names of the runs under the artifacts folder."""
    return sorted(path.parent.name for path in artifacts_dir().glob("*/run.json"))


def open_run(name_or_path: str) -> RunStore:
    """Return an existing run by its name or folder.

    Raises:
        InputError: There is no such run.
    """
    for folder in (Path(name_or_path), artifacts_dir() / name_or_path):
        if (folder / "run.json").is_file():
            return RunStore(folder)
    known = runs()
    raise InputError(
        f"there is no run {name_or_path!r}{nearest(name_or_path, known)}",
        where=artifacts_dir(),
        fix=f"runs here are: {', '.join(known) or 'none; start one with `qkit run RECIPE`'}",
    )


def latest_run() -> RunStore:
    """Return the run that was written to last.

    Raises:
        InputError: There is none.
    """
    files = sorted(artifacts_dir().glob("*/run.json"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise InputError(
            "there is no run here yet", where=artifacts_dir(), fix="start one: `qkit run demo`"
        )
    return RunStore(files[-1].parent)


def read_variant(folder: Path) -> VariantRecord | None:
    """Return a checkpoint folder's qkit.json, or None where it has none."""
    path = folder / VARIANT_FILE
    return _parse(path, VariantRecord) if path.is_file() else None


def _read(path: Path) -> Any:
    try:
        return read_json(path)
    except SchemaError as error:
        raise InputError(
            "a stored file is not valid JSON",
            where=path,
            detail=str(error),
            fix="remove the file; its step will run again",
        ) from None


def _parse(path: Path, model: type[M]) -> M:
    try:
        return model.model_validate(_read(path))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise InputError(
            "a stored file does not have the shape this qkit reads",
            where=path,
            detail=f"{'.'.join(map(str, first['loc']))}: {first['msg']}",
            fix="it was written by another version or changed by hand: remove it and run again",
        ) from None
