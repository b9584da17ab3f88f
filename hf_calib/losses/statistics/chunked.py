"""The statistics of a large matrix block by block of rows, with a gradient that is written once.

What each statistic adds to the value and to the gradient stands in `definitions`. The softmax kernels are used as they
are: they are fused, and cost less than an exponential by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_calib.losses.statistics.definitions import IGNORE_INDEX, Numbers, Statistic, of_valid
from hf_calib.losses.statistics.direct import differentiable_gradient

# A block of this many elements stays in a core's cache; on an accelerator it only bounds the scratch memory.
CPU_BLOCK_ELEMENTS = 2**18
DEVICE_BLOCK_ELEMENTS = 2**24


@dataclass
class Block:
    """A block of n rows: logits and probabilities (n, C), the labels' column (n, 1)."""

    z: Tensor
    column: Tensor
    probs: Tensor


@dataclass
class ForwardBlock(Block):
    """A block and, (n,), its largest logits, their log-probabilities and, if a statistic reads it, their class."""

    z_max: Tensor
    log_p_max: Tensor
    predicted: Tensor

    @classmethod
    def of(cls, z: Tensor, column: Tensor, probs: Tensor, reads_prediction: bool) -> ForwardBlock:
        """Fill `probs` with the softmax of z."""
        z_max, predicted = z.max(1) if reads_prediction else (z.amax(1), z.new_empty(0))
        torch.softmax(z, 1, out=probs)
        return cls(z, column, probs, z_max, probs.amax(1).log(), predicted)


class ChunkedStatistics(torch.autograd.Function):
    """The statistics of logits (N, C) and labels (N,), with 1x the logits' memory in all: the gradient.

    Its buffer holds the probabilities first, which saves the backward a softmax. In 16 bits they would be too coarse.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, statistics: Sequence[Statistic]
    ) -> tuple[Tensor, ...]:
        valid = labels != IGNORE_INDEX
        column = torch.where(valid, labels, 0)[:, None]
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        size = _rows_per_block(logits)
        keep = ctx.needs_input_grad[0] and logits.dtype == dtype
        probs = torch.empty_like(logits, memory_format=torch.contiguous_format) if keep else None
        reads_prediction = any(statistic.reads_prediction for statistic in statistics)
        found: list[list[Numbers]] = []
        parts = (_in_dtype(logits, dtype, size), column.split(size), _targets(probs, logits, dtype, size))
        for z, c, target in zip(*parts, strict=True):
            block = ForwardBlock.of(z, c, target, reads_prediction)
            found.append([statistic.chunked(block) for statistic in statistics])
        rows = [_joined(of_blocks) for of_blocks in zip(*found, strict=True)]
        values = [of_valid(own["value"], valid) for own in rows]
        ctx.statistics, ctx.row_names = statistics, [list(own) for own in rows]
        ctx.dtype, ctx.probs = dtype, probs
        ctx.save_for_backward(logits, column, valid, *(tensor for own in rows for tensor in own.values()))
        ctx.set_materialize_grads(False)
        pairs = zip(values, statistics, strict=True)
        ctx.mark_non_differentiable(*(value for value, statistic in pairs if not statistic.differentiable))
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, column, valid, *saved = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            labels = column.squeeze(1).where(valid, IGNORE_INDEX)
            return differentiable_gradient(logits, labels, ctx.statistics, slopes), None, None
        tensors = iter(saved)
        rows = [{name: next(tensors) for name in names} for names in ctx.row_names]
        alpha = torch.zeros(len(logits), dtype=ctx.dtype, device=logits.device)
        used: list[Statistic] = []
        coefficients: list[Numbers] = []
        for statistic, own, slope in zip(ctx.statistics, rows, slopes, strict=True):
            if slope is not None and statistic.differentiable:
                terms = statistic.coefficients(own, of_valid(slope, valid))
                alpha = alpha + terms.pop("alpha")
                used.append(statistic)
                coefficients.append({name: t if t.dim() == 2 else t[:, None] for name, t in terms.items()})
        probs, ctx.probs = ctx.probs, None  # they become the gradient; a second backward starts afresh
        gradient = torch.empty_like(logits) if probs is None else probs
        size = _rows_per_block(logits)
        alphas = alpha[:, None].split(size)
        parts = (
            gradient.split(size),
            _in_dtype(logits, ctx.dtype, size),
            column.split(size),
            _targets(probs, logits, ctx.dtype, size),
            alphas,
            _in_blocks(coefficients, size, len(alphas)),
        )
        for target, z, c, block_probs, block_alpha, terms_of_block in zip(*parts, strict=True):
            if probs is None:
                torch.softmax(z, 1, out=block_probs)
            _backward_block(Block(z, c, block_probs), block_alpha, used, terms_of_block)
            if probs is None:
                target.copy_(block_probs)
        return gradient, None, None


def _backward_block(block: Block, alpha: Tensor, statistics: list[Statistic], terms: list[Numbers]) -> None:
    """Turn the probabilities of the block into its gradient, in place."""
    factor = alpha
    for statistic, own in zip(statistics, terms, strict=True):
        more = statistic.factor(block, own)
        if more is not None:
            factor = more.add_(factor)
    gradient = block.probs.mul_(factor)
    for statistic, own in zip(statistics, terms, strict=True):
        statistic.add_to(gradient, block, own)


def _rows_per_block(logits: Tensor) -> int:
    elements = CPU_BLOCK_ELEMENTS if logits.device.type == "cpu" else DEVICE_BLOCK_ELEMENTS
    return min(len(logits), max(1, elements // logits.shape[1]))


def _in_dtype(logits: Tensor, dtype: torch.dtype, size: int) -> Iterator[Tensor]:
    """The logits block by block; those of another dtype are converted, in a buffer that the next one reuses."""
    if logits.dtype == dtype:
        yield from logits.split(size)
        return
    buffer = torch.empty(size, logits.shape[1], dtype=dtype, device=logits.device)
    for block in logits.split(size):
        yield buffer[: len(block)].copy_(block)


def _targets(probs: Tensor | None, logits: Tensor, dtype: torch.dtype, size: int) -> Iterator[Tensor]:
    """Where the probabilities of each block go: into `probs`, or all into one buffer."""
    if probs is not None:
        yield from probs.split(size)
        return
    buffer = torch.empty(size, logits.shape[1], dtype=dtype, device=logits.device)
    for block in logits.split(size):
        yield buffer[: len(block)]


def _joined(of_blocks: Sequence[Numbers]) -> Numbers:
    return {name: torch.cat([rows[name] for rows in of_blocks]) for name in of_blocks[0]}


def _in_blocks(coefficients: list[Numbers], size: int, n_blocks: int) -> Iterator[list[Numbers]]:
    split = [{name: tensor.split(size) for name, tensor in rows.items()} for rows in coefficients]
    for i in range(n_blocks):
        yield [{name: parts[i] for name, parts in rows.items()} for rows in split]
