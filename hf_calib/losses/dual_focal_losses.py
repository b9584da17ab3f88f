"""Dual focal losses, which weigh the label against its nearest rival: dual focal and its gradient form."""

from __future__ import annotations

from typing import Annotated, Any

from hf_calib.losses._calibration_loss import CalibrationLoss, Formula
from hf_calib.losses._hyperparameters import (
    ClassWeights,
    NonNegative,
    ProblemType,
    Range,
    checked,
    constructor,
)
from hf_calib.losses.gammas import ConstantGamma
from hf_calib.losses.statistics.definitions import RIVALS, RivalRank
from hf_calib.losses.weights import DualFocalWeight


def _parse_rival(value: Any) -> RivalRank | float:
    if isinstance(value, str) and value in RIVALS:
        return value
    if isinstance(value, bool) or not 0 <= (constant := float(value)) < 1:
        raise ValueError
    return constant


Rival = Annotated[
    RivalRank | float,
    Range(f"be one of {', '.join(map(repr, RIVALS))}, or a number in [0, 1)", _parse_rival),
]


@constructor
def dual_focal(
    *,
    gamma: NonNegative = 5.0,
    rival: Rival = "next",
    class_weights: ClassWeights = None,
    problem_type: ProblemType = None,
) -> CalibrationLoss:
    r"""Dual focal loss (DFL): focal loss that goes by the lead of the label over its rival.

    `focal` holds a confident example back by p_y alone, and so leads to under-confidence; here the rival q_j
    adds to the weight, so the example is held back by how far the label is ahead. `ada_dual_focal` fits gamma
    to held-out predictions.

    $$L = -(1 - p_y + q_j)^\gamma \log p_y, \qquad q_j = \max \{ p_i : p_i < p_y \}$$

    Args:
        gamma: γ >= 0; at 0 the loss is cross entropy.
        rival: what q_j is (Table 4). Of the classes below the label "next" (Eq. 3), "second" or "third", or the
            mean of several: "mean2", "mean3", "mean_all". Or a probability in [0, 1), the same for all
            examples: the paper's "fixed dual logit", 0.1 or 0.2; 0 is `focal`.
        class_weights: (C,) positive factors of the classes; see `make_loss`.
        problem_type: None or "single_label_classification"; there is no multi-label form.

    Returns:
        The loss, in nats times the weight, which is at most 2^γ.

    Raises:
        ValueError: for a value out of range, or a multi-label problem.

    Notes:
        A constant rival need not be below p_y: where it is not, the weight is above 1, up to (1 + q)^γ. It has no
        gradient of its own.

        As in the authors' code q_j is not detached, classes that tie with the label are not rivals, and without
        a class below the label q_j is 0, which is `focal`. Classes are compared by logits: small probabilities
        underflow into ties. The loss jumps where the label changes its rank: it is 0.918 on one side and 0.214
        on the other for γ = 5. The code's default for γ is 0; 5 is the paper's choice for CIFAR-10.

    References:
        Tao et al. 2023, "Dual focal loss for calibration", Eq. 3 and Table 4.

    Example:
        >>> import torch
        >>> dual_focal(gamma=2.0)(torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.0, 0.0]]), torch.tensor([0, 1]))
        tensor(0.3126)
    """
    own = checked(dual_focal, gamma=gamma, rival=rival)
    formula = Formula(weight=DualFocalWeight(own["rival"]), gamma=ConstantGamma(own["gamma"]))
    return CalibrationLoss("dual_focal", own, formula, class_weights=class_weights, problem_type=problem_type)


@constructor
def dual_focal_gra(
    *,
    gamma: NonNegative = 5.0,
    rival: Rival = "next",
    class_weights: ClassWeights = None,
    problem_type: ProblemType = None,
) -> CalibrationLoss:
    r"""DFL-GRA: cross entropy whose gradient is scaled by the dual focal weight.

    As `dual_focal`, but the weight is a constant to the gradient; as `focal_gra`, but it counts the rival in.

    $$\frac{\partial L}{\partial z} = (1 - p_y + q_j)^\gamma\, (p - e_y)$$

    Args:
        gamma: γ >= 0; at 0 the loss is cross entropy.
        rival: which of the classes below the label counts as q_j, or a constant; see `dual_focal`.
        class_weights: (C,) positive factors of the classes; see `make_loss`.
        problem_type: None or "single_label_classification"; there is no multi-label form.

    Returns:
        The loss, in nats times the weight; its gradient is not that of its value.

    Raises:
        ValueError: for a value out of range, or a multi-label problem.

    Notes:
        The authors' code detaches q_j only, so that the weight still has a gradient. Here the whole weight is
        detached, as in the paper.

    References:
        Lin et al. 2025, "Uncertainty weighted gradients for model calibration", section 5.3.

    Example:
        >>> import torch
        >>> dual_focal_gra(gamma=2.0)(torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.0, 0.0]]), torch.tensor([0, 1]))
        tensor(0.3126)
    """
    own = checked(dual_focal_gra, gamma=gamma, rival=rival)
    formula = Formula(weight=DualFocalWeight(own["rival"]), gamma=ConstantGamma(own["gamma"]), detach=True)
    return CalibrationLoss(
        "dual_focal_gra", own, formula, class_weights=class_weights, problem_type=problem_type
    )
