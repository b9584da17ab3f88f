"""Vectors of all processes, with the gradient of a penalty that is computed on all of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_gather_rows(vectors: list[Tensor]) -> tuple[list[Tensor], int]:
    """Concatenate (N,) vectors over the processes; shorter ones are filled up with zeros.

    Every process then computes the same value from them. Its gradient reaches each process's own slice
    summed over the processes, which is the full gradient once DDP has averaged it.

    Args:
        vectors: of one length, which may differ between processes.

    Returns:
        The vectors, each (processes * longest N,), and the number of processes.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return vectors, 1
    length = torch.tensor(len(vectors[0]), device=vectors[0].device)
    dist.all_reduce(length, dist.ReduceOp.MAX)
    missing = int(length) - len(vectors[0])
    stacked = torch.stack(vectors, dim=1)
    gathered = _AllGather.apply(torch.nn.functional.pad(stacked, (0, 0, 0, missing)))
    return list(gathered.unbind(1)), dist.get_world_size()


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone(memory_format=torch.contiguous_format)  # not ours to change
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]
