"""What a study can find, against simulated studies."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from hf_calib.study.paired import TwoLevel
from hf_calib.study.power import detectable, power, seeds_to_find, with_seeds
from tests.helpers.marks import others_slow

PARTS = [(0.0, 1e-4, 3, None, 8), (1e-5, 1e-4, 5, None, 8), (1e-4, 3e-5, 10, None, 1), (1e-5, 1e-4, 3, 16, 8)]


def spread_of(of_rows: float, of_seed: float, n_seeds: int, degrees: int | None) -> TwoLevel:
    return TwoLevel(0.0, of_rows, of_seed / n_seeds, of_rows, n_seeds, degrees)


@pytest.mark.parametrize(
    ("of_rows", "of_seed", "n_seeds", "degrees", "n_compared"), others_slow(PARTS, first=1)
)
def test_a_detectable_difference_is_found_in_four_studies_of_five(
    of_rows: float, of_seed: float, n_seeds: int, degrees: int | None, n_compared: int
) -> None:
    level = 0.05 / n_compared
    size = detectable(spread_of(of_rows, of_seed, n_seeds, degrees), level)
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(1500):
        values = size + np.sqrt(of_rows) * rng.normal() + np.sqrt(of_seed) * rng.normal(size=n_seeds)
        own = values.var(ddof=1) if degrees is None else of_seed * rng.chisquare(degrees) / degrees
        spread = TwoLevel(values.mean(), of_rows, own / n_seeds, of_rows, n_seeds, degrees)
        found += spread.p_value() < level
    assert abs(found / 1500 - 0.8) < 0.035


def test_of_a_difference_of_zero_it_is_the_level_of_the_test() -> None:
    assert power(spread_of(0.0, 1.0, 4, None), 0.0, 0.05) == pytest.approx(0.05, abs=1e-3)
    assert power(TwoLevel(0.0, 1.0, 0.0, 1.0, 1), 0.0, 0.05) == pytest.approx(0.05)
    assert power(TwoLevel(0.0, 1.0, 0.0, 1.0, 1), 2.8, 0.05) == pytest.approx(
        stats.norm.sf(1.96 - 2.8), abs=1e-3
    )


def test_how_many_seeds_find_a_difference() -> None:
    spread = spread_of(1e-5, 1e-4, 3, None)
    n = seeds_to_find(spread, 0.02, 0.01)
    assert n is not None
    assert power(with_seeds(spread, n), 0.02, 0.01) >= 0.8 > power(with_seeds(spread, n - 1), 0.02, 0.01)
    # Fewer than there are, for a difference that is large.
    assert seeds_to_find(spread, 1.0, 0.05) == 2


def test_no_number_of_seeds_makes_up_for_few_test_rows() -> None:
    assert seeds_to_find(spread_of(1e-4, 1e-6, 5, None), 0.01, 0.05) is None
    assert seeds_to_find(spread_of(0.0, 1e-4, 5, None), 1e-4, 0.05) is None
    assert (
        seeds_to_find(TwoLevel(0.0, 1.0, 0.0, 1.0, 1), 9.0, 0.05) is None
    )  # of one seed nothing is known of seeds


def test_without_any_variance_everything_is_found() -> None:
    nothing = TwoLevel(0.0, 0.0, 0.0, 0.0, 3)
    assert detectable(nothing, 0.05) == 0.0
    assert power(nothing, 1e-9, 0.05) == 1.0
    assert power(nothing, 0.0, 0.05) == 0.0
