"""Bin edges, and the rule that puts a value into a bin.

Every metric here, the streaming state and the diagrams bin through this module, so that the same
confidence lands in the same bin everywhere. Bins are (lower, upper], as in the papers' code.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hf_calib.metrics._inputs import row_chunks

Binning = Literal["uniform", "quantile", "equal_mass"]
BINNINGS: tuple[Binning, ...] = ("uniform", "quantile", "equal_mass")
DROPPED = -1  # the bin index of a value that lies in no bin

# Farther than this from every edge, relatively, float32 rounding of edge and product cannot matter.
_NEAR_AN_EDGE = 4e-7
_CHUNK = 2**15  # confidences at a time: they and half a dozen temporaries stay in cache

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]


class BinSums(NamedTuple):
    """Sums over the examples of each bin; the last axis, M long, runs over the bins."""

    counts: FloatArray
    confidence: FloatArray
    correct: FloatArray


class BinMeans(NamedTuple):
    """Count, mean confidence and accuracy of each bin of a reliability diagram; NaN means for an empty bin."""

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
    wide = values.astype(np.promote_types(values.dtype, np.float32), copy=False)
    lower = (wide * (n_bins * (1 - _NEAR_AN_EDGE))).astype(np.int32)
    bins = (wide * (n_bins * (1 + _NEAR_AN_EDGE))).astype(np.int32).clip(0, n_bins - 1)
    near = lower != bins
    if near.any():  # a few values: only these are looked up among the edges
        bins[near] = np.searchsorted(uniform_edges(n_bins)[1:-1], wide[near], side="left")
    return bins.astype(np.intp)


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


def equal_mass_bins(confidences: FloatArray, n_bins: int) -> IntArray:
    """The bin of each confidence (N,) when the sorted examples are cut into M bins of equal counts.

    Where M does not divide N the first bins hold one more, as in `numpy.array_split`. Equal confidences
    that a cut divides go to the bins in the order in which they came.

    >>> equal_mass_bins(np.array([0.9, 0.3, 0.5, 0.7]), 2)
    array([1, 0, 0, 1])
    """
    size, larger = divmod(len(confidences), n_bins)
    sizes = np.full(n_bins, size)
    sizes[:larger] += 1
    bins = np.empty(len(confidences), np.intp)
    bins[np.argsort(confidences, kind="stable")] = np.repeat(np.arange(n_bins), sizes)
    return bins


_ASSIGN = {"uniform": uniform_bins, "quantile": quantile_bins, "equal_mass": equal_mass_bins}


def assign_bins(confidences: FloatArray, n_bins: int, binning: Binning) -> IntArray:
    """The bin of each confidence (N,) under any kind of binning."""
    return _ASSIGN[binning](confidences, n_bins)


def sum_bins(confidences: FloatArray, correct: FloatArray, bins: IntArray, n_bins: int) -> BinSums:
    """Count, and add up confidence and correctness (N,), per bin; dropped examples are left out.

    >>> sum_bins(np.array([0.6, 0.8, 0.9]), np.array([0.0, 1.0, 1.0]), np.array([0, 1, 1]), 2).correct
    array([0., 2.])
    """
    slots = bins + 1  # so that `DROPPED` is slot 0

    def total(weights: FloatArray | None) -> FloatArray:
        return np.bincount(slots, weights, minlength=n_bins + 1)[1:].astype(np.float64, copy=False)

    return BinSums(total(None), total(confidences), total(correct))


def sum_uniform_bins(confidences: FloatArray, correct: FloatArray, n_bins: int) -> BinSums:
    """`sum_bins` over equal-width bins, chunk by chunk: no temporary is (N,), and long sums do not drift."""
    total = BinSums(*np.zeros((3, n_bins)))
    for part in row_chunks(len(confidences), elements=_CHUNK):
        bins = uniform_bins(confidences[part], n_bins)
        chunk = sum_bins(confidences[part], correct[part], bins, n_bins)
        for sums, more in zip(total, chunk, strict=True):
            sums += more
    return total


def sum_uniform_gaps(confidences: FloatArray, correct: FloatArray, n_bins: int) -> FloatArray:
    """Confidence minus correctness, summed (M,) over equal-width bins: all that an l1 error needs.

    >>> sum_uniform_gaps(np.array([0.4, 0.75, 1.0]), np.array([0.0, 1.0, 1.0]), 2)
    array([ 0.4 , -0.25])
    """
    gaps = np.zeros(n_bins)
    for part in row_chunks(len(confidences), elements=_CHUNK):
        difference = confidences[part] - correct[part]
        gaps += np.bincount(uniform_bins(confidences[part], n_bins), difference, minlength=n_bins)
    return gaps


def mean_bins(sums: BinSums) -> BinMeans:
    """Turn the sums of each bin into what a diagram shows."""
    members = np.where(sums.counts > 0, sums.counts, np.nan)
    return BinMeans(sums.counts, sums.confidence / members, sums.correct / members)
