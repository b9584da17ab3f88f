"""Calibration metrics of any number of rows, from float64 sums that are updated, merged, sent and read."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_calib._errors import InputValueError, check, expected
from hf_calib.metrics import checks
from hf_calib.metrics.checks import FloatArray, IntArray
from hf_calib.metrics.scores import SMALLEST_PROBABILITY
from hf_calib.metrics.sums import (
    BinSums,
    TopLabel,
    above_first_edge,
    add_to,
    binned_error,
    class_gaps,
    equal_shares,
    terms_of,
    top_label_error,
    uniform_bins,
    uniform_edges,
    winners,
)

if TYPE_CHECKING:
    from torch import Tensor

    from hf_calib.metrics.on_device import LogitSums

_FORMAT = "hf_calib CalibrationState 4"  # The last word is the version.

_LONGEST_HEADER = 100  # In bytes.
_MOST_SENT = 2**21  # The most sums of bytes: 16 MiB, as of 17,000 classes in 15 bins.
_MOST_SUMS = 2**27  # The most in memory: 1 GiB.
_SLACK = 2e-6  # Per row: probabilities may be off by 1e-6, and float32 has 24 bits.
_SAME = 1e-7  # The relative difference of sums of the same terms in another order.
_MOST_NATS = 1e39  # A difference of two logits in float32.

# Confidences are counted in cells, within which 1 - p varies by a factor of 1 + 2^-12, because many are near 1. A cell
# has the first 12 of the 52 bits of the fraction, in each of the 24 halvings of 1 - p down to float32's resolution, and
# the first 8 in the 29 further halvings down to float64's.
_CELL_BITS, _OCTAVES = 12, 24
_DEEP_BITS, _DEEP_OCTAVES = 8, 29
_N_FINE = _OCTAVES << _CELL_BITS
N_CELLS = _N_FINE + (_DEEP_OCTAVES << _DEEP_BITS)

_NO_ROWS = TopLabel(np.empty(0), np.empty(0))

# The metrics that an evaluation logs, by key, such as eval_ece, and eval_ece_calibrated with the calibrator.
LOGGED_METRICS = {
    "accuracy": "Accuracy",
    "nll": "Negative log-likelihood (nats)",
    "brier": "Brier score",
    "ece": "Expected calibration error (ECE)",
    "adaptive_ece": "Adaptive ECE",
    "classwise_ece": "Classwise ECE",
    "mce": "Maximum calibration error",
}


# Names of metrics that are turned around so that larger is better, such as neg_nll.
_TURNED_AROUND = {"neg", "negative", "negated", "minus", "inv", "inverse", "inverted"}


def is_turned_around(log_key: str) -> bool:
    """Whether a log key, such as eval_neg_nll, names a metric with the other sign, or its inverse."""
    return not _TURNED_AROUND.isdisjoint(log_key.lower().split("_"))


def lower_is_better(log_key: str) -> bool:
    """Whether a log key, such as eval_ece_calibrated, names one of these metrics and smaller is better."""
    name = "_" + log_key.removesuffix("_calibrated")
    errors = [f"_{key}" for key in LOGGED_METRICS if key != "accuracy"]
    return name.endswith(tuple(errors)) and not is_turned_around(name)


class RowScores(NamedTuple):
    """The confidence, correctness and proper scores of n rows, each (n,), float64."""

    confidence: FloatArray
    correct: FloatArray  # 0.0 or 1.0
    nll: FloatArray
    brier: FloatArray
    weights: FloatArray | None = None

    def part(self, rows: slice) -> RowScores:
        """The same columns for some of the rows."""
        weights = None if self.weights is None else self.weights[rows]
        return RowScores(
            self.confidence[rows],
            self.correct[rows],
            self.nll[rows],
            self.brier[rows],
            weights,
        )

    def terms(self) -> tuple[list[FloatArray], list[FloatArray]]:
        """The terms (n,) that the rows add to the bins and to the scores of `GroupSums`."""
        ones = np.ones(len(self.confidence))
        in_bin, scores = terms_of(ones, *self[:4])
        if self.weights is not None:
            in_bin = [self.weights * term for term in in_bin]
            scores = [self.weights * term for term in scores]
            scores[0] *= self.weights
        return [ones, *in_bin], scores


class ScoredChunk(NamedTuple):
    """A chunk of n rows with their probabilities and scores."""

    place: slice  # The rows among all.
    columns: NDArray[Any]  # The probabilities (C, n).
    labels: IntArray
    predicted: IntArray  # The first most probable class of each row.
    rows: RowScores


def score_chunks(
    probs: NDArray[Any], labels: NDArray[Any], weights: NDArray[Any] | None
) -> Iterator[ScoredChunk]:
    """Score checked rows in chunks, which is fastest if columns of probs are contiguous (order F)."""
    for part in checks.row_chunks(len(probs), max(4, probs.shape[1])):
        columns = np.ascontiguousarray(probs[part].T)
        confidence, predicted = winners(columns.T)
        own = labels[part].astype(np.intp)
        true = columns[own, np.arange(len(own))].astype(np.float64)
        squares = np.einsum("cn,cn->n", columns, columns, dtype=np.float64)
        nll = -np.log(np.maximum(true, SMALLEST_PROBABILITY))
        brier = np.maximum(squares - 2 * true + 1, 0)
        correct = (predicted == own).astype(np.float64)
        mass = None if weights is None else weights[part].astype(np.float64)
        rows = RowScores(confidence, correct, nll, brier, mass)
        yield ScoredChunk(part, columns, own, predicted, rows)


def score_top_labels(
    confidence: FloatArray, correct: NDArray[Any], weights: FloatArray | None
) -> RowScores:
    """Score rows of which only the top label is known: as two classes, "correct" and "wrong"."""
    right = correct.astype(np.float64)
    chance = np.where(right > 0, confidence, 1 - confidence)
    nll = -np.log(np.maximum(chance, SMALLEST_PROBABILITY))
    return RowScores(confidence, right, nll, 2 * (1 - chance) ** 2, weights)


def add_class_bins(class_bins: FloatArray, chunk: ScoredChunk) -> None:
    """Add a chunk to sums (3, C, M) in the bins of each class: rows, probabilities and rows of the class."""
    _, n_classes, n_bins = class_bins.shape
    columns = chunk.columns
    n = columns.shape[1]
    flat = columns.reshape(-1)
    own = np.ones(columns.shape)
    masses = columns.astype(np.float64, copy=False)
    if chunk.rows.weights is not None:
        own *= chunk.rows.weights
        masses = masses * chunk.rows.weights
    terms = [own.reshape(-1), masses.reshape(-1)]
    if n_classes > 3:
        # Only the few probabilities above the first edge need a bin.
        upper, bins = above_first_edge(flat, n_bins)
        slots = bins + upper // n * n_bins
        for sums, term in zip(class_bins[:2], terms, strict=True):
            below = term.copy()
            below[upper] = 0
            sums[:, 0] += below.reshape(-1, n).sum(axis=1)
        terms = [term[upper] for term in terms]
    else:
        slots = uniform_bins(flat, n_bins) + np.repeat(np.arange(n_classes) * n_bins, n)
    add_to(class_bins[:2], slots, terms)
    at_label = columns[chunk.labels, np.arange(n)]
    of_label = uniform_bins(at_label, n_bins) + chunk.labels * n_bins
    add_to(class_bins[2:], of_label, [own[0]])


class GroupSums(NamedTuple):
    """Sums of G groups of rows for the metrics of the top label and the proper scores."""

    bins: FloatArray  # (5, G, M): rows, weights, confidences, their squares, correct rows.
    scores: FloatArray  # (7, G): squared weights; NLL, Brier, confidence minus correct, with squares.

    @classmethod
    def empty(cls, n_groups: int, n_bins: int) -> GroupSums:
        """The sums of groups without rows."""
        return cls(np.zeros((5, n_groups, n_bins)), np.zeros((7, n_groups)))

    def add(self, rows: RowScores, groups: IntArray) -> None:
        """Add a chunk of n rows, each to its group (n,)."""
        n_bins = self.bins.shape[2]
        slots = groups * n_bins + uniform_bins(rows.confidence, n_bins)
        in_bin, scores = rows.terms()
        add_to(self.bins, slots, in_bin)
        add_to(self.scores, groups, scores)

    def n_rows(self) -> IntArray:
        """The numbers of rows (G,)."""
        return self.bins[0].sum(axis=1).astype(np.intp)

    def bin_sums(self) -> BinSums:
        """The sums (G, M) of the bins."""
        return BinSums(*self.bins[[1, 2, 4]])

    def effective_rows(self) -> FloatArray:
        """The numbers of rows (G,); for rows with weights, the effective sample sizes (Kish 1965)."""
        mass = self.bins[1].sum(axis=1)
        return np.divide(
            mass**2, self.scores[0], out=np.zeros_like(mass), where=self.scores[0] > 0
        )

    def mean(self, name: str) -> tuple[FloatArray, FloatArray]:
        """The mean (G,) of "nll", "brier", "gap" (confidence minus correct) or "accuracy", and its standard error."""
        right, mass = self.bins[4].sum(axis=1), self.bins[1].sum(axis=1)
        first = {"nll": 1, "brier": 3, "gap": 5}.get(name)
        sums = (
            np.stack([right, right])
            if first is None
            else self.scores[first : first + 2]
        )
        mean, square = np.divide(
            sums, mass, out=np.full_like(sums, np.nan), where=mass > 0
        )
        variance = np.maximum(square - mean**2, 0)
        return mean, np.sqrt(variance / np.maximum(self.effective_rows() - 1, 1))


def cells_of(confidence: FloatArray) -> IntArray:
    """The cell, 0 to `N_CELLS` - 1, of each confidence (n,), float64; cells rise with the confidence."""
    least = 2.0 ** -(_OCTAVES + _DEEP_OCTAVES)
    bits = np.clip(1.0 - confidence, least, 1 - 2.0**-53).view(np.int64)
    cells = (1023 << _CELL_BITS) - 1 - (bits >> (52 - _CELL_BITS))
    deep = cells >= _N_FINE
    if deep.any():
        first = (1023 - _OCTAVES) << _DEEP_BITS
        cells[deep] = _N_FINE + first - 1 - (bits[deep] >> (52 - _DEEP_BITS))
    return cells


def _cell_edges() -> FloatArray:
    """The edges (N_CELLS + 1,) of the confidences of the cells; the last cell ends at 1."""
    fine = ((1023 << _CELL_BITS) - np.arange(_N_FINE)) << (52 - _CELL_BITS)
    first = (1023 - _OCTAVES) << _DEEP_BITS
    deep = (first - np.arange(N_CELLS - _N_FINE)) << (52 - _DEEP_BITS)
    return np.append(1 - np.concatenate([fine, deep]).view(np.float64), 1)


def sum_shapes(
    n_classes: int, n_bins: int, *, by_class: bool
) -> dict[str, tuple[int, ...]]:
    """The shapes of the sums of a state, except for its cells; `by_class` decides about sums of classes."""
    # As in `GroupSums`: bins by predicted class, and scores of all rows.
    shapes: dict[str, tuple[int, ...]] = {
        "bins": (5, n_classes if by_class else 1, n_bins),
        "scores": (7, 1),
    }
    if by_class:
        # Rows, probabilities and rows of the class in bins of each class's probability.
        shapes["class_bins"] = (3, n_classes, n_bins)
    return shapes


def empty_sums(n_classes: int, n_bins: int, *, by_class: bool) -> dict[str, FloatArray]:
    """The sums of a state without rows, except for its cells."""
    shapes = sum_shapes(n_classes, n_bins, by_class=by_class)
    return {name: np.zeros(shape) for name, shape in shapes.items()}


def _check_size(n_classes: Any, n_bins: Any, by_class: Any, most: int) -> None:
    """Raise for arguments of a state that are out of range, or need more sums than these."""
    c = checks.check_integer("n_classes", n_classes, 1, "pass the columns of probs")
    m = checks.check_n_bins(n_bins)
    checks.check_flag("by_class", by_class)
    shapes = sum_shapes(c, m, by_class=by_class)
    n_sums = sum(math.prod(shape) for shape in shapes.values())
    check(
        n_sums <= most,
        f"{c:,} classes and {m:,} bins to need at most {most:,} sums",
        f"{n_sums:,}",
        "pass by_class=False",
    )


class CalibrationState:
    r"""Calibration metrics from sums that can be merged, for rows in batches, shards, processes or workers.

    Use it if the rows do not fit in memory. It needs only numpy, so any engine can run it: make a state for each part,
    `merge` them, and `compute` the metrics, which equal those of the functions of `hf_calib.metrics` for all rows, up
    to rounding. `update_logits` adds tensors on any device; the sums stay there until they are read.

    Args:
        n_classes: number of classes C.
        by_class: whether to keep sums of each class, for the classwise ECE; pass False for a large vocabulary.

    Notes:
        A state has O(C M) sums, and counts of rows in 105,728 cells of the confidence p, within which $1 - p$ varies by
        a factor of at most $1 + 2^{-12}$, or $1 + 2^{-8}$ if it is below $2^{-24}$. Equal-mass bins are computed from
        these cells, and are close to those of the rows. The rows of `update_logits` have two numbers each until they
        are merged or sent, so their adaptive ECE is exact.

    >>> state = CalibrationState(n_classes=2)
    >>> state.update(np.array([[0.9, 0.1], [0.2, 0.8]]), np.array([0, 0]))
    >>> other = CalibrationState(n_classes=2)
    >>> other.update(np.array([[0.6, 0.4]]), np.array([0]))
    >>> found = CalibrationState.from_bytes(other.to_bytes()).merge(state).compute()
    >>> {name: round(found[name], 3) for name in ("accuracy", "nll", "brier", "ece")}
    {'accuracy': 0.667, 'nll': 0.742, 'brier': 0.54, 'ece': 0.433}
    """

    def __init__(
        self, *, n_classes: int, n_bins: int = 15, by_class: bool = True
    ) -> None:
        _check_size(n_classes, n_bins, by_class, _MOST_SUMS)
        self.n_classes = int(n_classes)
        self.n_bins = int(n_bins)
        self.by_class = bool(by_class)
        self._sums = self._empty_sums()
        self._sums["cells"] = np.zeros((3, N_CELLS))
        # The numbers of rows of logits, of those that are not finite, of invalid indices, of invalid 0/1 labels, and of
        # invalid soft labels.
        self._counts = np.zeros(5)
        self._has_soft_labels = False
        self._on_device: LogitSums | None = None
        # The rows of logits that have been read, which are in the sums but not yet in their cells.
        self._rows = _NO_ROWS

    def _empty_sums(self) -> dict[str, FloatArray]:
        return empty_sums(self.n_classes, self.n_bins, by_class=self.by_class)

    @property
    def sums(self) -> dict[str, FloatArray]:
        """The sums by name, except that rows of logits are missing in the cells; waits for their device."""
        self._read_device()
        return self._sums

    def _read_device(self) -> None:
        """Add the sums of logits, if there are any, to those of numpy."""
        if self._on_device is None:
            return
        added, counts, top = self._on_device.fetch()
        self._on_device = None
        for name, sums in added.items():
            self._sums[name] += sums
        self._counts += counts
        self._rows = TopLabel(*np.hstack([self._rows, top]))

    @property
    def top_label_rows(self) -> TopLabel:
        """The confidences (N,) of the predictions of `update_logits`, and their correctness (N,), 1.0 or 0.0."""
        self._read_device()
        return self._rows

    @property
    def cells(self) -> FloatArray:
        """The sums (3, cells) of rows, of confidences and of correct rows, in cells of the confidence."""
        cells = self.sums["cells"]
        top = self.top_label_rows
        if len(top.confidence) > 0:
            cells = cells.copy()
            add_to(cells, cells_of(top.confidence), [1.0, *top])
        return cells

    def update(
        self, probs: ArrayLike, labels: ArrayLike, weights: ArrayLike | None = None
    ) -> None:
        """Add rows with labels (N,), or none if one is invalid; this is fastest if columns of probs are contiguous."""
        rows = checks.as_array("probs", probs)
        targets = checks.as_array("labels", labels)
        own = None if weights is None else checks.as_floats("weights", weights)
        checks.check_rows(rows, targets, own, self.n_classes)
        for chunk in score_chunks(rows, targets, own):
            self._add_chunk(chunk)

    def update_logits(
        self,
        logits: Tensor,
        labels: Tensor,
        *,
        multi_label: bool = False,
        soft_labels: bool = False,
    ) -> None:
        """Add a batch of tensors; the NLL is exact even if a probability underflows.

        Values are checked when the metrics are read, because a check here would wait for the device.

        Args:
            logits: (..., C), any float dtype.
            labels: (...) int in [0, C), or with multi_label (..., C) of 0 and 1; -100 is ignored. With soft_labels
                (..., C) float, shares that sum to 1, or -100 for every class.
            multi_label: if False, logits are one softmax per row. If True, each logit is a sigmoid with a label of 0 or
                1 and counts as one binary prediction, with confidence max(p, 1 - p) and Brier score (p - y)^2.
            soft_labels: if True, NLL and Brier score are those against the shares q, -sum q log p and sum (p - q)^2.
                All other metrics are of the most probable label, the first of several.

        >>> import torch
        >>> state = CalibrationState(n_classes=2)
        >>> state.update_logits(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
        >>> [round(state.compute()[name], 3) for name in ("accuracy", "nll", "brier", "ece")]
        [0.5, 0.72, 0.549, 0.425]
        """
        from hf_calib.metrics.on_device import LogitSums, check_batch

        checks.check_flag("multi_label", multi_label)
        checks.check_flag("soft_labels", soft_labels)
        way_out = "soft labels are of one softmax"
        both = multi_label and soft_labels
        check(not both, "one of multi_label and soft_labels", "both", way_out)
        kind = {"multi_label": multi_label, "soft_labels": soft_labels}
        check_batch(logits, labels, n_classes=self.n_classes, **kind)
        self._has_soft_labels |= soft_labels
        if self._on_device is None:
            self._on_device = LogitSums(self._empty_sums(), self.n_bins, logits.device)
        self._on_device.add(logits, labels, **kind)

    def all_reduce(self) -> None:
        """Share the rows of all processes of torch.distributed; each calls it once, after its last batch."""
        from hf_calib.metrics import on_device

        if on_device.n_processes() == 1:
            return
        own = np.array([[self.n_classes], [self.n_bins], [self.by_class]], dtype=int)
        sizes = [tuple(each[:, 0].tolist()) for each in on_device.gathered(own)]
        for theirs in sizes:
            check(
                theirs == max(sizes),
                f"every process to have the n_classes, n_bins and by_class {max(sizes)}",
                theirs,
                "evaluate the same model on all",
            )
        for sums in (*self.sums.values(), self._counts):
            sums[...] = on_device.summed(sums)
        parts = on_device.gathered(np.stack(self.top_label_rows))
        self._rows = TopLabel(*np.concatenate(parts, axis=1))

    def _add_chunk(self, chunk: ScoredChunk) -> None:
        """Add a chunk of checked and scored rows."""
        confidence = chunk.rows.confidence
        in_bin, scores = chunk.rows.terms()
        _, mass, stated, _, right = in_bin
        sums = self.sums
        add_to(sums["cells"], cells_of(confidence), [mass, stated, right])
        ones = np.ones_like(mass)
        sums["scores"][:, 0] += [ones @ term for term in scores]
        slots = uniform_bins(confidence, self.n_bins)
        if self.by_class:
            slots += chunk.predicted * self.n_bins
            add_class_bins(sums["class_bins"], chunk)
        add_to(sums["bins"], slots, in_bin)

    def merge(self, other: CalibrationState) -> CalibrationState:
        """Add the rows of another state to this one, and return this one, for use with `functools.reduce`."""
        is_state = isinstance(other, CalibrationState)
        requirement = "other to be a CalibrationState"
        way_out = "pass what was made by CalibrationState(n_classes=...)"
        checks.check_type(is_state, requirement, type(other).__name__, way_out)
        for name in ("n_classes", "n_bins", "by_class"):
            mine = getattr(self, name)
            theirs = getattr(other, name)
            requirement = f"the other state's {name} to be {mine}"
            way_out = "merge states that were made alike"
            check(mine == theirs, requirement, theirs, way_out)
        for state in (self, other):
            state._check_logits()
        self.sums["cells"] = self.cells
        self._rows = _NO_ROWS
        for name, sums in other._all_sums().items():
            self.sums[name] += sums
        self._counts += other._counts
        self._has_soft_labels |= other._has_soft_labels
        return self

    def _all_sums(self) -> dict[str, FloatArray]:
        """The sums, with all rows in the cells."""
        return {**self.sums, "cells": self.cells}

    def compute(self) -> dict[str, float]:
        """Return all metrics in the order of `LOGGED_METRICS`: nll in nats, brier in [0, 2], the others fractions."""
        top = self.top_label
        bins = self.bins
        n = bins.counts.sum()
        found = {name: top.mean(name)[0][0] for name in ("accuracy", "nll", "brier")}
        found["ece"] = binned_error(bins, n)
        if len(self.top_label_rows.confidence) == self.n_rows:
            options = {"n_bins": self.n_bins, "binning": "quantile"}
            found["adaptive_ece"] = top_label_error(self.top_label_rows, **options)
        else:
            ranked = self.equal_mass_bins()
            found["adaptive_ece"] = binned_error(ranked, ranked.counts.sum())
        if self.by_class:
            found["classwise_ece"] = np.nanmean(class_gaps(self.class_bins()))
        found["mce"] = binned_error(bins, n, "max")
        return {name: float(value) for name, value in found.items()}

    @property
    def top_label(self) -> GroupSums:
        """Return the sums of all rows as one group: by confidence bin, and of the proper scores."""
        self._check_has_rows()
        bins = self.sums["bins"].sum(axis=1, keepdims=True)
        return GroupSums(bins, self.sums["scores"])

    def _check_has_rows(self) -> None:
        """Raise unless there are rows of a weight above 0, all of which are valid."""
        self._check_logits()
        got = "only rows of weight 0" if self.n_rows else "none"
        way_out = "update it with predictions first; labels of -100 do not count"
        has_rows = bool(self.sums["bins"][1].any())
        check(has_rows, "the state to have rows", got, way_out)

    def _check_logits(self) -> None:
        """Raise if logits or labels that were added as tensors are invalid."""
        self._read_device()
        n_rows, not_finite, *invalid = self._counts.astype(int)
        if not_finite == 0 and not any(invalid):
            return
        allowed = (
            f"lie in 0..{self.n_classes - 1} or be -100",
            "be 0, 1 or -100",
            "be shares of at least 0 that sum to 1, or -100 for every class",
        )
        for n, requirement in zip(invalid, allowed, strict=True):
            check(
                n == 0,
                f"labels to {requirement}",
                f"{n} that do not",
                "check that the labels and the model's head mean the same classes",
            )
        check(
            not_finite == 0,
            "probabilities to be finite",
            f"NaN in {not_finite} of {n_rows} rows",
            "look for overflow in the model's logits",
        )

    @property
    def n_rows(self) -> int:
        """The number of rows."""
        return int(self.sums["bins"][0].sum())

    @property
    def weighted(self) -> bool:
        """Whether any weight is not 1, in which case the sum of (w - 1)^2 is not 0."""
        rows, mass = self.sums["bins"][:2].sum(axis=(1, 2))
        return bool(rows != mass or mass != self.sums["scores"][0, 0])

    @property
    def bins(self) -> BinSums:
        """The sums (M,) of the equal-width bins."""
        return BinSums(*(sums[0] for sums in self.top_label.bin_sums()))

    def equal_mass_bins(self) -> BinSums:
        """Return the sums (M,) of bins with equal shares of the rows; edges are between cells."""
        self._check_has_rows()
        return equal_shares(self.cells, self.n_bins, weighted=self.weighted)

    def class_bins(self) -> BinSums:
        """Return the sums (C, M) in bins of each class's probability."""
        check(
            self.by_class,
            "classes to be few enough for classwise sums",
            f"{self.n_classes:,} classes",
            "use metrics of the predicted class only",
        )
        self._check_has_rows()
        return BinSums(*self.sums["class_bins"])

    def to_bytes(self) -> bytes:
        """Return the state as bytes to send or store: a line of JSON and numbers; reading them executes no code."""
        _check_size(self.n_classes, self.n_bins, self.by_class, _MOST_SENT)
        check(
            not self._has_soft_labels,
            "the state to be of rows with one label for to_bytes",
            "soft labels, whose scores do not fit the label",
            "merge such states where they were made, or send compute()",
        )
        header = json.dumps([_FORMAT, self.n_classes, self.n_bins, self.by_class])
        self._check_logits()
        numbers = np.concatenate([sums.ravel() for sums in self._all_sums().values()])
        return (
            header.encode() + b"\n" + zlib.compress(numbers.astype("<f8").tobytes(), 1)
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> CalibrationState:
        """Read a state that `to_bytes` wrote; other bytes raise an error, and need no more memory than a state."""
        are_bytes = isinstance(data, bytes | bytearray | memoryview)
        way_out = "pass what to_bytes returned"
        checks.check_type(are_bytes, "data to be bytes", type(data).__name__, way_out)
        try:
            return cls._unpacked(bytes(data))
        except (ValueError, TypeError, zlib.error) as error:
            got = f"{len(data):,} bytes that are none ({error})"
            requirement = "be bytes that to_bytes wrote"
            raise InputValueError(
                expected("the state", requirement, got, "send them unchanged")
            ) from error

    @classmethod
    def _unpacked(cls, data: bytes) -> CalibrationState:
        header, _, packed = data.partition(b"\n")
        if len(header) > _LONGEST_HEADER:
            raise ValueError("no header")
        written, n_classes, n_bins, by_class = json.loads(header)
        way_out = "read it with the version that wrote it"
        check(
            written == _FORMAT, f"the format to be {_FORMAT!r}", repr(written), way_out
        )
        # The size in the header is checked before anything is allocated or unpacked.
        _check_size(n_classes, n_bins, by_class, _MOST_SENT)
        state = cls(n_classes=n_classes, n_bins=n_bins, by_class=by_class)
        n_sums = sum(sums.size for sums in state.sums.values())
        unpacking = zlib.decompressobj()
        content = unpacking.decompress(packed, 8 * n_sums + 1)
        is_whole = unpacking.eof and not unpacking.unused_data
        if len(content) != 8 * n_sums or not is_whole:
            raise ValueError(f"not {n_sums:,} numbers")
        numbers = np.frombuffer(content, "<f8")
        start = 0
        for sums in state.sums.values():
            sums[...] = numbers[start : start + sums.size].reshape(sums.shape)
            start += sums.size
        state._check_sums()
        return state

    @np.errstate(all="ignore")  # The sums may be any numbers.
    def _check_sums(self) -> None:
        """Raise ValueError unless rows can have these sums; comparisons are False for NaN."""
        rows, mass, stated, squares, right = self.sums["bins"]
        edges = uniform_edges(self.n_bins)
        low = edges[:-1]
        high = edges[1:]
        of_cells, cells_stated, cells_right = self.sums["cells"]
        cell_edges = _cell_edges()
        cell_ends = (cell_edges[:-1], cell_edges[1:])
        n_rows = rows.sum()
        total = mass.sum()
        all_stated = stated.sum()
        all_right = right.sum()
        weights_squared, nll, nll_squares, brier, brier_squares, gap, gap_squares = (
            self.sums["scores"][:, 0]
        )
        slack = _SLACK * total
        # The NLL is at least that of the predicted class, and convex.
        least_nll = -total * np.log(all_stated / total) if total > 0 else 0.0
        holds: dict[str, Any] = {}
        are_finite = [np.isfinite(sums).all() for sums in self.sums.values()]
        holds["numbers"] = all(are_finite)
        are_counts = (rows >= 0) & (rows == np.floor(rows))
        holds["rows"] = are_counts & (n_rows < 2**53)
        holds["weights"] = (mass >= 0) & ((mass == 0) | (rows >= 1))
        holds["confidences"] = _can_be(mass, stated, low, high, squares)
        holds["correct rows"] = (right >= 0) & (right <= mass * (1 + _SAME))
        can_be_right = (cells_right >= 0) & (cells_right <= of_cells * (1 + _SAME))
        can_be_stated = _can_be(of_cells, cells_stated, *cell_ends)
        holds["cells"] = (of_cells >= 0) & can_be_right & can_be_stated
        for by_cell, all_rows in (
            (of_cells, total),
            (cells_stated, all_stated),
            (cells_right, all_right),
        ):
            same = _is_same(by_cell.sum(), all_rows, total)
            holds["sums of cells"] = holds.get("sums of cells", True) & same
        most_squared = total**2 * (1 + _SAME)
        least_squared = total**2 * (1 - _SAME)
        holds["squared weights"] = (weights_squared <= most_squared) & (
            weights_squared * n_rows >= least_squared
        )
        in_range = (nll >= least_nll - slack) & (nll <= _MOST_NATS * total)
        least_squares = nll**2 * (1 - _SAME) - slack * total
        squares_fit = (nll_squares * total >= least_squares) & (
            nll_squares <= _MOST_NATS * (nll + slack)
        )
        holds["NLL"] = in_range & squares_fit
        is_score = _can_be(total, brier, 0, 2, brier_squares)
        holds["Brier score"] = is_score & (brier >= gap_squares - slack)
        is_difference = _is_same(gap, all_stated - all_right, total)
        holds["gaps"] = is_difference & _can_be(total, gap, -1, 1, gap_squares)
        if self.by_class:
            holds |= self._class_checks(total, low, high)
        wrong = [name for name, each in holds.items() if not np.all(each)]
        if wrong:
            raise ValueError(f"no rows have these {wrong[0]}")

    def _class_checks(
        self, total: float, low: FloatArray, high: FloatArray
    ) -> dict[str, Any]:
        mass, probabilities, true = self.sums["class_bins"]
        by_class = mass.sum(axis=1)
        # Each row counts in every class or, of independent labels, each decision counts in its own class.
        is_softmax = bool(_is_same(by_class, total, total).all())
        of_rows = _is_same(by_class.sum(), total, total)
        if is_softmax and self.n_classes > 1:
            # Each row has one class, and probabilities that sum to 1.
            all_probabilities = probabilities.sum()
            off = np.abs(all_probabilities - total)
            of_rows = _is_same(true.sum(), total, total)
            tolerance = checks.row_sum_tolerance(self.n_classes)
            of_rows &= off <= (tolerance + _SLACK) * total
        return {
            "rows of classes": (mass >= 0) & of_rows,
            "true rows of classes": (true >= 0) & (true <= mass * (1 + _SAME)),
            "probabilities of classes": _can_be(mass, probabilities, low, high),
        }


def _can_be(
    mass: Any, first: Any, low: Any, high: Any, second: Any = None
) -> NDArray[np.bool_]:
    """Whether values in [low, high] with weights of this sum can have these sums, and sums of squares if given."""
    slack = _SLACK * mass
    found = (first >= low * mass - slack) & (first <= high * mass + slack)
    if second is not None:
        least, most = _squares_between(mass, first, low, high)
        found &= (second >= least - slack) & (second <= most + slack)
    return np.asarray(found)


def _squares_between(mass: Any, first: Any, low: Any, high: Any) -> tuple[Any, Any]:
    """The least and the largest sum of squares of values in [low, high] with this sum."""
    least = first * (first / np.where(mass > 0, mass, 1))
    return least, (low + high) * first - low * high * mass


def _is_same(ours: Any, theirs: Any, scale: Any) -> NDArray[np.bool_]:
    return np.asarray(np.abs(ours - theirs) <= _SAME * scale)
