"""Selective prediction: answering where the confidence is high."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from hf_calib._errors import InputValueError, expected
from hf_calib.metrics.checks import FloatArray, as_floats, check_probs_and_any_labels
from hf_calib.metrics.sums import top_label


class RiskCoverage(NamedTuple):
    """The error rate (N,) among the most confident share (N,) of the examples."""

    coverage: FloatArray
    risk: FloatArray


def area_under_risk_coverage(probs: ArrayLike, labels: ArrayLike) -> float:
    r"""Area under the risk-coverage curve (AURC): the error rate, averaged over how much is answered.

    For a classifier that may abstain. It judges the ranking by confidence and the accuracy together, and does
    not change when confidences are recalibrated without changing their order; `expected_calibration_error`
    is the opposite.

    $$\frac{1}{N} \sum_{k=1}^{N} \frac{\text{errors among the } k \text{ most confident}}{k}$$

    Args:
        probs: (N, C) float, rows that sum to 1.
        labels: (N,) int in [0, C), or soft labels (N, C) float.

    Returns:
        A fraction in [0, 1], smaller is better; 0 only without any error.

    Raises:
        TypeError: if a dtype is wrong.
        ValueError: if probs are not probabilities or labels do not fit.

    Notes:
        Among equal confidences the errors count as evenly spread, which is their mean over all orders. So the
        order of the examples never matters; if all confidences are equal, the value is the error rate. Confidences
        count as equal if they are so in float32, as `AbstainRule` decides on them.

    References:
        Geifman and El-Yaniv 2017; Geifman, Uziel and El-Yaniv 2019.

    >>> area_under_risk_coverage([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.4, 0.6]], [0, 0, 0, 1])
    0.14583333333333331
    """
    return mean_risk(*top_label(*check_probs_and_any_labels(probs, labels)))


def mean_risk(confidences: FloatArray, correct: FloatArray) -> float:
    """The AURC of confidences (N,) and correctness (N,) that were reduced from probabilities before."""
    return float(risk_coverage_curve(confidences.astype(np.float32), correct).risk.mean())


def risk_coverage_curve(confidences: ArrayLike, correct: ArrayLike) -> RiskCoverage:
    r"""The error rate among the k most confident predictions, for every k.

    To draw, and to choose the confidence below which to abstain; `area_under_risk_coverage` is its mean.

    Args:
        confidences: (N,) float, of any range: only their order counts.
        correct: (N,) of 0 and 1, or bool; fractions for soft labels.

    Returns:
        coverage (N,), k / N, and risk (N,), both fractions. Equal confidences share their errors evenly.

    Raises:
        ValueError: if the two are not one-dimensional, finite, of one length and not empty.

    >>> curve = risk_coverage_curve([0.9, 0.8, 0.7, 0.6], [1, 1, 0, 1])
    >>> curve.risk.round(3)
    array([0.   , 0.   , 0.333, 0.25 ])
    >>> risk_coverage_curve([0.9, 0.9], [0, 1]).risk
    array([0.5, 0.5])
    """
    confidence, right = _check_curve(confidences, correct)
    order = np.argsort(-confidence, kind="stable")
    confidence, wrong = confidence[order], 1 - right[order]
    starts = np.flatnonzero(np.diff(confidence, prepend=np.inf))
    sizes = np.diff(starts, append=len(wrong))
    evenly_spread = np.repeat(np.add.reduceat(wrong, starts) / sizes, sizes)
    answered = np.arange(1, len(wrong) + 1)
    return RiskCoverage(answered / len(wrong), np.cumsum(evenly_spread) / answered)


def _check_curve(confidences: ArrayLike, correct: ArrayLike) -> tuple[FloatArray, FloatArray]:
    confidence = as_floats("confidences", confidences)
    right = as_floats("correct", correct)
    if confidence.ndim != 1 or confidence.shape != right.shape or not len(confidence):
        got = f"shapes {confidence.shape} and {right.shape}"
        way_out = "pass one confidence and one 0 or 1 per example"
        raise InputValueError(
            expected("confidences and correct", "have one shape (N,), N >= 1", got, way_out)
        )
    for name, values in (("confidences", confidence), ("correct", right)):
        n_bad = int((~np.isfinite(values)).sum())
        if n_bad:
            got = f"{n_bad} NaN or infinite values of {len(values)}"
            raise InputValueError(expected(name, "be finite", got, "look for overflow in the model's logits"))
    return confidence, right
