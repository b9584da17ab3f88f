"""Weights of the cross entropy: w(p, y; gamma), one value per example.

The focal weights are all one function of a margin m between the label and what it competes with:
(1 - m)^gamma holds a confident example back, and (1 + m)^|gamma|, for a negative gamma, pushes it further.
The margin is p_y for the focal losses and p_y - q for the dual ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_calib.losses.gammas import Gamma
from hf_calib.losses.statistics.definitions import OtherPowers, Rival, RivalRank, Statistic, tiny
from hf_calib.losses.statistics.dispatch import RowStatistics


class Weight:
    """A weight, and the statistics that it reads beside the cross entropy."""

    @property
    def reads(self) -> tuple[Statistic, ...]:
        return ()

    def margin(self, stats: RowStatistics) -> Tensor:
        """What a gamma that depends on the example goes by, (N,), without a gradient."""
        return stats.p

    def value(self, stats: RowStatistics, gamma: Gamma) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class FocalWeight(Weight):
    """(1 - p_y)^gamma."""

    def value(self, stats: RowStatistics, gamma: Gamma) -> Tensor:
        return _modulate(stats.one_minus_p, gamma)


@dataclass(frozen=True)
class DualFocalWeight(Weight):
    """(1 - p_y + q)^gamma, q the probability of the rival(s) ranked below the label, or a constant."""

    rival: RivalRank | float

    @property
    def reads(self) -> tuple[Statistic, ...]:
        return (Rival(self.rival),) if isinstance(self.rival, str) else ()

    def margin(self, stats: RowStatistics) -> Tensor:
        """The label's lead p_y - q over its rival, which is negative for a constant above p_y."""
        q = self._rival_of(stats)
        return stats.p - (q.detach() if isinstance(q, Tensor) else q)

    def value(self, stats: RowStatistics, gamma: Gamma) -> Tensor:
        return _modulate(stats.one_minus_p + self._rival_of(stats), gamma)

    def _rival_of(self, stats: RowStatistics) -> Tensor | float:
        return stats[Rival(self.rival)] if isinstance(self.rival, str) else self.rival


@dataclass(frozen=True)
class BrierNormWeight(Weight):
    """||p - e_y||_norm ** gamma, the generalised Brier score."""

    norm: float

    @property
    def reads(self) -> tuple[Statistic, ...]:
        return (OtherPowers(self.norm),)

    def value(self, stats: RowStatistics, gamma: Gamma) -> Tensor:
        return power(stats[OtherPowers(self.norm)] + power(stats.one_minus_p, self.norm), gamma / self.norm)


@dataclass(frozen=True)
class ProbabilityWeight(Weight):
    """p_y."""

    def value(self, stats: RowStatistics, gamma: Gamma) -> Tensor:
        return stats.p


@dataclass(frozen=True)
class HeldOutGapWeight(Weight):
    """The value of `ece_ce`'s table for each example, used as its weight."""

    def value(self, stats: RowStatistics, gamma: Gamma) -> Tensor:
        return torch.as_tensor(gamma)


def power(base: Tensor, exponent: Gamma) -> Tensor:
    """base ** exponent for base >= 0, with gradient 0 instead of NaN where base is 0 and exponent below 1."""
    if isinstance(exponent, float) and exponent >= 1:
        return base if exponent == 1 else base.pow(exponent)
    return base.clamp_min(tiny(base)).pow(exponent)


def _modulate(one_minus_margin: Tensor, gamma: Gamma) -> Tensor:
    if isinstance(gamma, Tensor):
        return power(torch.where(gamma >= 0, one_minus_margin, 2 - one_minus_margin), gamma.abs())
    return power(one_minus_margin if gamma >= 0 else 2 - one_minus_margin, abs(gamma))
