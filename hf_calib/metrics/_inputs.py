"""What every metric asks of its inputs, checked once and worded once."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_calib._checks import did_you_mean, expected

# Wide enough for float16 rows and for probabilities written to a file with three decimals;
# far too narrow for logits or sigmoid outputs to slip through.
ROW_SUM_TOLERANCE = 1e-3
RANGE_TOLERANCE = 1e-6


def check_n_bins(n_bins: int) -> int:
    """Return the number of bins as an int, or say why it is none."""
    way_out = "the papers use n_bins=15"
    try:
        count = operator.index(n_bins)
    except TypeError:
        raise TypeError(expected("n_bins", "be an integer", repr(n_bins), way_out)) from None
    if count < 1 or isinstance(n_bins, bool):
        raise ValueError(expected("n_bins", "be at least 1", n_bins, way_out))
    return count


def check_choice(argument: str, value: str, choices: Sequence[str]) -> None:
    """Refuse a value that is not one of the choices."""
    if value not in choices:
        requirement = f"be one of {', '.join(map(repr, choices))}"
        raise ValueError(expected(argument, requirement, repr(value), did_you_mean(value, choices)))


def check_probs_and_labels(probs: ArrayLike, labels: ArrayLike) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return probs (N, C) in their own float dtype and labels (N,) as int64.

    The matrix is not copied: whoever reduces it does so in float64.
    """
    checked = _check_probs(np.asarray(probs))
    return checked, _check_labels(np.asarray(labels), *checked.shape)


def _check_probs(probs: NDArray[Any]) -> NDArray[Any]:
    if not np.issubdtype(probs.dtype, np.floating):
        way_out = "pass probs.astype(float)"
        raise TypeError(expected("probs", "be a float array", f"dtype {probs.dtype}", way_out))
    if probs.ndim != 2:
        way_out = "flatten leading axes; for a positive-class probability p pass np.stack([1 - p, p], axis=1)"
        raise ValueError(expected("probs", "have shape (N, C)", f"shape {probs.shape}", way_out))
    if probs.size == 0:
        way_out = "metrics are undefined without examples"
        raise ValueError(expected("probs", "hold at least one value", f"shape {probs.shape}", way_out))
    with np.errstate(over="ignore", invalid="ignore"):
        row_sums = probs.sum(axis=1, dtype=np.float64)
    # A finite sum needs finite terms, so good input is not read once more.
    if not np.isfinite(row_sums).all() and not np.isfinite(probs).all():
        raise ValueError(_not_finite(probs))
    lowest, highest = probs.min(), probs.max()
    if lowest < -RANGE_TOLERANCE or highest > 1 + RANGE_TOLERANCE:
        got = f"values from {lowest:.6g} to {highest:.6g}"
        way_out = "these look like logits: pass scipy.special.softmax(logits, axis=1)"
        raise ValueError(expected("probs", "lie in [0, 1]", got, way_out))
    _check_row_sums(row_sums, probs.shape[1])
    return probs


def _not_finite(probs: NDArray[Any]) -> str:
    bad = ~np.isfinite(probs)
    rows = np.flatnonzero(bad.any(axis=1))
    got = f"{bad.sum()} NaN or infinite values in {len(rows)} of {len(probs)} rows (first in row {rows[0]})"
    return expected("probs", "be finite", got, "look for overflow in the model's logits")


def _check_row_sums(row_sums: NDArray[np.float64], n_classes: int) -> None:
    distance = np.abs(row_sums - 1)
    worst = int(distance.argmax())
    if distance[worst] <= ROW_SUM_TOLERANCE:
        return
    way_out = (
        "for one sigmoid output p pass np.hstack([1 - p, p])"
        if n_classes == 1
        else "pass softmax probabilities; several independent labels are not one distribution"
    )
    got = f"{row_sums[worst]:.6g} in row {worst}"
    raise ValueError(expected("each row of probs", "sum to 1", got, way_out))


def _check_labels(labels: NDArray[Any], n_examples: int, n_classes: int) -> NDArray[np.int64]:
    if labels.shape != (n_examples,):
        way_out = "pass one class index per row of probs"
        raise ValueError(expected("labels", f"have shape ({n_examples},)", f"shape {labels.shape}", way_out))
    if not np.issubdtype(labels.dtype, np.integer):
        way_out = "pass class indices, labels.astype(int)"
        raise TypeError(expected("labels", "be integers", f"dtype {labels.dtype}", way_out))
    outside = np.flatnonzero((labels < 0) | (labels >= n_classes))
    if len(outside):
        row = outside[0]
        got = f"{labels[row]} in row {row} ({len(outside)} such rows)"
        way_out = (
            "drop ignored rows first: keep = labels != -100"
            if labels[row] == -100
            else "check that labels and columns of probs mean the same classes"
        )
        raise ValueError(expected("labels", f"lie in 0..{n_classes - 1}", got, way_out))
    return labels.astype(np.int64, copy=False)
