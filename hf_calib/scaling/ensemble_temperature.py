"""Ensemble temperature scaling: a mixture of the scaled, the plain and the uniform probabilities."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from itertools import combinations
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import minimize_scalar
from sklearn.utils.validation import check_is_fitted

from hf_calib.metrics.checks import check_choice
from hf_calib.scaling._base import FloatArray, as_fitted_logits, softmax_in_place
from hf_calib.scaling._inputs import as_class_labels, as_matrix, blocks
from hf_calib.scaling._objectives import SoftmaxObjective
from hf_calib.scaling._probabilities import OWN_SHARE
from hf_calib.scaling._solver import best_temperature, undetermined
from hf_calib.scaling.scaler import Fitted, Scaler

EnsembleCriterion = Literal["mse", "nll"]
MSE_BOUNDS = (0.05, 5.0)

_COARSE = 24  # temperatures at which the squared error, which need not be convex, is looked at first
_SAMPLE_VALUES = 2**21  # of a large problem, this much is looked at there
_MAX_STEPS = 100
_FACES = [list(face) for size in (1, 2, 3) for face in combinations(range(3), size)]


class EnsembleTemperatureScaling(Scaler):
    r"""Mix the temperature-scaled, the plain and the uniform probabilities.

    A step up from `TemperatureScaling` at nearly the same need for data: four parameters instead of one. It
    keeps the ranking of the classes, hence the accuracy. A mixture is not a map of the logits, so it cannot be
    folded into the model.

    $$\hat p = w_1 \, \mathrm{softmax}(z / T) + w_2 \, \mathrm{softmax}(z) + w_3 / C,
      \qquad w \ge 0, \quad \sum_k w_k = 1$$

    Args:
        criterion: what T, and then w, minimise on the data they are fitted on.
            "mse": the mean squared error of the probabilities (the Brier score over C), the authors' default.
            "nll": negative log-likelihood.

    Attributes:
        temperature_: T, a float; in [0.05, 5] for "mse" as in the authors' code, in [1e-5, 1e5] for "nll".
        weights_: w, (3,), for scaled, plain and uniform.

    Notes:
        T is that of temperature scaling alone; w is found after it. In w both criteria are convex. For "mse"
        the problem is quadratic in three numbers: it is solved exactly, by solving it on each of the seven
        faces of the simplex. For "nll" such problems are solved in turn (Newton). The rows are read block by
        block. In a row with classes masked by -inf, the uniform distribution is that over the others.

        `fit` warns where data do not determine T, as `TemperatureScaling` does, or where it is out of bounds.

    References:
        Zhang, Kailkhura and Han 2020, "Mix-n-Match: ensemble and compositional methods for uncertainty
        calibration in deep learning", section 3.2.

    >>> logits = np.array([[4.0, 0.0], [4.0, 0.0], [4.0, 0.0], [0.0, 4.0]])
    >>> scaler = EnsembleTemperatureScaling().fit(logits, np.array([0, 0, 0, 0]))
    >>> scaler.predict_proba(logits[:1]).round(4)  # right three times in four
    array([[0.75, 0.25]])
    """

    _fitted = (Fitted("temperature_"), Fitted("weights_", "W"), Fitted("n_classes_", kind=int))

    def __init__(self, criterion: EnsembleCriterion = "mse") -> None:
        self.criterion = criterion

    def fit(self, logits: ArrayLike, labels: ArrayLike) -> EnsembleTemperatureScaling:
        """Choose the temperature, then the weights.

        Args:
            logits: (N, C), any real dtype, read in float64; -inf masks a class that is not the label.
            labels: (N,) int in [0, C), without -100.

        Returns:
            self, with `temperature_` and `weights_`.

        Raises:
            TypeError: if a dtype is wrong.
            ValueError: if the criterion, a shape or a value is wrong.
        """
        check_choice("criterion", self.criterion, get_args(EnsembleCriterion))
        matrix = as_matrix(logits, least_columns=2)
        classes = as_class_labels(labels, matrix)
        objective = SoftmaxObjective(matrix, classes)
        if objective.is_constant:
            self.temperature_ = 1.0
        else:
            fit_temperature = _least_mse_temperature if self.criterion == "mse" else best_temperature
            self.temperature_ = fit_temperature(objective)
        fit_weights = _least_mse_weights if self.criterion == "mse" else _least_nll_weights
        self.weights_ = fit_weights(matrix, classes, self.temperature_)
        self.n_classes_ = matrix.shape[1]
        problem = undetermined(objective, self.temperature_, smoothed=self.criterion == "nll")
        if problem is None and self.criterion == "mse":
            problem = _beyond_bounds(objective, self.temperature_)
        if problem:
            warnings.warn(problem, UserWarning, stacklevel=2)
        return self

    def predict_proba(self, logits: ArrayLike) -> FloatArray:
        """Return the mixture in float64; logits of any shape that ends in C."""
        check_is_fitted(self, "weights_")
        plain = as_fitted_logits(logits, self.n_classes_)
        first, second, third = _parts(plain, self.temperature_)
        mixture = self.weights_[0] * first + self.weights_[1] * second + self.weights_[2] * third
        if self.weights_[2] > 1 - OWN_SHARE:  # the uniform part alone would rank nothing
            mixture += OWN_SHARE * (second - third)
        return mixture

    def _is_sound(self) -> bool:
        weights = self.weights_
        whole = len(weights) == 3 and bool((weights >= 0).all()) and math.isclose(weights.sum(), 1)
        return whole and self.temperature_ > 0


def _parts(logits: FloatArray, temperature: float) -> tuple[FloatArray, FloatArray, FloatArray]:
    """The scaled, the plain and the uniform probabilities; the logits are overwritten."""
    allowed = np.isfinite(logits)
    scaled = softmax_in_place(logits / temperature)
    return scaled, softmax_in_place(logits), allowed / allowed.sum(axis=-1, keepdims=True)


def _least_mse_temperature(objective: SoftmaxObjective) -> float:
    """Look at a coarse grid of log T, then closely around the best point of it."""
    grid = np.linspace(math.log(MSE_BOUNDS[0]), math.log(MSE_BOUNDS[1]), _COARSE)
    step = max(1, objective.logits.size // _SAMPLE_VALUES)
    sample = objective.every(step) if step > 1 else objective
    best = int(np.argmin([_mse(sample, log_t) for log_t in grid]))
    around = grid[max(best - 1, 0)], grid[min(best + 1, _COARSE - 1)]
    options = {"xatol": 1e-9}
    found = minimize_scalar(lambda log_t: _mse(objective, log_t), bounds=around, options=options)
    candidates = [found.x, *(end for end in (grid[0], grid[-1]) if end in around)]
    return float(np.exp(min(candidates, key=lambda log_t: _mse(objective, log_t))))


def _mse(objective: SoftmaxObjective, log_temperature: float) -> float:
    """The squared error summed over classes, less what T does not change: |p|^2 - 2 p_y."""
    total = 0.0
    for rows, logits in blocks(objective.logits):
        logits /= math.exp(log_temperature)
        probs = softmax_in_place(logits)
        own = probs[np.arange(len(probs)), objective.labels[rows]]
        total += np.vdot(probs, probs) - 2 * own.sum()
    return float(total) / objective.size


def _blocks_of_parts(
    logits: NDArray[Any], labels: NDArray[np.int64], temperature: float
) -> Iterator[tuple[FloatArray, FloatArray]]:
    """Yield the three distributions (3, n, C), and what they give the labels (3, n)."""
    for rows, block in blocks(logits):
        parts = np.stack(_parts(block, temperature))
        yield parts, parts[:, np.arange(len(block)), labels[rows]]


def _least_mse_weights(logits: NDArray[Any], labels: NDArray[np.int64], temperature: float) -> FloatArray:
    products, own = np.zeros((3, 3)), np.zeros(3)
    for parts, of_label in _blocks_of_parts(logits, labels, temperature):
        flat = parts.reshape(3, -1)
        products += flat @ flat.T
        own += of_label.sum(axis=1)
    return _least_on_simplex(products / len(labels), own / len(labels))


def _least_nll_weights(logits: NDArray[Any], labels: NDArray[np.int64], temperature: float) -> FloatArray:
    """Minimise the quadratic model of the loss on the simplex, go there or part of the way, and repeat."""
    own = np.concatenate([part for _, part in _blocks_of_parts(logits, labels, temperature)], axis=1)
    weights = np.full(3, 1 / 3)
    for _ in range(_MAX_STEPS):
        ratios = own / (weights @ own)
        hessian, slope = ratios @ ratios.T / own.shape[1], -ratios.mean(axis=1)
        step = _least_on_simplex(hessian, hessian @ weights - slope) - weights
        if -slope @ step <= 1e-15:
            break
        length = _descent(own, weights, step, slope)
        weights = weights + length * step
    return weights


def _descent(own: FloatArray, weights: FloatArray, step: FloatArray, slope: FloatArray) -> float:
    """Halve the step until the loss falls by a part of what its slope promises."""
    before = np.log(weights @ own).mean()
    length = 1.0
    while length > 1e-9:
        mixture = (weights + length * step) @ own
        if mixture.min() > 0 and np.log(mixture).mean() >= before - 1e-4 * length * (slope @ step):
            return length
        length /= 2
    return 0.0


def _least_on_simplex(quadratic: FloatArray, linear: FloatArray) -> FloatArray:
    """Return the w >= 0 with sum 1 at which w' quadratic w / 2 - linear w is least.

    The minimum lies within one of the faces, where it solves linear equations. Of equally good faces the
    smallest is taken: T = 1, for instance, makes two of the distributions the same.
    """
    best, least = np.zeros(3), math.inf
    for face in _FACES:
        size = len(face)
        system = np.ones((size + 1, size + 1))
        system[:size, :size], system[size, size] = quadratic[np.ix_(face, face)], 0
        inner = np.linalg.lstsq(system, np.append(linear[face], 1))[0][:size]
        if (inner >= 0).all():
            weights = np.zeros(3)
            weights[face] = inner / inner.sum()
            value = float(weights @ quadratic @ weights / 2 - linear @ weights)
            if value < least - 1e-15:
                best, least = weights, value
    return best


def _beyond_bounds(objective: SoftmaxObjective, temperature: float) -> str | None:
    """Far from the right scale the squared error is flat, so the likelihood is asked too."""
    low, high = MSE_BOUNDS
    if low * 1.001 < temperature < high / 1.001 and low / 10 < best_temperature(objective) < high * 10:
        return None
    return (
        f"The best temperature, {temperature:.4g}, is at the end of the range that is searched, {MSE_BOUNDS}, or "
        'far from that of the likelihood. Check the scale of the logits, or use criterion="nll", which has '
        "wider bounds."
    )
