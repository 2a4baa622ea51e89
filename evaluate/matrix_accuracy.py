"""Accuracy in the matrix: a score and its paired difference from the baseline. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qkit.errors import InputError
from qkit.evaluate.figures import DIGITS, figure
from qkit.evaluate.intervals import Interval
from qkit.evaluate.matrix_values import Accuracy, AccuracyPart, Flips, NoiseFloor, Row
from qkit.evaluate.pairing import AccuracyPair
from qkit.evaluate.scores import by_task, is_fraction, part_interval, score_interval
from qkit.evaluate.statistics import Comparison, compare_samples, holm
from qkit.measurements import AccuracyResult, Sample, TaskScore


def accuracy_row(
    result: AccuracyResult,
    paired: AccuracyPair | None,
    *,
    is_baseline: bool,
    margin_points: float,
    noise: NoiseFloor | None = None,
) -> Accuracy:
    """Return one task's score, and its difference from the baseline where it is paired.

    Args:
        result: The variant's.
        paired: It and the baseline, question by question; None where they are not comparable.
        is_baseline: Whether it is the baseline itself.
        margin_points: Loss in points up to which a variant counts as non-inferior.
        noise: The baseline against itself, where that was measured.
    """
    score, fraction = result.headline, is_fraction(result)
    found = paired.comparison if paired and fraction and not is_baseline else None
    ratio = paired.ratio if paired and not is_baseline else None
    own = is_baseline and fraction
    delta = found.delta_points if found else 0.0 if own else None
    within = (
        None if found is None or noise is None else abs(found.delta_points) <= (noise.spread_points)
    )
    return Accuracy(
        metric=score.metric,
        fraction=fraction,
        value=score.value,
        stderr=score.stderr,
        n=score.n,
        num_fewshot=result.num_fewshot,
        limit=result.limit,
        chat_template=result.chat_template,
        interval=rounded(score_interval(result)),
        delta_points=figure(delta),
        delta_interval=rounded(found.interval_points if found else None),
        delta_method=found.interval_method if found else None,
        recovery_percent=figure(found.recovery_percent if found else 100.0 if own else None),
        recovery_interval=rounded(found.recovery_interval if found else None),
        flips=_flips(found),
        mcnemar_p=figure(found.mcnemar_p if found else None),
        verdict=found.verdict(margin_points) if found else None,
        questions_to_settle=found.questions_to_settle(margin_points) if found else None,
        within_noise=within,
        ratio=figure(ratio.ratio if ratio else None),
        ratio_interval=rounded(ratio.interval if ratio else None),
        parts=_parts(result, paired.baseline if found and paired else None, is_baseline),
    )


def adjusted_for_several(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Return the rows with every task's McNemar p-values adjusted over the variants (Holm)."""
    adjusted: dict[tuple[int, str], float] = {}
    for task in dict.fromkeys(task for row in rows for task in row.accuracy):
        known = [
            (index, p)
            for index, row in enumerate(rows)
            if (found := row.accuracy.get(task)) and (p := found.mcnemar_p) is not None
        ]
        for (index, _), p in zip(known, holm([p for _, p in known]), strict=True):
            adjusted[index, task] = p
    return tuple(
        row.model_copy(
            update={
                "accuracy": {
                    task: found.model_copy(
                        update={"mcnemar_p_holm": figure(adjusted.get((index, task)))}
                    )
                    for task, found in row.accuracy.items()
                }
            }
        )
        for index, row in enumerate(rows)
    )


# ------------------------------------------------------------------------------ tasks of a group


def _parts(
    result: AccuracyResult, baseline: AccuracyResult | None, is_baseline: bool
) -> tuple[AccuracyPart, ...]:
    """Return the tasks and groups a group consists of, groups first, as they are stored."""
    scores = [score for score in result.scores if score.task != result.headline.task]
    if not scores or not is_fraction(result):
        return ()
    by_name = {score.task: score for score in result.scores}
    values = by_task(result.samples)
    mine = _by_task(result.samples)
    theirs = _by_task(baseline.samples) if baseline else {}
    parts = []
    for score in scores:
        tasks = _leaves(score, by_name)
        known = {task: values[task] for task in tasks if task in values}
        found = _compared(tasks, theirs, mine) if baseline else None
        parts.append(
            AccuracyPart(
                task=score.task,
                alias=score.alias,
                is_group=score.is_group,
                n=score.n,
                value=score.value,
                stderr=score.stderr,
                interval=rounded(part_interval(score, known)),
                delta_points=figure(found.delta_points if found else 0.0 if is_baseline else None),
                delta_interval=rounded(found.interval_points if found else None),
                flips=_flips(found),
            )
        )
    return tuple(parts)


def _leaves(score: TaskScore, scores: Mapping[str, TaskScore]) -> tuple[str, ...]:
    """Return the tasks of a part: itself, or those of a group's groups; none where not stored."""
    if not score.is_group:
        return (score.task,)
    found = [
        leaf
        for name in score.subtasks
        for leaf in (_leaves(scores[name], scores) if name in scores else (name,))
    ]
    return tuple(dict.fromkeys(found))


def _compared(
    tasks: Sequence[str],
    baseline: Mapping[str, Sequence[Sample]],
    variant: Mapping[str, Sequence[Sample]],
) -> Comparison | None:
    before = [sample for task in tasks for sample in baseline.get(task, ())]
    after = [sample for task in tasks for sample in variant.get(task, ())]
    try:
        return compare_samples(before, after)
    except (InputError, ValueError):
        return None  # too few questions for an interval


def _by_task(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.task, []).append(sample)
    return found


# ---------------------------------------------------------------------------------------- small


def _flips(found: Comparison | None) -> Flips | None:
    if found is None or found.flips_to_wrong is None or found.flips_to_right is None:
        return None
    return Flips(to_wrong=found.flips_to_wrong, to_right=found.flips_to_right)


def rounded(interval: Interval | None) -> tuple[float, float] | None:
    """Return an interval's ends as the matrix stores them."""
    return (round(interval.low, DIGITS), round(interval.high, DIGITS)) if interval else None
