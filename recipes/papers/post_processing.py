"""The post-processing gap: how much a smooth recalibration of the top label could still improve the Brier score."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_calib._errors import check

FloatArray = NDArray[np.float64]


def post_processing_gap(
    probs: ArrayLike, labels: ArrayLike, *, smooth: Literal["update", "map"] = "update"
) -> float:
    r"""The squared error of the top label minus its least value after a smooth recalibration, in [0, 1].

    What miscalibration costs, in the units of the score, as far as a smooth map of the confidence
    can remove it.

    $$\frac{1}{N} \sum_i (c_i - a_i)^2 - \min_\kappa \frac{1}{N} \sum_i (\kappa(c_i) - a_i)^2, \qquad
    \kappa(v) = v + \eta(v)$$

    with $c_i$ the confidence and $a_i$ whether it is right.

    Args:
        probs: (N, C) float, rows that sum to 1.
        labels: (N,) int in [0, C).
        smooth: what changes by no more than the confidence does: the "update" $\eta$, so that the
            map may stretch the confidences too, as in Blasiok et al.; or the "map" $\kappa$ itself,
            as the paper on focal calibration loss has it. Neither gap is always the larger one.

    Notes:
        The map is fitted to the examples it is judged by, so a small sample shows a gap by chance,
        as every plug-in calibration error does. The gap over updates lies between smCE^2 and 2 smCE
        (`smooth_calibration_error_dual`).

    References:
        Blasiok et al. 2023, When does optimizing a proper loss yield calibration? Focal calibration
        loss, Definition 2.3.

    >>> probs = [[0.9, 0.1], [0.9, 0.1], [0.3, 0.7]]
    >>> round(post_processing_gap(probs, [0, 1, 1]), 6)
    0.081111
    """
    way_out = "see the docstring"
    check(smooth in ("update", "map"), "smooth to be update or map", smooth, way_out)
    rows = np.asarray(probs, np.float64)
    top = rows.max(axis=1)
    right = rows.argmax(axis=1) == np.asarray(labels)
    order = np.argsort(top, kind="stable")
    confidences = top[order]
    correct = right[order].astype(np.float64)
    # An update is smooth as what it adds to the confidence, a map as what it adds to 0.
    start = confidences if smooth == "update" else np.zeros(len(rows))
    after = start + _nearest_lipschitz(correct - start, np.diff(confidences))
    gain = (confidences - correct) ** 2 - (after - correct) ** 2
    return max(0.0, float(gain.mean()))


def _nearest_lipschitz(targets: FloatArray, distances: FloatArray) -> FloatArray:
    """The sequence (N,) nearest to the targets, in squares, whose neighbours differ by at most the distances."""
    # From left to right, the least sum of squares so far is a function of the last value. Its
    # derivative is increasing and linear between knots, `slope` at `at`. Beyond both ends it has
    # the steepness of its i + 1 squares, in halves. `best[i]` is its root: the last value, were it
    # the last one.
    best = np.empty(len(targets))
    at = targets[:1]
    slope = np.zeros(1)
    for i, target in enumerate(targets):
        if i > 0:
            at, slope = _spread(at, slope, best[i - 1], distances[i - 1])
            slope = slope + at - target
        best[i] = _root(at, slope, steepness=i + 1)
    for i in range(len(targets) - 2, -1, -1):
        lowest = best[i + 1] - distances[i]
        highest = best[i + 1] + distances[i]
        best[i] = np.clip(best[i], lowest, highest)
    return best


def _spread(
    at: FloatArray, slope: FloatArray, root: float, reach: float
) -> tuple[FloatArray, FloatArray]:
    """The derivative where the next value may differ by `reach`.

    What is left of the root moves left by it, the rest right; between them the slope is 0.
    """
    below = slope < 0
    above = slope > 0
    middle = [root - reach, root + reach]
    knots = np.concatenate([at[below] - reach, middle, at[above] + reach])
    return knots, np.concatenate([slope[below], [0.0, 0.0], slope[above]])


def _root(at: FloatArray, slope: FloatArray, steepness: int) -> float:
    if slope[0] > 0:
        return float(at[0] - slope[0] / steepness)
    if slope[-1] < 0:
        return float(at[-1] - slope[-1] / steepness)
    return float(np.interp(0.0, slope, at))
