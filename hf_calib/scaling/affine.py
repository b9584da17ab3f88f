"""Affine maps of the logits: what every scaler that folds into a classification head is, once fitted."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from hf_calib.scaling._inputs import FloatArray


class AffineMap(NamedTuple):
    r"""z -> weight z + bias, in float64.

    Args:
        weight: () or (C,), which multiplies the logits, or (C, C), which mixes them.
        bias: (C,), or None.

    Notes:
        A weight of () or (C,) keeps a class masked that is -inf in a row; one of (C, C) refuses no mask by
        itself, and returns NaN there.

        `hf_calib.fold` writes it into a model's head. A linear head of scikit-learn on embeddings, as SetFit
        trains one, takes it in the same way: A (W h + b) + c = (A W) h + (A b + c). For two classes it has one
        logit, and the scaler is fitted with multi_label=True on `[:, None]` of logits and labels.

    >>> double = AffineMap(np.array(2.0))
    >>> shifted = double.then(AffineMap(np.array([1.0, 1.0]), np.array([0.0, 0.5])))
    >>> shifted([[1.0, 0.0]])
    array([[2. , 0.5]])

    >>> from sklearn.linear_model import LogisticRegression
    >>> from hf_calib.scaling import TemperatureScaling
    >>> rng = np.random.default_rng(0)
    >>> embeddings, labels = rng.normal(size=(300, 8)), rng.integers(3, size=300)
    >>> head = LogisticRegression().fit(embeddings[:50], labels[:50])
    >>> logits = head.decision_function(embeddings[50:])
    >>> scaler = TemperatureScaling().fit(logits, labels[50:])
    >>> calibration = scaler.affine_map()
    >>> head.coef_ = AffineMap(calibration.weight)(head.coef_.T).T
    >>> head.intercept_ = calibration(head.intercept_)
    >>> np.allclose(head.predict_proba(embeddings[50:]), scaler.predict_proba(logits))
    True
    """

    weight: FloatArray
    bias: FloatArray | None = None

    def __call__(self, logits: ArrayLike) -> FloatArray:
        """Map logits of any shape that ends in C; the result is a new array."""
        rows = np.asarray(logits, dtype=np.float64)
        if self.weight.ndim == 2:
            mapped = rows @ self.weight.T
        else:
            masked = np.isneginf(rows)
            # The product of -inf with a weight that is not above 0 would mask nothing.
            mapped = np.where(masked, 0, rows) * self.weight
            mapped[masked] = -np.inf
        if self.bias is not None:
            mapped += self.bias
        return mapped

    def then(self, following: AffineMap) -> AffineMap:
        """The one map that this one and a following one are together."""
        own, other = self.weight, following.weight
        if other.ndim == 2:  # noqa: SIM108
            weight = other @ own if own.ndim == 2 else other * own
        else:
            weight = np.asarray((other * own.T).T)
        return AffineMap(weight, following.bias if self.bias is None else following(self.bias))
