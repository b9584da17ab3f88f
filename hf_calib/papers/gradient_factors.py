"""How a loss weighs its examples: the weight of the cross entropy, and the factor of its gradient."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.optimize import brentq

from hf_calib._errors import InputValueError, expected
from hf_calib.losses import CalibrationLoss
from hf_calib.losses.loss import check_loss
from hf_calib.losses.rows import Rows
from hf_calib.losses.statistics.definitions import CROSS_ENTROPY
from hf_calib.losses.statistics.door import row_statistics
from hf_calib.metrics.checks import FloatArray, check_integer, check_number, check_probs_and_labels

_TINY = 1e-300  # for a probability of 0, whose logarithm would be infinite
_LARGEST_GAMMA = 1e3
_CERTAIN = 1e-12  # a 1 - p_y below it has lost its digits in the gradient, p_y - 1


def uncertainty_weights(loss: CalibrationLoss, probs: ArrayLike, labels: ArrayLike) -> FloatArray:
    r"""The weight u of each example's cross entropy in a loss; penalties are left out.

    What a focal-type loss takes for an example's uncertainty. `gradient_factors` says what becomes of it in the
    gradient, where a weight that depends on the probabilities has a part of its own; for the ``_gra`` losses the
    two are the same.

    $$L = u(p, y) \cdot (-\log p_y) + \text{penalties}$$

    Args:
        loss: from `hf_calib.losses`; an adaptive one weighs by its present table.
        probs: (N, C) float, rows that sum to 1.
        labels: (N,) int in [0, C).

    Returns:
        (N,) float64, at least 0: 1 for `cross_entropy`, 0 for `brier`, which has no cross entropy.

    Raises:
        TypeError: if loss is not a `CalibrationLoss`, or a dtype is wrong.
        ValueError: if the probabilities are not distributions, or the labels do not fit.

    References:
        Lin et al. 2025, "Uncertainty weighted gradients for model calibration", Eq. 6 to 8 and 11, Fig. 2.

    >>> from hf_calib.losses import make_loss
    >>> uncertainty_weights(make_loss("dual_focal", gamma=2), [[0.5, 0.3, 0.2]], [0]).round(6)
    array([0.64])
    """
    check_loss(loss)
    logits, targets = _as_logits(probs, labels)
    if loss.name in ("brier", "power"):
        return np.zeros(len(targets))
    if loss.name == "label_smoothing":
        return np.full(len(targets), 1 - loss.hyperparameters["smoothing"])
    weights = {name: 0.0 for name in loss.hyperparameters if name.endswith("_weight")}  # of the penalties
    with torch.no_grad():
        numbers = dict(row_statistics(logits, targets, loss._reads))
        ce = numbers[CROSS_ENTROPY].clamp_min(1e-30)
        numbers[CROSS_ENTROPY] = ce
        values = loss._entry.formula(Rows(numbers, targets, loss), **{**loss._values, **weights})
    return ((values[0] if isinstance(values, tuple) else values) / ce).double().numpy()


def gradient_factors(loss: CalibrationLoss, probs: ArrayLike, labels: ArrayLike) -> FloatArray:
    r"""How many times as hard as cross entropy a loss pulls the logit of each example's label up.

    $$g = \frac{\partial L / \partial z_y}{\partial \mathrm{CE} / \partial z_y}
        = \frac{-1}{1 - p_y} \frac{\partial L}{\partial z_y}$$

    For the focal losses the whole gradient is that multiple of cross entropy's, g(p_y, gamma) of the papers; for
    losses that see the other classes (dual focal, bsce, those with a penalty) it is the multiple at the label.
    Below 0 the loss pushes the label down.

    Args:
        loss: from `hf_calib.losses`, one that does not couple the batch.
        probs: (N, C) float, rows that sum to 1.
        labels: (N,) int in [0, C).

    Returns:
        (N,) float64; NaN where p_y is 1 (within 1e-12), where cross entropy has no gradient.

    Raises:
        TypeError: if loss is not a `CalibrationLoss`, or a dtype is wrong.
        ValueError: if the loss couples the batch, the probabilities are not distributions, or the labels do not fit.

    Notes:
        Computed by autograd from log(p) as logits, in float64. `logit_norm` depends on more than the probabilities;
        its factor is that of those logits.

    References:
        Mukhoti et al. 2020, "Calibrating deep neural networks using focal loss", Eq. 4; Lin et al. 2025,
        "Uncertainty weighted gradients for model calibration", section 4.1 and Fig. 1.

    >>> from hf_calib.losses import make_loss
    >>> gradient_factors(make_loss("focal", gamma=1), [[0.5, 0.5]], [0]).round(6)  # 0.5 - 0.5 log 0.5
    array([0.846574])
    """
    check_loss(loss)
    if loss.couples_batch:
        way_out = "look at the gradient of the batch as a whole"
        raise InputValueError(expected("loss", "have a value per example", repr(loss.name), way_out))
    logits, targets = _as_logits(probs, labels)
    logits.requires_grad_()
    (gradient,) = torch.autograd.grad(loss(logits, targets, reduction="none").sum(), logits)
    others = torch.softmax(logits.detach(), dim=1)
    rows = torch.arange(len(targets))
    others[rows, targets] = 0
    one_minus_p = others.sum(dim=1)
    return (-gradient[rows, targets] / one_minus_p).where(one_minus_p > _CERTAIN, torch.nan).numpy()


class ConfidenceRegions(NamedTuple):
    """Where the minimiser of a loss is over- and under-confident, by the probability of its top class."""

    over_until: float
    under_from: float


def confidence_regions(gamma: float, *, rival: float = 0.0) -> ConfidenceRegions:
    r"""The dual focal paper's regions of over- and under-confidence, for the focal loss and for its own.

    $$\phi(v) = (1 - v + C)^\gamma - \gamma \, (1 - v + C)^{\gamma - 1} v \log v$$

    grows up to v^m, where the paper's over-confident region ends, and falls beyond it; the under-confident region
    starts where it is back at 1. phi is `gradient_factors` of `dual_focal(gamma=gamma, rival=C)`.

    Args:
        gamma: in [0.001, 1000].
        rival: C, the probability of the class next to the top one, in [0, 1); 0 is the focal loss.

    Returns:
        v^m, and v' (focal) or v^uc (dual focal), each in [0, 1].

    Raises:
        TypeError: if a value is not a number.
        ValueError: for a value out of range.

    Notes:
        The conditions are sufficient ones, with C held fixed while v moves; `hf_calib.scaling.InverseLink` has the
        posterior that leads to any p, with the rival's gradient. The probability of a top class is at least
        1 / the number of classes, which for few classes is above v^m: then nothing is over-confident.

    References:
        Tao et al. 2023, "Dual focal loss for calibration", Lemma 1, Eq. 13 and Fig. 1.

    >>> [round(value, 4) for value in confidence_regions(1.0)]
    [0.1353, 0.3679]
    """
    way_out = "the paper draws gamma=1, rival=0.3"
    if not 1e-3 <= check_number("gamma", gamma, way_out) <= _LARGEST_GAMMA:
        raise InputValueError(expected("gamma", f"lie in [0.001, {_LARGEST_GAMMA:g}]", gamma, way_out))
    if not 0 <= check_number("rival", rival, way_out) < 1:
        raise InputValueError(expected("rival", "lie in [0, 1)", rival, way_out))

    def slope(v: float) -> float:  # Eq. 25, without its positive factor
        return float(2 * (v - 1 - rival) + gamma * v * np.log(v) - (1 + rival) * np.log(v))

    def log_phi(v: float) -> float:
        margin = 1 - v + rival
        return float((gamma - 1) * np.log(margin) + np.log(margin - gamma * v * np.log(v)))

    top = brentq(slope, 1e-12, 1 - 1e-6)  # for the focal loss the slope is 0 at 1 too
    return ConfidenceRegions(top, brentq(log_phi, top, 1 - 1e-12))


def reversed_range(gamma: float) -> tuple[float, float] | None:
    r"""The probabilities of the label at which the inverse focal loss pushes it down, which no loss should.

    $$g(p) = (1 + p)^\gamma + \gamma \, p \, (1 + p)^{\gamma - 1} \log p < 0
      \Leftrightarrow 1 + p + \gamma \, p \log p < 0$$

    The first such p is W(1/e) = 0.2785 (W is Lambert's function) at gamma = 1 / W(1/e) = 3.5911, so a table of
    gammas should not go below -3.59.

    Args:
        gamma: of `inverse_focal`, in [0, 1000]; for a negative gamma of `adafocal` its absolute value.

    Returns:
        The ends of the range, or None up to gamma = 3.5911.

    Raises:
        TypeError: if gamma is not a number.
        ValueError: for a gamma out of range.

    >>> reversed_range(3.5) is None
    True
    >>> [round(end, 4) for end in reversed_range(5.0)]
    [0.0911, 0.5799]
    """
    way_out = "pass the absolute value of an adaptive loss's gamma"
    if not 0 <= check_number("gamma", gamma, way_out) <= _LARGEST_GAMMA:
        raise InputValueError(expected("gamma", f"lie in [0, {_LARGEST_GAMMA:g}]", gamma, way_out))

    def sign(p: float) -> float:
        return float(1 + p + gamma * p * np.log(p))

    lowest = float(np.exp(-1 - 1 / gamma)) if gamma else 1.0  # where 1 + gamma (1 + log p) = 0
    if sign(lowest) >= 0:
        return None
    return brentq(sign, _TINY, lowest), brentq(sign, lowest, 1.0)


def simplex_grid(resolution: int = 60) -> FloatArray:
    """Probabilities of three classes at even distances, the edges of the simplex left out.

    Args:
        resolution: how many steps lie between two corners, an integer, at least 3.

    Returns:
        (N, 3) float64, rows that sum to 1, all above 0.

    Raises:
        TypeError: if resolution is not an integer.
        ValueError: if it is below 3.

    >>> simplex_grid(4)
    array([[0.25, 0.25, 0.5 ],
           [0.25, 0.5 , 0.25],
           [0.5 , 0.25, 0.25]])
    """
    resolution = check_integer("resolution", resolution, 3, "60 is the default")
    first, second = np.mgrid[1:resolution, 1:resolution]
    counts = np.stack([first, second, resolution - first - second], axis=-1).reshape(-1, 3)
    return counts[counts[:, 2] > 0] / resolution


def _as_logits(probs: ArrayLike, labels: ArrayLike) -> tuple[torch.Tensor, torch.Tensor]:
    checked, targets = check_probs_and_labels(probs, labels)
    return torch.from_numpy(np.log(np.maximum(checked, _TINY).astype(np.float64))), torch.from_numpy(targets)
