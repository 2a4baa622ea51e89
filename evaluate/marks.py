"""Marks of a row and notes of a table: what a reader must know beside the figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qkit.evaluate.comparable import differences
from qkit.evaluate.drift import Drift, measure_drift
from qkit.evaluate.pairing import Pairing, VariantInput, is_fraction
from qkit.levels import Level, names
from qkit.measurements import Measurement
from qkit.recipe import BENCH_AGAIN
from qkit.suites import FIDELITY_AGAIN

#: Steps before any suite: where one failed, no suite was due.
_EARLY_STEPS = ("quantize", "serve")


def row_marks(
    variant: VariantInput,
    baseline: VariantInput | None,
    pairings: Mapping[str, Pairing],
    *,
    headline_bench: str,
) -> tuple[str, ...]:
    """Collect a row's marks: comparisons refused, suites missing, and what was seen measuring.

    Args:
        variant: The row.
        baseline: The row it is compared with.
        pairings: The row's suites, paired with the baseline's.
        headline_bench: Benchmark whose marks need no name.
    """
    suites = variant.suites
    marks = [
        *_comparison_marks(pairings),
        *_missing_marks(variant, baseline),
        *_identity_marks(suites),
        *(mark for m in suites.values() for mark in m.server.marks),
        *(mark for pairing in pairings.values() for mark in _accuracy_marks(pairing)),
        *(mark for pairing in pairings.values() for mark in _bench_marks(pairing, headline_bench)),
        *_fidelity_marks(variant),
        *_repeat_marks(variant),
    ]
    return tuple(dict.fromkeys(one_line(mark) for mark in marks))


def _missing_marks(variant: VariantInput, baseline: VariantInput | None) -> list[str]:
    """Name the baseline's suites that were neither measured nor failed on a variant."""
    if (
        baseline is None
        or not variant.suites
        or any(f.step in _EARLY_STEPS for f in variant.failures)
    ):
        return []
    done = variant.suites.keys() | {failure.step for failure in variant.failures}
    due = [suite for suite in baseline.suites if suite not in (BENCH_AGAIN, FIDELITY_AGAIN)]
    return [f"not measured: {suite}" for suite in due if suite not in done]


def _accuracy_marks(pairing: Pairing) -> list[str]:
    result = pairing.measurement.accuracy
    if result is None:
        return []
    marks = [f"{result.suite}: {mark}" for mark in result.marks]
    if not is_fraction(result):
        metric = result.headline.metric
        marks.append(f"{result.suite}: no difference in points, {metric} is not a fraction")
    elif pairing.samples and abs(pairing.samples.variant - result.headline.value) > 1e-6:
        marks.append(f"{result.suite}: the difference weighs questions alike, the score does not")
    return marks


def _comparison_marks(pairings: Mapping[str, Pairing]) -> list[str]:
    """Say which suites were not compared, or were all the same, and which field differs.

    One mark for the row where all suites differ alike, else one for each suite.
    """
    by_reason: dict[tuple[str, bool], list[str]] = {}
    for suite, pairing in pairings.items():
        if pairing.differences:
            refused = pairing.baseline is None
            by_reason.setdefault(("; ".join(pairing.differences), refused), []).append(suite)
    marks = []
    for (reason, refused), suites in by_reason.items():
        what = "not compared" if refused else "compared although not comparable"
        which = "" if len(suites) == len(pairings) else f" ({', '.join(suites)})"
        marks.append(f"{what}{which}: {reason}")
    return marks


def _identity_marks(suites: Mapping[str, Measurement]) -> list[str]:
    """Say so where a row's suites were measured on different builds of the checkpoint."""
    builds: dict[str, list[str]] = {}
    for suite, measurement in suites.items():
        builds.setdefault(measurement.variant_hash, []).append(suite)
    if len(builds) < 2:
        return []
    parts = (f"{', '.join(names)} on {digest[:12]}" for digest, names in builds.items())
    return [f"suites were measured on different checkpoints: {'; '.join(parts)}"]


def _bench_marks(pairing: Pairing, headline_bench: str) -> list[str]:
    """Collect the cells' marks, each with the levels it is about."""
    levels: dict[str, list[Level]] = {}
    for cell in pairing.measurement.bench.cells if pairing.measurement.bench else ():
        for mark in cell.marks:
            levels.setdefault(mark, []).append(cell.level)
    suite = pairing.measurement.suite
    which = "" if suite == headline_bench else f"{suite}, "
    marks = [f"{which}{names(where)}: {mark}" for mark, where in levels.items()]
    if pairing.measurement.bench and not pairing.measurement.bench.complete:
        marks.append(f"{which}interrupted: the other levels were not measured")
    return marks


def _fidelity_marks(variant: VariantInput) -> list[str]:
    """Say which log-probabilities are lost, and what was seen measuring them."""
    marks = []
    for suite, measurement in variant.suites.items():
        if measurement.fidelity:
            marks += [f"{suite}: {mark}" for mark in measurement.fidelity.marks]
            if suite not in variant.scores:
                marks.append(f"{suite}: its file of log-probabilities is lost; measure it again")
    return marks


def _repeat_marks(variant: VariantInput) -> list[str]:
    repeats = {BENCH_AGAIN: "benchmark", FIDELITY_AGAIN: "fidelity suite"}
    return [
        f"its second {repeats[failure.step]} failed: {one_line(failure.reason)}"
        for failure in variant.failures
        if failure.step in repeats
    ]


def baseline_drift(baseline: VariantInput | None, headline_bench: str) -> tuple[Drift, ...]:
    """Return how the baseline's two benchmarks differ; empty where there are not two to compare."""
    suites = baseline.suites if baseline else {}
    first, last = suites.get(headline_bench), suites.get(BENCH_AGAIN)
    if first is None or last is None or differences(first, last):
        return ()
    return measure_drift(first.bench, last.bench) if first.bench and last.bench else ()


def table_notes(
    name: str, baseline: VariantInput | None, drift: Sequence[Drift], headline_bench: str
) -> tuple[str, ...]:
    """Say what a reader of the whole table has to know."""
    if baseline is None:
        return (f"There is no {name} row, so nothing is compared.",)
    suites = baseline.suites
    if not suites:
        return (f"{name} has no measurements, so nothing is compared.",)
    if headline_bench not in suites:
        return ()
    if BENCH_AGAIN not in suites:
        return (f"{name} was benchmarked once, so drift of the machine during the run is unknown.",)
    found = differences(suites[headline_bench], suites[BENCH_AGAIN])
    if found:
        return (f"The two benchmarks of {name} cannot be compared: {'; '.join(found)}.",)
    moved = [change for change in drift if change.moved]
    return (_drift_note(name, moved),) if moved else ()


def calibration_notes(variants: Sequence[VariantInput]) -> tuple[str, ...]:
    """Say once for each kind of calibration data why it may not be right for the model."""
    warned: dict[str, list[str]] = {}
    for variant in variants:
        record = variant.record.calibration if variant.record else None
        if record is not None and record.warning:
            warned.setdefault(one_line(record.warning), []).append(variant.name)
    return tuple(
        f"Calibration of {', '.join(names)}: {warning}." for warning, names in warned.items()
    )


def _drift_note(name: str, moved: Sequence[Drift]) -> str:
    """Say in one sentence at which levels and how far the baseline moved beyond its noise."""
    figures = (
        ("median TPOT", [d.tpot_percent for d in moved], [d.tpot_noise_percent for d in moved]),
        (
            "throughput",
            [d.output_tok_per_s_percent for d in moved],
            [d.output_tok_per_s_noise_percent for d in moved],
        ),
    )
    parts = []
    for what, changes, noises in figures:
        known = [change for change in changes if change is not None]
        if known:
            low, high = min(known), max(known)
            span = f"{low:+.1f} %" if low == high else f"{low:+.1f} to {high:+.1f} %"
            parts.append(f"{what} {span} (noise up to {max(noises):.1f} %)")
    levels = names(d.level for d in moved)
    return (
        f"The machine drifted: between the first and the last benchmark of {name} at "
        f"{levels}, {' and '.join(parts)}. Ratios of that size mean nothing here."
    )


def one_line(text: str) -> str:
    """Collapse all white space, so that a text fits into a cell."""
    return " ".join(text.split())
