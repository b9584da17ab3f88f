"""Maximum-likelihood fits of linear maps of the logits: the convex problem, its preconditioner, its solver.

Parameters are found for features in units of `unit`, a number near the fitted temperature, so that neither
the solver nor a penalty sees the scale of the logits. The solver is L-BFGS in coordinates in which the
curvature is near 1; there, half of the squared norm of the gradient estimates what is left to gain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from hf_calib.scaling._inputs import FloatArray, blocks
from hf_calib.scaling._objectives import SoftmaxObjective
from hf_calib.scaling._solver import BOUNDS, best_temperature

Linear = tuple[FloatArray, FloatArray]  # weight (C,) or (C, C), bias (C,)

_MAX_STEPS = 1000
_STOP_AT = 1e-8  # largest entry of the gradient; rounding sets in a little below
_LEFT_TO_GAIN = 1e-9  # nats per example: more than that is not converged
_LEAST_CURVATURE = 1e-8  # relative to the largest: flatter directions are left where they start


class LinearProblem:
    """Features and labels, block by block, and how much the labels are smoothed: 0, or 1 / (N + 1).

    `smoothing` is the share of a label's 1 that is spread evenly over all classes of its row.
    """

    def __init__(
        self,
        logits: NDArray[Any],
        labels: NDArray[np.int64],
        features: Callable[[FloatArray], FloatArray],
    ) -> None:
        self.logits, self.labels, self.features = logits, labels, features
        self.size, self.n_classes = logits.shape
        self.smoothing = 0.0
        self.unit = 1.0
        self.unit = self._unit()

    def _unit(self) -> float:
        objective = SoftmaxObjective(self.logits, self.labels)
        if objective.is_constant:
            return 1.0
        if not objective.is_no_better_than_chance:
            temperature = best_temperature(objective)
            if BOUNDS[0] * 1.001 < temperature < BOUNDS[1] / 1.001:
                return temperature
        total = sum(np.square(rows - rows.mean(axis=1, keepdims=True)).sum() for rows, _, _ in self)
        return float(np.sqrt(total / self.logits.size))

    def __iter__(self) -> Iterator[tuple[FloatArray, NDArray[np.bool_] | None, NDArray[np.int64]]]:
        """Yield features, with 0 for masked ones, the mask if there is any, and labels."""
        for rows, block in blocks(self.logits):
            block = self.features(block)
            masked = np.isneginf(block)
            block /= self.unit
            if masked.any():
                block[masked] = 0
                yield block, masked, self.labels[rows]
            else:
                yield block, None, self.labels[rows]

    def residuals(
        self, scores: FloatArray, masked: NDArray[np.bool_] | None, labels: NDArray[np.int64]
    ) -> float:
        """Return the summed loss of the scores, and turn them into its gradient in them."""
        each = np.arange(len(labels))
        if masked is not None:
            scores[masked] = -np.inf
        scores -= scores.max(axis=1, keepdims=True)
        loss = -(1 - self.smoothing) * scores[each, labels].sum()
        spread = self._spread(scores, masked)
        if self.smoothing:
            loss -= np.multiply(spread, scores, where=spread > 0, out=np.zeros_like(scores)).sum()
        np.exp(scores, out=scores)
        mass = scores.sum(axis=1, keepdims=True)
        loss += np.log(mass).sum()
        scores /= mass
        scores[each, labels] -= 1 - self.smoothing
        scores -= spread
        return float(loss)

    def _spread(self, scores: FloatArray, masked: NDArray[np.bool_] | None) -> FloatArray:
        """The share of a label's 1 that smoothing gives to each class that is not masked."""
        if masked is None:
            return np.full((1, self.n_classes), self.smoothing / self.n_classes)
        return self.smoothing * ~masked / np.count_nonzero(~masked, axis=1)[:, None]

    def curvature(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Mean of p (1 - p) of each class, p = softmax(features), and the feature's moments under it."""
        total = np.zeros((3, self.n_classes))
        for rows, masked, labels in self:
            scores = rows.copy()
            self.residuals(scores, masked, labels)
            scores[np.arange(len(labels)), labels] += 1 - self.smoothing
            scores += self._spread(scores, masked)
            scores *= 1 - scores
            total += scores.sum(axis=0), (scores * rows).sum(axis=0), (scores * rows**2).sum(axis=0)
        mass = np.maximum(total[0], np.finfo(float).tiny)
        mean = total[1] / mass
        return _at_least(total[0] / self.size, 1e-3), mean, np.maximum(total[2] / mass - mean**2, 0)

    def second_moment(self, constant: float) -> FloatArray:
        """Mean of x x' over the examples, x the features and a constant."""
        total = np.zeros((self.n_classes + 1, self.n_classes + 1))
        for rows, _, _ in self:
            with_constant = np.hstack([rows, np.full((len(rows), 1), constant)])
            total += with_constant.T @ with_constant
        return total / self.size

    def separated_classes(self, *, free_bias: bool) -> NDArray[np.bool_]:
        """Which classes are separated from all others by their own feature, at a threshold (0 if the bias is not free).

        Their likelihood increases without bound as the class's weight grows.
        """
        own_low, other_low = np.full((2, self.n_classes), np.inf)
        own_high, other_high = np.full((2, self.n_classes), -np.inf)
        for rows, masked, labels in self:
            each = np.arange(len(labels))
            np.minimum.at(own_low, labels, rows[each, labels])
            np.maximum.at(own_high, labels, rows[each, labels])
            hidden = np.zeros(rows.shape, dtype=bool) if masked is None else masked.copy()
            hidden[each, labels] = True
            np.minimum(other_low, np.where(hidden, np.inf, rows).min(axis=0), out=other_low)
            np.maximum(other_high, np.where(hidden, -np.inf, rows).max(axis=0), out=other_high)
        varies = np.minimum(own_low, other_low) < np.maximum(own_high, other_high)
        if free_bias:
            return varies & ((own_low >= other_high) | (own_high <= other_low))
        above = (own_low >= 0) & (other_high <= 0)
        return varies & (above | ((own_high <= 0) & (other_low >= 0)))

    def is_separated_by(self, weight: FloatArray, bias: FloatArray) -> bool:
        """Whether a map ranks every label first: then twice that map is better still."""
        for rows, masked, labels in self:
            scores = _apply(rows, weight) + bias
            if masked is not None:
                scores[masked] = -np.inf
            each = np.arange(len(labels))
            own = scores[each, labels].copy()
            scores[each, labels] = -np.inf
            if not (own > scores.max(axis=1)).all():
                return False
        return True


def fit_vector(problem: LinearProblem) -> tuple[Linear, bool]:
    """Return a weight and a bias per class, for features in units of `unit`, and whether they converged."""
    curvature, mean, variance = problem.curvature()
    scale = np.sqrt(_at_least(np.stack([curvature * variance, curvature]), _LEAST_CURVATURE))

    def unpack(theta: FloatArray) -> Linear:
        weight, centered = theta.reshape(2, -1) / scale
        return weight, centered - weight * mean

    def value_and_gradient(theta: FloatArray) -> tuple[float, FloatArray]:
        weight, bias = unpack(theta)
        loss, gradient = 0.0, np.zeros((2, problem.n_classes))
        for rows, masked, labels in problem:
            scores = rows * weight + bias
            loss += problem.residuals(scores, masked, labels)
            gradient[1] += scores.sum(axis=0)
            gradient[0] += np.einsum("nc,nc->c", scores, rows)
        gradient[0] -= mean * gradient[1]
        return loss / problem.size, (gradient / scale).ravel() / problem.size

    start = np.stack([np.ones(problem.n_classes), mean]) * scale  # the identity
    theta, converged = _minimise(value_and_gradient, start.ravel())
    weight, bias = unpack(theta)
    return (weight, bias - bias.mean()), converged


def fit_matrix(
    problem: LinearProblem, off_diagonal_penalty: float, bias_penalty: float
) -> tuple[Linear, bool]:
    """Return a (C, C) weight and a bias per class, for features in units of `unit`.

    The weight is sought as diag(d) + V with the penalty on all of V. As d is free, the diagonal of V is 0 at
    the minimum, so the minimum is the one sought; but the curvature in V is now nearly a Kronecker product.
    """
    c = problem.n_classes
    per_weight, per_bias = off_diagonal_penalty / (c * (c - 1)), bias_penalty / c
    # The bias is the weight of a constant, chosen so that one penalty fits both.
    constant = np.sqrt(per_weight / per_bias) if per_weight > 0 and per_bias > 0 else 1.0
    curvature, _, _ = problem.curvature()
    moment = problem.second_moment(constant)
    eigenvalues, basis = np.linalg.eigh(moment)
    scale = np.sqrt(_at_least(np.outer(curvature, eigenvalues) + 2 * per_weight, _LEAST_CURVATURE))
    own_scale = np.sqrt(_at_least(curvature * moment.diagonal()[:c], _LEAST_CURVATURE))

    def unpack(theta: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        mixing = (theta[c:].reshape(c, c + 1) / scale) @ basis.T
        return theta[:c] / own_scale, mixing[:, :c], constant * mixing[:, c]

    def value_and_gradient(theta: FloatArray) -> tuple[float, FloatArray]:
        own, mixing, bias = unpack(theta)
        loss, by_weight, by_bias = _loss_of_matrix(problem, mixing + np.diag(own), bias)
        loss += per_weight * np.square(mixing).sum() + per_bias * np.square(bias).sum()
        by_mixing = np.hstack(
            [by_weight + 2 * per_weight * mixing, constant * (by_bias + 2 * per_bias * bias)[:, None]]
        )
        gradient = [by_weight.diagonal() / own_scale, ((by_mixing @ basis) / scale).ravel()]
        return loss, np.concatenate(gradient)

    start = np.concatenate([own_scale, np.zeros(c * (c + 1))])  # the identity
    theta, converged = _minimise(value_and_gradient, start)
    own, mixing, bias = unpack(theta)
    return (mixing + np.diag(own), bias - bias.mean()), converged


def _loss_of_matrix(
    problem: LinearProblem, weight: FloatArray, bias: FloatArray
) -> tuple[float, FloatArray, FloatArray]:
    """The mean loss, with its gradients in the weight and in the bias."""
    loss, by_weight, by_bias = 0.0, np.zeros_like(weight), np.zeros_like(bias)
    for rows, masked, labels in problem:
        scores = rows @ weight.T
        scores += bias
        loss += problem.residuals(scores, masked, labels)
        by_weight += scores.T @ rows
        by_bias += scores.sum(axis=0)
    return loss / problem.size, by_weight / problem.size, by_bias / problem.size


def _minimise(
    value_and_gradient: Callable[[FloatArray], tuple[float, FloatArray]], start: FloatArray
) -> tuple[FloatArray, bool]:
    options = {"maxiter": _MAX_STEPS, "maxfun": 2 * _MAX_STEPS, "gtol": _STOP_AT, "ftol": 0.0, "maxcor": 20}
    found = minimize(value_and_gradient, start, jac=True, method="L-BFGS-B", options=options)
    return found.x, bool(np.square(found.jac).sum() / 2 <= _LEFT_TO_GAIN)


def _apply(rows: FloatArray, weight: FloatArray) -> FloatArray:
    return rows * weight if weight.ndim == 1 else rows @ weight.T


def _at_least(values: FloatArray, fraction: float) -> FloatArray:
    """Raise values to a fraction of the largest one, and above 0."""
    return np.maximum(values, max(fraction * values.max(), np.finfo(float).tiny))
