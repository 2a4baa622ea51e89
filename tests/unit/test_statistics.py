"""The statistics against closed forms and published cases."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from qkit.errors import InputError
from qkit.evaluate.intervals import (
    effective_wilson_interval,
    stratified_stderr,
    t_interval,
    tang_ratio_interval,
)
from qkit.evaluate.statistics import (
    Interval,
    compare_averages,
    compare_perplexities,
    compare_samples,
    compare_scores,
    compare_values,
    holm,
    mcnemar_exact,
    mean_stderr,
    questions_to_settle,
    recovery_percent,
    relative_percent,
    tango_interval,
    verdict,
    wilson_interval,
)
from qkit.measurements import Sample, TaskScore

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


@dataclass(frozen=True)
class Card:
    """What a model card publishes: scores and recoveries of six tasks, and the average score."""

    scores: tuple[float, ...]
    recoveries: tuple[float, ...]
    average: float


#: Red Hat's cards of Qwen2.5-7B-Instruct (OpenLLM v1, lm-eval 387bbd5 in vLLM): MMLU, ARC-C, GSM8K,
#: HellaSwag, Winogrande, TruthfulQA mc2.
RED_HAT_BF16 = (74.24, 63.40, 80.36, 81.52, 74.66, 64.76)
RED_HAT_CARDS = {
    "w8a8": Card(
        (73.87, 63.23, 80.74, 81.06, 74.82, 64.58), (99.5, 99.7, 100.5, 99.4, 100.2, 99.7), 73.05
    ),
    "w4a16": Card(
        (73.19, 63.23, 80.59, 80.65, 74.19, 64.27), (98.6, 99.7, 100.3, 98.9, 99.4, 99.3), 72.69
    ),
}


def published(task: str, percent: float) -> list[Sample]:
    """Return right and wrong answers to 10,000 questions with this score."""
    right = round(100 * percent)
    return [sample(str(n), float(n < right), task) for n in range(10_000)]


class TestComparison:
    def test_points_and_percent_are_different_words(self) -> None:
        comparison = compare_values(binary(70, 100), binary(69, 100))
        assert comparison.delta_points == -1.0
        assert f"{comparison.relative_percent:.1f}" == "-1.4"
        assert comparison.recovery_percent == pytest.approx(98.5714, abs=1e-4)
        assert (comparison.flips_to_wrong, comparison.flips_to_right) == (1, 0)

    def test_recovery_of_published_scores(self) -> None:
        for name, card in RED_HAT_CARDS.items():
            for bf16, variant, recovery in zip(
                RED_HAT_BF16, card.scores, card.recoveries, strict=True
            ):
                found = recovery_percent(bf16, variant)
                assert found is not None
                # A step of the last digit: the cards divided scores with more digits.
                assert found == pytest.approx(recovery, abs=0.1), name
        relative = relative_percent(74.24, 73.19)
        assert relative is not None
        assert round(relative, 2) == -1.41

    @pytest.mark.parametrize(("name", "recovery"), [("w8a8", 99.85), ("w4a16", 99.36)])
    def test_recovery_of_published_averages(self, name: str, recovery: float) -> None:
        # The cards print 99.4 % and 98.6 % for the averages, which their own scores do not give.
        card = RED_HAT_CARDS[name]
        found = compare_averages(
            [
                (published(task, bf16), published(task, score), None)
                for task, bf16, score in zip("abcdef", RED_HAT_BF16, card.scores, strict=True)
            ]
        )
        assert found.recovery_percent is not None
        assert round(found.recovery_percent, 2) == recovery
        assert round(100 * found.baseline, 2) == 73.16
        assert round(100 * found.variant, 2) == card.average

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


class TestHolm:
    def test_textbook_case(self) -> None:
        # The worked example of "Holm-Bonferroni method", Wikipedia: 0.01, 0.04, 0.03, 0.005.
        assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])

    def test_of_one_or_none_changes_nothing(self) -> None:
        assert holm([0.2]) == [0.2]
        assert holm([]) == []

    def test_never_exceeds_one(self) -> None:
        assert holm([0.6, 0.9]) == [1.0, 1.0]


class TestRecoveryInterval:
    @pytest.mark.parametrize(
        ("both", "wrong", "right", "n"), [(1, 7, 1, 21), (800, 31, 22, 1140), (40, 0, 5, 60)]
    )
    def test_ends_are_where_the_constrained_likelihood_puts_them(
        self, both: int, wrong: int, right: int, n: int
    ) -> None:
        """The statistic at either end is 1.96 with the maximum found numerically, not solved."""
        from scipy import optimize

        interval = tang_ratio_interval(both, wrong, right, n)
        assert interval is not None
        for ratio in (interval.low, interval.high):
            share = (both + wrong + right) / n

            def loss(q: float, ratio: float = ratio, share: float = share) -> float:
                p_both = (share - (1 + ratio) * q) / ratio
                p_right = ((ratio - 1) * share + q) / ratio
                terms = ((both, p_both), (right, p_right), (wrong, q))
                return -sum(k * math.log(max(p, 1e-300)) for k, p in terms if k)

            ends = max(0.0, (1 - ratio) * share) + 1e-12, share / (1 + ratio) - 1e-12
            q = optimize.minimize_scalar(
                loss, bounds=ends, method="bounded", options={"xatol": 1e-12}
            ).x
            variance = n * (1 + ratio) * q + (both + wrong + right) * (ratio - 1)
            z = ((both + right) - (both + wrong) * ratio) / math.sqrt(variance)
            assert abs(z) == pytest.approx(math.sqrt(Z2), rel=1e-3)

    def test_without_flips_is_the_closed_form(self) -> None:
        interval = tang_ratio_interval(700, 0, 0, 1000)
        assert interval is not None
        assert interval.low == pytest.approx(700 / (700 + Z2))
        assert interval.high == pytest.approx((700 + Z2) / 700)

    def test_of_values_is_near_the_score_interval(self) -> None:
        values = compare_values([*binary(846, 1139), 0.001], [*binary(837, 1139), 0.001])
        shares = compare_values(binary(846, 1140), binary(837, 1140))
        assert values.interval_method == "paired-t"
        assert values.recovery_interval is not None
        assert shares.recovery_interval is not None
        assert values.recovery_interval.low == pytest.approx(shares.recovery_interval.low, abs=0.5)

    def test_an_average_of_published_scores(self) -> None:
        # Neural Magic's card of Qwen2-72B-Instruct-FP8 (OpenLLM v1, lm-eval): ARC-C, HellaSwag,
        # MMLU, TruthfulQA, Winogrande, GSM8K; its own averages are 79.97 and 80.34, its recovery
        # 100.46 %.
        bf16 = [71.58, 86.94, 83.97, 66.98, 82.79, 87.56]
        fp8 = [72.09, 86.83, 84.06, 66.95, 83.18, 88.93]
        comparison = compare_values([s / 100 for s in bf16], [s / 100 for s in fp8])
        assert round(100 * comparison.baseline, 2) == 79.97
        assert round(100 * comparison.variant, 2) == 80.34
        assert comparison.recovery_percent == pytest.approx(100.46, abs=0.005)


class TestQuestionsToSettle:
    def test_closed_form(self) -> None:
        # (1.959964 + 0.841621)^2 * 0.05 / 0.01^2 for no difference, 5 % of answers flipped.
        assert questions_to_settle(0.0, 0.05) == math.ceil(7.848879734 * 0.05 / 0.01**2)

    def test_a_difference_on_the_margin_is_never_settled(self) -> None:
        assert questions_to_settle(-1.0, 0.05) is None

    def test_without_flips_it_is_what_the_interval_needs(self) -> None:
        n = questions_to_settle(0.0, 0.0)
        assert n is not None
        assert 100 * tango_interval(0, 0, n).low >= -1.0 - 1e-9
        assert 100 * tango_interval(0, 0, n - 5).low < -1.0

    def test_so_many_questions_do_settle_it(self) -> None:
        few = compare_values(binary(700, 1000), binary(697, 1000))
        assert few.verdict() == "non-inferior"
        flips = compare_values([1.0, 0.0] * 500, [0.0, 1.0] * 40 + [1.0, 0.0] * 460)
        assert flips.verdict() == "inconclusive"
        needed = flips.questions_to_settle()
        assert needed is not None
        assert needed > 1000
        wide = round(0.04 * needed)
        assert 100 * tango_interval(wide, wide, needed).low > -1.0

    def test_a_settled_verdict_needs_none(self) -> None:
        assert compare_values(binary(900, 1000), binary(700, 1000)).questions_to_settle() is None


class TestGroups:
    def test_a_stratified_group_is_known_better_than_its_questions_alone(self) -> None:
        strata = {"easy": binary(95, 100), "hard": binary(30, 100)}
        error = stratified_stderr(strata, {"easy": 0.5, "hard": 0.5})
        assert error is not None
        own = [mean_stderr(values) or 0 for values in strata.values()]
        assert error == pytest.approx(math.hypot(0.5 * own[0], 0.5 * own[1]))
        interval = effective_wilson_interval(0.625, error, 200)
        plain = wilson_interval(125, 200)
        assert interval.high - interval.low < plain.high - plain.low

    def test_the_effective_number_of_a_plain_sample_is_its_own(self) -> None:
        n, p = 500, 0.7
        error = math.sqrt(p * (1 - p) / n)
        one, other = effective_wilson_interval(p, error, n), wilson_interval(350, n)
        assert one.low == pytest.approx(other.low)
        assert one.high == pytest.approx(other.high)

    def test_tasks_can_weigh_the_same_whatever_their_size(self) -> None:
        baseline = [sample(f"a{i}", 1, "a") for i in range(10)]
        baseline += [sample(f"b{i}", 1, "b") for i in range(90)]
        variant = [sample(f"a{i}", float(i > 4), "a") for i in range(10)]
        variant += [sample(f"b{i}", 1, "b") for i in range(90)]
        alike = compare_samples(baseline, variant)
        weighted = compare_samples(baseline, variant, weights={"a": 0.5, "b": 0.5})
        assert (alike.delta_points, weighted.delta_points) == (-5.0, -25.0)
        assert weighted.interval_method == "paired-stratified"


class TestAverages:
    def test_interval_is_that_of_separate_samples(self) -> None:
        # Two suites with 10 and 40 net losses: standard errors as for paired binary differences.
        sizes, losses, gains = (500, 2000), (30, 90), (20, 50)
        suites = []
        for task, n, lost, gained in zip("ab", sizes, losses, gains, strict=True):
            before = binary(n // 2, n)
            after = binary(n // 2 - lost, n // 2) + binary(gained, n // 2)
            suites.append(
                (
                    [sample(str(i), value, task) for i, value in enumerate(before)],
                    [sample(str(i), value, task) for i, value in enumerate(after)],
                    None,
                )
            )
        found = compare_averages(suites)
        assert found.delta_points == pytest.approx(-100 * (10 / 500 + 40 / 2000) / 2)
        assert found.interval_method == "paired-stratified"
        variance = math.fsum(
            ((lost + gained) / n - ((lost - gained) / n) ** 2) / (n - 1)
            for n, lost, gained in zip(sizes, losses, gains, strict=True)
        )
        half = 100 * math.sqrt(Z2 * variance) / 2
        assert found.interval_points.high - found.interval_points.low == pytest.approx(2 * half)
        assert found.recovery_interval is not None
        assert found.recovery_interval.low < 96 < found.recovery_interval.high

    def test_suites_weigh_alike_whatever_their_size(self) -> None:
        small = [sample(str(i), value, "small") for i, value in enumerate(binary(5, 10))]
        worse = [sample(str(i), value, "small") for i, value in enumerate(binary(4, 10))]
        large = [sample(str(i), value, "large") for i, value in enumerate(binary(600, 1000))]
        found = compare_averages([(small, worse, None), (large, large, None)])
        assert found.baseline == pytest.approx(0.55)
        assert found.variant == pytest.approx(0.50)

    def test_the_weights_of_a_suites_tasks_count(self) -> None:
        def group(right: int) -> list[Sample]:
            few = [sample(str(i), value, "few") for i, value in enumerate(binary(right, 10))]
            many = [sample(str(i), value, "many") for i, value in enumerate(binary(50, 100))]
            return [*few, *many]

        other = [sample(str(i), value, "other") for i, value in enumerate(binary(30, 40))]
        halves = {"few": 0.5, "many": 0.5}
        found = compare_averages([(group(10), group(8), halves), (other, other, None)])
        assert found.delta_points == pytest.approx(-5)  # 20 points in half of one of two suites

    def test_other_questions_are_refused(self) -> None:
        one, two = [sample("1", 1.0), sample("2", 0.0)], [sample("1", 1.0), sample("3", 0.0)]
        with pytest.raises(InputError, match="different questions"):
            compare_averages([(one, two, None), (one, one, None)])


class TestOtherComparisons:
    def test_perplexities_are_weighed_by_words(self) -> None:
        before = [
            Sample(task="t", doc_hash=str(i), value=8.0, weight=w) for i, w in enumerate((3, 1))
        ]
        after = [
            s.model_copy(update={"value": v}) for s, v in zip(before, (8.0, 16.0), strict=True)
        ]
        found = compare_perplexities(before, after)
        assert found.ratio == pytest.approx(2 ** (1 / 4))
        assert found.interval is not None
        assert (found.interval.low, found.interval.high) == pytest.approx((1.0, 2.0))

    def test_scores_without_samples_are_compared_as_two_surveys(self) -> None:
        def score(value: float) -> TaskScore:
            return TaskScore(task="t", alias="t", metric="acc", value=value, stderr=0.01, n=2000)

        found = compare_scores(score(0.70), score(0.69))
        assert found is not None
        assert not found.paired
        half = 100 * math.sqrt(Z2) * math.hypot(0.01, 0.01)
        assert found.interval_points.low == pytest.approx(-1.0 - half)
        assert (found.mcnemar_p, found.flips_to_wrong) == (None, None)
