"""The affine fit: the weight and the bias with the lowest penalised loss, by Newton's method.

With the unit T, features x = z / T, scores s = W x + b (or w * x + b), weights a_n of the rows
(mean 1) and ridges f, the loss as a function of the parameters theta = (b, W') or (b, w) is

    L = 1/N sum_n a_n (log sum_c exp s_nc - s_ny) + sum_k f_k (theta_k - identity_k)^2.

The identity is b = 0 and W = I, which is a division of the logits by T: without data, the ridges
lead to a temperature. By the scores of a row the loss has the gradient a (p - e_y) and the Hessian
a (diag p - p p'). The chain rule multiplies by 1 for b and by x for the weights:

    gradient = 1/N sum_n a_n (p - e_y) (1, x)' + 2 f (theta - identity).

A direction d of the parameters changes the scores by u = d_b + d_W x, so its product with the
Hessian is

    H d = 1/N sum_n a_n p (u - p'u) (1, x)' + 2 f d.

A Newton step solves H d = -gradient by conjugate gradients, which need products only. It promises
to lower the loss by -gradient'd / 2, half the decrement of Newton; when that is less than the nats
of the start, the step is the last. Any other step is halved until the loss falls by some part of
the promise.

The preconditioner leaves out what one class has to do with another: for each class there is the 2 x
2 block of its own weight and bias, with the sums of p (1 - p) times 1, x and x^2. For a matrix, the
other weights of a class are added as a Kronecker product: the mean curvature of the features, for
all classes the same, times the sum of p (1 - p) of the class. Its eigenvectors serve all classes at
once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hf_calib.metrics.checks import FloatArray
from hf_calib.scaling._base import AffineMap, blocks
from hf_calib.scaling.rows import Rows, at_labels

# In nats per example, before the last step.
_LEFT_TO_GAIN = 1e-7
# Fits take about 10 steps; this number only ends a loop that rounding keeps alive.
_MAX_STEPS = 200
# Products with the Hessian for one step.
_MAX_PRODUCTS = 250
# The most probabilities kept for products; the rest is recomputed.
_KEPT = 2**20
# The shares of a Newton step that are tried; if none lowers the value, only rounding is left.
_SIZES = 0.5 ** np.arange(27)
# The part of its promise by which a step has to lower the loss (Armijo's rule).
_ENOUGH = 1e-4


class Ridges(NamedTuple):
    """Factors of the squares of weight - 1, of the bias and, for a matrix, of the other weights."""

    own: float
    bias: float
    # None is for a map with a weight for each class.
    between: float | None = None


@dataclass(frozen=True)
class Start:
    """Where the fit of a map begins, and when it may end."""

    # The best temperature of the rows.
    temperature: float
    # A map of similar rows, as with another penalty; None begins at the temperature.
    near: AffineMap | None = None
    # The most that the fit may be above the lowest loss, per row.
    nats: float = _LEFT_TO_GAIN


def fit_affine(rows: Rows, ridges: Ridges, start: Start) -> AffineMap:
    """The affine map with the lowest mean loss, including the ridges of logits / temperature."""
    loss: _Loss
    if ridges.between is None:
        loss = _VectorLoss(rows, start.temperature, ridges)
    else:
        loss = _MatrixLoss(rows, start.temperature, ridges)
    near = start.near
    if near is None:
        near = AffineMap(np.array(1 / start.temperature))
    point = loss.at(loss.parameters(near))
    for _ in range(_MAX_STEPS):
        step, gain = _newton_step(point, start.nats)
        if gain <= start.nats:
            return loss.map(point.theta + step)
        for size in _SIZES:
            trial = loss.at(point.theta + size * step)
            if trial.value <= point.value - _ENOUGH * size * gain:
                break
        else:
            return loss.map(point.theta)
        point = trial
    return loss.map(point.theta)


def _newton_step(point: _Point, nats: float) -> tuple[FloatArray, float]:
    """A Newton step, more exact near the minimum, and the decrease that its quadratic model has."""
    step = np.zeros_like(point.gradient)
    residual = -point.gradient
    direction = point.divided(residual)
    size = float(np.vdot(residual, direction))
    # The error of an inexact step costs about its square, so a far point gets a rough step.
    enough = max(size * min(0.1, size), nats**2)
    for _ in range(_MAX_PRODUCTS):
        if size <= enough:
            break
        curved = point.times_hessian(direction)
        curvature = float(np.vdot(direction, curved))
        # The loss is flat up to rounding.
        if curvature <= 0:
            break
        step += size / curvature * direction
        residual -= size / curvature * curved
        divided = point.divided(residual)
        last = size
        size = float(np.vdot(residual, divided))
        direction = divided + size / last * direction
    return step, -float(np.vdot(point.gradient, step)) / 2


class _Block(NamedTuple):
    """Some rows at a point; the features are 0 if masked."""

    weights: FloatArray
    labels: NDArray[Any]
    features: FloatArray
    probs: FloatArray
    losses: FloatArray


class _Loss(ABC):
    """The mean loss of logits / unit with its ridges, as a function of the parameters."""

    # The parameters to which the ridges shrink, and the factor of each square.
    identity: FloatArray
    factors: FloatArray

    def __init__(self, rows: Rows, unit: float, ridges: Ridges) -> None:
        self.rows = rows
        self.unit = unit
        self.ridges = ridges
        self.weights = rows.shares
        self.has_masks = rows.logits.min() == -np.inf
        n_classes = rows.logits.shape[1]
        # The sums over the rows, by their labels, of 1 and of the label's feature, which the
        # gradient subtracts at every point.
        scores = at_labels(rows.logits, rows.labels).astype(np.float64)
        counts = np.bincount(rows.labels, self.weights, n_classes)
        sums = np.bincount(rows.labels, self.weights * scores, n_classes)
        self.of_labels = np.stack([counts, sums / unit])

    def map(self, theta: FloatArray) -> AffineMap:
        """The affine map of the logits with these parameters."""
        # A common offset changes no probability.
        bias = theta[0] - theta[0].mean()
        return AffineMap(self.weight(theta) / self.unit, bias)

    def blocks_at(self, theta: FloatArray) -> Iterator[_Block]:
        """Iterate over the rows with their probabilities at these parameters."""
        for part, features in blocks(self.rows.logits):
            labels = self.rows.labels[part]
            features *= 1 / self.unit
            # The product of -inf with a weight may be NaN, so the mask waits for the scores.
            masked = np.isneginf(features) if self.has_masks else None
            if masked is not None:
                features[masked] = 0
            probs = self.scores(features, theta)
            probs += theta[0]
            if masked is not None:
                probs[masked] = -np.inf
            probs -= probs.max(axis=1)[:, None]
            of_labels = at_labels(probs, labels)
            np.exp(probs, out=probs)
            # A product with ones is faster than a sum over rows.
            mass = probs @ np.ones(probs.shape[1])
            probs *= (1 / mass)[:, None]
            losses = np.log(mass) - of_labels
            yield _Block(self.weights[part], labels, features, probs, losses)

    @abstractmethod
    def at(self, theta: FloatArray) -> _Point:
        """The loss at these parameters, with its gradient and the products with its Hessian."""

    @abstractmethod
    def parameters(self, found: AffineMap) -> FloatArray:
        """The parameters of an affine map of the logits."""

    @abstractmethod
    def weight(self, theta: FloatArray) -> FloatArray:
        """The weight of a map of the features."""

    @abstractmethod
    def scores(self, features: FloatArray, theta: FloatArray) -> FloatArray:
        """The mapped features, without the bias."""


class _VectorLoss(_Loss):
    """The loss of a map with a weight for each class, theta = (b, w)."""

    def __init__(self, rows: Rows, unit: float, ridges: Ridges) -> None:
        super().__init__(rows, unit, ridges)
        ones = np.ones(rows.logits.shape[1])
        self.identity = np.stack([0 * ones, ones])
        self.factors = np.stack([ridges.bias * ones, ridges.own * ones])

    def at(self, theta: FloatArray) -> _VectorPoint:
        return _VectorPoint(self, theta)

    def parameters(self, found: AffineMap) -> FloatArray:
        bias = found(np.zeros(self.identity.shape[1]))
        return np.stack([bias, found.weight * self.unit * self.identity[1]])

    def weight(self, theta: FloatArray) -> FloatArray:
        return theta[1]

    def scores(self, features: FloatArray, theta: FloatArray) -> FloatArray:
        return features * theta[1]


class _MatrixLoss(_Loss):
    """The loss of a map with a weight for each pair of classes, theta = (b, W')."""

    def __init__(self, rows: Rows, unit: float, ridges: Ridges) -> None:
        super().__init__(rows, unit, ridges)
        n_classes = rows.logits.shape[1]
        own = np.eye(n_classes)
        between: Any = ridges.between
        of_weights = np.where(own, ridges.own, between)
        self.identity = np.vstack([np.zeros(n_classes), own])
        self.factors = np.vstack([np.full(n_classes, ridges.bias), of_weights])

    def at(self, theta: FloatArray) -> _MatrixPoint:
        return _MatrixPoint(self, theta)

    def parameters(self, found: AffineMap) -> FloatArray:
        own = self.identity[1:]
        weight = found.weight * self.unit
        bias = found(np.zeros(len(own)))
        return np.vstack([bias, weight.T if weight.ndim == 2 else weight * own])

    def weight(self, theta: FloatArray) -> FloatArray:
        return theta[1:].T

    def scores(self, features: FloatArray, theta: FloatArray) -> FloatArray:
        return features @ theta[1:]


class _Point(ABC):
    """The loss at certain parameters: value, gradient, and products for a Newton step."""

    value: float
    gradient: FloatArray

    def __init__(self, loss: _Loss, theta: FloatArray) -> None:
        self.theta = theta
        self._loss = loss
        self._n = len(loss.rows)
        self._total: Any = 0.0
        # Sums over the rows, by class: of p and of p^2, each times 1, x and x^2.
        self._sums = np.zeros((3, theta.shape[1]))
        self._squares = np.zeros((3, theta.shape[1]))

    def _add(self, block: _Block) -> FloatArray:
        """Add the sums of a block, and return its p x."""
        weights = block.weights
        probs = block.probs
        first = probs * block.features
        second = first * block.features
        self._total += block.losses @ weights
        self._sums += weights @ probs, weights @ first, weights @ second
        self._squares += (
            weights @ (probs * probs),
            weights @ (first * probs),
            weights @ (first * first),
        )
        return first

    def _finish(self, slope: FloatArray) -> None:
        """Find the results from the sums over all blocks; the slope is without the ridges."""
        factors = self._loss.factors
        off = self.theta - self._loss.identity
        self.value = self._total / self._n + float(np.vdot(factors, np.square(off)))
        self.gradient = slope / self._n + 2 * factors * off
        self._curvatures = (self._sums - self._squares) / self._n
        self._inverse = self._inverse_blocks()

    def _inverse_blocks(self) -> FloatArray:
        """The inverses (2, 2, C) of the curvature of each class's bias and own weight."""
        count, first, second = self._curvatures
        bias = 2 * self._loss.ridges.bias + count
        own = 2 * self._loss.ridges.own + second
        # Rounding may make it 0 for a class whose features are all equal.
        determinant = np.maximum(own * bias - first**2, 1e-13 * own * bias)
        return np.array([[own, -first], [-first, bias]]) / determinant

    def times_hessian(self, direction: FloatArray) -> FloatArray:
        """The product of the Hessian with a direction of the parameters."""
        ridges = 2 * self._loss.factors * direction
        return self._product(direction) / self._n + ridges

    @abstractmethod
    def _product(self, direction: FloatArray) -> FloatArray:
        """The sum over the rows, without the ridges."""

    @abstractmethod
    def divided(self, direction: FloatArray) -> FloatArray:
        """The product of the preconditioner with a direction: about the Hessian's inverse."""


class _VectorPoint(_Point):
    """A point of a map with a weight for each class."""

    def __init__(self, loss: _Loss, theta: FloatArray) -> None:
        super().__init__(loss, theta)
        # The weights, p x and p of all rows; nothing if there are too many.
        self._kept: list[tuple[FloatArray, FloatArray, FloatArray]] = []
        for block in loss.blocks_at(theta):
            first = self._add(block)
            if loss.rows.logits.size <= _KEPT:
                self._kept.append((block.weights, first, block.probs))
        self._finish(slope=self._sums[:2] - loss.of_labels)

    def _product(self, direction: FloatArray) -> FloatArray:
        # The sums of a p u come from the moments; only those of a p (p'u) need the rows.
        total = direction[0] * self._sums[:2] + direction[1] * self._sums[1:]
        for weights, first, probs in self._kept or self._recomputed():
            change = weights * (probs @ direction[0] + first @ direction[1])
            total -= change @ probs, change @ first
        return total

    def _recomputed(self) -> Iterator[tuple[FloatArray, FloatArray, FloatArray]]:
        for block in self._loss.blocks_at(self.theta):
            yield block.weights, block.features * block.probs, block.probs

    def divided(self, direction: FloatArray) -> FloatArray:
        return np.einsum("ijc,jc->ic", self._inverse, direction)


class _KeptBlock(NamedTuple):
    """What the products with the Hessian need, in single precision if that is enough."""

    weights: FloatArray
    features: FloatArray
    # The probabilities times the weights.
    mass: FloatArray


class _MatrixPoint(_Point):
    """A point of a map with a weight for each pair of classes."""

    def __init__(self, loss: _MatrixLoss, theta: FloatArray) -> None:
        super().__init__(loss, theta)
        between: Any = loss.ridges.between
        # Single precision is enough, unless some directions may be nearly flat.
        is_enough = min(between, loss.ridges.bias) > 1e-6
        self._dtype: Any = np.float32 if is_enough else np.float64
        self._kept: list[_KeptBlock] = []
        # The sum of a p (1 - p) x x' over the rows and the classes.
        mixed: Any = 0.0
        slope = np.zeros_like(theta)
        for block in loss.blocks_at(theta):
            self._add(block)
            mass = block.probs * block.weights[:, None]
            kept = self._narrowed(block, mass)
            self._kept.append(kept)
            norms = np.einsum("nc,nc->n", block.probs, block.probs)
            spread = block.weights * (1 - norms)
            scaled = kept.features * spread.astype(self._dtype)[:, None]
            mixed += scaled.T @ kept.features
            # From here on it is a (p - e_y).
            mass[np.arange(len(mass)), block.labels] -= block.weights
            slope[1:] += block.features.T @ mass
        slope[0] = self._sums[0] - loss.of_labels[0]
        self._finish(slope)
        count = self._curvatures[0]
        # No class has any curvature left if all probabilities are 0 or 1.
        total_count = max(count.sum(), np.finfo(float).tiny)
        eigenvalues, self._basis = np.linalg.eigh(mixed / self._n / total_count)
        # Rounding may make eigenvalues negative.
        self._scale = np.outer(np.maximum(eigenvalues, 0), count) + 2 * between

    def _narrowed(self, block: _Block, mass: FloatArray) -> _KeptBlock:
        return _KeptBlock(
            weights=block.weights.astype(self._dtype),
            features=block.features.astype(self._dtype),
            mass=mass.astype(self._dtype),
        )

    def _product(self, direction: FloatArray) -> FloatArray:
        narrow = direction.astype(self._dtype)
        total = np.zeros_like(direction)
        for weights, features, mass in self._kept:
            change = features @ narrow[1:]
            change += narrow[0]
            mean = np.einsum("nc,nc->n", change, mass) / weights
            change -= mean[:, None]
            change *= mass
            # A product with ones is faster than a sum over rows.
            total[0] += np.ones(len(change), change.dtype) @ change
            total[1:] += features.T @ change
        return total

    def divided(self, direction: FloatArray) -> FloatArray:
        weight = direction[1:]
        own_part = [direction[0], weight.diagonal()]
        bias, own = np.einsum("ijc,jc->ic", self._inverse, own_part)
        between = self._basis @ ((self._basis.T @ weight) / self._scale)
        return np.vstack([bias, between + np.diag(own)])
