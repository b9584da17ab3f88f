"""The number of heads of unequal coins: what chance alone gives where every probability is right."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainc, ndtr

from hf_calib.metrics.checks import FloatArray

_AS_GOOD_AS_0 = 1e-9
_AS_GOOD_AS_NORMAL = 10_000.0  # a variance
_REACH = 10  # standard deviations, beyond which nothing counts


class Coins(NamedTuple):
    """Independent coins, summed up; each field may be an array, of one sum each.

    Those with a chance p of at least 1/2 are summed apart, as the sum of both kinds can be far from normal on either
    side: a thousand coins at .999 and a thousand at .001.
    """

    likely: Any  # how many have such a chance
    heads: Any  # the sum of p of the others
    heads_variance: Any  # that of p (1 - p) of the others
    tails: Any  # the sum of 1 - p of the likely ones
    tails_variance: Any  # that of p (1 - p) of the likely ones

    @classmethod
    def of(cls, chances: NDArray[Any], groups: NDArray[np.intp] | None = None, n_groups: int = 1) -> Coins:
        """Coins with these chances, (N,) summed within groups (N,), or (N, C) within columns."""
        wide = np.clip(np.ravel(chances).astype(np.float64), 0, 1)
        if chances.ndim == 2:
            n_groups = chances.shape[1]
            groups = np.tile(np.arange(n_groups), len(chances))
        slots = np.zeros(len(wide), np.intp) if groups is None else groups
        likely = wide >= 0.5
        rarer = np.where(likely, 1 - wide, wide)
        variances = rarer * (1 - rarer)
        parts = (likely, rarer * ~likely, variances * ~likely, rarer * likely, variances * likely)
        found = cls(*(np.bincount(slots, part, n_groups).astype(np.float64) for part in parts))
        return found if groups is not None else found.group(0)

    @classmethod
    def of_sums(cls, count: Any, chances: Any, squares: Any) -> Coins:
        """Coins that are known by their number, the sum of their chances and that of the squares of these.

        They are taken as all likely or all unlikely, as those of a bin are.

        >>> [round(coins.p_value(7), 6) for coins in (Coins.of_sums(10, 9.0, 8.1), Coins.of(np.full(10, 0.9)))]
        [0.140382, 0.140382]
        """
        variance = np.maximum(chances - squares, 0.0)
        likely = np.greater_equal(chances, count / 2)
        tails = np.maximum(count - chances, 0.0) * likely
        return cls(count * likely, chances * ~likely, variance * ~likely, tails, variance * likely)

    def group(self, number: int) -> Coins:
        """One of the sums."""
        return Coins(*(float(field[number]) for field in self))

    def p_value(self, n_heads: float) -> float:
        """How likely a number of heads as far from the mean is, either way: twice the smaller tail, at most 1.

        The seldom heads, and the seldom tails, are each taken as binomial with their mean and variance, of a number
        of coins that need not be whole; that is near the truth in both of its limits, the normal and the Poisson one
        (Ehm 1991, "Binomial approximation to the Poisson binomial distribution"; Choi and Xia 2002).
        """
        excess = n_heads - self.likely  # heads of the unlikely less tails of the likely
        variance = self.heads_variance + self.tails_variance
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


def _distribution(mean: float, variance: float) -> tuple[FloatArray, int]:
    """The probabilities of numbers of heads from the second result on, beyond which they are as good as 0."""
    if mean <= 0:
        return np.ones(1), 0
    reach = _REACH * np.sqrt(variance) + _REACH
    first = max(0, int(mean - reach))
    counts = np.arange(first, int(mean + reach) + 2, dtype=np.float64)
    share = max(1 - variance / mean, _AS_GOOD_AS_0)  # of each coin, which goes to 0 in the Poisson limit
    coins = mean / share
    inside = counts < coins
    at_most = np.ones(len(counts))
    at_most[inside] = betainc(coins - counts[inside], counts[inside] + 1, 1 - share)
    return np.diff(at_most, prepend=0.0), first
