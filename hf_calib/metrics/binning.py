"""The one owner of bin edges and of the rule that puts a value into a bin.

Every metric here, the streaming state and the diagrams bin through this module, so that the same
confidence lands in the same bin everywhere. Bins are (lower, upper], as in the papers' code.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Binning = Literal["uniform", "quantile"]
BINNINGS: tuple[Binning, ...] = ("uniform", "quantile")
DROPPED = -1  # the bin index of a value that lies in no bin

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]


class BinSums(NamedTuple):
    """Sums over the examples of each bin; the last axis, M long, runs over the bins."""

    counts: FloatArray
    confidence: FloatArray
    correct: FloatArray


class BinMeans(NamedTuple):
    """What a reliability diagram shows of each bin; the means of an empty bin are NaN."""

    counts: FloatArray
    confidence: FloatArray
    accuracy: FloatArray


def uniform_edges(n_bins: int) -> FloatArray:
    """The M + 1 edges of equal-width bins on [0, 1].

    k/M has no exact float, and its float32 rounding may lie above or below its float64 rounding. Each
    edge is the larger of the two, so that a confidence of k/M belongs to the bin below the edge
    whether it was computed in float32 or float64, and stays there when it is widened later.

    >>> uniform_edges(4)
    array([0.  , 0.25, 0.5 , 0.75, 1.  ])
    """
    edges = np.arange(n_bins + 1) / n_bins
    return np.maximum(edges, edges.astype(np.float32).astype(np.float64))


def quantile_edges(confidences: FloatArray, n_bins: int) -> FloatArray:
    """The M + 1 edges of the papers' equal-mass bins, interpolated between sorted confidences (N,).

    >>> quantile_edges(np.array([0.9, 0.3, 0.5, 0.7]), 2)
    array([0.3, 0.7, 0.9])
    """
    n_examples = len(confidences)
    ranks = np.linspace(0, n_examples, n_bins + 1)
    return np.interp(ranks, np.arange(n_examples), np.sort(confidences))


def uniform_bins(values: NDArray[Any], n_bins: int) -> IntArray:
    """The equal-width bin, 0 to M - 1, of each value; 0 is in the first bin, 1 in the last.

    >>> uniform_bins(np.array([0.0, 0.25, 0.26, 1.0]), 4)
    array([0, 0, 1, 3])
    """
    return np.searchsorted(uniform_edges(n_bins)[1:-1], values, side="left")


def quantile_bins(confidences: FloatArray, n_bins: int) -> IntArray:
    """The equal-mass bin of each confidence (N,), or `DROPPED` for the smallest one and its ties.

    The papers' code drops the smallest, because their bins are open below; we keep that so that numbers
    compare. Where it would drop everything (one example, or all confidences equal) all go into one bin:
    equal confidences cannot be told apart, and to split them would make the result depend on their order.

    >>> quantile_bins(np.array([0.9, 0.3, 0.5, 0.7]), 2)
    array([ 1, -1,  0,  0])
    """
    bins = np.searchsorted(quantile_edges(confidences, n_bins), confidences, side="left") - 1
    return np.zeros_like(bins) if bins.max() == DROPPED else bins


def assign_bins(confidences: FloatArray, n_bins: int, binning: Binning) -> IntArray:
    """The bin of each confidence (N,) under either kind of binning."""
    return (uniform_bins if binning == "uniform" else quantile_bins)(confidences, n_bins)


def sum_bins(confidences: FloatArray, correct: FloatArray, bins: IntArray, n_bins: int) -> BinSums:
    """Count, and add up confidence and correctness (N,), per bin; dropped examples are left out.

    >>> sum_bins(np.array([0.6, 0.8, 0.9]), np.array([0.0, 1.0, 1.0]), np.array([0, 1, 1]), 2).correct
    array([0., 2.])
    """
    slots = bins + 1  # so that `DROPPED` is slot 0

    def total(weights: FloatArray) -> FloatArray:
        return np.bincount(slots, weights, minlength=n_bins + 1)[1:].astype(np.float64, copy=False)

    return BinSums(total(np.ones_like(confidences)), total(confidences), total(correct))


def mean_bins(sums: BinSums) -> BinMeans:
    """Turn the sums of each bin into what a diagram shows."""
    members = np.where(sums.counts > 0, sums.counts, np.nan)
    return BinMeans(sums.counts, sums.confidence / members, sums.correct / members)
