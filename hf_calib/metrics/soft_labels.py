"""Metrics that need label distributions: how far each predicted distribution is from the true one."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_calib._errors import InputValueError, expected
from hf_calib.metrics.checks import FloatArray, check_probs_and_soft_labels, row_chunks


def true_calibration_error(probs: ArrayLike, labels: ArrayLike) -> float:
    r"""True calibration error: the mean distance of the predicted distribution from the true one.

    What the binned errors stand in for when only one label per example is known. It needs the true class
    probabilities $\eta$: those of a known generator, or the shares of many annotators. Unlike
    `expected_calibration_error` it judges each example, so nothing cancels; it is 0 only for a perfect model.

    $$\frac{1}{N} \sum_i \|p_i - \eta_i\|_2$$

    Args:
        probs: (N, C) float, rows that sum to 1.
        labels: (N, C) float, rows that sum to 1: the distribution of each example's label.

    Returns:
        A number in [0, sqrt(2)].

    Raises:
        TypeError: if a dtype is wrong.
        ValueError: if either are not distributions, or their shapes differ.

    Notes:
        Shares of n annotators scatter around the truth by about $\sqrt{(1 - \|\eta\|^2) / n}$, and that is
        part of the value.

    References:
        Lin et al. 2025, "Uncertainty weighted gradients for model calibration", Eq. 1.

    >>> true_calibration_error([[0.5, 0.5], [1.0, 0.0]], [[0.8, 0.2], [1.0, 0.0]]).__round__(6)
    0.212132
    """
    return float(label_distances(*check_probs_and_soft_labels(probs, labels)).mean())


def uncertainty_correlation(
    probs: ArrayLike, labels: ArrayLike, *, gamma: float = 2.0, norm: float = 2.0
) -> float:
    r"""Correlation of the uncertainty weight that a loss gives an example with its true calibration error.

    To choose `gamma` and `norm` of the ``bsce`` losses where label distributions are known: a weight is good
    as far as it is large where the model is wrong. `true_calibration_error` is the mean of one of the two.

    $$\mathrm{corr}_i\big(\|p_i - \eta_i\|_2,\; u_i\big), \qquad
    u_i = \mathbb{E}_{y \sim \eta_i} \|p_i - e_y\|_\beta^\gamma$$

    Args:
        probs: (N, C) float, rows that sum to 1.
        labels: (N, C) float, rows that sum to 1: the distribution of each example's label.
        gamma: the exponent, above 0.
        norm: the order of the norm, beta, at least 1.

    Returns:
        Pearson's correlation, in [-1, 1]; NaN where either does not vary, as for one example.

    Raises:
        TypeError: if a dtype is wrong.
        ValueError: if either are not distributions, their shapes differ, or an option is out of range.

    Notes:
        The weight that training sees depends on the one label it has; its mean over the label's distribution
        stands for it here (as in the paper's Eq. 12), so that no random draw moves the value. With
        gamma=1, norm=1 the weight is twice that of the focal loss with gamma 1.

    References:
        Lin et al. 2025, "Uncertainty weighted gradients for model calibration", section 4.3 and Eq. 11.

    >>> probs, labels = [[0.5, 0.5], [0.9, 0.1], [0.7, 0.3]], [[0.9, 0.1], [1.0, 0.0], [0.8, 0.2]]
    >>> round(uncertainty_correlation(probs, labels), 6)
    0.755929
    """
    for name, value, allowed, requirement in (
        ("gamma", gamma, 0 < gamma < np.inf, "be a finite number above 0"),
        ("norm", norm, 1 <= norm < np.inf, "be a finite number, at least 1"),
    ):
        if not allowed:
            raise InputValueError(expected(name, requirement, value, "the papers use gamma=2, norm=2"))
    checked, targets = check_probs_and_soft_labels(probs, labels)
    error = label_distances(checked, targets)
    weight = np.empty(len(checked))
    for part in row_chunks(*checked.shape):
        weight[part] = _mean_weights(checked[part], targets[part], gamma, norm)
    return _pearson(error, weight)


def label_distances(probs: NDArray[Any], labels: FloatArray) -> FloatArray:
    """The Euclidean distance (N,) of each row from its label."""
    distances = np.empty(len(probs))
    for part in row_chunks(*probs.shape):
        difference = probs[part].astype(np.float64, copy=False) - labels[part]
        distances[part] = np.sqrt(np.einsum("nc,nc->n", difference, difference))
    return distances


def _mean_weights(probs: NDArray[Any], labels: FloatArray, gamma: float, norm: float) -> FloatArray:
    """The mean (N,) over the label's distribution of ||p - e_y||_norm^gamma."""
    rows = np.abs(probs.astype(np.float64, copy=False))
    powers = rows**norm
    each, top = np.arange(len(rows)), rows.argmax(axis=1)
    # The sum over the classes other than y, in which the largest is never taken from a sum it dominates.
    largest, powers[each, top] = powers[each, top], 0
    others = powers.sum(axis=1, keepdims=True) - powers + largest[:, None]
    others[each, top] = powers.sum(axis=1)
    weights = (others + np.abs(1 - rows) ** norm) ** (gamma / norm)
    return np.einsum("nc,nc->n", labels, weights)


def _pearson(first: FloatArray, second: FloatArray) -> float:
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return float("nan")
    first, second = first - first.mean(), second - second.mean()
    correlation = first @ second / np.sqrt((first @ first) * (second @ second))
    return float(np.clip(correlation, -1, 1))
