"""Sums by slot that neither the order of the rows nor the way they are split changes."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from hf_calib.metrics.checks import FloatArray, IntArray

_BITS = 36
_UNIT = 2.0**-_BITS


def _sums(slots: IntArray | None, values: FloatArray, n_slots: int) -> NDArray[np.int64]:
    """Whole numbers summed by slot: exactly, as long as sums stay below 2**53."""
    if slots is None:
        return np.array([int(values.sum())])
    return np.bincount(slots, values, minlength=n_slots).astype(np.int64)


class ExactSums:
    r"""Sums of numbers in [0, 2^20), kept as integers: whole ones and multiples of $2^{-36}$.

    Integers add up to the same in every order, so that sums over shards, processes and machines are equal to the last
    bit. Each number is rounded to a multiple of $2^{-36}$ first, which float32 values of $2^{-13}$ and above are
    already: a mean is off by $2^{-37}$ (7e-12) at most. At most 2^16 numbers are added at a time, whose sums float64
    holds exactly.

    >>> sums = ExactSums(2)
    >>> sums.add(np.array([0, 1, 0]), np.array([0.25, 7.0, 0.5]))
    >>> sums.values()
    array([0.75, 7.  ])
    """

    fields: ClassVar = ("whole", "units")

    def __init__(self, n_slots: int) -> None:
        self.whole = np.zeros(n_slots, np.int64)
        self.units = np.zeros(n_slots, np.int64)

    def add(self, slots: IntArray | None, values: NDArray[Any]) -> None:
        """Add values (n,) to their slots; without slots all to the only one."""
        whole = np.floor(values, dtype=np.float64)
        self.whole += _sums(slots, whole, len(self.whole))
        self.add_fractions(slots, values - whole)

    def add_fractions(self, slots: IntArray | None, values: NDArray[Any]) -> None:
        """The same for values in [0, 1], in half the time."""
        units = np.multiply(values, 1 / _UNIT, dtype=np.float64)
        self._take(_sums(slots, np.rint(units, out=units), len(self.units)))

    def add_rows(self, values: NDArray[Any]) -> None:
        """Add values (slots, n) in [0, 1], each row to its slot."""
        units = np.multiply(values, 1 / _UNIT, dtype=np.float64)
        self._take(np.rint(units, out=units).sum(axis=1).astype(np.int64))

    def merge(self, other: ExactSums, into: Any = slice(None)) -> None:
        """Add the slots of others to these."""
        self.whole[into] += other.whole
        self._take(other.units, into)

    def merge_all(self, other: ExactSums, n_groups: int) -> None:
        """Add the slots of all groups of another one to those of the only one here."""
        self.whole += other.whole.reshape(n_groups, -1).sum(axis=0)
        self._take(other.units.reshape(n_groups, -1).sum(axis=0))

    def values(self) -> FloatArray:
        """The sums (slots,)."""
        return self.whole + self.units * _UNIT

    def _take(self, units: NDArray[np.int64], into: Any = slice(None)) -> None:
        more = self.units[into] + units
        self.whole[into] += more >> _BITS
        self.units[into] = more & (2**_BITS - 1)


class WeightedSums:
    """The same for numbers times weights, in float64: orders of addition differ by rounding, 1e-16 of a sum."""

    fields: ClassVar = ("sums",)

    def __init__(self, n_slots: int) -> None:
        self.sums = np.zeros(n_slots)

    def add(self, slots: IntArray | None, values: NDArray[Any]) -> None:
        """Add values (n,) to their slots; without slots all to the only one."""
        self.sums += values.sum() if slots is None else np.bincount(slots, values, minlength=len(self.sums))

    add_fractions = add

    def add_rows(self, values: NDArray[Any]) -> None:
        """Add values (slots, n), each row to its slot."""
        self.sums += values.sum(axis=1)

    def merge(self, other: WeightedSums, into: Any = slice(None)) -> None:
        """Add the slots of others to these."""
        self.sums[into] += other.sums

    def merge_all(self, other: WeightedSums, n_groups: int) -> None:
        """Add the slots of all groups of another one to those of the only one here."""
        self.sums += other.sums.reshape(n_groups, -1).sum(axis=0)

    def values(self) -> FloatArray:
        """The sums (slots,)."""
        return self.sums
