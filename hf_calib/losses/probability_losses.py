"""Losses of the label's probability that trust the model: DFT and the power loss, the opposite of the focal ones."""

from __future__ import annotations

from hf_calib.losses._calibration_loss import CalibrationLoss, Formula
from hf_calib.losses._hyperparameters import ClassWeights, Positive, ProblemType, checked, constructor
from hf_calib.losses.penalties import PowerOfProbability
from hf_calib.losses.weights import ProbabilityWeight


@constructor
def dft(*, class_weights: ClassWeights = None, problem_type: ProblemType = None) -> CalibrationLoss:
    r"""DFT (dynamic fine-tuning): cross entropy whose gradient is scaled by the label's probability.

    For fine-tuning a strong language model on answers that it could have given itself: tokens that it finds improbable
    hardly count. The opposite of `focal_gra`, whose weight is largest there; it makes a model surer of itself.

    $$L = -\mathrm{sg}(p_y) \log p_y$$

    with sg the stop of the gradient.

    Args:
        class_weights: (C,) positive factors of the classes; see `make_loss`.
        problem_type: None or "single_label_classification"; there is no multi-label form.

    Returns:
        The loss, in nats. Its gradient is that of `power(exponent=1)`.

    Raises:
        ValueError: for class weights that do not fit, or a multi-label problem.

    Notes:
        It is not a proper loss: in expectation it is smallest where all mass is on the most probable class.

    References:
        Wu et al. 2025, "On the generalization of SFT: a reinforcement learning perspective with reward rectification",
        arXiv 2508.05629, Eq. 9.

    Example:
        >>> import torch
        >>> dft()(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1]))
        tensor(0.2292)
    """
    formula = Formula(weight=ProbabilityWeight(), detach=True)
    return CalibrationLoss("dft", {}, formula, class_weights=class_weights, problem_type=problem_type)


@constructor
def power(
    *, exponent: Positive = 1.0, class_weights: ClassWeights = None, problem_type: ProblemType = None
) -> CalibrationLoss:
    r"""Power loss: one minus a power of the label's probability, from cross entropy to the probability itself.

    The larger the exponent, the less an improbable label counts: right for wrong labels, and for fine-tuning a model
    whose prior is strong; wrong for one that has much to learn. With an exponent below 1 it is also known as the
    generalised cross entropy.

    $$L = \frac{1 - p_y^a}{a}$$

    Args:
        exponent: a > 0. Near 0 the loss is cross entropy; 1 is 1 - p_y, whose gradient is that of `dft`.
        class_weights: (C,) positive factors of the classes; see `make_loss`.
        problem_type: None or "single_label_classification"; there is no multi-label form.

    Returns:
        The loss, in [0, 1 / a].

    Raises:
        ValueError: for an exponent out of range, or a multi-label problem.

    Notes:
        Not a proper loss: for a < 1 its minimum in expectation is sharper than the posterior, p ~ η^(1 / (1 - a)); from
        a = 1 on all mass goes to the most probable class.

    References:
        Li et al. 2025, "Beyond log likelihood: probability-based objectives for supervised fine-tuning across the model
        capability continuum", arXiv 2510.00526; Zhang and Sabuncu 2018, "Generalized cross entropy loss for training
        deep neural networks with noisy labels", Eq. 6.

    Example:
        >>> import torch
        >>> power()(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1]))
        tensor(0.3096)
    """
    own = checked(power, exponent=exponent)
    formula = Formula(scale=0.0, penalties=((1.0, PowerOfProbability(own["exponent"])),))
    return CalibrationLoss("power", own, formula, class_weights=class_weights, problem_type=problem_type)
