"""The metrics of several labels a row, each label a problem of two outcomes, as functions of how often a row occurs.

A resample of the rows is told by its counts; the data themselves are counts of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import csr_array

from hf_calib._errors import InputTypeError, check, expected
from hf_calib.metrics.checks import RANGE_TOLERANCE, FloatArray, IntArray, as_array, row_chunks
from hf_calib.metrics.sums import BinSums, uniform_bins

UNKNOWN = -100  # a label that is not known: its decision is left out
_SMALLEST = np.finfo(np.float64).tiny  # what a probability of 0 counts as, as in `negative_log_likelihood`
_BLOCK_ELEMENTS = 2**18  # of a block of resamples: its half a dozen temporaries stay near the cache


class Decisions(NamedTuple):
    """Checked probabilities (N, C) float64 with their labels, and which of these are known; both (N, C) bool."""

    probs: FloatArray
    true: NDArray[np.bool_]
    known: NDArray[np.bool_]


def check_decisions(probs: ArrayLike, labels: ArrayLike, *, argument: str = "probs") -> Decisions:
    """Probabilities (N, C) in [0, 1], and labels (N, C) of 0 and 1, or -100 where one is not known."""
    rows = as_array(argument, probs)
    if not np.issubdtype(rows.dtype, np.floating):
        way_out = f"pass {argument}.astype(float)"
        raise InputTypeError(expected(argument, "be a float array", f"dtype {rows.dtype}", way_out))
    way_out = "pass one row an example, and one column a label"
    requirement = f"{argument} to have shape (N, C), N and C at least 1"
    check(rows.ndim == 2 and rows.size > 0, requirement, f"shape {rows.shape}", way_out)
    inside = (rows >= -RANGE_TOLERANCE) & (rows <= 1 + RANGE_TOLERANCE)  # NaN is not
    row, column = np.unravel_index(inside.argmin(), rows.shape)
    got = f"{rows[row, column]:.6g} in row {row}"
    check(inside.all(), f"{argument} to lie in [0, 1]", got, "pass sigmoid(logits)")
    targets = as_array("labels", labels)
    way_out = f"pass 0 or 1 for each column of {argument}"
    fits = targets.shape == rows.shape
    check(fits, f"labels to have shape {rows.shape}", f"shape {targets.shape}", way_out)
    valid = np.isin(targets, (0, 1, UNKNOWN))
    row, column = np.unravel_index(valid.argmin(), rows.shape)
    got = f"{targets[row, column]} in row {row}"
    check(valid.all(), "labels to be 0 or 1", got, "leave a decision out with -100")
    known = targets != UNKNOWN
    check(known.any(), "labels to be known somewhere", "-100 only", "pass labelled rows")
    return Decisions(np.clip(rows.astype(np.float64), 0, 1), targets == 1, known)


class LabelMetrics:
    """Metrics by label, and over all decisions together, of resamples of N fixed rows."""

    def __init__(self, decisions: Decisions, n_bins: int) -> None:
        probs, true, known = decisions
        self._n_rows, self._n_labels = probs.shape
        self._n_bins = n_bins
        # Per row and label: whether known, true, squared error, nats; then the same for all labels of the row.
        nats = -np.log(np.maximum(np.where(true, probs, 1 - probs), _SMALLEST))
        fields = [known, known & true, (probs - true) ** 2, nats]
        by_label = [np.where(known, field, 0.0) for field in fields]
        self._means = [np.column_stack([field, field.sum(axis=1)]) for field in by_label]
        # Gap and count of each label's bins: a sparse row of the resamples' matrix product for each example.
        rows, labels = np.nonzero(known)
        slots = labels * n_bins + uniform_bins(probs[rows, labels], n_bins)
        shape = (self._n_rows, self._n_labels * n_bins)
        gaps = (probs - true)[rows, labels]
        self._gaps = csr_array((gaps, (rows, slots)), shape).T.tocsr()
        self._counts = csr_array((np.ones(len(rows)), (rows, slots)), shape).T.tocsr()
        self._rankings = [
            _Ranking(probs[known[:, c], c], true[known[:, c], c]) for c in range(self._n_labels)
        ]
        self._known = [np.flatnonzero(known[:, c]) for c in range(self._n_labels)]
        self._micro = _Ranking(probs[known], true[known])
        self._rows_of_decisions = rows

    def evaluate(self, counts: IntArray) -> dict[str, FloatArray]:
        """Each metric (R, C + 1), the last column of all decisions, of counts (R, N) of each row; NaN if undefined."""
        blocks = [
            self._block(counts[part].astype(np.float64))
            for part in row_chunks(len(counts), self._n_rows * self._n_labels, elements=_BLOCK_ELEMENTS)
        ]
        return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}

    def _block(self, counts: FloatArray) -> dict[str, FloatArray]:
        known, true, squared, nats = (counts @ field for field in self._means)
        with np.errstate(invalid="ignore", divide="ignore"):
            found = {"prevalence": true / known, "brier": squared / known, "nll": nats / known}
            gaps, sizes = (self._in_bins((bins @ counts.T).T) for bins in (self._gaps, self._counts))
            found["ece"] = np.abs(gaps).sum(axis=2) / known
            found["mce"] = np.where(sizes > 0, np.abs(gaps) / sizes, 0).max(axis=2)
            found["mce"][known == 0] = np.nan
            ranked = [
                ranking.evaluate(counts[:, rows])
                for ranking, rows in zip(self._rankings, self._known, strict=True)
            ]
            ranked.append(self._micro.evaluate(counts[:, self._rows_of_decisions]))
        for i, name in enumerate(("auroc", "average_precision")):
            found[name] = np.stack([pair[i] for pair in ranked], axis=1)
        return found

    def _in_bins(self, sums: FloatArray) -> FloatArray:
        """(R, C + 1, M): the bins of each label, and of all together."""
        by_label = sums.reshape(len(sums), self._n_labels, self._n_bins)
        return np.concatenate([by_label, by_label.sum(axis=1, keepdims=True)], axis=1)


class _Ranking:
    """Area under the ROC curve and average precision of scores (N,) and outcomes (N,); ties count as one threshold."""

    def __init__(self, scores: FloatArray, true: NDArray[np.bool_]) -> None:
        self._order = np.argsort(-scores, kind="stable")
        self._true = true[self._order]
        ranked = scores[self._order]
        self._ends = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))  # of each distinct score

    def evaluate(self, counts: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Both (R,) of samples that hold each row counts (R, N) times; NaN without a true one, or a false one."""
        if not self._true.any():
            nothing = np.full(len(counts), np.nan)
            return nothing, nothing
        ranked = counts[:, self._order]
        accepted = ranked.cumsum(axis=1)[:, self._ends]
        hits = (ranked * self._true).cumsum(axis=1)[:, self._ends]
        new_hits = np.diff(hits, axis=1, prepend=0)
        false = accepted - hits
        new_false = np.diff(false, axis=1, prepend=0)
        n_true, n_false = hits[:, -1], false[:, -1]
        area = (new_false * (hits - new_hits / 2)).sum(axis=1) / (n_true * n_false)
        precision = hits / np.maximum(accepted, 1)
        return area, (new_hits * precision).sum(axis=1) / n_true


def label_bins(decisions: Decisions, n_bins: int) -> BinSums:
    """The sums (C, M) of each label's probabilities and outcomes in bins of equal width."""
    rows, labels = np.nonzero(decisions.known)
    probs, true = decisions.probs[rows, labels], decisions.true[rows, labels]
    slots, size = labels * n_bins + uniform_bins(probs, n_bins), decisions.probs.shape[1] * n_bins
    totals = (np.bincount(slots, weights, minlength=size) for weights in (None, probs, true))
    return BinSums(*(total.reshape(-1, n_bins).astype(np.float64) for total in totals))


def macro(by_label: Mapping[str, NDArray[Any]]) -> dict[str, FloatArray]:
    """The mean (R,) of each metric (R, C + 1) over the labels for which it is defined; NaN where it is for none."""
    means = {}
    for name, values in by_label.items():
        labels = values[:, :-1]
        defined = ~np.isnan(labels)
        with np.errstate(invalid="ignore"):
            means[name] = np.where(defined, labels, 0).sum(axis=1) / defined.sum(axis=1)
    return means
