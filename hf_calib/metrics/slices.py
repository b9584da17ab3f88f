"""Sums of the groups of rows that a column names: a slice is a country, a source, a version of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_calib._errors import InputValueError, expected
from hf_calib.metrics._row_scores import RowScores
from hf_calib.metrics._top_label_sums import ConfidenceBins, GroupSums, ProperScores
from hf_calib.metrics.checks import IntArray

MOST_SLICES = 1_000


class SliceSums:
    """The sums of each group of rows, in O(G M) numbers; they merge as a `CalibrationState` does.

    Args:
        column: what names the groups, for errors.
        n_bins: M.
        weighted: whether rows have weights.
    """

    def __init__(self, column: str, n_bins: int, *, weighted: bool) -> None:
        self.column, self.n_bins, self.weighted = column, n_bins, weighted
        self.names: list[str] = []
        self._bins = ConfidenceBins(n_bins, weighted=weighted, n_groups=0)
        self._scores = ProperScores(weighted=weighted, n_groups=0)
        self._numbers: dict[str, int] = {}

    def add(self, scores: RowScores, codes: IntArray, names: Sequence[str]) -> None:
        """Add a chunk of n rows, whose groups are names[codes].

        Raises:
            ValueError: if there are more than 1,000 groups.
        """
        groups = self._groups(names)[codes]
        self._bins.add(scores, groups)
        self._scores.add(scores, groups)

    def merge(self, other: SliceSums) -> None:
        """Add the rows of others."""
        groups = self._groups(other.names)
        self._bins.merge(other._bins, groups)
        self._scores.merge(other._scores, groups)

    def sums(self) -> GroupSums:
        """The sums of each group, in the order of `names`."""
        return GroupSums(self._bins, self._scores)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Everything but the names, by name."""
        return self._bins.arrays() | self._scores.arrays()

    def restore(self, names: Sequence[str], arrays: dict[str, NDArray[Any]]) -> None:
        """Take what `names` and `arrays` of another one were."""
        self._groups(names)
        for name, array in self.arrays().items():
            array[...] = arrays[name]

    def _groups(self, names: Sequence[str]) -> IntArray:
        """The numbers of groups by their names; new ones are made."""
        for name in names:
            self._numbers.setdefault(name, len(self._numbers))
        if len(self._numbers) > len(self.names):
            self.names = list(self._numbers)
            if len(self.names) > MOST_SLICES:
                requirement = f"have at most {MOST_SLICES:,} different values"
                got, way_out = f"more ({names[0]!r}, ...)", "group them in a column of their own"
                raise InputValueError(expected(f"column {self.column!r}", requirement, got, way_out))
            bins = ConfidenceBins(self.n_bins, weighted=self.weighted, n_groups=len(self.names))
            scores = ProperScores(weighted=self.weighted, n_groups=len(self.names))
            bins.merge(self._bins)
            scores.merge(self._scores)
            self._bins, self._scores = bins, scores
        return np.array([self._numbers[name] for name in names], dtype=np.intp)
