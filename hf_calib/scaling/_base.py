"""Base class of the scalers that map logits to logits, softmax in place, and the check of fitted classes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.utils.validation import check_is_fitted

from hf_calib._errors import InputValueError, expected, few
from hf_calib.scaling._inputs import FloatArray, as_logits
from hf_calib.scaling.affine import AffineMap
from hf_calib.scaling.scaler import Scaler

_LARGEST_MIXED = 1e12  # a matrix spreads the rounding of each logit to all


class LogitScaling(Scaler):
    """A scaler whose probabilities are the softmax of the logits that it maps to."""

    def transform(self, logits: ArrayLike) -> FloatArray:
        raise NotImplementedError

    def predict_proba(self, logits: ArrayLike) -> FloatArray:
        """Return the calibrated probabilities, of the shape of the logits, in float64."""
        return softmax_in_place(self.transform(logits))


class AffineScaling(LogitScaling):
    """A scaler that is an affine map of the logits once it is fitted."""

    weight_: FloatArray
    bias_: FloatArray

    def transform(self, logits: ArrayLike) -> FloatArray:
        """Return the mapped logits in float64; logits of any shape that ends in C."""
        mapping = self.affine_map()
        rows = as_fitted_logits(logits, len(self.bias_))
        if mapping.weight.ndim == 2:
            refuse_masks(rows)
        return mapping(rows)

    def affine_map(self) -> AffineMap:
        """The affine map that `fold` writes into a classification head."""
        check_is_fitted(self, "weight_")
        return AffineMap(self.weight_, self.bias_)


def softmax_in_place(logits: FloatArray) -> FloatArray:
    """Turn logits into probabilities along the last axis; no second array is made."""
    largest = logits.max(axis=-1, keepdims=True)
    if np.isneginf(largest).any():
        got = f"-inf for every class in {np.count_nonzero(np.isneginf(largest))} rows"
        raise InputValueError(expected("logits", "allow at least one class", got, "mask fewer classes"))
    logits -= largest
    np.exp(logits, out=logits)
    logits /= logits.sum(axis=-1, keepdims=True)
    return logits


def as_fitted_logits(logits: ArrayLike, n_classes: int) -> FloatArray:
    """Check logits of any shape that ends in the classes seen in `fit`; return a float64 copy."""
    checked = as_logits(logits)
    if checked.shape[-1] != n_classes:
        way_out = "pass the logits of the model it was fitted on"
        raise InputValueError(
            expected("logits", f"have the {n_classes} classes of fit", f"shape {checked.shape}", way_out)
        )
    return checked.astype(np.float64)


def refuse_masks(logits: NDArray[Any]) -> None:
    """Raise if a class is masked: a map that mixes the classes would mask all of them."""
    masked = n_masked(logits)
    if masked:
        got = f"{masked} of -inf, or beyond {_LARGEST_MIXED:g}"
        way_out = "use VectorScaling or TemperatureScaling, which keep masked classes masked"
        raise InputValueError(expected("logits", "be finite, as the classes are mixed", got, way_out))


def n_masked(logits: NDArray[Any]) -> int:
    """How many logits are -inf, or so large that they stand for it, such as the lowest number of a dtype."""
    if float(logits.min()) >= -_LARGEST_MIXED and float(logits.max()) <= _LARGEST_MIXED:
        return 0
    return int(np.count_nonzero(np.abs(logits.astype(np.float64)) > _LARGEST_MIXED))


def listed(numbers: NDArray[np.int64], one: str, several: str) -> str:
    """Name classes or labels in a message: "class 3", "7 labels (0, 1, 2, 3, 4, ...)", or nothing."""
    if len(numbers) == 1:
        return f"{one} {numbers[0]}"
    return f"{len(numbers)} {several} ({few(numbers.tolist())})" if len(numbers) else ""
