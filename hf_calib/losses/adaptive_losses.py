"""Losses that adapt to held-out predictions: AdaFocal, AdaDualFocal, CalFocal, ECE-CE."""

from __future__ import annotations

from typing import Annotated, Any

from hf_calib._errors import InputValueError, expected
from hf_calib.losses._adaptive import EceCrossEntropy, GammaTableLoss
from hf_calib.losses._calibration_loss import Formula
from hf_calib.losses._hyperparameters import (
    ClassWeights,
    NonNegative,
    NumberOfBins,
    ProblemType,
    checked,
    constructor,
    number,
)
from hf_calib.losses.gammas import LARGEST_GAMMA, AdaFocalRule, CalFocalRule, warn_of_inverse_gamma
from hf_calib.losses.weights import DualFocalWeight, FocalWeight, HeldOutGapWeight

Number = Annotated[float, number()]
NonPositive = Annotated[float, number(at_most=0)]
UpperLimit = Annotated[float, number(at_least=0, infinite=True)]


@constructor
def adafocal(
    *,
    n_bins: NumberOfBins = 15,
    update_rate: NonNegative = 1.0,
    gamma_init: Number = 1.0,
    gamma_max: UpperLimit = 20.0,
    gamma_min: NonPositive = -2.0,
    switch: NonNegative = 0.2,
    class_weights: ClassWeights = None,
    problem_type: ProblemType = None,
) -> GammaTableLoss:
    r"""AdaFocal: focal loss with a gamma per confidence bin, fitted to held-out predictions as training goes on.

    Where held-out predictions are over-confident the bin's gamma grows, where they are under-confident it
    shrinks, and below the switch the bin goes over to the inverse focal loss. No gamma has to be chosen, as
    with `focal`, but it needs a calibration split. `calfocal` has no memory; `ada_dual_focal` goes by the lead over
    the rival class.

    $$L = \begin{cases} -(1 - p_y)^{\gamma} \log p_y & \gamma \ge 0 \\
        -(1 + p_y)^{|\gamma|} \log p_y & \gamma < 0 \end{cases}$$

    $$\gamma_b \leftarrow \gamma_b \exp(\pm\lambda (C_b - A_b))$$

    with $C_b$ the mean confidence and $A_b$ the accuracy of bin b, and the sign that of $\gamma_b$.

    Args:
        n_bins: number M of bins, >= 1.
        update_rate: λ >= 0.
        gamma_init: γ of all bins before the first update, in [gamma_min, gamma_max].
        gamma_max: upper limit of γ, >= switch; `math.inf` for none, as in appendix N.3 (in files "inf", in YAML
            .inf). The paper's 20 varies less between seeds.
        gamma_min: lower limit of γ, <= -switch.
        switch: S_th >= 0: a bin with |γ| below it goes over to the other loss, at ∓S_th.
        class_weights: (C,) positive factors of the classes; see `make_loss`.
        problem_type: None goes by the labels' dtype; see `make_loss`.

    Returns:
        The loss, in nats times the weight. `update(confidences, correct)` fits `edges` (M + 1,) and `gammas`
        (M,), which are in its `state_dict`.

    Raises:
        ValueError: for values out of range, or that do not go together.

    Warns:
        UserWarning: for a gamma_min below -3.59; see `inverse_focal`.

    Notes:
        Bins come from the confidences of the predicted class, and are looked up by p_y in training. As in the
        authors' code they are (low, high] for the held-out predictions, which leaves out the smallest, and
        [low, high) in training. At γ = 0 the paper's branch is taken, not the code's. The code forgets its
        gammas on resume; here they are saved.

    References:
        Ghosh et al. 2022, "AdaFocal: calibration-aware adaptive focal loss", Algorithm 1; limits of gamma:
        appendix N; updates more often than once an epoch: appendix I.

    Example:
        >>> loss = adafocal(n_bins=2)
        >>> loss.update([0.6, 0.7, 0.8, 0.9], [0, 1, 0, 0])
        >>> loss.gammas.tolist()  # over-confident in both bins: both gammas grow
        [1.28..., 2.45...]
    """
    own = checked(
        adafocal,
        n_bins=n_bins,
        update_rate=update_rate,
        gamma_init=gamma_init,
        gamma_max=gamma_max,
        gamma_min=gamma_min,
        switch=switch,
    )
    formula = Formula(weight=FocalWeight(), multi_label=True)
    return GammaTableLoss(
        "adafocal",
        own,
        formula,
        rule=_adafocal_rule(own),
        class_weights=class_weights,
        problem_type=problem_type,
    )


@constructor
def ada_dual_focal(
    *,
    n_bins: NumberOfBins = 15,
    update_rate: NonNegative = 2.0,
    gamma_init: NonNegative = 6.0,
    gamma_max: UpperLimit = 20.0,
    class_weights: ClassWeights = None,
    problem_type: ProblemType = None,
) -> GammaTableLoss:
    r"""AdaDualFocal: dual focal loss with a gamma per bin of the label's lead over its rival.

    As `dual_focal`, but gamma is fitted to held-out predictions; as `adafocal`, but gamma and weight go by the
    lead p_y - q_j, and no bin goes over to an inverse loss: gamma only shrinks towards 0.

    $$L = -(1 - p_y + q_j)^{\gamma_b} \log p_y, \qquad \gamma_b \leftarrow \gamma_b \exp(\lambda (C_b - A_b))$$

    with b the bin of p_y - q_j, $C_b$ the mean held-out confidence in that bin and $A_b$ the accuracy.

    Args:
        n_bins: number M of bins, >= 1.
        update_rate: λ >= 0.
        gamma_init: γ of all bins before the first update, in [0, gamma_max].
        gamma_max: upper limit of γ, >= 0; `math.inf` for none.
        class_weights: (C,) positive factors of the classes; see `make_loss`.
        problem_type: None or "single_label_classification"; there is no multi-label form.

    Returns:
        The loss, in nats times the weight. `update(confidences, correct)` fits `edges` (M + 1,) and `gammas` (M,),
        which are in its `state_dict`.

    Raises:
        ValueError: for values out of range, or that do not go together, or a multi-label problem.

    Notes:
        As in the authors' code, the bins are fitted to the held-out confidences of the predicted class, and
        training looks up the lead in them, so that every lead below the second edge is in the first bin. The rival
        has a gradient; gamma is a constant to it. The authors choose the first γ and λ for each network: their runs
        on CIFAR-10 have 6 and 2 (ResNet-50, the defaults here), 7 and 2 (ResNet-110), 6 and 1 (DenseNet-121), 5 and
        0.1 (Wide ResNet).

    References:
        Tao et al. 2023, "Dual focal loss for calibration", section 5.2, and the authors' code.

    Example:
        >>> loss = ada_dual_focal(n_bins=2)
        >>> loss.update([0.6, 0.7, 0.8, 0.9], [0, 1, 0, 0])
        >>> loss.gammas.tolist()
        [9.89..., 20.0]
    """
    own = checked(
        ada_dual_focal, n_bins=n_bins, update_rate=update_rate, gamma_init=gamma_init, gamma_max=gamma_max
    )
    return GammaTableLoss(
        "ada_dual_focal",
        own,
        Formula(weight=DualFocalWeight("next")),
        rule=_adafocal_rule({**own, "gamma_min": 0.0, "switch": 0.0}),  # gammas that stay above 0
        class_weights=class_weights,
        problem_type=problem_type,
    )


def _adafocal_rule(own: dict[str, Any]) -> AdaFocalRule:
    rule = AdaFocalRule(**{**own, "gamma_max": min(own["gamma_max"], LARGEST_GAMMA)})
    if not (rule.gamma_min <= -rule.switch and rule.switch <= rule.gamma_max):
        got = f"gamma_min={rule.gamma_min}, gamma_max={rule.gamma_max}, switch={rule.switch}"
        raise InputValueError(
            expected("switch", "lie within -gamma_min and gamma_max", got, "widen the gammas' range")
        )
    if not rule.gamma_min <= rule.gamma_init <= rule.gamma_max:
        got = f"gamma_init={rule.gamma_init}"
        raise InputValueError(
            expected("gamma_init", "lie in [gamma_min, gamma_max]", got, "widen the gammas' range")
        )
    warn_of_inverse_gamma(-rule.gamma_min)
    return rule


@constructor
def calfocal(
    *,
    n_bins: NumberOfBins = 15,
    update_rate: NonNegative = 10.0,
    per_sample: bool = False,
    class_weights: ClassWeights = None,
    problem_type: ProblemType = None,
) -> GammaTableLoss:
    r"""CalFocal: focal loss whose gamma is the exponential of the held-out calibration gap.

    The step on the way to `adafocal`: gamma has no memory, so it swings with the gaps, and is never negative.

    $$L = -(1 - p_y)^{\gamma} \log p_y, \qquad \gamma = \exp(\lambda (C_b - A_b))$$

    (Eq. 3), with $C_b$ the mean confidence and $A_b$ the accuracy of the held-out bin; or, by the example, $\gamma =
    \exp(\lambda (p_y - A_b))$ (Eq. 2).

    Args:
        n_bins: number M of bins, >= 1.
        update_rate: λ >= 0. With 0 it is `focal` with γ = 1.
        per_sample: False for a gamma per bin (Eq. 3), True for one per example (Eq. 2).
        class_weights: (C,) positive factors of the classes; see `make_loss`.
        problem_type: None or "single_label_classification"; there is no multi-label form.

    Returns:
        The loss, in nats times the weight. `update(confidences, correct)` fits `edges` (M + 1,), `gammas` (M,)
        and `accuracies` (M,), which are in its `state_dict`.

    Raises:
        ValueError: for a value out of range, or a multi-label problem.

    Notes:
        Before the first update, and in a bin without held-out predictions, γ is 1. See `adafocal` for the bins.
        There is no authors' code for this loss.

    References:
        Ghosh et al. 2022, "AdaFocal: calibration-aware adaptive focal loss", section 5.1, Eq. 2 and 3.

    Example:
        >>> loss = calfocal(n_bins=2)
        >>> loss.update([0.6, 0.7, 0.8, 0.9], [0, 1, 0, 0])
        >>> loss.gammas.tolist()
        [12.18..., 8103.08...]
    """
    own = checked(calfocal, n_bins=n_bins, update_rate=update_rate, per_sample=per_sample)
    return GammaTableLoss(
        "calfocal",
        own,
        Formula(weight=FocalWeight()),
        rule=CalFocalRule(**own),
        class_weights=class_weights,
        problem_type=problem_type,
    )


@constructor
def ece_ce(
    *,
    n_bins: NumberOfBins = 15,
    class_weights: ClassWeights = None,
    problem_type: ProblemType = None,
) -> EceCrossEntropy:
    r"""ECE-CE: cross entropy weighted by the held-out calibration gaps of the example's bins and class.

    It weighs by how miscalibrated predictions like this one are, where `bsce_gra` weighs by how uncertain this
    one is. Needs a calibration split, like `adafocal`.

    $$L = -w \log p_y, \qquad w = (1 - t) + \frac{t}{3} (|g_b| + |g_m| + 2 g_y)$$

    with t the share of the training that is done, $g_b$ the gap of the equal-width bin of p_y, $g_m$ that of the
    equal-mass bin of its rank within the batch, and $g_y$ the class-wise calibration error of the label.

    Args:
        n_bins: number M of bins, >= 1.
        class_weights: (C,) positive factors of the classes; see `make_loss`.
        problem_type: None or "single_label_classification"; there is no multi-label form.

    Returns:
        The loss, in nats times w. `update(confidences, correct, class_gaps=..., progress=...)` takes the gaps;
        before the first update it is cross entropy.

    Raises:
        ValueError: for a value out of range, or a multi-label problem.

    Notes:
        Couples the batch through the rank, which is that of the authors' code: w is a constant to the gradient,
        but depends on which examples stand together. The paper counts the loss among its own methods, but gives no
        formula. The held-out
        bins are (low, high], those of training [low, high); p_y = 1 lies in none. Of a batch with fewer
        examples than bins all have the last equal-mass bin.

    References:
        Lin et al. 2025, "Uncertainty weighted gradients for model calibration", section 5, and its code.

    Example:
        >>> import torch
        >>> loss = ece_ce(n_bins=2)
        >>> loss.update([0.6, 0.9], [1, 0], class_gaps=[0.1, 0.3], progress=1.0)
        >>> loss(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1]))
        tensor(0.2117)
    """
    own = checked(ece_ce, n_bins=n_bins)
    return EceCrossEntropy(
        "ece_ce",
        own,
        Formula(weight=HeldOutGapWeight(), detach=True),
        n_bins=own["n_bins"],
        class_weights=class_weights,
        problem_type=problem_type,
    )
