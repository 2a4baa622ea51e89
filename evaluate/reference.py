"""Published scores beside ours: a baseline that is far off was not scored as it should be. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from qkit.evaluate.matrix_values import Accuracy, Reference, Row
from qkit.evaluate.scores import metric_name
from qkit.recipe import PublishedScore

#: Points that two honest measurements of one checkpoint may be apart.
TOLERANCE_POINTS = 2.0


def reference_rows(
    references: Sequence[PublishedScore], rows: Sequence[Row]
) -> tuple[Reference, ...]:
    """Return every published score, with ours where the same variant was scored on the task."""
    by_name = {row.variant: row for row in rows}
    return tuple(
        _reference(
            reference,
            by_name[reference.variant].accuracy.get(reference.task)
            if reference.variant in by_name
            else None,
        )
        for reference in references
    )


def reference_notes(references: Sequence[Reference], baseline: str) -> tuple[str, ...]:
    """Say so where the baseline is far from what was published: then no difference is sound."""
    return tuple(
        f"{baseline} scores {ref.ours:.2f} on {ref.task}, {abs(ref.difference):.1f} points "
        f"{'below' if ref.difference < 0 else 'above'} the published {ref.value:.2f} ({ref.name}, "
        f"{ref.source}): check the checkpoint, the prompts and the served length before trusting "
        "any difference."
        for ref in references
        if ref.variant == baseline and ref.off and ref.ours is not None and ref.difference
    )


def _reference(published: PublishedScore, ours: Accuracy | None) -> Reference:
    scale = 100 if ours is None or ours.fraction else 1
    value = None if ours is None else ours.value * scale
    differs = _differences(published, ours) if ours else ()
    difference = None if value is None or differs else round(value - published.value, 6)
    return Reference(
        name=published.name,
        variant=published.variant,
        task=published.task,
        metric=published.metric,
        value=published.value,
        n=published.n,
        num_fewshot=published.num_fewshot,
        source=published.source,
        ours=value,
        difference=difference,
        differs=differs,
        off=difference is not None and ours is not None and _is_off(published, ours, difference),
    )


def _differences(published: PublishedScore, ours: Accuracy) -> tuple[str, ...]:
    found = []
    metric = metric_name(ours.metric)
    if metric != published.metric:
        found.append(f"metric {metric} vs {published.metric} (published)")
    if published.num_fewshot is not None and ours.num_fewshot != published.num_fewshot:
        shots = "the task's own" if ours.num_fewshot is None else ours.num_fewshot
        found.append(f"few-shot {shots} vs {published.num_fewshot} (published)")
    return tuple(found)


def _is_off(published: PublishedScore, ours: Accuracy, difference: float) -> bool:
    """Whether the difference is larger than two points and than what few questions explain."""
    if not ours.fraction or abs(difference) <= TOLERANCE_POINTS:
        return False
    if ours.interval is None:
        return True
    low, high = (100 * end for end in ours.interval)
    return not low <= published.value <= high
