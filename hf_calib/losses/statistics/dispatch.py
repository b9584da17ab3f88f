"""The one door to the logits: a few numbers per row, and which path computes them.

No loss in this package needs the (N, C) probabilities, only a handful of numbers per example: the cross
entropy, the probability of the label's rival, the power sum of the other probabilities, the entropy, ...
`row_statistics` reads the logits once and returns those as (N,) vectors, so that every loss is a scalar
formula which autograd differentiates.

Logits on a GPU take the fused path, two Triton kernels. Elsewhere large matrices take the chunked path, which works
on blocks of rows that fit in the cache and needs no memory beside the logits but for their gradient. Small ones take a
few plain PyTorch operations: there overhead counts. So does everything under `torch.compile` and `torch.func`, and a
gradient that is itself differentiated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_calib.losses.statistics import fused
from hf_calib.losses.statistics.chunked import ChunkedStatistics
from hf_calib.losses.statistics.definitions import CROSS_ENTROPY, Statistic
from hf_calib.losses.statistics.direct import direct_statistics
from hf_calib.losses.statistics.multi_label import decision_statistics

# Matrices up to this many elements take the direct path.
DIRECT_ELEMENTS = 2**15


@dataclass(frozen=True)
class RowStatistics:
    """Statistics of N examples, each (N,), float32 (float64 for float64 logits); 0 where an example is ignored."""

    values: Mapping[Statistic, Tensor]

    def __getitem__(self, statistic: Statistic) -> Tensor:
        return self.values[statistic]

    @property
    def cross_entropy(self) -> Tensor:
        """-log p_y, in nats; of every loss."""
        return self.values[CROSS_ENTROPY]

    @property
    def p(self) -> Tensor:
        """Probability of the label, without a gradient: what reads it is a constant to the gradient."""
        return torch.exp(-self.cross_entropy.detach())

    @property
    def one_minus_p(self) -> Tensor:
        """1 - p_y, exact also where p_y is nearly 1."""
        return -torch.expm1(-self.cross_entropy)


def is_traced() -> bool:
    """Whether `torch.compile` or a transform of `torch.func` is at work, which take plain operations only."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def read_by(*parts: Sequence[Statistic]) -> tuple[Statistic, ...]:
    """The statistics that the parts of a loss read: each once, the cross entropy first."""
    return tuple(dict.fromkeys([CROSS_ENTROPY, *(statistic for part in parts for statistic in part)]))


def row_statistics(logits: Tensor, labels: Tensor, statistics: tuple[Statistic, ...]) -> RowStatistics:
    """Reduce logits (N, C) with labels (N,) to the statistics that `read_by` lists.

    Raises:
        IndexError: for a label outside [0, C) that is not -100 (on a GPU: a device-side assertion).
        ValueError: for a statistic that the path does not compute.
    """
    traced = is_traced()
    if not traced and fused.takes(logits, statistics):
        values = list(fused.FusedStatistics.apply(logits, labels, statistics))
    elif traced or logits.numel() <= DIRECT_ELEMENTS:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        values = direct_statistics(wide, labels, statistics)
    else:
        values = list(ChunkedStatistics.apply(logits, labels, statistics))
    return RowStatistics(dict(zip(statistics, values, strict=True)))


def multi_label_statistics(
    logits: Tensor, labels: Tensor, statistics: tuple[Statistic, ...]
) -> tuple[RowStatistics, Tensor]:
    """Both outcomes of every decision of logits and labels (N, C), and the share of each; see `multi_label`."""
    values, share = decision_statistics(logits, labels, statistics)
    return RowStatistics(dict(zip(statistics, values, strict=True))), share
