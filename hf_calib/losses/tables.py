"""Losses whose formula looks a number up in the bins of a table."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_calib.losses.arithmetic import Table
from hf_calib.losses.engine import is_traced
from hf_calib.losses.loss import CalibrationLoss


class _Copy(NamedTuple):
    """A table on a device, and the tensors that it was made from, whose ids no others have while
    they live."""

    table: Table
    sources: tuple[Tensor, ...]
    versions: list[int]
    device: torch.device
    dtype: torch.dtype

    def is_of(self, sources: tuple[Tensor, ...], ce: Tensor) -> bool:
        """Whether these are the tensors, unchanged, and the table goes with the cross entropy."""
        pairs = zip(self.sources, sources, strict=True)
        are_same = all(own is other for own, other in pairs)
        versions = [source._version for source in sources]
        goes_with = self.device == ce.device and self.dtype == ce.dtype
        return are_same and goes_with and self.versions == versions


class TableLoss(CalibrationLoss):
    """A loss with a table on the CPU in float64, of which its formula gets a copy like the
    logits."""

    _copy: _Copy | None = None

    @abstractmethod
    def _bins(self) -> tuple[Tensor, Tensor]:
        """The edges between the bins and the values of the bins, (M - 1,) and (M,)."""

    @abstractmethod
    def _sources(self) -> tuple[Tensor, ...]:
        """The tensors from which `_bins` makes the table."""

    def arguments(self, ce: Tensor) -> dict[str, Any]:
        if is_traced():
            edges, values = self._bins()
            # The least value would have to be read from a tensor.
            table = Table(edges.to(ce), values.to(ce), -math.inf)
            return {"table": table, **self._values}
        # The table is copied once after each change, because a copy to a device costs more than the
        # formula.
        if self._copy is None or not self._copy.is_of(self._sources(), ce):
            edges, values = self._bins()
            table = Table(edges.to(ce), values.to(ce), float(values.min()))
            sources = self._sources()
            versions = [source._version for source in sources]
            self._copy = _Copy(table, sources, versions, ce.device, ce.dtype)
        return {"table": self._copy.table, **self._values}

    def __getstate__(self) -> dict[str, Any]:
        # A copy on a device could not be loaded without it.
        return {**self.__dict__, "_copy": None}
