"""How the values of a column become slices: each its own, or ranges of numbers that hold equal shares of the rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from hf_calib.predictions.samples import MOST_SAMPLED, keep_smallest
from hf_calib.predictions.shards import Shards
from hf_calib.predictions.table_columns import codes_of, name_of_value

_MOST_NUMBERS = 20  # different ones, which are slices of their own
_RANGES = 5


@dataclass(frozen=True)
class Slicing:
    """How one column is sliced.

    Args:
        column: its name.
        edges: of the ranges, without the ends; None where each value is a slice of its own.
    """

    column: str
    edges: tuple[float, ...] | None = None

    def names(self, values: Sequence[Any]) -> list[str]:
        """The slice of each value.

        >>> Slicing("length", (12.0, 40.0)).names([3, 12, 41])
        ['length up to 12', 'length up to 12', 'length above 40']
        """
        if self.edges is None:
            return [name_of_value(value) for value in values]
        numbers = [_number(value) for value in values]
        titles = self._titles(self.edges)
        return [
            name_of_value(None) if math.isnan(number) else titles[int(np.searchsorted(self.edges, number))]
            for number in numbers
        ]

    def _titles(self, edges: Sequence[float]) -> list[str]:
        between = [f"{self.column} {low:g} to {high:g}" for low, high in pairwise(edges)]
        return [f"{self.column} up to {edges[0]:g}", *between, f"{self.column} above {edges[-1]:g}"]


def choose_slicings(shards: Shards) -> tuple[Slicing, ...]:
    """Numbers of more than 20 different values are cut into fifths, from a sample of the rows; all else is as it is.

    A column is read once for that, alone.
    """
    constants = dict(shards.files[0].constants)
    return tuple(
        Slicing(name) if name in constants else Slicing(name, _edges_of(shards, name)) for name in shards.by
    )


def _edges_of(shards: Shards, column: str) -> tuple[float, ...] | None:
    numbers: set[float] = set()
    sample, hashes = np.empty(0), np.empty(0, np.uint64)
    for file, piece in shards.pieces:
        for first, batch in shards.tables(file, piece, [column], (column,)):
            codes, values = codes_of(batch.column(0))
            found = np.array([_number(value) for value in values])
            known = np.array([value not in (None, "") for value in values], dtype=bool)
            if not np.isfinite(found[known]).all():
                return None  # texts
            if len(numbers) <= _MOST_NUMBERS:
                numbers |= set(found[np.isfinite(found)].tolist())
            sample = np.concatenate([sample, found[codes]])
            hashes = np.concatenate([hashes, shards.row_hashes(file, first, len(codes))])
            sample, hashes = keep_smallest(sample, hashes, MOST_SAMPLED)
    if len(numbers) <= _MOST_NUMBERS:
        return None
    inner = np.arange(1, _RANGES) / _RANGES
    return tuple(np.unique(np.quantile(sample[np.isfinite(sample)], inner, method="inverted_cdf")).tolist())


def _number(value: Any) -> float:
    """A value as a number; NaN where it is none. True and False are no numbers."""
    if isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan
