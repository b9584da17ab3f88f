"""Maximum-likelihood fits of linear maps of the logits: the convex problem, and its curvature.

Parameters are found for features in units of `unit`, a number near the fitted temperature, so that neither
the solver nor a penalty sees the scale of the logits. Newton's steps are preconditioned by the curvature in
the weight and the bias of each class, which is exact for a moderate number of classes, and in the weights
between classes by the curvature of each class, or for many classes by a Kronecker product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hf_calib.scaling._inputs import FloatArray, blocks
from hf_calib.scaling._newton import Point, minimise
from hf_calib.scaling._objectives import SoftmaxObjective
from hf_calib.scaling._solver import BOUNDS, best_temperature

Linear = tuple[FloatArray, FloatArray]  # weight (C,) or (C, C), bias (C,)


class Near(NamedTuple):
    """What a fit to the same rows has found, for the next one: the temperature, and parameters to start from."""

    temperature: float
    solution: FloatArray | None = None


LEFT_TO_GAIN = 1e-7  # nats per example, before the last step
_LEAST_CURVATURE = 1e-13  # relative to the largest: flatter directions are left where they start
_BY_CLASS = 50  # classes up to which the curvature in V is kept for each of them
_DENSE = 256  # classes up to which the curvature of 2 C parameters is kept whole


_ONE = np.ones((1, 1))  # the weight of every row, where there are none
_SMALLEST_SPREAD = 1e-150  # below, features are as good as constant, and their squares are 0


class LinearProblem:
    """Features and labels, block by block, and how much the labels are smoothed: 0, or 1 / (N + 1).

    `smoothing` is the share of a label's 1 that is spread evenly over all classes of its row.
    """

    def __init__(
        self,
        logits: NDArray[Any],
        labels: NDArray[np.int64],
        features: Callable[[FloatArray], FloatArray],
        weights: FloatArray | None = None,
    ) -> None:
        self.logits, self.labels, self.features, self.weights = logits, labels, features, weights
        self.size, self.n_classes = logits.shape
        # As many rows as would tell as much without weights (Kish 1965).
        self.effective_size = self.size if weights is None else float(weights.sum() ** 2 / (weights**2).sum())
        self.has_masks = any(block.min() == -np.inf for _, block in blocks(logits))
        self.smoothing = 0.0
        self.unit = 1.0
        self.left_to_gain = LEFT_TO_GAIN
        self.start: FloatArray | None = None  # a solution for other penalties; None: the identity
        self.solution: FloatArray | None = None

    def typical_unit(self, temperature: float | None = None) -> float:
        """The temperature, which may be known; where there is none, the spread of the features."""
        if temperature is None:
            objective = SoftmaxObjective(self.logits, self.labels, self.weights)
            temperature = 1.0 if objective.is_constant else best_temperature(objective)
        if BOUNDS[0] * 1.001 < temperature < BOUNDS[1] / 1.001:
            return temperature
        total = sum(np.square(rows - rows.mean(axis=1, keepdims=True)).sum() for rows, *_ in self)
        spread = float(np.sqrt(total / self.logits.size))
        return spread if spread > _SMALLEST_SPREAD else 1.0

    @property
    def separated_below(self) -> float:
        """The mean loss below which each row's is less than log 2: then every label is ranked first."""
        return -np.inf if self.smoothing else np.log(2) / self.size

    def __iter__(
        self,
    ) -> Iterator[tuple[FloatArray, NDArray[np.bool_] | None, NDArray[np.int64], FloatArray]]:
        """Yield features, with 0 for masked ones, the mask if there is any, labels, and weights (n, 1)."""
        for rows, block in blocks(self.logits):
            block = self.features(block)
            block *= 1 / self.unit
            weights = _ONE if self.weights is None else self.weights[rows, None]
            if self.has_masks and (masked := np.isneginf(block)).any():
                block[masked] = 0
                yield block, masked, self.labels[rows], weights
            else:
                yield block, None, self.labels[rows], weights

    def probabilities(
        self,
        scores: FloatArray,
        masked: NDArray[np.bool_] | None,
        labels: NDArray[np.int64],
        weights: FloatArray,
    ) -> float:
        """Turn scores into probabilities, and return their summed loss."""
        if masked is not None:
            scores[masked] = -np.inf
        scores -= scores.max(axis=1, keepdims=True)
        loss = -(1 - self.smoothing) * (scores[np.arange(len(labels)), labels] * weights[:, 0]).sum()
        if self.smoothing:
            spread = self._spread(scores, masked)
            loss -= np.multiply(spread * weights, scores, where=spread > 0, out=np.zeros_like(scores)).sum()
        np.exp(scores, out=scores)
        mass = scores @ np.ones(self.n_classes)
        loss += (np.log(mass) * weights[:, 0]).sum()
        scores *= (1 / mass)[:, None]
        return float(loss)

    def subtract_targets(
        self,
        probs: FloatArray,
        masked: NDArray[np.bool_] | None,
        labels: NDArray[np.int64],
        weights: FloatArray,
    ) -> None:
        """Turn probabilities into the gradient of the loss in the scores."""
        probs[np.arange(len(labels)), labels] -= 1 - self.smoothing
        if self.smoothing:
            probs -= self._spread(probs, masked)
        if weights is not _ONE:
            probs *= weights

    def _spread(self, scores: FloatArray, masked: NDArray[np.bool_] | None) -> FloatArray:
        """The share of a label's 1 that smoothing gives to each class that is not masked."""
        if masked is None:
            return np.full((1, self.n_classes), self.smoothing / self.n_classes)
        return self.smoothing * ~masked / np.count_nonzero(~masked, axis=1)[:, None]

    def separated_classes(self, *, free_bias: bool) -> NDArray[np.bool_]:
        """Which classes are separated from all others by their own feature, at a threshold (0 if the bias is not free).

        Their likelihood increases without bound as the class's weight grows.
        """
        own_low, other_low = np.full((2, self.n_classes), np.inf)
        own_high, other_high = np.full((2, self.n_classes), -np.inf)
        for rows, masked, labels, _ in self:
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
        for rows, masked, labels, _ in self:
            scores = _apply(rows, weight) + bias
            if masked is not None:
                scores[masked] = -np.inf
            each = np.arange(len(labels))
            own = scores[each, labels].copy()
            scores[each, labels] = -np.inf
            if not (own > scores.max(axis=1)).all():
                return False
        return True


class _OwnCurvature:
    """The curvature in a weight and a bias for each class, (2, C), gathered block by block.

    All of it for a moderate number of classes, otherwise that of each class's two parameters.
    """

    def __init__(self, n_classes: int) -> None:
        self.moments = np.zeros((3, n_classes))  # of p: 1, x, x^2; or of p (1 - p)
        self.products = np.zeros((2, n_classes, 2, n_classes)) if n_classes <= _DENSE else None

    def add(self, rows: FloatArray, probs: FloatArray, weights: FloatArray) -> None:
        ones = np.ones(len(rows))
        own = probs if weights is _ONE else probs * weights
        if self.products is None:
            weighted = own - own * probs
        else:
            weighted = own.copy()
            self.products[1, :, 1] += probs.T @ own
        self.moments[0] += ones @ weighted
        weighted *= rows
        self.moments[1] += ones @ weighted
        if self.products is not None:
            self.products[0, :, 1] += weighted.T @ probs
            self.products[0, :, 0] += weighted.T @ (weighted if weights is _ONE else probs * rows)
        weighted *= rows
        self.moments[2] += ones @ weighted

    def inverse(
        self, size: int, penalties: FloatArray, least: float = _LEAST_CURVATURE
    ) -> Callable[[FloatArray], FloatArray]:
        """A function that divides a (2, C) gradient by the mean curvature with that of the penalties, (2, 1)."""
        count, first, second = self.moments / size
        if self.products is not None:
            c = len(count)
            each = np.arange(c)
            hessian = -self.products / size
            hessian[0, each, 0, each] += second + 2 * penalties[0]
            hessian[0, each, 1, each] += first
            hessian[1, each, 1, each] += count + 2 * penalties[1]
            hessian[1, :, 0] = hessian[0, :, 1].T
            divide = _division_by(hessian.reshape(2 * c, 2 * c), least)
            return lambda vector: divide(vector.ravel()).reshape(2, c)
        by_weight = _at_least(second + 2 * penalties[0], least)
        by_bias = _at_least(count + 2 * penalties[1], least)
        determinant = np.maximum(by_weight * by_bias - first**2, least * by_weight * by_bias)
        inverse = np.array([[by_bias, -first], [-first, by_weight]]) / determinant
        return lambda vector: np.einsum("ijc,jc->ic", inverse, vector)


def fit_vector(
    problem: LinearProblem, weight_penalty: float = 0.0, bias_penalty: float = 0.0
) -> tuple[Linear, bool]:
    """Return a weight and a bias per class, for features in units of `unit`, and whether they converged.

    The penalties are those of a squared (weight - 1) and of a squared bias, for the mean loss.
    """
    penalties = np.array([[weight_penalty], [bias_penalty]])
    identity = np.stack([np.ones(problem.n_classes), np.zeros(problem.n_classes)])
    start = identity if problem.start is None else problem.start

    def evaluate(theta: FloatArray) -> Point:
        loss, gradient = 0.0, np.zeros_like(theta)
        curvature = _OwnCurvature(problem.n_classes)
        for rows, masked, labels, weights in problem:
            ones = np.ones(len(rows))
            probs = rows * theta[0]
            probs += theta[1]
            loss += problem.probabilities(probs, masked, labels, weights)
            curvature.add(rows, probs, weights)
            problem.subtract_targets(probs, masked, labels, weights)
            gradient[1] += ones @ probs
            probs *= rows
            gradient[0] += ones @ probs
        value = loss / problem.size + float((penalties * np.square(theta - identity)).sum())
        gradient = gradient / problem.size + 2 * penalties * (theta - identity)

        def product(direction: FloatArray) -> FloatArray:
            total = np.zeros_like(direction)
            for rows, masked, labels, weights in problem:
                ones = np.ones(len(rows))
                probs = rows * theta[0]
                probs += theta[1]
                problem.probabilities(probs, masked, labels, weights)
                change = rows * direction[0]
                change += direction[1]
                change -= np.einsum("nc,nc->n", change, probs)[:, None]
                change *= probs
                if weights is not _ONE:
                    change *= weights
                total[1] += ones @ change
                change *= rows
                total[0] += ones @ change
            return total / problem.size + 2 * penalties * direction

        return Point(value, gradient, product, lambda: curvature.inverse(problem.size, penalties))

    theta, converged = minimise(evaluate, start, problem.left_to_gain, problem.separated_below)
    problem.solution = theta
    return (theta[0], theta[1] - theta[1].mean()), converged


def fit_matrix(
    problem: LinearProblem, off_diagonal_penalty: float, bias_penalty: float, diagonal_penalty: float = 0.0
) -> tuple[Linear, bool]:
    """Return a (C, C) weight and a bias per class, for features in units of `unit`.

    The penalties are those of the squared weights off the diagonal, of the squared bias, and of the squared
    distance of the diagonal from 1, for the mean loss.

    The weight is sought as diag(d) + V with the penalty on all of V: then its curvature is nearly a Kronecker
    product. At the minimum the two share the diagonal so that they pay, together, one penalty of
    1 / (1 / d's + 1 / V's).
    """
    c = problem.n_classes
    own_penalty = diagonal_penalty
    if off_diagonal_penalty > 0:
        own_penalty = diagonal_penalty * off_diagonal_penalty / (off_diagonal_penalty - diagonal_penalty)
    own_penalties = np.array([[own_penalty], [bias_penalty]])
    # Rows are d, the bias, V transposed.
    penalties = np.vstack([own_penalties, np.full((c, 1), off_diagonal_penalty)])
    # Products only lead to the minimum: single precision will do, unless many directions may be flat. Those that
    # are nearly so by rounding alone are then not followed.
    single = off_diagonal_penalty > 0 and bias_penalty > 0
    precision: Any = np.float32 if single else np.float64
    least_curvature = 1e-6 if single else _LEAST_CURVATURE
    identity = np.zeros((c + 2, c))
    identity[0] = 1
    start = identity if problem.start is None else problem.start

    def evaluate(theta: FloatArray) -> Point:
        loss, gradient = 0.0, np.zeros_like(theta)
        weight = theta[2:] + np.diag(theta[0])
        kept = []  # what a product needs
        for rows, masked, labels, weights in problem:
            ones = np.ones(len(rows))
            probs = rows @ weight
            probs += theta[1]
            loss += problem.probabilities(probs, masked, labels, weights)
            own = _ONE if weights is _ONE else weights.astype(precision)
            kept.append((rows.astype(precision), probs.astype(precision), own))
            problem.subtract_targets(probs, masked, labels, weights)
            gradient[2:] += rows.T @ probs
            gradient[1] += ones @ probs
        gradient[0] = gradient[2:].diagonal()
        value = loss / problem.size + float((penalties * np.square(theta - identity)).sum())
        gradient = gradient / problem.size + 2 * penalties * (theta - identity)

        def product(direction: FloatArray) -> FloatArray:
            total = np.zeros_like(direction)
            change_of_weight = (direction[2:] + np.diag(direction[0])).astype(precision)
            change_of_bias = direction[1].astype(precision)
            for rows, probs, weights in kept:
                change = rows @ change_of_weight
                change += change_of_bias
                change -= np.einsum("nc,nc->n", change, probs)[:, None]
                change *= probs
                if weights is not _ONE:
                    change *= weights
                total[2:] += rows.T @ change
                total[1] += np.ones(len(rows), precision) @ change
            total[0] = total[2:].diagonal()
            return total / problem.size + 2 * penalties * direction

        def preconditioner() -> Callable[[FloatArray], FloatArray]:
            curvature = _OwnCurvature(c)
            for rows_probs_weights in kept:
                curvature.add(*rows_probs_weights)
            own_inverse = curvature.inverse(problem.size, own_penalties, least_curvature)
            if c <= _BY_CLASS:
                mixing_inverse = _inverse_by_class(kept, problem.size, penalties[2, 0], bias_penalty)
            else:
                mixing_inverse = _inverse_of_product(kept, problem.size, penalties[2, 0])

            def precondition(vector: FloatArray) -> FloatArray:
                found = mixing_inverse(vector)
                found[:2] += own_inverse(vector[:2])
                return found

            return precondition

        return Point(value, gradient, product, preconditioner)

    theta, converged = minimise(evaluate, start, problem.left_to_gain, problem.separated_below)
    problem.solution = theta
    return (theta[2:].T + np.diag(theta[0]), theta[1] - theta[1].mean()), converged


def _inverse_by_class(
    kept: list[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]],
    size: int,
    weight_penalty: float,
    bias_penalty: float,
) -> Callable[[FloatArray], FloatArray]:
    """A function that divides the gradient in V and the bias by the curvature of each class: C x C^2 numbers."""
    c = kept[0][1].shape[1]
    blocks_of = np.zeros((c, c + 1, c + 1))
    for rows, probs, weights in kept:
        with_constant = np.hstack([rows, np.ones((len(rows), 1), rows.dtype)])
        spread = probs - probs * probs
        if weights is not _ONE:
            spread *= weights
        for number, block in enumerate(blocks_of):
            block += (with_constant * spread[:, number, None]).T @ with_constant
    blocks_of /= size
    blocks_of += 2 * np.diag([*[weight_penalty] * c, bias_penalty])
    eigenvalues, bases = np.linalg.eigh(blocks_of)
    eigenvalues = _at_least(eigenvalues, _LEAST_CURVATURE)

    def inverse(vector: FloatArray) -> FloatArray:
        by_class = np.vstack([vector[2:], vector[1]]).T[:, :, None]
        divided = (bases @ ((bases.transpose(0, 2, 1) @ by_class) / eigenvalues[:, :, None]))[:, :, 0].T
        return np.vstack([np.zeros(c), divided[c], divided[:c]])

    return inverse


def _inverse_of_product(
    kept: list[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]], size: int, weight_penalty: float
) -> Callable[[FloatArray], FloatArray]:
    """A function that divides the gradient in V by one C x C curvature for all classes, times a number for each."""
    c = kept[0][1].shape[1]
    moment, mass = np.zeros((c, c)), np.zeros(c)
    for rows, probs, weights in kept:
        spread = probs - probs * probs
        if weights is not _ONE:
            spread *= weights
        mass += spread.sum(axis=0)
        moment += (rows * spread.sum(axis=1, keepdims=True)).T @ rows
    eigenvalues, basis = np.linalg.eigh(moment / max(mass.sum(), np.finfo(float).tiny))
    scale = _at_least(np.outer(eigenvalues, mass / size) + 2 * weight_penalty, _LEAST_CURVATURE)
    own = np.zeros((2, len(mass)))
    return lambda vector: np.vstack([own, basis @ ((basis.T @ vector[2:]) / scale)])


def _division_by(hessian: FloatArray, least: float) -> Callable[[FloatArray], FloatArray]:
    """A function that divides by a positive semidefinite matrix; flat directions count as `least` of the steepest."""
    floor = max(least * float(hessian.diagonal().max()), np.finfo(float).tiny)
    try:
        # Not scipy's solver, whose threads and NumPy's get in each other's way: three times slower on two cores.
        root = np.linalg.inv(np.linalg.cholesky(hessian + floor * np.eye(len(hessian))))
    except np.linalg.LinAlgError:  # by rounding
        eigenvalues, basis = np.linalg.eigh(hessian)
        eigenvalues = _at_least(eigenvalues, least)
        return lambda vector: basis @ ((basis.T @ vector) / eigenvalues)
    return lambda vector: root.T @ (root @ vector)


def _apply(rows: FloatArray, weight: FloatArray) -> FloatArray:
    return rows * weight if weight.ndim == 1 else rows @ weight.T


def _at_least(values: FloatArray, fraction: float) -> FloatArray:
    """Raise values to a fraction of the largest one, and above 0."""
    return np.maximum(values, max(fraction * values.max(), np.finfo(float).tiny))
