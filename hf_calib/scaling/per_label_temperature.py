"""One temperature per label, for multi-label classifiers."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from hf_calib._errors import expected
from hf_calib.scaling._base import FloatArray, as_fitted_logits, listed
from hf_calib.scaling._inputs import as_binary_labels, as_matrix
from hf_calib.scaling._objectives import SigmoidObjective
from hf_calib.scaling._solver import BOUNDS, best_temperature


class PerLabelTemperatureScaling(BaseEstimator):
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
        The negative log-likelihood of each label is minimised alone, as in `TemperatureScaling`. `fit` warns,
        naming the labels, where data do not determine a temperature: the label is never or always positive
        (it then takes the shared temperature), its logits have the right sign in every example (the labels
        are then counted as 1 / (N + 1) uncertain), or they are no better than chance (probabilities are then
        near 1/2). An offset cannot be mended by a temperature: a rare label may need `IsotonicScaling` on
        its two-class problem.

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
            labels: (N, C) of 0 and 1.

        Returns:
            self, with `temperatures_` and `shared_temperature_`.

        Raises:
            TypeError: if a dtype is wrong.
            ValueError: if a shape or a value is wrong.
        """
        matrix = as_matrix(logits, least_columns=1)
        positive = as_binary_labels(labels, matrix)
        shared = SigmoidObjective(matrix, positive)
        self.shared_temperature_ = 1.0 if shared.is_constant else best_temperature(shared)
        columns = range(matrix.shape[1])
        found = [self._fit_label(matrix[:, [column]], positive[:, [column]]) for column in columns]
        self.temperatures_ = np.array([temperature for temperature, _ in found])
        for problem, parts in _PROBLEMS.items():
            labels_with_it = np.flatnonzero([each == problem for _, each in found])
            if len(labels_with_it):
                argument, requirement, way_out = parts
                got = f"{problem} for {listed(labels_with_it, 'label', 'labels')}"
                warnings.warn(expected(argument, requirement, got, way_out), UserWarning, stacklevel=2)
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

    def _fit_label(self, logits: NDArray[Any], positive: NDArray[np.bool_]) -> tuple[float, str | None]:
        """Return a label's temperature and, if its data do not determine it, the problem."""
        if positive.all() or not positive.any():
            return self.shared_temperature_, "one value"
        objective = SigmoidObjective(logits, positive)
        if objective.is_constant:
            return self.shared_temperature_, "only 0"
        temperature = best_temperature(objective)
        if objective.is_separable:
            return temperature, "the right sign"
        if objective.is_no_better_than_chance:
            return temperature, "a mean on the wrong side"
        at_a_bound = any(math.isclose(temperature, bound) for bound in BOUNDS)
        return temperature, "the bound" if at_a_bound else None


# What `got` says: the argument, what is expected of it, the way out.
_PROBLEMS = {
    "one value": (
        "each label",
        "be 0 for some examples and 1 for others",
        "it was given the temperature of all labels together",
    ),
    "only 0": (
        "each label's logits",
        "differ from 0",
        "no temperature changes their probabilities, so it was given that of all labels together",
    ),
    "the right sign": (
        "each label's logits",
        "have the wrong sign in some examples",
        "fit on more or harder examples: these only show that a smaller temperature is better",
    ),
    "a mean on the wrong side": (
        "each label's logits",
        "be on the label's side on average",
        "check that labels and logits have the same columns: as they are, probabilities of 1/2 fit best",
    ),
    "the bound": (
        "each label's best temperature",
        f"lie within {BOUNDS}",
        "check the scale of the logits",
    ),
}
