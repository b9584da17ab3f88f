"""Weights of the cross entropy: w(p, y; gamma), one value per example.

The focal weights are all one function of a margin m between the label and what it competes with:
(1 - m)^gamma holds a confident example back, and (1 + m)^|gamma|, for a negative gamma, pushes it further.
The margin is p_y for the focal losses and p_y - q for the dual ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_calib.losses.statistics.direct import NOTHING, Statistics, Wanted, tiny

Gamma = float | Tensor


@dataclass(frozen=True)
class Weight:
    """A weight and the statistics it reads."""

    value: Callable[[Statistics, Gamma], Tensor]
    wanted: Wanted = NOTHING


def power(base: Tensor, exponent: Gamma) -> Tensor:
    """base ** exponent for base >= 0, with gradient 0 instead of NaN where base is 0 and exponent below 1."""
    if isinstance(exponent, float) and exponent >= 1:
        return base if exponent == 1 else base.pow(exponent)
    return base.clamp_min(tiny(base)).pow(exponent)


def _modulate(one_minus_margin: Tensor, gamma: Gamma) -> Tensor:
    if isinstance(gamma, Tensor):
        return power(torch.where(gamma >= 0, one_minus_margin, 2 - one_minus_margin), gamma.abs())
    return power(one_minus_margin if gamma >= 0 else 2 - one_minus_margin, abs(gamma))


def _focal(stats: Statistics, gamma: Gamma) -> Tensor:
    return _modulate(stats.one_minus_p, gamma)


def _dual_focal(stats: Statistics, gamma: Gamma) -> Tensor:
    assert stats.rival is not None
    return _modulate(stats.one_minus_p + stats.rival, gamma)


focal = Weight(_focal)


def dual_focal(rival: str) -> Weight:
    """(1 - p_y + q)^gamma, q the probability of the rival(s) ranked below the label."""
    return Weight(_dual_focal, Wanted(rival=rival))


def brier_norm(norm: float) -> Weight:
    """||p - e_y||_norm ** gamma, the generalised Brier score."""

    def value(stats: Statistics, gamma: Gamma) -> Tensor:
        assert stats.others is not None
        return power(stats.others + power(stats.one_minus_p, norm), gamma / norm)

    return Weight(value, Wanted(power=norm))
