"""The statistics against closed forms and published cases."""

from __future__ import annotations

import math

import pytest

from qkit.errors import InputError
from qkit.evaluate.statistics import (
    Interval,
    compare_samples,
    compare_values,
    mcnemar_exact,
    mean_stderr,
    recovery_percent,
    relative_percent,
    t_interval,
    tango_interval,
    verdict,
    wilson_interval,
)
from qkit.measurements import Sample

Z2 = 1.959963984540054**2


def binary(right: int, n: int) -> list[float]:
    return [1.0] * right + [0.0] * (n - right)


def sample(document: str, value: float, task: str = "mmlu_dev") -> Sample:
    return Sample(task=task, doc_hash=document, value=value)


class TestStandardError:
    @pytest.mark.parametrize(("right", "n"), [(70, 100), (1, 2), (196, 281), (0, 40)])
    def test_of_zeros_and_ones_is_the_closed_form(self, right: int, n: int) -> None:
        p = right / n
        assert mean_stderr(binary(right, n)) == pytest.approx(math.sqrt(p * (1 - p) / (n - 1)))

    def test_is_what_lm_eval_prints(self) -> None:
        from lm_eval.api.metrics import mean_stderr as theirs

        values = [0.1, 0.7, 0.4, 1.0, 0.25]
        assert mean_stderr(values) == pytest.approx(theirs(values), rel=1e-12)

    def test_of_one_value_is_unknown(self) -> None:
        assert mean_stderr([1.0]) is None


class TestWilson:
    def test_published_case(self) -> None:
        # Newcombe, Statistics in Medicine 17 (1998) 857-872, table I: 81/263 and 15/148.
        assert wilson_interval(81, 263).low == pytest.approx(0.2553, abs=5e-5)
        assert wilson_interval(81, 263).high == pytest.approx(0.3662, abs=5e-5)
        assert wilson_interval(15, 148).low == pytest.approx(0.0624, abs=5e-5)
        assert wilson_interval(15, 148).high == pytest.approx(0.1605, abs=5e-5)

    def test_at_zero_is_the_closed_form(self) -> None:
        interval = wilson_interval(0, 20)
        assert interval.low == 0
        assert interval.high == pytest.approx(Z2 / (20 + Z2))


class TestMcNemar:
    def test_published_case(self) -> None:
        # Bentur et al. (2009) in Fagerland, Lydersen, Laake, Statistics in Medicine 33 (2014)
        # 2850-2875: one against seven flips, exact conditional p = 0.070.
        assert mcnemar_exact(1, 7) == pytest.approx(2 * (1 + 8) / 2**8)

    def test_does_not_depend_on_the_direction(self) -> None:
        assert mcnemar_exact(3, 11) == pytest.approx(mcnemar_exact(11, 3))

    def test_without_flips_is_one(self) -> None:
        assert mcnemar_exact(0, 0) == 1.0


class TestTango:
    def test_published_case(self) -> None:
        # The same data, Tango's asymptotic score interval: -0.517 to -0.026.
        interval = tango_interval(flips_to_wrong=7, flips_to_right=1, n=21)
        assert interval.low == pytest.approx(-0.517, abs=5e-4)
        assert interval.high == pytest.approx(-0.026, abs=5e-4)

    @pytest.mark.parametrize("n", [1, 10, 281, 14042])
    def test_without_flips_is_the_closed_form(self, n: int) -> None:
        interval = tango_interval(0, 0, n)
        assert interval.low == pytest.approx(-Z2 / (n + Z2), rel=1e-6)
        assert interval.high == pytest.approx(Z2 / (n + Z2), rel=1e-6)

    @pytest.mark.parametrize(("wrong", "right", "n"), [(7, 1, 21), (0, 3, 40), (12, 2, 281)])
    def test_mirrors_when_the_models_are_swapped(self, wrong: int, right: int, n: int) -> None:
        one, other = tango_interval(wrong, right, n), tango_interval(right, wrong, n)
        assert one.low == pytest.approx(-other.high)
        assert one.high == pytest.approx(-other.low)

    @pytest.mark.parametrize(("wrong", "right"), [(300, 200), (700, 650)])
    def test_with_many_flips_is_the_normal_interval(self, wrong: int, right: int) -> None:
        n = 14042
        delta = (right - wrong) / n
        half = math.sqrt(Z2 * ((wrong + right) / n - delta**2) / n)
        interval = tango_interval(wrong, right, n)
        assert interval.low == pytest.approx(delta - half, abs=1e-4)
        assert interval.high == pytest.approx(delta + half, abs=1e-4)

    def test_stays_in_range_where_every_answer_flips(self) -> None:
        interval = tango_interval(5, 0, 5)
        assert interval.low == -1
        assert -1 < interval.high < 0

    @pytest.mark.parametrize(("wrong", "right", "n"), [(3, 3, 5), (-1, 0, 5), (0, 0, 0)])
    def test_impossible_counts_are_refused(self, wrong: int, right: int, n: int) -> None:
        with pytest.raises(ValueError, match="flips among"):
            tango_interval(wrong, right, n)


class TestPairedT:
    def test_closed_form(self) -> None:
        # Differences 1..5: mean 3, standard error sqrt(2.5 / 5), t(0.975, 4) = 2.776445.
        interval = t_interval([1.0, 2.0, 3.0, 4.0, 5.0])
        assert interval is not None
        half = 2.7764451051977987 * math.sqrt(0.5)
        assert interval.low == pytest.approx(3 - half)
        assert interval.high == pytest.approx(3 + half)


class TestComparison:
    def test_points_and_percent_are_different_words(self) -> None:
        comparison = compare_values(binary(70, 100), binary(69, 100))
        assert comparison.delta_points == -1.0
        assert f"{comparison.relative_percent:.1f}" == "-1.4"
        assert comparison.recovery_percent == pytest.approx(98.5714, abs=1e-4)
        assert (comparison.flips_to_wrong, comparison.flips_to_right) == (1, 0)

    def test_recovery_of_published_averages(self) -> None:
        # Red Hat's model cards of Qwen2.5-7B-Instruct, MMLU: 74.24, 73.87 (W8A8), 73.19 (W4A16).
        recovery = recovery_percent(74.24, 73.87)
        assert recovery is not None
        assert round(recovery, 2) == 99.50
        relative = relative_percent(74.24, 73.19)
        assert relative is not None
        assert round(relative, 2) == -1.41

    def test_flips_both_ways_can_hide_behind_an_equal_score(self) -> None:
        baseline = [1.0, 1.0, 0.0, 0.0] * 20
        variant = [1.0, 0.0, 1.0, 0.0] * 20
        comparison = compare_values(baseline, variant)
        assert comparison.delta_points == 0
        assert (comparison.flips_to_wrong, comparison.flips_to_right) == (20, 20)
        assert comparison.mcnemar_p == 1.0
        assert comparison.interval_points.low < -10

    def test_values_between_zero_and_one_get_the_t_interval(self) -> None:
        comparison = compare_values([0.5, 0.7, 0.9], [0.4, 0.7, 0.7])
        assert comparison.interval_method == "paired-t"
        assert comparison.delta_points == pytest.approx(-10)
        assert comparison.flips_to_wrong is None
        assert comparison.mcnemar_p is None
        interval = t_interval([-0.1, 0.0, -0.2])
        assert interval is not None
        assert comparison.interval_points.low == pytest.approx(100 * interval.low)

    def test_a_baseline_of_zero_has_no_relative_figures(self) -> None:
        comparison = compare_values(binary(0, 10), binary(1, 10))
        assert comparison.relative_percent is None
        assert comparison.recovery_percent is None

    @pytest.mark.parametrize(("baseline", "variant"), [([], []), ([1.0], [1.0, 0.0]), ([0.3], [0])])
    def test_what_cannot_be_paired_is_refused(
        self, baseline: list[float], variant: list[float]
    ) -> None:
        with pytest.raises(ValueError, match="pair"):
            compare_values(baseline, variant)


class TestVerdict:
    @pytest.mark.parametrize(
        ("low", "high", "expected"),
        [
            (-0.9, 0.3, "non-inferior"),
            (-2.0, 0.3, "inconclusive"),
            (-1.0, 0.0, "inconclusive"),
            (-3.0, -1.1, "inferior"),
            (-0.9, -0.1, "non-inferior"),
        ],
    )
    def test_comes_from_the_interval(self, low: float, high: float, expected: str) -> None:
        assert verdict(Interval(low, high)) == expected

    def test_an_equal_score_on_few_questions_proves_nothing(self) -> None:
        few = compare_values(binary(28, 40), binary(28, 40))
        many = compare_values(binary(9000, 14042), binary(9000, 14042))
        assert few.verdict() == "inconclusive"
        assert many.verdict() == "non-inferior"
        assert few.verdict(margin_points=10) == "non-inferior"


class TestSamples:
    def test_pairs_by_task_and_document_whatever_the_order(self) -> None:
        baseline = [sample("a", 1), sample("b", 0), sample("a", 0, task="other")]
        variant = [sample("a", 0, task="other"), sample("b", 1), sample("a", 1)]
        comparison = compare_samples(baseline, variant)
        assert (comparison.n, comparison.flips_to_wrong, comparison.flips_to_right) == (3, 0, 1)

    def test_a_document_that_is_there_twice_counts_twice(self) -> None:
        baseline = [sample("a", 1), sample("a", 1), sample("b", 0)]
        variant = [sample("a", 1), sample("b", 0), sample("a", 0)]
        comparison = compare_samples(baseline, variant)
        assert (comparison.n, comparison.flips_to_wrong) == (3, 1)

    def test_different_questions_are_refused(self) -> None:
        with pytest.raises(InputError) as caught:
            compare_samples([sample("a", 1), sample("b", 1)], [sample("a", 1), sample("c", 1)])
        assert "1 only in the baseline, 1 only in the variant" in str(caught.value)
        assert "mmlu_dev" in str(caught.value)

    def test_one_copy_more_is_a_different_question(self) -> None:
        with pytest.raises(InputError, match="1 only in the baseline, 0 only in the variant"):
            compare_samples([sample("a", 1), sample("a", 1)], [sample("a", 1)])

    def test_nothing_to_compare_is_refused(self) -> None:
        with pytest.raises(InputError, match="no samples"):
            compare_samples([], [])
