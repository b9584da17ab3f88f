"""What one pass takes of a chunk of rows: their confidences, whether they are right, and their proper scores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hf_calib._errors import InputTypeError, InputValueError, expected
from hf_calib.metrics.checks import (
    CHUNK_ELEMENTS,
    RANGE_TOLERANCE,
    ROW_SUM_TOLERANCE,
    FloatArray,
    IntArray,
    row_chunks,
)
from hf_calib.metrics.scores import SMALLEST_PROBABILITY
from hf_calib.metrics.sums import winners

MOST_AT_ONCE = 2**16  # rows, see `ExactSums`


class RowError(InputValueError):
    """A row that is no distribution, or has no valid label or weight.

    Args:
        row: its number, from 0 on, in what was given.
        requirement: on it.
        got: what is there.
        way_out: what to do.
    """

    def __init__(self, row: int, argument: str, requirement: str, got: str, way_out: str) -> None:
        super().__init__(expected(f"{argument} of row {row:,}", requirement, got, way_out))
        self.row = row
        self.told = (argument, requirement, got, way_out)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.row, *self.told)

    def at(self, place: str, first: int) -> InputValueError:
        """The same error, of the row of a file whose first row this chunk's is."""
        argument, requirement, got, way_out = self.told
        return InputValueError(
            expected(f"{argument} of row {first + self.row:,} in {place}", requirement, got, way_out)
        )


class RowScores(NamedTuple):
    """A chunk of n rows, scored.

    Args:
        columns: (C, n), the probabilities.
        labels: (n,) in [0, C).
        weights: (n,), or None.
        confidences: (n,) float64, of the first most probable class.
        predicted: (n,), that class.
        correct: (n,) bool, whether it is the label.
        true_probs: (n,), the probability of the label.
    """

    columns: NDArray[Any]
    labels: IntArray
    weights: FloatArray | None
    confidences: FloatArray
    predicted: IntArray
    correct: NDArray[np.bool_]
    true_probs: NDArray[Any]

    def negative_logs(self) -> FloatArray:
        """The negative log-likelihood (n,)."""
        wide = self.true_probs.astype(np.float64, copy=False)
        return -np.log(np.maximum(wide, SMALLEST_PROBABILITY))

    def squared_distances(self) -> FloatArray:
        """The squared distance (n,) from the one-hot label."""
        squares = np.zeros(len(self.labels))
        for column in self.columns:
            wide = column.astype(np.float64, copy=False)
            squares += wide * wide
        squares -= 2 * self.true_probs.astype(np.float64, copy=False)
        return np.maximum(squares + 1, 0)


def check_rows(
    probs: NDArray[Any], labels: NDArray[Any], weights: NDArray[Any] | None, n_classes: int
) -> None:
    """Raise unless all rows are distributions with a label and a weight.

    Args:
        probs: (N, C) float.
        labels: (N,) int.
        weights: (N,) float of at least 0, or None.
        n_classes: C.

    Raises:
        TypeError: if a dtype is wrong.
        ValueError: if shapes do not fit; a `RowError` for the first row that is wrong.
    """
    _check_arrays(probs, labels, weights, n_classes)
    for part in _chunks(probs):
        chunk = (probs[part].T, labels[part], None if weights is None else weights[part])
        if not _all_fit(*chunk):
            raise _first_bad_row(*chunk, part.start)


def score_chunks(
    probs: NDArray[Any], labels: NDArray[Any], weights: NDArray[Any] | None
) -> Iterator[tuple[slice, RowScores]]:
    """Score rows that were checked, chunk by chunk; fastest where columns of probs lie in one piece (order F)."""
    for part in _chunks(probs):
        columns = np.ascontiguousarray(probs[part].T)
        n_rows = columns.shape[1]
        own = labels[part].astype(np.intp)
        confidences, predicted = winners(columns.T)
        scores = RowScores(
            columns,
            own,
            None if weights is None else weights[part].astype(np.float64, copy=False),
            confidences,
            predicted.astype(np.intp, copy=False),
            predicted == own,
            columns.ravel().take(own * n_rows + np.arange(n_rows)),
        )
        yield part, scores


def _chunks(probs: NDArray[Any]) -> Iterator[slice]:
    n_rows, n_classes = probs.shape
    return row_chunks(n_rows, n_classes, elements=min(CHUNK_ELEMENTS, MOST_AT_ONCE * n_classes))


def _check_arrays(
    probs: NDArray[Any], labels: NDArray[Any], weights: NDArray[Any] | None, n_classes: int
) -> None:
    if not np.issubdtype(probs.dtype, np.floating):
        got = f"dtype {probs.dtype}"
        raise InputTypeError(expected("probs", "be a float array", got, "pass probs.astype(float)"))
    if probs.ndim != 2 or probs.shape[1] != n_classes:
        way_out = "use one state for each set of classes"
        got = f"shape {probs.shape}"
        raise InputValueError(expected("probs", f"have shape (N, {n_classes})", got, way_out))
    if not np.issubdtype(labels.dtype, np.integer):
        got, way_out = f"dtype {labels.dtype}", "pass class indices, labels.astype(int)"
        raise InputTypeError(expected("labels", "be integers", got, way_out))
    if weights is not None and weights.dtype.kind not in "biuf":
        got, way_out = f"dtype {weights.dtype}", "pass an array of floats"
        raise InputTypeError(expected("weights", "hold real numbers", got, way_out))
    for name, values in (("labels", labels), ("weights", weights)):
        if values is not None and values.shape != probs.shape[:1]:
            way_out = "pass one for each row of probs"
            requirement = f"have shape {probs.shape[:1]}"
            raise InputValueError(expected(name, requirement, f"shape {values.shape}", way_out))


def _all_fit(columns: NDArray[Any], labels: NDArray[Any], weights: FloatArray | None) -> bool:
    """Whether all rows of a chunk are as they should be; NaN makes every comparison false."""
    if not columns.shape[1]:
        return True
    with np.errstate(over="ignore", invalid="ignore"):
        off = np.abs(_row_sums(columns) - 1).max()
        lowest, highest = columns.min(), columns.max()
    fits = off <= ROW_SUM_TOLERANCE and lowest >= -RANGE_TOLERANCE and highest <= 1 + RANGE_TOLERANCE
    fits &= labels.min() >= 0 and labels.max() < len(columns)
    return bool(fits and (weights is None or (weights.min() >= 0 and np.isfinite(weights.max()))))


def _row_sums(columns: NDArray[Any]) -> NDArray[Any]:
    return np.asarray(columns.sum(axis=0, dtype=np.promote_types(columns.dtype, np.float32)))


def _first_bad_row(
    columns: NDArray[Any], labels: NDArray[Any], weights: FloatArray | None, first: int
) -> RowError:
    """What is wrong with the first row that is."""
    with np.errstate(over="ignore", invalid="ignore"):
        sums = _row_sums(columns)
    outside = (columns < -RANGE_TOLERANCE) | (columns > 1 + RANGE_TOLERANCE)
    n_classes = len(columns)
    wrong = {
        "not finite": ~np.isfinite(columns).all(axis=0),
        "outside": outside.any(axis=0),
        "sum": ~(np.abs(sums - 1) <= ROW_SUM_TOLERANCE),
        "label": (labels < 0) | (labels >= n_classes),
        "weight": np.zeros(len(labels), bool) if weights is None else ~((weights >= 0) & (weights < np.inf)),
    }
    row = min(int(np.argmax(bad)) for bad in wrong.values() if bad.any())
    fault = next(name for name, bad in wrong.items() if bad[row])
    place = first + row
    if fault == "label":
        way_out = "check that labels and columns of probs mean the same classes"
        if labels[row] == -100:
            way_out = "drop ignored rows first: keep = labels != -100"
        return RowError(place, "the label", f"lie in 0..{n_classes - 1}", str(labels[row]), way_out)
    if fault == "weight":
        assert weights is not None
        way_out = "give each row a weight; 0 leaves it out"
        return RowError(place, "the weight", "be a finite number of at least 0", str(weights[row]), way_out)
    values = columns[:, row]
    if fault == "not finite":
        got = f"{values[~np.isfinite(values)][0]}"
        return RowError(place, "the scores", "be finite", got, "look for overflow in the model's logits")
    if fault == "outside":
        got = f"{values[outside[:, row]][0]:.6g}"
        way_out = "if these are logits, say so: columns logit_<class>, or the softmax of them"
        return RowError(place, "the probabilities", "lie in [0, 1]", got, way_out)
    way_out = "pass softmax probabilities; several independent labels are not one distribution"
    return RowError(place, "the probabilities", "sum to 1", f"{sums[row]:.6g}", way_out)
