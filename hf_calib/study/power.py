"""What a study can find: the power of its tests, and how many seeds a difference needs."""

from __future__ import annotations

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtr
from scipy.stats import chi2

from hf_calib.study.paired import TwoLevel

WANTED = 0.8
MOST_SEEDS = 100
_DRAWS = 200  # of the variance over seeds


def power(spread: TwoLevel, difference: float, level: float) -> float:
    """How often a test at a level calls a true difference one, if rows and seeds vary as they did here.

    The variance over seeds is itself estimated anew in each study, from as many degrees of freedom.

    Args:
        spread: of a paired difference.
        difference: the true one.
        level: two-sided, in (0, 1).

    >>> spread = TwoLevel(0.0, 0.0, 1.0, 0.0, 3)  # of three seeds, whose mean has a standard error of 1
    >>> round(power(spread, 0.0, 0.05), 3), round(power(spread, 5.0, 0.05), 2)
    (0.05, 0.72)
    """
    varied, variance = spread, spread.variance_of_rows_alone
    if spread.n_seeds > 1:
        drawn = chi2.ppf((np.arange(_DRAWS) + 0.5) / _DRAWS, spread.degrees) / spread.degrees
        varied = spread._replace(seed_variance=drawn * spread.seed_variance)
        variance = spread.row_variance + spread.seed_variance
    reach, deviation = np.sqrt(varied.square_of_reach(level / 2)), np.sqrt(variance)
    if deviation == 0:
        return float(difference != 0)
    return float(np.mean(ndtr((difference - reach) / deviation) + ndtr((-difference - reach) / deviation)))


def detectable(spread: TwoLevel, level: float) -> float:
    """The true difference that is found in 80% of such studies."""
    variance = spread.square_of_reach(level / 2) + spread.row_variance + spread.seed_variance
    most = 10 * float(np.sqrt(variance))
    if power(spread, most, level) < WANTED:  # no variance at all
        return most
    return float(brentq(lambda difference: power(spread, difference, level) - WANTED, 0.0, most))


def seeds_to_find(spread: TwoLevel, difference: float, level: float) -> int | None:
    """How many seeds find a true difference in 80% of studies; None if more than 100, or the test rows are too few."""

    def is_found(n_seeds: int) -> bool:
        return power(with_seeds(spread, n_seeds), difference, level) >= WANTED

    if spread.n_seeds == 1 or not is_found(MOST_SEEDS):
        return None
    low, high = 1, MOST_SEEDS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_found(middle) else (middle, high)
    return high


def with_seeds(spread: TwoLevel, n_seeds: int) -> TwoLevel:
    """What would be known with another number of seeds, at least 2, on the same test rows."""
    share = spread.n_seeds / n_seeds
    of_each = spread.variance_of_rows_alone - spread.row_variance
    degrees = round(spread.degrees / (spread.n_seeds - 1) * (n_seeds - 1))
    return spread._replace(
        seed_variance=spread.seed_variance * share,
        variance_of_rows_alone=spread.row_variance + of_each * share,
        n_seeds=n_seeds,
        pooled_degrees=max(1, degrees),
    )
