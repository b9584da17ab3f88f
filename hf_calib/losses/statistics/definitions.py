"""Definitions of the statistics of rows: the value of each next to its derivative.

Let l = log softmax(z) for a row of logits z with label y, and p = exp(l). A statistic is a function
of l. Its derivative by l times a slope per row is a `Change` of a matrix m (n, C). The gradient by
z is then m - p * sum(m), in which m may be short of any multiple of p. `LogitNorm` is a function of
z itself, so its derivative is by z.

The values are computed by differentiable operations; autograd's derivatives of them are the
definition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from hf_calib.losses.arithmetic import tiny

if TYPE_CHECKING:
    from hf_calib.losses.statistics.blocks import Block

IGNORE_INDEX = -100
# exp() of this is 0 in every dtype. It replaces -inf where -inf * 0 would be NaN.
LOG_ZERO = -1e4

RivalRank = Literal["next", "second", "third", "mean2", "mean3", "mean_all"]
# The rivals among the classes ranked below the label: the ranks [first, last), or None for all of
# them.
RIVALS: dict[RivalRank, tuple[int, int] | None] = {
    "next": (0, 1),
    "second": (1, 2),
    "third": (2, 3),
    "mean2": (0, 2),
    "mean3": (0, 3),
    "mean_all": None,
}


@dataclass(eq=False)
class Change:
    """factor * slope * d(value)/dl, where the slope is (n, 1).

    The derivative is (n, C), or (n, k) by the classes at `index`. The slope by a statistic that is
    a matrix is a change by itself, whose own slope is None.
    """

    derivative: Tensor
    slope: Tensor | None
    factor: float = 1.0
    index: Tensor | None = None

    def add_to(self, matrix: Tensor) -> None:
        if self.slope is None:
            matrix += self.derivative
        elif self.index is None:
            matrix.addcmul_(self.derivative, self.slope, value=self.factor)
        else:
            matrix.scatter_add_(1, self.index, self.derivative * self.slope)

    def total(self) -> Tensor:
        """What is added to each row, (n, 1)."""
        total = self.derivative.sum(1, keepdim=True)
        return total if self.slope is None else total * (self.factor * self.slope)


class Statistic:
    """A number of every row."""

    # Whether it has a derivative, and whether that is by the logits themselves.
    has_derivative: ClassVar[bool] = True
    is_of_logits: ClassVar[bool] = False

    def value(self, block: Block) -> tuple[Any, Any]:
        """The numbers (n,), and what `change` needs."""
        raise NotImplementedError

    def change(self, block: Block, kept: Any, slope: Tensor) -> Change:
        """The change for a slope (n, 1), or (n, C) by a matrix."""
        raise NotImplementedError


@dataclass(frozen=True)
class Constant(Statistic):
    """A number that stands for a statistic in all rows."""

    has_derivative = False
    number: float

    def value(self, block: Block) -> tuple[float, None]:
        return self.number, None


class SomeProbabilities(Statistic):
    """A sum of probabilities of some classes, each of which is its derivative by the l of its
    class."""

    def change(
        self, block: Block, kept: tuple[Tensor, Tensor], slope: Tensor
    ) -> Change:
        index, probs = kept
        return Change(probs, slope, index=index)


@dataclass(frozen=True)
class Rival(SomeProbabilities):
    """The probability q of the class ranked below the label, or the mean of several;
    0 if there is none.

    dq/dl_k is the share of p_k in the mean, times p_k.
    """

    rank: RivalRank

    def value(self, block: Block) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        first, last = RIVALS[self.rank] or (0, block.z.shape[1])
        log_p, index = block.ranked_below(last)
        if last == 1:
            probs = log_p.exp()
            return probs.squeeze(1), (index, probs)
        # If there are fewer classes than ranks, the last one is not below the label.
        skipped = min(first, log_p.shape[1] - 1)
        log_p = log_p[:, skipped:]
        exists = log_p > -torch.inf
        share = exists / exists.sum(1, keepdim=True).clamp_min(1).to(log_p.dtype)
        probs = log_p.exp() * share
        return probs.sum(1), (index[:, skipped:], probs)


@dataclass(frozen=True)
class OtherPowers(Statistic):
    """The sum of p_j^b over the classes j other than the label, with power b. Its derivative by l_j
    is b p_j^b."""

    power: float

    def value(self, block: Block) -> tuple[Tensor, Tensor | None]:
        return block.other_powers(self.power)

    def change(self, block: Block, kept: Tensor | None, slope: Tensor) -> Change:
        powers = block.powers_of_others(self.power) if kept is None else kept
        return Change(powers, slope, factor=self.power)


@dataclass(frozen=True)
class Entropy(Statistic):
    """The entropy H = -sum of p_j l_j, in nats. Its derivative by l_j is -p_j l_j - p_j, the last a
    multiple of p."""

    def value(self, block: Block) -> tuple[Tensor, None]:
        ratios, shift = block.log_ratios_above(LOG_ZERO)
        return -torch.linalg.vecdot(block.probs, ratios) - shift, None

    def change(self, block: Block, kept: None, slope: Tensor) -> Change:
        ratios, _ = block.log_ratios_above(LOG_ZERO)
        return Change(ratios.mul_(block.probs), slope, factor=-1.0)


@dataclass(frozen=True)
class MeanLogProb(Statistic):
    """The mean of v_j l_j over the classes that are not masked (-inf).
    Its derivative by l_j is v_j / C.

    v is 1, or with class weights w it is w_j / w_y: the loss of a row is multiplied by w_y, so each
    class has its own weight in the end, as in PyTorch.
    """

    def value(self, block: Block) -> tuple[Tensor, Tensor]:
        unmasked = block.unmasked()
        count = unmasked.sum(1)
        weights = self._weighted(unmasked, block)
        # The product of the least number with 0 is 0.
        log_probs = block.log_probs_above(torch.finfo(weights.dtype).min)
        return torch.linalg.vecdot(weights, log_probs) / count, count

    def _weighted(self, unmasked: Tensor, block: Block) -> Tensor:
        """v for each class, (n, C)."""
        if block.class_weights is None:
            return unmasked
        of_classes = block.class_weights.to(block.z)
        return unmasked * (of_classes / of_classes[block.column])

    def change(self, block: Block, count: Tensor, slope: Tensor) -> Change:
        weights = self._weighted(block.unmasked(), block)
        return Change(weights, slope / count[:, None])


@dataclass(frozen=True)
class Confidence(SomeProbabilities):
    """The probability of the predicted class, which is its derivative by the class's l."""

    def value(self, block: Block) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        probs = block.log_p_of(block.predicted).exp()
        return probs.squeeze(1), (block.predicted, probs)


@dataclass(frozen=True)
class Correct(Statistic):
    """1 if the predicted class is the label, otherwise 0."""

    has_derivative = False

    def value(self, block: Block) -> tuple[Tensor, None]:
        return (block.predicted.squeeze(1) == block.labels).to(block.z.dtype), None


@dataclass(frozen=True)
class Counts(Statistic):
    """1, or 0 if the row is ignored."""

    has_derivative = False

    def value(self, block: Block) -> tuple[Tensor, None]:
        return (block.labels != IGNORE_INDEX).to(block.z.dtype), None


@dataclass(frozen=True)
class Labels(Statistic):
    """The labels, int64, 0 if ignored."""

    has_derivative = False

    def value(self, block: Block) -> tuple[Tensor, None]:
        return block.column.squeeze(1), None


@dataclass(frozen=True)
class LogProbs(Statistic):
    """l of every class, (n, C): the one statistic that is a matrix, and so is its slope."""

    def value(self, block: Block) -> tuple[Tensor, None]:
        return block.log_probs, None

    def change(self, block: Block, kept: None, slope: Tensor) -> Change:
        return Change(slope, None)


@dataclass(frozen=True)
class LogitNorm(Statistic):
    """||z||_order of the logits, in which a masked class (-inf) is 0.

    Its derivative by z_j is sign(z_j) (|z_j| / norm)^(order - 1).
    """

    is_of_logits = True
    order: float

    def value(self, block: Block) -> tuple[Tensor, Tensor]:
        magnitude = _unmasked_logits(block).abs()
        if self.order == 1:
            norm = magnitude.sum(1)
            return norm, norm
        # Relative to the largest, so that its power does not overflow.
        largest = magnitude.detach().amax(1, keepdim=True).clamp_min(tiny(magnitude))
        relative = (magnitude / largest).clamp_min(tiny(magnitude))
        norm = relative.pow(self.order).sum(1).pow(1 / self.order) * largest.squeeze(1)
        return norm, norm

    def change(self, block: Block, norm: Tensor, slope: Tensor) -> Change:
        z = _unmasked_logits(block)
        own = z.sign()
        if self.order != 1:
            relative = z.abs() / norm[:, None].clamp_min(tiny(z))
            own *= relative.pow(self.order - 1)
        return Change(own, slope)


@dataclass(frozen=True)
class MeanExcess(Statistic):
    """The mean of max(0, z_max - z_j - margin) over the classes that are not masked (-inf).

    Its derivative by z_j is -1 / C for each distance above the margin, and that by z_max is minus
    the sum of these.
    """

    is_of_logits = True
    margin: float

    def value(self, block: Block) -> tuple[Tensor, Tensor]:
        count = block.unmasked().sum(1)
        excess = torch.relu(_distances(block) - self.margin)
        return excess.sum(1) / count, count

    def change(self, block: Block, count: Tensor, slope: Tensor) -> Change:
        is_above = block.above(_distances(block), self.margin)
        number = is_above.sum(1, keepdim=True)
        own = is_above.neg_().scatter_add_(1, block.predicted, number)
        return Change(own, slope / count[:, None])


def _distances(block: Block) -> Tensor:
    """z_max - z_j, 0 for a masked class."""
    top = block.z.gather(1, block.predicted)
    return top - block.z.where(block.z > -torch.inf, top)


def _unmasked_logits(block: Block) -> Tensor:
    """The logits, 0 for a masked class."""
    return block.z.where(block.z > -torch.inf, 0)
