"""The statistics of a study: against formulas and simple cases, and by simulated studies of known truth."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pandas
import pytest
from numpy.typing import NDArray
from scipy import stats
from scipy.special import softmax

from hf_calib.metrics.intervals import METRICS, holm, resampled_metrics
from hf_calib.metrics.sums import top_label
from hf_calib.study.measured import STUDY_METRICS
from hf_calib.study.results import NUMBERS
from hf_calib.study.statistics import (
    TwoLevel,
    detectable,
    pooled_variance,
    two_level,
    typical,
    unbiased_error,
)
from tests.helpers.studies import Task
from tests.helpers.study_results import study_results

# Two-level intervals


def test_the_two_parts_of_the_variance_are_those_of_the_definition() -> None:
    rng = np.random.default_rng(0)
    values = np.array([0.3, 0.5, 0.45, 0.6])
    draws = values + 0.03 + rng.normal(size=(500, 1)) * 0.1 + rng.normal(size=(500, 4)) * 0.02
    found = two_level(values, draws.T)
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
    found, test = two_level(values, np.tile(values, (100, 1)).T), stats.ttest_1samp(values, 0)
    assert found.p_value() == pytest.approx(test.pvalue, rel=1e-9)
    assert found.interval() == pytest.approx(tuple(test.confidence_interval()), rel=1e-9)


def test_with_one_seed_it_is_the_normal_interval_of_the_rows() -> None:
    draws = np.random.default_rng(1).normal(0.2, 0.05, (1000, 1))
    found = two_level(np.array([0.1]), draws.T)
    reach = stats.norm.isf(0.025) * draws.std(ddof=1)
    assert found.interval() == pytest.approx((0.1 - reach, 0.1 + reach))
    assert found.p_value() == pytest.approx(2 * stats.norm.sf(0.1 / draws.std(ddof=1)))


def test_seeds_that_agree_by_chance_leave_the_interval_of_the_rows() -> None:
    draws = 0.1 + 0.01 * np.random.default_rng(2).normal(size=(2000, 3))
    reach = stats.norm.isf(0.025) * draws.mean(axis=1).std(ddof=1)
    found = two_level(np.full(3, 0.1), draws.T)
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
    assert holm([]).tolist() == []


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
            low, high = two_level(values, (values + again).T).interval()
            held += low <= 0 <= high
        assert held / n_studies > 0.95 - 3 * np.sqrt(0.05 * 0.95 / n_studies), (of_rows, of_seeds, of_both)


METRICS_SIMULATED = {"nll": {}, "accuracy": {}, "ece": {"n_bins": 15}}


def simulated_study(seed: int, n_seeds: int, other: dict[str, float]) -> pandas.DataFrame:
    """The numbers of two losses on new rows, alike but for what `other` says of the second one."""
    task = Task(1000, 0, 4, seed=10_000 + seed)
    asked = [(STUDY_METRICS[key].metric, options) for key, options in METRICS_SIMULATED.items()]
    numbers = []
    for loss, training in product(("cross_entropy", "other"), range(n_seeds)):
        own_seed = 1000 * seed + 100 * (loss == "other") + training
        test = task.train(own_seed, **(other if loss == "other" else {})).test
        probs = softmax(test.logits.astype(np.float64), axis=1)
        draws = resampled_metrics(asked, probs, test.labels, n_resamples=100, seed=0)
        error = unbiased_error(top_label(probs, test.labels), "uniform", n_bins=15, n_resamples=100, seed=0)
        for key, (name, options), drawn in zip(METRICS_SIMULATED, asked, draws, strict=True):
            number = METRICS[name].function(probs, test.labels, **options), drawn
            compared = error if key == "ece" else number
            numbers.append((loss, training, "none", key, *number, *compared))
    return pandas.DataFrame(numbers, columns=NUMBERS)


def called_different(
    n_studies: int, n_seeds: tuple[int, ...], **other: float
) -> dict[tuple[int, str], float]:
    """The share of simulated studies whose two losses differ with p below .05, by seeds and metric."""
    called = dict.fromkeys(product(n_seeds, METRICS_SIMULATED), 0)
    for study in range(n_studies):
        numbers = simulated_study(study, max(n_seeds), other)
        for n in n_seeds:
            study = study_results(("cross_entropy", "other"), range(n), ("none",))
            found = replace(study, numbers=numbers[numbers["seed"] < n]).differences
            for key in METRICS_SIMULATED:
                called[n, key] += found["p_corrected"]["other", "none", key] < 0.05
    return {key: count / n_studies for key, count in called.items()}


def test_two_identical_losses_are_rarely_called_different() -> None:
    # More than 3 false alarms in 12 studies would be a rate above 5% (p < .01).
    assert max(called_different(12, (3,)).values()) <= 3 / 12


@pytest.mark.deep
def test_two_identical_losses_are_called_different_in_at_most_5_percent_of_500_studies() -> None:
    rates = called_different(500, (3, 5))
    assert max(rates.values()) <= 0.05, rates


@pytest.mark.deep
def test_a_real_difference_is_found_often() -> None:
    # More noise in each row's logits: 0.20 nats, 3.9 points of accuracy, 0.055 of ECE. Three seeds find the NLL in 72%,
    # the ECE and the accuracy in 63% of the studies; five seeds in 100%, 95% and 92%.
    rates = called_different(60, (3, 5), row_noise=1.0)
    assert rates[3, "nll"] >= 0.6, rates
    assert min(rates[5, metric] for metric in METRICS_SIMULATED) >= 0.8, rates


# The pooled variance


def by_loss(table: NDArray[np.float64]) -> pandas.DataFrame:
    """As `pooled_variance` takes it, of a table (losses, seeds)."""
    return pandas.DataFrame(table.T)


def test_it_is_twice_the_residual_mean_square_of_a_two_way_analysis_of_variance() -> None:
    table = np.random.default_rng(0).normal(size=(5, 4)) + np.arange(5)[:, None] + np.arange(4)
    centred = table - table.mean(axis=1, keepdims=True) - table.mean(axis=0) + table.mean()
    found = pooled_variance(by_loss(table))
    assert found is not None
    assert found.degrees == 12
    assert found.variance == pytest.approx(2 * (centred**2).sum() / 12)
    two = pooled_variance(by_loss(table[:2]))  # that of their differences
    assert two == (pytest.approx((table[0] - table[1]).var(ddof=1)), 3)


def test_missing_trainings_leave_what_is_there() -> None:
    """Data that are loss + seed exactly, whichever of them are missing."""
    values = np.add.outer([0.1, 0.5, 0.2], [1.0, 2.0, 4.0, 3.0])
    values[1, 2] = values[2, 0] = np.nan
    found = pooled_variance(by_loss(values))
    assert found is not None
    assert (found.variance, found.degrees) == (pytest.approx(0, abs=1e-20), 4)
    values[0, 3] += 0.3
    again = pooled_variance(by_loss(values))
    assert again is not None
    assert again.variance > 0.01


@pytest.mark.parametrize("values", [[[np.nan]], [[1.0]], [[1.0], [2.0]], [[1.0, np.nan], [np.nan, 2.0]]])
def test_too_few_trainings_have_none(values: list[list[float]]) -> None:
    assert pooled_variance(by_loss(np.array(values))) is None


def called(table: NDArray[np.float64]) -> tuple[list[float], list[float]]:
    """Corrected p-values of the differences to the first loss, by each pair's own variance and by the pooled one."""
    n_seeds = table.shape[1]
    pooled = pooled_variance(by_loss(table))
    assert pooled is not None
    differences = table[1:] - table[0]
    own = [TwoLevel(d.mean(), 0, d.var(ddof=1) / n_seeds, 0, n_seeds).p_value() for d in differences]
    both = [
        TwoLevel(d.mean(), 0, pooled.variance / n_seeds, 0, n_seeds, pooled.degrees).p_value()
        for d in differences
    ]
    return holm(own).tolist(), holm(both).tolist()


def simulated(
    n_studies: int, n_seeds: int, *, log_deviation: float = 0.0, difference: float = 0.0
) -> tuple[float, float]:
    """Of studies of 9 losses: how often a loss is called different by either variance."""
    rng = np.random.default_rng(n_seeds)
    counts = np.zeros(2)
    for _ in range(n_studies):
        deviations = 0.008 * np.exp(log_deviation * rng.normal(size=(9, 1)))
        table = deviations * rng.normal(size=(9, n_seeds)) + 0.004 * rng.normal(size=n_seeds)
        table[1] += difference
        own, both = called(table)
        first = slice(0, 1) if difference else slice(None)
        counts += [min(own[first]) < 0.05, min(both[first]) < 0.05]
    return tuple(counts / n_studies)  # type: ignore[return-value]


@pytest.mark.slow
def test_it_finds_what_three_seeds_of_a_pair_do_not() -> None:
    own, pooled = simulated(60, 3, difference=0.02)
    assert own < 0.2
    assert pooled > 0.3


@pytest.mark.deep
@pytest.mark.parametrize(
    ("n_seeds", "log_deviation", "level"),
    [
        (3, 0.0, (0.01, 0.06)),
        (5, 0.0, (0.02, 0.06)),
        (3, 0.3, (0.02, 0.07)),
        (5, 0.3, (0.02, 0.07)),
        (3, 1.0, (0.10, 0.20)),
        (5, 1.0, (0.08, 0.18)),
    ],
)
def test_how_often_equal_losses_are_called_different(
    n_seeds: int, log_deviation: float, level: tuple[float, float]
) -> None:
    own, pooled = simulated(600, n_seeds, log_deviation=log_deviation)
    assert own <= 0.07
    assert level[0] <= pooled <= level[1]


# Power

PARTS = [(0.0, 1e-4, 3, 1), (1e-5, 1e-4, 3, 8), (1e-5, 1e-4, 5, 4), (1e-4, 3e-5, 10, 1)]


def share_found(size: float, of_rows: float, of_seed: float, n_seeds: int, level: float) -> float:
    """How often simulated studies call a true difference one."""
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(150):
        values = size + np.sqrt(of_rows) * rng.normal() + np.sqrt(of_seed) * rng.normal(size=n_seeds)
        spread = TwoLevel(values.mean(), of_rows, values.var(ddof=1) / n_seeds, of_rows, n_seeds)
        found += spread.p_value() < level
    return found / 150


def said_to_be_found(
    n_studies: int, of_rows: float, of_seed: float, n_seeds: int, n_losses: int
) -> NDArray[np.float64]:
    """The differences that studies say they find, by their own variances."""
    rng = np.random.default_rng(0)
    said = []
    for _ in range(n_studies):
        trainings = np.sqrt(of_seed / 2) * rng.normal(size=(1 + n_losses, n_seeds))
        own = (trainings[1:] - trainings[0]).var(axis=1, ddof=1)
        spreads = [TwoLevel(0.0, of_rows, each / n_seeds, of_rows, n_seeds) for each in own]
        spread, known = typical(spreads, n_losses)
        said.append(detectable(spread, 0.05 / n_losses, known))
    return np.array(said)


@pytest.mark.slow
def test_what_studies_say_that_they_find_is_found_in_four_of_five() -> None:
    sizes = said_to_be_found(30, 1e-5, 1e-4, 3, 1)
    found = np.mean([share_found(size, 1e-5, 1e-4, 3, 0.05) for size in sizes])
    # A standard deviation over studies of .26, over sqrt(30).
    assert abs(found - 0.8) < 3 * 0.26 / np.sqrt(30)


@pytest.mark.deep
@pytest.mark.parametrize(("of_rows", "of_seed", "n_seeds", "n_losses"), PARTS)
def test_what_many_studies_say_that_they_find(
    of_rows: float, of_seed: float, n_seeds: int, n_losses: int
) -> None:
    sizes = said_to_be_found(300, of_rows, of_seed, n_seeds, n_losses)
    found = np.mean([share_found(size, of_rows, of_seed, n_seeds, 0.05 / n_losses) for size in sizes])
    assert abs(found - 0.8) < 3 * 0.26 / np.sqrt(300) + 0.02


def test_the_mean_over_losses_is_of_the_comparisons_with_the_most_seeds() -> None:
    spreads = [TwoLevel(0.1, r, s, 3 * r, n) for r, s, n in ((1.0, 2.0, 3), (3.0, 6.0, 3), (9.0, 9.0, 2))]
    found, known = typical(spreads, 2)
    assert found[1:5] == (2.0, 4.0, 6.0, 3)
    assert known == pytest.approx(4 * 2 * 2 / 5)
    pooled = [spread._replace(pooled_degrees=16) for spread in spreads]
    assert typical(pooled, 2)[1] == 16


def test_of_one_seed_the_rows_alone_say_what_is_found() -> None:
    size = detectable(TwoLevel(0.0, 1.0, 0.0, 1.0, 1), 0.05, 0)
    assert stats.norm.sf(1.95996 - size) + stats.norm.sf(1.95996 + size) == pytest.approx(0.8, abs=1e-4)
    assert detectable(TwoLevel(0.0, 0.0, 0.0, 0.0, 3), 0.05, 2) == 0.0
