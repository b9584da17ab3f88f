"""Scalers of the commands: chosen by name, and fitted on some rows to be measured on others."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from inspect import signature
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.model_selection import train_test_split

from hf_calib._errors import InputValueError, check, did_you_mean, expected
from hf_calib.metrics.checks import FloatArray
from hf_calib.predictions.labels import SINGLE_LABEL
from hf_calib.predictions.predictions import Predictions, check_same_classes
from hf_calib.scaling import FOLDABLE_SCALERS, SCALERS

METHODS = SINGLE_LABEL.maps
FOLDED = tuple(method for method in METHODS if method in FOLDABLE_SCALERS)  # that a model's head can hold


def make_scaler(method: str, criterion: str | None, n_bins: int, known: Sequence[str]) -> Any:
    """The unfitted scaler of a known method; a criterion is for a temperature only."""
    if method not in known:
        requirement = f"be one of {', '.join(known)}"
        way_out = did_you_mean(method, known)
        if method in METHODS:
            way_out = (
                f"{method} cannot be folded into a model's head: calibrate a file of predictions with it, "
                "without target data"
            )
        if "per_label_temperature" in known:
            requirement, way_out = f"{requirement} for several labels a row", "auto is the default"
        raise InputValueError(expected("method", requirement, repr(method), way_out))
    if method == "temperature":
        return SCALERS[method].load()(criterion or "nll", n_bins=n_bins)
    way_out = f"leave it out: {method} minimises a criterion of its own"
    requirement = "criterion to be given for a temperature only"
    check(criterion in (None, "nll"), requirement, repr(criterion), way_out)
    return SCALERS[method].load()()


def split_roles(
    found: Predictions, tested: Predictions | None, seed: int
) -> tuple[Predictions, Predictions, str]:
    """The rows to fit on, the rows to report on, and which the latter are, in words."""
    if tested is not None:
        check_same_classes("the test data", found, tested)
        return found, tested, f"all {len(tested):,} rows of the test data"
    chosen = half_of_rows(found, seed)
    rest = np.setdiff1d(np.arange(len(found)), chosen)
    held_out = f"the other {len(rest):,} of {len(found):,} rows, drawn with seed {seed}"
    return found.select(chosen), found.select(rest), held_out


def half_of_rows(found: Predictions, seed: int) -> NDArray[Any]:
    """The numbers of a random half; whole sentences, whose tokens are not independent of each other."""
    sentences = found.sentences
    units = np.arange(len(found)) if sentences is None else np.unique(sentences)
    what = "rows" if sentences is None else "sentences"
    check(len(units) > 1, f"the {what} to be at least 2, to be split in half", len(units), "pass more rows")
    stratified = (
        found.labels if found.labels.ndim == 1 and sentences is None else np.zeros(len(units), np.int64)
    )
    half = units[half_of(stratified, seed)]
    return half if sentences is None else np.flatnonzero(np.isin(sentences, half))


def half_of(labels: NDArray[np.int64], seed: int) -> NDArray[Any]:
    """Row numbers (N // 2,) of a random half; stratified by class where each class has enough rows.

    >>> labels = np.array([0, 0, 1, 1, 1, 1])
    >>> np.bincount(labels[half_of(labels, seed=0)])
    array([1, 2])
    """
    n_rows = len(labels) // 2
    counts = np.unique(labels, return_counts=True)[1]
    stratify = labels if counts.min() >= 2 and len(counts) <= n_rows else None
    numbers = np.arange(len(labels))
    return np.sort(train_test_split(numbers, train_size=n_rows, stratify=stratify, random_state=seed)[0])


def takes_weights(scaler: Any) -> bool:
    """Whether a scaler is fitted to rows with weights."""
    return "sample_weight" in signature(scaler.fit).parameters


def fit(scaler: Any, rows: Predictions, weights: FloatArray | None = None) -> tuple[str, ...]:
    """Fit in place; return its warnings."""
    if rows.kind.sigmoid and "multi_label" in scaler.get_params():
        scaler.set_params(multi_label=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scaler.fit(rows.as_logits(), rows.labels, **({} if weights is None else {"sample_weight": weights}))
    return tuple(str(warning.message) for warning in caught)
