"""The learning-rate schedule of the image papers: divided at given epochs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def milestone_schedule(
    optimizer: Optimizer,
    milestones: Sequence[float],
    *,
    decay: float,
    steps_per_epoch: float,
    n_warmup_steps: int = 0,
) -> LambdaLR:
    """Multiply the learning rate by `decay` at each milestone; before that, let it rise from 0 while warming up.

    Args:
        optimizer: stepped once where the schedule is.
        milestones: epochs, rising; from the first step of such an epoch on, the rate is the smaller one.
        decay: in (0, 1).
        steps_per_epoch: optimizer steps.
        n_warmup_steps: optimizer steps.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    >>> schedule = milestone_schedule(optimizer, [1, 2], decay=0.1, steps_per_epoch=2)
    >>> rates = []
    >>> for _ in range(5):
    ...     rates.append(round(schedule.get_last_lr()[0], 4))
    ...     optimizer.step()
    ...     schedule.step()
    >>> rates
    [0.1, 0.1, 0.01, 0.01, 0.001]
    """
    steps = [round(epoch * steps_per_epoch) for epoch in milestones]

    def factor(step: int) -> float:
        warm = min(1.0, step / n_warmup_steps) if n_warmup_steps else 1.0
        return warm * decay ** bisect_right(steps, step)

    return LambdaLR(optimizer, factor)
