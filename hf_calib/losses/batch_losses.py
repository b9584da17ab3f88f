"""Cross entropy with a penalty that couples the batch: MMCE, soft-binned ECE, kernel-density ECE, MDCA, AvUC.

The trainer computes these penalties on the micro-batch, or with `gather_batch=True` on those of all processes.
"""

from __future__ import annotations

from typing import Literal

from hf_calib.losses._calibration_loss import CalibrationLoss, Formula
from hf_calib.losses._hyperparameters import (
    ClassWeights,
    NonNegative,
    NumberOfBins,
    Positive,
    ProblemType,
    checked,
    constructor,
)
from hf_calib.losses.gammas import ConstantGamma
from hf_calib.losses.penalties import (
    AccuracyVersusUncertainty,
    BatchPenalty,
    CanonicalKernelDensityEce,
    ClassFrequencyGap,
    DifferentiableEce,
    KernelDensityEce,
    PlainMmce,
    SoftBinnedEce,
    WeightedMmce,
)
from hf_calib.losses.weights import FocalWeight


@constructor
def mmce(
    *,
    mmce_weight: NonNegative = 0.5,
    variant: Literal["weighted", "plain"] = "weighted",
    authors_code: bool = False,
    class_weights: ClassWeights = None,
    problem_type: ProblemType = None,
) -> CalibrationLoss:
    r"""MMCE: cross entropy plus the maximum mean calibration error of the batch.

    A calibration error without bins, by a kernel on the confidences. In O(N log N) and O(N) memory, where
    `kde_ece` needs O(N^2); `soft_ece` has bins instead.

    $$L = \mathrm{CE} + \lambda\, \mathrm{MMCE}, \qquad
        \mathrm{MMCE}^2 = \frac{1}{N^2} \sum_{i,j} (c_i - r_i)(c_j - r_j) \exp(-|r_i - r_j| / 0.4)$$

    with r the confidence and c = 1 where the predicted class is right.

    Args:
        mmce_weight: λ >= 0; at 0 the loss is cross entropy. The 2 that papers quote goes with `authors_code=True`.
        variant: "weighted" takes the mean over right and wrong predictions apart, so that the rarer kind counts
            as much (0 where all are right, or all wrong); "plain" is the equation above.
        authors_code: whether to compute it as the authors' code does (see Notes).
        class_weights: (C,) positive factors of cross entropy; the penalty is not weighted.
        problem_type: None or "single_label_classification"; there is no multi-label form.

    Returns:
        The loss; its first term is in nats. Reductions "mean" and "sum" only.

    Raises:
        ValueError: for a value out of range, or a multi-label problem.

    Notes:
        Couples the batch. The authors' code divides the weighted form by the number of pairs once more, so that
        a batch repeated twice has half the value, and takes no root of the plain one. A pair whose confidences are
        equal up to rounding has no gradient: the kernel has a kink there.

        The default weight is ours, because with the paper's own normalisation 2 keeps models from learning. A small
        BERT from scratch on 2,000 rows of AG News (10 epochs, batches of 32, two seeds) had accuracy 0.72 and 0.71
        with cross entropy, 0.71 and 0.72 with weight 0.25, 0.73 and 0.72 with 0.5, 0.65 and 0.66 with 1, 0.39 and
        0.44 with 2; its ECE was 0.24 and 0.25 with cross entropy, 0.20 and 0.23 with 0.5, 0.06 with 1. The
        authors' code with weight 2 gave 0.70 and 0.71, ECE 0.23. A larger weight trades accuracy for calibration.
        MiniLM on 1,000 rows, 3 epochs, one seed, had 0.87 with 0.5; on 2,000 rows, one seed, it had 0.49 with 2.

    References:
        Kumar et al. 2018, "Trainable calibration measures for neural networks from kernel mean embeddings".

    Example:
        >>> import torch
        >>> mmce()(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
        tensor(1.0475)
    """
    own = checked(mmce, mmce_weight=mmce_weight, variant=variant, authors_code=authors_code)
    kind = WeightedMmce if own["variant"] == "weighted" else PlainMmce
    formula = Formula(batch_penalties=((own["mmce_weight"], kind(own["authors_code"])),))
    return CalibrationLoss("mmce", own, formula, class_weights=class_weights, problem_type=problem_type)


@constructor
def soft_ece(
    *,
    ece_weight: NonNegative = 1.0,
    n_bins: NumberOfBins = 15,
    variant: Literal["sb_ece", "dece"] = "sb_ece",
    bin_temperature: Positive = 0.01,
    rank_sharpness: Positive = 100.0,
    class_weights: ClassWeights = None,
    problem_type: ProblemType = None,
) -> CalibrationLoss:
    r"""Soft-binned ECE: cross entropy plus an expected calibration error of the batch with soft bins.

    The metric itself, made differentiable; `mmce` and `kde_ece` need no bins.

    $$L = \mathrm{CE} + \lambda \sqrt{\sum_b \frac{|b|}{N} (A_b - C_b)^2}$$

    with $A_b$ the accuracy and $C_b$ the mean confidence of bin b, to which a confidence r belongs by the share
    $\mathrm{softmax}_b(-(r - m_b)^2 / T)$ of its centre $m_b$.

    Args:
        ece_weight: λ >= 0; at 0 the loss is cross entropy.
        n_bins: number M of bins, >= 1.
        variant: "sb_ece" (the equation), or "dece": the L1 norm, memberships of a soft decision tree, and
            correctness made soft too, by the rank of the label.
        bin_temperature: T > 0 of the memberships (t_b in DECE). The smaller, the harder the bins.
        rank_sharpness: t_a > 0 of DECE's soft rank; "sb_ece" does not use it.
        class_weights: (C,) positive factors of cross entropy; the penalty is not weighted.
        problem_type: None or "single_label_classification"; there is no multi-label form.

    Returns:
        The loss; its first term is in nats. Reductions "mean" and "sum" only.

    Raises:
        ValueError: for a value out of range, or a multi-label problem.

    Notes:
        Couples the batch. DECE is computed as in the authors' code, its constant of normalisation included, but
        without the (N, C, C) matrix. That code trains on DECE alone; here it is added to cross entropy.

    References:
        Karandikar et al. 2021, "Soft calibration objectives for neural networks" (sb_ece); Bohdal et al. 2021,
        "Meta-calibration" (dece).

    Example:
        >>> import torch
        >>> soft_ece()(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
        tensor(1.1653)
    """
    own = checked(
        soft_ece,
        ece_weight=ece_weight,
        n_bins=n_bins,
        variant=variant,
        bin_temperature=bin_temperature,
        rank_sharpness=rank_sharpness,
    )
    penalty: BatchPenalty = SoftBinnedEce(own["n_bins"], own["bin_temperature"])
    if own["variant"] == "dece":
        penalty = DifferentiableEce(own["n_bins"], own["bin_temperature"], own["rank_sharpness"])
    formula = Formula(batch_penalties=((own["ece_weight"], penalty),))
    return CalibrationLoss("soft_ece", own, formula, class_weights=class_weights, problem_type=problem_type)


@constructor
def kde_ece(
    *,
    kde_weight: NonNegative = 0.5,
    bandwidth: Positive = 0.1,
    kind: Literal["top_label", "canonical"] = "top_label",
    class_weights: ClassWeights = None,
    problem_type: ProblemType = None,
) -> CalibrationLoss:
    r"""KDE-XE: cross entropy plus a kernel-density estimate of the calibration error of the batch.

    The accuracy at each confidence is estimated from the other examples by a Beta kernel, without bins; or, for
    kind="canonical", the frequency of every class at each predicted distribution, by a Dirichlet kernel. It needs
    (N, N) numbers; `mmce` does with O(N).

    $$L = \mathrm{CE} + \frac{\lambda}{N} \sum_i
        \left| \frac{\sum_{j \ne i} k(r_i; r_j)\, c_j}{\sum_{j \ne i} k(r_i; r_j)} - r_i \right|$$

    for kind="top_label", and for kind="canonical"

    $$L = \mathrm{CE} + \frac{\lambda}{N} \sum_i
        \left\lVert \frac{\sum_{j \ne i} k(p_i; p_j)\, e_{y_j}}{\sum_{j \ne i} k(p_i; p_j)} - p_i \right\rVert_1$$

    with r the confidence, c = 1 where the predicted class is right, and k the density of
    Beta(r_j / h + 1, (1 - r_j) / h + 1) at r_i, or of Dirichlet(p_j / h + 1) at p_i.

    Args:
        kde_weight: λ >= 0; at 0 the loss is cross entropy.
        bandwidth: h > 0 of the kernel.
        kind: "top_label", or "canonical": the KDE-XE of Popordanoska et al. and of the dual focal paper.
        class_weights: (C,) positive factors of cross entropy; the penalty is not weighted.
        problem_type: None or "single_label_classification"; there is no multi-label form.

    Returns:
        The loss; its first term is in nats. Reductions "mean" and "sum" only. An example that stands alone in
        its batch has no penalty.

    Raises:
        ValueError: for a value out of range, or a multi-label problem.

    Notes:
        Couples the batch. The penalty is `hf_calib.metrics.kde_calibration_error` of the batch, of the same kind
        and bandwidth. Points of the kernel are kept 1e-6 away from 0 and 1, where the authors' code has NaN.
        Memory: some (N, N) and, if canonical, some (N, C) numbers; never (N, N, C).

    References:
        Popordanoska et al. 2022, "A consistent and differentiable Lp canonical calibration error estimator",
        Eq. 9; Tao et al. 2023, "Dual focal loss for calibration", appendix F (canonical).

    Example:
        >>> import torch
        >>> kde_ece()(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
        tensor(1.0075)
    """
    own = checked(kde_ece, kde_weight=kde_weight, bandwidth=bandwidth, kind=kind)
    penalty = KernelDensityEce if own["kind"] == "top_label" else CanonicalKernelDensityEce
    formula = Formula(batch_penalties=((own["kde_weight"], penalty(own["bandwidth"])),))
    return CalibrationLoss("kde_ece", own, formula, class_weights=class_weights, problem_type=problem_type)


@constructor
def mdca(
    *,
    mdca_weight: NonNegative = 1.0,
    gamma: NonNegative = 0.0,
    class_weights: ClassWeights = None,
    problem_type: ProblemType = None,
) -> CalibrationLoss:
    r"""MDCA: cross entropy, or focal loss, plus the gap between mean probabilities and class frequencies in the batch.

    The one penalty here that looks at every class, not at the predicted one alone; without bins.

    $$L = (1 - p_y)^\gamma\, \mathrm{CE} + \frac{\lambda}{C} \sum_j
        \Bigl| \frac{1}{N} \sum_i p_{ij} - \frac{1}{N} \sum_i [y_i = j] \Bigr|$$

    Args:
        mdca_weight: λ >= 0.
        gamma: of the focal loss, >= 0; at 0 the loss is cross entropy.
        class_weights: (C,) positive factors of the first term; the penalty is not weighted.
        problem_type: None or "single_label_classification"; there is no multi-label form.

    Returns:
        The loss; its first term is in nats. Reductions "mean" and "sum" only.

    Raises:
        ValueError: for a value out of range, or a multi-label problem.

    Notes:
        Couples the batch: in one that is small beside the number of classes, frequencies are mostly 0, and the penalty
        says little. Memory: some (N, C) numbers beside the logits.

    References:
        Hebbalaguppe et al. 2022, "A stitch in time saves nine: a train-time regularizing loss for improved neural
        network calibration", Eq. 4 and 5.

    Example:
        >>> import torch
        >>> mdca()(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
        tensor(1.1452)
    """
    own = checked(mdca, mdca_weight=mdca_weight, gamma=gamma)
    formula = Formula(
        weight=FocalWeight(),
        gamma=ConstantGamma(own["gamma"]),
        batch_penalties=((own["mdca_weight"], ClassFrequencyGap()),),
    )
    return CalibrationLoss("mdca", own, formula, class_weights=class_weights, problem_type=problem_type)


@constructor
def avuc(
    *,
    avuc_weight: NonNegative = 1.0,
    class_weights: ClassWeights = None,
    problem_type: ProblemType = None,
) -> CalibrationLoss:
    r"""AvUC: cross entropy plus a cost of being uncertain where right, and certain where wrong.

    It asks that the entropy tell right from wrong, which serves abstention more than probabilities.

    $$L = \mathrm{CE} + \lambda \log \Bigl(1 + \frac{n_{AU} + n_{IC}}{n_{AC} + n_{IU}}\Bigr)$$

    Of each row, with confidence r and entropy u, an accurate one (A) counts r, an inaccurate one (I) 1 - r, times
    1 - tanh u where it is certain (C) and tanh u where it is uncertain (U): where u is above a threshold, the middle
    between the mean entropies of the right and of the wrong rows of the batch.

    Args:
        avuc_weight: λ >= 0; at 0 the loss is cross entropy.
        class_weights: (C,) positive factors of cross entropy; the penalty is not weighted.
        problem_type: None or "single_label_classification"; there is no multi-label form.

    Returns:
        The loss; its first term is in nats. Reductions "mean" and "sum" only.

    Raises:
        ValueError: for a value out of range, or a multi-label problem.

    Notes:
        Couples the batch. The authors take the threshold from an epoch before; the batch's own, and the weight of 1,
        are ours. A batch without a row that is as it should be costs λ log(1 + 1e10 n), n the others' count.

    References:
        Krishnan and Tickoo 2020, "Improving model calibration with accuracy versus uncertainty optimization", Eq. 3
        to 5.

    Example:
        >>> import torch
        >>> avuc()(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
        tensor(0.7201)
    """
    own = checked(avuc, avuc_weight=avuc_weight)
    formula = Formula(batch_penalties=((own["avuc_weight"], AccuracyVersusUncertainty()),))
    return CalibrationLoss("avuc", own, formula, class_weights=class_weights, problem_type=problem_type)
