"""The arithmetic of formulas: operators, and these functions of the numbers of rows.

The formula of a row's loss uses nothing else, so that its source means the same with any library
that has functions of these names; here they are PyTorch's. CE is the cross entropy of the label, p
its probability, log_p = -CE.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

# A cross entropy from here on is that of a label which is masked, by -inf or by the least number of
# its dtype.
IMPOSSIBLE = 1e30

# (N,) float32 or float64, or one float for all rows.
Numbers = Any
# The value of each row, and its derivative by each number that the formula is given.
Terms = tuple[Numbers, ...]


class Table(NamedTuple):
    """Numbers of bins: the M - 1 edges between the bins, the M values, and the least of these."""

    edges: Tensor
    values: Tensor
    least: float


def exp(x: Tensor) -> Tensor:
    return torch.exp(x)


def expm1(x: Tensor) -> Tensor:
    """exp(x) - 1, which is accurate near x = 0."""
    return torch.expm1(x)


def where(condition: Tensor, x: Numbers, y: Numbers) -> Tensor:
    return torch.where(condition, x, y)


def at_most(x: Tensor, limit: float) -> Tensor:
    return x.clamp_max(limit)


def number_or_zero(x: Tensor) -> Tensor:
    """x, or 0 where it is NaN."""
    return x.nan_to_num(0.0)


def constant(x: Tensor) -> Tensor:
    """x, without a derivative."""
    return x.detach()


def power_of(base: Tensor, exponent: Numbers) -> Tensor:
    """base ** exponent for base >= 0, whose derivative is finite where base is 0."""
    if isinstance(exponent, Tensor) or exponent < 1:
        base = base.clamp_min(tiny(base))
    return base.pow(exponent)


def two_powers(base: Tensor, exponent: Numbers) -> tuple[Tensor, Tensor]:
    """base ** exponent as `power_of`, and base ** (exponent - 1), which is finite and is not
    differentiated."""
    if isinstance(exponent, Tensor) or exponent < 1:
        base = base.clamp_min(tiny(base))
        power = base.pow(exponent)
        return power, power / base
    return base.pow(exponent), base.pow(exponent - 1)


def plus_product(x: Tensor, factor: Numbers, y: Tensor, z: Tensor) -> Tensor:
    """x + factor * y * z."""
    if isinstance(factor, Tensor):
        return torch.addcmul(x, factor * y, z)
    return torch.addcmul(x, y, z, value=factor)


def possible(log_p: Tensor) -> Tensor:
    """log_p, or 0 where the label is impossible, because 0 times infinity is NaN."""
    return torch.threshold(log_p, -IMPOSSIBLE, 0.0)


def weighted(ce: Tensor, weight: Tensor) -> Tensor:
    """weight * CE. Where the label is impossible, the weight has no derivative: the gradient is
    cross entropy's."""
    if weight.requires_grad:
        weight = torch.where(ce < IMPOSSIBLE, weight, weight.detach())
    return weight * ce


def look_up(table: Table, position: Tensor) -> Tensor:
    """The value of the bin [low, high) that contains each position."""
    return table.values[torch.bucketize(position, table.edges, right=True)]


def tiny(tensor: Tensor) -> float:
    """The smallest normal number of a dtype."""
    return torch.finfo(tensor.dtype).tiny


def wide(logits: Tensor) -> torch.dtype:
    """The dtype of the computation."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32
