"""What a study can find: the power of its tests, and how many seeds a difference needs."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.special import gammaincinv, ndtr

from hf_calib.metrics.checks import FloatArray
from hf_calib.study.paired import TwoLevel

WANTED = 0.8
MOST_SEEDS = 100
# Of the variance over seeds that another study would find.
_PROBABILITIES = (np.arange(200) + 0.5) / 200
# Of this study's estimate, for the true variances that it may have come from.
_POSSIBLE = (np.arange(20) + 0.5) / 20
# Of this study's estimate, at which the fewest and the most seeds are told.
_RANGE = (0.9, 0.1)


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
    reaches, deviation = _other_studies(spread, level)
    return _found(difference, reaches, deviation) if deviation else float(difference != 0)


def _other_studies(spread: TwoLevel, level: float) -> tuple[FloatArray, float]:
    """How far the intervals of other studies reach (D,), and the standard deviation of their means."""
    if spread.n_seeds == 1:
        return np.sqrt(spread.square_of_reach(level / 2)), float(np.sqrt(spread.variance_of_rows_alone))
    drawn = _of_estimate(_PROBABILITIES, spread.degrees)
    varied = spread._replace(seed_variance=drawn * spread.seed_variance)
    return np.sqrt(varied.square_of_reach(level / 2)), float(
        np.sqrt(spread.row_variance + spread.seed_variance)
    )


def _found(difference: float, reaches: FloatArray, deviations: FloatArray | float) -> float:
    return float(
        np.mean(ndtr((difference - reaches) / deviations) + ndtr((-difference - reaches) / deviations))
    )


def _of_estimate(probability: FloatArray | float, degrees: float) -> Any:
    """Quantiles of an estimated variance over the true one."""
    return 2 * gammaincinv(degrees / 2, probability) / degrees


def typical(spreads: Collection[TwoLevel], n_losses: int) -> tuple[TwoLevel, float]:
    r"""The spread of a comparison by the mean variances of several, and the degrees of freedom of that mean.

    Each comparison's own variance over S seeds has S - 1 degrees of freedom, of which studies of few seeds learn next
    to nothing. The mean over L losses has more, but not L times as many, as all are compared with one baseline: where
    they vary alike, two variances have a correlation of 1/4, and the mean has $4 L (S - 1) / (L + 3)$.

    Args:
        spreads: of the paired differences; those with the most seeds count.
        n_losses: L, that are not the baseline's.
    """
    n_seeds = max(spread.n_seeds for spread in spreads)
    alike = [spread for spread in spreads if spread.n_seeds == n_seeds]
    of_rows, of_seeds, of_rows_alone = np.mean([spread[1:4] for spread in alike], axis=0).tolist()
    found = alike[0]._replace(
        row_variance=of_rows, seed_variance=of_seeds, variance_of_rows_alone=of_rows_alone
    )
    if found.pooled_degrees is not None:
        return found, found.pooled_degrees
    return found, 4 * n_losses * found.degrees / (n_losses + 3)


def detectable(spread: TwoLevel, level: float, known: float) -> float:
    """The true difference that is found in 80% of such studies.

    That is a mean over the variances over seeds that the estimate may have come from: by the estimate itself, which is
    as often too small as too large, a study of three seeds would find it in 58 to 68%.

    Args:
        spread: of a comparison.
        level: two-sided, in (0, 1).
        known: degrees of freedom of its variance over seeds.
    """
    possible = [spread]
    if spread.n_seeds > 1:
        possible = [_at_quantile(spread, probability, known) for probability in _POSSIBLE]
    reaches, deviations = zip(*(_other_studies(each, level) for each in possible), strict=True)
    if max(deviations) == 0:
        return 0.0
    all_reaches, all_deviations = np.stack(reaches), np.array(deviations)[:, None]
    most = 10 * float(np.max(all_reaches) + np.max(all_deviations))
    return float(brentq(lambda d: _found(d, all_reaches, all_deviations) - WANTED, 0.0, most, rtol=1e-4))


def range_of_seeds(
    spread: TwoLevel, difference: float, level: float, known: float
) -> tuple[int | None, int | None]:
    """The fewest and the most seeds of studies that find a true difference in 80% of cases, see `seeds_to_find`.

    By the ends of the 80% interval of the variance over seeds, of which `known` are the degrees of freedom.
    """
    if spread.n_seeds == 1:
        return None, None
    fewest, most = (
        seeds_to_find(_at_quantile(spread, quantile, known), difference, level) for quantile in _RANGE
    )
    return fewest, most


def _at_quantile(spread: TwoLevel, quantile: float, known: float) -> TwoLevel:
    """The spread whose true variance over seeds is the one of which the estimate is this quantile."""
    return spread._replace(seed_variance=spread.seed_variance / float(_of_estimate(quantile, known)))


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
