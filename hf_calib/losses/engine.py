"""The value of a loss and its gradient by the logits: the paths through which every loss goes.

    logits -> numbers of each row -> formula -> value and slopes -> gradient

The slopes are the derivatives of a row's value by its numbers, which the formula returns with the
value. So the gradient is made without a graph of autograd, on one of three paths: `in_one_block`
for few logits, `in_blocks` of rows that stay in the cache for many, and `by_kernels` on a GPU. A
path returns the value, and what it leaves to the backward
pass: the gradient itself, which waits for the slope of the value (`MadeGradient`), or what makes it
once that is known (`KeptSlopes`, `fused.KernelRows`).

`plain` is the same by autograd, from the formula's value alone. It is the definition, and serves
`torch.compile`, `torch.func`, gradients of gradients and many slopes at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from hf_calib.losses.statistics import fused
from hf_calib.losses.statistics.blocks import Block, CacheBlock, Slopes

if TYPE_CHECKING:
    from hf_calib.losses.loss import CalibrationLoss

# A block of this many elements stays in a core's cache; on an accelerator it only limits the
# scratch memory.
CPU_BLOCK_ELEMENTS = 2**18
DEVICE_BLOCK_ELEMENTS = 2**24


def is_traced() -> bool:
    """Whether `torch.compile` or a transform of `torch.func` is active; both need plain
    operations."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


@dataclass(eq=False)
class Reduction:
    """What the rows of a call add to its value: the sum of shares * values of rows,
    plus scale * penalty of the batch.

    Shares (N,) contain the class weights and the divisor, and are 0 for ignored rows. Without
    `summed` each row has a value of its own. `counts` (N,) is False for ignored rows; it is None if
    there are known to be none.
    """

    loss: CalibrationLoss
    shares: Tensor
    scale: Tensor | None
    summed: bool
    counts: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """That of the computation, which is `wide` of the logits."""
        return self.shares.dtype

    def value(self, numbers: Sequence[Any]) -> Tensor:
        """The value for the numbers of the rows, which autograd can differentiate."""
        rows = self.loss.row_values(numbers)
        if not self.summed:
            return rows * self.shares
        total = torch.dot(rows, self.shares)
        if self.scale is None:
            return total
        return total + self.loss.penalty(numbers) * self.scale

    def value_and_slopes(self, numbers: Sequence[Any]) -> tuple[Tensor, Slopes]:
        """The value, and its derivatives by the numbers of each row."""
        rows, by_numbers = self.loss.row_terms(numbers)
        slopes = [scaled(slope, self.shares) for slope in by_numbers]
        if slopes[0] is None:
            slopes[0] = torch.zeros_like(self.shares)
        if not self.summed:
            return rows * self.shares, slopes
        total = torch.dot(rows, self.shares)
        if self.scale is None:
            return total, slopes
        penalty, by_numbers = self.loss.penalty_terms(numbers)
        # The rows themselves read the cross entropy only.
        (by_rows,) = slopes
        by_ce, *slopes = [scaled(slope, self.scale) for slope in by_numbers]
        if by_ce is not None and by_rows is not None:
            by_rows = by_rows + by_ce
        return total + penalty * self.scale, [by_rows, *slopes]


def scaled(slope: Tensor | float, factor: Tensor) -> Tensor | None:
    """A formula's derivative times a factor for each row; None if it is 0 for all rows."""
    if isinstance(slope, Tensor):
        # The slope by a matrix is a matrix.
        return slope * (factor[..., None] if slope.dim() == 2 else factor)
    if slope == 1:
        return factor
    return None if slope == 0 else factor * slope


def reduced(logits: Tensor, labels: Tensor, reduction: Reduction) -> Tensor:
    """The loss of logits (N, C) with labels (N,)."""
    if is_traced():
        return plain(logits, labels, reduction)
    loss = reduction.loss
    path = in_blocks
    if fused.takes(logits, loss):
        path = by_kernels
    elif is_one_block(logits):
        path = in_one_block
        # Autograd would have to differentiate the replacement of ignored rows, too.
        has_few_operations = loss.entry.few_operations and reduction.counts is None
        # For a formula by autograd, a graph within the graph would take longer.
        if loss.entry.by_autograd or has_few_operations:
            return plain(logits, labels, reduction)
        # Autograd casts the gradient back.
        logits = logits.to(reduction.dtype)
    value: Tensor = _Loss.apply(logits, labels, reduction, path)
    return value


def rows_per_block(logits: Tensor) -> int:
    elements = CPU_BLOCK_ELEMENTS if logits.is_cpu else DEVICE_BLOCK_ELEMENTS
    return max(1, elements // logits.shape[1])


def is_one_block(logits: Tensor) -> bool:
    return logits.shape[0] <= rows_per_block(logits)


def plain(logits: Tensor, labels: Tensor, reduction: Reduction) -> Tensor:
    """The loss by operations that autograd differentiates."""
    block = small_block(logits.to(reduction.dtype), labels, reduction)
    return reduction.value(block.numbers)


def small_block(z: Tensor, labels: Tensor, reduction: Reduction) -> Block:
    """The rows as one block, with logits of 0 if they are ignored, which may be NaN; their shares
    are 0."""
    counts = reduction.counts
    if counts is not None:
        z = torch.where(counts[:, None], z, reduction.shares[:, None])
    return Block(
        z,
        labels,
        reduction.loss.reads,
        reduction.loss.class_weights,
        all_count=counts is None,
    )


class _Loss(torch.autograd.Function):
    """The value by a path, which also returns what is known of the gradient."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, reduction: Reduction, path: Path
    ) -> Tensor:
        ctx.save_for_backward(logits, labels)
        ctx.reduction = reduction
        ctx.path = path
        value, ctx.pending = path(logits, labels, reduction, ctx.needs_input_grad[0])
        return value

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        pending = ctx.pending
        # It is used once: a gradient is scaled in place, and blocks become the gradient.
        ctx.pending = None
        # The first is create_graph=True, the second is_grads_batched=True.
        are_many = torch._C._functorch.is_legacy_batchedtensor(slope)
        by_operations = torch.is_grad_enabled() or are_many
        if isinstance(pending, MadeGradient) and not by_operations:
            return pending.gradient(slope), None, None, None
        # This raises an error if logits or labels have been changed in place.
        logits, labels = ctx.saved_tensors
        with torch.autocast(slope.device.type, enabled=False):
            if by_operations:
                gradient = _by_autograd(logits, labels, ctx.reduction, slope)
                return gradient, None, None, None
            if pending is None:  # an earlier backward pass has used it
                _, pending = ctx.path(logits, labels, ctx.reduction, True)
            return pending.gradient(slope), None, None, None


def _by_autograd(
    logits: Tensor, labels: Tensor, reduction: Reduction, slope: Tensor
) -> Tensor:
    """The gradient of the definition, which can be differentiated if gradients are enabled."""
    has_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        value = plain(logits, labels, reduction)
        (gradient,) = torch.autograd.grad(value, logits, slope, create_graph=has_graph)
    return gradient


# ---- What the forward pass leaves to the backward pass: a gradient,
# or what makes one for a slope ----


class Pending(Protocol):
    def gradient(self, slope: Tensor) -> Tensor:
        """The gradient (n, C) for the slope of the value, (), or of the values of the rows,
        (n,)."""


@dataclass(eq=False)
class MadeGradient:
    """The gradient for a slope of 1, which is scaled in place."""

    matrix: Tensor

    def gradient(self, slope: Tensor) -> Tensor:
        if slope.dim() == 1:
            return self.matrix.mul_(slope[:, None])
        return self.matrix if is_one(slope) else self.matrix.mul_(slope)


@dataclass(eq=False)
class KeptSlopes:
    """Rows, and the slopes by their numbers, of logits of 16 bits, which are too coarse for a
    gradient to be scaled."""

    rows: Block | RowBlocks
    slopes: Slopes

    def gradient(self, slope: Tensor) -> Tensor:
        slopes = [None if own is None else own * slope for own in self.slopes]
        return self.rows.gradient(slopes)


# ---- The paths: the value, and what is left to the backward pass if there is one ----

Path = Callable[[Tensor, Tensor, Reduction, bool], tuple[Tensor, Pending | None]]


def by_kernels(
    logits: Tensor, labels: Tensor, reduction: Reduction, has_gradient: bool
) -> tuple[Tensor, Pending | None]:
    """A kernel writes the gradient of a small matrix together with the values;
    it is made later otherwise.

    16 bits would be too coarse for a gradient that is not scaled yet. To scale that of a large
    matrix takes longer than to read the logits again, as longer rows are.
    """
    loss = reduction.loss
    formula = loss.row_formula
    assert formula is not None
    arguments = loss.arguments(reduction.shares)
    rows = fused.KernelRows(logits, labels, formula, loss.reads, arguments)
    is_short = logits.shape[1] <= fused.LONGEST_BLOCK
    is_small = is_one_block(logits)
    pending: Pending | None = None
    if not has_gradient:
        values = rows.values(reduction.shares)
    elif is_short and is_small and logits.dtype == torch.float32:
        target = empty_gradient(logits)
        values = rows.values(reduction.shares, gradient=target)
        pending = MadeGradient(target)
    else:
        values = rows.values(reduction.shares, keeps_slopes=True)
        pending = rows
    return values.sum() if reduction.summed else values, pending


def in_one_block(
    logits: Tensor, labels: Tensor, reduction: Reduction, has_gradient: bool
) -> tuple[Tensor, Pending | None]:
    """Few operations, each of which costs more than its numbers."""
    block = small_block(logits, labels, reduction)
    return _of_all_rows(block, logits, reduction, has_gradient)


def in_blocks(
    logits: Tensor, labels: Tensor, reduction: Reduction, has_gradient: bool
) -> tuple[Tensor, Pending | None]:
    """Blocks of rows that stay in the cache, whose gradients are written to one matrix."""
    target = None
    if has_gradient and logits.dtype == reduction.dtype:
        target = empty_gradient(logits)
    rows = RowBlocks(logits, labels, reduction, target)
    return _of_all_rows(rows, logits, reduction, has_gradient)


def _of_all_rows(
    rows: Block | RowBlocks, logits: Tensor, reduction: Reduction, has_gradient: bool
) -> tuple[Tensor, Pending | None]:
    """One formula for the numbers of all rows."""
    if not has_gradient:
        return reduction.value(rows.numbers), None
    value, slopes = reduction.value_and_slopes(rows.numbers)
    if logits.dtype == reduction.dtype:
        return value, MadeGradient(rows.gradient(slopes))
    return value, KeptSlopes(rows, slopes)


def is_one(slope: Tensor) -> bool:
    """Whether a slope is known to be 1. A look at it costs less than a pass over the gradient,
    except on a device."""
    return slope.is_cpu and slope.item() == 1


def all_count(weights: Tensor) -> bool:
    """Whether rows of these weights are known to be all counted; a device is not waited for."""
    return weights.is_cpu and not is_traced() and bool(weights.all())


def empty_gradient(logits: Tensor) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


class RowBlocks:
    """A large matrix in blocks of rows, with the interface of `Block` and one formula for the
    numbers of all rows.

    That takes fewer operations than a formula for each block. The probabilities of a block wait in
    `target`, which becomes the gradient; in 16 bits they are computed again.
    """

    def __init__(
        self,
        logits: Tensor,
        labels: Tensor,
        reduction: Reduction,
        target: Tensor | None,
    ) -> None:
        self._logits = logits
        self._labels = labels
        self._reduction = reduction
        self._target = target
        self._read: list[CacheBlock] = []
        size = rows_per_block(logits)
        starts = range(0, len(logits), size)
        self._parts = [slice(start, start + size) for start in starts]
        found = []
        for rows in self._parts:
            block = self._block(rows)
            found.append(block.numbers)
            # A matrix would be in memory twice.
            del block.numbers
            if target is None:
                block.forget()
            self._read.append(block)
        self.numbers = [_joined(own) for own in zip(*found, strict=True)]

    def gradient(self, slopes: Slopes) -> Tensor:
        whole = self._target
        if whole is None:
            whole = empty_gradient(self._logits)
        for rows, block in zip(self._parts, self._read, strict=True):
            if self._target is None:
                block.read(self._wide_logits(rows), None)
            own = [None if slope is None else slope[rows] for slope in slopes]
            _write(whole[rows], block.gradient(own))
            block.forget()
        return whole

    def _block(self, rows: slice) -> CacheBlock:
        reduction = self._reduction
        return CacheBlock(
            self._wide_logits(rows),
            self._labels[rows],
            reduction.loss.reads,
            reduction.loss.class_weights,
            None if self._target is None else self._target[rows],
            all_count=reduction.counts is None,
        )

    def _wide_logits(self, rows: slice) -> Tensor:
        z = self._logits[rows].to(self._reduction.dtype)
        counts = self._reduction.counts
        if counts is None:
            return z
        return counted_logits(z, counts[rows], self._reduction.shares[rows])


def counted_logits(z: Tensor, counts: Tensor, shares: Tensor) -> Tensor:
    """The logits (n, C) of a block, 0 in ignored rows, which may be NaN; their shares are 0."""
    if not z.is_cpu:
        return torch.where(counts[:, None], z, shares[:, None])
    # A look at the ignored rows costs less than a copy of all.
    ignored = counts.logical_not().nonzero().squeeze(1)
    if z.index_select(0, ignored).amax(1).isfinite().all():
        return z
    return z.index_fill(0, ignored, 0)


def _joined(parts: Sequence[Any]) -> Any:
    """The numbers of all blocks; a constant is that of any block."""
    return torch.cat([*parts]) if isinstance(parts[0], Tensor) else parts[0]


def _write(target: Tensor, gradient: Tensor) -> None:
    """Write a block's gradient to its place, unless it has been computed there."""
    if target.dtype != gradient.dtype:
        target.copy_(gradient)
