"""The statistics of rows that the formula of a loss can read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_calib.losses.statistics import definitions as defined
from hf_calib.losses.statistics.definitions import (
    CROSS_ENTROPY,
    IGNORE_INDEX,
    RivalRank,
    Statistic,
    tiny,
)
from hf_calib.losses.statistics.door import is_traced

Gamma = float | Tensor  # A number for all rows, or (N,).
# A cross entropy above this is that of a label which is masked, by -inf or by the least number of its dtype.
_IMPOSSIBLE = 1e30
# Python searches this many numbers on the CPU in less time than one operation of PyTorch takes.
FEW_ROWS = 1024
# This is added to a cross entropy of 0, so that the odds of the label are finite.
_LEAST = 1e-30


def _number(name: str) -> Tensor:
    """An attribute of `Rows` that reads a statistic by its name, so that `torch.compile` can trace it."""
    return property(lambda rows: rows._read(getattr(defined, name)()))  # type: ignore[return-value]


class Rows:
    """The statistics of N rows of logits with labels: (N,), float32 or float64, unless an attribute says otherwise.

    All statistics of an ignored row are 0, as if its label had probability 1, so formulas need no mask. A formula is
    run once to find the statistics that it reads, and only these are computed.
    """

    def __init__(
        self,
        values: Mapping[Statistic, Tensor],
        labels: Tensor,
        table: Any,
        batch: Rows | None = None,
    ) -> None:
        self._values = values
        self._labels = labels
        self._batch = batch
        self.table = table

    def _read(self, statistic: Statistic) -> Tensor:
        return self._values[statistic]

    ce = _number("CrossEntropy")
    entropy = _number("Entropy")
    correct = _number("Correct")
    log_probs = _number("LogProbs")  # (N, C), and needs this memory.

    @property
    def p(self) -> Tensor:
        """The probability of the label, without a gradient."""
        return torch.exp(-self.ce.detach())

    @property
    def rest(self) -> Tensor:
        """1 - p, which is accurate even if p is nearly 1."""
        return -torch.expm1(-self.ce)

    @property
    def mean_log_prob(self) -> Tensor:
        """The mean of log p over the classes that are not masked, each times its class weight over the label's.

        The weight of the label multiplies the loss of a row, so each class has its own weight in the end, as in
        PyTorch. The decisions of a multi-label problem have one weight for both outcomes.
        """
        weights = self.table.class_weights
        if weights is None:
            return self._read(defined.MeanLogProb())
        log_probs = self.log_probs
        if self._labels.is_floating_point():
            return log_probs.mean(1)
        weights = weights.to(log_probs)
        relative = weights / weights[self._labels.clamp_min(0)][:, None]
        allowed = log_probs > -torch.inf
        total = (log_probs.where(allowed, 0) * relative).sum(1)
        return total / allowed.sum(1).clamp_min(1)

    @property
    def confidence(self) -> Tensor:
        """The probability of the predicted class."""
        return self._read(defined.LogConfidence()).exp()

    def rival(self, rank: RivalRank | float) -> Tensor | float:
        """The probability of the class ranked below the label, or a mean of several; a number is returned unchanged."""
        return self._read(defined.Rival(rank)) if isinstance(rank, str) else rank

    def others(self, power: float) -> Tensor:
        """The sum of p_j^power over the classes other than the label."""
        return self._read(defined.OtherPowers(power))

    def logit_norm(self, order: float) -> Tensor:
        """||z||_order of the logits."""
        return self._read(defined.LogitNorm(order))

    @property
    def labels(self) -> Tensor:
        """The labels (N,), int64, -100 if ignored."""
        return self._labels

    @property
    def one_hot(self) -> Tensor:
        """The labels as (N, C): 1 at the label, otherwise 0."""
        classes = self._labels.clamp_min(0)
        return torch.nn.functional.one_hot(classes, self.log_probs.shape[1]).to(
            self.log_probs
        )

    @property
    def counts(self) -> Tensor:
        """The factor of each row (N,): 1, or 0 if the row is ignored."""
        return (self._labels != IGNORE_INDEX).to(next(iter(self._values.values())))

    @property
    def batch(self) -> Rows:
        """The rows of the whole batch, for a penalty on it; those of all processes if they are gathered."""
        return self if self._batch is None else self._batch


class RecordingRows(Rows):
    """Two rows with arbitrary values, which record the statistics that a formula reads."""

    def __init__(self, table: Any) -> None:
        half = torch.full((2,), 0.5, device="cpu", requires_grad=True)
        self.read: dict[Statistic, Tensor] = {CROSS_ENTROPY: half}
        super().__init__(self.read, torch.tensor([0, 1], device="cpu"), table)
        self.reads_labels = False
        self.of_batch: RecordingRows | None = None

    def _read(self, statistic: Statistic) -> Tensor:
        if statistic not in self.read:
            shape: tuple[int, ...] = (2,)
            if isinstance(statistic, defined.LogProbs):
                weights = self.table.class_weights
                shape = (2, 2 if weights is None else len(weights))
            half = torch.full(
                shape, 0.5, device="cpu", requires_grad=statistic.differentiable
            )
            self.read[statistic] = half
        return self.read[statistic]

    @property
    def labels(self) -> Tensor:
        self.reads_labels = True
        return self._labels

    @property
    def batch(self) -> Rows:
        if self.of_batch is None:
            self.of_batch = RecordingRows(self.table)
        return self.of_batch


def power_of(base: Tensor, exponent: Gamma) -> Tensor:
    """base ** exponent for base >= 0, with gradient 0 instead of NaN if base is 0 and exponent below 1."""
    if isinstance(exponent, float) and exponent >= 1:
        return base if exponent == 1 else base.pow(exponent)
    return base.clamp_min(tiny(base)).pow(exponent)


def modulate(rest: Tensor, gamma: Gamma) -> Tensor:
    """(1 - m)^gamma of a margin m, or (1 + m)^|gamma| for a negative gamma, where rest = 1 - m."""
    if isinstance(gamma, Tensor):
        return power_of(torch.where(gamma >= 0, rest, 2 - rest), gamma.abs())
    return power_of(rest if gamma >= 0 else 2 - rest, abs(gamma))


def weighted(weight: Tensor, ce: Tensor) -> Tensor:
    """weight * CE, whose value and gradient are never NaN, even for an impossible label (logit -inf).

    The cross entropy of such a label is infinite, and 0 times infinity is NaN. Therefore a constant weight of 0 gives
    0, and any other weight is treated as a constant, so that the gradient is that of cross entropy.
    """
    if not weight.requires_grad:
        return ce.masked_fill(weight == 0, 0) * weight
    return ce * torch.where(ce > _IMPOSSIBLE, weight.detach(), weight)


def focal_term(ce: Tensor, gamma: Gamma) -> Tensor:
    """(1 - p)^gamma * CE, or (1 + p)^|gamma| * CE for a negative gamma."""
    if isinstance(gamma, Tensor) or gamma < 0 or not ce.requires_grad or is_traced():
        return weighted(modulate(-torch.expm1(-ce), gamma), ce)
    term: Tensor = _FocalTerm.apply(ce, gamma)
    return term


class _FocalTerm(torch.autograd.Function):
    """The focal term for gamma >= 0, in a third of the operations of autograd, which dominate the time for few rows.

    With rest = 1 - p the slope is rest^gamma + gamma value p / rest, and p / rest = 1 / (exp(CE) - 1). The exponential
    linear unit is a single operation that computes the exponential minus 1 for one sign of its argument.
    """

    @staticmethod
    def forward(ctx: Any, ce: Tensor, gamma: float) -> Tensor:
        negative = torch.rsub(ce, -_LEAST)
        weight = torch.ops.aten.elu(negative, -1).pow_(gamma)
        value = weight * ce
        slope = torch.addcdiv(
            weight, value, torch.ops.aten.elu(negative, 1, 1, -1), value=gamma
        )
        # The slope of an impossible label is that of cross entropy. For few rows, Python finds such a label faster.
        if (
            ce.device.type != "cpu"
            or len(ce) > FEW_ROWS
            or max(ce.tolist(), default=0) > _IMPOSSIBLE
        ):
            slope.nan_to_num_(nan=1.0)
        ctx.gamma = gamma
        ctx.save_for_backward(ce, slope)
        return value

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        ce, own = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return own * slope, None
        value = weighted(
            modulate(-torch.expm1(-ce), ctx.gamma), ce
        )  # create_graph=True
        (gradient,) = torch.autograd.grad(value, ce, slope, create_graph=True)
        return gradient, None


def has_own_slope(value: Any) -> bool:
    """Whether the value of a formula is a `_FocalTerm`, whose slope does not come from autograd."""
    node = value.grad_fn if isinstance(value, Tensor) else None
    return node is not None and node.name() == "_FocalTermBackward"
