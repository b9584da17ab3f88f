"""What a study can find, against simulated studies."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from hf_calib.study.paired import TwoLevel
from hf_calib.study.power import detectable, power, range_of_seeds, seeds_to_find, typical, with_seeds

PARTS = [(0.0, 1e-4, 3, 1), (1e-5, 1e-4, 3, 8), (1e-5, 1e-4, 5, 4), (1e-4, 3e-5, 10, 1)]


def spread_of(of_rows: float, of_seed: float, n_seeds: int) -> TwoLevel:
    return TwoLevel(0.0, of_rows, of_seed / n_seeds, of_rows, n_seeds)


def found_in(
    n_studies: int, of_rows: float, of_seed: float, n_seeds: int, n_losses: int
) -> tuple[float, float]:
    """How often studies find the difference that a study says it finds, and how often their range of seeds is right."""
    level = 0.05 / n_losses
    truth = spread_of(of_rows, of_seed, n_seeds)
    rng = np.random.default_rng(0)
    found, right = 0.0, 0
    for _ in range(n_studies):
        trainings = np.sqrt(of_seed / 2) * rng.normal(size=(1 + n_losses, n_seeds))
        own = (trainings[1:] - trainings[0]).var(axis=1, ddof=1)
        spread, known = typical([spread_of(of_rows, each, n_seeds) for each in own], n_losses)
        found += power(truth, detectable(spread, level, known), level)
        fewest, most = range_of_seeds(spread, 0.02, level, known)
        needed = seeds_to_find(truth, 0.02, level)
        right += (fewest or 101) <= (needed or 101) <= (most or 101)
    return found / n_studies, right / n_studies


def test_what_a_study_says_that_it_finds_is_found_in_four_of_five() -> None:
    found, right = found_in(30, 0.0, 1e-4, 3, 1)
    # Standard deviations over studies of .26 and .4, over sqrt(30).
    assert abs(found - 0.8) < 3 * 0.26 / np.sqrt(30)
    assert right > 0.8 - 3 * 0.4 / np.sqrt(30)


@pytest.mark.deep
@pytest.mark.parametrize(("of_rows", "of_seed", "n_seeds", "n_losses"), PARTS)
def test_what_many_studies_say_that_they_find(
    of_rows: float, of_seed: float, n_seeds: int, n_losses: int
) -> None:
    found, right = found_in(300, of_rows, of_seed, n_seeds, n_losses)
    assert abs(found - 0.8) < 3 * 0.26 / np.sqrt(300)
    assert right > 0.75


def test_the_power_is_how_often_simulated_studies_find_a_difference() -> None:
    spread = spread_of(1e-5, 1e-4, 3)
    size, level = 0.03, 0.05 / 4
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(150):
        values = size + np.sqrt(1e-5) * rng.normal() + np.sqrt(1e-4) * rng.normal(size=3)
        found += TwoLevel(values.mean(), 1e-5, values.var(ddof=1) / 3, 1e-5, 3).p_value() < level
    wanted = power(spread, size, level)
    assert 0.2 < wanted < 0.9
    assert abs(found / 150 - wanted) < 3 * np.sqrt(wanted * (1 - wanted) / 150)


def test_the_mean_over_losses_is_of_the_comparisons_with_the_most_seeds() -> None:
    spreads = [TwoLevel(0.1, r, s, 3 * r, n) for r, s, n in ((1.0, 2.0, 3), (3.0, 6.0, 3), (9.0, 9.0, 2))]
    found, known = typical(spreads, 2)
    assert found[1:5] == (2.0, 4.0, 6.0, 3)
    assert known == pytest.approx(4 * 2 * 2 / 5)
    pooled = [spread._replace(pooled_degrees=16) for spread in spreads]
    assert typical(pooled, 2)[1] == 16


def test_of_a_difference_of_zero_it_is_the_level_of_the_test() -> None:
    assert power(spread_of(0.0, 1.0, 4), 0.0, 0.05) == pytest.approx(0.05, abs=1e-3)
    assert power(TwoLevel(0.0, 1.0, 0.0, 1.0, 1), 0.0, 0.05) == pytest.approx(0.05)
    assert power(TwoLevel(0.0, 1.0, 0.0, 1.0, 1), 2.8, 0.05) == pytest.approx(
        stats.norm.sf(1.96 - 2.8), abs=1e-3
    )


def test_how_many_seeds_find_a_difference() -> None:
    spread = spread_of(1e-5, 1e-4, 3)
    n = seeds_to_find(spread, 0.02, 0.01)
    assert n is not None
    assert power(with_seeds(spread, n), 0.02, 0.01) >= 0.8 > power(with_seeds(spread, n - 1), 0.02, 0.01)
    # Fewer than there are, for a difference that is large.
    assert seeds_to_find(spread, 1.0, 0.05) == 2


def test_no_number_of_seeds_makes_up_for_few_test_rows() -> None:
    assert seeds_to_find(spread_of(1e-4, 1e-6, 5), 0.01, 0.05) is None
    assert seeds_to_find(spread_of(0.0, 1e-4, 5), 1e-4, 0.05) is None
    assert (
        seeds_to_find(TwoLevel(0.0, 1.0, 0.0, 1.0, 1), 9.0, 0.05) is None
    )  # of one seed nothing is known of seeds


def test_without_any_variance_everything_is_found() -> None:
    nothing = TwoLevel(0.0, 0.0, 0.0, 0.0, 3)
    assert detectable(nothing, 0.05, 2) == 0.0
    assert power(nothing, 1e-9, 0.05) == 1.0
    assert power(nothing, 0.0, 0.05) == 0.0
