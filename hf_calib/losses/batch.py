"""Cross entropy with a penalty that couples the batch: MMCE, soft-binned ECE, kernel-density ECE, MDCA, AvUC.

A formula reads the micro-batch as `rows.batch` (with the trainer's `gather_batch=True`, that of all processes) and
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
# Two confidences within this many units in the last place of 1 are a tie for MMCE's kernel.
_ULPS_OF_A_TIE = 16
_EPSILON = 1e-10
_KERNEL_ELEMENTS = 2**22  # The size of a block of kernel weights.


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

    The calibration error uses a kernel on the confidences instead of bins. It needs O(N log N) time and O(N) memory;
    `kde_ece` needs O(N^2). The kernel has a kink at equal confidences, so a pair that ties has no gradient.

    $$L = \mathrm{CE} + \lambda\, \mathrm{MMCE}, \qquad
        \mathrm{MMCE}^2 = \frac{1}{N^2} \sum_{i,j} (c_i - r_i)(c_j - r_j) \exp(-|r_i - r_j| / 0.4)$$

    where r is the confidence, and c is 1 if the predicted class is correct and 0 otherwise.

    Args:
        mmce_weight: λ >= 0; at 0 the loss is cross entropy. The default is ours: the 2 of the papers' scripts is
            for `authors_code=True`, and prevents models from learning otherwise.
        variant: "weighted" averages over correct and wrong predictions separately, so that the rarer kind counts
            equally (0 if all are correct or all are wrong); "plain" is the equation above.
        authors_code: follow the authors' code, which divides the weighted form by the number of pairs once more and
            takes no root of the plain form.

    Example:
        >>> mmce()(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
        tensor(1.0475)
    """
    confidence, order = r.batch.confidence.sort()
    correct = r.batch.correct[order]
    kinds = (
        torch.stack([correct, 1 - correct]) * r.batch.counts[order]
    )  # correct, wrong
    errors = kinds * torch.stack([1 - confidence, -confidence])
    # Both are (2, 2): the sums over the pairs of two kinds, and the numbers of pairs.
    sums = (errors[:, None] * _kernel_products(confidence, errors)).sum(2)
    pairs = kinds.sum(1)[:, None] * kinds.sum(1)
    if variant == "weighted":
        squared = (
            sums / pairs.clamp_min(1) / (pairs + 1e-5 if authors_code else 1)
        ).sum()
    else:
        squared = sums.sum() / pairs.sum().clamp_min(1)
        if authors_code:
            return r.ce, mmce_weight * squared
    root = (
        squared.clamp_min(0) + _EPSILON
    ).sqrt()  # The gradient of a root at 0 is infinite.
    return r.ce, mmce_weight * (
        root.where(pairs.min() > 0, 0) if variant == "weighted" else root
    )


def _kernel_products(confidence: Tensor, errors: Tensor) -> Tensor:
    """The product errors (k, N) @ K of rising confidences r, K_ij = exp(-|r_i - r_j| / 0.4), without storing K (N, N).

    On one side of the diagonal K is exp(-r_i / 0.4) exp(r_j / 0.4), on the other the inverse, so that the products are
    cumulative sums. K has a kink where confidences tie up to rounding; its value there is 1 and its gradient 0.
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

    The penalty is the metric in differentiable form; `mmce` and `kde_ece` need no bins.

    $$L = \mathrm{CE} + \lambda \sqrt{\sum_b \frac{|b|}{N} (A_b - C_b)^2}$$

    where $A_b$ is the accuracy and $C_b$ the mean confidence of bin b with centre $m_b$. A confidence r belongs to bin
    b by the share $\mathrm{softmax}_b(-(r - m_b)^2 / T)$.

    Args:
        ece_weight: λ >= 0; at 0 the loss is cross entropy.
        n_bins: number M of bins, >= 1.
        variant: "sb_ece" is the equation. "dece" has the L1 norm, the memberships of a soft decision tree, and a soft
            correctness from the rank of the label, with the constants of the authors' code. The authors train on DECE
            alone; here it is added to cross entropy.
        bin_temperature: T > 0 of the memberships (t_b in DECE); with a smaller T the bins are harder.
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
        # This is the authors' smoothing with their constant.
        members = (members + 1e-6) / (1 + (n_bins + 1) * 1e-6)
        lead = b.log_probs.exp() - torch.exp(-b.ce)[:, None]
        # The rank of the label is subtracted: the number of classes above it, where the label itself counts 1/2.
        accuracy = (1.5 - torch.sigmoid(rank_sharpness * lead).sum(1)).clamp_min(0)
    counted = members * b.counts[:, None]
    size = counted.sum(0)
    gap = (counted.T @ (accuracy - b.confidence)) / size.clamp_min(
        torch.finfo(size.dtype).tiny
    )
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

    The accuracy at each confidence r (c = 1 if the predicted class is correct) is estimated from the other examples,
    without bins. The time is O(N^2); `mmce` needs O(N log N). The kernel is computed in blocks of rows.

    $$L = \mathrm{CE} + \frac{\lambda}{N} \sum_i
        \left| \frac{\sum_{j \ne i} k(r_i; r_j)\, c_j}{\sum_{j \ne i} k(r_i; r_j)} - r_i \right|$$

    where k is the density of Beta(r_j / h + 1, (1 - r_j) / h + 1) at r_i. With kind="canonical", p and $e_y$ replace r
    and c, in an L1 norm, with the density of Dirichlet(p_j / h + 1); this needs several (N, C) arrays.

    Args:
        kde_weight: λ >= 0; at 0 the loss is cross entropy.
        bandwidth: h > 0 of the kernel.
        kind: "top_label", or "canonical" as in both papers. Both equal `hf_calib.metrics.kde_calibration_error` of the
            batch, or 0 for one example. Points are kept 1e-6 away from 0 and 1, where the authors' code has NaN.

    Example:
        >>> kde_ece()(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
        tensor(1.0075)
    """
    b = r.batch
    if kind == "top_label":
        points = torch.stack([b.confidence, 1 - b.confidence], dim=1)
        gaps = (
            _kernel_means(points, b.correct[:, None], bandwidth, b.counts)
            - b.confidence[:, None]
        )
    else:
        points = b.log_probs.exp()
        gaps = _kernel_means(points, b.one_hot, bandwidth, b.counts) - points
    penalty = (gaps.abs().sum(1) * b.counts).sum() / b.counts.sum().clamp_min(1)
    return r.ce, kde_weight * penalty.where(
        b.counts.sum() >= 2, 0
    )  # One example has no penalty.


def _kernel_means(
    points: Tensor, outcomes: Tensor, bandwidth: float, counts: Tensor
) -> Tensor:
    """Means of the other examples' outcomes (N, K), weighted by a kernel around each of the points (N, C).

    The kernel is the density of Dirichlet(point_j / h + 1) at point_i; for C = 2 that is the Beta kernel. For a large
    batch, its (N, N) weights are computed in blocks of rows, and again in the backward pass.
    """
    points = points.clamp(
        1e-6, 1 - 1e-6
    )  # The logarithm of the kernel is not finite at 0 and 1.
    parameters = points / bandwidth
    log_norm = torch.lgamma(parameters + 1).sum(1) - torch.lgamma(
        (parameters + 1).sum(1)
    )

    def means(rows: Tensor, first: int) -> Tensor:
        log_kernel = (rows.log() @ parameters.T - log_norm).masked_fill(
            counts == 0, -1e30
        )
        own = torch.arange(first, first + len(rows), device=rows.device)
        log_kernel = log_kernel.scatter(1, own[:, None], -torch.inf)
        # A single example has only masked entries, for which the softmax is not defined.
        return (
            torch.softmax(log_kernel.masked_fill(counts.sum() < 2, 0), dim=1) @ outcomes
        )

    size = max(1, _KERNEL_ELEMENTS // max(len(points), 1))
    if len(points) <= size or is_traced():
        return means(points, 0)
    blocks = enumerate(points.split(size))
    return torch.cat(
        [checkpoint(means, rows, i * size, use_reentrant=False) for i, rows in blocks]
    )


@loss(source="Hebbalaguppe et al. 2022 (MDCA), Eq. 4, 5")
def mdca(
    r: Rows,
    *,
    mdca_weight: NonNegative = 1.0,
    gamma: NonNegative = 0.0,
    **shared: Unpack[Shared],
) -> tuple[Tensor, Tensor]:
    r"""MDCA: cross entropy or focal loss plus the gap between mean probabilities and class frequencies of the batch.

    The penalty covers every class; that of `mmce` covers the predicted class only. It is of little use in batches with
    fewer rows than there are classes. It needs memory for several (N, C) arrays.

    $$L = (1 - p_y)^\gamma\, \mathrm{CE} + \frac{\lambda}{C} \sum_j
        \Bigl| \frac{1}{N} \sum_i p_{ij} - \frac{1}{N} \sum_i [y_i = j] \Bigr|$$

    Args:
        mdca_weight: λ >= 0.
        gamma: γ >= 0 of the focal loss; at 0 the first term is cross entropy.

    Example:
        >>> mdca()(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
        tensor(1.1452)
    """
    apart = (r.batch.log_probs.exp() - r.batch.one_hot) * r.batch.counts[:, None]
    frequency_gaps = apart.sum(0) / r.batch.counts.sum().clamp_min(1)
    return focal_term(r.ce, gamma), mdca_weight * frequency_gaps.abs().mean()


@loss(source="Krishnan and Tickoo 2020 (AvUC), Eq. 3-5")
def avuc(
    r: Rows, *, avuc_weight: NonNegative = 1.0, **shared: Unpack[Shared]
) -> tuple[Tensor, Tensor]:
    r"""AvUC: cross entropy plus a penalty on uncertain correct predictions and on certain wrong predictions.

    It makes the entropy separate correct from wrong predictions, which helps abstention more than calibration.

    $$L = \mathrm{CE} + \lambda \log \Bigl(1 + \frac{n_{AU} + n_{IC}}{n_{AC} + n_{IU}}\Bigr)$$

    A row with confidence r and entropy u counts r if it is accurate (A) and 1 - r if it is inaccurate (I). This is
    multiplied by 1 - tanh u if the row is certain (C), and by tanh u if it is uncertain (U). A row is uncertain if u is
    above a threshold, the midpoint of the mean entropies of the accurate and of the inaccurate rows of the batch.

    Args:
        avuc_weight: λ >= 0. The default and the batch's own threshold are ours; the authors' is of the last epoch.

    Example:
        >>> avuc()(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
        tensor(0.7201)
    """
    entropy = r.batch.entropy
    kinds = (
        torch.stack([r.batch.correct, 1 - r.batch.correct]) * r.batch.counts
    )  # correct, wrong
    size = kinds.sum(1)
    means = (kinds * entropy.detach()).sum(1) / size.clamp_min(1)
    threshold = means.sum() / (size > 0).sum().clamp_min(
        1
    )  # If all rows are of one kind, it is their mean.
    certain = (entropy.detach() <= threshold).to(entropy)
    shares = torch.stack(
        [certain * (1 - entropy.tanh()), (1 - certain) * entropy.tanh()]
    )
    weighted = kinds * torch.stack([r.batch.confidence, 1 - r.batch.confidence])
    (right_certain, right_unsure), (wrong_certain, wrong_unsure) = (
        weighted[:, None] * shares
    ).sum(2)
    bad = right_unsure + wrong_certain
    good = right_certain + wrong_unsure
    return r.ce, avuc_weight * torch.log1p(bad / good.clamp_min(_EPSILON))


def all_gather_rows(rows: list[Tensor]) -> tuple[list[Tensor], int]:
    """Concatenate (N,) vectors and (N, C) matrices over the processes; return them and the number of processes.

    N may differ between processes; shorter rows are filled up with zeros. Every process then computes the same value
    from the rows. The gradient of a process's own slice is summed over the processes, so it is the full gradient after
    DDP has averaged it.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return rows, 1
    length = torch.tensor(len(rows[0]), device=rows[0].device)
    dist.all_reduce(length, dist.ReduceOp.MAX)
    missing = int(length) - len(rows[0])
    columns = [each if each.dim() == 2 else each[:, None] for each in rows]
    gathered = _AllGather.apply(
        torch.nn.functional.pad(torch.cat(columns, dim=1), (0, 0, 0, missing))
    )
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
        gradient = gradient.clone(
            memory_format=torch.contiguous_format
        )  # The input must not change.
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]
