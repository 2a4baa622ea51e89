"""Pairing a variant's measurements with the baseline's, or saying why they cannot be paired."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from qkit.errors import InputError
from qkit.evaluate.comparable import differences
from qkit.evaluate.fidelity_scores import Scores
from qkit.evaluate.scores import is_fraction, is_perplexity, task_weights
from qkit.evaluate.statistics import (
    Comparison,
    RatioComparison,
    compare_perplexities,
    compare_samples,
)
from qkit.measurements import AccuracyResult, FailureRecord, Measurement, VariantRecord
from qkit.recipe import is_again


@dataclass(frozen=True)
class VariantInput:
    """What is stored of one variant.

    Attributes:
        name: The row's name.
        method: "awq", "gptq", ...; for the baseline its dtype.
        scheme: Scheme as planned; the record's, if there is one, takes precedence.
        record: The variant's `qkit.json`; None for the baseline and where quantization failed.
        measurements: Of this variant, in any order; of several of a suite the latest counts.
        failures: Steps that failed and have not succeeded since.
        weight_bytes: Tensor bytes of the checkpoint, where there is no record.
        quantized_bytes: Of these, quantized ones with their scales.
        unquantized_bytes: Of these, the rest.
        predicted_bytes: What `qkit plan` predicts for the weights.
        read_bytes: Weights read for one decoding step.
        kv_bytes_per_token: Of the KV cache.
        scores: Log-probabilities of fidelity suites, by suite; without those whose file is lost.
    """

    name: str
    method: str
    scheme: str
    record: VariantRecord | None = None
    measurements: Sequence[Measurement] = ()
    failures: Sequence[FailureRecord] = ()
    weight_bytes: int | None = None
    quantized_bytes: int | None = None
    unquantized_bytes: int | None = None
    predicted_bytes: int | None = None
    read_bytes: int | None = None
    kv_bytes_per_token: int | None = None
    scores: Mapping[str, Scores] = field(default_factory=dict)

    @property
    def suites(self) -> dict[str, Measurement]:
        """The latest measurement of each suite."""
        return {m.suite: m for m in sorted(self.measurements, key=lambda m: m.created)}

    @property
    def accuracy(self) -> dict[str, AccuracyResult]:
        """The scores of each accuracy suite, without the baseline's repeats."""
        return {
            suite: measurement.accuracy
            for suite, measurement in self.suites.items()
            if measurement.accuracy and not is_again(suite)
        }


@dataclass(frozen=True)
class AccuracyPair:
    """A score and the baseline's, question by question.

    Attributes:
        baseline: The baseline's result.
        comparison: Of shares such as accuracy; None for other metrics.
        ratio: Of perplexities; None for other metrics.
    """

    baseline: AccuracyResult
    comparison: Comparison | None = None
    ratio: RatioComparison | None = None


@dataclass(frozen=True)
class Pairing:
    """A measurement, the baseline's of the same suite if it may be compared, and why not."""

    measurement: Measurement
    baseline: Measurement | None
    #: Samples of `baseline` and `measurement` compared, for accuracy.
    accuracy: AccuracyPair | None
    differences: tuple[str, ...]


def pair(
    measurement: Measurement, baseline: VariantInput | None, *, allow_incomparable: bool
) -> Pairing:
    """Pair a measurement with the baseline's of the same suite.

    Args:
        measurement: Of any variant, the baseline included.
        baseline: The variant to compare with, if there is one.
        allow_incomparable: Pair in spite of differing fields; they are returned all the same.
    """
    if baseline is None:
        return Pairing(measurement, None, None, ())
    other = baseline.suites.get(measurement.suite)
    if other is None:
        why = f"there is no {measurement.suite} measurement of {baseline.name}"
        return Pairing(measurement, None, None, (why,))
    found = differences(other, measurement)
    if found and not allow_incomparable:
        return Pairing(measurement, None, None, found)
    if not (other.accuracy and measurement.accuracy):
        return Pairing(measurement, other, None, found)
    try:
        accuracy = pair_accuracy(other.accuracy, measurement.accuracy)
    except (InputError, ValueError) as error:
        # Other questions, or too few, cannot be paired, whatever is allowed.
        problem = error.what if isinstance(error, InputError) else str(error)
        return Pairing(measurement, None, None, (*found, problem))
    return Pairing(measurement, other, accuracy, found)


def pair_accuracy(baseline: AccuracyResult, variant: AccuracyResult) -> AccuracyPair:
    """Compare two results question by question.

    Raises:
        InputError: They were not scored on the same questions, or there is none.
        ValueError: There are too few for an interval.
    """
    if is_perplexity(variant.headline.metric):
        return AccuracyPair(baseline, ratio=compare_perplexities(baseline.samples, variant.samples))
    comparison = compare_samples(baseline.samples, variant.samples, weights=task_weights(baseline))
    shares = is_fraction(baseline) and is_fraction(variant)
    return AccuracyPair(baseline, comparison=comparison if shares else None)
