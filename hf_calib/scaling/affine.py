"""Affine maps of the logits: what every scaler that folds into a classification head is, once fitted."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from sklearn.utils.validation import check_is_fitted

from hf_calib.metrics.checks import FloatArray
from hf_calib.scaling._base import LogitScaling, as_fitted_logits, as_logits, refuse_masks


class AffineMap(NamedTuple):
    r"""z -> weight z + bias, in float64, as `hf_calib.fold` writes it into a model's head.

    Args:
        weight: () or (C,), which multiplies the logits and keeps masked classes masked, or (C, C), which mixes them,
            and has no value where a class is masked.
        bias: (C,), or None.

    >>> double = AffineMap(np.array(2.0))
    >>> shifted = double.then(AffineMap(np.array([1.0, 1.0]), np.array([0.0, 0.5])))
    >>> shifted([[1.0, 0.0]])
    array([[2. , 0.5]])
    """

    weight: FloatArray
    bias: FloatArray | None = None

    def __call__(self, logits: ArrayLike) -> FloatArray:
        """Map logits of any shape that ends in C; the result is a new array."""
        mapped = np.array(logits, dtype=np.float64)
        if self.weight.ndim == 2:
            mapped = mapped @ self.weight.T
        elif (self.weight > 0).all():
            mapped *= self.weight
        else:  # where the product of -inf with the weight would mask nothing
            masked = np.isneginf(mapped)
            mapped[masked] = 0
            mapped *= self.weight
            mapped[masked] = -np.inf
        if self.bias is not None:
            mapped += self.bias
        return mapped

    def then(self, following: AffineMap) -> AffineMap:
        """The one map that this one and a following one are together."""
        own, other = self.weight, following.weight
        weight = other @ own if own.ndim == other.ndim == 2 else np.asarray(other * own)
        if own.ndim == 2 and other.ndim == 1:
            weight = other[:, None] * own
        return AffineMap(weight, following.bias if self.bias is None else following(self.bias))


class AffineScaling(LogitScaling):
    """A scaler that is an affine map of the logits, once it is fitted, and folds into a classification head."""

    weight_: FloatArray  # as of the map
    bias_: FloatArray

    def affine_map(self) -> AffineMap:
        """The affine map that `fold` writes into a classification head."""
        check_is_fitted(self)
        return AffineMap(self.weight_, self.bias_)

    def transform(self, logits: ArrayLike) -> FloatArray:
        """Return the mapped logits in float64; logits of any shape that ends in C."""
        found = self.affine_map()
        known = getattr(self, "classes_", None)  # a temperature from a file does not tell how many there are
        rows = as_logits(logits).astype(np.float64) if known is None else as_fitted_logits(logits, len(known))
        if found.weight.ndim == 2:
            refuse_masks(rows)
        return found(rows)
