"""Metrics as functions of how often each row occurs: the form in which a bootstrap asks for them.

A resample with replacement is told by its counts, how often it drew each of the N rows. From them the bin
sums follow in O(N), without a copy of the rows and without sorting again. What comes out is the metric of
the drawn rows, in the order of the data: no approximation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hf_calib.metrics.checks import FloatArray, IntArray
from hf_calib.metrics.sums import Binning, BinSums, Norm, binned_error, uniform_bins, uniform_edges


class Resampled(Protocol):
    """A metric of N fixed rows."""

    def evaluate(self, counts: IntArray) -> FloatArray:
        """The metric (R,) of R samples that hold each of N rows counts (R, N) times; their sizes may differ from N."""


class Mean:
    """The mean of a value (N,) per example, or its square root."""

    def __init__(self, values: FloatArray, *, root: bool = False) -> None:
        self._values = values
        self._finish: Callable[[FloatArray], FloatArray] = np.sqrt if root else np.asarray

    def evaluate(self, counts: IntArray) -> FloatArray:
        return self._finish(counts.astype(np.float64) @ self._values / counts.sum(axis=1))


class TopLabel:
    """The binned calibration errors of confidences (N,) and correctness (N,).

    Rows are sorted once; every kind of bin is then a run of rows, and in equal-mass bins a row that was
    drawn several times may lie on both sides of a cut. Equal confidences keep the order of the data.
    """

    def __init__(
        self,
        confidences: FloatArray,
        correct: FloatArray,
        *,
        n_bins: int = 15,
        binning: Binning = "uniform",
        norm: Norm = "l1",
        debias: bool = False,
    ) -> None:
        self._n_bins, self._binning, self._norm, self._debias = n_bins, binning, norm, debias
        order = np.argsort(confidences, kind="stable")
        self._confidences = confidences[order]
        self._fixed = np.searchsorted(uniform_bins(self._confidences, n_bins), np.arange(n_bins + 1))
        # Count, confidence and correctness (3, N + 1); the last row of zeros ends the last bin.
        columns = np.stack([np.ones_like(confidences), self._confidences, correct[order]])
        self._columns = np.pad(columns, ((0, 0), (0, 1)))
        self._order = order

    def evaluate(self, counts: IntArray) -> FloatArray:
        return np.array([self._error(self._bin_sums(row[self._order]), int(row.sum())) for row in counts])

    def _error(self, sums: BinSums, n_examples: int) -> float:
        return float(binned_error(sums, n_examples, norm=self._norm, debias=self._debias))

    def _bin_sums(self, counts: IntArray) -> BinSums:
        cuts, copies = self._cuts(counts)
        weights = np.append(counts, 0).astype(np.float64)
        # reduceat gives an empty run its first row.
        empty = np.append(cuts[:-1] == cuts[1:], True)
        runs = np.where(empty, 0, np.add.reduceat(weights * self._columns, cuts, axis=1))
        return BinSums(*(runs[:, :-1] + np.diff(copies * self._columns[:, cuts], axis=1)))

    def _cuts(self, counts: IntArray) -> tuple[IntArray, IntArray]:
        """Where each bin starts and the last one ends: before which row, after how many copies of it."""
        none = np.zeros(self._n_bins + 1, dtype=np.intp)
        if self._binning == "uniform":
            return self._fixed, none
        up_to = counts.cumsum()
        n_examples = int(up_to[-1])
        if self._binning == "quantile":
            edges = _quantile_edges(
                lambda ranks: self._confidences[np.searchsorted(up_to, ranks, side="right")],
                n_examples,
                self._n_bins,
            )
            return self._cuts_at(edges), none
        positions = _equal_mass_positions(n_examples, self._n_bins)
        cuts = np.searchsorted(up_to, positions, side="right")
        return cuts, positions - np.append(0, up_to)[cuts]

    def _cuts_at(self, edges: FloatArray) -> IntArray:
        """The cuts at edges (..., M + 1); all rows are one bin where all confidences are equal."""
        cuts = np.searchsorted(self._confidences, edges, side="right")
        one_bin = np.append(0, np.full(self._n_bins, len(self._confidences)))
        return np.where(edges[..., :1] == edges[..., -1:], one_bin, cuts)


class Classwise:
    """The classwise calibration error of probs (N, C) and labels, (N,) or soft (N, C).

    A row has at most M probabilities above the first edge, so all other bins are sparse; the first bin is
    what they leave of the class's total, which is one matrix product for a block of resamples.
    """

    def __init__(self, probs: NDArray[Any], labels: NDArray[Any], *, n_bins: int = 15) -> None:
        self._probs, self._n_bins = probs, n_bins
        self._gaps = probs.astype(np.float64)
        if labels.ndim == 1:
            self._gaps[np.arange(len(probs)), labels] -= 1
        else:
            self._gaps -= labels
        rows, classes = np.nonzero(probs > uniform_edges(n_bins)[1])
        bins = uniform_bins(probs[rows, classes], n_bins)
        slots = classes * n_bins + bins
        order = np.argsort(slots, kind="stable")
        order = order[bins[order] > 0]  # with one bin, a rounded-up 1 is above its edge but in no other
        self._rows, self._entries = rows[order], self._gaps[rows, classes][order]
        occupied, self._starts = np.unique(slots[order], return_index=True)
        self._owners = occupied // n_bins

    def evaluate(self, counts: IntArray) -> FloatArray:
        weights = counts.astype(np.float64)
        totals = weights @ self._gaps
        return np.array([self._error(*pair) for pair in zip(weights, totals, strict=True)])

    def _error(self, weights: FloatArray, totals: FloatArray) -> float:
        upper = np.empty(0)
        if len(self._starts):
            upper = np.add.reduceat(weights[self._rows] * self._entries, self._starts)
        first = totals - np.bincount(self._owners, upper, minlength=len(totals))
        return (np.abs(first).sum() + np.abs(upper).sum()) / (weights.sum() * len(totals))


class AnyMetric:
    """A function of arrays with N rows each, called with the drawn rows."""

    def __init__(self, metric: Callable[..., float], *arrays: NDArray[Any]) -> None:
        self._metric = metric
        self._arrays = arrays

    def evaluate(self, counts: IntArray) -> FloatArray:
        rows = np.arange(len(self._arrays[0]))
        return np.array([self._of(np.repeat(rows, each)) for each in counts])

    def _of(self, rows: IntArray) -> float:
        return float(self._metric(*(array[rows] for array in self._arrays)))


def _quantile_edges(at_rank: Callable[[IntArray], FloatArray], n_examples: int, n_bins: int) -> FloatArray:
    """`binning.quantile_edges` of a sample that is known by its order statistics."""
    ranks = np.linspace(0, n_examples, n_bins + 1)
    below = np.minimum(ranks.astype(np.intp), n_examples - 1)
    lower, upper = at_rank(below), at_rank(np.minimum(below + 1, n_examples - 1))
    return (upper - lower) * (ranks - below) + lower


def _equal_mass_positions(n_examples: int, n_bins: int) -> IntArray:
    """Where `np.array_split` cuts n_examples into n_bins parts."""
    share, more = divmod(n_examples, n_bins)
    parts = np.arange(n_bins + 1)
    return parts * share + np.minimum(parts, more)
