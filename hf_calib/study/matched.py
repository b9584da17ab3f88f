"""Differences at matched accuracy: what is left of one when both losses were as often right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from scipy.stats import t

from hf_calib.study.results import CONFIDENCE_LEVEL, Estimate

_SAME = 1e-20  # squared; accuracies this near are equal but for rounding

Cells = Mapping[str, Mapping[int, tuple[float, float]]]  # loss -> seed -> accuracy, metric


class Slope(NamedTuple):
    """How a metric goes with the accuracy, from training to training of one loss.

    Args:
        value: change of the metric by 1 of accuracy.
        error: its standard error.
        degrees: of freedom.
    """

    value: float
    error: float
    degrees: int


def slope_of(cells: Cells) -> Slope | None:
    r"""The common slope of an analysis of covariance, metric = loss + slope x accuracy, over all trainings.

    None where no loss has trainings of different accuracy, or too few for an error.

    >>> cells = {"a": {0: (0.8, 0.5), 1: (0.9, 0.3)}, "b": {0: (0.7, 0.6), 1: (0.8, 0.4), 2: (0.75, 0.52)}}
    >>> slope = slope_of(cells)
    >>> round(slope.value, 3), slope.degrees
    (-2.0, 2)
    """
    groups = [np.array(list(own.values())) for own in cells.values() if own]
    centred = np.concatenate([own - own.mean(axis=0) for own in groups]) if groups else np.empty((0, 2))
    accuracy, metric = centred.T
    degrees = len(centred) - len(groups) - 1
    spread = float(accuracy @ accuracy)
    if degrees < 1 or spread <= _SAME * len(centred):
        return None
    value = float(accuracy @ metric) / spread
    residual = metric - value * accuracy
    return Slope(value, float(np.sqrt(residual @ residual / degrees / spread)), degrees)


def at_matched_accuracy(difference: Estimate, of_accuracy: float, slope: Slope) -> Estimate:
    """A paired difference, less what the slope makes of the difference in accuracy.

    Args:
        difference: of the metric, with its interval.
        of_accuracy: the difference in accuracy.
        slope: of the metric.

    Returns:
        The rest; its interval has the reach of the difference's and of the slope's, added in squares.
    """
    value = difference.value - slope.value * of_accuracy
    assert difference.low is not None
    assert difference.high is not None
    of_slope = t.isf((1 - CONFIDENCE_LEVEL) / 2, slope.degrees) * slope.error * of_accuracy
    reach = float(np.hypot((difference.high - difference.low) / 2, of_slope))
    return Estimate(value, value - reach, value + reach, difference.n_seeds)
