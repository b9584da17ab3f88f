"""Statistics of a large matrix, in blocks of rows, with no memory beyond that of the gradient.

PyTorch's softmax kernels are used, because they are fused and cost less than an exponential alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat

import torch
from torch import Tensor

from hf_calib.losses.statistics.definitions import (
    IGNORE_INDEX,
    Block,
    Numbers,
    Statistic,
    Terms,
    wide,
)

# A block of this many elements stays in a core's cache; on an accelerator it only limits the scratch memory.
CPU_BLOCK_ELEMENTS = 2**18
DEVICE_BLOCK_ELEMENTS = 2**24


class _Block(Block):
    """A block without autograd, with probabilities, the largest logits and their log-probabilities given."""

    z_max: Tensor
    log_p_max: Tensor

    def __init__(self, z: Tensor, column: Tensor, probs: Tensor) -> None:
        self.z = z
        self.column = column
        self._probs = probs

    @property
    def probs(self) -> Tensor:
        return self._probs

    @property
    def log_probs(self) -> Tensor:  # type: ignore[override]
        return (self.z - self.z_max).add_(self.log_p_max)

    def log_p(self, index: Tensor) -> Tensor:
        return self.z.gather(1, index) - self.z_max + self.log_p_max

    def other_powers(self, power: float) -> Tensor:
        at_label = self.probs.gather(1, self.column)
        self.probs.scatter_(1, self.column, 0)
        norm = torch.linalg.vector_norm(self.probs, power, dim=1)
        self.probs.scatter_(1, self.column, at_label)
        return norm.pow(power)

    def mean_log(self, weights: Tensor, total: Tensor | float, least: float) -> Tensor:
        log_ratio = (self.z - self.z_max).clamp_min_(least)
        return torch.linalg.vecdot(weights, log_ratio) / total + self.log_p_max.squeeze(
            1
        )

    def finite(self) -> Tensor:
        return torch.gt(
            self.z, -torch.inf, out=torch.empty_like(self.z)
        )  # Booleans would be slow.


def numbers(
    logits: Tensor, labels: Tensor, statistics: Sequence[Statistic], has_gradient: bool
) -> tuple[Numbers, list[Numbers], Tensor | None]:
    """The numbers of every row, those of each statistic, and the probabilities, which the gradient reuses."""
    keeps = has_gradient and logits.dtype == wide(
        logits
    )  # 16 bits would be too coarse.
    probs = (
        torch.empty_like(logits, memory_format=torch.contiguous_format)
        if keeps
        else None
    )
    found: list[list[Numbers]] = []
    for block in _blocks(logits, labels, probs):
        torch.softmax(block.z, 1, out=block.probs)
        block.z_max = block.z.amax(1, keepdim=True)
        block.log_p_max = block.probs.amax(1, keepdim=True).log_()
        of_rows = {"z_max": block.z_max, "log_p_max": block.log_p_max}
        found.append([of_rows, *(statistic.numbers(block) for statistic in statistics)])
    of_rows, *own = (
        {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        for parts in zip(*found, strict=True)
    )
    return of_rows, own, probs


def gradient(
    logits: Tensor, labels: Tensor, of_rows: Numbers, terms: Terms, probs: Tensor | None
) -> Tensor:
    """The gradient (N, C) for these coefficients, (N, k) each, which overwrites the probabilities."""
    whole = torch.empty_like(logits) if probs is None else probs
    size = _rows_per_block(logits)
    alphas = of_rows["alpha"].split(size)
    targets = whole.split(size)
    split = [
        (statistic, {name: t.split(size) for name, t in own.items()})
        for statistic, own in terms
    ]
    for i, block in enumerate(_blocks(logits, labels, probs)):
        if probs is None:
            torch.softmax(block.z, 1, out=block.probs)
        parts = [
            (statistic, {name: t[i] for name, t in own.items()})
            for statistic, own in split
        ]
        factor = alphas[i]
        for statistic, own in parts:
            more = statistic.factor(block, own)
            factor = factor if more is None else more.add_(factor)
        block.probs.mul_(factor)
        for statistic, own in parts:
            statistic.add_to(block.probs, block, own)
        if probs is None:
            targets[i].copy_(block.probs)
    return whole


def _blocks(logits: Tensor, labels: Tensor, probs: Tensor | None) -> Iterator[_Block]:
    """Blocks of rows, whose `probs` are a part of the probabilities, or a buffer that all blocks share."""
    size = _rows_per_block(logits)
    shape = (2, size, logits.shape[1]) if probs is None else (0,)
    buffers = torch.empty(shape, dtype=wide(logits), device=logits.device)
    column = labels.where(labels != IGNORE_INDEX, 0)[:, None]
    targets = repeat(buffers[1]) if probs is None else probs.split(size)
    for z, own_column, target in zip(
        logits.split(size), column.split(size), targets, strict=False
    ):
        z = z if z.dtype == buffers.dtype else buffers[0, : len(z)].copy_(z)
        yield _Block(z, own_column, target[: len(z)])


def _rows_per_block(logits: Tensor) -> int:
    elements = (
        CPU_BLOCK_ELEMENTS if logits.device.type == "cpu" else DEVICE_BLOCK_ELEMENTS
    )
    return max(1, elements // logits.shape[1])
