"""Finds what `qkit compare` is given: measurement files, folders, rows of runs, lm-eval's files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from qkit.errors import InputError
from qkit.evaluate.compare import Side
from qkit.evaluate.lm_eval_files import is_lm_eval_file, newest_results, read_lm_eval
from qkit.measurements import Measurement
from qkit.recipe import is_again
from qkit.store import open_run

_KINDS = (
    "give a measurement file, a folder of them (artifacts/RUN/measurements/NAME), RUN/NAME, or a "
    "result file or folder of lm-eval"
)


def load_sides(names: Sequence[str]) -> list[Side]:
    """Return what each name stands for; equal names are told apart by a number.

    Raises:
        InputError: A name stands for nothing, or its file cannot be used.
    """
    sides: list[Side] = []
    for name in names:
        side = _load(name)
        taken = {known.name for known in sides}
        if side.name in taken:
            side = replace(side, name=name)
        if side.name in taken:
            raise InputError(f"{name!r} is given twice", fix="give different results")
        sides.append(side)
    return sides


def _load(name: str) -> Side:
    path = Path(name)
    if path.is_file():
        return _from_file(path)
    if path.is_dir():
        return _from_folder(path)
    run, _, variant = name.rpartition("/")
    if run and variant:
        measurements = open_run(run).measurements(variant)
        if measurements:
            return _of_measurements(name, measurements)
    raise InputError(f"there are no measurements {name!r}", fix=_KINDS)


def _from_file(path: Path) -> Side:
    data = _read(path)
    if is_lm_eval_file(data):
        return Side(_lm_eval_name(path), read_lm_eval(path, data))
    return _of_measurements(path.parent.name or path.stem, [_measurement(path, data)])


def _from_folder(path: Path) -> Side:
    if results := newest_results(path):
        return _from_file(results)
    files = sorted(path.glob("*.json"))
    if not files:
        raise InputError("the folder holds no measurement", where=path, fix=_KINDS)
    return _of_measurements(path.resolve().name, [_measurement(f, _read(f)) for f in files])


def _lm_eval_name(path: Path) -> str:
    """Name a side after the model's folder, which is what lm-eval puts its files in."""
    return path.parent.name if path.stem.startswith("results_") else path.stem


def _of_measurements(name: str, measurements: Sequence[Measurement]) -> Side:
    scored = {m.suite: m for m in measurements if m.accuracy and not is_again(m.suite)}
    return Side(name, {s: m.accuracy for s, m in scored.items() if m.accuracy}, scored)


def _measurement(path: Path, data: Any) -> Measurement:
    try:
        return Measurement.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise InputError(
            "the file is neither a measurement of this qkit nor a result of lm-eval",
            where=path,
            detail=f"{'.'.join(map(str, first['loc']))}: {first['msg']}",
            fix=_KINDS,
        ) from None


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError("the file is not valid JSON", where=path, detail=str(error)) from None
