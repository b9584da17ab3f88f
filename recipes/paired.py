"""Statistics of paired comparisons of runs, over the test rows and over the seeds.

A loss is compared with a baseline on the same test rows and with the same seeds: `two_level` has
the interval and the p of the mean difference, `corrected` the p of a family of comparisons,
`detectable` the difference that a study would find, `pooled_variance` the variance over seeds of
all losses.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pandas import DataFrame
from scipy.optimize import brentq
from scipy.special import gammaincinv, ndtr, ndtri, stdtrit

from hf_calib.metrics.intervals import holm

FloatArray = NDArray[np.float64]

# A difference with a corrected p below it is beyond chance; intervals have 1 minus it.
LEVEL = 0.05
# Metrics with a smaller difference are equal: they differ only in where a solver stopped.
SAME = 1e-6
# Normal tails beyond it are meaningless.
SMALLEST_P = 1e-12


class TwoLevel(NamedTuple):
    """A mean over seeds with its variances, NaN if unknown.

    The variances are those of the test rows, as far as all seeds vary together; of the seeds,
    including the noise of the rows in each; and of the mean over these seeds from the rows alone.
    """

    value: float
    row_variance: float
    seed_variance: float
    variance_of_rows_alone: float
    n_seeds: int
    pooled_degrees: int | None = None

    @property
    def degrees(self) -> int:
        """The degrees of freedom of the seeds' variance."""
        if self.pooled_degrees is None:
            return self.n_seeds - 1
        return self.pooled_degrees

    def interval(self) -> tuple[float, float]:
        """The ends of the 95% interval."""
        reach = math.sqrt(self.square_of_reach(LEVEL / 2))
        return self.value - reach, self.value + reach

    def p_value(self) -> float:
        """The two-sided p-value of a mean of 0: the level at which the interval just reaches 0."""
        if math.isnan(self.row_variance):
            return math.nan
        if abs(self.value) <= SAME:
            return 1.0

        def beyond(log_p: float) -> float:
            tail = math.exp(log_p) / 2
            return float(self.square_of_reach(tail)) - self.value**2

        smallest = math.log(SMALLEST_P)
        if beyond(smallest) <= 0:
            return SMALLEST_P
        return math.exp(brentq(beyond, smallest, 0.0))

    def square_of_reach(self, tail: float) -> FloatArray:
        """The squared half-width of an interval with this probability on either side.

        The seeds' variance may be an array, of which each has its half-width.
        """
        z = ndtri(tail)
        of_rows_alone = z**2 * self.variance_of_rows_alone
        if self.n_seeds == 1:
            return np.asarray(of_rows_alone)
        t = stdtrit(self.degrees, tail)
        of_both = z**2 * self.row_variance + t**2 * self.seed_variance
        return np.maximum(of_both, of_rows_alone)


class Pooled(NamedTuple):
    """The variance of a paired difference of two losses, from all losses of a study."""

    variance: float
    degrees: int


def two_level(
    values: ArrayLike, draws: Iterable[ArrayLike], pooled: Pooled | None = None
) -> TwoLevel:
    r"""Return a mean over seeds with an interval for the mean of many more runs and test rows.

    It applies to a metric, or to paired differences, of S runs on the same N test rows. The model
    of a value is

    $$m_s = \mu + b + a_s + c_s$$

    where b is the effect of the test rows on all runs, $c_s$ their effect on run s alone, and $a_s$
    the effect of the run itself. R resamples of rows, the same for all runs, separate b from c: the
    variance of the mean over seeds is $\mathrm{Var}\,b + \mathrm{Var}\,c / S$, that within a
    resample $\mathrm{Var}\,c$. The variance over seeds of the values, $s^2$, contains a and c.
    Therefore the interval is

    $$\bar m \pm \sqrt{z^2 \max(0, \mathrm{Var}\,b) + t_{S-1}^2 s^2 / S}$$

    in which the noise of the rows counts once. If seeds agree by chance, it is not narrower than
    the interval of the rows alone, $z \sqrt{\mathrm{Var}\,b + \mathrm{Var}\,c / S}$. With one
    seed it is the latter, and does not cover another run.

    Args:
        values: (S,) values of the runs.
        draws: S arrays (R,), the values of the runs on R resamples of the test rows, or NaN for
            none.
        pooled: a variance over seeds that includes other losses, instead of $s^2$, with its
            degrees of freedom.

    Notes:
        Quantiles of a bootstrap over 2 to 5 seeds are far too narrow. Student's t is exact if rows
        add no variance and runs are about normal. Adding squared half-widths (Howe 1974) is
        conservative otherwise: with 3 seeds, and equal variances of rows and seeds, there are 2.5%
        false alarms instead of 5%. Satterthwaite's degrees of freedom would give up to 7.8%, and
        five times the level at 0.5%, which Holm's correction needs.

    References:
        Owen 2007, "The pigeonhole bootstrap" (two crossed factors); Cameron, Gelbach and Miller
        2011, "Robust inference with multiway clustering" (subtracting what counts twice); Howe
        1974, "Approximate confidence limits on the mean of X + Y" (the sum of squares).
    """
    of_seeds = np.asarray(values, dtype=np.float64)
    value = float(of_seeds.mean())
    n_seeds = len(of_seeds)
    drawn = [np.atleast_1d(each) for each in draws]
    if any(np.isnan(each).any() for each in drawn):
        return TwoLevel(value, math.nan, math.nan, math.nan, n_seeds)
    # (R, S), around the mean of each run.
    noise = np.stack([each - each.mean() for each in drawn], axis=1)
    of_mean = float(noise.mean(axis=1).var(ddof=1))
    if n_seeds == 1:
        return TwoLevel(value, of_mean, 0.0, of_mean, 1)
    within = float(noise.var(axis=1, ddof=1).mean())
    of_rows = max(0.0, of_mean - within / n_seeds)
    if pooled is None:
        between = float(of_seeds.var(ddof=1))
        return TwoLevel(value, of_rows, between / n_seeds, of_mean, n_seeds)
    between = pooled.variance / n_seeds
    return TwoLevel(value, of_rows, between, of_mean, n_seeds, pooled.degrees)


def corrected(p_values: Sequence[float], n_asked: int | None = None) -> FloatArray:
    """Return p-values that are corrected by Holm's method for the family that was asked.

    A comparison without a p (NaN) keeps none, but counts, as do those of the `n_asked` that have
    no entry at all: what was asked is the family, not what has run.

    >>> corrected([0.01, 0.04]).round(3).tolist()
    [0.02, 0.04]
    >>> corrected([0.01, float("nan")], n_asked=3).round(3).tolist()
    [0.03, nan]
    """
    own = np.asarray(p_values, dtype=np.float64)
    n_further = 0 if n_asked is None else n_asked - len(own)
    family = np.concatenate([np.where(np.isnan(own), 1.0, own), np.ones(n_further)])
    return np.where(np.isnan(own), np.nan, holm(family)[: len(own)])


def pooled_variance(values: DataFrame) -> Pooled | None:
    r"""Return twice the residual variance of values = loss + seed.

    The residuals are the effects of single runs:

    $$\hat\sigma^2 = \frac{1}{(L - 1)(S - 1)}
    \sum_{l, s} (m_{ls} - \bar m_{l \cdot} - \bar m_{\cdot s} + \bar m)^2$$

    for L losses (columns) with S seeds (rows) each. If runs are missing (NaN), it is the
    least-squares fit of the same model. The result is None if no degree of freedom remains.

    With few seeds the variance of a single loss is almost unknown: its Student's t has S - 1
    degrees of freedom, this one's (L - 1)(S - 1). It is too narrow for losses that vary more than
    others: in 8 to 16% of simulated studies with very different ones, equal losses differed.

    >>> found = pooled_variance(DataFrame({"a": [1.0, 2.0], "b": [1.5, 2.7]}))
    >>> round(found.variance, 6), found.degrees
    (0.02, 1)
    """
    table = values.to_numpy(np.float64)
    n_seeds, n_losses = table.shape
    seeds, losses = np.nonzero(~np.isnan(table))
    if len(seeds) == 0:
        return None
    of_runs = table[seeds, losses]
    of_runs = of_runs - of_runs.mean()
    indicators = [np.eye(n_losses)[losses], np.eye(n_seeds)[seeds]]
    design = np.concatenate(indicators, axis=1)
    effects, _, rank, _ = np.linalg.lstsq(design, of_runs, rcond=None)
    degrees = len(of_runs) - int(rank)
    if degrees < 1:
        return None
    residuals = of_runs - design @ effects
    return Pooled(2 * float(residuals @ residuals) / degrees, degrees)


def typical(spreads: Collection[TwoLevel], n_losses: int) -> tuple[TwoLevel, float]:
    r"""The spread of a comparison from the mean variances of several, and its degrees of freedom.

    The mean over L losses (other than the baseline's, of those with the most seeds) has more
    degrees of freedom than the S - 1 of each, but not L times as many, because all are compared
    with one baseline. If they vary equally, two variances have a correlation of 1/4, and the mean
    has $4 L (S - 1) / (L + 3)$.
    """
    n_seeds = max(spread.n_seeds for spread in spreads)
    alike = [spread for spread in spreads if spread.n_seeds == n_seeds]
    variances = np.mean([spread[1:4] for spread in alike], axis=0).tolist()
    degrees = alike[0].pooled_degrees
    found = TwoLevel(alike[0].value, *variances, n_seeds, degrees)
    if degrees is not None:
        return found, degrees
    return found, 4 * n_losses * found.degrees / (n_losses + 3)


def detectable(spread: TwoLevel, level: float, known: float) -> float:
    """Return the true difference that 80% of such studies find, at a two-sided level.

    It is a mean over the true variances that may underlie the estimate, which has `known` degrees
    of freedom. With the estimate itself, which is as often too small as too large, a study of three
    seeds would find the difference in 58 to 68% only. Each study estimates its own variance.
    """
    if spread.n_seeds > 1:
        # (20, 1) true variances, and (20, 200) estimates that other studies would have of them.
        true = spread.seed_variance / ratios_to_true_variance(20, known)[:, None]
        estimates = true * ratios_to_true_variance(200, spread.degrees)
        variance = spread.row_variance
    else:
        true = np.zeros(1)
        estimates = true
        variance = spread.variance_of_rows_alone
    of_others: Any = {"seed_variance": estimates}
    half_widths = spread._replace(**of_others).square_of_reach(level / 2) ** 0.5
    deviations = np.sqrt(variance + true)
    if deviations.max() == 0:
        return 0.0

    def power(size: float) -> float:
        above = ndtr((size - half_widths) / deviations)
        below = ndtr((-size - half_widths) / deviations)
        return float(np.mean(above + below))

    most = 10 * float(half_widths.max() + deviations.max())
    return float(brentq(lambda size: power(size) - 0.8, 0.0, most, rtol=1e-4))


def ratios_to_true_variance(n: int, degrees: float) -> FloatArray:
    """Ratios (n,) of an estimated to the true variance, at probabilities of equal distance."""
    probabilities = (np.arange(n) + 0.5) / n
    return np.asarray(2 * gammaincinv(degrees / 2, probabilities) / degrees)
