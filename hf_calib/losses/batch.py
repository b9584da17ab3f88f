"""Cross entropy with a penalty that couples the batch: MMCE, soft-binned ECE, kernel-density ECE, MDCA, AvUC.

A formula reads the micro-batch as `rows.batch`, with the trainer's `gather_batch=True` those of all processes, and
returns a value per row and the penalty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_calib.losses.loss import Shared, loss
from hf_calib.losses.ranges import NonNegative, NumberOfBins, Positive
from hf_calib.losses.rows import Rows, focal_term
from hf_calib.losses.statistics.door import is_traced

if TYPE_CHECKING:
    from typing_extensions import Unpack

MMCE_KERNEL_WIDTH = 0.4  # Kumar et al. 2018, section 4
# Units in the last place of 1 within which two confidences tie for MMCE's kernel.
_ULPS_OF_A_TIE = 16
_EPSILON = 1e-10
_KERNEL_ELEMENTS = 2**22  # of a block of kernel weights


@loss(source="Kumar et al. 2018")
def mmce(
    r: Rows,
    *,
    mmce_weight: NonNegative = 0.5,
    variant: Literal["weighted", "plain"] = "weighted",
    authors_code: bool = False,
    **shared: Unpack[Shared],
) -> tuple[Tensor, Tensor]:
    r"""MMCE: cross entropy plus the maximum mean calibration error of the batch.

    A calibration error without bins, by a kernel on the confidences, in O(N log N) and O(N) memory, where `kde_ece`
    needs O(N^2). Where confidences are equal up to rounding the kernel has a kink: such a pair has no gradient.

    $$L = \mathrm{CE} + \lambda\, \mathrm{MMCE}, \qquad
        \mathrm{MMCE}^2 = \frac{1}{N^2} \sum_{i,j} (c_i - r_i)(c_j - r_j) \exp(-|r_i - r_j| / 0.4)$$

    with r the confidence and c = 1 where the predicted class is right.

    Args:
        mmce_weight: λ >= 0; at 0 the loss is cross entropy. The default is ours: the 2 that papers quote goes with
            `authors_code=True`, and without it keeps models from learning.
        variant: "weighted" takes the mean over right and wrong predictions apart, so that the rarer kind counts
            as much (0 where all are right, or all wrong); "plain" is the equation above.
        authors_code: as that does, divide the weighted form by the number of pairs once more, and take no root of the
            plain one.

    Example:
        >>> mmce()(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
        tensor(1.0475)
    """
    confidence, order = r.batch.confidence.sort()
    correct = r.batch.correct[order]
    kinds = torch.stack([correct, 1 - correct]) * r.batch.counts[order]  # right and wrong rows
    errors = kinds * torch.stack([1 - confidence, -confidence])
    # (2, 2): sums over the pairs of both kinds, and how many pairs they are.
    sums = (errors[:, None] * _kernel_products(confidence, errors)).sum(2)
    pairs = kinds.sum(1)[:, None] * kinds.sum(1)
    if variant == "weighted":
        squared = (sums / pairs.clamp_min(1) / (pairs + 1e-5 if authors_code else 1)).sum()
    else:
        squared = sums.sum() / pairs.sum().clamp_min(1)
        if authors_code:
            return r.ce, mmce_weight * squared
    root = (squared.clamp_min(0) + _EPSILON).sqrt()  # whose gradient at 0 is infinite
    return r.ce, mmce_weight * (root.where(pairs.min() > 0, 0) if variant == "weighted" else root)


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


@loss(source="Karandikar et al. 2021; Bohdal et al. 2021 (dece)")
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
        variant: "sb_ece" (the equation), or "dece": the L1 norm, memberships of a soft decision tree, and correctness
            made soft too, by the rank of the label, as in the authors' code (its constant of normalisation included),
            which trains on DECE alone; here it is added to cross entropy.
        bin_temperature: T > 0 of the memberships (t_b in DECE). The smaller, the harder the bins.
        rank_sharpness: t_a > 0 of DECE's soft rank; "sb_ece" does not use it.

    Example:
        >>> soft_ece()(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
        tensor(1.1653)
    """
    b = r.batch
    index = torch.arange(n_bins, device=b.confidence.device, dtype=b.confidence.dtype)
    if variant == "sb_ece":
        closeness = -(b.confidence[:, None] - (index + 0.5) / n_bins).square()
        members = torch.softmax(closeness / bin_temperature, dim=1)
        accuracy = b.correct
    else:
        ramps = b.confidence[:, None] * (index + 1) - (index / n_bins).cumsum(0)
        members = torch.softmax(ramps / bin_temperature, dim=1)
        # The authors' smoothing, their constant included.
        members = (members + 1e-6) / (1 + (n_bins + 1) * 1e-6)
        lead = b.log_probs.exp() - torch.exp(-b.ce)[:, None]
        # Less the rank of the label: how many classes are ahead of it, which itself counts 1/2.
        accuracy = (1.5 - torch.sigmoid(rank_sharpness * lead).sum(1)).clamp_min(0)
    counted = members * b.counts[:, None]
    size = counted.sum(0)
    gap = (counted.T @ (accuracy - b.confidence)) / size.clamp_min(torch.finfo(size.dtype).tiny)
    shares = size / b.counts.sum().clamp_min(1)
    if variant == "sb_ece":
        return r.ce, ece_weight * ((shares * gap.square()).sum() + _EPSILON).sqrt()
    return r.ce, ece_weight * (shares * gap.abs()).sum()


@loss(source="Popordanoska et al. 2022, Eq. 9; Tao et al. 2023 (DFL), F")
def kde_ece(
    r: Rows,
    *,
    kde_weight: NonNegative = 0.5,
    bandwidth: Positive = 0.1,
    kind: Literal["top_label", "canonical"] = "top_label",
    **shared: Unpack[Shared],
) -> tuple[Tensor, Tensor]:
    r"""KDE-XE: cross entropy plus a kernel-density estimate of the calibration error of the batch.

    The accuracy at each confidence r (c = 1 where the predicted class is right) is estimated from the other examples,
    without bins. Time O(N^2), where `mmce` needs O(N log N); the kernel is made in blocks of rows.

    $$L = \mathrm{CE} + \frac{\lambda}{N} \sum_i
        \left| \frac{\sum_{j \ne i} k(r_i; r_j)\, c_j}{\sum_{j \ne i} k(r_i; r_j)} - r_i \right|$$

    with k the density of Beta(r_j / h + 1, (1 - r_j) / h + 1) at r_i. For kind="canonical" all probabilities p and
    $e_y$ stand for r and c, in an L1 norm, with the density of Dirichlet(p_j / h + 1): some (N, C) numbers of memory.

    Args:
        kde_weight: λ >= 0; at 0 the loss is cross entropy.
        bandwidth: h > 0 of the kernel.
        kind: "top_label", or "canonical", as in both papers. Either is `hf_calib.metrics.kde_calibration_error` of the
            batch; 0 of a single example. Points are kept 1e-6 away from 0 and 1, where the authors' code has NaN.

    Example:
        >>> kde_ece()(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
        tensor(1.0075)
    """
    b = r.batch
    if kind == "top_label":
        points = torch.stack([b.confidence, 1 - b.confidence], dim=1)
        gaps = _kernel_means(points, b.correct[:, None], bandwidth, b.counts) - b.confidence[:, None]
    else:
        points = b.log_probs.exp()
        gaps = _kernel_means(points, b.one_hot, bandwidth, b.counts) - points
    penalty = (gaps.abs().sum(1) * b.counts).sum() / b.counts.sum().clamp_min(1)
    return r.ce, kde_weight * penalty.where(b.counts.sum() >= 2, 0)  # an example that stands alone has none


def _kernel_means(points: Tensor, outcomes: Tensor, bandwidth: float, counts: Tensor) -> Tensor:
    """Means of the other examples' outcomes (N, K), weighted by a kernel around each of the points (N, C).

    The kernel is the density of Dirichlet(point_j / h + 1) at point_i; for C = 2 that is the Beta kernel. Of a large
    batch its (N, N) weights are made in blocks of rows, and again in the backward pass.
    """
    points = points.clamp(1e-6, 1 - 1e-6)  # at 0 and 1 the kernel has no finite logarithm
    parameters = points / bandwidth
    log_norm = torch.lgamma(parameters + 1).sum(1) - torch.lgamma((parameters + 1).sum(1))

    def means(rows: Tensor, first: int) -> Tensor:
        log_kernel = (rows.log() @ parameters.T - log_norm).masked_fill(counts == 0, -1e30)
        own = torch.arange(first, first + len(rows), device=rows.device)
        log_kernel = log_kernel.scatter(1, own[:, None], -torch.inf)
        # Of an example without any other, all of whose entries are masked, the softmax says nothing.
        return torch.softmax(log_kernel.masked_fill(counts.sum() < 2, 0), dim=1) @ outcomes

    size = max(1, _KERNEL_ELEMENTS // max(len(points), 1))
    if len(points) <= size or is_traced():
        return means(points, 0)
    blocks = enumerate(points.split(size))
    return torch.cat([checkpoint(means, rows, i * size, use_reentrant=False) for i, rows in blocks])


@loss(source="Hebbalaguppe et al. 2022 (MDCA), Eq. 4, 5")
def mdca(
    r: Rows, *, mdca_weight: NonNegative = 1.0, gamma: NonNegative = 0.0, **shared: Unpack[Shared]
) -> tuple[Tensor, Tensor]:
    r"""MDCA: cross entropy, or focal loss, plus the gap between mean probabilities and class frequencies in the batch.

    It looks at every class, where `mmce` looks at the predicted one. In a batch that is small beside the number of
    classes it says little. Memory: some (N, C) numbers.

    $$L = (1 - p_y)^\gamma\, \mathrm{CE} + \frac{\lambda}{C} \sum_j
        \Bigl| \frac{1}{N} \sum_i p_{ij} - \frac{1}{N} \sum_i [y_i = j] \Bigr|$$

    Args:
        mdca_weight: λ >= 0.
        gamma: of the focal loss, >= 0; at 0 the loss is cross entropy.

    Example:
        >>> mdca()(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
        tensor(1.1452)
    """
    apart = (r.batch.log_probs.exp() - r.batch.one_hot) * r.batch.counts[:, None]
    frequency_gaps = apart.sum(0) / r.batch.counts.sum().clamp_min(1)
    return focal_term(r.ce, gamma), mdca_weight * frequency_gaps.abs().mean()


@loss(source="Krishnan and Tickoo 2020 (AvUC), Eq. 3-5")
def avuc(r: Rows, *, avuc_weight: NonNegative = 1.0, **shared: Unpack[Shared]) -> tuple[Tensor, Tensor]:
    r"""AvUC: cross entropy plus a cost of being uncertain where right, and certain where wrong.

    It asks that the entropy tell right from wrong, which serves abstention more than probabilities.

    $$L = \mathrm{CE} + \lambda \log \Bigl(1 + \frac{n_{AU} + n_{IC}}{n_{AC} + n_{IU}}\Bigr)$$

    Of each row, with confidence r and entropy u, an accurate one (A) counts r, an inaccurate one (I) 1 - r, times
    1 - tanh u where it is certain (C) and tanh u where it is uncertain (U): where u is above a threshold, the middle
    between the mean entropies of the right and of the wrong rows of the batch.

    Args:
        avuc_weight: λ >= 0. The default is ours, as is the batch's own threshold; the authors' is of an epoch before.

    Example:
        >>> avuc()(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
        tensor(0.7201)
    """
    entropy = r.batch.entropy
    kinds = torch.stack([r.batch.correct, 1 - r.batch.correct]) * r.batch.counts  # right and wrong rows
    size = kinds.sum(1)
    means = (kinds * entropy.detach()).sum(1) / size.clamp_min(1)
    threshold = means.sum() / (size > 0).sum().clamp_min(1)  # with one kind, its mean
    certain = (entropy.detach() <= threshold).to(entropy)
    shares = torch.stack([certain * (1 - entropy.tanh()), (1 - certain) * entropy.tanh()])
    weighted = kinds * torch.stack([r.batch.confidence, 1 - r.batch.confidence])
    (right_certain, right_unsure), (wrong_certain, wrong_unsure) = (weighted[:, None] * shares).sum(2)
    bad = right_unsure + wrong_certain
    good = right_certain + wrong_unsure
    return r.ce, avuc_weight * torch.log1p(bad / good.clamp_min(_EPSILON))


def all_gather_rows(rows: list[Tensor]) -> tuple[list[Tensor], int]:
    """Concatenate (N,) vectors and (N, C) matrices over the processes; and the number of these.

    N may differ between processes: shorter rows are filled up with zeros. Every process then computes the same value
    from them. Its gradient reaches each process's own slice summed over the processes, which is the full gradient once
    DDP has averaged it.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return rows, 1
    length = torch.tensor(len(rows[0]), device=rows[0].device)
    dist.all_reduce(length, dist.ReduceOp.MAX)
    missing = int(length) - len(rows[0])
    columns = [each if each.dim() == 2 else each[:, None] for each in rows]
    gathered = _AllGather.apply(torch.nn.functional.pad(torch.cat(columns, dim=1), (0, 0, 0, missing)))
    parts = gathered.split([each.shape[1] for each in columns], dim=1)
    shaped = [part if own.dim() == 2 else part.squeeze(1) for part, own in zip(parts, rows, strict=True)]
    return shaped, dist.get_world_size()


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone(memory_format=torch.contiguous_format)  # not ours to change
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]
