"""Base class of the scalers that recalibrate each class's probability on its own: one-vs-rest, then rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.utils.validation import check_is_fitted

from hf_calib.scaling._base import as_fitted_logits, softmax_in_place
from hf_calib.scaling._inputs import FloatArray, as_class_labels, as_matrix
from hf_calib.scaling.scaler import Scaler

# A share of the model's own probability: it ranks classes that were given equal ones, and it is all that
# is left of a row where every class was given 0. As small as in the code of Zhang et al. 2020.
OWN_SHARE = 1e-9


class ClassProbabilityScaling(Scaler):
    """A scaler that maps probabilities class by class; `predict_proba` makes the rows sum to 1."""

    n_classes_: int

    def class_scores(self, logits: ArrayLike) -> FloatArray:
        """Return each class's recalibrated probability in [0, 1], of the shape of the logits, in float64.

        Each says how often its class is right, whatever the others say: the rows do not sum to 1. A masked class
        has 0.
        """
        return self._scores(logits)[0]

    def predict_proba(self, logits: ArrayLike) -> FloatArray:
        """Return `class_scores` with rows scaled to sum to 1, of the shape of the logits, in float64."""
        scores, probs = self._scores(logits)
        scores += OWN_SHARE * probs
        scores /= scores.sum(axis=-1, keepdims=True)
        return scores

    def _scores(self, logits: ArrayLike) -> tuple[FloatArray, FloatArray]:
        """The recalibrated probabilities, and the model's own."""
        check_is_fitted(self, "n_classes_")
        wide = as_fitted_logits(logits, self.n_classes_)
        masked = np.isneginf(wide)
        probs = softmax_in_place(wide)
        scores = self._recalibrated(probs.reshape(-1, self.n_classes_)).reshape(probs.shape)
        scores[masked] = 0  # the lowest bin may have a frequency above 0
        return scores, probs

    def _recalibrated(self, probs: FloatArray) -> FloatArray:
        raise NotImplementedError


def checked_probs(logits: ArrayLike, labels: ArrayLike) -> tuple[FloatArray, NDArray[np.int64]]:
    """Return the softmax (N, C) of logits to fit on, and the labels (N,)."""
    matrix = as_matrix(logits, least_columns=2)
    checked = as_class_labels(labels, matrix)
    return softmax_in_place(matrix.astype(np.float64)), checked
