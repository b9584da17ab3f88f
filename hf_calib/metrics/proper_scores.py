"""Scores that reward honest probabilities, and accuracy: means over examples, no bins."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from hf_calib.metrics._inputs import check_probs_and_labels

_SMALLEST_PROBABILITY = np.finfo(np.float64).tiny


def negative_log_likelihood(probs: ArrayLike, labels: ArrayLike) -> float:
    r"""Mean negative log-likelihood (NLL) of the true class.

    The score that training minimises and temperature scaling is fitted by. Unlike the ECE it cannot be made
    small by a useless model; unlike `brier_score` it is unbounded and punishes confident errors hardest.

    $$-\frac{1}{N} \sum_i \log p_{i, y_i}$$

    Args:
        probs: (N, C) float, rows that sum to 1.
        labels: (N,) int in [0, C).

    Returns:
        Nats per example, at least 0.

    Raises:
        TypeError: if a dtype is wrong.
        ValueError: if probs are no probabilities or labels do not fit.

    Notes:
        A probability of exactly 0 for the true class counts as the smallest normal float64, 708.4 nats, so
        that one row does not turn the mean into infinity. float16 underflows to 0 below 6e-8: take the
        softmax in float32.

    >>> round(negative_log_likelihood([[0.5, 0.5], [0.25, 0.75]], [0, 0]), 6)
    1.039721
    """
    checked, targets = check_probs_and_labels(probs, labels)
    true_class = checked[np.arange(len(checked)), targets].astype(np.float64)
    return float(-np.log(np.maximum(true_class, _SMALLEST_PROBABILITY)).mean())


def brier_score(probs: ArrayLike, labels: ArrayLike) -> float:
    r"""Brier score: mean squared distance between the probabilities and the one-hot label.

    A bounded proper score, less moved by single confident errors than `negative_log_likelihood`. Squares are
    summed over the classes, so for two classes it is twice the positive-class form of scikit-learn.

    $$\frac{1}{N} \sum_i \sum_c (p_{i,c} - [c = y_i])^2$$

    Args:
        probs: (N, C) float, rows that sum to 1.
        labels: (N,) int in [0, C).

    Returns:
        A number in [0, 2], smaller is better.

    Raises:
        TypeError: if a dtype is wrong.
        ValueError: if probs are no probabilities or labels do not fit.

    References:
        Brier 1950.

    >>> round(brier_score([[0.5, 0.5], [0.25, 0.75]], [0, 1]), 6)
    0.3125
    """
    checked, targets = check_probs_and_labels(probs, labels)
    true_class = checked[np.arange(len(checked)), targets].astype(np.float64)
    squares = np.einsum("nc,nc->n", checked, checked, dtype=np.float64)
    return float((squares - 2 * true_class + 1).mean())


def accuracy(probs: ArrayLike, labels: ArrayLike) -> float:
    r"""Fraction of examples whose most probable class is the true one; the first of tied classes counts.

    To read beside every calibration number: a model can be calibrated and useless.

    $$\frac{1}{N} \sum_i [\arg\max_c p_{i,c} = y_i]$$

    Args:
        probs: (N, C) float, rows that sum to 1.
        labels: (N,) int in [0, C).

    Returns:
        A fraction in [0, 1].

    Raises:
        TypeError: if a dtype is wrong.
        ValueError: if probs are no probabilities or labels do not fit.

    >>> accuracy([[0.5, 0.5], [0.25, 0.75]], [0, 0])
    0.5
    """
    checked, targets = check_probs_and_labels(probs, labels)
    return float((checked.argmax(axis=1) == targets).mean())
