"""Checks of logits and labels, and the walk over rows block by block, for all scalers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_calib._errors import InputTypeError, check, expected, few
from hf_calib.metrics.checks import ROW_SUM_TOLERANCE, as_array, check_weights, row_chunks

FloatArray = NDArray[np.float64]

IGNORED_LABEL = -100  # as in torch and transformers
_LARGEST = 1e100  # whose squares are finite


def blocks(logits: NDArray[Any]) -> Iterator[tuple[slice, NDArray[np.float64]]]:
    """Walk over the rows of an (N, C) array, widened to float64 block by block, never as a whole."""
    for rows in row_chunks(*logits.shape):
        yield rows, logits[rows].astype(np.float64)


def as_logits(logits: ArrayLike) -> NDArray[Any]:
    """Check logits of any shape that ends in classes. -inf is allowed: it masks a class."""
    logits = as_array("logits", logits)
    if logits.dtype.kind not in "fiu":
        way_out = "pass an array of floats"
        raise InputTypeError(expected("logits", "hold real numbers", f"dtype {logits.dtype}", way_out))
    requirement, way_out = "logits to hold at least one example", "pass an (N, C) array"
    check(logits.ndim > 0 and logits.size > 0, requirement, f"shape {logits.shape}", way_out)
    rows = logits.reshape(-1, logits.shape[-1])
    bad = sum(
        np.count_nonzero(~(block.max(axis=1) < np.inf)) for _, block in blocks(rows)
    )  # of NaN false, too
    got = f"NaN or +inf in {bad} of {len(rows)} rows"
    check(not bad, "logits to be finite (or -inf for a masked class)", got, "check the model's output")
    return logits


def as_matrix(logits: ArrayLike, *, least_columns: int) -> NDArray[Any]:
    """Check (N, C) logits to fit on."""
    logits = as_logits(logits)
    shape = f"shape {logits.shape}"
    check(logits.ndim == 2, "logits to have shape (N, C)", shape, "use logits.reshape(-1, num_labels)")
    way_out = "for one logit per example, pass multi_label=True, which uses the sigmoid"
    check(logits.shape[1] >= least_columns, "logits to have at least 2 classes", shape, way_out)
    low, high = float(logits.min()), float(logits.max())
    way_out = "divide them by a number, which a temperature makes up for"
    check(high <= _LARGEST, f"logits to be at most {_LARGEST:g}", f"{high:g}", way_out)
    within = logits.shape[1] > 1 and low >= 0 and high <= 1 and ((logits > 0) & (logits < 1)).any()
    if within and np.abs(logits.sum(axis=1, dtype=np.float64) - 1).max() <= ROW_SUM_TOLERANCE:
        warnings.warn(
            "The logits lie in [0, 1] and their rows sum to 1, as probabilities do. A map of probabilities in place of "
            "logits calibrates badly. Pass numpy.log(probs) instead.",
            UserWarning,
            stacklevel=4,
        )
    return logits


def as_class_labels(labels: ArrayLike, logits: NDArray[Any]) -> NDArray[np.int64]:
    """Check one class number per row of the logits."""
    labels = as_array("labels", labels)
    n, c = logits.shape
    way_out = "pass one class number per example (multi_label=True takes 0/1 labels of shape (N, C))"
    check(labels.shape == (n,), f"labels to have shape ({n},)", f"shape {labels.shape}", way_out)
    if labels.dtype.kind not in "iu":
        way_out = "convert them with labels.astype(int)"
        if labels.dtype.kind in "USO":
            way_out = "number them by the columns of logits: [names.index(label) for label in labels]"
        raise InputTypeError(expected("labels", "be integers", f"dtype {labels.dtype}", way_out))
    requirement = f"labels to lie in 0..{c - 1}"
    n_ignored = np.count_nonzero(labels == IGNORED_LABEL)
    way_out = "drop ignored positions first: keep = labels != -100; logits[keep], labels[keep]"
    check(not n_ignored, requirement, f"{n_ignored} labels of -100", way_out)
    low, high = labels.min(), labels.max()
    way_out = "number the classes by the columns of logits"
    check(low >= 0 and high < c, requirement, f"labels from {low} to {high}", way_out)
    n_masked = np.count_nonzero(np.isneginf(logits[np.arange(n), labels]))
    got, way_out = f"-inf for the label of {n_masked} examples", "mask only classes that cannot be the label"
    check(not n_masked, "logits to be finite for every label", got, way_out)
    return labels.astype(np.int64, copy=False)


def without_zero_weights(
    logits: NDArray[Any], labels: NDArray[np.int64], sample_weight: ArrayLike | None
) -> tuple[NDArray[Any], NDArray[np.int64], FloatArray | None]:
    """The rows that have a weight, and their weights with mean 1; None where there are none."""
    weights = check_weights(sample_weight, len(labels))
    if weights is None:
        return logits, labels, None
    kept = slice(None) if weights.all() else weights > 0
    return logits[kept], labels[kept], weights[kept] / weights[kept].mean()


def as_binary_labels(
    labels: ArrayLike, logits: NDArray[Any]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_] | None]:
    """Check a 0/1 label for every logit; return where it is 1, and where it is known (None: everywhere)."""
    labels = as_array("labels", labels)
    requirement = f"labels to have the logits' shape {logits.shape}"
    way_out = "multi_label=True takes a 0/1 label for every logit"
    check(labels.shape == logits.shape, requirement, f"shape {labels.shape}", way_out)
    positive = labels == 1
    known = positive | (labels == 0)
    if known.all():
        return positive, None
    others = labels[~known & (labels != IGNORED_LABEL)]
    way_out = "pass hard labels, and -100 where a label is not known"
    check(not len(others), "labels to be 0 or 1", f"values such as {few(others[:1].tolist())}", way_out)
    check(bool(known.any()), "labels to be 0 or 1", "-100 everywhere", "pass at least one label of 0 or 1")
    return positive, known
