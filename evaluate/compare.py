"""`qkit compare`: any two results, question by question, or a clear reason why not.

The outcome is a matrix whose rows have nothing but scores, so that it reads like any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from qkit.errors import InputError
from qkit.evaluate.comparable import (
    accuracy_differences,
    hardware_differences,
    server_differences,
    unknown_fields,
)
from qkit.evaluate.marks import one_line
from qkit.evaluate.matrix_accuracy import accuracy_row, adjusted_for_several
from qkit.evaluate.matrix_average import average_row
from qkit.evaluate.matrix_values import Accuracy, Average, Matrix, Row
from qkit.evaluate.pairing import AccuracyPair, pair_accuracy
from qkit.evaluate.scores import is_fraction
from qkit.evaluate.statistics import MARGIN_POINTS, compare_scores
from qkit.measurements import AccuracyResult, Measurement


@dataclass(frozen=True)
class Side:
    """One of the things compared.

    Attributes:
        name: As it is shown.
        results: Scores by suite.
        measurements: Those of them that qkit measured, with server and machine.
    """

    name: str
    results: Mapping[str, AccuracyResult]
    measurements: Mapping[str, Measurement] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparisons:
    """What came out.

    Attributes:
        matrix: One row for each side, the first being the baseline.
        refused: Whether something was not subtracted because it differs.
    """

    matrix: Matrix
    refused: bool


def compare_sides(
    sides: Sequence[Side],
    *,
    created: str,
    allow_incomparable: bool = False,
    margin_points: float = MARGIN_POINTS,
) -> Comparisons:
    """Compare every side with the first, on all accuracy suites that both have.

    Args:
        sides: Two or more, with different names.
        created: ISO 8601 time that the comparison is dated.
        allow_incomparable: Subtract what differs in settings all the same, and say so.
        margin_points: Loss in points that verdicts allow.

    Raises:
        InputError: A side has no suite in common with the first.
    """
    base = sides[0]
    suites = [name for name in base.results if any(name in side.results for side in sides[1:])]
    for side in sides[1:]:
        if not any(name in side.results for name in suites):
            raise InputError(
                f"{side.name} and {base.name} have no accuracy suite in common",
                detail=f"{base.name}: {_listed(base)}\n{side.name}: {_listed(side)}",
                fix="measure both with the same suite: qkit eval --suite NAME",
            )
    rows = [_baseline_row(base, suites, margin_points)]
    refused = False
    for side in sides[1:]:
        pairs = {
            name: _pair(name, base, side, allow_incomparable)
            for name in suites
            if name in side.results
        }
        refused = refused or any(pair.refused for pair in pairs.values())
        rows.append(
            _row(
                side,
                {
                    name: accuracy_row(
                        side.results[name],
                        pair.found,
                        is_baseline=False,
                        margin_points=margin_points,
                    )
                    for name, pair in pairs.items()
                },
                tuple(one_line(mark) for pair in pairs.values() for mark in pair.marks),
                average_row(
                    {name: side.results[name] for name, pair in pairs.items() if pair.found},
                    {name: base.results[name] for name in suites},
                    is_baseline=False,
                    margin_points=margin_points,
                ),
            )
        )
    matrix = Matrix(
        run=" against ".join((", ".join(side.name for side in sides[1:]), base.name)),
        created=created,
        hardware=None,
        versions={},
        baseline=base.name,
        weight_source="checkpoint",
        margin_points=margin_points,
        workload=None,
        drift=(),
        notes=(),
        rows=adjusted_for_several(rows),
    )
    return Comparisons(matrix, refused)


@dataclass(frozen=True)
class _Pair:
    """Two results of one suite: what they have in common, and what must be said."""

    found: AccuracyPair | None
    marks: tuple[str, ...]
    refused: bool = False


def _pair(suite: str, base: Side, side: Side, allow_incomparable: bool) -> _Pair:
    before, after = base.results[suite], side.results[suite]
    differ = accuracy_differences(before, after)
    first, second = base.measurements.get(suite), side.measurements.get(suite)
    unknown = list(unknown_fields(before, after))
    if first and second:
        differ += server_differences(first.server, second.server)
        differ += hardware_differences(first.hardware, second.hardware)
    else:
        unknown.append("server version and flags")
    if differ and not allow_incomparable:
        return _Pair(None, (f"{suite}: not compared: {'; '.join(differ)}",), refused=True)
    marks = []
    if differ:
        marks.append(f"{suite}: COMPARED ALTHOUGH NOT COMPARABLE: {'; '.join(differ)}")
    if unknown:
        marks.append(f"{suite}: not recorded, so not checked: {', '.join(unknown)}")
    if before.samples and after.samples:
        try:
            return _Pair(pair_accuracy(before, after), tuple(marks))
        except (InputError, ValueError) as error:
            why = error.what if isinstance(error, InputError) else str(error)
            return _Pair(None, (*marks, f"{suite}: not compared: {why}"), refused=True)
    missing = base.name if not before.samples else side.name
    comparison = compare_scores(before.headline, after.headline)
    if comparison is None or not (is_fraction(before) and is_fraction(after)):
        why = f"{missing} has no samples, and the scores have no standard error to go by"
        return _Pair(None, (*marks, f"{suite}: not compared: {why}"), refused=True)
    marks.append(
        f"{suite}: UNPAIRED, because {missing} has no samples (lm-eval writes them with "
        "--log_samples): the interval is that of two separate sets of questions, too wide by far"
    )
    return _Pair(AccuracyPair(before, comparison=comparison), tuple(marks))


def _baseline_row(base: Side, suites: Sequence[str], margin_points: float) -> Row:
    results = {name: base.results[name] for name in suites}
    return _row(
        base,
        {
            name: accuracy_row(
                base.results[name], None, is_baseline=True, margin_points=margin_points
            )
            for name in suites
        },
        (),
        average_row(results, results, is_baseline=True, margin_points=margin_points),
    )


def _row(
    side: Side, accuracy: dict[str, Accuracy], marks: tuple[str, ...], average: Average | None
) -> Row:
    measured = next(iter(side.measurements.values()), None)
    return Row(
        variant=side.name,
        method="",
        scheme="",
        backend=None,
        status="ok",
        reason=None,
        failures=(),
        variant_hash=measured.variant_hash if measured else None,
        kernel=None,
        weight_bytes=None,
        weight_source="checkpoint",
        quantized_bytes=None,
        unquantized_bytes=None,
        weight_ratio=None,
        kv_cache_tokens=None,
        max_concurrency=None,
        max_model_len=None,
        server_flags=None,
        server_environment=None,
        accuracy=accuracy,
        average=average,
        bench=(),
        marks=tuple(dict.fromkeys(marks)),
    )


def _listed(side: Side) -> str:
    return ", ".join(side.results) or "none"
