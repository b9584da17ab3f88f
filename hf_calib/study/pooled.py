"""The variance over seeds, pooled over the losses of a study."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from scipy.stats import bartlett

_SAME = 1e-12  # of the largest value; a residual below it is rounding


class Pooled(NamedTuple):
    """The variance of a paired difference of two losses, from all losses of a study.

    Args:
        variance: of the difference of two trainings with one seed.
        degrees: of freedom.
        p_equal: of Bartlett's test that the losses vary alike; None where a loss has one training.
    """

    variance: float
    degrees: int
    p_equal: float | None


def pooled_variance(values: Mapping[str, Mapping[int, float]]) -> Pooled | None:
    r"""Twice the residual variance of values = loss + seed: what remains is each training's own.

    $$\hat\sigma^2 = \frac{1}{(L - 1)(S - 1)} \sum_{l, s} (m_{ls} - \bar m_{l \cdot} - \bar m_{\cdot s} + \bar m)^2$$

    of L losses with S seeds each; with missing trainings the least squares of the same model.

    Args:
        values: loss -> seed -> a metric.

    Returns:
        None where no degree of freedom remains.

    Notes:
        Few seeds leave each loss's own variance all but unknown: its Student's t has S - 1 degrees of freedom, this
        one's (L - 1)(S - 1). Where the losses do not vary alike, it is too narrow for those that vary most. In
        simulated studies (`tests/study/test_pooled.py`) of 9 losses with 3 and 5 seeds and no difference between them,
        one was called different in 2 to 6% where their standard deviations were equal, or their logarithms had a
        standard deviation of .3, and in 8 to 16% where that was .6 and 1. Bartlett's test, on the deviations from loss
        and seed, called them unequal in 3 to 5% of the first, in 8 and 21% of the second, and in 27 to 89% of the
        others: with few seeds it misses what it should find.

    References:
        Bartlett 1937, "Properties of sufficiency and statistical tests".

    >>> values = {"a": {0: 1.0, 1: 2.0}, "b": {0: 1.5, 1: 2.7}}
    >>> found = pooled_variance(values)
    >>> round(found.variance, 6), found.degrees
    (0.02, 1)
    """
    seeds = sorted({seed for own in values.values() for seed in own})
    cells = [
        (i, seeds.index(seed), value) for i, own in enumerate(values.values()) for seed, value in own.items()
    ]
    if not cells:
        return None
    rows, columns = (np.array([cell[k] for cell in cells], dtype=np.intp) for k in (0, 1))
    y = np.array([value for _, _, value in cells])
    design = np.concatenate([np.eye(len(values))[rows], np.eye(len(seeds))[columns]], axis=1)
    fitted, _, rank, _ = np.linalg.lstsq(design, y - y.mean(), rcond=None)
    degrees = len(y) - int(rank)
    if degrees < 1:
        return None
    residuals = y - y.mean() - design @ fitted
    residuals[np.abs(residuals) <= _SAME * np.abs(y).max()] = 0.0
    groups = [residuals[rows == i] for i in range(len(values))]
    p_equal = None
    if len(groups) > 2 and all(len(group) > 1 and np.ptp(group) > 0 for group in groups):
        p_equal = float(bartlett(*groups).pvalue)
    return Pooled(2 * float(residuals @ residuals) / degrees, degrees, p_equal)
