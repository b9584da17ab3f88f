"""Smooth calibration error as a supremum over smooth witnesses, exactly.

On a line the linear program of the definition is, dually, a monotone fit to the running sum of the residuals:
a heap solves it in O(N log N).
"""

from __future__ import annotations

from heapq import heappop, heappush, heapreplace

import numpy as np
from numpy.typing import ArrayLike

from hf_calib.metrics.checks import FloatArray, check_probs_and_any_labels
from hf_calib.metrics.sums import top_label


def smooth_calibration_error_dual(probs: ArrayLike, labels: ArrayLike) -> float:
    r"""Smooth calibration error (smCE) of the top label, by its definition as a supremum.

    The error that the theory speaks of: at least half of the lower distance to calibration and at most all of
    it, and a bound on what a smooth recalibration can save (`post_processing_gap`).
    `smooth_calibration_error` (smECE) is the kernel estimate that the papers' tables report, and has a
    reliability curve; this one has no bandwidth.

    $$\mathrm{smCE} = \sup_\eta \frac{1}{N} \sum_i \eta(c_i) \, (a_i - c_i)$$

    with $c_i$ the confidence, $a_i$ whether it is right, and $\eta$ any 1-Lipschitz function from [0, 1] to
    [-1, 1].

    Args:
        probs: (N, C) float, rows that sum to 1. For two classes too it is the top label that counts.
        labels: (N,) int in [0, C), or (N, C) label distributions, of which the share of the top label counts.

    Returns:
        A fraction in [0, 1], no smaller than the difference between accuracy and mean confidence, and no
        larger than the expected calibration error with a bin for each confidence.

    Raises:
        TypeError: if a dtype is wrong.
        ValueError: if probs are not probabilities, or labels do not fit.

    Notes:
        Exact up to rounding; O(N log N). It is a plug-in: a small sample has an error by chance.
        The Brier score's post-processing gap lies between smCE^2 and 2 smCE.

    References:
        Blasiok et al. 2023, A unifying theory of distance from calibration; Focal calibration loss,
        Definition 2.2 (Equation 7).

    >>> probs = [[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]]
    >>> round(smooth_calibration_error_dual(probs, [0, 1, 1]), 4)
    0.1467
    """
    confidences, correct = top_label(*check_probs_and_any_labels(probs, labels))
    return top_label_smooth_error_dual(confidences, correct)


def top_label_smooth_error_dual(confidences: FloatArray, correct: FloatArray) -> float:
    """The smCE of confidences (N,) and correctness (N,) that were reduced from probabilities before."""
    # A function on the sorted confidences that is 1-Lipschitz between neighbours is so between all pairs, by the
    # triangle inequality, and extends to [0, 1] by interpolation. So the supremum is a linear program over the
    # N values of the witness: |w_{i+1} - w_i| <= d_i = c_{i+1} - c_i and |w_i| <= 1. With S_i the sum of the
    # first i residuals, its dual is
    #     min  sum_i d_i |S_i - P_i|  +  sum_i |p_i|,    P_i = p_1 + ... + p_i,    P_N = S_N:
    # each residual is cancelled where it is, at a price of 1, or carried along the line at a price of d.
    # No two p differ in sign: to cancel both costs 2, to carry one to the other costs at most 1, the
    # length of [0, 1]. Hence their prices add up to |S_N|, P rises from 0 to S_N (or falls, which the sign below
    # takes care of), and what remains is the monotone fit to S with weights d, whose bounds merely clip the fit
    # without them. Tied confidences have d = 0, so that their order does not matter.
    order = np.argsort(confidences)
    distances = np.diff(confidences[order])
    running = np.cumsum((correct - confidences)[order]) / len(order)
    surplus = abs(running[-1])
    sums = running[:-1][distances > 0] * (1 if running[-1] >= 0 else -1)
    distances = distances[distances > 0]
    fitted = _monotone_fit(sums, distances).clip(0, surplus)
    return float(surplus + distances @ np.abs(sums - fitted))


def _monotone_fit(values: FloatArray, weights: FloatArray) -> FloatArray:
    """The nondecreasing (N,) with the least weighted sum of absolute differences from the values (N,).

    The least sum over the fits so far whose last value is at most x is convex in x, and constant from some x on:
    `heap` holds the points where its slope changes, largest first, and by how much. A new value adds its own
    slopes, -weight and +weight, and what rises is cut off.
    """
    heap: list[tuple[float, float]] = []
    best_last = np.empty_like(values)
    for i, (value, weight) in enumerate(zip(values.tolist(), weights.tolist(), strict=True)):
        heappush(heap, (-value, 2 * weight))
        excess = weight
        while heap[0][1] <= excess:
            excess -= heappop(heap)[1]
        heapreplace(heap, (heap[0][0], heap[0][1] - excess))
        best_last[i] = -heap[0][0]
    # From the last one backwards: each the best that does not exceed the next.
    return np.minimum.accumulate(best_last[::-1])[::-1]
