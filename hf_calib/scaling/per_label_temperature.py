"""One temperature per label, for multi-label classifiers."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit
from sklearn.utils.validation import check_is_fitted

from hf_calib.scaling._base import FloatArray, Scaler, as_fitted_logits, listed
from hf_calib.scaling._inputs import as_binary_labels, as_matrix
from hf_calib.scaling._objectives import SigmoidObjective
from hf_calib.scaling._solver import BOUNDS, SMOOTHED, best_temperature
from hf_calib.scaling.affine import AffineMap

# Warnings, in the order in which they are given.
_ONE_VALUE = (
    "All examples have the same value for {labels}, so the data do not determine a temperature. The temperature "
    "shared by all labels was taken. Fit on examples with the label and without it."
)
_ONLY_ZEROS = (
    "All logits are 0 for {labels}, so no temperature changes the probabilities. The temperature shared by all "
    "labels was taken. Check the model's output."
)
_SEPARATED = (
    "All logits have the right sign for {labels}, so the data do not determine a temperature: they only show "
    f"that a smaller one is better. {SMOOTHED}Fit on more or harder examples."
)
_WRONG_SIDE = (
    "Logits are on average on the wrong side for {labels}, so probabilities of 1/2 fit best, and the largest "
    "temperature was taken. Check that labels and logits have the same columns."
)
_AT_A_BOUND = (
    f"The best temperature is at the end of the range that is searched, {BOUNDS}, for {{labels}}. A better one may "
    "lie beyond it. Check the scale of the logits."
)
_PROBLEMS = (_ONE_VALUE, _ONLY_ZEROS, _SEPARATED, _WRONG_SIDE, _AT_A_BOUND)


class PerLabelTemperatureScaling(Scaler):
    r"""Divide each label's logit by its own temperature, fitted on held-out multi-label predictions.

    For sigmoid outputs whose labels are not all over- or under-confident alike. Each label needs examples
    with and without it; where these are few, `TemperatureScaling(multi_label=True)`, with one temperature for
    all labels, is the steadier choice. No logit changes its sign, so decisions at 1/2 stay as they are.

    $$\hat p_c = \sigma(z_c / T_c)$$

    Attributes:
        temperatures_: T, (C,), in [1e-5, 1e5].
        shared_temperature_: the best single temperature, a float: that of labels without examples of both
            kinds.

    Notes:
        A label of -100 is not known: its logit is left out, and the others of its row are not.

        The negative log-likelihood of each label is minimised alone, as in `TemperatureScaling`. `fit` warns,
        naming the labels, where data do not determine a temperature: the label is never or always positive
        (it then takes the shared temperature), its logits have the right sign in every example (the labels
        are then smoothed by 1 / (N + 1)), or they are no better than chance (probabilities are then near
        1/2). A temperature cannot correct an offset: a rare label may need `IsotonicScaling` on its two-class
        problem.

    References:
        Guo et al. 2017, "On calibration of modern neural networks", for one temperature.

    >>> logits = np.array([[4.0, 1.0], [4.0, -1.0], [4.0, 1.0], [-4.0, -1.0]])
    >>> labels = np.array([[1, 1], [0, 0], [1, 0], [0, 0]])
    >>> scaler = PerLabelTemperatureScaling().fit(logits, labels)
    >>> scaler.temperatures_.round(3)  # right three times in four: p = 3/4 needs z / T = log 3
    array([3.641, 0.91 ])
    """

    def fit(self, logits: ArrayLike, labels: ArrayLike) -> PerLabelTemperatureScaling:
        """Choose the temperatures.

        Args:
            logits: (N, C), any real dtype, read in float64; -inf masks a label that is 0.
            labels: (N, C) of 0 and 1, and -100 where a label is not known.

        Returns:
            self, with `temperatures_` and `shared_temperature_`.

        Raises:
            TypeError: if a dtype is wrong.
            ValueError: if a shape or a value is wrong.
        """
        matrix = as_matrix(logits, least_columns=1)
        positive, known = as_binary_labels(labels, matrix)
        shared = SigmoidObjective(matrix, positive, known)
        self.shared_temperature_ = 1.0 if shared.is_constant else best_temperature(shared)
        found = []
        for column in range(matrix.shape[1]):
            rows = slice(None) if known is None else known[:, column]
            found.append(self._fit_label(matrix[rows, column, None], positive[rows, column, None]))
        self.temperatures_ = np.array([temperature for temperature, _ in found])
        for problem in _PROBLEMS:
            labels_with_it = np.flatnonzero([each == problem for _, each in found])
            if len(labels_with_it):
                message = problem.format(labels=listed(labels_with_it, "label", "labels"))
                warnings.warn(message, UserWarning, stacklevel=2)
        return self

    def transform(self, logits: ArrayLike) -> FloatArray:
        """Return logits / temperatures in float64; logits of any shape that ends in C."""
        check_is_fitted(self, "temperatures_")
        scaled = as_fitted_logits(logits, len(self.temperatures_))
        scaled /= self.temperatures_
        return scaled

    def predict_proba(self, logits: ArrayLike) -> FloatArray:
        """Return the calibrated probability of each label, sigmoid(logits / temperatures)."""
        scaled = self.transform(logits)
        return expit(scaled, out=scaled)

    def affine_map(self) -> AffineMap:
        """The affine map z / T, label by label, that `fold` writes into a classification head."""
        check_is_fitted(self, "temperatures_")
        return AffineMap(1 / self.temperatures_)

    def _fit_label(self, logits: NDArray[Any], positive: NDArray[np.bool_]) -> tuple[float, str | None]:
        """Return a label's temperature and, if its data do not determine it, the problem."""
        if positive.all() or not positive.any():
            return self.shared_temperature_, _ONE_VALUE
        objective = SigmoidObjective(logits, positive)
        if objective.is_constant:
            return self.shared_temperature_, _ONLY_ZEROS
        temperature = best_temperature(objective)
        if objective.is_separable:
            return temperature, _SEPARATED
        if objective.is_no_better_than_chance:
            return temperature, _WRONG_SIDE
        at_a_bound = any(math.isclose(temperature, bound) for bound in BOUNDS)
        return temperature, _AT_A_BOUND if at_a_bound else None
