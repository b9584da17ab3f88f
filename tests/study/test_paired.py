"""Two-level intervals: against formulas and simple cases, and by simulated studies of known truth."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from scipy import stats
from scipy.special import softmax

from hf_calib.metrics.intervals import METRICS, resampled_metrics
from hf_calib.metrics.sums import top_label
from hf_calib.study.kinds import STUDY_METRICS
from hf_calib.study.measured import Numbers, differences_to
from hf_calib.study.paired import TwoLevel, holm, two_level
from hf_calib.study.unbiased import unbiased_error
from tests.helpers.studies import Task


def test_the_two_parts_of_the_variance_are_those_of_the_definition() -> None:
    rng = np.random.default_rng(0)
    values = np.array([0.3, 0.5, 0.45, 0.6])
    draws = values + 0.03 + rng.normal(size=(500, 1)) * 0.1 + rng.normal(size=(500, 4)) * 0.02
    found = two_level(values, draws)
    centred = [[draws[r, s] - sum(draws[:, s]) / 500 for s in range(4)] for r in range(500)]
    means = [sum(row) / 4 for row in centred]
    of_mean = sum(mean**2 for mean in means) / 499
    within = (
        sum(sum((x - mean) ** 2 for x in row) / 3 for row, mean in zip(centred, means, strict=True)) / 500
    )
    between = sum((value - sum(values) / 4) ** 2 for value in values) / 3
    assert found.value == pytest.approx(0.4625, abs=1e-15)
    assert found.row_variance == pytest.approx(of_mean - within / 4, rel=1e-12)
    assert found.seed_variance == pytest.approx(between / 4, rel=1e-12)
    reach = np.sqrt(
        stats.norm.isf(0.025) ** 2 * found.row_variance + stats.t.isf(0.025, 3) ** 2 * between / 4
    )
    assert found.interval() == pytest.approx((0.4625 - reach, 0.4625 + reach), rel=1e-12)


def test_where_the_rows_add_nothing_it_is_the_t_test() -> None:
    values = np.array([0.021, 0.035, 0.017])
    found = two_level(values, np.tile(values, (100, 1)))
    test = stats.ttest_1samp(values, 0)
    assert found.p_value() == pytest.approx(test.pvalue, rel=1e-9)
    assert found.interval() == pytest.approx(tuple(test.confidence_interval()), rel=1e-9)


def test_with_one_seed_it_is_the_normal_interval_of_the_rows() -> None:
    draws = np.random.default_rng(1).normal(0.2, 0.05, (1000, 1))
    found = two_level(np.array([0.1]), draws)
    reach = stats.norm.isf(0.025) * draws.std(ddof=1)
    assert found.interval() == pytest.approx((0.1 - reach, 0.1 + reach))
    assert found.p_value() == pytest.approx(2 * stats.norm.sf(0.1 / draws.std(ddof=1)))


def test_seeds_that_agree_by_chance_leave_the_interval_of_the_rows() -> None:
    draws = 0.1 + 0.01 * np.random.default_rng(2).normal(size=(2000, 3))
    reach = stats.norm.isf(0.025) * draws.mean(axis=1).std(ddof=1)
    found = two_level(np.full(3, 0.1), draws)
    assert found.interval() == pytest.approx((0.1 - reach, 0.1 + reach))
    assert found.p_value() <= 1e-12


@pytest.mark.parametrize(
    "parts", [(1e-4, 3e-5, 1e-4), (0.0, 1e-4, 1e-5), (1e-4, 0.0, 2e-4), (1e-6, 1e-2, 1e-5)]
)
@pytest.mark.parametrize("n_seeds", [2, 3, 10])
def test_an_interval_that_just_reaches_zero_has_p_05(parts: tuple[float, float, float], n_seeds: int) -> None:
    reach = TwoLevel(0.0, *parts, n_seeds).interval()[1]
    assert TwoLevel(reach, *parts, n_seeds).p_value() == pytest.approx(0.05, rel=1e-9)
    assert TwoLevel(-reach, *parts, n_seeds).p_value() == pytest.approx(0.05, rel=1e-9)


def test_no_difference_and_differences_that_nothing_explains() -> None:
    assert TwoLevel(0.0, 0.0, 0.0, 0.0, 3).p_value() == 1.0
    assert TwoLevel(0.0, 0.0, 0.0, 0.0, 3).interval() == (0.0, 0.0)
    assert TwoLevel(-3e-8, 1e-18, 0.0, 1e-18, 1).p_value() == 1.0  # where a solver stopped
    assert 0 < TwoLevel(1.0, 1e-8, 0.0, 1e-8, 1).p_value() <= 1e-12


def test_holm_rejects_what_its_steps_reject() -> None:
    rng = np.random.default_rng(3)
    for p_values in rng.uniform(size=(200, 6)) ** 3:
        rejected = []
        for step, index in enumerate(
            np.argsort(p_values)
        ):  # Holm 1979: stop at the first that is not rejected
            if p_values[index] > 0.05 / (6 - step):
                break
            rejected.append(index)
        corrected = np.array(holm(p_values))
        assert sorted(np.flatnonzero(corrected <= 0.05)) == sorted(rejected)
        assert (corrected >= p_values).all()
        assert corrected.max() <= 1
    assert holm([]) == []


@pytest.mark.parametrize("n_seeds", [2, 3, 5])
def test_intervals_hold_the_truth_whatever_varies(n_seeds: int) -> None:
    rng = np.random.default_rng(n_seeds)
    n_studies = 100
    for of_rows, of_seeds, of_both in [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1), (0.3, 1, 0), (0, 1, 1)]:
        held = 0
        for _ in range(n_studies):
            values = (
                of_rows * rng.normal()
                + of_seeds * rng.normal(size=n_seeds)
                + of_both * rng.normal(size=n_seeds)
            )
            again = of_rows * rng.normal(size=(60, 1)) + of_both * rng.normal(size=(60, n_seeds))
            low, high = two_level(values, values + again).interval()
            held += low <= 0 <= high
        assert held / n_studies > 0.95 - 3 * np.sqrt(0.05 * 0.95 / n_studies), (of_rows, of_seeds, of_both)


METRICS_SIMULATED = {"nll": {}, "accuracy": {}, "ece": {"n_bins": 15}}


def simulated_study(seed: int, n_seeds: int, other: dict[str, float]) -> Numbers:
    """Two losses on new rows, alike but for what `other` says of the second one."""
    task = Task(1000, 0, 4, seed=10_000 + seed)
    numbers = Numbers(("cross_entropy", "other"), tuple(range(n_seeds)), ("none",), {}, {}, {})
    asked = [(STUDY_METRICS[key].metric, options) for key, options in METRICS_SIMULATED.items()]
    for loss, training in product(numbers.losses, numbers.seeds):
        own_seed = 1000 * seed + 100 * (loss == "other") + training
        test = task.train(own_seed, **(other if loss == "other" else {})).test
        probs = softmax(test.logits.astype(np.float64), axis=1)
        draws = resampled_metrics(asked, probs, test.labels, n_resamples=100, seed=0)
        for key, (name, options), drawn in zip(METRICS_SIMULATED, asked, draws, strict=True):
            numbers.values[loss, training, "none", key] = METRICS[name].function(
                probs, test.labels, **options
            )
            numbers.draws[loss, training, "none", key] = drawn
        numbers.unbiased[loss, training, "none", "ece"] = unbiased_error(
            top_label(probs, test.labels), n_bins=15, n_resamples=100, seed=0
        )
    return numbers


def called_different(
    n_studies: int, n_seeds: tuple[int, ...], **other: float
) -> dict[tuple[int, str], float]:
    """The share of simulated studies whose two losses differ with p below .05, by seeds and metric."""
    called = dict.fromkeys(product(n_seeds, METRICS_SIMULATED), 0)
    for study in range(n_studies):
        numbers = simulated_study(study, max(n_seeds), other)
        for n in n_seeds:
            found = differences_to(numbers._replace(seeds=tuple(range(n))), ("cross_entropy", "none"))
            for key in METRICS_SIMULATED:
                p = found["other", "none", key].p_corrected
                assert p is not None
                called[n, key] += p < 0.05
    return {key: count / n_studies for key, count in called.items()}


def test_two_identical_losses_are_rarely_called_different() -> None:
    # More than 3 false alarms in 12 studies would be a rate above 5% (p < .01).
    assert max(called_different(12, (3,)).values()) <= 3 / 12


@pytest.mark.deep
def test_two_identical_losses_are_called_different_in_at_most_5_percent_of_500_studies() -> None:
    rates = called_different(500, (3, 5))
    assert max(rates.values()) <= 0.05, rates


@pytest.mark.slow
def test_a_real_difference_is_found() -> None:
    # Three seeds find the NLL in 72% of studies: fewer than 2 of 6 would be a rate below that (p < .01).
    assert called_different(6, (3,), row_noise=1.0)[3, "nll"] >= 2 / 6


@pytest.mark.deep
def test_a_real_difference_is_found_often() -> None:
    # More noise in each row's logits: 0.20 nats, 3.9 points of accuracy, 0.055 of ECE. Three seeds find the NLL in 72%,
    # the ECE and the accuracy in 63% of the studies; five seeds in 100%, 95% and 92%.
    rates = called_different(60, (3, 5), row_noise=1.0)
    assert rates[3, "nll"] >= 0.6, rates
    assert min(rates[5, metric] for metric in METRICS_SIMULATED) >= 0.8, rates
