"""Reduction of logits to row statistics, the only place where a loss reads logits.

Logits on a GPU use the fused path, two Triton kernels. Elsewhere, large matrices use the chunked path: blocks of rows
that fit in the cache, with no additional memory except for the gradient. Small matrices use a few plain PyTorch
operations, because overhead dominates there; so do `torch.compile`, `torch.func`, and a gradient that is differentiated
again. In a multi-label problem every decision is a sigmoid of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_calib._errors import InputValueError
from hf_calib.losses.statistics import chunked, fused
from hf_calib.losses.statistics import definitions as defined
from hf_calib.losses.statistics.definitions import (
    CROSS_ENTROPY,
    IGNORE_INDEX,
    Numbers,
    Statistic,
    wide,
)

# Matrices with at most this many elements use the direct path.
DIRECT_ELEMENTS = 2**16


def is_traced() -> bool:
    """Whether `torch.compile` or a transform of `torch.func` is active; both need plain operations."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def row_statistics(
    logits: Tensor,
    labels: Tensor,
    statistics: tuple[Statistic, ...],
    own_slope: bool = False,
) -> dict[Statistic, Tensor]:
    """Reduce logits (N, C) with labels (N,) to statistics, the first of which is the cross entropy.

    Each is (N,), float32 (float64 for float64 logits), and 0 if an example is ignored. A label outside [0, C) that is
    not -100 raises an error (on a GPU, a device-side assertion). `own_slope` says that the loss computes the slope of a
    term of the cross entropy itself.
    """
    try:
        if is_traced():
            values = _direct(logits, labels, statistics)
        elif fused.takes(logits, statistics):
            check_labels(
                labels, logits.shape[1]
            )  # The kernels would read out of bounds.
            values = _Statistics.apply(logits, labels, statistics, fused)
        elif logits.numel() > DIRECT_ELEMENTS:
            values = _Statistics.apply(logits, labels, statistics, chunked)
        elif len(statistics) > 1:
            values = _direct(logits, labels, statistics)
        elif own_slope:
            values = [_CrossEntropy.apply(logits.to(wide(logits)), labels)]
        else:
            wider = logits.to(wide(logits))
            values = [
                F.cross_entropy(
                    wider, labels, reduction="none", ignore_index=IGNORE_INDEX
                )
            ]
    except (IndexError, RuntimeError):
        check_labels(labels, logits.shape[1])  # PyTorch's own error names no label.
        raise
    return dict(zip(statistics, values, strict=True))


def check_labels(labels: Tensor, n_classes: int, *, of_weights: bool = False) -> None:
    """Raise if a label (N,) is neither a class nor ignored, and name it; a GPU asserts without being waited for.

    `of_weights` says that the number of classes is that of the class weights, which may be the wrong one.
    """
    wrong = (labels != IGNORE_INDEX) & ((labels < 0) | (labels >= n_classes))
    requirement = f"labels to be in [0, {n_classes}) or {IGNORE_INDEX}"
    way_out = "set the model's num_labels, or relabel"
    if labels.is_cuda:
        torch._assert_async(~wrong.any(), f"expected {requirement}")
    elif bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        label = int(labels[row])
        got = f"{label} in row {row}"
        if of_weights and label >= n_classes:
            requirement = "class_weights to have an entry for each label"
            got = f"{n_classes} for label {got}"
            way_out = "give one for each class of the model, or relabel"
        raise InputValueError(f"expected {requirement}, got {got}; {way_out}")


def decision_statistics(
    logits: Tensor, labels: Tensor, statistics: Sequence[Statistic]
) -> tuple[dict[Statistic, Tensor], Tensor]:
    """The statistics, each (2 * N * C,), of both outcomes of logits and labels (N, C) in [0, 1].

    `LogProbs` is (2 * N * C, 2). A label applies with probability sigmoid(z), so a decision is a row with two outcomes.
    The second result is the share that the label gives to each outcome: a soft label is the mean of its outcomes, and
    an ignored label has no shares. A label outside [0, 1] raises an error.
    """
    # A masked label (-inf) must not become 0 * inf.
    z = logits.to(wide(logits)).reshape(-1).clamp(-1e30, 1e30)
    target = labels.to(z.dtype).reshape(-1)
    share = (
        torch.stack([target, 1 - target])
        .masked_fill(target == IGNORE_INDEX, 0)
        .reshape(-1)
    )
    _check_shares(share, target)
    cross_entropy = -F.logsigmoid(torch.stack([z, -z]))
    found = {
        defined.CrossEntropy: cross_entropy,
        defined.MeanLogProb: -cross_entropy.mean(0).expand(2, -1),
        defined.OtherPowers: torch.zeros_like(cross_entropy),
        defined.LogProbs: -torch.stack([cross_entropy, cross_entropy.flip(0)], dim=2),
    }
    return {each: found[type(each)].flatten(0, 1) for each in statistics}, share


def _check_shares(shares: Tensor, labels: Tensor) -> None:
    """Raise for multi-label targets outside [0, 1], one of whose shares is negative; a GPU is not waited for."""
    if is_traced() or not len(shares):
        return
    is_right = shares.min() >= 0  # This is False for NaN.
    requirement = "multi-label labels to be in [0, 1]"
    way_out = "give 0 or 1 per class, or -100 to ignore a decision"
    if not shares.is_cpu:
        torch._assert_async(is_right, f"expected {requirement}; {way_out}")
    elif not is_right:
        wrong = ~(shares.view(2, -1) >= 0).all(0)
        got = labels[wrong][0].item()
        raise InputValueError(f"expected {requirement}, got {got}; {way_out}")


def _of_valid(values: Tensor, valid: Tensor) -> Tensor:
    """Values per row, (n,) or (n, k), set to 0 if the row (n,) is ignored."""
    return values.where(
        valid if values.dim() == 1 else valid[:, None], values.new_zeros(())
    )


def _direct(
    logits: Tensor, labels: Tensor, statistics: Sequence[Statistic]
) -> list[Tensor]:
    """The statistics, the first of which is the cross entropy, by plain differentiable operations."""
    valid = labels != IGNORE_INDEX
    block = defined.Block(logits.to(wide(logits)), labels.where(valid, 0)[:, None])
    values = [
        F.nll_loss(block.log_probs, labels, reduction="none", ignore_index=IGNORE_INDEX)
    ]
    return values + [
        _of_valid(statistic.numbers(block)["value"], valid)
        for statistic in statistics[1:]
    ]


def _differentiable_gradient(
    logits: Tensor,
    labels: Tensor,
    statistics: Sequence[Statistic],
    slopes: Sequence[Tensor | None],
) -> Tensor:
    """The gradient of the statistics for these slopes, which can be differentiated again (`create_graph=True`)."""
    values = _direct(logits, labels, statistics)
    used = [
        (v, s)
        for v, s in zip(values, slopes, strict=True)
        if s is not None and v.requires_grad
    ]
    outputs, own = zip(*used, strict=True)
    (gradient,) = torch.autograd.grad(outputs, logits, own, create_graph=True)
    return gradient


class _CrossEntropy(torch.autograd.Function):
    """The cross entropy alone, in fewer operations than autograd, for a term that computes its own slope."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        log_probs = torch.log_softmax(logits, 1)
        found, total = torch.ops.aten.nll_loss_forward(
            log_probs, labels, None, 0, IGNORE_INDEX
        )
        ctx.save_for_backward(logits, labels, log_probs, total)
        return found

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        logits, labels, log_probs, total = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            return _differentiable_gradient(
                logits, labels, (CROSS_ENTROPY,), (slope,)
            ), None
        aten = torch.ops.aten
        at_label = aten.nll_loss_backward(
            slope, log_probs, labels, None, 0, IGNORE_INDEX, total
        )
        gradient: Tensor = aten._log_softmax_backward_data(
            at_label, log_probs, 1, log_probs.dtype
        )
        return gradient, None


class _Statistics(torch.autograd.Function):
    """The statistics with the gradient of `definitions`, computed by `chunked` or `fused`."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        statistics: Sequence[Statistic],
        way: Any,
    ) -> tuple[Tensor, ...]:
        of_rows, own, ctx.probs = way.numbers(
            logits, labels, statistics, ctx.needs_input_grad[0]
        )
        valid = labels != IGNORE_INDEX
        values = [_of_valid(numbers["value"], valid) for numbers in own]
        ctx.way, ctx.statistics, ctx.names = (
            way,
            statistics,
            [list(each) for each in (of_rows, *own)],
        )
        ctx.save_for_backward(
            logits, labels, *(t for each in (of_rows, *own) for t in each.values())
        )
        ctx.set_materialize_grads(False)
        pairs = zip(values, statistics, strict=True)
        ctx.mark_non_differentiable(
            *(value for value, statistic in pairs if not statistic.differentiable)
        )
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, labels, *saved = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            gradient = _differentiable_gradient(logits, labels, ctx.statistics, slopes)
            return gradient, None, None, None
        columns = (t if t.dim() == 2 else t[:, None] for t in saved)
        of_rows, *own = [{name: next(columns) for name in names} for names in ctx.names]
        valid = labels != IGNORE_INDEX
        of_rows["alpha"] = torch.zeros_like(of_rows["z_max"])
        terms: list[tuple[Statistic, Numbers]] = []
        for statistic, numbers, slope in zip(ctx.statistics, own, slopes, strict=True):
            if slope is not None:
                column = _of_valid(slope if slope.dim() == 2 else slope[:, None], valid)
                coefficients = statistic.coefficients(of_rows | numbers, column)
                of_rows["alpha"] = of_rows["alpha"] + coefficients.pop("alpha")
                terms.append((statistic, coefficients))
        probs, ctx.probs = (
            ctx.probs,
            None,
        )  # The gradient overwrites them; a second backward recomputes.
        return ctx.way.gradient(logits, labels, of_rows, terms, probs), None, None, None
