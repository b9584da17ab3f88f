"""The Brier score, and cross entropy weighted by it: Brier, BSCE, BSCE-GRA."""

from __future__ import annotations

from hf_calib.losses._calibration_loss import CalibrationLoss, Formula
from hf_calib.losses._hyperparameters import (
    AtLeastOne,
    ClassWeights,
    NonNegative,
    ProblemType,
    checked,
    constructor,
)
from hf_calib.losses.gammas import ConstantGamma
from hf_calib.losses.penalties import SquaredDistance
from hf_calib.losses.weights import BrierNormWeight


@constructor
def brier(*, class_weights: ClassWeights = None, problem_type: ProblemType = None) -> CalibrationLoss:
    r"""Brier score: the squared distance of the probabilities from the label.

    A proper loss like `cross_entropy`, but bounded: a confident error costs at most 2, so outliers and wrong
    labels count for less, and learning is slow where the model is confidently wrong. `focal_calibration` adds it to
    a focal loss.

    $$L = \lVert p - e_y \rVert_2^2 = \sum_j (p_j - [j = y])^2$$

    Args:
        class_weights: (C,) positive factors of the classes; see `make_loss`.
        problem_type: None goes by the labels' dtype; see `make_loss`.

    Returns:
        The loss, in [0, 2]; per decision of a multi-label problem (p - y)^2, in [0, 1].

    Raises:
        ValueError: for class weights or a problem type that do not fit.

    Notes:
        Summed over the classes, mean over the batch. Of the papers' codes one takes the sum over the batch
        instead.

    References:
        Brier 1950, "Verification of forecasts expressed in terms of probability".

    Example:
        >>> import torch
        >>> brier()(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1]))
        tensor(0.2642)
    """
    formula = Formula(scale=0.0, penalties=((1.0, SquaredDistance()),), multi_label=True)
    return CalibrationLoss("brier", {}, formula, class_weights=class_weights, problem_type=problem_type)


@constructor
def bsce(
    *,
    gamma: NonNegative = 2.0,
    norm: AtLeastOne = 2.0,
    class_weights: ClassWeights = None,
    problem_type: ProblemType = None,
) -> CalibrationLoss:
    r"""BSCE: cross entropy weighted by the generalised Brier score of the whole prediction.

    Where `focal` weighs by 1 - p_y alone, this weight sees how the rest is spread over the other classes.
    `bsce_gra`, the paper's proposal, keeps the weight out of the gradient.

    $$L = -u \log p_y, \qquad u = \lVert p - e_y \rVert_\beta^\gamma$$

    Args:
        gamma: γ >= 0; at 0 the loss is cross entropy.
        norm: β >= 1. With 1 the other classes have no say: it is 2^γ times `focal`.
        class_weights: (C,) positive factors of the classes; see `make_loss`.
        problem_type: None goes by the labels' dtype; see `make_loss`.

    Returns:
        The loss, in nats times u, which is up to 2^(γ / β).

    Raises:
        ValueError: for a value out of range.

    Notes:
        The norm is that of the vector, as in the authors' code. The paper's Eq. 11 writes a sum of scalar
        norms, sum_j |p_j - [j = y]|^γ, on which β has no effect: `norm=gamma` gives it.

    References:
        Lin et al. 2025, "Uncertainty weighted gradients for model calibration", Eq. 11.

    Example:
        >>> import torch
        >>> bsce(gamma=2.0)(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1]))
        tensor(0.1751)
    """
    own = checked(bsce, gamma=gamma, norm=norm)
    weight = BrierNormWeight(own["norm"])
    formula = Formula(weight=weight, gamma=ConstantGamma(own["gamma"]), multi_label=True)
    return CalibrationLoss("bsce", own, formula, class_weights=class_weights, problem_type=problem_type)


@constructor
def bsce_gra(
    *,
    gamma: NonNegative = 2.0,
    norm: AtLeastOne = 2.0,
    class_weights: ClassWeights = None,
    problem_type: ProblemType = None,
) -> CalibrationLoss:
    r"""BSCE-GRA: cross entropy whose gradient is scaled by the generalised Brier score.

    As `bsce`, but the weight is a constant to the gradient, which is then exactly u times that of cross
    entropy: uncertain examples are learned from more, and no example is pushed away from its label.

    $$\frac{\partial L}{\partial z} = u\, (p - e_y), \qquad u = \lVert p - e_y \rVert_\beta^\gamma$$

    Args:
        gamma: γ >= 0; at 0 the loss is cross entropy.
        norm: β >= 1. With 1, the default of the authors' code, it is 2^γ times `focal_gra`.
        class_weights: (C,) positive factors of the classes; see `make_loss`.
        problem_type: None goes by the labels' dtype; see `make_loss`.

    Returns:
        The loss, in nats times u; its gradient is not that of its value.

    Raises:
        ValueError: for a value out of range.

    Notes:
        The norm is that of the vector; see `bsce`. The weight is up to 2^(γ / β), which acts as a factor of the
        learning rate. The fixed point is not the posterior, against section 4.3: with two classes and γ = β = 2
        a posterior of 0.7 is learned as 0.570, which `InverseLink` undoes.

    References:
        Lin et al. 2025, "Uncertainty weighted gradients for model calibration", Eq. 14.

    Example:
        >>> import torch
        >>> bsce_gra(gamma=2.0)(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1]))
        tensor(0.1751)
    """
    own = checked(bsce_gra, gamma=gamma, norm=norm)
    weight = BrierNormWeight(own["norm"])
    formula = Formula(weight=weight, gamma=ConstantGamma(own["gamma"]), detach=True, multi_label=True)
    return CalibrationLoss("bsce_gra", own, formula, class_weights=class_weights, problem_type=problem_type)
