"""The one door to the logits: a few numbers per row, read at once, of which autograd differentiates the losses.

Logits on a GPU take the fused path, two Triton kernels. Elsewhere large matrices take the chunked path, which works
on blocks of rows that fit in the cache and needs no memory beside the logits but for their gradient. Small ones take a
few plain PyTorch operations: there overhead counts. So does everything under `torch.compile` and `torch.func`, and a
gradient that is itself differentiated. In a multi-label problem every decision is a sigmoid of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_calib._errors import InputValueError
from hf_calib.losses.statistics import fused
from hf_calib.losses.statistics.chunked import ChunkedStatistics
from hf_calib.losses.statistics.definitions import CROSS_ENTROPY, IGNORE_INDEX, Statistic
from hf_calib.losses.statistics.direct import differentiable_gradient, direct_statistics, is_traced

# Matrices up to this many elements take the direct path.
DIRECT_ELEMENTS = 2**16


def row_statistics(
    logits: Tensor, labels: Tensor, statistics: tuple[Statistic, ...]
) -> dict[Statistic, Tensor]:
    """Reduce logits (N, C) with labels (N,) to statistics, the first of which is the cross entropy.

    Each is (N,), float32 (float64 for float64 logits), and 0 where an example is ignored. A label outside [0, C) that
    is not -100 is refused (on a GPU: a device-side assertion).
    """
    try:
        return dict(zip(statistics, _values(logits, labels, statistics), strict=True))
    except (IndexError, RuntimeError):
        check_labels(labels, logits.shape[1])  # PyTorch's indexing error names none
        raise


def check_labels(labels: Tensor, n_classes: int) -> None:
    """Refuse labels (N,) that are no class and not ignored, naming one; it waits for the device."""
    wrong = (labels != IGNORE_INDEX) & ((labels < 0) | (labels >= n_classes))
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        requirement = f"labels to be in [0, {n_classes}) or {IGNORE_INDEX}"
        got = f"{int(labels[row])} in row {row}"
        raise InputValueError(f"expected {requirement}, got {got}; set the model's num_labels, or relabel")


def _values(logits: Tensor, labels: Tensor, statistics: tuple[Statistic, ...]) -> Sequence[Tensor]:
    traced = is_traced()
    if not traced and fused.takes(logits, statistics):
        return fused.FusedStatistics.apply(logits, labels, statistics)
    if traced or logits.numel() <= DIRECT_ELEMENTS:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        if traced or len(statistics) > 1:
            return direct_statistics(wide, labels, statistics)
        return [_CrossEntropy.apply(wide, labels)]
    return ChunkedStatistics.apply(logits, labels, statistics)


class _CrossEntropy(torch.autograd.Function):
    """The cross entropy alone, in fewer operations than autograd takes: of a small matrix they cost the most."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        log_probs = torch.log_softmax(logits, 1)
        found, total = torch.ops.aten.nll_loss_forward(log_probs, labels, None, 0, IGNORE_INDEX)
        ctx.save_for_backward(logits, labels, log_probs, total)
        return found

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        logits, labels, log_probs, total = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            return differentiable_gradient(logits, labels, (CROSS_ENTROPY,), (slope,)), None
        aten = torch.ops.aten
        at_label = aten.nll_loss_backward(slope, log_probs, labels, None, 0, IGNORE_INDEX, total)
        gradient: Tensor = aten._log_softmax_backward_data(at_label, log_probs, 1, log_probs.dtype)
        return gradient, None


def decision_statistics(
    logits: Tensor, labels: Tensor, statistics: Sequence[Statistic]
) -> tuple[dict[Statistic, Tensor], Tensor]:
    """The statistics, each (2 * N * C,), of both outcomes of logits and labels (N, C) in [0, 1].

    "The label applies" has probability sigmoid(z): a row of two outcomes, without other classes. The second result is
    the share that the label gives to each: a soft label is the mean of its outcomes, an ignored one has none.
    """
    z = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32).reshape(-1)
    z = z.clamp(-1e30, 1e30)  # a masked label (-inf) must not become 0 * inf
    target = labels.to(z.dtype).reshape(-1)
    share = torch.stack([target, 1 - target]).masked_fill(target == IGNORE_INDEX, 0).reshape(-1)
    cross_entropy = -F.logsigmoid(torch.stack([z, -z]))
    return {each: each.multi_label(cross_entropy).reshape(-1) for each in statistics}, share
