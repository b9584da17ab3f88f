"""Cross entropy with a penalty that couples the batch: MMCE, soft-binned ECE, kernel-density ECE, MDCA, AvUC.

A formula reads the numbers of the batch as `rows.batch`, and returns a value per row and the penalty. The trainer
computes these penalties on the micro-batch, or with `gather_batch=True` on those of all processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_calib.losses.loss import Shared, loss
from hf_calib.losses.ranges import NonNegative, NumberOfBins, Positive
from hf_calib.losses.rows import Rows, focal_term
from hf_calib.losses.statistics.direct import is_traced

if TYPE_CHECKING:
    from typing_extensions import Unpack

MMCE_KERNEL_WIDTH = 0.4  # Kumar et al. 2018, section 4
# Units in the last place of 1 within which two confidences tie for MMCE's kernel.
_ULPS_OF_A_TIE = 16
_EPSILON = 1e-10
_KERNEL_ELEMENTS = 2**22  # of a block of kernel weights


@loss("CE + mmce_weight MMCE of the batch", source="Kumar et al. 2018")
def mmce(
    r: Rows,
    *,
    mmce_weight: NonNegative = 0.5,
    variant: Literal["weighted", "plain"] = "weighted",
    authors_code: bool = False,
    **shared: Unpack[Shared],
) -> tuple[Tensor, Tensor]:
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

    Notes:
        The authors' code divides the weighted form by the number of pairs once more, so that
        a batch repeated twice has half the value, and takes no root of the plain one. A pair whose confidences are
        equal up to rounding has no gradient: the kernel has a kink there.

        The default weight is ours: with the paper's own normalisation 2 keeps models from learning.

    References:
        Kumar et al. 2018, "Trainable calibration measures for neural networks from kernel mean embeddings".

    Example:
        >>> mmce()(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
        tensor(1.0475)
    """
    b = r.batch
    confidence, order = b.confidence.sort()
    counts = b.counts[order]
    right = b.correct[order] * counts
    pairs = _weighted_pairs if variant == "weighted" else _plain_pairs
    return r.ce, mmce_weight * pairs(confidence, right, counts, authors_code)


def _plain_pairs(confidence: Tensor, right: Tensor, counts: Tensor, authors_code: bool) -> Tensor:
    """The equation of `mmce`; the authors' code leaves out the root."""
    error = right - confidence * counts
    squared = _kernel_products(confidence, error[None])[0] @ error / counts.sum().clamp_min(1).square()
    return squared if authors_code else (squared.clamp_min(0) + _EPSILON).sqrt()


def _weighted_pairs(confidence: Tensor, right: Tensor, counts: Tensor, authors_code: bool) -> Tensor:
    """Three means: of right-right, wrong-wrong and right-wrong pairs; 0 where all are right or all wrong."""
    wrong = counts - right
    n_right, n_wrong = right.sum(), wrong.sum()
    right_error, wrong_error = right * (1 - confidence), wrong * confidence
    to_right, to_wrong = _kernel_products(confidence, torch.stack([right_error, wrong_error]))

    def mean(total: Tensor, pairs: Tensor) -> Tensor:
        # The authors divide the mean once more by the number of pairs: a larger batch counts for less.
        return total / pairs.clamp_min(1) / (pairs + 1e-5 if authors_code else 1)

    squared = (
        mean(right_error @ to_right, n_right * n_right)
        + mean(wrong_error @ to_wrong, n_wrong * n_wrong)
        - 2 * mean(right_error @ to_wrong, n_right * n_wrong)
    )
    # The root is taken of a positive number in any case: its gradient at 0 is infinite.
    return (squared.clamp_min(0) + _EPSILON).sqrt().where((n_right > 0) & (n_wrong > 0), 0)


def _kernel_products(confidence: Tensor, errors: Tensor) -> Tensor:
    """errors (k, N) @ K for rising confidences r, K_ij = exp(-|r_i - r_j| / 0.4), without the (N, N) matrix.

    On one side of its diagonal K is exp(-r_i / 0.4) exp(r_j / 0.4), on the other its inverse: the products are running
    sums. Where confidences tie, up to rounding, K has a kink: it is 1 there, with gradient 0.
    """
    fixed = confidence.detach()
    tolerance = _ULPS_OF_A_TIE * torch.finfo(fixed.dtype).eps
    first = torch.searchsorted(fixed, fixed - tolerance)
    end = torch.searchsorted(fixed, fixed + tolerance, right=True)
    growth = (confidence / MMCE_KERNEL_WIDTH).exp()
    scaled = (errors * growth, errors / growth, errors)
    rising, falling, plain = (F.pad(vectors.cumsum(1), (1, 0)) for vectors in scaled)
    below = rising[:, first] / growth
    above = (falling[:, -1:] - falling[:, end]) * growth
    return below + above + plain[:, end] - plain[:, first]


@loss(
    "CE + ece_weight, a soft-binned ECE of the batch",
    source="Karandikar et al. 2021 (sb_ece); Bohdal et al. 2021 (dece)",
)
def soft_ece(
    r: Rows,
    *,
    ece_weight: NonNegative = 1.0,
    n_bins: NumberOfBins = 15,
    variant: Literal["sb_ece", "dece"] = "sb_ece",
    bin_temperature: Positive = 0.01,
    rank_sharpness: Positive = 100.0,
    **shared: Unpack[Shared],
) -> tuple[Tensor, Tensor]:
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

    Notes:
        DECE is that of the authors' code, its constant of normalisation included, without the (N, C, C) matrix. That
        code trains on DECE alone; here it is added to cross entropy.

    References:
        Karandikar et al. 2021, "Soft calibration objectives for neural networks" (sb_ece); Bohdal et al. 2021,
        "Meta-calibration" (dece).

    Example:
        >>> soft_ece()(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
        tensor(1.1653)
    """
    confidence = r.batch.confidence
    index = torch.arange(n_bins, device=confidence.device, dtype=confidence.dtype)
    if variant == "sb_ece":
        distance = (confidence[:, None] - (index + 0.5) / n_bins).square()
        members = torch.softmax(-distance / bin_temperature, dim=1)
        size, gap = _soft_gaps(members, r.batch, r.batch.correct)
        return r.ce, ece_weight * (_mean(size * gap.square(), r.batch) + _EPSILON).sqrt()
    ramps = confidence[:, None] * (index + 1) - (index / n_bins).cumsum(0)
    members = torch.softmax(ramps / bin_temperature, dim=1)
    members = (members + 1e-6) / (1 + (n_bins + 1) * 1e-6)  # the authors' smoothing, their constant included
    correct = (1 - r.batch.classes_ahead(rank_sharpness)).clamp_min(0)
    size, gap = _soft_gaps(members, r.batch, correct)
    return r.ce, ece_weight * _mean(size * gap.abs(), r.batch)


def _soft_gaps(members: Tensor, batch: Rows, accuracy: Tensor) -> tuple[Tensor, Tensor]:
    """Size of each soft bin, and its mean accuracy minus its mean confidence."""
    counted = members * batch.counts[:, None]
    size = counted.sum(0)
    return size, (counted.T @ (accuracy - batch.confidence)) / size.clamp_min(torch.finfo(size.dtype).tiny)


def _mean(totals: Tensor, batch: Rows) -> Tensor:
    return totals.sum() / batch.counts.sum().clamp_min(1)


@loss(
    "CE + kde_weight, a kernel-density ECE of the batch (KDE-XE), of the top label or canonical",
    source="Popordanoska et al. 2022; Tao et al. 2023 (DFL), F",
)
def kde_ece(
    r: Rows,
    *,
    kde_weight: NonNegative = 0.5,
    bandwidth: Positive = 0.1,
    kind: Literal["top_label", "canonical"] = "top_label",
    **shared: Unpack[Shared],
) -> tuple[Tensor, Tensor]:
    r"""KDE-XE: cross entropy plus a kernel-density estimate of the calibration error of the batch.

    The accuracy at each confidence is estimated from the other examples by a Beta kernel, without bins; or, for
    kind="canonical", the frequency of every class at each predicted distribution, by a Dirichlet kernel. Memory: some
    (N, N) numbers, where `mmce` needs O(N), and if canonical some (N, C).

    $$L = \mathrm{CE} + \frac{\lambda}{N} \sum_i
        \left| \frac{\sum_{j \ne i} k(r_i; r_j)\, c_j}{\sum_{j \ne i} k(r_i; r_j)} - r_i \right|
        \quad\text{or}\quad \mathrm{CE} + \frac{\lambda}{N} \sum_i
        \left\lVert \frac{\sum_{j \ne i} k(p_i; p_j)\, e_{y_j}}{\sum_{j \ne i} k(p_i; p_j)} - p_i \right\rVert_1$$

    with r the confidence, c = 1 where the predicted class is right, and k the density of
    Beta(r_j / h + 1, (1 - r_j) / h + 1) at r_i, or of Dirichlet(p_j / h + 1) at p_i.

    Args:
        kde_weight: λ >= 0; at 0 the loss is cross entropy.
        bandwidth: h > 0 of the kernel.
        kind: "top_label", or "canonical": the KDE-XE of Popordanoska et al. and of the dual focal paper.

    Notes:
        The penalty is `hf_calib.metrics.kde_calibration_error` of the batch, of the same kind and bandwidth; of an
        example that stands alone it is 0. Points of the kernel are kept 1e-6 away from 0 and 1, where the authors' code
        has NaN.

    References:
        Popordanoska et al. 2022, "A consistent and differentiable Lp canonical calibration error estimator",
        Eq. 9; Tao et al. 2023, "Dual focal loss for calibration", appendix F (canonical).

    Example:
        >>> kde_ece()(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
        tensor(1.0075)
    """
    b = r.batch
    if kind == "top_label":
        stated = torch.stack([b.confidence, 1 - b.confidence], dim=1)
        gaps = _kernel_means(stated, b.correct[:, None], bandwidth, b.counts) - stated[:, :1]
    else:
        stated = b.log_probs.exp()
        gaps = _kernel_means(stated, b.one_hot, bandwidth, b.counts) - stated
    penalty = _mean(gaps.abs().sum(1) * b.counts, b)
    return r.ce, kde_weight * penalty.where(b.counts.sum() >= 2, 0)  # an example that stands alone has none


def _kernel_means(points: Tensor, outcomes: Tensor, bandwidth: float, counts: Tensor) -> Tensor:
    """Means of the other examples' outcomes (N, K), weighted by a kernel around each of the points (N, K).

    The kernel is the density of Dirichlet(point_j / h + 1) at point_i; for K = 2 that is the Beta kernel. Of a large
    batch its (N, N) weights are made in blocks of rows, and again in the backward pass.
    """
    points = points.clamp(1e-6, 1 - 1e-6)  # at 0 and 1 the kernel has no finite logarithm
    parameters = points / bandwidth
    log_norm = torch.lgamma(parameters + 1).sum(1) - torch.lgamma((parameters + 1).sum(1))
    n = len(points)
    size = max(1, _KERNEL_ELEMENTS // max(n, 1))
    if n <= size or is_traced():
        return _means_of_rows(points, parameters, log_norm, outcomes, counts, 0)
    rest = (parameters, log_norm, outcomes, counts)
    blocks = enumerate(points.split(size))
    return torch.cat(
        [checkpoint(_means_of_rows, rows, *rest, i * size, use_reentrant=False) for i, rows in blocks]
    )


def _means_of_rows(
    points: Tensor, parameters: Tensor, log_norm: Tensor, outcomes: Tensor, counts: Tensor, first: int
) -> Tensor:
    """The same around some of the points (n, K), the first of which is number `first`."""
    log_kernel = (_product(points.log(), parameters.T) - log_norm).masked_fill(counts == 0, -1e30)
    own = torch.arange(first, first + len(points), device=points.device)
    log_kernel = log_kernel.scatter(1, own[:, None], -torch.inf)
    # Of an example without any other, all of whose entries are masked, the softmax says nothing.
    weights = torch.softmax(log_kernel.masked_fill(counts.sum() < 2, 0), dim=1)
    return _product(weights, outcomes)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        ctx.save_for_backward(left, right)
        return left @ right

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor]:
        left, right = ctx.saved_tensors
        with torch.autocast(slope.device.type, enabled=False):
            return slope @ right.T, left.T @ slope


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right, in full precision in a backward under autocast too (traced it is a plain product)."""
    product: Tensor = left @ right if is_traced() else _Product.apply(left, right)
    return product


@loss(
    "CE or focal + mdca_weight, the gap of class frequencies in the batch",
    source="Hebbalaguppe et al. 2022 (MDCA), Eq. 4, 5",
)
def mdca(
    r: Rows, *, mdca_weight: NonNegative = 1.0, gamma: NonNegative = 0.0, **shared: Unpack[Shared]
) -> tuple[Tensor, Tensor]:
    r"""MDCA: cross entropy, or focal loss, plus the gap between mean probabilities and class frequencies in the batch.

    The one penalty here that looks at every class, not at the predicted one alone; without bins.

    $$L = (1 - p_y)^\gamma\, \mathrm{CE} + \frac{\lambda}{C} \sum_j
        \Bigl| \frac{1}{N} \sum_i p_{ij} - \frac{1}{N} \sum_i [y_i = j] \Bigr|$$

    Args:
        mdca_weight: λ >= 0.
        gamma: of the focal loss, >= 0; at 0 the loss is cross entropy.

    Notes:
        In a batch that is small beside the number of classes the penalty says little. Memory: some (N, C) numbers.

    References:
        Hebbalaguppe et al. 2022, "A stitch in time saves nine: a train-time regularizing loss for improved neural
        network calibration", Eq. 4 and 5.

    Example:
        >>> mdca()(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
        tensor(1.1452)
    """
    apart = (r.batch.log_probs.exp() - r.batch.one_hot) * r.batch.counts[:, None]
    frequency_gaps = apart.sum(0) / r.batch.counts.sum().clamp_min(1)
    return focal_term(r.ce, gamma), mdca_weight * frequency_gaps.abs().mean()


@loss(
    "CE + avuc_weight, the cost of being unsure where right and sure where wrong",
    source="Krishnan and Tickoo 2020 (AvUC), Eq. 3",
)
def avuc(r: Rows, *, avuc_weight: NonNegative = 1.0, **shared: Unpack[Shared]) -> tuple[Tensor, Tensor]:
    r"""AvUC: cross entropy plus a cost of being uncertain where right, and certain where wrong.

    It asks that the entropy tell right from wrong, which serves abstention more than probabilities.

    $$L = \mathrm{CE} + \lambda \log \Bigl(1 + \frac{n_{AU} + n_{IC}}{n_{AC} + n_{IU}}\Bigr)$$

    Of each row, with confidence r and entropy u, an accurate one (A) counts r, an inaccurate one (I) 1 - r, times
    1 - tanh u where it is certain (C) and tanh u where it is uncertain (U): where u is above a threshold, the middle
    between the mean entropies of the right and of the wrong rows of the batch.

    Args:
        avuc_weight: λ >= 0; at 0 the loss is cross entropy.

    Notes:
        The authors take the threshold from an epoch before; the batch's own, and the weight of 1, are ours. A batch
        without a row that is as it should be costs λ log(1 + 1e10 n), n the others' count.

    References:
        Krishnan and Tickoo 2020, "Improving model calibration with accuracy versus uncertainty optimization", Eq. 3-5.

    Example:
        >>> avuc()(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
        tensor(0.7201)
    """
    confidence, entropy, counts = r.batch.confidence, r.batch.entropy, r.batch.counts
    right = r.batch.correct * counts
    wrong = counts - right
    means = [(entropy.detach() @ rows) / rows.sum().clamp_min(1) for rows in (right, wrong)]
    both = (right.sum() > 0) & (wrong.sum() > 0)
    threshold = ((means[0] + means[1]) / 2).where(both, means[0] + means[1])  # with one kind, its mean
    certain = (entropy.detach() <= threshold).to(entropy)
    unsure = entropy.tanh()
    shares = torch.stack([certain * (1 - unsure), (1 - certain) * unsure])
    right_certain, right_unsure = (right * confidence * shares).sum(1)
    wrong_certain, wrong_unsure = (wrong * (1 - confidence) * shares).sum(1)
    bad = right_unsure + wrong_certain
    good = right_certain + wrong_unsure
    return r.ce, avuc_weight * torch.log1p(bad / good.clamp_min(_EPSILON))
