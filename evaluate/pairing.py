"""Pairing a variant's measurements with the baseline's, or saying why they cannot be paired."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from qkit.errors import InputError
from qkit.evaluate.comparable import differences
from qkit.evaluate.fidelity_scores import Scores
from qkit.evaluate.statistics import PairedComparison, compare_samples
from qkit.measurements import AccuracyResult, FailureRecord, Measurement, VariantRecord

#: Parts of the names of metrics that are no fraction of right answers.
_NOT_FRACTIONS = ("perplexity", "bits_per_byte", "bleu", "chrf")


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


@dataclass(frozen=True)
class Pairing:
    """A measurement, the baseline's of the same suite if it may be compared, and why not."""

    measurement: Measurement
    baseline: Measurement | None
    #: Samples of `baseline` and `measurement` compared, for accuracy.
    samples: PairedComparison | None
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
        samples = compare_samples(other.accuracy.samples, measurement.accuracy.samples)
    except (InputError, ValueError) as error:
        # Other questions, or too few, cannot be paired, whatever is allowed.
        problem = error.what if isinstance(error, InputError) else str(error)
        return Pairing(measurement, None, None, (*found, problem))
    return Pairing(measurement, other, samples, found)


def is_fraction(result: AccuracyResult) -> bool:
    """Whether points make sense: every value lies between 0 and 1 and the metric is a share."""
    if any(part in result.headline.metric.split(",")[0] for part in _NOT_FRACTIONS):
        return False
    values = [result.headline.value, *(sample.value for sample in result.samples)]
    return all(0 <= value <= 1 for value in values)
