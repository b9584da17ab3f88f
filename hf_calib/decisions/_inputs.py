"""Checks of what all rules are fitted on and applied to."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_calib._errors import InputValueError, expected, few
from hf_calib.metrics.checks import FloatArray, IntArray, as_floats, check_probs, check_probs_and_labels


def class_rows(probs: ArrayLike, labels: ArrayLike) -> tuple[FloatArray, IntArray]:
    """Check probs (N, C) that sum to 1 in each row, and labels (N,); return both, probs as they are served."""
    checked, targets = check_probs_and_labels(probs, labels)
    return as_served(_several(checked)), targets


def class_probs(probs: ArrayLike, n_classes: int) -> FloatArray:
    """Check probs (N, C) to decide on, with the classes of `fit`."""
    return as_served(_same_classes(check_probs(probs), n_classes))


def label_rows(probs: ArrayLike, labels: ArrayLike) -> tuple[FloatArray, NDArray[np.bool_]]:
    """Check probs (N, C) of independent labels, and which of them are true, (N, C) of 0 and 1."""
    checked = label_probs(probs)
    targets = as_floats("labels", labels)
    if targets.shape != checked.shape:
        got = f"shape {targets.shape}"
        way_out = "pass 0 or 1 for every label of every row"
        raise InputValueError(expected("labels", f"have shape {checked.shape}", got, way_out))
    wrong = ~np.isin(targets, (0, 1))
    if wrong.any():
        row = np.flatnonzero(wrong.any(axis=1))[0]
        got = f"{targets[row][wrong[row]][0]:g} in row {row} ({wrong.any(axis=1).sum()} such rows)"
        raise InputValueError(expected("labels", "be 0 or 1", got, "drop rows whose labels are not known"))
    return checked, targets == 1


def label_probs(probs: ArrayLike, n_labels: int | None = None) -> FloatArray:
    """Check probs (N, C) of independent labels, each in [0, 1]; return them as they are served."""
    checked = as_floats("probs", probs)
    if checked.ndim != 2 or not checked.size:
        way_out = "pass one probability per row and label"
        raise InputValueError(
            expected("probs", "have shape (N, C), N >= 1", f"shape {checked.shape}", way_out)
        )
    if not ((checked >= 0) & (checked <= 1 + 1e-6)).all():  # false for NaN too
        got = f"values from {checked.min():.6g} to {checked.max():.6g}"
        raise InputValueError(expected("probs", "lie in [0, 1]", got, "pass scipy.special.expit(logits)"))
    return as_served(checked if n_labels is None else _same_classes(checked, n_labels))


def as_served(probs: NDArray[Any]) -> FloatArray:
    """Round probabilities to float32, as a pipeline gives them; in float64, within [0, 1].

    A threshold between two probabilities that differ in float64 only, such as 1 - 1e-9 and 1 - 1e-10, would
    let more rows pass once these are served in float32 than when it was fitted.
    """
    return np.clip(probs.astype(np.float32), 0, 1).astype(np.float64)


def listed(numbers: IntArray, noun: str) -> str:
    """Name classes or labels in a warning: "class 3", or "classes 0, 2, 5"."""
    plural = noun if len(numbers) == 1 else {"class": "classes"}.get(noun, f"{noun}s")
    return f"{plural} {few(numbers.tolist())}"


def warn(message: str) -> None:
    """A warning that points to the caller of `fit`."""
    warnings.warn(message, stacklevel=3)


def _several(probs: NDArray[Any]) -> NDArray[Any]:
    if probs.shape[1] < 2:
        way_out = "there is nothing to decide between fewer"
        raise InputValueError(expected("probs", "have at least 2 classes", f"shape {probs.shape}", way_out))
    return probs


def _same_classes(probs: NDArray[Any], n_classes: int) -> NDArray[Any]:
    if probs.shape[1] != n_classes:
        way_out = "pass probabilities of the model it was fitted for"
        raise InputValueError(
            expected("probs", f"have the {n_classes} columns of fit", f"shape {probs.shape}", way_out)
        )
    return probs
