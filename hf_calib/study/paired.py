"""Two-level intervals and tests: means over seeds, on test rows that all trainings share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtri, stdtrit

from hf_calib.metrics.checks import FloatArray
from hf_calib.study.pooled import Pooled
from hf_calib.study.results import CONFIDENCE_LEVEL

# Metrics nearer than this are the same: what separates them is where a solver stopped.
SAME = 1e-6
_SMALLEST_P = 1e-12  # normal tails further out say nothing


class TwoLevel(NamedTuple):
    """A mean over seeds with the two parts of its variance.

    Args:
        value: the mean.
        row_variance: from the test rows, as far as all seeds move together.
        seed_variance: from the seeds, with the noise of the test rows in each of them.
        variance_of_rows_alone: of the mean over these very seeds.
        n_seeds: trainings.
        pooled_degrees: of freedom of the seeds' variance, where it is of more than these seeds; else None.
    """

    value: float
    row_variance: float
    seed_variance: float
    variance_of_rows_alone: float
    n_seeds: int
    pooled_degrees: int | None = None

    @property
    def degrees(self) -> int:
        """Of freedom of the seeds' variance."""
        return self.n_seeds - 1 if self.pooled_degrees is None else self.pooled_degrees

    def interval(self) -> tuple[float, float]:
        """The ends of the 95% interval."""
        reach = np.sqrt(self.square_of_reach((1 - CONFIDENCE_LEVEL) / 2))
        return float(self.value - reach), float(self.value + reach)

    def p_value(self) -> float:
        """Two-sided, of the mean being 0: the level at which the interval just reaches 0."""
        if abs(self.value) <= SAME:
            return 1.0

        def beyond(log_p: float) -> float:
            return float(self.square_of_reach(np.exp(log_p) / 2)) - self.value**2

        smallest = np.log(_SMALLEST_P)
        return _SMALLEST_P if beyond(smallest) <= 0 else float(np.exp(brentq(beyond, smallest, 0.0)))

    def square_of_reach(self, tail: float) -> FloatArray:
        """How far an interval with this share on either side reaches, squared; of several seed variances at once."""
        of_rows_alone = ndtri(tail) ** 2 * self.variance_of_rows_alone
        if self.n_seeds == 1:
            return np.asarray(of_rows_alone)
        of_both = ndtri(tail) ** 2 * self.row_variance + stdtrit(self.degrees, tail) ** 2 * self.seed_variance
        return np.maximum(of_both, of_rows_alone)


def two_level(values: FloatArray, draws: FloatArray, pooled: Pooled | None = None) -> TwoLevel:
    r"""How far a mean over seeds may be from that of many more trainings and test rows.

    For a metric, or for its paired differences, of S trainings on the same N test rows. A value is taken as

    $$m_s = \mu + b + a_s + c_s$$

    with b what a choice of test rows does to all trainings, $c_s$ what it does to training s alone, and $a_s$ the
    training itself. On the same resampled rows of all trainings (R of them) b and c are told apart: the variance of
    the mean over seeds is $\mathrm{Var}\,b + \mathrm{Var}\,c / S$, that within a resample $\mathrm{Var}\,c$. The
    variance over seeds of the values, $s^2$, has a and c in it. So the interval is

    $$\bar m \pm \sqrt{z^2 \max(0, \mathrm{Var}\,b) + t_{S-1}^2 s^2 / S}$$

    in which the noise of the rows counts once. Seeds that agree by chance do not make it narrower than that of the rows
    alone, $z \sqrt{\mathrm{Var}\,b + \mathrm{Var}\,c / S}$, which it is with one seed: it then says nothing of another
    training.

    Args:
        values: (S,) of the trainings.
        draws: (R, S) of the trainings on R resamples of the test rows.
        pooled: a variance over seeds from other losses, too, in place of $s^2$; with its degrees of freedom.

    Notes:
        Quantiles of a bootstrap over 2 to 5 seeds are far too narrow: of 3 seeds one in nine resamples is one
        training three times, and their variance is short by a factor (S - 1) / S. Student's t is exact where rows
        add nothing and trainings are about normal. Adding the squares of the reaches (Howe 1974) errs to the safe side
        in between: with 3 seeds, and as much variance of the rows as of the seeds, 2.5% false alarms instead of 5%.
        Satterthwaite's degrees of freedom would give up to 7.8%, and at a level of 0.5%, as Holm's correction asks
        for, up to five times the level.

    References:
        Owen 2007, "The pigeonhole bootstrap" (two crossed factors); Cameron, Gelbach and Miller 2011, "Robust
        inference with multiway clustering" (what counts twice is taken off once); Howe 1974, "Approximate confidence
        limits on the mean of X + Y where X and Y are two tabled independent random variables" (the sum of squares).
    """
    n_seeds = len(values)
    noise = draws - draws.mean(axis=0)
    of_mean = float(noise.mean(axis=1).var(ddof=1))
    value = float(np.mean(values))
    if n_seeds == 1:
        return TwoLevel(value, of_mean, 0.0, of_mean, 1)
    within = float(noise.var(axis=1, ddof=1).mean())
    between = float(np.var(values, ddof=1)) if pooled is None else pooled.variance
    degrees = None if pooled is None else pooled.degrees
    of_rows = max(0.0, of_mean - within / n_seeds)
    return TwoLevel(value, of_rows, between / n_seeds, of_mean, n_seeds, degrees)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values corrected for their number by Holm's step-down method, in the order given.

    References:
        Holm 1979, "A simple sequentially rejective multiple test procedure".

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p, kind="stable")
    corrected = np.empty(len(p))
    corrected[order] = np.minimum(1, np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)))
    return [float(each) for each in corrected]
