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
# The share of p that keeps the order of tied classes.
_TRACE = 1e-9
# The most gradients in memory at the same time.
_GRADIENTS = 2**21


class InverseLink:
    r"""Undo what a known training loss does to the probabilities (Charoenphakdee et al. 2021); needs no data.

    $$\hat\eta:\quad \sum_y \hat\eta_y \frac{\partial L(z, y)}{\partial z} = 0, \qquad
      \text{for a loss } \varphi(p_y):\ \hat\eta_k \propto \frac{1}{-\varphi'(p_k)}$$

    Args:
        loss: a loss of `INVERTIBLE` in its state after training. Class weights are divided out.

    It assumes that the network minimises the expected loss, so it harms a network that has
    over-fitted. Losses that depend on more than the label's p need C^3 operations per row. Classes
    whose ranks by η and p differ share their η.

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

    def transform(self, logits: ArrayLike) -> FloatArray:
        """Return the log of the posterior in nats, float64: logits for another calibrator."""
        checked = np.asarray(logits, np.float64)
        rows = checked.reshape(-1, checked.shape[-1])
        _check_logits(rows, self.loss)
        n_classes = rows.shape[1]
        loss: Any = deepcopy(self.loss).cpu()
        log_weights = np.zeros(n_classes)
        if loss.class_weights is not None:
            log_weights = np.log(loss.class_weights.double().numpy())
        # Label smoothing has the weights before each log p: p is w times the smoothed posterior.
        # Other losses depend on the posterior times the weights.
        if loss.name == "label_smoothing":
            rows = rows - log_weights
            log_weights = np.zeros(n_classes)
            if loss.class_weights is not None:
                loss.class_weights = loss.class_weights.new_ones(n_classes)
        else:
            loss.class_weights = None
        n_gradients = n_classes if loss.name in _OF_P else n_classes**2
        step = max(1, _GRADIENTS // n_gradients)
        result = np.empty(rows.shape)
        for first in range(0, len(rows), step):
            part = slice(first, first + step)
            result[part] = _log_posterior(loss, rows[part])
        if log_weights.any():
            result -= log_weights
            result -= logsumexp(result, axis=1, keepdims=True)
        return result.reshape(checked.shape)


def _check_logits(rows: FloatArray, loss: CalibrationLoss) -> None:
    """Raise unless rows (N, C) are logits of the loss's classes."""
    requirement = "logits to be finite (or -inf for a masked class)"
    is_below_infinity = bool((rows < np.inf).all())
    check(is_below_infinity, requirement, "NaN or +inf", "check the model's output")
    has_class = not np.isneginf(rows.max(axis=1)).any()
    requirement = "logits to allow at least one class"
    check(has_class, requirement, "-inf for every class", "mask fewer classes")
    weights = loss.class_weights
    if weights is not None:
        n_classes = rows.shape[1]
        requirement = f"logits to have the {len(weights)} classes of class_weights"
        way_out = "use those of the loss's model"
        check(len(weights) == n_classes, requirement, n_classes, way_out)


def _check_loss(loss: Any) -> None:
    """Raise unless the loss has an inverse link."""
    is_loss = isinstance(loss, CalibrationLoss)
    way_out = "use hf_calib.losses.make_loss"
    check(is_loss, "loss to be a CalibrationLoss", type(loss).__name__, way_out)
    is_known = loss.name in INVERTIBLE
    way_out = f"use a loss among {', '.join(INVERTIBLE)}, or fit a temperature"
    check(is_known, "loss to have an inverse link", repr(loss.name), way_out)
    is_single = not loss.multi_label
    way_out = "fit a temperature"
    check(is_single, "loss to be single-label", "a multi-label loss", way_out)
    has_label = loss.hyperparameters.get("smoothing") != 1
    way_out = "with 1 the loss does not depend on the label"
    check(has_label, "smoothing to be below 1", 1, way_out)


# The log of 0 is -inf.
@np.errstate(divide="ignore")
def _log_posterior(loss: Any, logits: FloatArray) -> FloatArray:
    """The log of the posterior (N, C), whose order is that of the probabilities."""
    # Descending, so that masked classes are last.
    order = np.argsort(-logits, axis=1, kind="stable")
    z = np.take_along_axis(logits, order, axis=1)
    z -= z[:, :1]
    log_p = z - np.log1p(np.exp(z[:, 1:]).sum(axis=1, keepdims=True))
    gain = _gain_by_p(loss, log_p) if loss.name in _OF_P else _gain(loss, z)
    result = np.empty(logits.shape)
    np.put_along_axis(result, order, _in_order_of(log_p, log_p + gain), axis=1)
    return result


def _gain_by_p(loss: Any, log_p: FloatArray) -> FloatArray:
    """log(eta / p) up to a constant per row: -log a for a gradient a_y (p - e_y), where a is -dL / d log p_y."""
    allowed = np.where(np.isneginf(log_p), 0, log_p)
    pulls = -_gradient(lambda own: loss.from_log_probs(own, reduction="sum"), allowed)
    plain = -np.log(np.maximum(pulls, 1e-300))
    # Classes whose probability the gradient lowers share all of the mass equally.
    lowered = -np.log(1e-12) - (1 - _TRACE) * log_p
    return np.where(pulls < 0, lowered, plain)


def _gain(loss: Any, z: FloatArray) -> FloatArray:
    """log(eta / p) up to a constant per row, by solving the equation for descending logits; -inf for a negative eta."""
    # The gradient for a label moves mass to it from the other classes, and sums to 0: eta is the
    # stationary distribution of a Markov chain with these rates. Eliminating one class after
    # another (Grassmann, Taksar and Heyman 1985), starting with the least probable, needs no
    # subtraction, so small probabilities stay accurate.
    n, c = z.shape
    masked = np.isneginf(z)
    near = np.where(masked, -np.inf, np.maximum(z, _FURTHEST))
    # Each row once with each class as its label.
    labels = torch.from_numpy(np.where(masked, 0, np.arange(c)).ravel())
    repeated = np.repeat(near, c, axis=0)
    slopes = _gradient(lambda each: loss(each, labels, reduction="sum"), repeated)
    to_others = slopes.reshape(n, c, c) * (1 - np.eye(c))
    rates = np.where(masked[:, :, None], 1, to_others)
    for k in range(c - 1, 0, -1):
        rates[:, :k, k] /= rates[:, k, :k].sum(axis=1)[:, None]
        rates[:, :k, :k] += rates[:, :k, k, None] * rates[:, k, None, :k]
    eta = np.ones((n, c))
    for k in range(1, c):
        eta[:, k] = (eta[:, :k] * rates[:, :k, k]).sum(axis=1)
    log_p = np.where(masked, 0, log_softmax(near, axis=1))
    return np.log(np.maximum(eta, 0)) - log_p


def _gradient(function: Callable[[Any], Any], values: FloatArray) -> FloatArray:
    with torch.enable_grad():
        leaf = torch.from_numpy(values).requires_grad_()
        (gradient,) = torch.autograd.grad(function(leaf), leaf)
    return gradient.numpy()


def _in_order_of(log_p: FloatArray, log_eta: FloatArray) -> FloatArray:
    """log eta for descending p, with rows that sum to 1. Classes in another order are pooled, and ties get the mean."""
    # The global minimum ranks the classes like eta; posteriors in its jump through a tie belong to
    # the tie.
    log_eta -= log_eta.max(axis=1, keepdims=True)
    log_eta -= logsumexp(log_eta, axis=1, keepdims=True)
    before = log_eta[:, :-1]
    after = log_eta[:, 1:]
    is_tied = log_p[:, 1:] == log_p[:, :-1]
    falls = after < before - _ROUNDING
    is_wrong = (after > before + _ROUNDING) | (is_tied & falls)
    for row in np.flatnonzero(is_wrong.any(axis=1)):
        p = np.exp(log_p[row])
        _, level, sizes = np.unique(
            -log_p[row], return_inverse=True, return_counts=True
        )
        means = np.bincount(level, np.exp(log_eta[row])) / sizes
        falling = isotonic_regression(means[level], increasing=False)
        log_eta[row] = np.log((1 - _TRACE) * falling + _TRACE * p)
    return log_eta
