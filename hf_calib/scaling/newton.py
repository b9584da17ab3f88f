"""The affine fit: checked rows of logits with labels, and the weight and bias of their least penalised loss.

The loss is convex. Newton's steps are solved by conjugate gradients, whose preconditioner adds what is right for the
weight and the bias of each class alone to what is nearly right for all weights of a matrix: a Kronecker product of one
curvature for all classes with a number for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_expit, log_softmax

from hf_calib.metrics.checks import FloatArray, check_flag, check_weights
from hf_calib.scaling._base import as_binary_labels, as_class_labels, as_matrix, blocks
from hf_calib.scaling.affine import AffineMap

LEFT_TO_GAIN = 1e-7  # nats per example, before the last step
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
        cls, logits: ArrayLike, labels: ArrayLike, weights: ArrayLike | None = None, multi_label: bool = False
    ) -> Rows:
        """The rows that count, of what a user passes."""
        check_flag("multi_label", multi_label)
        matrix = as_matrix(logits, least_columns=1 if multi_label else 2)
        if multi_label:
            positive, known = as_binary_labels(labels, matrix)
            return cls(matrix, positive, known=known)
        rows = cls(matrix, as_class_labels(labels, matrix), check_weights(weights, len(matrix)))
        if rows.weights is None:
            return rows
        return rows[slice(None) if rows.weights.all() else rows.weights > 0]

    def __len__(self) -> int:
        return len(self.logits)

    def __getitem__(self, chosen: Any) -> Rows:
        weights = None if self.weights is None else self.weights[chosen] / self.weights[chosen].mean()
        known = None if self.known is None else self.known[chosen]
        return Rows(self.logits[chosen], self.labels[chosen], weights, known)

    @property
    def sigmoid(self) -> bool:
        return self.labels.ndim == 2

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
    """Factors, for the mean loss, of the squares of weight - 1, of the bias and, of a matrix, of the other weights."""

    own: float
    bias: float
    between: float | None = None


def fit_affine(
    rows: Rows, unit: float, ridges: Ridges, start: AffineMap | None = None, nats: float = LEFT_TO_GAIN
) -> AffineMap:
    """The map whose mean loss, with ridges as of a map of logits / unit, is within about `nats` of the least."""
    loss = _PenalisedLoss(rows, unit, ridges)
    theta = loss.identity if start is None else loss.parameters(start)
    point = loss(theta)
    for _ in range(_MAX_STEPS):
        step, gain = _newton_step(point, nats)
        if gain <= nats:
            theta = theta + step
            break
        size = 1.0
        while (trial := loss(theta + size * step)).value > point.value - 1e-4 * size * gain:
            # The minimum of the parabola through both values and the slope, which is -2 gain.
            excess = trial.value - point.value + 2 * gain * size
            parabola = gain * size / excess if np.isfinite(excess) else 0.0
            size *= min(max(parabola, 0.1), 0.5)
            if size < _LEAST_STEP:
                return loss.map(theta)
        theta, point = theta + size * step, trial
    return loss.map(theta)


class _Point(NamedTuple):
    """A function at some parameters: value, gradient, product with the Hessian, and division by something like it."""

    value: float
    gradient: FloatArray
    product: Linear
    preconditioner: Callable[[], Linear]


def _newton_step(point: _Point, nats: float) -> tuple[FloatArray, float]:
    """Newton's step, the more exact the nearer it ends, and by how much it lowers the quadratic model."""
    step, residual = np.zeros_like(point.gradient), -point.gradient
    precondition = point.preconditioner()
    direction = precondition(residual)
    size = float(np.vdot(residual, direction))
    # An inexact end of the step costs about its square.
    enough = max(size * min(0.1, size), nats**2)
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


class _PenalisedLoss:
    """The mean loss of logits / unit with its ridges, as a function of the rows b, w or of the rows b, W'.

    As in every exponential family, value and gradient need of the labels only the sums that `labelled` holds.
    """

    def __init__(self, rows: Rows, unit: float, ridges: Ridges) -> None:
        self.rows, self.unit = rows, unit
        c = rows.logits.shape[1]
        self.mixes = ridges.between is not None
        own = np.eye(c) if self.mixes else np.ones((1, c))
        self.identity = np.vstack([np.zeros(c), own])
        between = ridges.between or 0.0
        self.ridges = np.vstack([np.full(c, ridges.bias), ridges.own * own + between * (1 - own)])
        self.between = between
        # Products only lead to the minimum: single precision is enough, unless directions may be nearly flat.
        self.narrow: Any = np.float32 if min(between, ridges.bias) > 1e-6 else np.float64
        self.labelled = np.zeros_like(self.identity)
        for part, features, _ in self._features():
            indicators = np.zeros_like(features)
            weights = 1 if rows.weights is None else rows.weights[part]
            indicators[np.arange(len(features)), rows.labels[part]] = weights
            self._add_sums(self.labelled, features, indicators)

    def parameters(self, found: AffineMap) -> FloatArray:
        """Those of a map of the logits."""
        weight = found.weight * self.unit
        own = weight.T if weight.ndim == 2 else weight * self.identity[1:]
        return np.vstack([np.broadcast_to(0.0 if found.bias is None else found.bias, own[0].shape), own])

    def map(self, theta: FloatArray) -> AffineMap:
        """The map of the logits that has these parameters."""
        weight = theta[1:].T if self.mixes else theta[1]
        return AffineMap(weight / self.unit, theta[0] - theta[0].mean())

    def __call__(self, theta: FloatArray) -> _Point:
        n, c = self.rows.logits.shape
        value, total, moments = 0.0, -self.labelled, np.zeros((3, c))  # of p (1 - p): 1, x, x^2
        kept = []  # of a matrix, for the products: features, probabilities and weighted probabilities (n, C)
        for features, probs, mass, loss in self._blocks(theta):
            value += loss
            self._add_sums(total, features, mass)
            if self.mixes:
                narrow = probs.astype(self.narrow)
                weighted = narrow if mass is probs else mass.astype(self.narrow)
                kept.append((features.astype(self.narrow), narrow, weighted))
            spread = mass - mass * probs
            ones = np.ones(len(spread))
            for moment in moments:
                moment += ones @ spread
                spread *= features

        def product(direction: FloatArray) -> FloatArray:
            total = np.zeros_like(direction)
            narrow = direction.astype(self.narrow)
            for features, probs, mass in kept or (block[:3] for block in self._blocks(theta)):
                change = self._scores(features, narrow)
                change -= np.einsum("nc,nc->n", change, probs)[:, None]
                change *= mass
                self._add_sums(total, features, change)
            return total / n + 2 * self.ridges * direction

        def preconditioner() -> Linear:
            count, first, second = moments / n
            ridges = 2 * self._own(self.ridges)
            own_count, second = count + ridges[0], second + ridges[1]
            determinant = np.maximum(second * own_count - first**2, 1e-13 * second * own_count)
            inverse = np.array([[second, -first], [-first, own_count]]) / determinant
            if not self.mixes:
                return lambda vector: np.einsum("ijc,jc->ic", inverse, vector)
            moment, mass = np.zeros((c, c)), 0.0
            for features, probs, weighted in kept:
                spread = (weighted - weighted * probs).sum(axis=1)
                moment += (features * spread[:, None]).T @ features
                mass += spread.sum()
            eigenvalues, basis = np.linalg.eigh(moment / max(mass, np.finfo(float).tiny))
            scale = np.outer(np.maximum(eigenvalues, 0), count) + 2 * self.between

            def divide(vector: FloatArray) -> FloatArray:
                bias, weight = np.einsum("ijc,jc->ic", inverse, self._own(vector))
                return np.vstack([bias, basis @ ((basis.T @ vector[1:]) / scale) + np.diag(weight)])

            return divide

        off = theta - self.identity
        value = (value - np.vdot(theta, self.labelled)) / n + np.vdot(self.ridges, np.square(off))
        return _Point(float(value), total / n + 2 * self.ridges * off, product, preconditioner)

    def _own(self, theta: FloatArray) -> FloatArray:
        """The bias of each class, and its weight of its own logit: (2, C)."""
        return np.stack([theta[0], theta[1:].diagonal()]) if self.mixes else theta

    def _features(self) -> Iterator[tuple[slice, FloatArray, NDArray[np.bool_] | None]]:
        """Walk over logits / unit, with 0 where there is a mask, and the masks."""
        for part, features in blocks(self.rows.logits):
            features *= 1 / self.unit
            masked = np.isneginf(features) if features.min() == -np.inf else None
            if masked is not None:
                features[masked] = 0
            yield part, features, masked

    def _blocks(self, theta: FloatArray) -> Iterator[tuple[FloatArray, FloatArray, FloatArray, float]]:
        """Walk over features, probabilities, weighted ones, and the sums of the logarithms of the denominators."""
        for part, features, masked in self._features():
            probs = self._scores(features, theta)
            if masked is not None:
                probs[masked] = -np.inf
            largest = probs.max(axis=1)
            probs -= largest[:, None]
            np.exp(probs, out=probs)
            denominators = probs @ np.ones(probs.shape[1])
            probs *= (1 / denominators)[:, None]
            losses = np.log(denominators) + largest
            weights = None if self.rows.weights is None else self.rows.weights[part]
            mass = probs if weights is None else probs * weights[:, None]
            yield features, probs, mass, losses.sum() if weights is None else losses @ weights

    def _scores(self, features: NDArray[Any], theta: NDArray[Any]) -> NDArray[Any]:
        scores = features @ theta[1:] if self.mixes else features * theta[1]
        scores += theta[0]
        return scores

    def _add_sums(self, total: FloatArray, features: NDArray[Any], slopes: NDArray[Any]) -> None:
        """Add what slopes (n, C) in the scores are in the parameters."""
        ones = np.ones(len(slopes), slopes.dtype)
        total[0] += ones @ slopes
        total[1:] += features.T @ slopes if self.mixes else ones @ (features * slopes)
