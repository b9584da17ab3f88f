"""Rows of all processes, with the gradient of a penalty that is computed on all of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_gather_rows(rows: list[Tensor]) -> tuple[list[Tensor], int]:
    """Concatenate (N,) vectors and (N, C) matrices over the processes; and the number of these.

    N may differ between processes: shorter rows are filled up with zeros. Every process then computes the same value
    from them. Its gradient reaches each process's own slice summed over the processes, which is the full gradient once
    DDP has averaged it.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return rows, 1
    length = torch.tensor(len(rows[0]), device=rows[0].device)
    dist.all_reduce(length, dist.ReduceOp.MAX)
    missing = int(length) - len(rows[0])
    columns = [each if each.dim() == 2 else each[:, None] for each in rows]
    gathered = _AllGather.apply(torch.nn.functional.pad(torch.cat(columns, dim=1), (0, 0, 0, missing)))
    parts = gathered.split([each.shape[1] for each in columns], dim=1)
    shaped = [part if own.dim() == 2 else part.squeeze(1) for part, own in zip(parts, rows, strict=True)]
    return shaped, dist.get_world_size()


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
