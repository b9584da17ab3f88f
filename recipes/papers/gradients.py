"""Weights of the cross entropy, factors of its gradient, and gradients of the last layer, for each loss."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq

from hf_calib._errors import check
from hf_calib.losses import CalibrationLoss, make_loss

FloatArray = NDArray[np.float64]

# For a probability of 0, whose logarithm would be infinite.
_TINY = 1e-300
_LARGEST_GAMMA = 1e3
# A 1 - p_y below it has lost its digits in the gradient, p_y - 1.
_CERTAIN = 1e-12


def uncertainty_weights(
    loss: CalibrationLoss, probs: ArrayLike, labels: ArrayLike
) -> FloatArray:
    r"""The weight u (N,) of each example's cross entropy in a loss; penalties are left out.

    What a focal-type loss takes for an example's uncertainty; `gradient_factors` says what becomes
    of it in the gradient. For the ``_gra`` losses the two are the same.

    $$L = u(p, y) \cdot (-\log p_y) + \text{penalties}$$

    The probabilities are (N, C), the labels (N,). Where p_y is above 1 - 1e-6, the weight is that
    of about 1 - 1e-6.

    References:
        Lin et al. 2025, "Uncertainty weighted gradients for model calibration", Eq. 6 to 8 and 11,
        Fig. 2.

    >>> uncertainty_weights(make_loss("dual_focal", gamma=2), [[0.5, 0.3, 0.2]], [0]).round(6)
    array([0.64])
    """
    rows = np.array(probs, dtype=np.float64)
    classes = np.asarray(labels)
    options: dict[str, Any] = dict(loss.hyperparameters)
    if loss.name in ("brier", "power"):
        return np.zeros(len(rows))
    if loss.name == "label_smoothing":
        return np.full(len(rows), 1 - options["smoothing"])
    penalties = [name for name in options if name.endswith("_weight")]
    if penalties:
        options |= dict.fromkeys(penalties, 0.0)
        loss = make_loss(loss.name, **options)
    # Where p_y is so near 1, cross entropy has too few digits to divide by.
    sure = rows[np.arange(len(rows)), classes] > 1 - 1e-6
    rows[sure] += 1e-6 * (1 / rows.shape[1] - rows[sure])
    logits, targets = _as_logits(rows, classes)
    with torch.no_grad():
        values = loss(logits, targets, reduction="none")
        cross_entropy = F.cross_entropy(logits, targets, reduction="none")
    return (values / cross_entropy).double().numpy()


def gradient_factors(
    loss: CalibrationLoss, probs: ArrayLike, labels: ArrayLike
) -> FloatArray:
    r"""How many times as hard as cross entropy a loss pulls the logit of each example's label up, (N,).

    $$g = \frac{\partial L / \partial z_y}{\partial \mathrm{CE} / \partial z_y}
        = \frac{-1}{1 - p_y} \frac{\partial L}{\partial z_y}$$

    For the focal losses the whole gradient is that multiple, g(p_y, gamma) of the papers; for
    losses that see the other classes it is the multiple at the label. Below 0 the loss pushes the
    label down. NaN where p_y is 1 (within 1e-12), where cross entropy has no gradient. The
    probabilities are (N, C), and their logarithms the logits.

    References:
        Mukhoti et al. 2020, "Calibrating deep neural networks using focal loss", Eq. 4; Lin et al.
        2025, "Uncertainty weighted gradients for model calibration", section 4.1 and Fig. 1.

    >>> gradient_factors(make_loss("focal", gamma=1), [[0.5, 0.5]], [0]).round(6)  # 0.5 - 0.5 log 0.5
    array([0.846574])
    """
    logits, targets = _as_logits(probs, labels)
    gradient = _logit_gradients(loss, logits, targets)
    others = torch.softmax(logits, dim=1)
    rows = torch.arange(len(targets))
    others[rows, targets] = 0
    one_minus_p = others.sum(dim=1)
    factors = -gradient[rows, targets] / one_minus_p
    return factors.where(one_minus_p > _CERTAIN, torch.nan).numpy()


def last_layer_gradient_norms(
    loss: CalibrationLoss,
    logits: ArrayLike,
    labels: ArrayLike,
    features: ArrayLike,
    *,
    bias: bool = True,
) -> FloatArray:
    r"""The norm (N,) of each example's gradient in the weights of a linear classifier head, in float64.

    Which examples a loss learns from; the logits $z = W h + b$ and the features are all that it
    takes.

    $$\nabla_W \ell = g h^\top, \quad \nabla_b \ell = g, \quad g = \nabla_z \ell(z, y) \qquad\Rightarrow\qquad
    \|\nabla_{W, b} \, \ell\| = \|g\| \sqrt{\|h\|^2 + 1}$$

    `features` (N, H) are what enters the head: a forward pre-hook on the head sees them. A label of
    -100 has norm 0. For cross entropy and for `bsce_gra` with norm 2, ||g|| is a power of the Brier
    score: B^(1/2), B^((gamma + 1) / 2).

    References:
        Lin et al. 2025, Uncertainty weighted gradients for model calibration (BSCE-GRA), 5.2,
        Figures 4 and 5.

    >>> last_layer_gradient_norms(make_loss("cross_entropy"), [[0.0, 0.0]], [1], [[3.0, 4.0]], bias=False)
    array([3.53553391])
    """
    rows = torch.tensor(np.asarray(logits, np.float64))
    inputs = np.asarray(features, np.float64)
    requirement = "a row of features for each of the logits"
    check(len(rows) == len(inputs), requirement, inputs.shape, "pass all")
    gradients = _logit_gradients(loss, rows, torch.as_tensor(np.asarray(labels)))
    pull: FloatArray = np.linalg.norm(gradients.numpy(), axis=1)
    return pull * np.sqrt((inputs**2).sum(axis=1) + bias)


class ConfidenceRegions(NamedTuple):
    """Where the minimiser of a loss is over- and under-confident, by the probability of its top class."""

    over_until: float
    under_from: float


def confidence_regions(gamma: float, *, rival: float = 0.0) -> ConfidenceRegions:
    r"""The dual focal paper's regions of over- and under-confidence, for the focal loss and for its own.

    $$\phi(v) = (1 - v + C)^\gamma - \gamma \, (1 - v + C)^{\gamma - 1} v \log v$$

    grows up to v^m, where the paper's over-confident region ends, and falls beyond it; the
    under-confident region starts where it is back at 1. phi is `gradient_factors` of
    `dual_focal(gamma=gamma, rival=C)`.

    `rival` is C, the probability of the class next to the top one; 0 is the focal loss. The
    conditions are sufficient, with C held fixed while v moves. With few classes the top one is
    above v^m, and nothing is over-confident.

    References:
        Tao et al. 2023, "Dual focal loss for calibration", Lemma 1, Eq. 13 and Fig. 1.

    >>> [round(value, 4) for value in confidence_regions(1.0)]
    [0.1353, 0.3679]
    """
    way_out = "the paper draws gamma=1, rival=0.3"
    requirement = f"gamma to lie in [0.001, {_LARGEST_GAMMA:g}]"
    check(1e-3 <= gamma <= _LARGEST_GAMMA, requirement, gamma, way_out)
    check(0 <= rival < 1, "rival to lie in [0, 1)", rival, way_out)

    def slope(v: float) -> float:
        """Eq. 25, without its positive factor."""
        return 2 * (v - 1 - rival) + (gamma * v - 1 - rival) * math.log(v)

    def log_phi(v: float) -> float:
        margin = 1 - v + rival
        rest = margin - gamma * v * math.log(v)
        return (gamma - 1) * math.log(margin) + math.log(rest)

    # Up to below 1, because for the focal loss the slope is 0 at 1 too.
    top = brentq(slope, 1e-12, 1 - 1e-6)
    return ConfidenceRegions(top, brentq(log_phi, top, 1 - 1e-12))


def reversed_range(gamma: float) -> tuple[float, float] | None:
    r"""The probabilities of the label at which the inverse focal loss pushes it down, which no loss should.

    $$g(p) = (1 + p)^\gamma + \gamma \, p \, (1 + p)^{\gamma - 1} \log p < 0
      \Leftrightarrow 1 + p + \gamma \, p \log p < 0$$

    The first such p is W(1/e) = 0.2785 (W is Lambert's function) at gamma = 1 / W(1/e) = 3.5911, so
    a table of gammas should not go below -3.59. None up to there; gamma is in [0, 1000], for a
    negative gamma of `adafocal` its absolute value.

    >>> reversed_range(3.5) is None
    True
    >>> [round(end, 4) for end in reversed_range(5.0)]
    [0.0911, 0.5799]
    """
    way_out = "pass the absolute value of an adaptive loss's gamma"
    requirement = f"gamma to lie in [0, {_LARGEST_GAMMA:g}]"
    check(0 <= gamma <= _LARGEST_GAMMA, requirement, gamma, way_out)

    def sign(p: float) -> float:
        return 1 + p + gamma * p * math.log(p)

    # It is the lowest where 1 + gamma (1 + log p) = 0.
    lowest = math.exp(-1 - 1 / gamma) if gamma else 1.0
    if sign(lowest) >= 0:
        return None
    return brentq(sign, _TINY, lowest), brentq(sign, lowest, 1.0)


def simplex_grid(resolution: int = 60) -> FloatArray:
    """Probabilities (N, 3) of three classes, `resolution` steps between two corners; the edges are left out.

    >>> simplex_grid(4)
    array([[0.25, 0.25, 0.5 ],
           [0.25, 0.5 , 0.25],
           [0.5 , 0.25, 0.25]])
    """
    first, second = np.mgrid[1:resolution, 1:resolution].reshape(2, -1)
    counts = np.stack([first, second, resolution - first - second], axis=1)
    return counts[counts[:, 2] > 0] / resolution


def _as_logits(
    probs: ArrayLike, labels: ArrayLike
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = np.asarray(probs, np.float64)
    logits = torch.from_numpy(np.log(np.maximum(rows, _TINY)))
    return logits, torch.as_tensor(np.asarray(labels))


def _logit_gradients(
    loss: CalibrationLoss, logits: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """(N, C); a row's loss depends on its own logits only, so the gradient of the sum has each row's in its row."""
    requirement = "loss to have a value per example"
    has_values = not loss.couples_batch
    check(has_values, requirement, repr(loss.name), "take one that has")
    rows = logits.detach().requires_grad_()
    (gradients,) = torch.autograd.grad(loss(rows, labels, reduction="sum"), rows)
    return gradients
