"""The inverse link: the posterior from the probabilities that minimise a known loss."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_softmax, logsumexp, softmax
from sklearn.isotonic import isotonic_regression

from hf_calib._errors import check
from hf_calib.losses import CalibrationLoss

FloatArray = NDArray[np.float64]

# Losses whose gradients determine the posterior: functions of the label's p alone, or of all p.
_OF_P = (
    "cross_entropy",
    "focal",
    "focal_gra",
    "inverse_focal",
    "flsd",
    "flsd_gra",
    "adafocal",
    "calfocal",
)
_OF_OTHERS = (
    "brier",
    "bsce",
    "bsce_gra",
    "focal_calibration",
    "label_smoothing",
    "entropy_regularized",
)
INVERTIBLE = (*_OF_P, "dual_focal", "dual_focal_gra", "ada_dual_focal", *_OF_OTHERS)

# The least logit below the largest at which 1 - p is not lost to rounding.
_FURTHEST = -33.0
_ROUNDING = 1e-12
_TRACE = 1e-9  # The share of p that keeps the order of tied classes.
_GRADIENTS = 2**21  # The most in memory at the same time.


class InverseLink:
    r"""Undo what a known training loss does to the probabilities (Charoenphakdee et al. 2021); needs no data.

    $$\hat\eta:\quad \sum_y \hat\eta_y \frac{\partial L(z, y)}{\partial z} = 0, \qquad
      \text{for a loss } \varphi(p_y):\ \hat\eta_k \propto \frac{1}{-\varphi'(p_k)}$$

    Args:
        loss: a loss of `INVERTIBLE` in its state after training. Class weights are divided out.

    It assumes that the network minimises the expected loss, so it harms a network that has over-fitted. Losses that
    depend on more than the label's p need C^3 operations per row. Classes whose ranks by η and p differ share their η.

    >>> from hf_calib.losses import make_loss
    >>> InverseLink(make_loss("focal", gamma=3)).predict_proba(np.log([[0.558, 0.442]])).round(2)
    array([[0.7, 0.3]])
    """

    def __init__(self, loss: CalibrationLoss) -> None:
        _check_loss(loss)
        self.loss = loss

    def predict_proba(self, logits: ArrayLike) -> FloatArray:
        """Return the posterior, float64, of the shape of the logits (..., C)."""
        return softmax(self.transform(logits), axis=-1)

    @np.errstate(divide="ignore")  # The log of 0 is -inf.
    def transform(self, logits: ArrayLike) -> FloatArray:
        """Return the log of the posterior in nats, float64: logits for another calibrator."""
        checked = np.asarray(logits, np.float64)
        rows = checked.reshape(-1, checked.shape[-1])
        self._check_logits(rows)
        loss: Any = deepcopy(self.loss).cpu()
        log_weights = np.zeros(rows.shape[1])
        # Label smoothing has the weights before each log p: p is w times the smoothed posterior. Other losses depend
        # on the posterior times the weights.
        weights_first = loss.name == "label_smoothing"
        if loss.class_weights is not None:
            log_weights = np.log(loss.class_weights.double().numpy())
            loss.class_weights = loss.class_weights.new_ones(len(log_weights))
        if not weights_first:
            loss.class_weights = None
        result = np.empty(rows.shape)
        is_of_p = loss.name in _OF_P
        numbers_of_row = rows.shape[1] if is_of_p else rows.shape[1] ** 2
        step = max(1, _GRADIENTS // numbers_of_row)
        for first in range(0, len(rows), step):
            part = slice(first, first + step)
            block = rows[part]
            if weights_first:
                block = block - log_weights
            # Descending, so that masked classes are last.
            order = np.argsort(-block, axis=1, kind="stable")
            z = np.take_along_axis(block, order, axis=1)
            z -= z[:, :1]
            log_p = z - np.log1p(np.exp(z[:, 1:]).sum(axis=1, keepdims=True))
            gain = _gain_by_p(loss, log_p) if is_of_p else _gain(loss, z)
            log_eta = _in_order_of(log_p, log_p + gain)
            np.put_along_axis(result[part], order, log_eta, axis=1)
        if log_weights.any() and not weights_first:
            result -= log_weights
            result -= logsumexp(result, axis=1, keepdims=True)
        return result.reshape(checked.shape)

    def _check_logits(self, rows: FloatArray) -> None:
        """Raise unless rows (N, C) are logits of the loss's classes."""
        check(
            bool((rows < np.inf).all()),
            "logits to be finite (or -inf for a masked class)",
            "NaN or +inf",
            "check the model's output",
        )
        check(
            not np.isneginf(rows.max(axis=1)).any(),
            "logits to allow at least one class",
            "-inf for every class",
            "mask fewer classes",
        )
        weights = self.loss.class_weights
        if weights is not None:
            check(
                len(weights) == rows.shape[1],
                f"logits to have the {len(weights)} classes of class_weights",
                rows.shape[1],
                "use those of the loss's model",
            )


def _check_loss(loss: Any) -> None:
    """Raise unless the loss has an inverse link."""
    way_out = f"use a loss among {', '.join(INVERTIBLE)}, or fit a temperature"
    check(
        isinstance(loss, CalibrationLoss),
        "loss to be a CalibrationLoss",
        type(loss).__name__,
        "use hf_calib.losses.make_loss",
    )
    check(
        loss.name in INVERTIBLE,
        "loss to have an inverse link",
        repr(loss.name),
        way_out,
    )
    check(
        not loss.multi_label,
        "loss to be single-label",
        "a multi-label loss",
        "fit a temperature",
    )
    check(
        loss.hyperparameters.get("smoothing") != 1,
        "smoothing to be below 1",
        1,
        "with 1 the loss does not depend on the label",
    )


def _gain_by_p(loss: Any, log_p: FloatArray) -> FloatArray:
    """log(eta / p) up to a constant per row: -log a for a gradient a_y (p - e_y), where a is -dL / d log p_y."""
    allowed = np.where(np.isneginf(log_p), 0, log_p)
    pulls = -_gradient(lambda own: loss.from_log_probs(own, reduction="sum"), allowed)
    # Classes whose probability the gradient lowers share all of the mass equally.
    return np.where(
        pulls < 0,
        -np.log(1e-12) - (1 - _TRACE) * log_p,
        -np.log(np.maximum(pulls, 1e-300)),
    )


def _gain(loss: Any, z: FloatArray) -> FloatArray:
    """log(eta / p) up to a constant per row, by solving the equation for descending logits; -inf for a negative eta."""
    # The gradient for a label moves mass to it from the other classes, and sums to 0: eta is the stationary
    # distribution of a Markov chain with these rates. Eliminating one class after another (Grassmann, Taksar and Heyman
    # 1985), starting with the least probable, needs no subtraction, so small probabilities stay accurate.
    n, c = z.shape
    masked = np.isneginf(z)
    near = np.where(masked, -np.inf, np.maximum(z, _FURTHEST))
    labels = torch.from_numpy(np.where(masked, 0, np.arange(c)).ravel())
    slopes = _gradient(
        lambda each: loss(each, labels, reduction="sum"), np.repeat(near, c, axis=0)
    )
    rates = np.where(masked[:, :, None], 1, slopes.reshape(n, c, c) * (1 - np.eye(c)))
    for k in range(c - 1, 0, -1):
        rates[:, :k, k] /= rates[:, k, :k].sum(axis=1)[:, None]
        rates[:, :k, :k] += rates[:, :k, k, None] * rates[:, k, None, :k]
    eta = np.ones((n, c))
    for k in range(1, c):
        eta[:, k] = (eta[:, :k] * rates[:, :k, k]).sum(axis=1)
    return np.log(np.maximum(eta, 0)) - np.where(masked, 0, log_softmax(near, axis=1))


def _gradient(function: Callable[[Any], Any], values: FloatArray) -> FloatArray:
    with torch.enable_grad():
        leaf = torch.from_numpy(values).requires_grad_()
        (gradient,) = torch.autograd.grad(function(leaf), leaf)
    return gradient.numpy()


def _in_order_of(log_p: FloatArray, log_eta: FloatArray) -> FloatArray:
    """log eta for descending p, with rows that sum to 1. Classes in another order are pooled, and ties get the mean."""
    # The global minimum ranks the classes like eta; posteriors in its jump through a tie belong to the tie.
    log_eta -= log_eta.max(axis=1, keepdims=True)
    log_eta -= logsumexp(log_eta, axis=1, keepdims=True)
    rises = log_eta[:, 1:] > log_eta[:, :-1] + _ROUNDING
    differs = (log_p[:, 1:] == log_p[:, :-1]) & (
        log_eta[:, 1:] < log_eta[:, :-1] - _ROUNDING
    )
    for row in np.flatnonzero((rises | differs).any(axis=1)):
        _, level, sizes = np.unique(
            -log_p[row], return_inverse=True, return_counts=True
        )
        means = (np.bincount(level, np.exp(log_eta[row])) / sizes)[level]
        shared = (1 - _TRACE) * isotonic_regression(
            means, increasing=False
        ) + _TRACE * np.exp(log_p[row])
        log_eta[row] = np.log(shared)
    return log_eta
