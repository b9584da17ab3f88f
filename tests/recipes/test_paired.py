"""The statistics of paired comparisons: against formulas and simple cases, and by simulations of known truth."""

from __future__ import annotations

import numpy as np
import pandas
import pytest
from numpy.typing import NDArray
from paired import (
    TwoLevel,
    corrected,
    detectable,
    pooled_variance,
    two_level,
    typical,
)
from scipy import stats

from hf_calib.metrics.intervals import holm

# Two-level intervals


def test_the_two_parts_of_the_variance_are_those_of_the_definition() -> None:
    rng = np.random.default_rng(0)
    values = np.array([0.3, 0.5, 0.45, 0.6])
    draws = (
        values
        + 0.03
        + rng.normal(size=(500, 1)) * 0.1
        + rng.normal(size=(500, 4)) * 0.02
    )
    found = two_level(values, draws.T)
    centred = [
        [draws[r, s] - sum(draws[:, s]) / 500 for s in range(4)] for r in range(500)
    ]
    means = [sum(row) / 4 for row in centred]
    of_mean = sum(mean**2 for mean in means) / 499
    squares = [
        sum((x - mean) ** 2 for x in row)
        for row, mean in zip(centred, means, strict=True)
    ]
    within, between = (
        sum(squares) / 3 / 500,
        sum((value - sum(values) / 4) ** 2 for value in values) / 3,
    )
    assert found.value == pytest.approx(0.4625, abs=1e-15)
    assert found.row_variance == pytest.approx(of_mean - within / 4, rel=1e-12)
    assert found.seed_variance == pytest.approx(between / 4, rel=1e-12)
    z, t = stats.norm.isf(0.025), stats.t.isf(0.025, 3)
    reach = np.sqrt(z**2 * found.row_variance + t**2 * between / 4)
    assert found.interval() == pytest.approx(
        (0.4625 - reach, 0.4625 + reach), rel=1e-12
    )
    found, test = (
        two_level(values, np.tile(values, (100, 1)).T),
        stats.ttest_1samp(values, 0),
    )
    assert found.p_value() == pytest.approx(
        test.pvalue, rel=1e-9
    )  # where the rows add nothing


def test_one_seed_and_seeds_that_agree_by_chance_have_the_interval_of_the_rows() -> (
    None
):
    draws = np.random.default_rng(1).normal(0.2, 0.05, (3, 1000))
    for n_seeds in (1, 3):
        found = two_level(np.full(n_seeds, 0.1), draws[:n_seeds])
        deviation = draws[:n_seeds].mean(axis=0).std(ddof=1)
        reach = stats.norm.isf(0.025) * deviation
        assert found.interval() == pytest.approx((0.1 - reach, 0.1 + reach))
        assert found.p_value() == pytest.approx(2 * stats.norm.sf(0.1 / deviation))


@pytest.mark.parametrize(
    "parts", [(1e-4, 3e-5, 1e-4), (0.0, 1e-4, 1e-5), (1e-4, 0.0, 2e-4)]
)
@pytest.mark.parametrize("n_seeds", [2, 10])
def test_an_interval_that_just_reaches_zero_has_p_05(
    parts: tuple[float, float, float], n_seeds: int
) -> None:
    reach = TwoLevel(0.0, *parts, n_seeds).interval()[1]
    for value in (reach, -reach):
        assert TwoLevel(value, *parts, n_seeds).p_value() == pytest.approx(
            0.05, rel=1e-9
        )


def test_no_difference_no_resamples_and_differences_that_nothing_explains() -> None:
    assert TwoLevel(0.0, 0.0, 0.0, 0.0, 3).p_value() == 1.0
    assert TwoLevel(0.0, 0.0, 0.0, 0.0, 3).interval() == (0.0, 0.0)
    assert (
        TwoLevel(-3e-8, 1e-18, 0.0, 1e-18, 1).p_value() == 1.0
    )  # where a solver stopped
    assert 0 < TwoLevel(1.0, 1e-8, 0.0, 1e-8, 1).p_value() <= 1e-12
    unknown = two_level(np.array([0.1, 0.2]), [np.ones(50), np.nan])
    assert unknown.value == pytest.approx(0.15)
    assert np.isnan([*unknown.interval(), unknown.p_value()]).all()


def test_holm_rejects_what_its_steps_reject() -> None:
    rng = np.random.default_rng(3)
    for p_values in rng.uniform(size=(50, 6)) ** 3:
        rejected = []
        for step, index in enumerate(np.argsort(p_values)):
            if p_values[index] > 0.05 / (
                6 - step
            ):  # Holm 1979: stop at the first that is not rejected
                break
            rejected.append(index)
        corrected = np.array(holm(p_values))
        assert sorted(np.flatnonzero(corrected <= 0.05)) == sorted(rejected)
        assert (corrected >= p_values).all()
        assert corrected.max() <= 1
    assert holm([]).tolist() == []


def test_the_family_is_what_was_asked_also_without_runs() -> None:
    """A comparison that has no p counts as one that is not rejected, and keeps none."""
    p_values = [0.01, np.nan, 0.02]
    assert corrected(p_values, 5).tolist() == pytest.approx(
        [0.05, np.nan, 0.08], nan_ok=True
    )
    of_all = holm([0.01, 0.02, 1.0, 1.0, 1.0])
    assert corrected(p_values, 5)[[0, 2]].tolist() == of_all[:2].tolist()
    assert corrected([], 3).tolist() == []


@pytest.mark.parametrize("n_seeds", [2, 5])
def test_intervals_hold_the_truth_whatever_varies(n_seeds: int) -> None:
    rng = np.random.default_rng(n_seeds)
    for rows, seeds, both in [
        (1, 0, 0),
        (0, 1, 0),
        (0, 0, 1),
        (1, 1, 1),
        (0.3, 1, 0),
        (0, 1, 1),
    ]:
        held = 0
        for _ in range(100):
            values = (
                rows * rng.normal()
                + seeds * rng.normal(size=n_seeds)
                + both * rng.normal(size=n_seeds)
            )
            again = rows * rng.normal(size=60) + both * rng.normal(size=(n_seeds, 60))
            low, high = two_level(values, values[:, None] + again).interval()
            held += low <= 0 <= high
        assert held / 100 > 0.95 - 3 * np.sqrt(0.05 * 0.95 / 100), (rows, seeds, both)


# The pooled variance


def by_loss(table: NDArray[np.float64]) -> pandas.DataFrame:
    """As `pooled_variance` takes it, of a table (losses, seeds)."""
    return pandas.DataFrame(table.T)


def test_it_is_twice_the_residual_mean_square_of_a_two_way_analysis_of_variance() -> (
    None
):
    table = (
        np.random.default_rng(0).normal(size=(5, 4))
        + np.arange(5)[:, None]
        + np.arange(4)
    )
    centred = (
        table - table.mean(axis=1, keepdims=True) - table.mean(axis=0) + table.mean()
    )
    assert pooled_variance(by_loss(table)) == (
        pytest.approx(2 * (centred**2).sum() / 12),
        12,
    )
    of_differences = (table[0] - table[1]).var(ddof=1)
    assert pooled_variance(by_loss(table[:2])) == (pytest.approx(of_differences), 3)


def test_missing_trainings_leave_what_is_there() -> None:
    """Data that are loss + seed exactly, whichever of them are missing."""
    values = np.add.outer([0.1, 0.5, 0.2], [1.0, 2.0, 4.0, 3.0])
    values[1, 2] = values[2, 0] = np.nan
    assert pooled_variance(by_loss(values)) == (pytest.approx(0, abs=1e-20), 4)
    values[0, 3] += 0.3
    again = pooled_variance(by_loss(values))
    assert again is not None
    assert again.variance > 0.01


@pytest.mark.parametrize(
    "values", [[[np.nan]], [[1.0]], [[1.0], [2.0]], [[1.0, np.nan], [np.nan, 2.0]]]
)
def test_too_few_trainings_have_none(values: list[list[float]]) -> None:
    assert pooled_variance(by_loss(np.array(values))) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_seeds", "log_deviation", "level"),
    [
        (3, 0.0, (0.01, 0.06)),
        (5, 0.3, (0.02, 0.07)),
        (3, 1.0, (0.10, 0.20)),
        (5, 1.0, (0.08, 0.18)),
    ],
)
def test_how_often_a_pooled_variance_calls_equal_losses_different(
    n_seeds: int, log_deviation: float, level: tuple[float, float]
) -> None:
    """Of studies of nine losses whose spreads over seeds differ by this standard deviation of their logarithms."""
    rng, found = np.random.default_rng(n_seeds), 0
    for _ in range(600):
        deviations = 0.008 * np.exp(log_deviation * rng.normal(size=(9, 1)))
        table = deviations * rng.normal(size=(9, n_seeds)) + 0.004 * rng.normal(
            size=n_seeds
        )
        pooled = pooled_variance(by_loss(table))
        assert pooled is not None
        means = (table[1:] - table[0]).mean(axis=1)
        spreads = [
            TwoLevel(mean, 0, pooled[0] / n_seeds, 0, n_seeds, pooled[1])
            for mean in means
        ]
        found += min(holm([spread.p_value() for spread in spreads])) < 0.05
    assert level[0] <= found / 600 <= level[1]


# Power


def share_found(
    size: float, of_rows: float, of_seed: float, n_seeds: int, level: float
) -> float:
    """How often simulated studies call a true difference one."""
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(150):
        values = (
            size
            + np.sqrt(of_rows) * rng.normal()
            + np.sqrt(of_seed) * rng.normal(size=n_seeds)
        )
        spread = TwoLevel(
            values.mean(), of_rows, values.var(ddof=1) / n_seeds, of_rows, n_seeds
        )
        found += spread.p_value() < level
    return found / 150


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of_rows", "of_seed", "n_seeds", "n_losses"),
    [(1e-5, 1e-4, 3, 1), (1e-5, 1e-4, 5, 4)],
)
def test_what_studies_say_that_they_find_is_found_in_four_of_five(
    of_rows: float, of_seed: float, n_seeds: int, n_losses: int
) -> None:
    rng = np.random.default_rng(0)
    found = []
    for _ in range(30):
        trainings = np.sqrt(of_seed / 2) * rng.normal(size=(1 + n_losses, n_seeds))
        own = (trainings[1:] - trainings[0]).var(axis=1, ddof=1)
        spread, known = typical(
            [TwoLevel(0.0, of_rows, v / n_seeds, of_rows, n_seeds) for v in own],
            n_losses,
        )
        size = detectable(spread, 0.05 / n_losses, known)
        found.append(share_found(size, of_rows, of_seed, n_seeds, 0.05 / n_losses))
    # A standard deviation over studies of .26.
    assert abs(np.mean(found) - 0.8) < 3 * 0.26 / np.sqrt(30)


def test_the_mean_over_losses_is_of_the_comparisons_with_the_most_seeds() -> None:
    spreads = [
        TwoLevel(0.1, r, s, 3 * r, n)
        for r, s, n in ((1.0, 2.0, 3), (3.0, 6.0, 3), (9.0, 9.0, 2))
    ]
    found, known = typical(spreads, 2)
    assert found[1:5] == (2.0, 4.0, 6.0, 3)
    assert known == pytest.approx(4 * 2 * 2 / 5)
    assert (
        typical([spread._replace(pooled_degrees=16) for spread in spreads], 2)[1] == 16
    )


def test_of_one_seed_the_rows_alone_say_what_is_found() -> None:
    size = detectable(TwoLevel(0.0, 1.0, 0.0, 1.0, 1), 0.05, 0)
    assert stats.norm.sf(1.95996 - size) + stats.norm.sf(
        1.95996 + size
    ) == pytest.approx(0.8, abs=1e-4)
    assert detectable(TwoLevel(0.0, 0.0, 0.0, 0.0, 3), 0.05, 2) == 0.0
