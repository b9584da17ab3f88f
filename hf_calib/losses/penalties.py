"""Penalties beside the cross entropy: per example, (N,), or one number that couples the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_calib.losses.statistics.definitions import (
    Correct,
    Entropy,
    Label,
    LogConfidence,
    LogitNorm,
    LogProbs,
    MeanLogProb,
    OtherPowers,
    SoftRank,
    Statistic,
)
from hf_calib.losses.statistics.dispatch import RowStatistics, is_traced

MMCE_KERNEL_WIDTH = 0.4  # Kumar et al. 2018, section 4
# Units in the last place of 1 within which two confidences tie for MMCE's kernel.
_ULPS_OF_A_TIE = 16
_EPSILON = 1e-10
_KERNEL_ELEMENTS = 2**22  # of a block of kernel weights


class Penalty:
    """A penalty per example, and the statistics that it reads beside the cross entropy."""

    @property
    def reads(self) -> tuple[Statistic, ...]:
        raise NotImplementedError

    def value(self, stats: RowStatistics) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class UniformCrossEntropy(Penalty):
    """The cross entropy to the uniform distribution, -mean_j log p_j."""

    @property
    def reads(self) -> tuple[Statistic, ...]:
        return (MeanLogProb(),)

    def value(self, stats: RowStatistics) -> Tensor:
        return -stats[MeanLogProb()]


@dataclass(frozen=True)
class SquaredDistance(Penalty):
    """The Brier score, ||p - e_y||_2^2."""

    @property
    def reads(self) -> tuple[Statistic, ...]:
        return (OtherPowers(2.0),)

    def value(self, stats: RowStatistics) -> Tensor:
        return stats[OtherPowers(2.0)] + stats.one_minus_p.square()


@dataclass(frozen=True)
class AbsoluteDistance(Penalty):
    """||p - e_y||_1."""

    @property
    def reads(self) -> tuple[Statistic, ...]:
        return (OtherPowers(1.0),)

    def value(self, stats: RowStatistics) -> Tensor:
        return stats[OtherPowers(1.0)] + stats.one_minus_p


@dataclass(frozen=True)
class NegativeEntropy(Penalty):
    """-H(p)."""

    @property
    def reads(self) -> tuple[Statistic, ...]:
        return (Entropy(),)

    def value(self, stats: RowStatistics) -> Tensor:
        return -stats[Entropy()]


@dataclass(frozen=True)
class LogitNormPenalty(Penalty):
    """||z||_p of the logits."""

    p: float

    @property
    def reads(self) -> tuple[Statistic, ...]:
        return (LogitNorm(self.p),)

    def value(self, stats: RowStatistics) -> Tensor:
        return stats[LogitNorm(self.p)]


@dataclass(frozen=True)
class PowerOfProbability(Penalty):
    """(1 - p_y^exponent) / exponent."""

    exponent: float

    @property
    def reads(self) -> tuple[Statistic, ...]:
        return ()

    def value(self, stats: RowStatistics) -> Tensor:
        return -torch.expm1(-self.exponent * stats.cross_entropy) / self.exponent


@dataclass(frozen=True)
class ExcessOverMargin(Penalty):
    """The mean over the classes of max(0, max_k z_k - z_j - margin); a masked class (-inf) has none."""

    margin: float

    @property
    def reads(self) -> tuple[Statistic, ...]:
        return (LogProbs(),)

    def value(self, stats: RowStatistics) -> Tensor:
        log_probs = stats[LogProbs()]  # whose differences are those of the logits
        masked = log_probs == -torch.inf
        distance = log_probs.amax(1, keepdim=True) - log_probs.masked_fill(masked, 0)
        excess = F.relu(distance - self.margin).masked_fill(masked, 0)
        return excess.sum(1) / (~masked).sum(1)


class BatchPenalty:
    """A penalty on the batch as a whole: its value depends on which examples stand together.

    It reads the log-confidence and whether it is right, of one process or of all of them. `counts` (N,) is 1,
    and 0 for ignored rows.
    """

    @property
    def reads(self) -> tuple[Statistic, ...]:
        return (LogConfidence(), Correct())

    def value(self, stats: RowStatistics, counts: Tensor) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class PlainMmce(BatchPenalty):
    """sqrt of sum_ij (c_i - r_i)(c_j - r_j) k_ij / N^2; the authors' code leaves out the root."""

    authors_code: bool

    def value(self, stats: RowStatistics, counts: Tensor) -> Tensor:
        confidence, order = stats[LogConfidence()].exp().sort()
        error = (stats[Correct()][order] - confidence) * counts[order]
        squared = _kernel_products(confidence, error[None])[0] @ error / counts.sum().clamp_min(1).square()
        return squared if self.authors_code else (squared.clamp_min(0) + _EPSILON).sqrt()


@dataclass(frozen=True)
class WeightedMmce(BatchPenalty):
    """Three means: of right-right, wrong-wrong and right-wrong pairs; 0 where all are right or all wrong."""

    authors_code: bool

    def value(self, stats: RowStatistics, counts: Tensor) -> Tensor:
        confidence, order = stats[LogConfidence()].exp().sort()
        right = (stats[Correct()] * counts)[order]
        wrong = counts[order] - right
        n_right, n_wrong = right.sum(), wrong.sum()
        both = (n_right > 0) & (n_wrong > 0)
        right_error, wrong_error = right * (1 - confidence), wrong * confidence
        to_right, to_wrong = _kernel_products(confidence, torch.stack([right_error, wrong_error]))
        squared = (
            self._mean(right_error @ to_right, n_right * n_right)
            + self._mean(wrong_error @ to_wrong, n_wrong * n_wrong)
            - 2 * self._mean(right_error @ to_wrong, n_right * n_wrong)
        )
        # The root is taken of a positive number in any case: its gradient at 0 is infinite.
        return (squared.clamp_min(0) + _EPSILON).sqrt().where(both, 0)

    def _mean(self, total: Tensor, pairs: Tensor) -> Tensor:
        # The authors divide the mean once more by the number of pairs: a larger batch counts for less.
        return total / pairs.clamp_min(1) / (pairs + 1e-5 if self.authors_code else 1)


@dataclass(frozen=True)
class SoftBinnedEce(BatchPenalty):
    """Karandikar et al. 2021: memberships softmax(-(r - centre)^2 / T), L2 norm over the bins."""

    n_bins: int
    bin_temperature: float

    def value(self, stats: RowStatistics, counts: Tensor) -> Tensor:
        confidence = stats[LogConfidence()].exp()
        index = torch.arange(self.n_bins, device=confidence.device, dtype=confidence.dtype)
        centres = (index + 0.5) / self.n_bins
        members = torch.softmax(-(confidence[:, None] - centres).square() / self.bin_temperature, dim=1)
        size, gap = _soft_gaps(members * counts[:, None], confidence, stats[Correct()])
        return ((size * gap.square()).sum() / counts.sum().clamp_min(1) + _EPSILON).sqrt()


@dataclass(frozen=True)
class DifferentiableEce(BatchPenalty):
    """Bohdal et al. 2021 (DECE): memberships of a soft decision tree, correctness from the soft rank, L1 norm."""

    n_bins: int
    bin_temperature: float
    rank_sharpness: float

    @property
    def reads(self) -> tuple[Statistic, ...]:
        return (LogConfidence(), SoftRank(self.rank_sharpness))

    def value(self, stats: RowStatistics, counts: Tensor) -> Tensor:
        confidence = stats[LogConfidence()].exp()
        index = torch.arange(self.n_bins, device=confidence.device, dtype=confidence.dtype)
        offsets = -(index / self.n_bins).cumsum(0)
        members = torch.softmax((confidence[:, None] * (index + 1) + offsets) / self.bin_temperature, dim=1)
        # The authors' smoothing, their constant included.
        members = (members + 1e-6) / (1 + (self.n_bins + 1) * 1e-6)
        correct = (1 - stats[SoftRank(self.rank_sharpness)]).clamp_min(0)
        size, gap = _soft_gaps(members * counts[:, None], confidence, correct)
        return (size * gap.abs()).sum() / counts.sum().clamp_min(1)


@dataclass(frozen=True)
class KernelDensityEce(BatchPenalty):
    """Popordanoska et al. 2022, top label: mean |E[correct | r] - r|, by a leave-one-out Beta kernel."""

    bandwidth: float

    def value(self, stats: RowStatistics, counts: Tensor) -> Tensor:
        confidence = stats[LogConfidence()].exp()[:, None]
        points = _inside_simplex(torch.cat([confidence, 1 - confidence], dim=1))
        frequencies = _kernel_means(points, stats[Correct()][:, None], self.bandwidth, counts)
        return _mean_gap(frequencies - confidence, counts)


@dataclass(frozen=True)
class CanonicalKernelDensityEce(BatchPenalty):
    """The same of all probabilities: mean ||E[e_y | p] - p||_1, by a leave-one-out Dirichlet kernel."""

    bandwidth: float

    @property
    def reads(self) -> tuple[Statistic, ...]:
        return (LogProbs(), Label())

    def value(self, stats: RowStatistics, counts: Tensor) -> Tensor:
        probs = stats[LogProbs()].exp()
        outcomes = F.one_hot(stats[Label()].long(), probs.shape[1]).to(probs)
        frequencies = _kernel_means(_inside_simplex(probs), outcomes, self.bandwidth, counts)
        return _mean_gap(frequencies - probs, counts)


@dataclass(frozen=True)
class ClassFrequencyGap(BatchPenalty):
    """MDCA: mean over the classes of |mean_i p_ij - mean_i [y_i = j]|."""

    @property
    def reads(self) -> tuple[Statistic, ...]:
        return (LogProbs(), Label())

    def value(self, stats: RowStatistics, counts: Tensor) -> Tensor:
        probs = stats[LogProbs()].exp()
        outcomes = F.one_hot(stats[Label()].long(), probs.shape[1]).to(probs)
        return (((probs - outcomes) * counts[:, None]).sum(0) / counts.sum().clamp_min(1)).abs().mean()


@dataclass(frozen=True)
class AccuracyVersusUncertainty(BatchPenalty):
    """AvUC: log(1 + (n_AU + n_IC) / (n_AC + n_IU)), counts of accurate and uncertain rows, softly."""

    @property
    def reads(self) -> tuple[Statistic, ...]:
        return (LogConfidence(), Correct(), Entropy())

    def value(self, stats: RowStatistics, counts: Tensor) -> Tensor:
        confidence, entropy = stats[LogConfidence()].exp(), stats[Entropy()]
        right = stats[Correct()] * counts
        wrong = counts - right
        means = [(entropy.detach() @ rows) / rows.sum().clamp_min(1) for rows in (right, wrong)]
        both = (right.sum() > 0) & (wrong.sum() > 0)
        threshold = ((means[0] + means[1]) / 2).where(both, means[0] + means[1])  # with one kind, its mean
        certain = (entropy.detach() <= threshold).to(entropy)
        unsure = entropy.tanh()
        of_right = right * confidence * torch.stack([certain * (1 - unsure), (1 - certain) * unsure])
        of_wrong = wrong * (1 - confidence) * torch.stack([certain * (1 - unsure), (1 - certain) * unsure])
        (right_certain, right_unsure), (wrong_certain, wrong_unsure) = of_right.sum(1), of_wrong.sum(1)
        bad, good = right_unsure + wrong_certain, right_certain + wrong_unsure
        return torch.log1p(bad / good.clamp_min(_EPSILON))


def _kernel_products(confidence: Tensor, errors: Tensor) -> Tensor:
    """errors (k, N) @ K for rising confidences r, K_ij = exp(-|r_i - r_j| / 0.4), without the (N, N) matrix.

    On one side of its diagonal K is exp(-r_i / 0.4) exp(r_j / 0.4), on the other its inverse: the products are
    running sums. Between examples that tie K is 1, with gradient 0. Confidences tie that differ by rounding alone:
    K has a kink there, whose sides would otherwise be chosen by the order in which a processor adds.
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


def _inside_simplex(probs: Tensor) -> Tensor:
    """Probabilities that a Dirichlet kernel can take: it has no finite logarithm at 0 and 1."""
    return probs.clamp(1e-6, 1 - 1e-6)


def _kernel_means(points: Tensor, outcomes: Tensor, bandwidth: float, counts: Tensor) -> Tensor:
    """Means of the other examples' outcomes (N, K), weighted by a kernel around each of the points (N, K).

    The kernel is the density of Dirichlet(point_j / h + 1) at point_i; for K = 2 that is the Beta kernel. Of a large
    batch its (N, N) weights are made in blocks of rows, and again in the backward pass.
    """
    parameters = points / bandwidth
    log_norm = torch.lgamma(parameters + 1).sum(1) - torch.lgamma((parameters + 1).sum(1))
    n = len(points)
    size = max(1, _KERNEL_ELEMENTS // max(n, 1))
    if n <= size or is_traced():
        return _means_of_rows(points, parameters, log_norm, outcomes, counts, 0)
    means = [
        checkpoint(
            _means_of_rows, rows, parameters, log_norm, outcomes, counts, i * size, use_reentrant=False
        )
        for i, rows in enumerate(points.split(size))
    ]
    return torch.cat(means)


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


def _mean_gap(gaps: Tensor, counts: Tensor) -> Tensor:
    """The mean over the examples of the absolute gaps (N, K), summed over K; 0 for an example alone."""
    total = counts.sum()
    return (gaps.abs().sum(1) @ counts / total.clamp_min(1)).where(total >= 2, 0)


def _soft_gaps(members: Tensor, confidence: Tensor, accuracy: Tensor) -> tuple[Tensor, Tensor]:
    """Size of each soft bin, and its mean accuracy minus its mean confidence."""
    size = members.sum(0)
    return size, (members.T @ (accuracy - confidence)) / size.clamp_min(torch.finfo(size.dtype).tiny)
