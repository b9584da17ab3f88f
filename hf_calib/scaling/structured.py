"""Structured scaling: a linear map of the logits that a ridge draws to the temperature."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit

from hf_calib._errors import InputValueError, expected
from hf_calib.metrics.checks import check_flag
from hf_calib.scaling._base import AffineScaling, refuse_masks, softmax_in_place
from hf_calib.scaling._inputs import FloatArray, as_binary_labels, as_class_labels, as_matrix
from hf_calib.scaling._linear import LEFT_TO_GAIN, LinearProblem, Near, fit_matrix, fit_vector
from hf_calib.scaling._logistic import fit_columns
from hf_calib.scaling._objectives import Objective, SigmoidObjective, SoftmaxObjective
from hf_calib.scaling._solver import best_temperature, undetermined


class StructuredScaling(AffineScaling):
    """A temperature, and beside it the penalised parameters of a linear map."""

    penalty: float
    _left_to_gain = LEFT_TO_GAIN
    # Of the same rows: its temperature is taken, and its solution, with another penalty, is near.
    _near: Near | None = None
    _found: Near

    def _checked_penalty(self) -> float:
        if not (isinstance(self.penalty, Real) and 0 < self.penalty < np.inf):
            way_out = "1 is the strength of the paper; a smaller one trusts the data more"
            raise InputValueError(
                expected("penalty", "be a finite number above 0", repr(self.penalty), way_out)
            )
        return float(self.penalty)

    def _temperature(self, make_objective: Callable[[], Objective]) -> float:
        """The temperature that the map starts from, with a warning if the data do not determine it."""
        if self._near is not None:
            self._found = Near(self._near.temperature)
            return self._near.temperature
        objective = make_objective()
        temperature = 1.0 if objective.is_constant else best_temperature(objective)
        problem = undetermined(objective, temperature, smoothed=True)
        if problem:
            warnings.warn(problem, UserWarning, stacklevel=3)
        self._found = Near(temperature)
        return temperature

    def _problem(self, logits: NDArray[Any], labels: NDArray[np.int64], unit: float) -> LinearProblem:
        problem = LinearProblem(logits, labels, lambda block: block)
        problem.unit = unit
        problem.left_to_gain = self._left_to_gain
        problem.start = None if self._near is None else self._near.solution
        return problem

    def _fit_two_classes(self, logits: NDArray[Any], labels: NDArray[np.int64], unit: float) -> None:
        """The map of the difference of the two logits."""
        difference = logits[:, 1:].astype(np.float64) - logits[:, :1]
        difference[np.isinf(difference)] = -np.inf  # a masked class: the row tells nothing
        positive = labels[:, None] == 1
        ((weight,), (bias,)), _ = fit_columns(difference, positive, None, unit, self.penalty)
        self.weight_ = np.full(2, weight / unit)
        self.bias_ = np.array([-bias / 2, bias / 2])


class StructuredVectorScaling(StructuredScaling):
    r"""Give each class its own scale and offset, drawn to the best temperature (SVS).

    Like `VectorScaling`, for a model whose classes are not all over- or under-confident alike, but with a
    ridge that makes it safe with few examples of a class, or none. `StructuredMatrixScaling` also mixes the
    classes. It can change the predicted class.

    $$\hat p = \mathrm{softmax}((1 + v) \odot z / T + b), \qquad \min_{v, b} \mathrm{NLL}
      + \lambda \frac{C}{N} (|v|^2 + |b|^2)$$

    Args:
        penalty: λ > 0, a multiple of the paper's strength.
        multi_label: True for sigmoid outputs with a 0/1 label per logit: sigmoid((1 + v) z / T + b), label by
            label, with one T for all of them.

    Attributes:
        weight_: (1 + v) / T, (C,).
        bias_: b, (C,), which sum to 0 unless the outputs are sigmoids.

    Notes:
        T is the temperature that `TemperatureScaling` finds, with its warnings; it stays while v and b are
        fitted. The penalised likelihood then has one minimum whatever the data, found to 1e-7 nats per example.
        The authors' code takes log-probabilities instead of logits, for which the map is not linear.

        For two classes the map is that of the difference of the logits, sigmoid((1 + v) (z_1 - z_0) / T + b)
        (Platt scaling), with the ridge λ (4 v^2 + b^2) / N, which is the one above for such a map. A
        label of `multi_label` is also a problem of two classes, of its known examples. A label of -100 is
        not known, and left out.

        A class masked by -inf in a row stays masked there.

    References:
        Berta, Holzmüller, Jordan, Bach 2026, "Structured matrix scaling for multi-class calibration", with
        ridge penalties.

    >>> logits = np.array([[3.0, 0.0, 0.0], [0.0, 3.0, 0.0], [0.0, 0.0, 3.0]] * 20)
    >>> labels = np.array([0, 1, 2, 0, 1, 0] * 10)  # class 2 is right every other time only
    >>> scaler = StructuredVectorScaling().fit(logits, labels)
    >>> scaler.predict_proba(logits[:3]).diagonal().round(2)
    array([0.96, 0.92, 0.55])
    """

    def __init__(self, penalty: float = 1.0, *, multi_label: bool = False) -> None:
        self.penalty = penalty
        self.multi_label = multi_label

    def fit(self, logits: ArrayLike, labels: ArrayLike) -> StructuredVectorScaling:
        """Find the temperature, then the weights and the biases.

        Args:
            logits: (N, C), any real dtype, read in float64; -inf masks a class that is not the label.
            labels: (N,) int in [0, C), without -100; with multi_label, (N, C) of 0 and 1, and -100 where a
                label is not known.

        Returns:
            self, with `weight_` and `bias_`.

        Raises:
            TypeError: if a dtype is wrong.
            ValueError: if a parameter, a shape or a value is wrong.
        """
        penalty = self._checked_penalty()
        check_flag("multi_label", self.multi_label)
        matrix = as_matrix(logits, least_columns=1 if self.multi_label else 2)
        n, c = matrix.shape
        if self.multi_label:
            positive, known = as_binary_labels(labels, matrix)
            unit = self._temperature(partial(SigmoidObjective, matrix, positive, known))
            (weight, self.bias_), _ = fit_columns(matrix, positive, known, unit, penalty)
            self.weight_ = weight / unit
            return self
        classes = as_class_labels(labels, matrix)
        unit = self._temperature(partial(SoftmaxObjective, matrix, classes))
        if c == 2:
            self._fit_two_classes(matrix, classes, unit)
            return self
        problem = self._problem(matrix, classes, unit)
        (weight, self.bias_), _ = fit_vector(problem, penalty * c / n, penalty * c / n)
        self.weight_ = weight / unit
        self._found = Near(unit, problem.solution)
        return self

    def predict_proba(self, logits: ArrayLike) -> FloatArray:
        """Return the calibrated probabilities: the softmax of `transform`, or the sigmoid with multi_label."""
        scaled = self.transform(logits)
        return expit(scaled, out=scaled) if self.multi_label else softmax_in_place(scaled)


class StructuredMatrixScaling(StructuredScaling):
    r"""Map the logits by a full matrix and an offset, drawn to the best temperature (SMS).

    The strongest map that folds into a head where classes are confused in a way that more data would show,
    and safer than `MatrixScaling`: every parameter has a ridge, that of the C (C - 1) weights between classes
    being C - 1 times as strong. `AutoScaling` chooses its penalty by cross-validation. It can change the
    predicted class.

    $$\hat p = \mathrm{softmax}((I + \mathrm{diag}(v) + M) z / T + b), \qquad \min_{v, M, b} \mathrm{NLL}
      + \lambda \frac{C}{N} (|v|^2 + |b|^2) + \lambda \frac{C (C - 1)}{N} |M|^2$$

    Args:
        penalty: λ > 0, a multiple of the paper's strength.

    Attributes:
        weight_: (I + diag(v) + M) / T, (C, C); `transform` is logits @ weight_.T + bias_.
        bias_: b, (C,), which sum to 0.

    Notes:
        T, the minimum and the case of two classes, where a matrix says no more than the difference of the
        logits, are as in `StructuredVectorScaling`. A logit of -inf would mask all classes, so it is refused.

    References:
        Berta, Holzmüller, Jordan, Bach 2026, "Structured matrix scaling for multi-class calibration", with
        ridge penalties.

    >>> rng = np.random.default_rng(0)
    >>> logits = rng.normal(size=(2000, 3))
    >>> mixed = logits @ [[1, 0, 0], [0, 1, 0], [0, 1, 1]]  # the third logit counts for the second class too
    >>> labels = (mixed + rng.gumbel(size=(2000, 3))).argmax(axis=1)
    >>> scaler = StructuredMatrixScaling().fit(logits, labels)
    >>> (scaler.weight_[1] - scaler.weight_[0]).round(1)  # near -1, 1, 1
    array([-1.1,  0.9,  1. ])
    """

    def __init__(self, penalty: float = 1.0) -> None:
        self.penalty = penalty

    def fit(self, logits: ArrayLike, labels: ArrayLike) -> StructuredMatrixScaling:
        """Find the temperature, then the matrix and the biases.

        Args:
            logits: (N, C), any real dtype, read in float64; finite.
            labels: (N,) int in [0, C), without -100.

        Returns:
            self, with `weight_` and `bias_`.

        Raises:
            TypeError: if a dtype is wrong.
            ValueError: if a parameter, a shape or a value is wrong.
        """
        penalty = self._checked_penalty()
        matrix = as_matrix(logits, least_columns=2)
        refuse_masks(matrix)
        n, c = matrix.shape
        classes = as_class_labels(labels, matrix)
        unit = self._temperature(partial(SoftmaxObjective, matrix, classes))
        if c == 2:
            self._fit_two_classes(matrix, classes, unit)
            self.weight_ = np.diag(self.weight_)
            return self
        problem = self._problem(matrix, classes, unit)
        own, between = penalty * c / n, penalty * c * (c - 1) / n
        (weight, self.bias_), _ = fit_matrix(problem, between, bias_penalty=own, diagonal_penalty=own)
        self.weight_ = weight / unit
        self._found = Near(unit, problem.solution)
        return self
