"""Blocks of rows: the cross entropy and the statistics of logits,
and the gradient that slopes of these give.

This is the only place where a loss reads logits. A `Block` takes few operations, for small
matrices, where each operation costs more than its numbers. A `CacheBlock` is a part of a large
matrix that stays in the cache of a core. In `statistics.fused` a block is computed by kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_calib.losses.arithmetic import tiny, wide
from hf_calib.losses.statistics import definitions as defined
from hf_calib.losses.statistics.definitions import (
    IGNORE_INDEX,
    Change,
    Statistic,
)

# The halves of PyTorch's cross entropy, which its own `nll_loss` and `log_softmax` call.
_nll_forward = torch.ops.aten.nll_loss_forward.default
_nll_backward = torch.ops.aten.nll_loss_backward.default
_log_softmax_backward = torch._log_softmax_backward_data
_NO_REDUCTION = 0

# The slopes by the cross entropy, (n,), and by each statistic; None is 0.
Slopes = Sequence[Tensor | None]


class Block:
    """Rows of logits z (n, C) with labels (n,), -100 if ignored.

    `numbers` are their cross entropy, 0 if ignored, and the statistics, (n,) each. An ignored row
    has the statistics of the label 0. Autograd can differentiate all of them, and `gradient` is the
    same derivative in fewer operations.
    """

    _predicted: Tensor | None = None

    def __init__(
        self,
        z: Tensor,
        labels: Tensor,
        reads: Sequence[Statistic],
        class_weights: Tensor | None = None,
        *,
        all_count: bool = False,
    ) -> None:
        self.all_count = all_count
        self.z = z
        self.labels = labels
        self.reads = reads
        self.class_weights = class_weights
        self.numbers = [self._cross_entropy()]
        self._kept: list[Any] = []
        for statistic in reads:
            value, kept = statistic.value(self)
            self.numbers.append(value)
            self._kept.append(kept)

    def _cross_entropy(self) -> Tensor:
        self.log_probs = torch.log_softmax(self.z, 1)
        # A label that is no class raises an error; a GPU asserts.
        ce, self._of_weights = _nll_forward(
            self.log_probs, self.labels, None, _NO_REDUCTION, IGNORE_INDEX
        )
        return ce

    def log_p_of(self, index: Tensor) -> Tensor:
        """The log-probabilities of the classes with these indices (n, k)."""
        return self.log_probs.gather(1, index)

    def ranked_below(self, count: int) -> tuple[Tensor, Tensor]:
        """The log-probabilities of the classes next below the label, -inf if there are fewer,
        and their indices.

        They have shape (n, count), or (n, C). Logits are compared, because small probabilities
        underflow into ties.
        """
        is_above = self.z >= self.z.gather(1, self.column)
        log_probs = self.log_probs.masked_fill(is_above, -torch.inf)
        if count == 1:
            return log_probs.max(1, keepdim=True)
        return log_probs.topk(min(count, log_probs.shape[1]), 1)

    def other_powers(self, power: float) -> tuple[Tensor, Tensor | None]:
        """The sum of the powers of the probabilities but the label's, (n,),
        and the powers with 0 for it, (n, C).

        The label's probability is left out rather than subtracted, so the sum is accurate also if
        it is near 1.
        """
        others = self.powers_of_others(power)
        return others.sum(1), others

    def powers_of_others(self, power: float) -> Tensor:
        """The powers of the probabilities with 0 for the label, (n, C)."""
        others = self.probs.scatter(1, self.column, 0.0)
        if power == 2:
            return others.square()
        return others if power == 1 else others.clamp_min(tiny(others)).pow(power)

    def log_probs_above(self, least: float) -> Tensor:
        """max(log p, least), (n, C)."""
        return self.log_probs.clamp_min(least)

    def log_ratios_above(self, least: float) -> tuple[Tensor, Any]:
        """log p without a shift (n,) of each row, but at least as given, (n, C); and the shift."""
        return self.log_probs_above(least), 0.0

    @property
    def probs(self) -> Tensor:
        return self.log_probs.exp()

    def unmasked(self) -> Tensor:
        """1.0 for a class that is not masked (-inf), otherwise 0, (n, C)."""
        return self.above(self.z, -torch.inf)

    def above(self, matrix: Tensor, limit: float) -> Tensor:
        """1.0 where a number is above the limit, otherwise 0."""
        return (matrix > limit).to(matrix.dtype)

    @property
    def predicted(self) -> Tensor:
        """The predicted class (n, 1), from the logits, because probabilities underflow into
        ties."""
        # `torch.compile` cannot trace the `cached_property` of Python 3.11.
        if self._predicted is None:
            self._predicted = self.z.detach().argmax(1, keepdim=True)
        return self._predicted

    @property
    def column(self) -> Tensor:
        """The labels as a column (n, 1) of indices, 0 if ignored."""
        labels = self.labels if self.all_count else self.labels.clamp_min(0)
        return labels[:, None]

    def gradient(self, slopes: Slopes) -> Tensor:
        """The gradient (n, C) of the sum of slope * number over numbers and rows."""
        log_probs = self.log_probs
        matrix = _nll_backward(
            slopes[0], log_probs, self.labels, None, _NO_REDUCTION, IGNORE_INDEX,
            self._of_weights,
        )  # fmt: skip
        changes, of_logits = self._changes(slopes)
        for change in changes:
            change.add_to(matrix)
        gradient = _log_softmax_backward(matrix, log_probs, 1, log_probs.dtype)
        for change in of_logits:
            change.add_to(gradient)
        return gradient

    def _changes(self, slopes: Slopes) -> tuple[list[Change], list[Change]]:
        """The changes by the statistics, and those that are by the logits themselves."""
        by_log_probs: list[Change] = []
        by_logits: list[Change] = []
        read = zip(self.reads, self._kept, slopes[1:], strict=True)
        for statistic, kept, slope in read:
            if slope is not None and statistic.has_derivative:
                changes = by_logits if statistic.is_of_logits else by_log_probs
                column = slope if slope.dim() == 2 else slope[:, None]
                changes.append(statistic.change(self, kept, column))
        return by_log_probs, by_logits


class CacheBlock(Block):
    """A block of a large matrix, in fewer passes: one exponential per logit.

    The probabilities are written to `target` if it is given, and become the gradient there.
    """

    def __init__(
        self,
        z: Tensor,
        labels: Tensor,
        reads: Sequence[Statistic],
        class_weights: Tensor | None = None,
        target: Tensor | None = None,
        *,
        all_count: bool = False,
    ) -> None:
        self.read(z, target)
        super().__init__(z, labels, reads, class_weights, all_count=all_count)

    def read(self, z: Tensor, target: Tensor | None) -> None:
        """Compute the probabilities, which the gradient overwrites, for the first time or again."""
        self.z = z
        self._probs = torch.softmax(z, 1, out=target)

    def forget(self) -> None:
        """Give the memory of the logits and probabilities back until they are read again."""
        del self.z, self._probs

    def _cross_entropy(self) -> Tensor:
        labels = self.labels
        if not self.all_count:
            is_ignored = labels == IGNORE_INDEX
            labels = labels.masked_fill(is_ignored, 0)
        self._column = labels[:, None]
        self.z_max = self.z.amax(1, keepdim=True)
        self.log_p_max = self._probs.amax(1, keepdim=True).log_()
        # A label that is no class raises an error.
        ce = self.log_p_of(self._column).squeeze(1).neg_()
        return ce if self.all_count else ce.masked_fill_(is_ignored, 0)

    def log_p_of(self, index: Tensor) -> Tensor:
        return self.z.gather(1, index) - self.z_max + self.log_p_max

    def ranked_below(self, count: int) -> tuple[Tensor, Tensor]:
        # 1 / (z_j - z_y) is negative for the classes below the label, and lowest for the nearest of
        # them. In a large matrix its minimum is found much faster than a maximum over a mask. (-0 -
        # 0 is -0, whose reciprocal is -inf as if the class were below the label; -0 + (0 - 0) is
        # 0.)
        of_label = self.z.gather(1, self._column)
        distance = (self.z + torch.rsub(of_label, 0)).reciprocal_()
        if count == 1:
            nearest, index = distance.min(1, keepdim=True)
        else:
            count = min(count, self.z.shape[1])
            nearest, index = distance.topk(count, largest=False)
        # Classes that are not below the label have reciprocals above 0.
        return self.log_p_of(index).where(nearest.signbit(), -torch.inf), index

    def other_powers(self, power: float) -> tuple[Tensor, None]:
        # In place there is no second matrix, for which all blocks would have to wait.
        of_label = self._probs.gather(1, self._column)
        self._probs.scatter_(1, self._column, 0)
        norm = torch.linalg.vector_norm(self._probs, power, dim=1)
        self._probs.scatter_(1, self._column, of_label)
        return norm.pow(power), None

    def powers_of_others(self, power: float) -> Tensor:
        return self._probs.pow(power).scatter_(1, self._column, 0)

    @property
    def log_probs(self) -> Tensor:  # type: ignore[override]
        return (self.z - self.z_max).add_(self.log_p_max)

    def log_probs_above(self, least: float) -> Tensor:
        return self.log_probs.clamp_min_(least)

    def log_ratios_above(self, least: float) -> tuple[Tensor, Any]:
        ratios = (self.z - self.z_max).clamp_min_(least)
        return ratios, self.log_p_max.squeeze(1)

    @property
    def probs(self) -> Tensor:
        return self._probs

    def above(self, matrix: Tensor, limit: float) -> Tensor:
        # Booleans would be slow.
        return torch.gt(matrix, limit, out=torch.empty_like(matrix))

    @property
    def column(self) -> Tensor:
        return self._column

    def gradient(self, slopes: Slopes) -> Tensor:
        """As of `Block`: m - p * sum(m). The probabilities are overwritten."""
        by_ce = slopes[0]
        assert by_ce is not None
        by_ce = by_ce[:, None]
        changes, of_logits = self._changes(slopes)
        # The derivative of the cross entropy by l is -1 at the label.
        total = -by_ce
        for change in changes:
            total = total + change.total()
        gradient = self._probs.mul_(-total)
        for change in changes + of_logits:
            change.add_to(gradient)
        return gradient.scatter_add_(1, self._column, -by_ce)


class Decisions:
    """The two outcomes of every decision of a multi-label problem,
    as 2 * N * C rows of two classes.

    A label of the logits (N, C) applies with probability sigmoid(z). `shares` are what the labels
    in [0, 1] give to the
    outcomes: a fraction is the mean of its outcomes, and an ignored decision has no shares. The
    outcome that the label applies counts `pos_weight` times.
    """

    def __init__(
        self,
        logits: Tensor,
        labels: Tensor,
        reads: Sequence[Statistic],
        pos_weight: Tensor | None = None,
    ) -> None:
        # A masked label (-inf) must not become 0 * inf.
        z = logits.to(wide(logits)).reshape(-1).clamp(-1e30, 1e30)
        target = labels.to(z.dtype).reshape(-1)
        weight: Tensor | float = 1.0
        if pos_weight is not None:
            weight = pos_weight.to(z).expand(labels.shape).reshape(-1)
        shares = torch.stack([target * weight, 1 - target])
        self.shares = shares.masked_fill(target == IGNORE_INDEX, 0).reshape(-1)
        cross_entropy = -F.logsigmoid(torch.stack([z, -z]))
        self.numbers: list[Any] = [cross_entropy.flatten()]
        for statistic in reads:
            if isinstance(statistic, defined.MeanLogProb):
                # The two outcomes of a decision have one class weight. `pos_weight` belongs to log
                # p of the outcome that the label applies, also in the mean; the shares of that
                # outcome are multiplied by it already.
                mean = -(weight * cross_entropy[0] + cross_entropy[1]) / 2
                self.numbers.append(torch.cat([mean / weight, mean]))
            elif isinstance(statistic, defined.OtherPowers):
                # Only the label's own class counts.
                self.numbers.append(torch.zeros_like(self.numbers[0]))

    def expected(self, values: Tensor) -> Tensor:
        """The sum of the values of both outcomes of each decision, by their shares."""
        return (values * self.shares).view(2, -1).sum(0)
