"""Losses whose formula looks a number up in the bins of a table."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

from torch import Tensor

from hf_calib.losses.arithmetic import Table
from hf_calib.losses.engine import is_traced
from hf_calib.losses.loss import CalibrationLoss


class TableLoss(CalibrationLoss):
    """A loss with a table on the CPU in float64, of which its formula gets a copy like the logits."""

    _copy: tuple[Any, Table] | None = None

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
        # The table is copied once after each change, because a copy to a device costs more than the formula.
        state = [ce.device, ce.dtype]
        for source in self._sources():
            state += [id(source), source._version]
        if self._copy is None or self._copy[0] != state:
            edges, values = self._bins()
            least = float(values.min())
            self._copy = state, Table(edges.to(ce), values.to(ce), least)
        return {"table": self._copy[1], **self._values}

    def __getstate__(self) -> dict[str, Any]:
        # A copy on a device could not be loaded without it, and other tensors may get the same id.
        return {**self.__dict__, "_copy": None}
