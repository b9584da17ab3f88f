# mypy: disable-error-code="no-untyped-def"
"""Cross entropy with a penalty that couples the batch: MMCE, soft-binned ECE, kernel-density ECE,
MDCA, AvUC.

A formula gets the numbers of all rows of the micro-batch, or with the trainer's `gather_batch=True`
of those of all processes, and returns the penalty. `counts` is 1, or 0 for a row that is ignored.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_calib.losses.arithmetic import Terms, expm1, tiny
from hf_calib.losses.engine import is_traced
from hf_calib.losses.loss import cross_entropy_of_rows, loss
from hf_calib.losses.pointwise import focal_term
from hf_calib.losses.ranges import NonNegative, NumberOfBins, Positive
from hf_calib.losses.statistics.definitions import (
    Confidence,
    Correct,
    Counts,
    Entropy,
    Labels,
    LogProbs,
    Statistic,
)

MMCE_KERNEL_WIDTH = 0.4  # Kumar et al. 2018, section 4
# Two confidences within this many units in the last place of 1 are a tie for MMCE's kernel.
_ULPS_OF_A_TIE = 16
_EPSILON = 1e-10
_KERNEL_ELEMENTS = 2**22  # The size of a block of kernel weights.
_FEW_PAIRS = 2**20  # Up to this many, the kernel of all pairs is stored.


@loss(
    source="Kumar et al. 2018",
    reads=lambda **_: [Confidence(), Correct(), Counts()],
    rows=cross_entropy_of_rows,
)
def mmce(
    ce,
    confidence,
    correct,
    counts,
    *,
    mmce_weight: NonNegative = 0.5,
    variant: Literal["weighted", "plain"] = "weighted",
    authors_code: bool = False,
):
    r"""MMCE: cross entropy plus the maximum mean calibration error of the batch.

    The calibration error uses a kernel on the confidences instead of bins. It needs O(N log N) time
    and O(N) memory; `kde_ece` needs O(N^2). The kernel has a kink at equal confidences, so a pair
    that ties has no gradient.

    $$L = \mathrm{CE} + \lambda\, \mathrm{MMCE}, \qquad
        \mathrm{MMCE}^2 = \frac{1}{N^2} \sum_{i,j} (c_i - r_i)(c_j - r_j) \exp(-|r_i - r_j| / 0.4)$$

    where r is the confidence, and c is 1 if the predicted class is correct and 0 otherwise.

    Args:
        mmce_weight: λ >= 0; at 0 the loss is cross entropy. The default is ours: the 2 of the
            papers' scripts is for `authors_code=True`, and prevents models from learning otherwise.
        variant: "weighted" averages over correct and wrong predictions separately, so that the
            rarer kind counts equally (0 if all are correct or all are wrong); "plain" is the
            equation above.
        authors_code: follow the authors' code, which divides the weighted form by the number of
            pairs once more and takes no root of the plain form.

    Example:
        >>> mmce()(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
        tensor(1.0475)
    """
    # Two kinds of rows, (2, N): correct and wrong ones. Their errors are c - r, whose derivative by
    # r is -1.
    kinds = torch.stack([correct, 1 - correct]) * counts
    errors = kinds * (correct - confidence)
    near, growth = _kernel_products(confidence, errors)
    sizes = kinds.sum(1)
    pairs = torch.outer(sizes, sizes)
    if variant == "plain":
        weights = (1 / pairs.sum().clamp_min(1)).expand(2, 2)
        scale: Any = mmce_weight
    else:
        weights = 1 / pairs.clamp_min(1)
        if authors_code:
            weights = weights / (pairs + 1e-5)
        # It is 0 if all predictions are of one kind.
        scale = mmce_weight * (pairs.amin() > 0)
    # squared = sum over two kinds k and l of weights_kl errors_k K errors_l. It depends on r_i by
    # the errors of row i, whose derivative is -1 for its kind, and by row and column i of the
    # symmetric K, so both come twice.
    of_pairs = weights @ near
    squared = (of_pairs * errors).sum()
    slope = 2 * (weights @ growth * errors - of_pairs * kinds).sum(0)
    if variant == "plain" and authors_code:
        return scale * squared, 0.0, scale * slope, 0.0, 0.0
    # The gradient of a root at 0 is infinite.
    root = (squared.clamp_min(0) + _EPSILON).sqrt()
    return scale * root, 0.0, scale / (2 * root) * slope, 0.0, 0.0


def _kernel_products(confidence: Tensor, errors: Tensor) -> tuple[Tensor, Tensor]:
    """The products errors (k, N) @ K, K_ij = exp(-|r_i - r_j| / h),
    and those with the derivative of K by r_j.

    K has a kink where confidences tie up to rounding; its value there is 1 and its derivative 0.
    """
    tolerance = _ULPS_OF_A_TIE * torch.finfo(confidence.dtype).eps
    if len(confidence) ** 2 > _FEW_PAIRS:
        return _sorted_kernel_products(confidence, errors, tolerance)
    # A distance within the tolerance becomes 0.
    distance = F.hardshrink(confidence - confidence[:, None], tolerance)
    kernel = torch.exp(distance.abs() / -MMCE_KERNEL_WIDTH)
    growth = kernel * distance.sign() / -MMCE_KERNEL_WIDTH
    return errors @ kernel, errors @ growth


def _sorted_kernel_products(
    confidence: Tensor, errors: Tensor, tolerance: float
) -> tuple[Tensor, Tensor]:
    """The same in O(N log N) time and O(N) memory.

    For rising confidences K_ij is exp(r_i / h) exp(-r_j / h) on one side of the diagonal and its
    inverse on the other, so the products are cumulative sums.
    """
    rising, order = confidence.sort()
    errors = errors[:, order]
    fixed = rising.detach()
    first = torch.searchsorted(fixed, fixed - tolerance)
    end = torch.searchsorted(fixed, fixed + tolerance, right=True)
    growth = (rising / MMCE_KERNEL_WIDTH).exp()
    grown = F.pad((errors * growth).cumsum(1), (1, 0))
    fallen = F.pad((errors / growth).cumsum(1), (1, 0))
    same = F.pad(errors.cumsum(1), (1, 0))
    below = grown[:, first] / growth
    above = (fallen[:, -1:] - fallen[:, end]) * growth
    ties = same[:, end] - same[:, first]
    rank = order.argsort()
    slope = (above - below) / MMCE_KERNEL_WIDTH
    return (below + above + ties)[:, rank], slope[:, rank]


def _of_soft_bins(variant: str, **values: Any) -> list[Statistic]:
    read: list[Statistic] = [Confidence(), Correct(), Counts()]
    if variant == "dece":
        read.append(LogProbs())
    return read


@loss(
    source="Karandikar et al. 2021; Bohdal et al. 2021 (dece)",
    reads=_of_soft_bins,
    rows=cross_entropy_of_rows,
    by_autograd=True,
)
def soft_ece(
    ce,
    confidence,
    correct,
    counts,
    log_probs=None,
    *,
    ece_weight: NonNegative = 1.0,
    n_bins: NumberOfBins = 15,
    variant: Literal["sb_ece", "dece"] = "sb_ece",
    bin_temperature: Positive = 0.01,
    rank_sharpness: Positive = 100.0,
):
    r"""Soft-binned ECE: cross entropy plus an expected calibration error of the batch with soft
    bins.

    The penalty is the metric in differentiable form; `mmce` and `kde_ece` need no bins.

    $$L = \mathrm{CE} + \lambda \sqrt{\sum_b \frac{|b|}{N} (A_b - C_b)^2}$$

    where $A_b$ is the accuracy and $C_b$ the mean confidence of bin b with centre $m_b$. A
    confidence r belongs to bin b by the share $\mathrm{softmax}_b(-(r - m_b)^2 / T)$.

    Args:
        ece_weight: λ >= 0; at 0 the loss is cross entropy.
        n_bins: number M of bins, >= 1.
        variant: "sb_ece" is the equation. "dece" has the L1 norm, the memberships of a soft
            decision tree, and a soft correctness from the rank of the label, with the constants of
            the authors' code. The authors train on DECE alone; here it is added to cross entropy.
        bin_temperature: T > 0 of the memberships (t_b in DECE); with a smaller T the bins are
            harder.
        rank_sharpness: t_a > 0 of DECE's soft rank; "sb_ece" does not use it.

    Example:
        >>> soft_ece()(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
        tensor(1.1653)
    """
    if variant == "sb_ece":
        members = _members_by_distance(confidence, n_bins, bin_temperature)
        accuracy = correct
    else:
        members = _members_by_tree(confidence, n_bins, bin_temperature)
        lead = log_probs.exp() - torch.exp(-ce)[:, None]
        # The rank of the label is subtracted from 2: the number of classes above it plus 1, where
        # the sum already has 1/2 for the label itself.
        accuracy = (1.5 - torch.sigmoid(rank_sharpness * lead).sum(1)).clamp_min(0)
    counted = members * counts[:, None]
    size = counted.sum(0)
    gap = counted.T @ (accuracy - confidence) / size.clamp_min(tiny(size))
    shares = size / counts.sum().clamp_min(1)
    if variant == "sb_ece":
        # The gradient of a root at 0 is infinite.
        return ece_weight * ((shares * gap.square()).sum() + _EPSILON).sqrt()
    return ece_weight * (shares * gap.abs()).sum()


def _members_by_distance(confidence, n_bins, temperature):
    """The share (N, M) with which a confidence belongs to a bin, by its distance from the bin's
    centre."""
    index = torch.arange(n_bins, device=confidence.device, dtype=confidence.dtype)
    centre = (index + 0.5) / n_bins
    closeness = -(confidence[:, None] - centre).square()
    return torch.softmax(closeness / temperature, dim=1)


def _members_by_tree(confidence, n_bins, temperature):
    """The same by the soft decision tree of DECE, whose ramps cross at the edges of the bins."""
    index = torch.arange(n_bins, device=confidence.device, dtype=confidence.dtype)
    ramps = confidence[:, None] * (index + 1) - (index / n_bins).cumsum(0)
    members = torch.softmax(ramps / temperature, dim=1)
    # This is the authors' smoothing with their constant.
    return (members + 1e-6) / (1 + (n_bins + 1) * 1e-6)


def _of_points(kind: str, **values: Any) -> list[Statistic]:
    read: list[Statistic] = [Confidence(), Correct(), Counts()]
    if kind == "canonical":
        read += [Labels(), LogProbs()]
    return read


@loss(
    source="Popordanoska et al. 2022, Eq. 9; Tao et al. 2023 (DFL), F",
    reads=_of_points,
    rows=cross_entropy_of_rows,
    by_autograd=True,
)
def kde_ece(
    ce,
    confidence,
    correct,
    counts,
    labels=None,
    log_probs=None,
    *,
    kde_weight: NonNegative = 0.5,
    bandwidth: Positive = 0.1,
    kind: Literal["top_label", "canonical"] = "top_label",
):
    r"""KDE-XE: cross entropy plus a kernel-density estimate of the calibration error of the batch.

    The accuracy at each confidence r (c = 1 if the predicted class is correct) is estimated from
    the other examples, without bins. The time is O(N^2); `mmce` needs O(N log N). The kernel is
    computed in blocks of rows.

    $$L = \mathrm{CE} + \frac{\lambda}{N} \sum_i
        \left| \frac{\sum_{j \ne i} k(r_i; r_j)\, c_j}{\sum_{j \ne i} k(r_i; r_j)} - r_i \right|$$

    where k is the density of Beta(r_j / h + 1, (1 - r_j) / h + 1) at r_i. With kind="canonical", p
    and $e_y$ replace r and c, in an L1 norm, with the density of Dirichlet(p_j / h + 1); this needs
    several (N, C) arrays.

    Args:
        kde_weight: λ >= 0; at 0 the loss is cross entropy.
        bandwidth: h > 0 of the kernel.
        kind: "top_label", or "canonical" as in both papers. Both equal
            `hf_calib.metrics.kde_calibration_error` of the batch, or 0 for one example. Points are
            kept 1e-6 away from 0 and 1, where the authors' code has NaN.

    Example:
        >>> kde_ece()(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
        tensor(1.0075)
    """
    if kind == "top_label":
        points = torch.stack([confidence, 1 - confidence], dim=1)
        accuracies = _kernel_means(points, correct[:, None], bandwidth, counts)
        gaps = accuracies - confidence[:, None]
    else:
        points = log_probs.exp()
        outcomes = F.one_hot(labels, points.shape[1]).to(points)
        gaps = _kernel_means(points, outcomes, bandwidth, counts) - points
    size = counts.sum()
    penalty = (gaps.abs().sum(1) * counts).sum() / size.clamp_min(1)
    # One example has no penalty.
    return kde_weight * penalty.where(size >= 2, 0)


def _kernel_means(
    points: Tensor, outcomes: Tensor, bandwidth: float, counts: Tensor
) -> Tensor:
    """Means of the other examples' outcomes (N, K), weighted by a kernel around each of the points
    (N, C).

    The kernel is the density of Dirichlet(point_j / h + 1) at point_i; for C = 2 that is the Beta
    kernel. For a large batch, its (N, N) weights are computed in blocks of rows, and again in the
    backward pass.
    """
    # The logarithm of the kernel is not finite at 0 and 1.
    points = points.clamp(1e-6, 1 - 1e-6)
    parameters = points / bandwidth
    of_classes = torch.lgamma(parameters + 1).sum(1)
    log_norm = of_classes - torch.lgamma((parameters + 1).sum(1))

    def means(rows: Tensor, first: int) -> Tensor:
        log_kernel = rows.log() @ parameters.T - log_norm
        log_kernel = log_kernel.masked_fill(counts == 0, -1e30)
        own = torch.arange(first, first + len(rows), device=rows.device)
        log_kernel = log_kernel.scatter(1, own[:, None], -torch.inf)
        # A single example has only masked entries, for which the softmax is not defined.
        log_kernel = log_kernel.masked_fill(counts.sum() < 2, 0)
        return torch.softmax(log_kernel, dim=1) @ outcomes

    size = max(1, _KERNEL_ELEMENTS // max(len(points), 1))
    if len(points) <= size or is_traced():
        return means(points, 0)
    blocks = []
    for first in range(0, len(points), size):
        rows = points[first : first + size]
        blocks.append(checkpoint(means, rows, first, use_reentrant=False))
    return torch.cat(blocks)


def _focal_of_rows(ce: Tensor, *, gamma: float, **values: Any) -> Terms:
    log_p = -ce
    return focal_term(ce, log_p, -expm1(log_p), gamma)


@loss(
    source="Hebbalaguppe et al. 2022 (MDCA), Eq. 4, 5",
    reads=lambda **_: [Counts(), Labels(), LogProbs()],
    rows=_focal_of_rows,
)
def mdca(
    ce,
    counts,
    labels,
    log_probs,
    *,
    mdca_weight: NonNegative = 1.0,
    gamma: NonNegative = 0.0,
):
    r"""MDCA: cross entropy or focal loss plus the gap between mean probabilities and class
    frequencies of the batch.

    The penalty covers every class; that of `mmce` covers the predicted class only. It is of little
    use in batches with fewer rows than there are classes. It needs memory for several (N, C)
    arrays.

    $$L = (1 - p_y)^\gamma\, \mathrm{CE} + \frac{\lambda}{C} \sum_j
        \Bigl| \frac{1}{N} \sum_i p_{ij} - \frac{1}{N} \sum_i [y_i = j] \Bigr|$$

    Args:
        mdca_weight: λ >= 0.
        gamma: γ >= 0 of the focal loss; at 0 the first term is cross entropy.

    Example:
        >>> mdca()(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
        tensor(1.1452)
    """
    probs = log_probs.exp()
    size = counts.sum().clamp_min(1)
    frequencies = counts.new_zeros(probs.shape[1]).scatter_add(0, labels, counts)
    gaps = (counts @ probs - frequencies) / size
    scale = mdca_weight / len(gaps)
    # dp/dlog p = p
    slope = (probs * (scale * gaps.sign() / size)).mul_(counts[:, None])
    return scale * gaps.abs().sum(), 0.0, 0.0, 0.0, slope


@loss(
    source="Krishnan and Tickoo 2020 (AvUC), Eq. 3-5",
    reads=lambda **_: [Confidence(), Correct(), Counts(), Entropy()],
    rows=cross_entropy_of_rows,
    by_autograd=True,
)
def avuc(
    ce,
    confidence,
    correct,
    counts,
    entropy,
    *,
    avuc_weight: NonNegative = 1.0,
):
    r"""AvUC: cross entropy plus a penalty on uncertain correct predictions and on certain wrong
    predictions.

    It makes the entropy separate correct from wrong predictions, which helps abstention more than
    calibration.

    $$L = \mathrm{CE} + \lambda \log \Bigl(1 + \frac{n_{AU} + n_{IC}}{n_{AC} + n_{IU}}\Bigr)$$

    A row with confidence r and entropy u counts r if it is accurate (A) and 1 - r if it is
    inaccurate (I). This is multiplied by 1 - tanh u if the row is certain (C), and by tanh u if it
    is uncertain (U). A row is uncertain if u is above a threshold, the midpoint of the mean
    entropies of the accurate and of the inaccurate rows of the batch.

    Args:
        avuc_weight: λ >= 0. The default and the batch's own threshold are ours; the authors' is of
            the last epoch.

    Example:
        >>> avuc()(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
        tensor(0.7201)
    """
    # Two kinds of rows, (2, N): accurate and inaccurate ones.
    kinds = torch.stack([correct, 1 - correct]) * counts
    size = kinds.sum(1)
    fixed = entropy.detach()
    means = (kinds * fixed).sum(1) / size.clamp_min(1)
    # If all rows are of one kind, it is their mean.
    threshold = means.sum() / (size > 0).sum().clamp_min(1)
    is_certain = fixed <= threshold
    unsure = entropy.tanh()
    weight = torch.where(is_certain, 1 - unsure, unsure)
    accurate, inaccurate = kinds * torch.stack([confidence, 1 - confidence]) * weight
    good = torch.where(is_certain, accurate, inaccurate)
    bad = torch.where(is_certain, inaccurate, accurate)
    ratio = bad.sum() / good.sum().clamp_min(_EPSILON)
    return avuc_weight * torch.log1p(ratio)


def all_gather_rows(rows: list[Tensor]) -> tuple[list[Tensor], int]:
    """Concatenate (N,) vectors and (N, C) matrices over the processes;
    return them and the number of processes.

    N may differ between processes; shorter rows are filled up with zeros. Every process then
    computes the same value from the rows. The gradient of a process's own slice is summed over the
    processes, so it is the full gradient after DDP has averaged it.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return rows, 1
    length = torch.tensor(len(rows[0]), device=rows[0].device)
    dist.all_reduce(length, dist.ReduceOp.MAX)
    missing = int(length) - len(rows[0])
    columns = [each if each.dim() == 2 else each[:, None] for each in rows]
    matrix = F.pad(torch.cat(columns, dim=1), (0, 0, 0, missing))
    gathered = _AllGather.apply(matrix)
    parts = gathered.split([each.shape[1] for each in columns], dim=1)
    shaped = [
        part if own.dim() == 2 else part.squeeze(1)
        for part, own in zip(parts, rows, strict=True)
    ]
    return shaped, dist.get_world_size()


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        # The input must not change.
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]
