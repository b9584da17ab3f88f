"""What of a calibration error is over-confidence, and what under-confidence: a lower bound of each."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import isotonic_regression

from hf_calib._errors import InputValueError, expected
from hf_calib.metrics.checks import FloatArray, check_probs_and_labels, check_seed
from hf_calib.metrics.sums import top_label

_FOLDS = 5


class ConfidenceErrors(NamedTuple):
    """The top label's calibration error in its two directions.

    Args:
        over: of rows that are too sure; their part of E|confidence - accuracy|.
        under: of rows that are not sure enough.
        total: over + under, a lower bound of the calibration error of the top label, on average.
    """

    over: float
    under: float
    total: float


def confidence_errors(
    probs: ArrayLike, labels: ArrayLike, *, n_folds: int = _FOLDS, seed: int = 0
) -> ConfidenceErrors:
    r"""Split the calibration error of the top label into over- and under-confidence, each a lower bound.

    An ECE says how far confidences are from accuracies, and not on which side. Here a recalibration g, an isotonic
    regression on the other folds, says for each row on which side its confidence r is; what the row's own outcome y
    then says about it is unbiased:

    $$\widehat{\text{over}} = \frac{1}{N} \sum_i [g(r_i) < r_i]\,(r_i - y_i), \qquad
      \widehat{\text{under}} = \frac{1}{N} \sum_i [g(r_i) > r_i]\,(y_i - r_i)$$

    For whatever g the expectation of the sum is at most the calibration error $E\,|r - P(y = 1 \mid r)|$, and equal to
    it where g is on the right side everywhere: noise cannot add to it, as it does to an ECE.

    Args:
        probs: (N, C) float, rows that sum to 1.
        labels: (N,) int in [0, C).
        n_folds: K, from 2 to N.
        seed: of the folds.

    Returns:
        Fractions. Each may be negative where there is nothing to find: a bound that stopped at 0 would be too large on
        average.

    Raises:
        TypeError: if a dtype is wrong.
        ValueError: if probs are not probabilities, labels do not fit, or there are fewer rows than folds.

    Notes:
        The paper's own code takes a boosted classifier for g, and calls a confidence below .5 over-confident where it
        is too low: that of the other of two classes. Here over-confident is what states more than is right.

    References:
        "A variational estimator for Lp calibration errors", arXiv 2602.24230; for p = 1 and the top label.

    >>> rng = np.random.default_rng(0)
    >>> top = rng.uniform(0.5, 1.0, 4000)
    >>> labels = np.where(rng.random(4000) < top - 0.1, 0, 1)
    >>> found = confidence_errors(np.stack([top, 1 - top], axis=1), labels)
    >>> round(found.over, 2), abs(round(found.under, 2))
    (0.1, 0.0)
    """
    check_seed(seed)
    confidences, correct = top_label(*check_probs_and_labels(probs, labels))
    n_rows = len(confidences)
    if not 2 <= n_folds <= n_rows:
        got, way_out = f"{n_folds} for {n_rows} rows", "take 5, or more rows"
        raise InputValueError(expected("n_folds", "be from 2 to the number of rows", got, way_out))
    fold = np.random.default_rng(seed).permutation(n_rows) % n_folds
    recalibrated = np.empty(n_rows)
    for k in range(n_folds):
        own = fold == k
        recalibrated[own] = _isotonic(confidences[~own], correct[~own], confidences[own])
    return errors_by_side(confidences, correct, recalibrated)


def errors_by_side(
    confidences: FloatArray, correct: FloatArray, recalibrated: FloatArray
) -> ConfidenceErrors:
    """The errors of confidences (N,), by which side of them a recalibration (N,) from other rows is on."""
    gaps = confidences - correct
    over = float(gaps[recalibrated < confidences].sum() / len(gaps))
    under = float(-gaps[recalibrated > confidences].sum() / len(gaps))
    return ConfidenceErrors(over, under, over + under)


def _isotonic(confidences: FloatArray, correct: FloatArray, at: FloatArray) -> FloatArray:
    """The isotonic regression of outcomes on confidences, linear between them and constant beyond."""
    values, places = np.unique(confidences, return_inverse=True)
    rows = np.bincount(places).astype(np.float64)
    fitted = isotonic_regression(np.bincount(places, correct) / rows, weights=rows).x
    return np.interp(at, values, fitted)
