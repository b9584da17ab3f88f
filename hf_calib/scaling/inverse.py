"""The inverse link: from the probabilities that a known loss leads to, back to the posterior."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, log_softmax, logsumexp, softmax
from sklearn.isotonic import isotonic_regression

from hf_calib._errors import InputTypeError, check, expected
from hf_calib.metrics.checks import row_chunks
from hf_calib.scaling._base import LogitScaling
from hf_calib.scaling._inputs import FloatArray, as_class_labels, as_logits, as_matrix

if TYPE_CHECKING:
    from hf_calib.losses import CalibrationLoss

# Losses of a row's probabilities whose gradients determine the posterior: of the label's alone, and of all.
_OF_LABEL = (
    "cross_entropy",
    "focal",
    "focal_gra",
    "inverse_focal",
    "flsd",
    "flsd_gra",
    "adafocal",
    "calfocal",
)
_OF_RIVALS = ("dual_focal", "dual_focal_gra", "ada_dual_focal")
_OF_ALL = ("brier", "bsce", "bsce_gra", "focal_calibration", "label_smoothing", "entropy_regularized")
INVERTIBLE = _OF_LABEL + _OF_RIVALS + _OF_ALL

_FURTHEST = (
    33.0  # logits further below the largest are taken for this far: beyond, the rounding of p hides 1 - p
)
_TINY = 1e-300
_FLOOR = 1e-12
_ROUNDING = 1e-12
_TRACE = 1e-9
_GRADIENTS = 2**21  # in memory at once


class InverseLink(LogitScaling):
    r"""Undo what a known training loss does to the probabilities; needs no calibration data.

    A focal-type loss is least not at the true posterior η but at other probabilities, p(η): at η = 0.7 the focal loss
    with γ = 3 wants p = 0.558. A model trained with such a loss can be corrected without data. Where there are a few
    hundred held-out examples, prefer `TemperatureScaling`, or fit it to what this one returns.

    $$\hat\eta:\quad \sum_y \hat\eta_y \frac{\partial L(z, y)}{\partial z} = 0, \qquad
      \text{for a loss } \varphi(p_y):\ \hat\eta_k \propto \frac{1}{-\varphi'(p_k)}$$

    Args:
        loss: the loss that the model was trained with, such as `hf_calib.losses.focal(gamma=3.0)`, with the
            same hyperparameters; if it adapts, with the table that it had at the end.

    Notes:
        It assumes a network that reached the minimum of the expected loss: it helps after a short fine-tuning, and
        harms a model that has over-fitted. The logits must be those that the loss saw, not divided by a temperature.

        The losses are those of `hf_calib.scaling.inverse.INVERTIBLE`. Class weights are divided out. Of losses that
        read more than the label's p (label_smoothing, dual_focal, bsce, ...) a row of C classes costs C^3 operations.

        Some p are the minimum for no posterior, or for several (dual_focal and inverse_focal jump where two classes
        tie, tables where gamma does). Classes whose η would rank otherwise than their p get the same η, but for
        1e-9 that keeps their order; an η below 0 becomes 0. So the ranking of the classes does not change, but for
        class weights.

    References:
        Charoenphakdee et al. 2021, "On focal loss for class-posterior probability estimation: a theoretical
        perspective", whose closed-form transformation is that of focal; Tao et al. 2023, "Dual focal loss
        for calibration", Theorem 1 and Eq. 9; here the gradient through q counts, too.

    >>> from hf_calib.losses import make_loss
    >>> logits = np.log([[0.558, 0.442]])
    >>> InverseLink(make_loss("focal", gamma=3)).predict_proba(logits).round(2)
    array([[0.7, 0.3]])
    """

    def __init__(self, loss: CalibrationLoss) -> None:
        self.loss = loss

    def fit(self, logits: ArrayLike, labels: ArrayLike | None = None) -> InverseLink:
        """Check the loss, logits (N, C) and labels (N,) or None; nothing is fitted, and the rest works without it."""
        matrix = as_matrix(logits, least_columns=2)
        _check_invertible(self.loss, matrix.shape[1])
        if labels is not None:
            as_class_labels(labels, matrix)
        return self

    def transform(self, logits: ArrayLike) -> FloatArray:
        """Return the log of the posterior, in nats and float64, for logits of any shape that ends in C.

        These are logits again: another scaler can be fitted to them.
        """
        checked = as_logits(logits)
        c = checked.shape[-1]
        _check_invertible(self.loss, c)
        loss: Any = deepcopy(self.loss).cpu()
        weights, loss.class_weights = loss.class_weights, None
        label_only = loss.name in _OF_LABEL
        rows = checked.reshape(-1, c)
        result = np.empty(rows.shape)
        for part in row_chunks(len(rows), c if label_only else c**2, elements=_GRADIENTS):
            block = rows[part].astype(np.float64)
            masked = np.isneginf(block)
            allowed = not masked.all(axis=1).any()
            check(allowed, "logits to allow at least one class", "-inf for every class", "mask fewer classes")
            log_p = log_softmax(block, axis=1)
            near = np.where(masked, -np.inf, np.maximum(block - block.max(axis=1, keepdims=True), -_FURTHEST))
            # What eta has more than p, up to a factor per row.
            log_gain = _log_gain_of_label(loss, near) if label_only else _log_gain(loss, near)
            result[part] = _in_order_of(log_p, log_p + log_gain)
        if weights is not None:  # the loss sees the posterior times the weights
            result -= np.log(weights.detach().double().numpy())
            result -= logsumexp(result, axis=1, keepdims=True)
        return result.reshape(checked.shape)

    @property
    def classes_(self) -> NDArray[np.int64]:
        """The numbers of the classes, 0..C-1, where class weights tell them."""
        if self.loss.class_weights is None:
            raise AttributeError("InverseLink does not know its classes")
        return np.arange(len(self.loss.class_weights))

    def __sklearn_is_fitted__(self) -> bool:
        return True


def _log_gain_of_label(loss: Any, logits: FloatArray) -> FloatArray:
    """log(eta / p), up to a number per row, of a loss of the label's p: 1 / a for a gradient a_y (p - e_y).

    The gradient for two classes, the label and all others as one, gives a.
    """
    each, top = np.arange(len(logits)), logits.argmax(axis=1)
    rest = logits.copy()
    rest[each, top] = -np.inf
    total = logsumexp(logits, axis=1, keepdims=True)
    others = total + np.log1p(-np.exp(rest - total))
    others[each, top] = logsumexp(rest, axis=1)
    own = np.where(np.isneginf(logits), 0, logits)
    pairs = np.stack([own, others], axis=-1).reshape(-1, 2)
    slope = _gradients(loss, pairs, np.zeros(len(pairs), dtype=np.int64))[:, 1].reshape(logits.shape)
    share = expit(others - own)
    pulls = np.divide(slope, share, out=np.ones_like(share), where=share > 0)
    # No eta leads to a p from which the label is pushed down: such classes get all of the mass, in equal parts.
    equal = -np.log(_FLOOR) - (1 - _TRACE) * log_softmax(logits, axis=1)
    return np.where(pulls < 0, equal, -np.log(np.maximum(pulls, _TINY)))


def _log_gain(loss: Any, logits: FloatArray) -> FloatArray:
    """log(eta / p), up to a number per row, by the equation itself; -inf where eta would be negative."""
    n, c = logits.shape
    p = softmax(logits, axis=1)
    allowed = ~np.isneginf(logits)
    labels = np.where(allowed, np.arange(c), logits.argmax(axis=1)[:, None])
    slopes = _gradients(loss, np.repeat(logits, c, axis=0), labels.ravel()).reshape(n, c, c)
    slopes[~allowed] = 0
    others = slopes * (1 - np.eye(c))
    # Near 1 the rounding of p is larger than its distance to 1, which the other classes know.
    own = np.where(p > 0.5, -others.sum(axis=2), np.einsum("nkk->nk", slopes))
    own[~allowed] = -1
    scale = -own / np.maximum(p @ (1 - np.eye(c)), _TINY)
    scale = np.copysign(np.maximum(np.abs(scale), _TINY), scale)
    # In the unknowns eta a / p, with a the scale, the equation is well conditioned: for a focal loss all are 1.
    system = (others + own[:, :, None] * np.eye(c)).transpose(0, 2, 1)
    system *= (np.where(allowed, p, 1) / scale)[:, None, :]
    system /= np.maximum(np.abs(system).max(axis=2, keepdims=True), _TINY)
    # The sum of the equations is 0 = 0, so each may take in another one: that eta sums to a constant.
    shares = p / scale
    shares /= np.abs(shares).max(axis=1, keepdims=True)
    system += shares[:, None, :]
    ones = np.ones((*p.shape, 1))
    try:
        solution = np.linalg.solve(system, ones)[:, :, 0]
    except np.linalg.LinAlgError:  # rows where a probability is 1 to the last bit
        solution = (np.linalg.pinv(system) @ ones)[:, :, 0]
    return _log(solution * np.sign(scale)) - np.log(np.abs(scale))


def _gradients(loss: Any, logits: FloatArray, labels: NDArray[np.int64]) -> FloatArray:
    import torch

    with torch.enable_grad():
        z = torch.from_numpy(logits).requires_grad_()
        (gradient,) = torch.autograd.grad(loss(z, torch.from_numpy(labels), reduction="sum"), z)
    return gradient.numpy()


def _in_order_of(log_p: FloatArray, log_eta: FloatArray) -> FloatArray:
    """Return log eta, rows that sum to 1; classes that rank otherwise than in p are pooled, and ties get the mean.

    The global minimum ranks the classes as eta does; where it jumps as eta moves through a tie, what lies in
    the jump belongs to the tie. A trace of p keeps the order of classes that are pooled.
    """
    log_eta -= log_eta.max(axis=1, keepdims=True)
    log_eta -= logsumexp(log_eta, axis=1, keepdims=True)
    order = np.argsort(-log_p, axis=1, kind="stable")
    ranked_p, ranked = np.take_along_axis(log_p, order, axis=1), np.take_along_axis(log_eta, order, axis=1)
    rises = ranked[:, 1:] > ranked[:, :-1] + _ROUNDING
    tied = (ranked_p[:, 1:] == ranked_p[:, :-1]) & (ranked[:, 1:] < ranked[:, :-1] - _ROUNDING)
    for row in np.flatnonzero((rises | tied).any(axis=1)):
        p = np.exp(ranked_p[row])
        _, level, sizes = np.unique(-ranked_p[row], return_inverse=True, return_counts=True)
        means = (np.bincount(level, np.exp(ranked[row])) / sizes)[level]
        if (means[1:] > means[:-1] * (1 + _ROUNDING)).any():
            means = (1 - _TRACE) * isotonic_regression(means, increasing=False) + _TRACE * p
        log_eta[row, order[row]] = _log(means)
    return log_eta


def _log(values: FloatArray) -> FloatArray:
    """log, and -inf for what is not above 0."""
    return np.log(values, out=np.full_like(values, -np.inf), where=values > 0)


def _check_invertible(loss: CalibrationLoss, n_classes: int | None = None) -> None:
    """Raise unless a loss has an inverse link, for that number of classes."""
    from hf_calib.losses import CalibrationLoss  # here, because it imports torch

    if not isinstance(loss, CalibrationLoss):
        way_out = "make it with hf_calib.losses.make_loss"
        raise InputTypeError(expected("loss", "be a CalibrationLoss", repr(loss), way_out))
    way_out = f"use a loss among {', '.join(INVERTIBLE)}, or fit TemperatureScaling"
    check(loss.name in INVERTIBLE, "loss to have an inverse link", repr(loss.name), way_out)
    way_out = "for multi-label problems fit TemperatureScaling(multi_label=True)"
    check(not loss.multi_label, "loss to be single-label", "a multi-label loss", way_out)
    whole = loss.hyperparameters.get("smoothing") == 1
    check(not whole, "smoothing to be below 1", 1, "with 1 the loss does not depend on the label")
    n = n_classes if loss.class_weights is None else len(loss.class_weights)
    way_out = "pass the logits of the model that the loss trained"
    requirement = f"logits to have the {n} classes of class_weights"
    check(n_classes in (n, None), requirement, f"shape (..., {n_classes})", way_out)


def loss_record(loss: CalibrationLoss, arrays: dict[str, NDArray[Any]]) -> dict[str, Any]:
    """A loss as plain numbers; its table, if it adapts, is added to the arrays."""
    _check_invertible(loss)
    arrays |= {f"loss.{name}": value.cpu().numpy() for name, value in loss.state_dict().items()}
    weights = None if loss.class_weights is None else loss.class_weights.tolist()
    return {"name": loss.name, "hyperparameters": loss.hyperparameters, "class_weights": weights}


def loss_of_record(record: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> CalibrationLoss:
    """The loss that `loss_record` was given; its table is taken out of the arrays."""
    import torch

    from hf_calib.losses import make_loss

    loss = make_loss(record["name"], class_weights=record["class_weights"], **record["hyperparameters"])
    table = {name: arrays.pop(name) for name in list(arrays) if name.startswith("loss.")}
    loss.load_state_dict({name.removeprefix("loss."): torch.from_numpy(each) for name, each in table.items()})
    return loss
