"""Focal losses with a fixed gamma: focal, FLSD-53, inverse focal, focal calibration, and their gradient forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from hf_calib._errors import InputValueError, expected
from hf_calib.losses._calibration_loss import CalibrationLoss, Formula
from hf_calib.losses._hyperparameters import (
    ClassWeights,
    NonNegative,
    ProblemType,
    checked,
    constructor,
    numbers,
)
from hf_calib.losses.gammas import ConstantGamma, StepGamma, warn_of_inverse_gamma
from hf_calib.losses.penalties import AbsoluteDistance, SquaredDistance
from hf_calib.losses.weights import FocalWeight

Thresholds = Annotated[Sequence[float], numbers(at_least=0, at_most=1, rising=True)]
Gammas = Annotated[Sequence[float], numbers(at_least=0)]


@constructor
def focal(
    *,
    gamma: NonNegative = 3.0,
    class_weights: ClassWeights = None,
    problem_type: ProblemType = None,
) -> CalibrationLoss:
    r"""Focal loss: cross entropy that holds back on examples whose label is already probable.

    The usual first choice against over-confidence in long trainings. It makes a short fine-tuning
    under-confident, which a temperature repairs. `dual_focal` looks at the rival class too, `adafocal` finds
    gamma by itself, `flsd` takes a larger gamma for hard examples.

    $$L = -(1 - p_y)^\gamma \log p_y$$

    Args:
        gamma: γ >= 0; at 0 the loss is cross entropy.
        class_weights: (C,) positive factors of the classes; see `make_loss`.
        problem_type: None goes by the labels' dtype; see `make_loss`.

    Returns:
        The loss, in nats times the weight.

    Raises:
        ValueError: for a gamma out of range; a negative one is `inverse_focal`.

    Notes:
        Not proper: with two classes, γ = 3 and a posterior of 0.7 its minimum is at 0.558, which `InverseLink`
        undoes. For γ < 1 the authors' code has a gradient of NaN at p_y = 1; here it is 0, the limit.

    References:
        Lin et al. 2017, "Focal loss for dense object detection", Eq. 4; Mukhoti et al. 2020, "Calibrating deep
        neural networks using focal loss".

    Example:
        >>> import torch
        >>> focal(gamma=2.0)(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1]))
        tensor(0.0875)
    """
    own = checked(focal, gamma=gamma)
    formula = Formula(weight=FocalWeight(), gamma=ConstantGamma(own["gamma"]), multi_label=True)
    return CalibrationLoss("focal", own, formula, class_weights=class_weights, problem_type=problem_type)


@constructor
def focal_gra(
    *,
    gamma: NonNegative = 3.0,
    class_weights: ClassWeights = None,
    problem_type: ProblemType = None,
) -> CalibrationLoss:
    r"""FL-GRA: cross entropy whose gradient is scaled by the focal weight.

    As `focal`, but the weight is a constant to the gradient, so no term of it works against the label.
    `bsce_gra` scales by the whole prediction instead of p_y alone.

    $$\frac{\partial L}{\partial z} = (1 - p_y)^\gamma\, (p - e_y)$$

    Args:
        gamma: γ >= 0; at 0 the loss is cross entropy.
        class_weights: (C,) positive factors of the classes; see `make_loss`.
        problem_type: None or "single_label_classification"; there is no multi-label form.

    Returns:
        The loss, in nats times the weight; its gradient is not that of its value.

    Raises:
        ValueError: for a gamma out of range, or a multi-label problem.

    References:
        Lin et al. 2025, "Uncertainty weighted gradients for model calibration", section 5.3.

    Example:
        >>> import torch
        >>> focal_gra(gamma=2.0)(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1]))
        tensor(0.0875)
    """
    own = checked(focal_gra, gamma=gamma)
    formula = Formula(weight=FocalWeight(), gamma=ConstantGamma(own["gamma"]), detach=True)
    return CalibrationLoss("focal_gra", own, formula, class_weights=class_weights, problem_type=problem_type)


@constructor
def flsd(
    *,
    thresholds: Thresholds = (0.2,),
    gammas: Gammas = (5.0, 3.0),
    class_weights: ClassWeights = None,
    problem_type: ProblemType = None,
) -> CalibrationLoss:
    r"""FLSD-53: focal loss with a larger gamma where the label is improbable.

    A fixed schedule in p_y, where `adafocal` fits one to held-out predictions, and `focal` has one gamma for
    all.

    $$L = -(1 - p_y)^{\gamma(p_y)} \log p_y, \qquad
        \gamma(p_y) = \begin{cases} 5 & p_y < 0.2 \\ 3 & p_y \ge 0.2 \end{cases}$$

    Args:
        thresholds: where gamma changes: numbers in [0, 1], strictly rising, at least one. The intervals contain
            their lower end.
        gammas: γ >= 0 of each interval, one more than thresholds.
        class_weights: (C,) positive factors of the classes; see `make_loss`.
        problem_type: None or "single_label_classification"; there is no multi-label form.

    Returns:
        The loss, in nats times the weight. It jumps at the thresholds, where gamma has no gradient.

    Raises:
        ValueError: for values out of range, numbers of them that do not go together, or a multi-label problem.

    Notes:
        p_y is the probability of the label; one later paper's notation has the confidence there, its code the
        label. The authors' code has a third interval, from 0.5 on, with the gamma of its command line:
        `thresholds=(0.2, 0.5), gammas=(5, 3, 1)` is its default.

    References:
        Mukhoti et al. 2020, "Calibrating deep neural networks using focal loss", section 5 (FLSD-53).

    Example:
        >>> import torch
        >>> flsd()(torch.tensor([[0.0, 2.0], [0.0, 0.0]]), torch.tensor([0, 1]))
        tensor(0.6071)
    """
    own = checked(flsd, thresholds=thresholds, gammas=gammas)
    formula = Formula(weight=FocalWeight(), gamma=_steps(**own))
    return CalibrationLoss("flsd", own, formula, class_weights=class_weights, problem_type=problem_type)


@constructor
def flsd_gra(
    *,
    thresholds: Thresholds = (0.2,),
    gammas: Gammas = (5.0, 3.0),
    class_weights: ClassWeights = None,
    problem_type: ProblemType = None,
) -> CalibrationLoss:
    r"""FLSD-GRA: cross entropy whose gradient is scaled by the weight of `flsd`.

    As `flsd`, but the weight is a constant to the gradient; as `focal_gra`, but gamma goes by p_y.

    $$\frac{\partial L}{\partial z} = (1 - p_y)^{\gamma(p_y)}\, (p - e_y)$$

    Args:
        thresholds: numbers in [0, 1], strictly rising; see `flsd`.
        gammas: γ >= 0 of each interval, one more than thresholds.
        class_weights: (C,) positive factors of the classes; see `make_loss`.
        problem_type: None or "single_label_classification"; there is no multi-label form.

    Returns:
        The loss, in nats times the weight; its gradient is not that of its value.

    Raises:
        ValueError: as for `flsd`.

    References:
        Lin et al. 2025, "Uncertainty weighted gradients for model calibration", section 5.3.

    Example:
        >>> import torch
        >>> flsd_gra()(torch.tensor([[0.0, 2.0], [0.0, 0.0]]), torch.tensor([0, 1]))
        tensor(0.6071)
    """
    own = checked(flsd_gra, thresholds=thresholds, gammas=gammas)
    formula = Formula(weight=FocalWeight(), gamma=_steps(**own), detach=True)
    return CalibrationLoss("flsd_gra", own, formula, class_weights=class_weights, problem_type=problem_type)


def _steps(thresholds: tuple[float, ...], gammas: tuple[float, ...]) -> StepGamma:
    if len(gammas) != len(thresholds) + 1:
        got = f"{len(thresholds)} thresholds and {len(gammas)} gammas"
        raise InputValueError(
            expected("gammas", "have one entry more than thresholds", got, "give a gamma per interval")
        )
    return StepGamma(thresholds, gammas)


@constructor
def inverse_focal(
    *,
    gamma: NonNegative = 2.0,
    class_weights: ClassWeights = None,
    problem_type: ProblemType = None,
) -> CalibrationLoss:
    r"""Inverse focal loss: cross entropy that pushes probable labels further.

    The opposite of `focal`, for models that end under-confident, or whose over-confidence a post-hoc map takes
    away afterwards. `adafocal` switches to it, bin by bin, where held-out predictions are under-confident.

    $$L = -(1 + p_y)^\gamma \log p_y$$

    Args:
        gamma: γ >= 0; at 0 the loss is cross entropy.
        class_weights: (C,) positive factors of the classes; see `make_loss`.
        problem_type: None or "single_label_classification"; there is no multi-label form.

    Returns:
        The loss, in nats times the weight.

    Raises:
        ValueError: for a gamma out of range, or a multi-label problem.

    Warns:
        UserWarning: for γ above 3.59, from where on the gradient changes sign near p_y = 0.28.

    Notes:
        Not the p_y^γ weight that also goes by this name.

    References:
        Wang et al. 2021, "Rethinking calibration of deep neural networks: do not be afraid of overconfidence";
        Ghosh et al. 2022, "AdaFocal", Eq. 1.

    Example:
        >>> import torch
        >>> inverse_focal(gamma=2.0)(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1]))
        tensor(1.0043)
    """
    own = checked(inverse_focal, gamma=gamma)
    warn_of_inverse_gamma(own["gamma"])
    formula = Formula(weight=FocalWeight(), gamma=ConstantGamma(-own["gamma"]))
    return CalibrationLoss(
        "inverse_focal", own, formula, class_weights=class_weights, problem_type=problem_type
    )


@constructor
def focal_calibration(
    *,
    gamma: NonNegative = 3.0,
    brier_weight: NonNegative = 0.5,
    distance: Literal["l2", "l1"] = "l2",
    class_weights: ClassWeights = None,
    problem_type: ProblemType = None,
) -> CalibrationLoss:
    r"""Focal calibration loss (FCL): focal loss plus the Brier score.

    The Brier term draws the probabilities back to the posterior, from which `focal` alone keeps away; a larger
    brier_weight means less under-confidence.

    $$L = -(1 - p_y)^\gamma \log p_y + \lambda \lVert p - e_y \rVert_2^2$$

    Args:
        gamma: γ >= 0.
        brier_weight: λ >= 0; at 0 the loss is `focal`.
        distance: "l2", the squared Euclidean distance, or "l1", the sum of absolute differences 2 (1 - p_y).
        class_weights: (C,) positive factors of the classes; see `make_loss`.
        problem_type: None goes by the labels' dtype; see `make_loss`.

    Returns:
        The loss; its first term is in nats times the weight, its second in [0, 2 λ].

    Raises:
        ValueError: for a value out of range.

    Notes:
        The distance is summed over the classes, as in the authors' code. Strictly proper only in the limit of a
        large λ: with two classes, γ = 3 and a posterior of 0.7 the minimum is at 0.598 for λ = 0.5 and at 0.683
        for λ = 10. The authors' (γ, λ): (2, 0.5) CIFAR-100 with ResNet-50, (4, 1.5) CIFAR-10, (3, 0.5)
        Tiny-ImageNet, (5, 4.5) 20 Newsgroups, (4, 3) AG News, (4, 4) FinSen.

    References:
        Liang et al. 2024 (focal calibration loss), Def. 3.1, A.10 and, for the distances, A.15.

    Example:
        >>> import torch
        >>> focal_calibration()(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1]))
        tensor(0.1755)
    """
    own = checked(focal_calibration, gamma=gamma, brier_weight=brier_weight, distance=distance)
    penalty = SquaredDistance() if own["distance"] == "l2" else AbsoluteDistance()
    formula = Formula(
        weight=FocalWeight(),
        gamma=ConstantGamma(own["gamma"]),
        penalties=((own["brier_weight"], penalty),),
        multi_label=True,
    )
    return CalibrationLoss(
        "focal_calibration", own, formula, class_weights=class_weights, problem_type=problem_type
    )
