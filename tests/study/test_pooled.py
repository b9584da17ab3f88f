"""The pooled variance: against an analysis of variance by hand, and its level and power in simulated studies."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from hf_calib.study.paired import TwoLevel, holm
from hf_calib.study.pooled import pooled_variance

Values = dict[str, dict[int, float]]


def as_values(table: NDArray[np.float64]) -> Values:
    return {f"loss {i}": dict(enumerate(row.tolist())) for i, row in enumerate(table)}


def test_it_is_twice_the_residual_mean_square_of_a_two_way_analysis_of_variance() -> None:
    table = np.random.default_rng(0).normal(size=(5, 4)) + np.arange(5)[:, None] + np.arange(4)
    centred = table - table.mean(axis=1, keepdims=True) - table.mean(axis=0) + table.mean()
    found = pooled_variance(as_values(table))
    assert found is not None
    assert found.degrees == 12
    assert found.variance == pytest.approx(2 * (centred**2).sum() / 12)
    assert found.p_equal == pytest.approx(stats.bartlett(*centred).pvalue)


def test_of_two_losses_it_is_the_variance_of_their_differences() -> None:
    table = np.random.default_rng(1).normal(size=(2, 6))
    found = pooled_variance(as_values(table))
    assert found is not None
    assert (found.variance, found.degrees) == (pytest.approx((table[0] - table[1]).var(ddof=1)), 5)
    assert found.p_equal is None


def test_missing_trainings_leave_what_is_there() -> None:
    """Data that are loss + seed exactly, whichever of them are missing."""
    values = as_values(np.add.outer([0.1, 0.5, 0.2], [1.0, 2.0, 4.0, 3.0]))
    del values["loss 1"][2], values["loss 2"][0]
    found = pooled_variance(values)
    assert found is not None
    assert (found.variance, found.degrees) == (pytest.approx(0, abs=1e-20), 4)
    values["loss 0"][3] += 0.3
    again = pooled_variance(values)
    assert again is not None
    assert again.variance > 0.01


@pytest.mark.parametrize(
    "values", [{}, {"a": {0: 1.0}}, {"a": {0: 1.0}, "b": {0: 2.0}}, {"a": {0: 1.0}, "b": {1: 2.0}}]
)
def test_too_few_trainings_have_none(values: Values) -> None:
    assert pooled_variance(values) is None


def called(table: NDArray[np.float64]) -> tuple[list[float], list[float]]:
    """Corrected p-values of the differences to the first loss, by each pair's own variance and by the pooled one."""
    n_seeds = table.shape[1]
    pooled = pooled_variance(as_values(table))
    assert pooled is not None
    differences = table[1:] - table[0]
    own = [TwoLevel(d.mean(), 0, d.var(ddof=1) / n_seeds, 0, n_seeds).p_value() for d in differences]
    both = [
        TwoLevel(d.mean(), 0, pooled.variance / n_seeds, 0, n_seeds, pooled.degrees).p_value()
        for d in differences
    ]
    return holm(own), holm(both)


def simulated(
    n_studies: int, n_seeds: int, *, log_deviation: float = 0.0, difference: float = 0.0
) -> tuple[float, float, float]:
    """Of studies of 9 losses: how often a loss is called different by either variance, and Bartlett rejects."""
    rng = np.random.default_rng(n_seeds)
    counts = np.zeros(3)
    for _ in range(n_studies):
        deviations = 0.008 * np.exp(log_deviation * rng.normal(size=(9, 1)))
        table = deviations * rng.normal(size=(9, n_seeds)) + 0.004 * rng.normal(size=n_seeds)
        table[1] += difference
        own, both = called(table)
        pooled = pooled_variance(as_values(table))
        assert pooled is not None
        assert pooled.p_equal is not None
        first = slice(0, 1) if difference else slice(None)
        counts += [min(own[first]) < 0.05, min(both[first]) < 0.05, pooled.p_equal < 0.05]
    return tuple(counts / n_studies)  # type: ignore[return-value]


@pytest.mark.slow
def test_it_finds_what_three_seeds_of_a_pair_do_not() -> None:
    own, pooled, _ = simulated(60, 3, difference=0.02)
    assert own < 0.2
    assert pooled > 0.3


@pytest.mark.slow
def test_equal_losses_are_rarely_called_different() -> None:
    own, pooled, rejected = simulated(60, 3)
    # Of 60 studies 11 would be a rate above 6% (p < .001), and so for own and Bartlett's above 7%: 12.
    assert pooled <= 10 / 60
    assert max(own, rejected) <= 11 / 60


@pytest.mark.deep
@pytest.mark.parametrize(
    ("n_seeds", "log_deviation", "level", "bartlett"),
    [
        (3, 0.0, (0.01, 0.06), (0.02, 0.07)),
        (5, 0.0, (0.02, 0.06), (0.02, 0.07)),
        (3, 0.3, (0.02, 0.07), (0.05, 0.15)),
        (5, 0.3, (0.02, 0.07), (0.12, 0.30)),
        (3, 1.0, (0.10, 0.20), (0.40, 0.70)),
        (5, 1.0, (0.08, 0.18), (0.80, 0.97)),
    ],
)
def test_how_often_equal_losses_are_called_different(
    n_seeds: int, log_deviation: float, level: tuple[float, float], bartlett: tuple[float, float]
) -> None:
    own, pooled, rejected = simulated(600, n_seeds, log_deviation=log_deviation)
    assert own <= 0.07
    assert level[0] <= pooled <= level[1]
    assert bartlett[0] <= rejected <= bartlett[1]
