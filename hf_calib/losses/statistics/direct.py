"""The statistics by plain differentiable operations: for small matrices, and under `torch.compile`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_calib.losses.statistics.definitions import CROSS_ENTROPY, IGNORE_INDEX, Statistic, of_valid


class LabelledRows:
    """Logits (N, C), float32 or float64, with labels (N,), and what several statistics read of them.

    What not every loss needs is made when it is first read. (No `cached_property`: `torch.compile` cannot trace
    the lock that Python 3.11's holds.)
    """

    def __init__(self, logits: Tensor, labels: Tensor) -> None:
        self.logits = logits
        self.labels = labels
        self.log_probs = F.log_softmax(logits, dim=1)
        self._probs: Tensor | None = None
        self._predicted: Tensor | None = None
        self._column: Tensor | None = None

    @property
    def probs(self) -> Tensor:
        if self._probs is None:
            self._probs = self.log_probs.exp()
        return self._probs

    @property
    def predicted(self) -> Tensor:
        """(N,) the predicted class: of the logits, not of the probabilities, which underflow into ties."""
        if self._predicted is None:
            self._predicted = self.logits.argmax(1)
        return self._predicted

    @property
    def column(self) -> Tensor:
        """(N, 1) the label; 0 where it is ignored."""
        if self._column is None:
            self._column = torch.where(self.labels != IGNORE_INDEX, self.labels, 0)[:, None]
        return self._column


def is_traced() -> bool:
    """Whether `torch.compile` or a transform of `torch.func` is at work, which take plain operations only."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def direct_statistics(logits: Tensor, labels: Tensor, statistics: Sequence[Statistic]) -> list[Tensor]:
    """The values of the statistics, the first of which is the cross entropy."""
    rows = LabelledRows(logits, labels)
    values = [CROSS_ENTROPY.direct(rows)]  # which leaves ignored rows out by itself
    if len(statistics) > 1:
        valid = labels != IGNORE_INDEX
        values += [of_valid(statistic.direct(rows), valid) for statistic in statistics[1:]]
    return values


def differentiable_gradient(
    logits: Tensor, labels: Tensor, statistics: Sequence[Statistic], slopes: Sequence[Tensor | None]
) -> Tensor:
    """The gradient of the statistics for these slopes, itself with a gradient (`create_graph=True`)."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    values = direct_statistics(wide, labels, statistics)
    used = [(v, s) for v, s in zip(values, slopes, strict=True) if s is not None and v.requires_grad]
    outputs, own = zip(*used, strict=True)
    (gradient,) = torch.autograd.grad(outputs, logits, own, create_graph=True)
    return gradient
