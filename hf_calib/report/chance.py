"""Chance: p-values of numbers of correct rows, and the interval of a gap.

Coins are independent Bernoulli variables, one for each row, with the probability that the row is
correct. What is known of groups of coins is an array (5, G) of sums, so that coins are added and
scaled as numbers are: the number of likely coins, whose p is at least 1/2; the sums of p and of p
(1 - p) over the unlikely coins; and the sums of 1 - p and of p (1 - p) over the likely coins. Both
kinds are summed separately, because their sum can be far from normal on either side: a thousand
coins at .999 and a thousand at .001.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainc, ndtr

from hf_calib.metrics.checks import FloatArray, IntArray
from hf_calib.metrics.sums import Interval

_AS_GOOD_AS_0 = 1e-9
# A variance.
_AS_GOOD_AS_NORMAL = 10_000.0
# In standard deviations; probabilities beyond are negligible.
_REACH = 10


def _parts(chances: NDArray[Any]) -> Iterator[FloatArray]:
    """The terms (...) of coins with probabilities (...), in the order of the sums."""
    # Probabilities of a float32 model may be off by rounding, and a variance must not be negative.
    wide = np.clip(chances.astype(np.float64), 0, 1)
    likely = wide >= 0.5
    rarer = np.where(likely, 1 - wide, wide)
    variances = rarer * (1 - rarer)
    yield likely.astype(np.float64)
    yield rarer * ~likely
    yield variances * ~likely
    yield rarer * likely
    yield variances * likely


def coins_in_groups(
    chances: NDArray[Any],
    groups: IntArray,
    n_groups: int,
    weights: FloatArray | None = None,
) -> FloatArray:
    """Coins with probabilities (N,) in groups (N,), each counted as often as its weight (N,)."""
    sums = []
    # One term after the other, as five copies of many probabilities would not fit in memory.
    for part in _parts(chances):
        own = part if weights is None else weights * part
        sums.append(np.bincount(groups, own, n_groups))
    return np.array(sums)


def coins_of_columns(
    chances: NDArray[Any], weights: FloatArray | None = None
) -> FloatArray:
    """Coins with probabilities (G, N), each row of which is a group."""
    mass = np.ones(chances.shape[1]) if weights is None else weights
    return np.array([part @ mass for part in _parts(chances)])


def coins_of_sums(count: float, chances: float, squares: float) -> FloatArray:
    """One group from its number of coins, and the sums of their probabilities and their squares.

    The coins count as all likely or all unlikely, as those of a bin are.

    >>> nines = coins_of_columns(np.full((1, 10), 0.9))[:, 0]
    >>> [round(p_value(coins, 7), 6) for coins in (coins_of_sums(10, 9.0, 8.1), nines)]
    [0.140382, 0.140382]
    """
    # The difference of two sums may be below 0 by rounding.
    variance = max(chances - squares, 0.0)
    if chances < count / 2:
        return np.array([0.0, chances, variance, 0.0, 0.0])
    return np.array([count, 0.0, 0.0, max(count - chances, 0.0), variance])


def p_value(coins: FloatArray, n_heads: float) -> float:
    """The two-sided p-value of a number of heads in a group (5,): twice the smaller tail.

    It is at most 1. Heads of unlikely coins and tails of likely coins are each approximated by a
    binomial distribution with their mean and variance, whose number of coins need not be an
    integer; it is close in the normal and in the Poisson limit (Ehm 1991, "Binomial approximation
    to the Poisson binomial distribution"; Choi and Xia 2002).
    """
    likely, heads, heads_variance, tails, tails_variance = coins.tolist()
    # Heads of unlikely coins minus tails of likely coins.
    excess = float(n_heads) - likely
    variance = heads_variance + tails_variance
    if variance > _AS_GOOD_AS_NORMAL:
        deviation = math.sqrt(variance)
        z = (excess - heads + tails) / deviation
        # The continuity correction: the number itself is in both tails.
        half = 0.5 / deviation
        at_most = ndtr(z + half)
        at_least = ndtr(half - z)
    else:
        of_heads, first_heads = _distribution(heads, heads_variance)
        of_tails, first_tails = _distribution(tails, tails_variance)
        # The distribution of heads minus tails, from the largest number of tails up.
        together = np.convolve(of_heads, of_tails[::-1])
        place = round(excess - first_heads + first_tails + len(of_tails) - 1)
        at_most = together[: max(0, place + 1)].sum()
        at_least = together[max(0, place) :].sum()
    return float(min(1.0, 2 * min(at_most, at_least)))


def _distribution(mean: float, variance: float) -> tuple[FloatArray, int]:
    """The probabilities of consecutive numbers of heads, and the first number.

    All others are negligible.
    """
    if mean <= 0:
        return np.ones(1), 0
    reach = _REACH * math.sqrt(variance) + _REACH
    first = max(0, int(mean - reach))
    counts = np.arange(first, int(mean + reach) + 2, dtype=np.float64)
    # The probability of a coin, 0 in the Poisson limit.
    share = max(1 - variance / mean, _AS_GOOD_AS_0)
    coins = mean / share
    # P(X <= k) of a binomial variable, which is 1 from the number of coins on.
    inside = counts < coins
    at_most = np.ones(len(counts))
    at_most[inside] = betainc(coins - counts[inside], counts[inside] + 1, 1 - share)
    return np.diff(at_most, prepend=0.0), first


def gap_interval(
    confidence: float,
    accuracy: float,
    *,
    stated: float,
    error: float,
    effective: float,
    z: float,
) -> tuple[Interval, float]:
    """The gap of effective rows with its score interval, and the variance of a row at a gap of 0.

    `stated` is the mean variance that the confidences state, and `error` the observed standard
    error of the gap. The interval generalises Wilson's of one frequency: if the gap is g, each row
    is correct with the probability of its confidence minus g.
    """
    gap = confidence - accuracy
    # The observed variance is larger than what the confidences state if rows are not all off by the
    # same amount. That of a small sample may be far too small.
    if_all_are_off_alike = stated + gap * (2 * confidence - 1) - gap**2
    excess = error**2 * effective - if_all_are_off_alike
    variance = stated + max(excess, 0.0)
    # The ends are the gaps g with (gap - g)^2 = z^2 / n Var(g), where the variance of a row changes
    # as that of a coin does, Var(g) = variance + g (2 confidence - 1) - g^2: a quadratic equation.
    weight = z**2 / effective
    middle = gap + weight * (confidence - 0.5)
    squared = middle**2 - (1 + weight) * (gap**2 - weight * variance)
    reach = math.sqrt(max(squared, 0.0))
    low = (middle - reach) / (1 + weight)
    high = (middle + reach) / (1 + weight)
    # By rounding, the roots of a small equation may not enclose the gap.
    return Interval(gap, min(low, gap), max(high, gap)), variance
