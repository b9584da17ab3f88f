"""The closed-form inverse link: from the probabilities that a known loss leads to, back to the posterior."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import logsumexp

from hf_calib._errors import InputValueError, expected
from hf_calib.scaling import _inverse_link as link
from hf_calib.scaling._base import FloatArray, LogitScaling
from hf_calib.scaling._inputs import as_class_labels, as_logits, as_matrix, blocks

if TYPE_CHECKING:
    from hf_calib.losses import CalibrationLoss


class InverseLink(LogitScaling):
    r"""Undo what a known training loss does to the probabilities; needs no calibration data.

    A focal-type loss is least not at the true posterior η but at other probabilities, p(η): at
    η = 0.7 the focal loss with γ = 3 wants p = 0.558. That map is known and has a closed-form inverse,
    so a model trained with such a loss can be corrected without data. `TemperatureScaling` instead is fitted
    to what the model really does: where there are a few hundred held-out examples, prefer it, or fit it to
    what this one returns.

    $$\hat\eta:\quad \sum_y \hat\eta_y \frac{\partial L(z, y)}{\partial z} = 0, \qquad
      \text{for a loss } \varphi(p_y):\ \hat\eta_k \propto \frac{1}{-\varphi'(p_k)}$$

    Args:
        loss: the loss that the model was trained with, such as `hf_calib.losses.focal(gamma=3.0)`, with the
            same hyperparameters; if it adapts, with the table that it had at the end.

    Notes:
        It removes the loss's own bias, not a model's: it assumes a network that reached the minimum of the
        expected loss. What is left is about what a model trained with cross entropy would have had. It helps
        after a short fine-tuning, where the loss is what makes a model under-confident (MiniLM, 3 epochs of
        AG News, focal: ECE 0.178 to 0.048; 0.017 with a temperature fitted on 1,000 rows). It harms a model
        that has over-fitted (a CNN on 20 Newsgroups, focal: 0.139 to 0.273; 0.033 with a temperature): there
        the loss's caution is all that holds it back.
        Compare before and after on held-out data, where there are any. The logits must be those that the loss
        saw, not divided by a temperature.

        Supported: cross_entropy and brier (nothing to undo), label_smoothing, entropy_regularized, focal,
        inverse_focal, flsd, adafocal, calfocal, dual_focal, ada_dual_focal, bsce, focal_calibration, and the
        `_gra` losses, where the weight that scales the gradient is what counts: \eta_k ∝ p_k / w_k.
        A gamma that depends on p (steps, tables) is a constant at each p, as it is in training. Class weights
        are divided out. Not supported are losses that couple the batch, logit_norm, mbls and ece_ce, which
        depend on more than p, and dft and power, which are about being sure.

        Some p are the minimum for no posterior, or for several, and there a branch is taken:

        - dual_focal and inverse_focal jump as η moves through a tie of two classes: with C = 2, dual_focal
          with gamma = 5 from p = 0.35 to 0.65, inverse_focal with gamma = 2 from 0.21 to 0.79. A p within the
          jump solves the equation with an η of another ranking, which the global minimum does not have with two
          classes (a local one of dual_focal can, that of a model that is wrong; with three, so can the global one,
          of classes that are not the first). The classes concerned get the same η, that
          of the tie, but for 1e-9 that keeps their order. (Where two p are equal, to the last bit, dual_focal
          itself is lower than all around: a point that no training finds.)
        - flsd and the tables: the minimum stays at a jump of gamma for a range of η, and jumps over some
          p. What comes out is the η of the side on which p lies, ranked as above.
        - inverse_focal, and tables, with gamma beyond 3.59: for some p the gradient pushes the label down,
          and no η leads there; the classes concerned take all of the mass, ranked as above.
        - label_smoothing, entropy_regularized, bsce: p less than smoothing / C, and the like, are never
          reached; a posterior that would be negative becomes 0.

        So the ranking of the classes, and the accuracy, stay as they are, but for class weights. Computed in
        float64 from logarithms: logits of ±1e4 are no problem.

    References:
        Charoenphakdee et al. 2021, "On focal loss for class-posterior probability estimation: a theoretical
        perspective", whose closed-form transformation is the one of focal; Tao et al. 2023, "Dual focal loss
        for calibration", Theorem 1 and Eq. 9; here the gradient through q counts, too.

    >>> from hf_calib.losses import make_loss
    >>> logits = np.log([[0.558, 0.442]])
    >>> InverseLink(make_loss("focal", gamma=3)).predict_proba(logits).round(2)
    array([[0.7, 0.3]])
    """

    def __init__(self, loss: CalibrationLoss) -> None:
        self.loss = loss

    def fit(self, logits: ArrayLike, labels: ArrayLike | None = None) -> InverseLink:
        """Check the loss and the data; nothing is fitted, and `predict_proba` works without it.

        Args:
            logits: (N, C), any real dtype; -inf masks a class.
            labels: (N,) int in [0, C), or None. They make no difference.

        Returns:
            self.

        Raises:
            TypeError: if loss is not a `CalibrationLoss`, or a dtype is wrong.
            ValueError: if the loss has no inverse link, or a shape or a value is wrong.
        """
        matrix = as_matrix(logits, least_columns=2)
        _checked_link(self.loss, matrix.shape[1])
        if labels is not None:
            as_class_labels(labels, matrix)
        return self

    def transform(self, logits: ArrayLike) -> FloatArray:
        """Return the log of the posterior, in nats and float64, for logits of any shape that ends in C.

        These are logits again: another scaler can be fitted to them.

        Raises:
            TypeError, ValueError: as `fit`.
        """
        checked = as_logits(logits)
        log_posterior, log_weights = _checked_link(self.loss, checked.shape[-1])
        rows = checked.reshape(-1, checked.shape[-1])
        result = np.empty(rows.shape)
        for part, block in blocks(rows):
            predictions = link.ProbabilityBlock.of(block)
            log_eta = link.in_order_of(predictions.log_p, log_posterior(predictions))
            if log_weights is not None:  # the loss sees the posterior times the weights
                log_eta -= log_weights
                log_eta -= logsumexp(log_eta, axis=1, keepdims=True)
            log_eta[~predictions.allowed] = -np.inf
            result[part] = log_eta
        return result.reshape(checked.shape)


def loss_record(loss: CalibrationLoss, arrays: dict[str, NDArray[Any]]) -> dict[str, Any]:
    """A loss as plain numbers; its table, if it adapts, is added to the arrays.

    Raises:
        TypeError, ValueError: if it has no inverse link, or is none of `hf_calib.losses`.
    """
    _check_has_link(loss)
    from hf_calib.losses import LOSSES  # here, because it imports torch

    if loss.name not in LOSSES:
        way_out = "only losses made by name can be saved"
        raise InputValueError(expected("loss", "be one of LOSSES", repr(loss.name), way_out))
    arrays |= {f"loss.{name}": value.numpy() for name, value in loss.state_dict().items()}
    weights = None if loss.class_weights is None else loss.class_weights.tolist()
    return {"name": loss.name, "hyperparameters": loss.hyperparameters, "class_weights": weights}


def loss_of_record(record: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> CalibrationLoss:
    """The loss that `loss_record` was given; its table is taken out of the arrays.

    Raises:
        TypeError, ValueError, RuntimeError: if there is no such loss.
    """
    import torch

    from hf_calib.losses import make_loss

    loss = make_loss(record["name"], class_weights=record["class_weights"], **record["hyperparameters"])
    _check_has_link(loss)
    table = {name: arrays.pop(name) for name in list(arrays) if name.startswith("loss.")}
    loss.load_state_dict({name.removeprefix("loss."): torch.from_numpy(each) for name, each in table.items()})
    return loss


LogPosterior = Callable[[link.ProbabilityBlock], FloatArray]


def _log_posterior(loss: CalibrationLoss) -> LogPosterior | None:
    """The map from predictions to log eta that belongs to the loss's formula; None where there is none."""
    # Here, because they import torch.
    from hf_calib.losses import penalties, weights

    formula = loss.formula
    detached = formula.detach
    if formula.batch_penalties:
        return None
    match formula.weight, formula.penalties:
        case (None, ()):
            return lambda predictions: predictions.log_p
        case (None, ((_, penalties.SquaredDistance()),)) if formula.scale == 0:
            return lambda predictions: predictions.log_p
        case (None, ((smoothing, penalties.UniformCrossEntropy()),)):
            if smoothing == 1:
                way_out = "with 1 the loss does not depend on the label"
                raise InputValueError(expected("smoothing", "be below 1", smoothing, way_out))
            return lambda predictions: link.label_smoothing(predictions, smoothing)
        case (None, ((weight, penalties.NegativeEntropy()),)):
            return lambda predictions: link.entropy_regularized(predictions, weight)
        case (weights.FocalWeight(), ()):
            return lambda predictions: link.modulated(
                predictions, _gamma(loss, predictions), detached=detached
            )
        case (weights.DualFocalWeight(rival), ()):
            return lambda predictions: link.modulated(
                predictions, partial(_gamma_at, loss), rival=rival, detached=detached
            )
        case (weights.BrierNormWeight(norm), ()):
            return lambda predictions: link.brier_norm(
                predictions, _gamma(loss, predictions), norm, detached=detached
            )
        case (weights.FocalWeight(), ((weight, penalties.SquaredDistance()),)) if not detached:
            return lambda predictions: link.focal_calibration(
                predictions, _gamma(loss, predictions), weight, "l2"
            )
        case (weights.FocalWeight(), ((weight, penalties.AbsoluteDistance()),)) if not detached:
            return lambda predictions: link.focal_calibration(
                predictions, _gamma(loss, predictions), weight, "l1"
            )
    return None


def _gamma(loss: CalibrationLoss, predictions: link.ProbabilityBlock) -> Any:
    return _gamma_at(loss, predictions.p)


def _gamma_at(loss: CalibrationLoss, margin: FloatArray) -> Any:
    """Gamma at each p, or at each lead over the rival, (B, C); or one number. Negative for the inverse focal loss."""
    import torch

    gamma = loss.gamma(torch.from_numpy(margin))
    return gamma.numpy() if isinstance(gamma, torch.Tensor) else gamma


def _checked_link(loss: CalibrationLoss, n_classes: int) -> tuple[LogPosterior, FloatArray | None]:
    """Return the loss's map from predictions to log eta, and its log class weights (C,); or say why not."""
    return _check_has_link(loss), _log_class_weights(loss, n_classes)


def _check_has_link(loss: CalibrationLoss) -> LogPosterior:
    from hf_calib.losses import LOSSES  # here, because it imports torch
    from hf_calib.losses._calibration_loss import check_loss

    check_loss(loss)
    log_posterior = _log_posterior(loss)
    if log_posterior is None:
        able = (name for name, entry in LOSSES.items() if _log_posterior(entry.constructor()) is not None)
        way_out = f"use a loss among {', '.join(able)}, or fit TemperatureScaling"
        raise InputValueError(expected("loss", "have an inverse link", repr(loss.name), way_out))
    if loss.multi_label:
        way_out = "for multi-label problems fit TemperatureScaling(multi_label=True)"
        raise InputValueError(expected("loss", "be single-label", "a multi-label loss", way_out))
    return log_posterior


def _log_class_weights(loss: CalibrationLoss, n_classes: int) -> FloatArray | None:
    if loss.class_weights is None:
        return None
    if len(loss.class_weights) != n_classes:
        got, way_out = f"shape (..., {n_classes})", "pass the logits of the model that the loss trained"
        raise InputValueError(
            expected("logits", f"have the {len(loss.class_weights)} classes of class_weights", got, way_out)
        )
    return loss.class_weights.detach().cpu().double().log().numpy()
