"""Cross entropy, and cross entropy with a penalty per example: label smoothing, entropy, logit norm, margin."""

from __future__ import annotations

from typing import Annotated

from hf_calib.losses._calibration_loss import CalibrationLoss, Formula
from hf_calib.losses._hyperparameters import (
    AtLeastOne,
    ClassWeights,
    NonNegative,
    ProblemType,
    checked,
    constructor,
    number,
)
from hf_calib.losses.penalties import ExcessOverMargin, LogitNormPenalty, NegativeEntropy, UniformCrossEntropy


@constructor
def cross_entropy(*, class_weights: ClassWeights = None, problem_type: ProblemType = None) -> CalibrationLoss:
    r"""Cross entropy: the baseline to beat, with a good post-hoc map such as `TemperatureScaling` after it.

    The same as `F.cross_entropy` of class indices, in less time and memory for large logits, and with the
    reductions of the other losses. Float labels are multi-label, a sigmoid per class; soft labels of a softmax have
    no form here. It is a proper loss; trained for long, it ends over-confident, which `focal` and its relatives
    counter.

    $$L = -\log p_y$$

    Args:
        class_weights: (C,) positive factors of the classes; see `make_loss`.
        problem_type: None goes by the labels' dtype; see `make_loss`.

    Returns:
        The loss, in nats.

    Raises:
        ValueError: for class weights or a problem type that do not fit.

    Example:
        >>> import torch
        >>> cross_entropy()(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1]))
        tensor(0.4100)
    """
    return CalibrationLoss(
        "cross_entropy", {}, Formula(multi_label=True), class_weights=class_weights, problem_type=problem_type
    )


@constructor
def label_smoothing(
    *,
    smoothing: Annotated[float, number(at_least=0, at_most=1)] = 0.05,
    class_weights: ClassWeights = None,
    problem_type: ProblemType = None,
) -> CalibrationLoss:
    r"""Label smoothing: cross entropy to labels that leave a share ε to all classes alike.

    The simplest guard against over-confidence, and the same for every example, where `focal` spares the hard
    ones. Close to `entropy_regularized`, which penalises the other direction of the same divergence.

    $$L = -(1 - \varepsilon) \log p_y - \frac{\varepsilon}{C} \sum_j \log p_j$$

    Args:
        smoothing: ε, in [0, 1]; at 0 the loss is cross entropy.
        class_weights: (C,) positive factors of the classes; see `make_loss`.
        problem_type: None goes by the labels' dtype; see `make_loss`.

    Returns:
        The loss, in nats.

    Raises:
        ValueError: for a smoothing out of range.

    Notes:
        As in PyTorch, the label has a share in ε / C; some codes spread ε over the other classes only. Masked
        classes (-inf) have no share. Class weights multiply the whole loss of an example, by its label's;
        PyTorch's weigh each class's share.

    References:
        Szegedy et al. 2016, "Rethinking the Inception architecture for computer vision", section 7; ε = 0.05 is
        the value of the focal, dual focal and AdaFocal papers.

    Example:
        >>> import torch
        >>> label_smoothing(smoothing=0.1)(torch.tensor([[2.0, 0.0]]), torch.tensor([0]))
        tensor(0.2269)
    """
    own = checked(label_smoothing, smoothing=smoothing)
    epsilon = own["smoothing"]
    formula = Formula(scale=1 - epsilon, penalties=((epsilon, UniformCrossEntropy()),), multi_label=True)
    return CalibrationLoss(
        "label_smoothing", own, formula, class_weights=class_weights, problem_type=problem_type
    )


@constructor
def entropy_regularized(
    *,
    entropy_weight: NonNegative = 0.1,
    class_weights: ClassWeights = None,
    problem_type: ProblemType = None,
) -> CalibrationLoss:
    r"""Entropy regularisation (confidence penalty): cross entropy less a reward for the entropy of p.

    `label_smoothing` moves every class towards 1 / C, this one leaves classes alone whose probability is nearly
    0. `focal` is an upper bound of it: with a = γ >= 1 this loss is at most the focal loss.

    $$L = -\log p_y - a\, H(p), \qquad H(p) = -\sum_j p_j \log p_j$$

    Args:
        entropy_weight: a >= 0; at 0 the loss is cross entropy.
        class_weights: (C,) positive factors of the classes; see `make_loss`.
        problem_type: None or "single_label_classification"; there is no multi-label form.

    Returns:
        The loss, in nats; it can be negative.

    Raises:
        ValueError: for an entropy_weight out of range, or a multi-label problem.

    Notes:
        The comparison study gives no value for a; 0.1 is ours.

    References:
        Pereyra et al. 2017, "Regularizing neural networks by penalizing confident output distributions", Eq. 2.

    Example:
        >>> import torch
        >>> entropy_regularized(entropy_weight=0.1)(torch.tensor([[2.0, 0.0]]), torch.tensor([0]))
        tensor(0.0904)
    """
    own = checked(entropy_regularized, entropy_weight=entropy_weight)
    formula = Formula(penalties=((own["entropy_weight"], NegativeEntropy()),))
    return CalibrationLoss(
        "entropy_regularized", own, formula, class_weights=class_weights, problem_type=problem_type
    )


@constructor
def logit_norm(
    *,
    norm_weight: NonNegative = 0.01,
    p: AtLeastOne = 1.0,
    class_weights: ClassWeights = None,
    problem_type: ProblemType = None,
) -> CalibrationLoss:
    r"""Logit norm: cross entropy plus the norm of the logits, which keeps them, and the confidence, small.

    It acts on the logits themselves, where `entropy_regularized` acts on the probabilities: a shift of all
    logits changes it.

    $$L = -\log p_y + a\, \lVert z \rVert_p$$

    Args:
        norm_weight: a >= 0; at 0 the loss is cross entropy.
        p: order of the norm, >= 1.
        class_weights: (C,) positive factors of the classes; see `make_loss`.
        problem_type: None or "single_label_classification"; there is no multi-label form.

    Returns:
        The loss; its first term is in nats.

    Raises:
        ValueError: for a value out of range, or a multi-label problem.

    Notes:
        The norm is per example, and its mean over the batch is ours: the comparison study gives neither that
        nor a value for a. A masked logit (-inf) counts as 0. `InverseLink` cannot undo this loss, which
        depends on more than the probabilities.

    References:
        The comparison study, section 2.3, without a number (its Eq. 3 is the focal loss).

    Example:
        >>> import torch
        >>> logit_norm(norm_weight=0.01)(torch.tensor([[2.0, 0.0]]), torch.tensor([0]))
        tensor(0.1469)
    """
    own = checked(logit_norm, norm_weight=norm_weight, p=p)
    formula = Formula(penalties=((own["norm_weight"], LogitNormPenalty(own["p"])),))
    return CalibrationLoss("logit_norm", own, formula, class_weights=class_weights, problem_type=problem_type)


@constructor
def mbls(
    *,
    margin_weight: NonNegative = 0.1,
    margin: NonNegative = 10.0,
    class_weights: ClassWeights = None,
    problem_type: ProblemType = None,
) -> CalibrationLoss:
    r"""MbLS (margin-based label smoothing): cross entropy plus what the logits' distances exceed a margin by.

    `label_smoothing` draws all logits together, also where they are near; this one leaves distances alone up to a
    margin, so that a model may still be sure.

    $$L = -\log p_y + \frac{a}{C} \sum_j \max(0,\, \max_k z_k - z_j - m)$$

    Args:
        margin_weight: a >= 0; at 0 the loss is cross entropy.
        margin: m >= 0, the distance of logits that costs nothing; the authors take 6 to 10. With 0 it acts like label
            smoothing.
        class_weights: (C,) positive factors of the classes; see `make_loss`.
        problem_type: None or "single_label_classification"; there is no multi-label form.

    Returns:
        The loss; its first term is in nats.

    Raises:
        ValueError: for a value out of range, or a multi-label problem.

    Notes:
        A masked class (-inf) has no distance, and is not counted in C. Memory: some (N, C) numbers beside the logits.

    References:
        Liu et al. 2022, "The devil is in the margin: margin-based label smoothing for network calibration", Eq. 8.

    Example:
        >>> import torch
        >>> mbls(margin=1.0)(torch.tensor([[2.0, 0.0]]), torch.tensor([0]))
        tensor(0.1769)
    """
    own = checked(mbls, margin_weight=margin_weight, margin=margin)
    formula = Formula(penalties=((own["margin_weight"], ExcessOverMargin(own["margin"])),))
    return CalibrationLoss("mbls", own, formula, class_weights=class_weights, problem_type=problem_type)
