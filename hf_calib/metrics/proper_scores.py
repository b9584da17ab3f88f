"""Proper scores, and accuracy: means over examples, no bins."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_calib.metrics._inputs import check_n_bins, check_probs_and_any_labels, check_weights, row_chunks
from hf_calib.metrics.binning import FloatArray, uniform_bins
from hf_calib.metrics.calibration import top_label

SMALLEST_PROBABILITY = np.finfo(np.float64).tiny


class BrierDecomposition(NamedTuple):
    """The two parts of the Brier score; their sum is the score."""

    calibration: float
    refinement: float


def negative_log_likelihood(
    probs: ArrayLike, labels: ArrayLike, *, sample_weight: ArrayLike | None = None
) -> float:
    r"""Mean negative log-likelihood (NLL) of the true class.

    The score that training minimises and temperature scaling is fitted by. Unlike the ECE it cannot be made
    small by a useless model; unlike `brier_score` it is unbounded and punishes confident errors hardest.

    $$-\frac{1}{N} \sum_i \log p_{i, y_i} \quad\text{or}\quad
    -\frac{1}{N} \sum_i \sum_c \eta_{i,c} \log p_{i,c}$$

    the second with soft labels $\eta$: the cross entropy, whose smallest value is the labels' own entropy.

    Args:
        probs: (N, C) float, rows that sum to 1.
        labels: (N,) int in [0, C), or soft labels (N, C) float.
        sample_weight: (N,) of at least 0, not all 0; None counts every example once.

    Returns:
        Nats per example, at least 0.

    Raises:
        TypeError: if a dtype is wrong.
        ValueError: if probs are not probabilities, or labels or weights do not fit.

    Notes:
        A probability of exactly 0 for the true class, or for a class with a share of a soft label, counts as
        the smallest normal float64, 708.4 nats, so that one row does not turn the mean into infinity.
        float16 underflows to 0 below 6e-8: take the softmax in float32.

    >>> round(negative_log_likelihood([[0.5, 0.5], [0.25, 0.75]], [0, 0]), 6)
    1.039721
    """
    return _mean(negative_logs(*check_probs_and_any_labels(probs, labels)), sample_weight)


def brier_score(probs: ArrayLike, labels: ArrayLike, *, sample_weight: ArrayLike | None = None) -> float:
    r"""Brier score: mean squared distance between the probabilities and the one-hot label.

    A bounded proper score, less moved by single confident errors than `negative_log_likelihood`. Squares are
    summed over the classes, so for two classes it is twice the positive-class form of scikit-learn.

    $$\frac{1}{N} \sum_i \sum_c (p_{i,c} - [c = y_i])^2$$

    With soft labels $\eta$ it is the mean of $\|p_i - \eta_i\|^2$, without the labels' own spread.

    Args:
        probs: (N, C) float, rows that sum to 1.
        labels: (N,) int in [0, C), or soft labels (N, C) float.
        sample_weight: (N,) of at least 0, not all 0; None counts every example once.

    Returns:
        A number in [0, 2], smaller is better.

    Raises:
        TypeError: if a dtype is wrong.
        ValueError: if probs are not probabilities, or labels or weights do not fit.

    References:
        Brier 1950.

    >>> round(brier_score([[0.5, 0.5], [0.25, 0.75]], [0, 1]), 6)
    0.3125
    """
    return _mean(squared_distances(*check_probs_and_any_labels(probs, labels)), sample_weight)


def root_brier_score(probs: ArrayLike, labels: ArrayLike, *, sample_weight: ArrayLike | None = None) -> float:
    r"""Square root of the Brier score, an upper bound of the calibration error of all classes.

    In the units of a probability, unlike `brier_score`. No binning can hide miscalibration from it: the l2
    calibration error of the whole vector is never larger, at any sample size, so it is the number to
    compare recalibrated versions of one model by.

    $$\mathrm{RBS} = \sqrt{\mathrm{BS}}$$

    Args:
        probs: (N, C) float, rows that sum to 1.
        labels: (N,) int in [0, C), or soft labels (N, C) float.
        sample_weight: (N,) of at least 0, not all 0; None counts every example once.

    Returns:
        A number in [0, sqrt(2)], smaller is better.

    Raises:
        TypeError: if a dtype is wrong.
        ValueError: if probs are not probabilities, or labels or weights do not fit.

    References:
        Gruber and Buettner 2022, "Better uncertainty calibration via proper scores for classification".

    >>> round(root_brier_score([[0.5, 0.5], [0.25, 0.75]], [0, 1]), 6)
    0.559017
    """
    return float(np.sqrt(brier_score(probs, labels, sample_weight=sample_weight)))


def brier_decomposition(
    probs: ArrayLike, labels: ArrayLike, *, n_bins: int = 15, sample_weight: ArrayLike | None = None
) -> BrierDecomposition:
    r"""Split the Brier score into calibration (what recalibration can remove) and refinement (what it cannot).

    Tells why one model's `brier_score` is better than another's. Examples are grouped by the equal-width bin
    of their confidence. Each row's classes are put in order of their probability, first the prediction, then
    the runner-up, and so on, so that over-confidence in one class is not cancelled by that in another.

    $$\mathrm{BS} = \underbrace{\sum_m \frac{n_m}{N} \|\bar p_m - \bar y_m\|^2}_{\text{calibration}}
    + \underbrace{\frac{1}{N} \sum_m \sum_{i \in m} \|(p_i - y_i) - (\bar p_m - \bar y_m)\|^2}_{
    \text{refinement}}$$

    with $\bar p_m$ and $\bar y_m$ the means of the ordered probabilities and labels of bin m.

    Args:
        probs: (N, C) float, rows that sum to 1.
        labels: (N,) int in [0, C), or soft labels (N, C) float.
        n_bins: M, at least 1.
        sample_weight: (N,) of at least 0, not all 0; None counts every example once.

    Returns:
        calibration and refinement, both at least 0; their sum is the Brier score, whatever the bins.

    Raises:
        TypeError: if a dtype is wrong.
        ValueError: if probs are not probabilities, or labels or weights do not fit.

    Notes:
        Where all probabilities of a bin are equal, the refinement is the classical one, the sum of
        $\bar y (1 - \bar y)$ over the classes. Otherwise that form leaves out how p and y vary within a bin,
        and the classical two terms do not add up to the score.

        With few examples in a bin, noise counts as calibration error; take fewer bins.

    References:
        Murphy 1973; DeGroot and Fienberg 1983; Stephenson, Coelho and Jolliffe 2008 (within-bin terms).

    >>> parts = brier_decomposition([[0.75, 0.25], [0.25, 0.75], [0.75, 0.25], [0.75, 0.25]], [0, 1, 0, 0])
    >>> (parts.calibration, parts.refinement)
    (0.125, 0.0)
    """
    n_bins = check_n_bins(n_bins)
    checked, targets = check_probs_and_any_labels(probs, labels)
    weights = check_weights(sample_weight, len(checked))
    counts, residuals = np.zeros(n_bins), np.zeros((n_bins, checked.shape[1]))
    for part in row_chunks(*checked.shape):
        ordered, difference = _in_order_of_probability(checked[part], targets[part])
        bins = uniform_bins(ordered[:, 0], n_bins)
        members = (bins == np.arange(n_bins)[:, None]).astype(np.float64)
        if weights is not None:
            members *= weights[part]
        counts += members.sum(axis=1)
        residuals += members @ difference
    squares = np.einsum("mc,mc->m", residuals, residuals) / np.where(counts > 0, counts, 1)
    calibration = float(squares.sum() / counts.sum())
    score = _mean(squared_distances(checked, targets), sample_weight)
    # Rounding alone can make it negative: it is a variance.
    return BrierDecomposition(calibration, max(score - calibration, 0.0))


def accuracy(probs: ArrayLike, labels: ArrayLike, *, sample_weight: ArrayLike | None = None) -> float:
    r"""Fraction of examples whose most probable class is the true one; the first of tied classes counts.

    To read beside every calibration number: a model can be calibrated and useless. With soft labels it is
    the mean share of the predicted class, the accuracy to expect if labels are drawn from them.

    $$\frac{1}{N} \sum_i [\arg\max_c p_{i,c} = y_i]$$

    Args:
        probs: (N, C) float, rows that sum to 1.
        labels: (N,) int in [0, C), or soft labels (N, C) float.
        sample_weight: (N,) of at least 0, not all 0; None counts every example once.

    Returns:
        A fraction in [0, 1].

    Raises:
        TypeError: if a dtype is wrong.
        ValueError: if probs are not probabilities, or labels or weights do not fit.

    >>> accuracy([[0.5, 0.5], [0.25, 0.75]], [0, 0])
    0.5
    """
    return _mean(top_label(*check_probs_and_any_labels(probs, labels))[1], sample_weight)


def _mean(values: FloatArray, sample_weight: ArrayLike | None) -> float:
    """The mean over the examples."""
    return float(np.average(values, weights=check_weights(sample_weight, len(values))))


def _safe_log(probs: NDArray[Any]) -> FloatArray:
    return np.log(np.maximum(probs.astype(np.float64, copy=False), SMALLEST_PROBABILITY))


def negative_logs(probs: NDArray[Any], labels: NDArray[Any]) -> FloatArray:
    """The negative log-likelihood (N,) of each row."""
    if labels.ndim == 1:
        return -_safe_log(probs[np.arange(len(probs)), labels])
    logs = np.empty(len(probs))
    for part in row_chunks(*probs.shape):
        logs[part] = np.einsum("nc,nc->n", labels[part], _safe_log(probs[part]))
    return -logs


def squared_distances(probs: NDArray[Any], labels: NDArray[Any]) -> FloatArray:
    """The squared Euclidean distance (N,) of each row from its label."""
    squares = np.empty(len(probs))
    for part in row_chunks(*probs.shape):
        rows = probs[part].astype(np.float64, copy=False)
        if labels.ndim == 2:
            difference = rows - labels[part]
            squares[part] = np.einsum("nc,nc->n", difference, difference)
        else:
            true_class = rows[np.arange(len(rows)), labels[part]]
            squares[part] = np.einsum("nc,nc->n", rows, rows) - 2 * true_class + 1
    return np.maximum(squares, 0)  # which rounding can miss where a row is its label


def _in_order_of_probability(probs: NDArray[Any], labels: NDArray[Any]) -> tuple[FloatArray, FloatArray]:
    """The rows, and the rows minus their labels, each with its classes from most to least probable."""
    rows = probs.astype(np.float64, copy=False)
    order = np.argsort(-rows, axis=1, kind="stable")
    ordered = np.take_along_axis(rows, order, axis=1)
    if labels.ndim == 2:
        return ordered, ordered - np.take_along_axis(labels, order, axis=1)
    return ordered, ordered - (order == labels[:, None])
