"""Penalties beside the cross entropy: per example, (N,), or one number that couples the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_calib.losses.statistics.direct import NOTHING, Statistics, Wanted

MMCE_KERNEL_WIDTH = 0.4  # Kumar et al. 2018, section 4
_EPSILON = 1e-10
TOP_LABEL = Wanted(top=True)


@dataclass(frozen=True)
class Penalty:
    """A penalty per example, and the statistics it reads."""

    value: Callable[[Statistics], Tensor]
    wanted: Wanted = NOTHING


@dataclass(frozen=True)
class TopLabels:
    """What a batch penalty sees of a batch: (N,) vectors, of one process or of all of them."""

    log_confidence: Tensor  # log-probability of the predicted class
    correct: Tensor  # 1.0 where it is the label, in the dtype of the confidences
    soft_rank: Tensor | None  # how many classes are ahead of the label
    valid: Tensor  # 1.0, and 0.0 for ignored rows


@dataclass(frozen=True)
class BatchPenalty:
    """A penalty on the batch as a whole: its value depends on which examples stand together."""

    value: Callable[[TopLabels], Tensor]
    wanted: Wanted = TOP_LABEL


def _uniform_cross_entropy(stats: Statistics) -> Tensor:
    assert stats.mean_log_p is not None
    return -stats.mean_log_p


def _squared_distance(stats: Statistics) -> Tensor:
    assert stats.others is not None
    return stats.others + stats.one_minus_p.square()


def _absolute_distance(stats: Statistics) -> Tensor:
    assert stats.others is not None
    return stats.others + stats.one_minus_p


def _negative_entropy(stats: Statistics) -> Tensor:
    assert stats.entropy is not None
    return -stats.entropy


def _logit_norm(stats: Statistics) -> Tensor:
    assert stats.norm is not None
    return stats.norm


uniform_cross_entropy = Penalty(_uniform_cross_entropy, Wanted(mean_log_p=True))
squared_distance = Penalty(_squared_distance, Wanted(power=2.0))  # the Brier score, ||p - e_y||_2^2
absolute_distance = Penalty(_absolute_distance, Wanted(power=1.0))  # ||p - e_y||_1
negative_entropy = Penalty(_negative_entropy, Wanted(entropy=True))


def logit_norm(p: float) -> Penalty:
    """||z||_p of the logits."""
    return Penalty(_logit_norm, Wanted(norm=p))


def mmce(variant: str, authors_code: bool) -> BatchPenalty:
    """Maximum mean calibration error with the kernel exp(-|r_i - r_j| / 0.4) on the confidences r."""
    value = _mmce_weighted if variant == "weighted" else _mmce_plain
    return BatchPenalty(lambda batch: value(batch, authors_code))


def _kernel_products(confidence: Tensor, errors: Tensor) -> Tensor:
    """errors (k, N) @ K for rising confidences r, K_ij = exp(-|r_i - r_j| / 0.4), without the (N, N) matrix.

    On one side of its diagonal K is exp(-r_i / 0.4) exp(r_j / 0.4), on the other its inverse: the products are
    running sums. Between examples that tie K is 1, with gradient 0.
    """
    fixed = confidence.detach()
    first, end = torch.searchsorted(fixed, fixed), torch.searchsorted(fixed, fixed, right=True)
    growth = (confidence / MMCE_KERNEL_WIDTH).exp()
    scaled = (errors * growth, errors / growth, errors)
    rising, falling, plain = (F.pad(vectors.cumsum(1), (1, 0)) for vectors in scaled)
    below = rising[:, first] / growth
    above = (falling[:, -1:] - falling[:, end]) * growth
    return below + above + plain[:, end] - plain[:, first]


def _mmce_plain(batch: TopLabels, authors_code: bool) -> Tensor:
    """sqrt of sum_ij (c_i - r_i)(c_j - r_j) k_ij / N^2; the authors' code leaves out the root."""
    confidence, order = batch.log_confidence.exp().sort()
    error = (batch.correct[order] - confidence) * batch.valid[order]
    squared = _kernel_products(confidence, error[None])[0] @ error / batch.valid.sum().clamp_min(1).square()
    return squared if authors_code else (squared.clamp_min(0) + _EPSILON).sqrt()


def _mmce_weighted(batch: TopLabels, authors_code: bool) -> Tensor:
    """Three means: of right-right, wrong-wrong and right-wrong pairs; 0 where all are right or all wrong."""
    confidence, order = batch.log_confidence.exp().sort()
    right = (batch.correct * batch.valid)[order]
    wrong = batch.valid[order] - right
    n_right, n_wrong = right.sum(), wrong.sum()
    both = (n_right > 0) & (n_wrong > 0)
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
    return (squared.clamp_min(0) + _EPSILON).sqrt().where(both, 0)


def soft_ece(variant: str, n_bins: int, bin_temperature: float, rank_sharpness: float) -> BatchPenalty:
    """Differentiable ECE: soft bins and hard correctness (`sb_ece`), or soft correctness too (`dece`)."""
    if variant == "sb_ece":
        return BatchPenalty(lambda batch: _sb_ece(batch, n_bins, bin_temperature))
    wanted = Wanted(top=True, rank_sharpness=rank_sharpness)
    return BatchPenalty(lambda batch: _dece(batch, n_bins, bin_temperature), wanted)


def _sb_ece(batch: TopLabels, n_bins: int, bin_temperature: float) -> Tensor:
    """Karandikar et al. 2021: memberships softmax(-(r - centre)^2 / T), L2 norm over the bins."""
    confidence = batch.log_confidence.exp()
    centres = (torch.arange(n_bins, device=confidence.device, dtype=confidence.dtype) + 0.5) / n_bins
    members = torch.softmax(-(confidence[:, None] - centres).square() / bin_temperature, dim=1)
    size, gap = _soft_gaps(members * batch.valid[:, None], confidence, batch.correct)
    return ((size * gap.square()).sum() / batch.valid.sum().clamp_min(1) + _EPSILON).sqrt()


def _dece(batch: TopLabels, n_bins: int, bin_temperature: float) -> Tensor:
    """Bohdal et al. 2021: memberships of a soft decision tree, correctness from the soft rank, L1 norm."""
    assert batch.soft_rank is not None
    confidence = batch.log_confidence.exp()
    index = torch.arange(n_bins, device=confidence.device, dtype=confidence.dtype)
    offsets = -(index / n_bins).cumsum(0)
    members = torch.softmax((confidence[:, None] * (index + 1) + offsets) / bin_temperature, dim=1)
    members = (members + 1e-6) / (1 + (n_bins + 1) * 1e-6)  # the authors' smoothing, their constant included
    size, gap = _soft_gaps(members * batch.valid[:, None], confidence, (1 - batch.soft_rank).clamp_min(0))
    return (size * gap.abs()).sum() / batch.valid.sum().clamp_min(1)


def _soft_gaps(members: Tensor, confidence: Tensor, accuracy: Tensor) -> tuple[Tensor, Tensor]:
    """Size of each soft bin, and its mean accuracy minus its mean confidence."""
    size = members.sum(0)
    return size, (members.T @ (accuracy - confidence)) / size.clamp_min(torch.finfo(size.dtype).tiny)


def kde_ece(bandwidth: float) -> BatchPenalty:
    """Popordanoska et al. 2022, top label: mean |E[correct | r] - r|, by a leave-one-out Beta kernel."""
    return BatchPenalty(lambda batch: _kde_ece(batch, bandwidth))


def _kde_ece(batch: TopLabels, bandwidth: float) -> Tensor:
    confidence = batch.log_confidence.exp().clamp(1e-6, 1 - 1e-6)  # the kernel is not defined at 0 and 1
    a, b = confidence / bandwidth, (1 - confidence) / bandwidth
    log_norm = torch.lgamma(a + 1) + torch.lgamma(b + 1) - torch.lgamma(a + b + 2)
    log_kernel = torch.outer(confidence.log(), a) + torch.outer((1 - confidence).log(), b) - log_norm
    log_kernel = log_kernel.masked_fill(batch.valid == 0, -1e30)
    log_kernel.fill_diagonal_(-torch.inf)
    # Of an example without any other, all of whose entries are masked, the softmax says nothing.
    alone = batch.valid.sum() < 2
    smoothed = torch.softmax(log_kernel.masked_fill(alone, 0), dim=1) @ batch.correct
    gap = (smoothed - confidence).abs() * batch.valid
    return (gap.sum() / batch.valid.sum().clamp_min(1)).where(~alone, 0)
