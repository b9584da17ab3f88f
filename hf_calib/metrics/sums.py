"""Metrics as sums over the rows: what a row adds, and what the sums are worth.

A `SumMetric` is two functions. `rows(probs, labels)` tells what each of N rows adds to K sums: anything that stands on
the right of `weights @ rows`. `value(sums, n)` is the metric of sums (..., K) of n (...) rows. The same two functions
serve all rows at once, rows with weights, bootstrap resamples (weights are counts), and batches, shards and processes,
whose sums add up:

    metric(probs, labels, weights)                                 # a float; chunk by chunk, no temporary is (N, C)
    metric.sums(probs, labels, weights)                            # (K,): add them up, and give them to metric.value
    metric.value(counts @ metric.rows(probs, labels), counts.sum(axis=1))    # (R,) of counts (R, N)

`top_label` reduces probs and labels to the one value that the errors of the predicted class read, a `TopLabel`. Bins
are (lower, upper], as in the papers' code; every metric, state and diagram bins by the functions here, so that a
confidence lies in the same bin everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from hf_calib.metrics.checks import FloatArray, IntArray, row_chunks

Binning = Literal["uniform", "quantile", "equal_mass"]
BINNINGS: tuple[Binning, ...] = ("uniform", "quantile", "equal_mass")
Norm = Literal["l1", "l2", "max"]
NORMS: tuple[Norm, ...] = ("l1", "l2", "max")
DROPPED = -1  # the bin index of a value that lies in no bin

# Farther than this from every edge, relatively, float32 rounding of edge and product cannot matter.
_NEAR_AN_EDGE = 4e-7
_CHUNK = 2**15  # confidences at a time: they and half a dozen temporaries stay in cache
_FEW_CLASSES = 32  # up to here a comparison class by class is faster than argmax


class SumMetric(NamedTuple):
    """A metric of sums over the rows."""

    rows: Callable[[NDArray[Any], NDArray[Any]], Any]  # of probs and labels: (N, K), if it were dense
    value: Callable[[FloatArray, Any], FloatArray]  # of sums (..., K) of n (...) rows, or of their weight

    def __call__(self, probs: NDArray[Any], labels: NDArray[Any], weights: FloatArray | None = None) -> float:
        n = len(probs) if weights is None else weights.sum()
        return float(self.value(self.sums(probs, labels, weights), n))

    def sums(
        self, probs: NDArray[Any], labels: NDArray[Any], weights: FloatArray | None = None
    ) -> FloatArray:
        """(K,) of checked rows; not of a metric whose bins depend on all of them."""
        weights = np.broadcast_to(1.0, len(probs)) if weights is None else weights
        total: FloatArray | None = None
        for part in row_chunks(*probs.shape):
            sums = weights[part] @ self.rows(probs[part], labels[part])
            total = sums if total is None else np.add(total, sums, out=total)
        return np.asarray(total)


def mean_of(row: Callable[[NDArray[Any], NDArray[Any]], FloatArray], *, root: bool = False) -> SumMetric:
    """The mean of a value (N,) of each row, or its square root."""

    def value(sums: FloatArray, n: Any) -> FloatArray:
        mean = sums[..., 0] / n
        return np.sqrt(mean) if root else mean

    return SumMetric(lambda probs, labels: row(probs, labels)[:, None], value)


# The top label


class TopLabel(NamedTuple):
    """The confidence (N,) of the first most probable class, float64, and how right it is (N,): 0 or 1, or a share."""

    confidence: FloatArray
    correct: FloatArray

    def part(self, rows: Any) -> TopLabel:
        """The same of some of the rows."""
        return TopLabel(self.confidence[rows], self.correct[rows])


def top_label(probs: NDArray[Any], labels: NDArray[Any]) -> TopLabel:
    """Reduce probs (N, C) and labels, (N,) or soft (N, C), of which the share of the predicted class counts."""
    confidence, predicted = winners(probs)
    correct = labels[np.arange(len(probs)), predicted] if labels.ndim == 2 else predicted == labels
    return TopLabel(confidence, correct.astype(np.float64))


def winners(probs: NDArray[Any]) -> tuple[FloatArray, IntArray]:
    """The largest probability (N,) of each row and the first class (N,) that has it."""
    n_rows, n_classes = probs.shape
    if n_classes > _FEW_CLASSES:
        predicted = probs.argmax(axis=1)
        return probs[np.arange(n_rows), predicted].astype(np.float64), predicted
    confidences, predicted = np.empty(n_rows), np.empty(n_rows, np.intp)
    for part in row_chunks(n_rows, n_classes):
        confidences[part], predicted[part] = _winners_of_few(probs[part])
    return confidences, predicted


def _winners_of_few(probs: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """The same, class by class: argmax spends most of its time on getting from row to row."""
    columns = np.ascontiguousarray(probs.T)
    largest = columns.max(axis=0)
    is_largest = (columns == largest).view(np.uint8)
    if is_largest.sum(axis=0, dtype=np.uint8).max() > 1:  # ties
        return largest, probs.argmax(axis=1)
    classes = np.arange(len(columns), dtype=np.uint8)[:, None]
    return largest, (is_largest * classes).sum(axis=0, dtype=np.uint8)


# Bins


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

    Each is the larger of k/M in float32 and in float64, so that a confidence of k/M lies below its edge in both.

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

    The papers' code drops it, as their bins are open below. Where that would drop everything, all are one bin.

    >>> quantile_bins(np.array([0.9, 0.3, 0.5, 0.7]), 2)
    array([ 1, -1,  0,  0])
    """
    bins = np.searchsorted(quantile_edges(confidences, n_bins), confidences, side="left") - 1
    return np.zeros_like(bins) if bins.max() == DROPPED else bins


def equal_mass_bins(confidences: FloatArray, n_bins: int) -> IntArray:
    """The bin of each confidence (N,), sorted and cut as by `numpy.array_split`; equal ones keep their order.

    >>> equal_mass_bins(np.array([0.9, 0.3, 0.5, 0.7]), 2)
    array([1, 0, 0, 1])
    """
    bins = np.empty(len(confidences), np.intp)
    sizes = np.diff(_equal_mass_positions(len(confidences), n_bins))
    bins[np.argsort(confidences, kind="stable")] = np.repeat(np.arange(n_bins), sizes)
    return bins


def _equal_mass_positions(n_examples: int, n_bins: int) -> IntArray:
    """Where `numpy.array_split` cuts n_examples into n_bins parts."""
    share, more = divmod(n_examples, n_bins)
    parts = np.arange(n_bins + 1)
    return parts * share + np.minimum(parts, more)


def assign_bins(confidences: FloatArray, n_bins: int, binning: Binning) -> IntArray:
    """The bin of each confidence (N,) under any kind of binning."""
    assign = {"uniform": uniform_bins, "quantile": quantile_bins, "equal_mass": equal_mass_bins}[binning]
    return assign(confidences, n_bins)


class BinnedRows:
    """J columns (N,) in bins (N,) whatever the weights: `weights @ rows` is (..., J M). None counts the rows."""

    __array_ufunc__ = None  # numpy leaves `weights @ rows` to this class

    def __init__(self, bins: IntArray, n_bins: int, *columns: FloatArray | None) -> None:
        self._slots = bins + 1  # so that `DROPPED` is slot 0
        self._n_bins, self._columns = n_bins, columns

    def __rmatmul__(self, weights: NDArray[Any]) -> FloatArray:
        if weights.ndim > 1:
            return np.stack([each @ self for each in weights])
        terms = (weights if column is None else weights * column for column in self._columns)
        return np.concatenate([np.bincount(self._slots, each, self._n_bins + 1)[1:] for each in terms])


class RankedRows:
    """Rows in equal-mass bins, which each sample cuts anew: `counts @ rows` (..., 3 M), of counts (..., N) of the rows.

    Rows are sorted once; a bin is a run of rows, and a row drawn several times may lie on both sides of a cut.
    """

    __array_ufunc__ = None

    def __init__(self, top: TopLabel, n_bins: int, binning: Binning) -> None:
        self._order = np.argsort(top.confidence, kind="stable")
        self._n_bins, self._binning = n_bins, binning
        self._confidences = top.confidence[self._order]
        # (3, N + 1); the last row of zeros ends the last bin.
        columns = np.stack([np.ones(len(self._order)), self._confidences, top.correct[self._order]])
        self._columns = np.pad(columns, ((0, 0), (0, 1)))

    def __rmatmul__(self, counts: NDArray[Any]) -> FloatArray:
        if counts.ndim > 1:
            return np.stack([each @ self for each in counts])
        drawn = counts[self._order].astype(np.intp)
        cuts, copies = self._cuts(drawn)
        # reduceat gives an empty run its first row.
        empty = np.append(cuts[:-1] == cuts[1:], True)
        weighted = np.append(drawn, 0) * self._columns
        runs = np.where(empty, 0, np.add.reduceat(weighted, cuts, axis=1))
        return np.ravel(runs[:, :-1] + np.diff(copies * self._columns[:, cuts], axis=1))

    def _cuts(self, drawn: IntArray) -> tuple[IntArray, IntArray]:
        """Where each bin starts and the last one ends: before which row, after how many copies of it."""
        up_to = drawn.cumsum()
        n_examples = int(up_to[-1])
        if self._binning == "equal_mass":
            positions = _equal_mass_positions(n_examples, self._n_bins)
            cuts = np.searchsorted(up_to, positions, side="right")
            return cuts, positions - np.append(0, up_to)[cuts]
        # `quantile_edges` of the sample, by its order statistics.
        ranks = np.linspace(0, n_examples, self._n_bins + 1)
        below = np.minimum(ranks.astype(np.intp), n_examples - 1)
        above = np.minimum(below + 1, n_examples - 1)
        lower, upper = self._confidences[np.searchsorted(up_to, [below, above], side="right")]
        edges = (upper - lower) * (ranks - below) + lower
        cuts = np.searchsorted(self._confidences, edges, side="right")
        if edges[0] == edges[-1]:  # all are equal, and one bin
            cuts = np.append(0, np.full(self._n_bins, len(self._confidences)))
        return cuts, np.zeros_like(cuts)


def binned_rows(top: TopLabel, n_bins: int, binning: Binning = "uniform") -> BinnedRows | RankedRows:
    """What rows add to the `BinSums` of any sample of them."""
    if binning == "uniform":
        return BinnedRows(uniform_bins(top.confidence, n_bins), n_bins, None, *top)
    return RankedRows(top, n_bins, binning)


def bin_sums(
    top: TopLabel, n_bins: int, binning: Binning = "uniform", weights: FloatArray | None = None
) -> BinSums:
    """The sums (M,) over the rows of each bin."""
    if binning == "uniform":
        return as_bin_sums(_added_up(lambda part: binned_rows(part, n_bins), top, weights))
    rows = BinnedRows(assign_bins(top.confidence, n_bins, binning), n_bins, None, *top)
    return as_bin_sums((np.broadcast_to(1.0, len(top.confidence)) if weights is None else weights) @ rows)


def _added_up(rows: Callable[[TopLabel], Any], top: TopLabel, weights: FloatArray | None) -> FloatArray:
    """The sums of all rows, chunk by chunk: no temporary is (N,), and long sums do not drift."""
    weights = np.broadcast_to(1.0, len(top.confidence)) if weights is None else weights
    parts = row_chunks(len(weights), elements=_CHUNK)
    return np.sum([weights[part] @ rows(top.part(part)) for part in parts], axis=0)


def as_bin_sums(sums: FloatArray) -> BinSums:
    """The three parts (..., M) of sums (..., 3 M)."""
    return BinSums(*np.moveaxis(sums.reshape(*sums.shape[:-1], 3, -1), -2, 0))


def mean_bins(sums: BinSums) -> BinMeans:
    """Turn the sums of each bin into what a diagram shows."""
    members = np.where(sums.counts > 0, sums.counts, np.nan)
    return BinMeans(sums.counts, sums.confidence / members, sums.correct / members)


# Errors of bins


def binned_error(sums: BinSums, n: Any, norm: Norm = "l1", *, debias: bool = False) -> FloatArray:
    """The calibration error (...) of the sums (..., M) of bins of n (...) rows."""
    gaps = np.abs(sums.confidence - sums.correct) / np.where(sums.counts > 0, sums.counts, 1)
    if norm == "max":
        return np.asarray(gaps.max(axis=-1))
    if norm == "l2":
        squares = gaps**2 - _squared_noise(sums) if debias else gaps**2
        return np.sqrt(np.maximum((sums.counts * squares).sum(axis=-1) / n, 0.0))
    if debias:
        gaps = 2 * gaps - _expected_gaps(sums, gaps)
    return np.maximum((sums.counts * gaps).sum(axis=-1) / n, 0.0)


def gap_rows(top: TopLabel, n_bins: int) -> BinnedRows:
    """Confidence minus correctness in equal-width bins: all that an l1 error needs."""
    return BinnedRows(uniform_bins(top.confidence, n_bins), n_bins, top.confidence - top.correct)


def gap_error(sums: FloatArray, n: Any) -> FloatArray:
    """The l1 error (...) of the sums (..., M) of `gap_rows`."""
    return np.abs(sums).sum(axis=-1) / n


def top_label_sums(
    n_bins: int = 15, binning: Binning = "uniform", norm: Norm = "l1", debias: bool = False
) -> SumMetric:
    """The expected or the maximum calibration error of the top label."""
    if binning == "uniform" and norm == "l1" and not debias:
        return SumMetric(lambda probs, labels: gap_rows(top_label(probs, labels), n_bins), gap_error)
    return SumMetric(
        lambda probs, labels: binned_rows(top_label(probs, labels), n_bins, binning),
        lambda sums, n: binned_error(as_bin_sums(sums), n, norm, debias=debias),
    )


def top_label_error(
    top: TopLabel,
    *,
    n_bins: int = 15,
    binning: Binning = "uniform",
    norm: Norm = "l1",
    debias: bool = False,
    weights: FloatArray | None = None,
) -> float:
    """The same of rows whose top label is known."""
    n = len(top.confidence) if weights is None else weights.sum()
    if binning == "uniform" and norm == "l1" and not debias:
        return float(gap_error(_added_up(lambda part: gap_rows(part, n_bins), top, weights), n))
    return float(binned_error(bin_sums(top, n_bins, binning, weights), n, norm, debias=debias))


def _squared_noise(sums: BinSums) -> FloatArray:
    """The part of each bin's squared gap due to label noise; all of the gap in a bin of one example."""
    members = np.maximum(sums.counts, 1)
    accuracy = sums.correct / members
    gaps = (sums.confidence - sums.correct) / members
    return np.where(sums.counts > 1, accuracy * (1 - accuracy) / np.maximum(members - 1, 1), gaps**2)


def _expected_gaps(sums: BinSums, gaps: FloatArray) -> FloatArray:
    """The mean of the absolute gap of each bin when its accuracy is drawn again: a folded normal."""
    members = np.maximum(sums.counts, 1)
    accuracy = sums.correct / members
    spread = np.sqrt(np.maximum(accuracy * (1 - accuracy), 0) / members)
    ratio = np.divide(gaps, spread, out=np.full_like(gaps, np.inf), where=spread > 0)
    density = np.sqrt(2 / np.pi) * np.exp(-(ratio**2) / 2)
    return spread * density + gaps * (1 - 2 * ndtr(-ratio))


# Errors of every class


class ClasswiseRows:
    """Each row's probabilities minus its label, in the bins of each class: `weights @ rows` is (..., C M).

    Few probabilities lie above the first edge, so those bins are sparse. In the place of each class's first bin stands
    the sum of all of its bins, one matrix product; `class_errors` takes the others off it.
    """

    __array_ufunc__ = None

    def __init__(self, probs: NDArray[Any], labels: NDArray[Any], n_bins: int) -> None:
        self._gaps = probs.astype(np.float64)
        if labels.ndim == 1:
            self._gaps[np.arange(len(probs)), labels] -= 1
        else:
            self._gaps -= labels
        n_classes = probs.shape[1]
        upper = np.flatnonzero(probs > uniform_edges(n_bins)[1])
        self._rows, classes = np.divmod(upper, n_classes)
        bins = uniform_bins(probs.reshape(-1)[upper], n_bins)
        self._slots, self._entries = classes * n_bins + bins, self._gaps.reshape(-1)[upper]
        self._shape = n_classes, n_bins

    def __rmatmul__(self, weights: NDArray[Any]) -> FloatArray:
        if weights.ndim > 1:
            return np.stack([each @ self for each in weights])
        n_classes, n_bins = self._shape
        terms = weights[self._rows] * self._entries
        # bincount of nothing has integers.
        sums = np.bincount(self._slots, terms, n_classes * n_bins).astype(np.float64, copy=False)
        sums = sums.reshape(self._shape)
        sums[:, 0] = weights @ self._gaps
        return sums.ravel()


def class_errors(sums: FloatArray, n: Any, n_bins: int) -> FloatArray:
    """The binned error of each class (..., C), of the sums (..., C M) of `classwise_sums`."""
    by_bin = sums.reshape(*sums.shape[:-1], -1, n_bins)
    upper = by_bin[..., 1:]
    gaps = np.abs(by_bin[..., 0] - upper.sum(axis=-1)) + np.abs(upper).sum(axis=-1)
    return gaps / np.asarray(n)[..., None]


def classwise_sums(n_bins: int = 15) -> SumMetric:
    """The classwise calibration error."""
    return SumMetric(
        lambda probs, labels: ClasswiseRows(probs, labels, n_bins),
        lambda sums, n: class_errors(sums, n, n_bins).mean(axis=-1),
    )


def class_gaps(sums: BinSums) -> FloatArray:
    """The binned gap of each class (C,) from sums (C, M); NaN for a class that was never evaluated."""
    n_examples = sums.counts.sum(axis=-1)
    return gap_error(sums.confidence - sums.correct, np.where(n_examples > 0, n_examples, np.nan))
