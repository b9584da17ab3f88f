"""Chance: p-values of numbers of correct rows, and the interval of a gap."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainc, ndtr

from hf_calib.metrics.checks import FloatArray, IntArray
from hf_calib.metrics.sums import Interval

_AS_GOOD_AS_0 = 1e-9
_AS_GOOD_AS_NORMAL = 10_000.0  # a variance
_REACH = 10  # In standard deviations; probabilities beyond are negligible.


class Coins(NamedTuple):
    """Sums over independent coins (Bernoulli variables); each field may be an array of sums.

    Likely coins, with p of at least 1/2, are summed separately, because the sum of both kinds can be far from normal
    on either side: a thousand coins at .999 and a thousand at .001.
    """

    # The number of likely coins.
    likely: Any
    # The sums of p and of p (1 - p) over the unlikely coins.
    heads: Any
    heads_variance: Any
    # The sums of 1 - p and of p (1 - p) over the likely coins.
    tails: Any
    tails_variance: Any

    @classmethod
    def none(cls, n_groups: int) -> Coins:
        """Groups without coins."""
        return cls(*np.zeros((5, n_groups)))

    @classmethod
    def of(
        cls,
        chances: NDArray[Any],
        groups: IntArray,
        n_groups: int,
        weights: FloatArray | None = None,
    ) -> Coins:
        """Coins with probabilities (N,), summed within groups (N,); each counts as often as its weight (N,) says."""
        sums = []
        for part in _parts(chances):
            own = part if weights is None else weights * part
            sums.append(np.bincount(groups, own, n_groups).astype(np.float64))
        return cls(*sums)

    @classmethod
    def of_columns(
        cls, chances: NDArray[Any], weights: FloatArray | None = None
    ) -> Coins:
        """Coins with probabilities (C, N), summed within each of the C groups."""
        mass = np.ones(chances.shape[1]) if weights is None else weights
        return cls(*(part @ mass for part in _parts(chances)))

    @classmethod
    def of_sums(cls, count: Any, chances: Any, squares: Any) -> Coins:
        """Coins from their number, the sum of their probabilities and the sum of the squared probabilities.

        They count as all likely or all unlikely, as the coins of a bin are.

        >>> nines = Coins.of_columns(np.full((1, 10), 0.9)).group(0)
        >>> [round(coins.p_value(7), 6) for coins in (Coins.of_sums(10, 9.0, 8.1), nines)]
        [0.140382, 0.140382]
        """
        variance = np.maximum(chances - squares, 0.0)
        likely = np.greater_equal(chances, count / 2)
        tails = np.maximum(count - chances, 0.0) * likely
        return cls(
            count * likely,
            chances * ~likely,
            variance * ~likely,
            tails,
            variance * likely,
        )

    def plus(self, other: Coins) -> Coins:
        """The coins of both."""
        return Coins(*(mine + own for mine, own in zip(self, other, strict=True)))

    def times(self, scale: float) -> Coins:
        """This many times as many coins."""
        return Coins(*(scale * field for field in self))

    def total(self) -> Coins:
        """The coins of all groups."""
        return Coins(*(float(field.sum()) for field in self))

    def group(self, number: int) -> Coins:
        """The coins of one group."""
        return Coins(*(float(field[number]) for field in self))

    @property
    def variance(self) -> Any:
        """The variance of the number of heads."""
        return self.heads_variance + self.tails_variance

    def p_value(self, n_heads: float) -> float:
        """The two-sided p-value of a number of heads: twice the smaller tail, at most 1.

        Heads of unlikely coins and tails of likely coins are each approximated by a binomial distribution with their
        mean and variance, whose number of coins need not be an integer; it is close in the normal and in the Poisson
        limit (Ehm 1991, "Binomial approximation to the Poisson binomial distribution"; Choi and Xia 2002).
        """
        # Heads of unlikely coins minus tails of likely coins.
        excess = n_heads - self.likely
        variance = self.variance
        if variance > _AS_GOOD_AS_NORMAL:
            z = (excess - self.heads + self.tails) / np.sqrt(variance)
            half = 0.5 / np.sqrt(variance)
            return float(min(1.0, 2 * min(ndtr(z + half), ndtr(half - z))))
        heads, first_heads = _distribution(self.heads, self.heads_variance)
        tails, first_tails = _distribution(self.tails, self.tails_variance)
        together = np.convolve(heads, tails[::-1])
        place = round(excess - first_heads + first_tails + len(tails) - 1)
        at_most = together[: max(0, place + 1)].sum()
        at_least = together[max(0, place) :].sum()
        return float(min(1.0, 2 * min(at_most, at_least)))


def _parts(chances: NDArray[Any]) -> Iterator[FloatArray]:
    """The terms (...) of coins with probabilities (...), in the order of the fields."""
    wide = np.clip(chances.astype(np.float64), 0, 1)
    likely = wide >= 0.5
    rarer = np.where(likely, 1 - wide, wide)
    variances = rarer * (1 - rarer)
    yield likely.astype(np.float64)
    yield rarer * ~likely
    yield variances * ~likely
    yield rarer * likely
    yield variances * likely


def _distribution(mean: float, variance: float) -> tuple[FloatArray, int]:
    """The probabilities of consecutive numbers of heads, and the first number; all others are negligible."""
    if mean <= 0:
        return np.ones(1), 0
    reach = _REACH * np.sqrt(variance) + _REACH
    first = max(0, int(mean - reach))
    counts = np.arange(first, int(mean + reach) + 2, dtype=np.float64)
    # The probability of a coin, 0 in the Poisson limit.
    share = max(1 - variance / mean, _AS_GOOD_AS_0)
    coins = mean / share
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

    `stated` is the mean variance that the confidences state, and `error` the observed standard error of the gap.
    """
    variance = variance_of_gaps(confidence, accuracy, stated, error**2 * effective)
    low, high = score_interval(confidence, accuracy, variance, z**2 / effective)
    return Interval(confidence - accuracy, low, high), variance


def variance_of_gaps(
    confidence: float, accuracy: float, stated: float, observed: float
) -> float:
    """The variance of confidence minus correct of a row at a mean gap of 0, from the stated and the observed one.

    The observed variance is larger than what the confidences state if rows are not all off by the same amount. That of
    a small sample may be far too small.
    """
    gap = confidence - accuracy
    if_all_are_off_alike = stated + gap * (2 * confidence - 1) - gap**2
    return stated + max(observed - if_all_are_off_alike, 0.0)


def score_interval(
    confidence: float, accuracy: float, variance: float, weight: float
) -> tuple[float, float]:
    """The score interval of the mean confidence minus the accuracy, which generalises Wilson's of one frequency.

    If the gap is g, each row is correct with the probability of its confidence minus g. The variance is that of a row
    at a gap of 0, and the weight z^2 / N.
    """
    gap = confidence - accuracy
    middle = gap + weight * (confidence - 0.5)
    reach = math.sqrt(max(middle**2 - (1 + weight) * (gap**2 - weight * variance), 0.0))
    low = (middle - reach) / (1 + weight)
    high = (middle + reach) / (1 + weight)
    return min(low, gap), max(high, gap)
