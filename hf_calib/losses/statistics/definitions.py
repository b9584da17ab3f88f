"""Definitions of the row statistics: the value of each, and the terms of its gradient.

The value is computed by plain operations, which autograd differentiates if the matrix is small. For a large matrix, the
gradient of all statistics is one sum, which is written once, with coefficients per row:

    dL/dz = p * (alpha + what each `factor` adds)  +  what each `add_to` adds
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

IGNORE_INDEX = -100
# exp() of this is 0 in every dtype. It replaces -inf where -inf * 0 would be NaN.
LOG_ZERO = -1e4

RivalRank = Literal["next", "second", "third", "mean2", "mean3", "mean_all"]
# The rivals among the classes ranked below the label: the ranks [first, last), or None for all of them.
RIVALS: dict[RivalRank, tuple[int, int] | None] = {
    "next": (0, 1),
    "second": (1, 2),
    "third": (2, 3),
    "mean2": (0, 2),
    "mean3": (0, 3),
    "mean_all": None,
}

Numbers = dict[str, Tensor]  # Numbers per row, by name.


def wide(logits: Tensor) -> torch.dtype:
    """The dtype of the computation."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def tiny(tensor: Tensor) -> float:
    """The smallest normal number, below which a power has gradient 0 instead of infinity."""
    return torch.finfo(tensor.dtype).tiny


class Block:
    """The quantities that statistics read, by differentiable operations on logits z (n, C); p = softmax(z).

    The labels are a column (n, 1), 0 if ignored.
    """

    _predicted: Tensor | None = None

    def __init__(self, z: Tensor, column: Tensor) -> None:
        self.z = z
        self.column = column
        self.log_probs = torch.log_softmax(z, dim=1)

    @property
    def probs(self) -> Tensor:
        return self.log_probs.exp()

    def log_p(self, index: Tensor) -> Tensor:
        """The log-probabilities of the classes with these indices (n, k)."""
        return self.log_probs.gather(1, index)

    def other_powers(self, power: float) -> Tensor:
        """The sum (n,) of p^power over the classes except the label, accurate even if the label has all the mass."""
        others = self.probs.scatter(1, self.column, 0)
        return (
            others.square() if power == 2 else others.clamp_min(tiny(others)).pow(power)
        ).sum(1)

    def mean_log(self, weights: Tensor, total: Tensor | float, least: float) -> Tensor:
        """The mean (n,) of max(log p, least) with weights (n, C), whose sum is the total."""
        return (weights * self.log_probs.clamp_min(least)).sum(1) / total

    def finite(self) -> Tensor:
        """The mask (n, C): 1.0 for a class that is not masked (-inf), otherwise 0."""
        return (self.z > -torch.inf).to(self.z.dtype)

    @property
    def predicted(self) -> Tensor:
        """The predicted class (n, 1), from the logits, because probabilities underflow into ties."""
        if (
            self._predicted is None
        ):  # `torch.compile` cannot trace the `cached_property` of Python 3.11.
            self._predicted = self.z.argmax(1, keepdim=True)
        return self._predicted


class Statistic:
    """A number per row of logits z with label y, computed from p = softmax(z); `LogProbs` has C numbers per row."""

    differentiable: ClassVar[bool] = True

    def numbers(self, block: Block) -> Numbers:
        """`value` (n,), by differentiable operations, and the numbers that `coefficients` reads."""
        raise NotImplementedError

    def coefficients(self, rows: Numbers, slope: Tensor) -> Numbers:
        """`alpha` and the inputs of `factor` and `add_to`, (n, k) each, from the slope dL/d(value) and `numbers`.

        `rows` also contains `z_max`, the largest logit of each row, and its log-probability `log_p_max`.
        """
        raise NotImplementedError

    def factor(self, block: Block, coefficients: Numbers) -> Tensor | None:
        """The term (n, C) that is added to alpha, which the caller may overwrite."""
        return None

    def add_to(self, gradient: Tensor, block: Block, coefficients: Numbers) -> None:
        """Add the terms that are no multiples of p to the gradient (n, C), in place, without reading `block.probs`."""


Terms = Sequence[
    tuple[Statistic, Numbers]
]  # Statistics with their coefficients other than alpha.


@dataclass(frozen=True)
class CrossEntropy(Statistic):
    """The cross entropy -log p_y, in nats. Gradient: p - e_y."""

    def numbers(self, block: Block) -> Numbers:
        return {"value": -block.log_p(block.column).squeeze(1)}

    def coefficients(self, rows: Numbers, slope: Tensor) -> Numbers:
        return {"alpha": slope, "at_label": -slope}

    def add_to(self, gradient: Tensor, block: Block, coefficients: Numbers) -> None:
        gradient.scatter_add_(1, block.column, coefficients["at_label"])


CROSS_ENTROPY = CrossEntropy()


@dataclass(frozen=True)
class Rival(Statistic):
    """The probability q of the class ranked below the label, or a mean of several. Gradient: share_k p_k - q p."""

    rank: RivalRank

    def numbers(self, block: Block) -> Numbers:
        index, share = self._below(block.z.detach(), block.column)
        probs = block.log_p(index).exp() * share
        return {"value": probs.sum(1), "index": index, "probs": probs}

    def coefficients(self, rows: Numbers, slope: Tensor) -> Numbers:
        alpha = -slope * rows["value"]
        if "index" not in rows:  # The kernels make no list of all rivals.
            return {"alpha": alpha, "at_below": slope / rows["count"]}
        return {
            "alpha": alpha,
            "index": rows["index"],
            "at_rival": slope * rows["probs"],
        }

    def add_to(self, gradient: Tensor, block: Block, coefficients: Numbers) -> None:
        gradient.scatter_add_(1, coefficients["index"], coefficients["at_rival"])

    def _below(self, logits: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
        """The columns (n, k) of the rivals, and the share (n, k) of each in their mean; 0 if there is none.

        Logits are compared, not probabilities: small probabilities underflow to equal zeros.
        """
        first, last = RIVALS[self.rank] or (0, logits.shape[1])
        # 1 / (z_j - z_y) is negative for the classes below the label, and lowest for the nearest of them.
        # Its minimum is found much faster than a maximum over a mask. (-0 - 0 is -0, whose reciprocal is
        # -inf as if the class were below the label; -0 + (0 - 0) is 0.)
        distance = (logits + (0 - logits.gather(1, column))).reciprocal_()
        if last == 1:
            nearest, index = distance.min(1, keepdim=True)
            return index, (nearest < 0).to(logits.dtype)
        count = min(last, logits.shape[1])
        nearest, index = distance.topk(count, dim=1, largest=False)
        skipped = min(first, count - 1)
        exists = nearest[:, skipped:] < 0
        return index[:, skipped:], exists / exists.sum(1, keepdim=True).clamp_min(1).to(
            logits.dtype
        )


@dataclass(frozen=True)
class OtherPowers(Statistic):
    """The sum S of p_j^b over the classes j != y with power b. Gradient: b p_k (p_k^(b-1) [k != y] - S)."""

    power: float

    def numbers(self, block: Block) -> Numbers:
        return {"value": block.other_powers(self.power)}

    def coefficients(self, rows: Numbers, slope: Tensor) -> Numbers:
        beta = slope * self.power
        return {"alpha": -beta * rows["value"], "beta": beta}

    def factor(self, block: Block, coefficients: Numbers) -> Tensor:
        powers = block.probs if self.power == 2 else block.probs.pow(self.power - 1)
        return (powers * coefficients["beta"]).scatter_(1, block.column, 0)


@dataclass(frozen=True)
class Entropy(Statistic):
    """The entropy H = -sum of p_j log p_j, in nats. Gradient: -p (log p + H)."""

    def numbers(self, block: Block) -> Numbers:
        return {"value": -block.mean_log(block.probs, 1, LOG_ZERO)}

    def coefficients(self, rows: Numbers, slope: Tensor) -> Numbers:
        alpha = -slope * (rows["value"] + rows["log_p_max"])
        return {"alpha": alpha, "eta": -slope, "z_max": rows["z_max"]}

    def factor(self, block: Block, coefficients: Numbers) -> Tensor:
        log_ratio = (block.z - coefficients["z_max"]).clamp_min_(LOG_ZERO)
        return log_ratio.mul_(coefficients["eta"])


@dataclass(frozen=True)
class MeanLogProb(Statistic):
    """The mean of log p_j over the classes that are not masked (-inf). Gradient: 1 / C - p."""

    def numbers(self, block: Block) -> Numbers:
        finite = block.finite()
        count = finite.sum(1)
        least = torch.finfo(finite.dtype).min  # Its product with 0 is 0.
        return {"value": block.mean_log(finite, count, least), "count": count}

    def coefficients(self, rows: Numbers, slope: Tensor) -> Numbers:
        return {"alpha": -slope, "at_finite": slope / rows["count"]}

    def add_to(self, gradient: Tensor, block: Block, coefficients: Numbers) -> None:
        gradient += block.finite().mul_(coefficients["at_finite"])


@dataclass(frozen=True)
class LogConfidence(Statistic):
    """The log-probability of the predicted class. Gradient: e_predicted - p."""

    def numbers(self, block: Block) -> Numbers:
        return {
            "value": block.log_p(block.predicted).squeeze(1),
            "predicted": block.predicted,
        }

    def coefficients(self, rows: Numbers, slope: Tensor) -> Numbers:
        return {"alpha": -slope, "predicted": rows["predicted"], "at_predicted": slope}

    def add_to(self, gradient: Tensor, block: Block, coefficients: Numbers) -> None:
        gradient.scatter_add_(
            1, coefficients["predicted"], coefficients["at_predicted"]
        )


@dataclass(frozen=True)
class Correct(Statistic):
    """1 if the predicted class is the label, otherwise 0. It has no gradient."""

    differentiable = False

    def numbers(self, block: Block) -> Numbers:
        return {"value": (block.predicted == block.column).squeeze(1).to(block.z.dtype)}


@dataclass(frozen=True)
class LogProbs(Statistic):
    """log p of every class, (N, C): the one statistic that is a matrix. Gradient, for slopes s: s - p sum(s)."""

    def numbers(self, block: Block) -> Numbers:
        return {"value": block.log_probs}

    def coefficients(self, rows: Numbers, slope: Tensor) -> Numbers:
        return {"alpha": -slope.sum(1, keepdim=True), "slope": slope}

    def add_to(self, gradient: Tensor, block: Block, coefficients: Numbers) -> None:
        gradient += coefficients["slope"]


@dataclass(frozen=True)
class LogitNorm(Statistic):
    """||z||_order of the logits, in which a masked class (-inf) is 0. Gradient: sign(z) (|z| / norm)^(order-1)."""

    order: float

    def numbers(self, block: Block) -> Numbers:
        magnitude = block.z.where(block.z > -torch.inf, 0).abs()
        if self.order == 1:
            return {"value": magnitude.sum(1)}
        # Relative to the largest, so that its power does not overflow.
        largest = magnitude.detach().amax(1, keepdim=True).clamp_min(tiny(magnitude))
        powers = (magnitude / largest).clamp_min(tiny(magnitude)).pow(self.order)
        return {"value": powers.sum(1).pow(1 / self.order) * largest.squeeze(1)}

    def coefficients(self, rows: Numbers, slope: Tensor) -> Numbers:
        return {
            "alpha": torch.zeros_like(slope),
            "norm": rows["value"],
            "at_norm": slope,
        }

    def add_to(self, gradient: Tensor, block: Block, coefficients: Numbers) -> None:
        finite = block.z.where(block.z > -torch.inf, 0)
        own = finite.sign()
        if self.order != 1:
            own *= (finite.abs() / coefficients["norm"].clamp_min(tiny(finite))).pow(
                self.order - 1
            )
        gradient += coefficients["at_norm"] * own
