"""Accuracy in the matrix: a score and its paired difference from the baseline. Pure."""

from __future__ import annotations

from qkit.evaluate.figures import DIGITS, figure
from qkit.evaluate.matrix_values import Accuracy, Flips
from qkit.evaluate.pairing import is_fraction
from qkit.evaluate.statistics import PairedComparison
from qkit.measurements import AccuracyResult


def accuracy_row(
    result: AccuracyResult, paired: PairedComparison | None, is_baseline: bool, margin_points: float
) -> Accuracy:
    """Return one task's score, and its difference from the baseline where it is paired.

    Args:
        result: The variant's.
        paired: It and the baseline, question by question; None where they are not comparable.
        is_baseline: Whether it is the baseline itself.
        margin_points: Loss in points up to which a variant counts as non-inferior.
    """
    score, fraction = result.headline, is_fraction(result)
    delta = interval = recovery = p_value = flips = verdict = None
    if is_baseline and fraction:
        delta, recovery = 0.0, 100.0
    elif paired and fraction:
        delta = figure(paired.delta_points)
        interval = (
            round(paired.interval_points.low, DIGITS),
            round(paired.interval_points.high, DIGITS),
        )
        recovery, p_value = figure(paired.recovery_percent), figure(paired.mcnemar_p)
        verdict = paired.verdict(margin_points)
        if paired.flips_to_wrong is not None and paired.flips_to_right is not None:
            flips = Flips(to_wrong=paired.flips_to_wrong, to_right=paired.flips_to_right)
    return Accuracy(
        metric=score.metric,
        fraction=fraction,
        value=score.value,
        stderr=score.stderr,
        n=score.n,
        num_fewshot=result.num_fewshot,
        limit=result.limit,
        chat_template=result.chat_template,
        delta_points=delta,
        delta_interval=interval,
        recovery_percent=recovery,
        flips=flips,
        mcnemar_p=p_value,
        verdict=verdict,
    )
