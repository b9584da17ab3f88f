"""The post-processing gap: how much a smooth recalibration of the top label could still improve the Brier score."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_calib._errors import check


def post_processing_gap(
    probs: ArrayLike, labels: ArrayLike, *, smooth: Literal["update", "map"] = "update"
) -> float:
    r"""The squared error of the top label minus its least value after a smooth recalibration, in [0, 1].

    What miscalibration costs, in the units of the score, as far as a smooth map of the confidence can remove it.

    $$\frac{1}{N} \sum_i (c_i - a_i)^2 - \min_\kappa \frac{1}{N} \sum_i (\kappa(c_i) - a_i)^2, \qquad
    \kappa(v) = v + \eta(v)$$

    with $c_i$ the confidence and $a_i$ whether it is right.

    Args:
        probs: (N, C) float, rows that sum to 1.
        labels: (N,) int in [0, C).
        smooth: what changes by no more than the confidence does: the "update" $\eta$, so that the map may stretch the
            confidences too, as in Blasiok et al.; or the "map" $\kappa$ itself, as the paper on focal calibration loss
            has it. Neither gap is always the larger one.

    Notes:
        The map is fitted to the examples it is judged by, so a small sample shows a gap by chance, as every plug-in
        calibration error does. The gap over updates lies between smCE^2 and 2 smCE (`smooth_calibration_error_dual`).

    References:
        Blasiok et al. 2023, When does optimizing a proper loss yield calibration? Focal calibration loss,
        Definition 2.3.

    >>> probs = [[0.9, 0.1], [0.9, 0.1], [0.3, 0.7]]
    >>> round(post_processing_gap(probs, [0, 1, 1]), 6)
    0.081111
    """
    check(
        smooth in ("update", "map"),
        "smooth to be update or map",
        repr(smooth),
        "see the docstring",
    )
    rows = np.asarray(probs, np.float64)
    order = np.argsort(rows.max(axis=1), kind="stable")
    confidences = rows.max(axis=1)[order]
    correct = (rows.argmax(axis=1) == np.asarray(labels))[order]
    start = confidences if smooth == "update" else np.zeros(len(rows))
    after = start + _nearest_lipschitz(correct - start, np.diff(confidences))
    return max(
        0.0, float(((confidences - correct) ** 2 - (after - correct) ** 2).mean())
    )


def _nearest_lipschitz(
    targets: NDArray[np.float64], distances: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The sequence (N,) nearest to the targets, in squares, whose neighbours differ by at most the distances."""
    # From left to right, `at` and `slope` are the knots of the derivative of the least sum so far as a function of the
    # last value: increasing, linear between the knots and with the same `steepness` beyond both ends. The next value
    # may differ by a distance: what is left of the root moves left by it, the rest right; between them the slope is 0.
    at, slope, steepness = targets[:1], np.zeros(1), 1.0
    best = np.empty(len(targets))  # of each value, were it the last one
    for i, target in enumerate(targets):
        if i:
            below, above = slope < 0, slope > 0
            root, reach = best[i - 1], distances[i - 1]
            at = np.concatenate(
                [at[below] - reach, [root - reach, root + reach], at[above] + reach]
            )
            slope = (
                np.concatenate([slope[below], [0.0, 0.0], slope[above]]) + at - target
            )
            steepness += 1
        if slope[0] > 0:
            best[i] = at[0] - slope[0] / steepness
        elif slope[-1] < 0:
            best[i] = at[-1] - slope[-1] / steepness
        else:
            best[i] = np.interp(0.0, slope, at)
    for i in range(len(targets) - 2, -1, -1):
        best[i] = np.clip(
            best[i], best[i + 1] - distances[i], best[i + 1] + distances[i]
        )
    return best
