"""Statistics of a study: errors without noise, two-level intervals and tests, pooled variances, and power."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq
from scipy.special import gammaincinv, ndtr, ndtri, stdtrit

from hf_calib.metrics import sums
from hf_calib.metrics.checks import FloatArray, IntArray
from hf_calib.metrics.intervals import Populations
from hf_calib.metrics.sums import Binning, BinSums, TopLabel

if TYPE_CHECKING:
    from pandas import DataFrame

CONFIDENCE_LEVEL = 0.95  # The level of every interval.
LEVEL = 0.05  # A difference with a corrected p below it is beyond chance.
_WANTED = 0.8  # The desired power of a study.
# Metrics with a smaller difference are equal: they differ only in where a solver stopped.
_SAME = 1e-6
_SMALLEST_P = 1e-12  # Normal tails beyond it are meaningless.
# Probabilities of variances over seeds that other studies would find, and of true variances of this study.
_OTHER_STUDIES = (np.arange(200) + 0.5) / 200
_POSSIBLE = (np.arange(20) + 0.5) / 20
_STEPS, _NARROWEST = 100, 1e-3  # For the gaps on either side of the data's.


class TwoLevel(NamedTuple):
    """A mean over seeds with its variances, NaN if unknown.

    The variances are those of the test rows, as far as all seeds vary together; of the seeds, including the noise of
    the rows in each; and of the mean over these seeds from the rows alone.
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
        return self.n_seeds - 1 if self.pooled_degrees is None else self.pooled_degrees

    def interval(self) -> tuple[float, float]:
        """The ends of the 95% interval."""
        reach = np.sqrt(self.square_of_reach((1 - CONFIDENCE_LEVEL) / 2))
        return float(self.value - reach), float(self.value + reach)

    def p_value(self) -> float:
        """The two-sided p-value of a mean of 0: the level at which the interval just reaches 0."""
        if np.isnan(self.row_variance):
            return np.nan
        if abs(self.value) <= _SAME:
            return 1.0

        def beyond(log_p: float) -> float:
            return float(self.square_of_reach(np.exp(log_p) / 2)) - self.value**2

        smallest = np.log(_SMALLEST_P)
        return (
            _SMALLEST_P
            if beyond(smallest) <= 0
            else float(np.exp(brentq(beyond, smallest, 0.0)))
        )

    def square_of_reach(self, tail: float) -> FloatArray:
        """The squared half-width of an interval with this probability on either side, for several seed variances."""
        of_rows_alone = ndtri(tail) ** 2 * self.variance_of_rows_alone
        if self.n_seeds == 1:
            return np.asarray(of_rows_alone)
        of_both = (
            ndtri(tail) ** 2 * self.row_variance
            + stdtrit(self.degrees, tail) ** 2 * self.seed_variance
        )
        return np.maximum(of_both, of_rows_alone)


def two_level(
    values: ArrayLike, draws: Iterable[ArrayLike], pooled: Pooled | None = None
) -> TwoLevel:
    r"""Return a mean over seeds with an interval for the mean of many more runs and test rows.

    It applies to a metric, or to paired differences, of S runs on the same N test rows. The model of a value is

    $$m_s = \mu + b + a_s + c_s$$

    where b is the effect of the test rows on all runs, $c_s$ their effect on run s alone, and $a_s$ the effect of the
    run itself. R resamples of rows, the same for all runs, separate b from c: the variance of the mean over seeds is
    $\mathrm{Var}\,b + \mathrm{Var}\,c / S$, that within a resample $\mathrm{Var}\,c$. The variance over seeds of the
    values, $s^2$, contains a and c. Therefore the interval is

    $$\bar m \pm \sqrt{z^2 \max(0, \mathrm{Var}\,b) + t_{S-1}^2 s^2 / S}$$

    in which the noise of the rows counts once. If seeds agree by chance, it is not narrower than the interval of the
    rows alone, $z \sqrt{\mathrm{Var}\,b + \mathrm{Var}\,c / S}$. With one seed it is the latter, and does not cover
    another run.

    Args:
        values: (S,) values of the runs.
        draws: S arrays (R,), the values of the runs on R resamples of the test rows, or NaN for none.
        pooled: a variance over seeds that includes other losses, instead of $s^2$, with its degrees of freedom.

    Notes:
        Quantiles of a bootstrap over 2 to 5 seeds are far too narrow. Student's t is exact if rows add no variance and
        runs are about normal. Adding squared half-widths (Howe 1974) is conservative otherwise: with 3 seeds, and equal
        variances of rows and seeds, there are 2.5% false alarms instead of 5%. Satterthwaite's degrees of freedom would
        give up to 7.8%, and five times the level at 0.5%, which Holm's correction needs.

    References:
        Owen 2007, "The pigeonhole bootstrap" (two crossed factors); Cameron, Gelbach and Miller 2011, "Robust
        inference with multiway clustering" (subtracting what counts twice); Howe 1974, "Approximate confidence limits
        on the mean of X + Y where X and Y are two tabled independent random variables" (the sum of squares).
    """
    of_seeds, drawn = np.asarray(values), [np.atleast_1d(each) for each in draws]
    value, n_seeds = float(of_seeds.mean()), len(of_seeds)
    if any(np.isnan(each).any() for each in drawn):
        return TwoLevel(value, np.nan, np.nan, np.nan, n_seeds)
    noise = np.stack([each - each.mean() for each in drawn], axis=1)
    of_mean = float(noise.mean(axis=1).var(ddof=1))
    if n_seeds == 1:
        return TwoLevel(value, of_mean, 0.0, of_mean, 1)
    within = float(noise.var(axis=1, ddof=1).mean())
    between, degrees = pooled or (float(of_seeds.var(ddof=1)), None)
    of_rows = max(0.0, of_mean - within / n_seeds)
    return TwoLevel(value, of_rows, between / n_seeds, of_mean, n_seeds, degrees)


class Pooled(NamedTuple):
    """The variance of a paired difference of two losses, estimated from all losses of a study."""

    variance: float
    degrees: int


def pooled_variance(values: DataFrame) -> Pooled | None:
    r"""Return twice the residual variance of values = loss + seed; the residuals are the effects of single runs.

    $$\hat\sigma^2 = \frac{1}{(L - 1)(S - 1)} \sum_{l, s} (m_{ls} - \bar m_{l \cdot} - \bar m_{\cdot s} + \bar m)^2$$

    for L losses (columns) with S seeds (rows) each. If runs are missing (NaN), it is the least-squares fit of the same
    model. The result is None if no degree of freedom remains.

    With few seeds the variance of a single loss is almost unknown: its Student's t has S - 1 degrees of freedom, this
    one's (L - 1)(S - 1). If the losses do not vary equally, it is too narrow for those that vary most. In simulated
    studies of 9 equal losses with 3 and 5 seeds, one was called different in 2 to 6% if their standard deviations were
    equal, or their logarithms had a standard deviation of .3, and in 8 to 16% if that was .6 and 1.

    >>> import pandas
    >>> found = pooled_variance(pandas.DataFrame({"a": [1.0, 2.0], "b": [1.5, 2.7]}))
    >>> round(found.variance, 6), found.degrees
    (0.02, 1)
    """
    table = values.to_numpy(np.float64)
    seeds, losses = np.nonzero(~np.isnan(table))
    if not len(seeds):
        return None
    y = table[seeds, losses]
    design = np.concatenate(
        [np.eye(table.shape[1])[losses], np.eye(table.shape[0])[seeds]], axis=1
    )
    fitted, _, rank, _ = np.linalg.lstsq(design, y - y.mean(), rcond=None)
    degrees = len(y) - int(rank)
    if degrees < 1:
        return None
    residuals = y - y.mean() - design @ fitted
    return Pooled(2 * float(residuals @ residuals) / degrees, degrees)


def typical(spreads: Collection[TwoLevel], n_losses: int) -> tuple[TwoLevel, float]:
    r"""The spread of a comparison from the mean variances of several, and the degrees of freedom of the mean.

    The mean over L losses (other than the baseline's, of those with the most seeds) has more degrees of freedom than
    the S - 1 of each, but not L times as many, because all are compared with one baseline. If they vary equally, two
    variances have a correlation of 1/4, and the mean has $4 L (S - 1) / (L + 3)$.
    """
    n_seeds = max(spread.n_seeds for spread in spreads)
    alike = [spread for spread in spreads if spread.n_seeds == n_seeds]
    of_rows, of_seeds, alone = np.mean(
        [spread[1:4] for spread in alike], axis=0
    ).tolist()
    found = TwoLevel(
        alike[0].value, of_rows, of_seeds, alone, n_seeds, alike[0].pooled_degrees
    )
    if found.pooled_degrees is not None:
        return found, found.pooled_degrees
    return found, 4 * n_losses * found.degrees / (n_losses + 3)


def detectable(spread: TwoLevel, level: float, known: float) -> float:
    """Return the true difference that is found in 80% of such studies, at a two-sided level.

    It is a mean over the true variances that may underlie the estimate, which has `known` degrees of freedom. With the
    estimate itself, which is as often too small as too large, a study of three seeds would find the difference in 58
    to 68% only. Each study estimates its own variance.
    """
    true: Any = np.zeros(1)
    estimates, variance = true, spread.variance_of_rows_alone
    if spread.n_seeds > 1:
        true = spread.seed_variance / _of_estimate(_POSSIBLE, known)[:, None]
        estimates = true * _of_estimate(_OTHER_STUDIES, spread.degrees)
        variance = spread.row_variance
    # The half-widths of the intervals of other studies, and the standard deviations of their means.
    reaches = np.sqrt(
        spread._replace(seed_variance=estimates).square_of_reach(level / 2)
    )
    deviations = np.sqrt(variance + true)
    if deviations.max() == 0:
        return 0.0

    def power(size: float) -> float:
        return float(
            np.mean(sum(ndtr((side - reaches) / deviations) for side in (size, -size)))
        )

    most = 10 * float(reaches.max() + deviations.max())
    return float(brentq(lambda size: power(size) - _WANTED, 0.0, most, rtol=1e-4))


def _of_estimate(probabilities: FloatArray, degrees: float) -> FloatArray:
    """The quantiles of the ratio of an estimated to the true variance."""
    return np.asarray(2 * gammaincinv(degrees / 2, probabilities) / degrees)


def unbiased_error(
    top: TopLabel,
    binning: Binning,
    *,
    n_bins: int,
    n_resamples: int,
    seed: int,
    groups: IntArray | None = None,
) -> tuple[float, FloatArray]:
    r"""Return the error of the population whose samples have this plain ECE on average, and its resamples (R,).

    Noise increases a mean of absolute gaps, more if the gaps are small, which would bias differences of models. The
    result is the error of that of the `Populations` for which
    $\sum_m |B_m|/N\, E|\mathcal N(g_m(\lambda), s_m^2(\lambda))|$ equals the plain error. If the plain error is below
    that of a calibrated population, the result is their negative difference, because an estimate that stops at 0 would
    be too large on average. A resample changes the gaps of the population like those of the data.
    """
    add = sums.binned_rows(top, n_bins, binning)
    found = Populations(BinSums(*add(None)))
    blocks = sums.draw_counts(
        len(top.confidence), n_resamples, np.random.default_rng(seed), groups
    )
    resamples = np.stack([add(counts) for block in blocks for counts in block], axis=1)
    counts, confidence, correct = resamples[..., found.occupied]
    noise = np.where(
        counts > 0, (confidence - correct) / np.maximum(counts, 1) - found.gaps, 0
    )
    # The mean plain errors of samples of a line of populations.
    growth = np.geomspace(_NARROWEST, -found.least, _STEPS)
    shrinkages = np.concatenate([found.most * np.linspace(1, 0, _STEPS), -growth])
    accuracies = found.accuracies(shrinkages)
    variances = accuracies * (1 - accuracies) / found.counts
    if groups is not None:
        variances *= _design_effect(
            top, sums.assign_bins(top.confidence, n_bins, binning), n_bins, groups
        )
    sizes = sums.mean_size(found.stated - accuracies, np.sqrt(variances))
    plain, errors = (
        np.maximum.accumulate(sizes @ found.shares),
        found.errors(shrinkages),
    )

    def estimate(of: FloatArray) -> FloatArray:
        return np.where(of < plain[0], of - plain[0], np.interp(of, plain, errors))

    nearest = float(np.interp(found.value, plain, shrinkages))
    gaps = found.stated - found.accuracies(nearest) + noise
    shares = counts / counts.sum(axis=1, keepdims=True)
    return float(estimate(np.array(found.value))), estimate(
        (shares * np.abs(gaps)).sum(axis=1)
    )


def _design_effect(
    top: TopLabel, bins: IntArray, n_bins: int, groups: IntArray
) -> float:
    """The ratio of the variance of the gaps to that of independent rows."""
    kept = bins < n_bins  # Quantile bins leave out the smallest confidence.
    apart, bins, groups = (top.confidence - top.correct)[kept], bins[kept], groups[kept]
    apart = apart - (np.bincount(bins, apart) / np.maximum(np.bincount(bins), 1))[bins]
    _, members = np.unique(bins * (groups.max() + 1) + groups, return_inverse=True)
    together = np.bincount(members, apart)
    independent = float(apart @ apart)
    return float(together @ together) / independent if independent > 0 else 1.0
