"""The affine fit: checked rows of logits with labels, and the weight and bias of their least penalised loss.

The loss is convex. Newton's steps are solved by conjugate gradients, preconditioned by the curvature in the weight and
the bias of each class, which is exact for a moderate number of classes, and in the weights between classes by a
Kronecker product: one curvature for all classes, times a number for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_expit, log_softmax

from hf_calib._errors import check
from hf_calib.metrics.checks import check_flag
from hf_calib.scaling._inputs import (
    FloatArray,
    as_binary_labels,
    as_class_labels,
    as_matrix,
    blocks,
    without_zero_weights,
)

LEFT_TO_GAIN = 1e-7  # nats per example, before the last step
_DENSE = 256  # classes up to which the curvature of 2 C parameters is kept whole
_MAX_STEPS = 200
_MAX_PRODUCTS = 250  # with the Hessian, for one step
_LEAST_STEP = 1e-8  # of Newton's: where not even that lowers the value, rounding is all there is

Linear = Callable[[FloatArray], FloatArray]


@dataclass(frozen=True)
class Rows:
    """Checked logits (N, C) and labels: the class of each row (N,), or of sigmoids whether each label is 1 (N, C)."""

    logits: NDArray[Any]
    labels: NDArray[Any]
    weights: FloatArray | None = None  # (N,) above 0 with mean 1
    known: NDArray[np.bool_] | None = None  # (N, C) of sigmoids: where there is an example; None: everywhere

    @classmethod
    def checked(
        cls,
        logits: ArrayLike,
        labels: ArrayLike,
        sample_weight: ArrayLike | None = None,
        *,
        multi_label: bool = False,
    ) -> Rows:
        """The rows that count, of what a user passes."""
        check_flag("multi_label", multi_label)
        matrix = as_matrix(logits, least_columns=1 if multi_label else 2)
        if not multi_label:
            return cls(*without_zero_weights(matrix, as_class_labels(labels, matrix), sample_weight))
        positive, known = as_binary_labels(labels, matrix)
        masked = np.isneginf(matrix)
        n_masked = np.count_nonzero(masked & positive)
        got = f"-inf for the label of {n_masked} examples"
        way_out = "mask only classes that cannot be the label"
        check(n_masked == 0, "logits to be finite for every label", got, way_out)
        if masked.any():
            known = ~masked if known is None else known & ~masked
        return cls(matrix, positive, None, known)

    def __len__(self) -> int:
        return len(self.logits)

    def __getitem__(self, chosen: Any) -> Rows:
        weights = None if self.weights is None else self.weights[chosen] / self.weights[chosen].mean()
        known = None if self.known is None else self.known[chosen]
        return Rows(self.logits[chosen], self.labels[chosen], weights, known)

    @property
    def sigmoid(self) -> bool:
        return self.labels.ndim == 2

    @property
    def effective_size(self) -> float:
        """As many rows as would tell as much without weights (Kish 1965)."""
        return len(self) if self.weights is None else float(len(self) ** 2 / np.square(self.weights).sum())

    @property
    def n_wrong(self) -> int:
        """How many rows, or decisions of sigmoids, the logits have wrong."""
        found = self.logits > 0 if self.sigmoid else self.logits.argmax(axis=1)
        wrong = found != self.labels
        return int(np.count_nonzero(wrong if self.known is None else wrong & self.known))

    def with_logits(self, logits: FloatArray) -> Rows:
        return replace(self, logits=logits)

    def two_classes(self, column: int | slice = slice(None)) -> Rows:
        """The known examples of one label of sigmoids, or of all: rows of two classes with the logits -z/2 and z/2."""
        known = slice(None) if self.known is None else self.known[:, column]
        half = self.logits[:, column][known].ravel().astype(np.float64) / 2
        return Rows(np.stack([-half, half], axis=1), self.labels[:, column][known].ravel().astype(np.int64))

    def losses(self, logits: FloatArray) -> FloatArray:
        """The negative log-likelihood of each row (N,) with other logits."""
        if self.sigmoid:
            losses = -log_expit(np.where(self.labels, logits, -logits))
            return losses.sum(axis=1, where=True if self.known is None else self.known)
        found: FloatArray = -log_softmax(logits, axis=1)[np.arange(len(self)), self.labels]
        return found


class Ridges(NamedTuple):
    """Factors, for the mean loss, of the squares of weight - 1, of the bias and, of a matrix, of all of its weights."""

    own: float
    bias: float
    between: float | None = None


class _Block(NamedTuple):
    """Some rows: logits / unit, with 0 where there is a mask, and probabilities (n, C); weights (n, 1) or None."""

    features: NDArray[Any]
    probs: NDArray[Any]
    weights: NDArray[Any] | None

    def weighted(self, values: NDArray[Any]) -> NDArray[Any]:
        """Multiply in place."""
        if self.weights is not None:
            values *= self.weights
        return values


class _Point(NamedTuple):
    """A function at some parameters: value, gradient, product with the Hessian, and division by something like it."""

    value: float
    gradient: FloatArray
    product: Linear
    preconditioner: Callable[[], Linear]


class _PenalisedLoss:
    """The mean loss of logits / unit with its ridges, as a function of the rows d, bias and, of a matrix, V'."""

    def __init__(self, rows: Rows, unit: float, ridges: Ridges) -> None:
        self.rows, self.unit = rows, unit
        c = rows.logits.shape[1]
        self.mixes = ridges.between is not None
        factors = [*ridges[:2], *[ridges.between] * (c if self.mixes else 0)]
        self.factors = np.array(factors, dtype=np.float64)[:, None]
        self.identity = np.zeros((len(factors), c))
        self.identity[0] = 1
        # Products only lead to the minimum: single precision is enough, unless directions may be nearly flat.
        single = self.mixes and self.factors[1:].min() > 1e-6
        self.precision: Any = np.float32 if single else np.float64

    def __call__(self, theta: FloatArray) -> _Point:
        value, total, curvature = 0.0, np.zeros_like(theta), _OwnCurvature(theta.shape[1])
        kept: list[_Block] = []  # of a matrix, for the products
        for block, labels, losses in self._blocks(theta):
            value += float(block.weighted(losses).sum())
            if self.mixes:
                weights = None if block.weights is None else block.weights.astype(self.precision)
                kept.append(
                    _Block(block.features.astype(self.precision), block.probs.astype(self.precision), weights)
                )
            else:
                curvature.add(block)
            block.probs[np.arange(len(labels)), labels] -= 1
            self._add_gradient(total, block.features, block.weighted(block.probs))

        def product(direction: FloatArray) -> FloatArray:
            total = np.zeros_like(direction)
            narrow = direction.astype(self.precision)
            for block in kept or (block for block, *_ in self._blocks(theta)):
                change = self._scores(block.features, narrow)
                change -= np.einsum("nc,nc->n", change, block.probs)[:, None]
                change *= block.probs
                self._add_gradient(total, block.features, block.weighted(change))
            return self._mean(total, direction)

        def preconditioner() -> Linear:
            for block in kept:
                curvature.add(block)
            least = 1e-6 if self.precision is np.float32 else 1e-13
            own = curvature.inverse(len(self.rows), self.factors[:2], least)
            if not self.mixes:
                return own
            between = _inverse_of_product(kept, len(self.rows), float(self.factors[2, 0]))
            return lambda vector: np.vstack([own(vector[:2]), between(vector[2:])])

        off = theta - self.identity
        penalty = float((self.factors * np.square(off)).sum())
        return _Point(value / len(self.rows) + penalty, self._mean(total, off), product, preconditioner)

    def _blocks(self, theta: FloatArray) -> Iterator[tuple[_Block, NDArray[Any], FloatArray]]:
        """Walk over the rows with their labels and losses (n, 1)."""
        for part, features in blocks(self.rows.logits):
            features *= 1 / self.unit
            masked = np.isneginf(features) if features.min() == -np.inf else None
            if masked is not None:
                features[masked] = 0
            probs = self._scores(features, theta)
            if masked is not None:
                probs[masked] = -np.inf
            labels = self.rows.labels[part]
            probs -= probs.max(axis=1, keepdims=True)
            losses = -probs[np.arange(len(probs)), labels]
            np.exp(probs, out=probs)
            mass = probs @ np.ones(probs.shape[1])
            probs *= (1 / mass)[:, None]
            losses += np.log(mass)
            weights = None if self.rows.weights is None else self.rows.weights[part, None]
            yield _Block(features, probs, weights), labels, losses[:, None]

    def _scores(self, features: NDArray[Any], theta: NDArray[Any]) -> NDArray[Any]:
        scores = features @ (theta[2:] + np.diag(theta[0])) if self.mixes else features * theta[0]
        scores += theta[1]
        return scores

    def _add_gradient(self, total: FloatArray, features: NDArray[Any], slopes: NDArray[Any]) -> None:
        """Add what slopes (n, C) in the scores make of the parameters; of a vector the slopes are overwritten."""
        ones = np.ones(len(slopes), slopes.dtype)
        total[1] += ones @ slopes
        if self.mixes:
            total[2:] += features.T @ slopes
        else:
            slopes *= features
            total[0] += ones @ slopes

    def _mean(self, total: FloatArray, off: FloatArray) -> FloatArray:
        """The gradient of a sum over the rows, with that of the ridges."""
        if self.mixes:
            total[0] = total[2:].diagonal()
        return total / len(self.rows) + 2 * self.factors * off


def fit_affine(
    rows: Rows,
    unit: float,
    ridges: Ridges,
    start: FloatArray | None = None,
    left_to_gain: float = LEFT_TO_GAIN,
) -> FloatArray:
    """Return the parameters of the least penalised mean loss for logits / unit: rows d, bias and, of a matrix, V'.

    A matrix is sought as diag(d) + V with a ridge on all of V: then its curvature is nearly a Kronecker product. At the
    minimum the two share the diagonal so that they pay, together, one ridge of 1 / (1 / d's + 1 / V's).
    """
    loss = _PenalisedLoss(rows, unit, ridges)
    return _minimise(loss, loss.identity if start is None else start, left_to_gain)


class _OwnCurvature:
    """The curvature in a weight and a bias for each class, (2, C): whole, or of many classes class by class."""

    def __init__(self, n_classes: int) -> None:
        self.moments = np.zeros((3, n_classes))  # of p, or of p (1 - p): 1, x, x^2
        self.products = np.zeros((2, n_classes, 2, n_classes)) if n_classes <= _DENSE else None

    def add(self, block: _Block) -> None:
        features, probs, weights = block
        ones = np.ones(len(features))
        if self.products is None:
            weighted = block.weighted(probs - probs * probs)
        else:
            weighted = block.weighted(probs.copy())
            self.products[1, :, 1] += probs.T @ weighted
        self.moments[0] += ones @ weighted
        weighted *= features
        self.moments[1] += ones @ weighted
        if self.products is not None:
            self.products[0, :, 1] += weighted.T @ probs
            self.products[0, :, 0] += weighted.T @ (weighted if weights is None else probs * features)
        weighted *= features
        self.moments[2] += ones @ weighted

    def inverse(self, size: int, ridges: FloatArray, least: float) -> Linear:
        """A function that divides a (2, C) gradient by the mean curvature with that of the ridges."""
        count, first, second = self.moments / size
        second += 2 * ridges[0]
        count += 2 * ridges[1]
        c = len(count)
        if self.products is None:
            determinant = np.maximum(second * count - first**2, least * second * count)
            inverse = np.array([[count, -first], [-first, second]]) / determinant
            return lambda vector: np.einsum("ijc,jc->ic", inverse, vector)
        each = np.arange(c)
        hessian = -self.products / size
        hessian[0, each, 0, each] += second
        hessian[0, each, 1, each] += first
        hessian[1, each, 1, each] += count
        hessian[1, :, 0] = hessian[0, :, 1].T
        root = _inverse_root(hessian.reshape(2 * c, 2 * c), least)
        return lambda vector: (root.T @ (root @ vector.ravel())).reshape(2, c)


def _inverse_root(hessian: FloatArray, least: float) -> FloatArray:
    """The inverse of the Cholesky factor of a matrix that is positive definite but for rounding."""
    floor = least * float(hessian.diagonal().max())
    while True:
        try:
            # Not scipy's solver, whose threads and NumPy's get in each other's way: three times slower on two cores.
            return np.linalg.inv(np.linalg.cholesky(hessian + floor * np.eye(len(hessian))))
        except np.linalg.LinAlgError:
            floor *= 100


def _inverse_of_product(kept: list[_Block], size: int, ridge: float) -> Linear:
    """A function that divides the gradient in V' by one C x C curvature for all classes, times a number for each."""
    c = kept[0].probs.shape[1]
    moment, mass = np.zeros((c, c)), np.zeros(c)
    for block in kept:
        spread = block.weighted(block.probs - block.probs * block.probs)
        mass += spread.sum(axis=0)
        moment += (block.features * spread.sum(axis=1, keepdims=True)).T @ block.features
    eigenvalues, basis = np.linalg.eigh(moment / max(mass.sum(), np.finfo(float).tiny))
    scale = np.outer(np.maximum(eigenvalues, 0), mass / size) + 2 * ridge
    return lambda vector: basis @ ((basis.T @ vector) / scale)


def _minimise(evaluate: Callable[[FloatArray], _Point], start: FloatArray, left_to_gain: float) -> FloatArray:
    """Return parameters whose value is within about `left_to_gain` of the least."""
    parameters, point = start, evaluate(start)
    for _ in range(_MAX_STEPS):
        step, gain = _newton_step(point, left_to_gain)
        if gain <= left_to_gain:
            return parameters + step
        size = 1.0
        while (trial := evaluate(parameters + size * step)).value > point.value - 1e-4 * size * gain:
            # The minimum of the parabola through both values and the slope, which is -2 gain.
            excess = trial.value - point.value + 2 * gain * size
            parabola = gain * size / excess if np.isfinite(excess) else 0.0
            size *= min(max(parabola, 0.1), 0.5)
            if size < _LEAST_STEP:
                return parameters
        parameters, point = parameters + size * step, trial
    return parameters


def _newton_step(point: _Point, left_to_gain: float) -> tuple[FloatArray, float]:
    """Newton's step, the more exact the nearer it ends, and by how much it lowers the quadratic model."""
    step, residual = np.zeros_like(point.gradient), -point.gradient
    precondition = point.preconditioner()
    direction = precondition(residual)
    size = float(np.vdot(residual, direction))
    enough = max(
        size * min(0.1, size), 10 * left_to_gain**2
    )  # an inexact end of the step costs about its square
    for _ in range(_MAX_PRODUCTS):
        if size <= enough:
            break
        product = point.product(direction)
        curvature = float(np.vdot(direction, product))
        if curvature <= 0:  # flat, up to rounding
            break
        step += size / curvature * direction
        residual -= size / curvature * product
        preconditioned = precondition(residual)
        last, size = size, float(np.vdot(residual, preconditioned))
        direction = preconditioned + size / last * direction
    return step, -float(np.vdot(point.gradient, step)) / 2
