"""Confidences counted on a fine grid: what needs them in order, from counts that merge exactly, with error bounds.

A cell is a range of 1 - p within a factor of 1 + 2^-12: confidences bunch near 1, where such cells are narrow. Counts
of cells are a quantile sketch without chance: its rank error is the share of the rows in the one cell that a quantile
falls into, which the counts themselves tell.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import digamma

from hf_calib.metrics.checks import FloatArray, IntArray
from hf_calib.metrics.sums import BinSums

_MANTISSA_BITS = 12  # of float64's 52
_OCTAVES = 24  # halvings of 1 - p, down to the resolution of float32 near 1
_SHIFT = 52 - _MANTISSA_BITS
_ONE = 1023 << _MANTISSA_BITS  # the leading bits of 1.0
N_CELLS = (_OCTAVES << _MANTISSA_BITS) + 1  # the last one is of 1 - p < 2^-24


class Bounded(NamedTuple):
    """A value from the grid, and how far from that of the rows it is at most."""

    value: float
    error: float


def cells_of(confidences: FloatArray) -> IntArray:
    """The cell, 0 to `N_CELLS` - 1, of each confidence (n,), float64; they go up with the confidence.

    >>> cells_of(np.array([0.0, 0.5, 0.75, 1.0])).tolist()
    [0, 4095, 8191, 98304]
    """
    rest = np.maximum(1.0 - confidences, 2.0 ** -(_OCTAVES + 1))
    leading = rest.view(np.int64) >> _SHIFT
    return np.clip(_ONE - 1 - leading, 0, N_CELLS - 1)


def _ends() -> tuple[FloatArray, FloatArray]:
    """The lowest and the highest confidence of each cell."""
    leading = _ONE - 1 - np.arange(N_CELLS)
    highest = 1 - (leading << _SHIFT).view(np.float64)
    lowest = 1 - ((leading + 1) << _SHIFT).view(np.float64)
    highest[-1] = 1.0
    return np.clip(lowest, 0.0, 1.0), np.clip(highest, 0.0, 1.0)


class ConfidenceGrid:
    """Right and wrong predictions of each cell.

    Args:
        right: (`N_CELLS`,) how many there are, or their weight.
        wrong: the same.
        weighted: whether these are weights.
    """

    def __init__(self, right: NDArray[Any], wrong: NDArray[Any], *, weighted: bool = False) -> None:
        self.weighted = weighted
        self.right, self.wrong = right.astype(np.float64), wrong.astype(np.float64)
        self.counts = self.right + self.wrong
        self.total = float(self.counts.sum())
        self.lowest, self.highest = _ends()
        self.middle = (self.lowest + self.highest) / 2

    def quantile(self, level: float) -> Bounded:
        """The confidence below which this share of the rows lies."""
        cell = int(np.searchsorted(np.cumsum(self.counts), level * self.total))
        cell = min(cell, N_CELLS - 1)
        return Bounded(float(self.middle[cell]), float(self.highest[cell] - self.lowest[cell]) / 2)

    def equal_mass_bins(self, n_bins: int) -> tuple[BinSums, float]:
        """The sums of bins that hold equal shares of the rows, cut between cells; and the error of their ECE.

        The error is bounded by what the rows of a cut cell can add to both of its bins, whichever of them belong
        where, and by the width of the cells.
        """
        below = np.concatenate([[0.0], np.cumsum(self.counts)])
        ranks = np.arange(1, n_bins) * self.total / n_bins
        if (
            not self.weighted
        ):  # so many rows are not above the papers' edge, and those that tie with the last of them
            ranks = np.floor(ranks) + 1
        cut = np.searchsorted(below[1:], np.minimum(ranks, self.total))
        cut = np.minimum(cut, N_CELLS - 1)
        above = below[cut + 1] - ranks < ranks - below[cut]
        starts = np.concatenate([[0], cut + above])
        slots = np.searchsorted(starts, np.arange(N_CELLS), side="right") - 1

        def total(weights: FloatArray) -> FloatArray:
            return np.bincount(slots, weights, minlength=n_bins).astype(np.float64, copy=False)

        sums = BinSums(total(self.counts), total(self.counts * self.middle), total(self.right))
        most = np.maximum(self.right * (1 - self.lowest), self.wrong * self.highest)
        first = int(np.flatnonzero(self.counts)[0])  # whose smallest confidence the papers leave out
        width = float(self.counts @ (self.highest - self.lowest)) / 2
        return sums, float(2 * most[cut].sum() + most[first] + width) / self.total

    def area_under_risk_coverage(self) -> Bounded:
        """The AURC, with the errors of a cell evenly spread over its rows; of rows without weights."""
        counts, wrong = self.counts[::-1], self.wrong[::-1]
        used = counts > 0
        counts, wrong = counts[used], wrong[used]
        rows, errors = np.cumsum(counts) - counts, np.cumsum(wrong) - wrong
        rate = wrong / counts
        area = wrong + (errors - rate * rows) * (digamma(rows + counts + 1) - digamma(rows + 1))
        # Whatever their order, at most this many errors of a cell come earlier or later than so.
        moved = np.minimum(wrong, counts - wrong)
        early = moved / np.maximum(rows + moved, 1)
        error = moved * early + moved * np.log((rows + counts) / np.maximum(rows + moved, 1))
        return Bounded(float(area.sum() / self.total), float(error.sum() / self.total))

    def risk_coverage(self, n_points: int = 1_000) -> tuple[FloatArray, FloatArray]:
        """Points of the curve: the share of rows that is kept, and the error rate among these."""
        counts, wrong = self.counts[::-1], self.wrong[::-1]
        kept = np.cumsum(counts)
        ends = np.flatnonzero(counts)
        shown = ends[np.unique(np.linspace(0, len(ends) - 1, min(n_points, len(ends))).astype(int))]
        return kept[shown] / self.total, np.cumsum(wrong)[shown] / kept[shown]
