"""Gammas of the weights: a constant, a step function of p_y, or a table over confidence bins.

The first two are schedules, which a loss's formula holds. A table is updated from held-out predictions; the rules
here say how, and `GammaTableLoss` keeps the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_calib.losses._hyperparameters import warn_caller

# Beyond this the gradient of the inverse focal loss changes sign near p = 0.28 and pushes p_y down.
MAX_INVERSE_GAMMA = 3.59
# Where no limit is set. Far beyond it float32 is infinite, and infinity times 0 is NaN.
LARGEST_GAMMA = 1e30

Gamma = float | Tensor  # one for all examples, or (N,)
GammaSchedule = Callable[[Tensor], Gamma]  # of p_y (N,), detached


@dataclass(frozen=True)
class ConstantGamma:
    """The same gamma for every example."""

    gamma: float

    def __call__(self, p: Tensor) -> float:
        return self.gamma


CONSTANT_0 = ConstantGamma(0.0)


@dataclass(frozen=True)
class StepGamma:
    """gammas[k] where p_y is below thresholds[k], and not below an earlier one; the last gamma above all."""

    thresholds: tuple[float, ...]
    gammas: tuple[float, ...]

    def __call__(self, p: Tensor) -> Tensor:
        gamma = torch.full_like(p, self.gammas[-1])
        for threshold, value in reversed(list(zip(self.thresholds, self.gammas, strict=False))):
            gamma = gamma.masked_fill(p < threshold, value)
        return gamma


@dataclass(frozen=True)
class BinStatistics:
    """Held-out predictions in M equal-mass bins of their confidence; (M,) float64, the edges (M + 1,)."""

    edges: Tensor
    counts: Tensor
    gaps: Tensor  # mean confidence minus accuracy, 0 in an empty bin
    accuracies: Tensor  # NaN in an empty bin

    @classmethod
    def of(cls, confidences: Tensor, correct: Tensor, n_bins: int) -> BinStatistics:
        """Bin (N,) confidences. As in the papers' code the edges interpolate the sorted confidences and the
        bins are (low, high], which leaves out the smallest confidence and its ties."""
        edges = quantile_edges(confidences, n_bins)
        index = torch.searchsorted(edges, confidences, right=False) - 1  # duplicate edges: an empty bin
        inside = index >= 0
        index, weights = index[inside], torch.ones_like(confidences[inside])
        counts, confidence_sums, correct_sums = (
            torch.zeros(n_bins, dtype=torch.float64).index_add_(0, index, values)
            for values in (weights, confidences[inside], correct[inside])
        )
        gaps = (confidence_sums - correct_sums) / counts.clamp_min(1)
        return cls(edges, counts, gaps, correct_sums / counts)


def quantile_edges(confidences: Tensor, n_bins: int) -> Tensor:
    """(M + 1,) edges at equal steps through the sorted confidences, linearly interpolated."""
    ordered = confidences.sort().values
    n = len(ordered)
    position = torch.arange(n_bins + 1, dtype=torch.float64) * (n / n_bins)
    low = position.floor().long().clamp(max=n - 1)
    high = (low + 1).clamp(max=n - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


@dataclass(frozen=True)
class AdaFocalRule:
    """gamma <- gamma * exp(+-lambda * gap), through +-switch to the other sign, within [min, max]."""

    n_bins: int
    update_rate: float
    gamma_init: float
    gamma_max: float
    gamma_min: float
    switch: float

    def updated(self, gammas: Tensor, bins: BinStatistics) -> Tensor:
        """(M,) gammas after held-out predictions."""
        focal = gammas > 0
        grown = gammas * torch.exp(torch.where(focal, 1.0, -1.0) * self.update_rate * bins.gaps)
        # A gamma near 0 stands for cross entropy; it goes over to the other loss. At exactly 0 the paper's
        # Algorithm 1 takes the focal branch and switches; its code, which does not, would stay focal.
        crossed = torch.full_like(gammas, self.switch).copysign(-gammas).where(gammas != 0, -self.switch)
        return torch.where(grown.abs() < self.switch, crossed, grown).clamp(self.gamma_min, self.gamma_max)

    def of_examples(self, p: Tensor, bins: Tensor, gammas: Tensor, accuracies: Tensor) -> Tensor:
        """(N,) gammas of examples with true-class probability p in these bins of the table."""
        return gammas[bins]


@dataclass(frozen=True)
class CalFocalRule:
    """gamma = exp(lambda * gap) of the bin (Eq. 3), with no memory; or of each example (Eq. 2)."""

    n_bins: int
    update_rate: float
    per_sample: bool
    gamma_init: ClassVar[float] = 1.0
    gamma_min: ClassVar[float] = 0.0
    gamma_max: ClassVar[float] = LARGEST_GAMMA

    def updated(self, gammas: Tensor, bins: BinStatistics) -> Tensor:
        """(M,) gammas after held-out predictions."""
        return torch.exp(self.update_rate * bins.gaps).clamp(max=self.gamma_max)

    def of_examples(self, p: Tensor, bins: Tensor, gammas: Tensor, accuracies: Tensor) -> Tensor:
        """(N,) gammas of examples with true-class probability p in these bins of the table."""
        if not self.per_sample:
            return gammas[bins]
        gaps = (p - accuracies[bins]).nan_to_num(0.0)  # no accuracy yet: gamma 1
        return torch.exp(self.update_rate * gaps).clamp(max=self.gamma_max)


GammaRule = AdaFocalRule | CalFocalRule


def warn_of_inverse_gamma(gamma: float) -> None:
    """Warn of an inverse focal gamma that pushes some labels down."""
    if gamma > MAX_INVERSE_GAMMA:
        warn_caller(
            f"The inverse focal gamma is {gamma}, above {MAX_INVERSE_GAMMA}. From there on the gradient pushes "
            f"labels down whose probability is near 0.28. Use {MAX_INVERSE_GAMMA} or less."
        )
