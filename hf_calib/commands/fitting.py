"""Fitting a scaler for a command: which one, on which rows, and what came out."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.model_selection import train_test_split

from hf_calib import scaling
from hf_calib._errors import InputValueError, did_you_mean, expected
from hf_calib.predictions.files import Predictions

FOLDED = {"temperature": "TemperatureScaling", "vector": "VectorScaling", "matrix": "MatrixScaling"}
METHODS = {
    **FOLDED,
    "dirichlet": "DirichletScaling",
    "ensemble_temperature": "EnsembleTemperatureScaling",
    "histogram": "HistogramBinning",
    "isotonic": "IsotonicScaling",
    "spline": "SplineScaling",
}


def make_scaler(method: str, criterion: str, n_bins: int, known: Mapping[str, str]) -> Any:
    """The unfitted scaler; an option that does not go with it is refused."""
    if method not in known:
        requirement = f"be one of {', '.join(known)}"
        way_out = did_you_mean(method, known)
        if method in METHODS:
            way_out = f"{method} has no place in a model's weights: calibrate a file of predictions with it"
        raise InputValueError(expected("method", requirement, repr(method), way_out))
    if method == "temperature":
        return scaling.TemperatureScaling(criterion, n_bins=n_bins)  # type: ignore[arg-type]
    if criterion != "nll":
        way_out = f"leave it out: {method} minimises its own"
        raise InputValueError(
            expected("criterion", "be given for a temperature only", repr(criterion), way_out)
        )
    return getattr(scaling, METHODS[method])()


def split_roles(
    found: Predictions, tested: Predictions | None, seed: int
) -> tuple[Predictions, Predictions, str]:
    """The rows to fit on, the rows to report on, and where the latter come from."""
    if tested is not None:
        if tested.n_classes != found.n_classes or (
            None not in (tested.class_names, found.class_names) and tested.class_names != found.class_names
        ):
            got = f"{tested.n_classes} classes and {found.n_classes}, or other names"
            way_out = "use predictions of one model"
            raise InputValueError(expected("the test data", "have the same classes", got, way_out))
        return found, tested, f"all {len(tested):,} rows of the test data"
    if len(found) < 2:
        way_out = "pass more rows, or test data"
        raise InputValueError(expected("the rows", "be at least 2, to be split in half", len(found), way_out))
    chosen = half_of(found.labels, seed)
    rest = np.setdiff1d(np.arange(len(found)), chosen)
    held_out = f"the other {len(rest):,} of {len(found):,} rows, drawn with seed {seed}"
    return found.select(chosen), found.select(rest), held_out


def half_of(labels: NDArray[np.int64], seed: int) -> NDArray[Any]:
    """Row numbers (N // 2,) of a random half; in the classes' shares, where these have rows enough.

    >>> labels = np.array([0, 0, 1, 1, 1, 1])
    >>> np.bincount(labels[half_of(labels, seed=0)])
    array([1, 2])
    """
    n_rows = len(labels) // 2
    counts = np.unique(labels, return_counts=True)[1]
    enough = counts.min() >= 2 and len(counts) <= n_rows
    chosen, _ = train_test_split(
        np.arange(len(labels)), train_size=n_rows, stratify=labels if enough else None, random_state=seed
    )
    return np.sort(chosen)


def fit(scaler: Any, predictions: Predictions) -> tuple[str, ...]:
    """Fit in place; return what it warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scaler.fit(predictions.as_logits(), predictions.labels)
    return tuple(str(warning.message) for warning in caught)


def fitted_numbers(scaler: Any) -> dict[str, Any]:
    """What was fitted, where that is at most a number per class."""
    fitted = {name: value for name, value in vars(scaler).items() if name.endswith("_")}
    arrays = {
        name.rstrip("_"): np.asarray(value) for name, value in fitted.items() if not name.startswith("_")
    }
    return {name: a.tolist() for name, a in arrays.items() if a.ndim <= 1 and a.dtype.kind in "fiu"}
