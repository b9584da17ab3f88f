"""Metrics as sums over rows, and bins, which are (lower, upper] as in the papers' code.

A `SumMetric` is computed from all rows at once, rows with weights, bootstrap resamples (whose
weights are counts), or chunks of rows. The errors of the predicted class read a `TopLabel` instead
of probs and labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.special import erf

from hf_calib.metrics.checks import (
    FloatArray,
    IntArray,
    row_chunks,
)

Binning = Literal["uniform", "quantile", "equal_mass"]
Norm = Literal["l1", "l2", "max"]
BINNINGS: tuple[Binning, ...] = get_args(Binning)
NORMS: tuple[Norm, ...] = get_args(Norm)

# It maps weights (N,), or None for equal weights, to sums.
Adder = Callable[[Any], FloatArray]

# Rounding of float32 does not matter at this relative distance.
_NEAR_AN_EDGE = 4e-7
# A block of resamples of this size stays in or near the cache.
_BLOCK_ELEMENTS = 2**20
# A difference this small is due to rounding.
SAME = 1e-12
# For so few classes, comparing them one by one is 3 times as fast as argmax.
_FEW_CLASSES = 32


class SumMetric(NamedTuple):
    """A metric of sums over rows: the terms of each row, and the value of the sums of n rows."""

    # It reads probs and labels, or the columns of a `TopLabel`.
    rows: Callable[..., Adder]
    value: Callable[[FloatArray, Any], Any]
    of_top: bool = False
    # False if the bins depend on all rows, so that sums of chunks do not add up.
    chunked: bool = True

    def __call__(
        self,
        first: NDArray[Any],
        second: NDArray[Any],
        weights: FloatArray | None = None,
    ) -> float:
        n = len(first) if weights is None else weights.sum()
        return float(self.value(self.sums(first, second, weights), n))

    def sums(
        self, first: NDArray[Any], second: NDArray[Any], weights: Any = None
    ) -> FloatArray:
        """The sums, computed in chunks, so that temporaries stay small and long sums accurate."""
        if not self.chunked:
            return self.rows(first, second)(weights)
        total: Any = 0.0
        for part in row_chunks(*first.shape):
            add = self.rows(first[part], second[part])
            own = None if weights is None else weights[part]
            total = total + add(own)
        return np.asarray(total)


def mean_of(
    row: Callable[[NDArray[Any], NDArray[Any]], FloatArray], *, root: bool = False
) -> SumMetric:
    """A metric that is the mean of a value (N,) per row, or the square root of the mean."""

    def rows(probs: NDArray[Any], labels: NDArray[Any]) -> Adder:
        # In chunks, the temporaries of the probabilities of many classes stay small.
        parts = row_chunks(*probs.shape)
        values = np.concatenate([row(probs[part], labels[part]) for part in parts])

        def add(weights: FloatArray | None) -> FloatArray:
            total = values.sum() if weights is None else weights @ values
            return np.asarray(total)

        return add

    def value(total: FloatArray, n: Any) -> FloatArray:
        mean = total / n
        return np.sqrt(mean) if root else mean

    return SumMetric(rows, value, chunked=False)


# Resamples


class Interval(NamedTuple):
    """A value and the ends of its interval, which may exclude it; None if there is none."""

    value: float
    low: Any = None
    high: Any = None


def interval_of(value: float, draws: FloatArray, confidence_level: float) -> Interval:
    """The percentile interval of resampled values (B,), or the value if all are equal to it."""
    if np.abs(draws - value).max() <= SAME:
        return Interval(value, value, value)
    tail = (1 - confidence_level) / 2
    low, high = np.quantile(draws, [tail, 1 - tail])
    return Interval(value, float(low), float(high))


def wilson_interval(frequency: Any, n: Any, z: float) -> FloatArray:
    """The interval (2, ...) of frequencies (...) of n rows, z standard errors wide (Wilson 1927).

    Unlike the normal interval it has a width at 0 and 1.
    """
    # The ends are the frequencies q that solve (q - frequency)^2 = z^2 q (1 - q) / n.
    weight = z**2 / n
    middle = frequency + weight / 2
    reach = np.sqrt(weight * (frequency * (1 - frequency) + weight / 4))
    ends = np.stack([middle - reach, middle + reach]) / (1 + weight)
    return np.clip(ends, 0.0, 1.0)


def draw_counts(
    n_rows: int,
    n_resamples: int,
    rng: np.random.Generator,
    groups: IntArray | None = None,
) -> Iterator[FloatArray]:
    """Counts (R, N) of rows in blocks of resamples, of whole groups (N,), numbered from 0."""
    n = n_rows
    if groups is not None:
        n = int(groups.max()) + 1
    for part in row_chunks(n_resamples, n_rows, elements=_BLOCK_ELEMENTS):
        drawn = rng.integers(0, n, (part.stop - part.start, n))
        counts = np.empty(drawn.shape)
        for row, each in zip(counts, drawn, strict=True):
            row[:] = np.bincount(each, minlength=n)
        yield counts if groups is None else counts[:, groups]


class TopLabel(NamedTuple):
    """The confidence (N,) of the first most probable class, and its correctness (N,), or share."""

    confidence: FloatArray
    correct: FloatArray

    def part(self, rows: Any) -> TopLabel:
        """The same columns for some of the rows."""
        return TopLabel(self.confidence[rows], self.correct[rows])


def top_label(probs: NDArray[Any], labels: NDArray[Any]) -> TopLabel:
    """Reduce probs (N, C) and labels (N,); of soft ones (N, C) the predicted share counts."""
    confidence, predicted = winners(probs)
    if labels.ndim == 2:
        correct = labels[np.arange(len(probs)), predicted]
    else:
        correct = predicted == labels
    return TopLabel(confidence, correct.astype(np.float64))


def winners(probs: NDArray[Any]) -> tuple[FloatArray, IntArray]:
    """The largest probability (N,) of each row and the first class (N,) that has it."""
    n_rows, n_classes = probs.shape
    if n_classes > _FEW_CLASSES:
        predicted = probs.argmax(axis=1)
        largest = probs[np.arange(n_rows), predicted]
        return largest.astype(np.float64), predicted
    confidence = np.empty(n_rows)
    predicted = np.empty(n_rows, np.intp)
    # The first of several largest classes is the one with the most classes from it to the end.
    to_the_end = np.arange(n_classes, 0, -1, dtype=np.uint8)[:, None]
    for part in row_chunks(n_rows, n_classes):
        columns = np.ascontiguousarray(probs[part].T)
        largest = columns.max(axis=0)
        n_left = ((columns == largest) * to_the_end).max(axis=0)
        confidence[part] = largest
        predicted[part] = n_classes - n_left
    return confidence, predicted


def without_rounding(confidence: FloatArray) -> FloatArray:
    """The confidences (N,) with 24 bits, above 1/2 in 1 - p, so that rounding breaks no ties."""
    of_p = confidence.astype(np.float32).astype(np.float64)
    of_rest = (1 - confidence).astype(np.float32).astype(np.float64)
    return np.where(confidence < 0.5, of_p, 1 - of_rest)


def residuals(probs: NDArray[Any], labels: NDArray[Any]) -> FloatArray:
    """Probabilities minus labels (N, C), float64."""
    gaps = probs.astype(np.float64, order="C")
    if labels.ndim == 2:
        gaps -= labels
        return gaps
    # One index is faster than two.
    first_of_rows = np.arange(0, gaps.size, gaps.shape[1])
    gaps.reshape(-1)[first_of_rows + labels] -= 1
    return gaps


# Bins


class BinSums(NamedTuple):
    """Sums over the examples of each bin; the last axis, of length M, is that of the bins."""

    counts: FloatArray
    confidence: FloatArray
    correct: FloatArray

    def means(self) -> tuple[FloatArray, FloatArray]:
        """The mean confidence and the accuracy of each bin; NaN for an empty bin."""
        members = np.where(self.counts > 0, self.counts, np.nan)
        return self.confidence / members, self.correct / members


def uniform_edges(n_bins: int) -> FloatArray:
    """The M + 1 edges of equal-width bins; k/M is not above its edge in float32 and float64."""
    edges = np.arange(n_bins + 1) / n_bins
    return np.maximum(edges, edges.astype(np.float32).astype(np.float64))


def quantile_edges(
    ranked: FloatArray, n_bins: int, ends: IntArray | None = None
) -> FloatArray:
    """The M + 1 edges of the papers' equal-mass bins, interpolated between sorted confidences (N,).

    With ends (N,), the edges are those of a sample that contains each confidence up to its end.
    """
    n = len(ranked) if ends is None else ends[-1]
    ranks = np.arange(n_bins + 1) * (n / n_bins)
    below = ranks.astype(np.intp)
    places = np.minimum((below, below + 1), n - 1)
    if ends is not None:
        places = np.searchsorted(ends, places, side="right")
    lower, upper = ranked[places]
    return np.asarray((upper - lower) * (ranks - below) + lower)


def uniform_bins(values: NDArray[Any], n_bins: int) -> IntArray:
    """The equal-width bin, 0 to M - 1, of each value; 0 is in the first bin, 1 in the last."""
    wide = values.astype(np.promote_types(values.dtype, np.float32), copy=False)
    lower = (wide * (n_bins * (1 - _NEAR_AN_EDGE))).astype(np.int32)
    upper = (wide * (n_bins * (1 + _NEAR_AN_EDGE))).astype(np.int32)
    bins = upper.clip(0, n_bins - 1)
    near = lower != bins
    if near.any():
        # Only these few values are searched among the edges.
        interior = uniform_edges(n_bins)[1:-1]
        bins[near] = np.searchsorted(interior, wide[near], side="left")
    return bins.astype(np.intp)


def above_first_edge(values: NDArray[Any], n_bins: int) -> tuple[IntArray, IntArray]:
    """The indices of values (K,) that may be above the first equal-width bin, and their bins."""
    # No value is missing, because a cast of 1 / n_bins keeps the order.
    places = np.flatnonzero(values >= 1 / n_bins)
    return places, uniform_bins(values[places], n_bins)


def assign_bins(confidences: FloatArray, n_bins: int, binning: Binning) -> IntArray:
    """The bin of each confidence (N,) for any kind of binning; M if it is in no bin."""
    if binning == "uniform":
        return uniform_bins(confidences, n_bins)
    order = _ranking(confidences, binning)
    cuts = _cuts(confidences[order], n_bins, binning)
    # The rows before the first bin are in none.
    numbers = np.append(n_bins, np.arange(n_bins))
    bins = np.empty_like(order)
    bins[order] = np.repeat(numbers, np.diff(cuts, prepend=0))
    return bins


def _ranking(confidences: FloatArray, binning: Binning) -> IntArray:
    """The order (N,) of the confidences."""
    # Only cuts of "equal_mass" may be between equal confidences, so that their order matters.
    kind: Any = "stable" if binning == "equal_mass" else None
    return np.argsort(confidences, kind=kind)


def _cuts(
    ranked: FloatArray, n_bins: int, binning: Binning, ends: IntArray | None = None
) -> IntArray:
    """The positions among sorted confidences where equal-mass bins start and the last ends."""
    n_rows = len(ranked) if ends is None else ends[-1]
    if binning == "equal_mass":
        # The cuts are those of `numpy.array_split`.
        share, more = divmod(n_rows, n_bins)
        parts = np.arange(n_bins + 1)
        return parts * share + np.minimum(parts, more)
    # The papers' code drops the smallest confidence, because its bins are open below. It drops ties
    # with it too, which may be half of all rows: they are kept.
    edges = quantile_edges(ranked, n_bins, ends)
    cuts = np.searchsorted(ranked, edges, side="right")
    if ends is not None:
        cuts = np.where(cuts > 0, ends[cuts - 1], 0)
    if cuts[0] > 1 or cuts[0] == cuts[-1]:
        cuts[0] = 0
    return cuts


def add_to(
    sums: FloatArray, slots: IntArray, terms: Iterable[FloatArray | float]
) -> None:
    """Add each of K terms (n,), or numbers, to the slots (n,) of its sums (K, ...)."""
    for total, term in zip(sums, terms, strict=True):
        np.add.at(total.reshape(-1), slots, term)


def in_bins(bins: IntArray, n_bins: int, *columns: FloatArray | float) -> Adder:
    """Sums (J, M) of J columns (N,) in bins (N,) that do not depend on the weights."""

    def add(weights: FloatArray | None) -> FloatArray:
        sums = np.zeros((len(columns), n_bins))
        terms = list(columns)
        if weights is not None:
            terms = [weights * column for column in columns]
        add_to(sums, bins, terms)
        return sums

    return add


def binned_rows(top: TopLabel, n_bins: int, binning: Binning = "uniform") -> Adder:
    """The `BinSums` (3, M) of any sample of the rows, which has equal-mass bins of its own."""
    if binning == "uniform":
        return in_bins(uniform_bins(top.confidence, n_bins), n_bins, 1.0, *top)
    order = _ranking(top.confidence, binning)
    ranked = top.part(order)
    # The last row is 0 and ends the last bin.
    columns = np.zeros((3, len(order) + 1))
    columns[:, :-1] = np.ones(len(order)), *ranked

    def of_all_rows() -> FloatArray:
        return _sums_between(columns, _cuts(ranked.confidence, n_bins, binning))

    def of_resample(counts: FloatArray) -> FloatArray:
        own = np.append(counts[order], 0)
        ends = own[:-1].astype(np.intp).cumsum()
        cuts = _cuts(ranked.confidence, n_bins, binning, ends)
        rows = np.searchsorted(ends, cuts, side="right")
        # A cut may divide the copies of a row between a bin and the next.
        copies_before_cut = cuts - np.where(rows > 0, ends[rows - 1], 0)
        of_divided_rows = np.diff(copies_before_cut * columns[:, rows])
        return _sums_between(own * columns, rows) + of_divided_rows

    return lambda counts: of_all_rows() if counts is None else of_resample(counts)


def _sums_between(columns: FloatArray, rows: IntArray) -> FloatArray:
    """The sums (J, M) of columns (J, N + 1) from each of M + 1 rows to the next, or 0."""
    # `reduceat` sums one row there.
    are_some = rows[1:] > rows[:-1]
    return np.add.reduceat(columns, rows, axis=1)[:, :-1] * are_some


def bin_sums(top: TopLabel, n_bins: int, binning: Binning = "uniform") -> BinSums:
    """The sums (M,) over the rows of each bin."""
    return BinSums(*top_label_sums(n_bins, binning, "l2").sums(*top))


def equal_shares(ranked: FloatArray, n_bins: int, *, weighted: bool) -> BinSums:
    """The sums (M,) of bins with equal shares of the rows.

    `ranked` (3, K) are the `BinSums` of rows with equal or nearly equal confidences, the least
    first.
    """
    n_groups = ranked.shape[1]
    below = np.pad(np.cumsum(ranked, axis=1), [(0, 0), (1, 0)])
    n = below[0, -1]
    ranks = np.arange(1, n_bins) * n / n_bins
    if not weighted:
        # This many rows are not above the papers' edge, which is the confidence of the last of
        # them.
        ranks = np.floor(ranks) + 1
    # The whole group of an edge counts as below it, because rows that tie with an edge do.
    cuts = np.searchsorted(below[0, 1:], np.minimum(ranks, n)) + 1
    cuts = cuts.clip(max=n_groups)
    return BinSums(*np.diff(below[:, [0, *cuts, n_groups]]))


def binned_error(
    sums: BinSums, n: Any, norm: Norm = "l1", *, debias: bool = False
) -> FloatArray:
    """The calibration error (...) from the sums (..., M) of the bins of n (...) rows."""
    if norm == "l1" and not debias:
        return gap_error(sums.confidence - sums.correct, n)
    # The gap of an empty bin is 0.
    members = np.where(sums.counts > 0, sums.counts, 1)
    gaps = np.abs(sums.confidence - sums.correct) / members
    if norm == "max":
        return np.asarray(gaps.max(axis=-1))
    accuracy = sums.correct / members
    variances = np.maximum(accuracy * (1 - accuracy), 0)
    if norm == "l1":
        # The mean growth of a gap when the accuracy is drawn again is subtracted.
        drawn_again = mean_size(gaps, np.sqrt(variances / members))
        terms = 2 * gaps - drawn_again
    elif debias:
        # A bin with one example has no unbiased square.
        unbiased = gaps**2 - variances / np.maximum(members - 1, 1)
        terms = np.where(sums.counts > 1, unbiased, 0)
    else:
        terms = gaps**2
    mean = (sums.counts * terms).sum(axis=-1) / n
    # What is subtracted may be more than there is.
    found = np.maximum(mean, 0.0)
    return np.asarray(found if norm == "l1" else np.sqrt(found))


def mean_size(means: FloatArray, deviations: FloatArray) -> FloatArray:
    """The mean E|X| of a normal X."""
    # E|X| = s sqrt(2 / pi) exp(-m^2 / (2 s^2)) + |m| erf(|m| / (s sqrt(2))), or |m| if s is 0.
    sizes = np.abs(means)
    ratio = np.full_like(sizes, np.inf)
    np.divide(sizes, deviations, out=ratio, where=deviations > 0)
    spread = deviations * np.sqrt(2 / np.pi) * np.exp(-(ratio**2) / 2)
    return np.asarray(spread + sizes * erf(ratio / np.sqrt(2)))


def gap_error(sums: FloatArray, n: Any) -> FloatArray:
    """The l1 error (...) of confidences minus outcomes, summed in bins (..., M)."""
    return np.asarray(np.abs(sums).sum(axis=-1) / n)


def top_label_sums(
    n_bins: int = 15,
    binning: Binning = "uniform",
    norm: Norm = "l1",
    debias: bool = False,
) -> SumMetric:
    """The expected or the maximum calibration error of the top label."""
    if binning == "uniform" and norm == "l1" and not debias:
        # One column of sums instead of three is faster.
        gap_rows = partial(_gaps_in_bins, n_bins=n_bins)
        return SumMetric(gap_rows, lambda sums, n: gap_error(sums[0], n), of_top=True)

    def rows(confidence: FloatArray, correct: FloatArray) -> Adder:
        return binned_rows(TopLabel(confidence, correct), n_bins, binning)

    def value(sums: FloatArray, n: Any) -> FloatArray:
        return binned_error(BinSums(*sums), n, norm, debias=debias)

    return SumMetric(rows, value, of_top=True, chunked=binning == "uniform")


def _gaps_in_bins(confidence: FloatArray, correct: FloatArray, *, n_bins: int) -> Adder:
    """Sums (1, M) of correct minus confidence, so that correct rows add to them."""
    return in_bins(uniform_bins(confidence, n_bins), n_bins, correct - confidence)


def top_label_error(top: TopLabel, **options: Any) -> float:
    """The error of rows whose top label is known."""
    return top_label_sums(**options)(*top)


def classwise_sums(n_bins: int = 15) -> SumMetric:
    """The classwise calibration error, from probabilities minus labels in bins (C, M)."""
    rows = partial(_class_rows, n_bins=n_bins)
    return SumMetric(rows, lambda sums, n: gap_error(sums, n).mean())


def _class_rows(probs: NDArray[Any], labels: NDArray[Any], *, n_bins: int) -> Adder:
    """Sums (C, M) of probabilities minus labels in bins of each class's probability."""
    gaps = residuals(probs, labels)
    n_classes = probs.shape[1]
    # Few values are above the first edge: the first bin has the sum of all minus the other bins.
    upper, bins = above_first_edge(probs.reshape(-1), n_bins)
    rows, classes = np.divmod(upper, n_classes)
    slots = classes * n_bins + bins
    add_upper = in_bins(slots, n_classes * n_bins, gaps.reshape(-1)[upper])

    def add(weights: FloatArray | None) -> FloatArray:
        own = None if weights is None else weights[rows]
        sums = add_upper(own).reshape(n_classes, n_bins)
        every = np.ones(len(gaps)) if weights is None else weights
        # A product is several times as fast as a sum over a short axis.
        of_others = sums[:, 1:] @ np.ones(n_bins - 1)
        sums[:, 0] = every @ gaps - of_others
        return sums

    return add


def class_gaps(sums: BinSums) -> FloatArray:
    """The binned gap of each class (C,) from sums (C, M); NaN for a class without rows."""
    n_examples = sums.counts.sum(axis=-1)
    return binned_error(sums, np.where(n_examples > 0, n_examples, np.nan))
