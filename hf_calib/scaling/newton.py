"""The affine fit: checked rows of logits with labels, and the weight and bias with the lowest penalised loss.

With features x = z / unit and scores s = W' x + b (or w * x + b), weights a_n of the rows and ridges f, the loss is

    L = 1/N sum_n a_n (log sum_c exp s_nc - s_ny) + sum_k f_k (theta_k - identity_k)^2.

Its derivatives by the scores of a row are a (p - e_y) and a (diag p - p p'). A direction d of the parameters changes
the scores by u, and the product of the Hessian with d is, for each row, a p (u - p'u), summed by 1 and by the features.

Newton's steps are solved by conjugate gradients. The preconditioner leaves out what one class has to do with another:
for each class there is the 2 x 2 block of its own weight and bias, with the sums of p (1 - p) times 1, x and x^2. For a
matrix, the other weights of a class are added as a Kronecker product: the mean curvature of the features, for all
classes the same, times the sum of p (1 - p) of the class. Its eigenvectors serve all classes at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import isclose
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_expit, log_softmax

from hf_calib.metrics.checks import FloatArray, check_weights
from hf_calib.scaling._base import (
    AffineMap,
    as_binary_labels,
    as_class_labels,
    as_matrix,
    blocks,
)
from hf_calib.scaling.saved_map import BOUNDS

# In nats per example, before the last step.
_LEFT_TO_GAIN = 1e-7
_MAX_STEPS = 200
# Products with the Hessian for one step.
_MAX_PRODUCTS = 250
# The most probabilities kept for products; the rest is recomputed.
_KEPT = 2**20
# The shares of a Newton step that are tried; if none lowers the value, only rounding is left.
_SIZES = 0.5 ** np.arange(27)

# In log T; after a Newton step this small, twice as many digits are correct.
_SMALL_STEP = 1e-5
# The farthest step of bisection.
_FAR = np.log(4)
# Bisection alone would need about 40.
_MOST_STEPS = 100
# With many rows, every 16th row gives the first guess.
_SAMPLE_STEP = 16
# It replaces -inf, whose product with a weight of 0 would be NaN.
_MASKED = -1e150


@dataclass(frozen=True)
class Rows:
    """Checked logits (N, C) and labels: the class of each row (N,), or for sigmoids the mask (N, C) of labels 1."""

    logits: NDArray[Any]
    labels: NDArray[Any]
    # (N,), above 0 with mean 1.
    weights: FloatArray | None = None
    # (N, C) for sigmoids; None if all are known.
    known: NDArray[np.bool_] | None = None

    @classmethod
    def checked(
        cls,
        logits: ArrayLike,
        labels: ArrayLike,
        weights: ArrayLike | None = None,
        multi_label: bool = False,
    ) -> Rows:
        """Check the arguments of a user, and return the rows that count."""
        matrix = as_matrix(logits, least_columns=1 if multi_label else 2)
        if multi_label:
            positive, known = as_binary_labels(labels, matrix)
            return cls(matrix, positive, known=known)
        numbers = as_class_labels(labels, matrix)
        shares = check_weights(weights, len(matrix))
        rows = cls(matrix, numbers, shares)
        if rows.weights is None:
            return rows
        # A part of the rows has weights of mean 1, and a slice does not copy the logits.
        return rows[:] if rows.weights.all() else rows[rows.weights > 0]

    def __len__(self) -> int:
        return len(self.logits)

    def __getitem__(self, chosen: Any) -> Rows:
        weights = None if self.weights is None else self.weights[chosen]
        if weights is not None:
            weights = weights / weights.mean()
        known = None if self.known is None else self.known[chosen]
        return Rows(self.logits[chosen], self.labels[chosen], weights, known)

    @property
    def sigmoid(self) -> bool:
        return self.labels.ndim == 2

    def with_logits(self, logits: FloatArray) -> Rows:
        return replace(self, logits=logits)

    def two_classes(self, column: int | slice = slice(None)) -> Rows:
        """The known examples of one label or of all labels, as rows of two classes with the logits -z/2 and z/2."""
        logits = self.logits[:, column]
        labels = self.labels[:, column]
        if self.known is not None:
            known = self.known[:, column]
            logits = logits[known]
            labels = labels[known]
        half = logits.ravel().astype(np.float64) / 2
        return Rows(np.stack([-half, half], axis=1), labels.ravel().astype(np.int64))

    def losses(self, logits: FloatArray) -> FloatArray:
        """The negative log-likelihood (N,) of each row with other logits."""
        if self.sigmoid:
            of_decisions = log_expit(np.where(self.labels, logits, -logits))
            counted: Any = True if self.known is None else self.known
            return -of_decisions.sum(axis=1, where=counted)
        log_probs = log_softmax(logits, axis=1)
        return -log_probs[np.arange(len(self)), self.labels]


def warn_undetermined(what: str, stacklevel: int) -> None:
    way_out = "Fit on more or harder examples; check that labels number the columns, and the logits' scale."
    warnings.warn(
        f"The data do not determine {what}. {way_out}", UserWarning, stacklevel
    )


class Derivatives(NamedTuple):
    """The value of a function of one number, its slope and its curvature."""

    value: float
    slope: float
    curvature: float


class ScaledLoss:
    """The mean NLL of rows as a function of beta = 1 / T, with the slopes `drift` at 0 and `shortfall` at infinity."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows.two_classes() if rows.sigmoid else rows
        n = len(self.rows)
        logits = self.rows.logits
        self.weights = np.ones(n) if self.rows.weights is None else self.rows.weights
        self.largest = logits.max(axis=1).astype(np.float64)
        gap_of_label = logits[np.arange(n), self.rows.labels] - self.largest
        # Differences come before the mean, so that equal logits have no drift at all.
        mean_gap = np.concatenate(
            [
                _mean_of_finite(block - self.largest[part, None])
                for part, block in blocks(logits)
            ]
        )
        self.drift = float((mean_gap - gap_of_label) @ self.weights) / n
        self.shortfall = float(-gap_of_label @ self.weights) / n
        self.is_constant = self.drift == 0 == self.shortfall

    def problem(self, temperature: float) -> str | None:
        """The reason why the data do not determine the best temperature, or nothing."""
        if self.is_constant:
            return "the logits of each row are equal"
        if self.shortfall == 0:
            return "every label is ranked first"
        if self.drift >= 0:
            return "labels score no better than the average class"
        if temperature in BOUNDS:
            return f"the best one is out of {BOUNDS}"
        return None

    def warn(self, temperature: float, stacklevel: int = 3) -> None:
        """Warn if the data do not determine T; `stacklevel` 3 is the caller of the method that calls this one."""
        problem = self.problem(temperature)
        if problem:
            what = f"the temperature: {problem}. It is {temperature:g}"
            warn_undetermined(what, stacklevel + 1)

    def _gaps(self) -> Iterator[tuple[slice, FloatArray]]:
        """The logits minus the largest logit of the row."""
        for part, block in blocks(self.rows.logits):
            block -= self.largest[part, None]
            if block.min() < _MASKED:
                np.maximum(block, _MASKED, out=block)
            yield part, block

    def at(self, beta: float) -> Derivatives:
        """The value, the slope and the curvature at beta."""
        value = 0.0
        slope = 0.0
        curvature = 0.0
        for part, gaps in self._gaps():
            weights = self.weights[part]
            # A product with ones is faster than a sum over rows.
            ones = np.ones(gaps.shape[1])
            terms = gaps * beta
            np.exp(terms, out=terms)
            mass = terms @ ones
            terms *= gaps
            mean = (terms @ ones) / mass
            terms *= gaps
            variance = (terms @ ones) / mass - mean**2
            value += float(np.log(mass) @ weights)
            slope += float(mean @ weights)
            curvature += float(variance @ weights)
        n = len(self.rows)
        # The gaps are measured from the largest logit, and the loss from that of the label.
        return Derivatives(
            value=value / n + beta * self.shortfall,
            slope=slope / n + self.shortfall,
            curvature=curvature / n,
        )

    def masses(self, betas: FloatArray) -> dict[float, FloatArray]:
        """The softmax denominators (N,) at each beta: the largest probability of a row is 1 / mass."""
        found = {beta: np.empty(len(self.rows)) for beta in betas.tolist()}
        # Other exponentials are squares.
        roots = [beta for beta in found if beta / 2 not in found]
        for part, gaps in self._gaps():
            ones = np.ones(gaps.shape[1])
            powers = np.empty_like(gaps)
            for root in roots:
                np.multiply(gaps, root, out=powers)
                np.exp(powers, out=powers)
                np.dot(powers, ones, out=found[root][part])
                beta = 2 * root
                while beta in found:
                    powers *= powers
                    np.dot(powers, ones, out=found[beta][part])
                    beta *= 2
        return found

    def near_masses(self, betas: FloatArray, octaves: int) -> Iterator[FloatArray]:
        """The `masses` in the order of the betas, accurate to 1e-9, from four exponentials and their squares."""
        # For all gaps, exp(beta gap) is a least-squares sum of its values at four betas per octave.
        roots = betas.min() * 2.0 ** (np.arange(4) / 4 - 1)
        nodes = np.outer(2.0 ** np.arange(octaves + 3), roots).ravel()
        samples = -np.append(0, np.geomspace(1e-3, 50, 200)) / betas.min()
        at_nodes = np.exp(np.outer(samples, nodes))
        at_betas = np.exp(np.outer(samples, betas))
        weights = np.linalg.lstsq(at_nodes, at_betas, rcond=1e-13)[0]
        masses = np.stack([*self.masses(nodes).values()])
        return (row @ masses for row in weights.T)

    def best_temperature(self) -> float:
        """The T within `BOUNDS` with the lowest value; 1 if the value does not depend on T."""
        if self.is_constant:
            return 1.0
        if self.drift >= 0:
            return BOUNDS[1]
        if len(self.rows) >= 100 * _SAMPLE_STEP:
            first = 1 / ScaledLoss(self.rows[::_SAMPLE_STEP]).best_temperature()
        else:
            # Labels are assumed to be about 3 nats ahead.
            first = -3 / self.drift
        # If each label is ranked first, one more example with an unknown label is added.
        target = self.shortfall or -self.drift / (len(self.rows) + 1)
        least = -np.log(BOUNDS[1])
        most = -np.log(BOUNDS[0])
        log_beta = np.log(first).clip(least, most)
        step = np.inf
        for _ in range(_MOST_STEPS):
            beta = np.exp(log_beta)
            here = self.at(beta)
            # It falls to the target.
            gap = self.shortfall - here.slope
            if gap < target:
                most = log_beta
            else:
                least = log_beta
            # A Newton step of the logarithms, where the gap is nearly linear, or bisection if it does not shrink.
            newton = np.inf
            if gap > 0 and here.curvature > 0:
                newton = np.log(gap / target) * gap / (beta * here.curvature)
            stays_within = least < log_beta + newton < most
            if stays_within and abs(newton) < abs(step) / 2:
                step = newton
            else:
                step = np.clip((least + most) / 2 - log_beta, -_FAR, _FAR)
            log_beta += step
            if abs(step) <= _SMALL_STEP:
                break
        found = float(np.exp(-log_beta))
        for bound in BOUNDS:
            if isclose(found, bound, rel_tol=10 * _SMALL_STEP):
                return bound
        return found


def _mean_of_finite(block: FloatArray) -> FloatArray:
    """The mean (N,) of each row over the classes that are not masked."""
    if block.min() == -np.inf:
        return block.mean(axis=1, where=np.isfinite(block))
    n_classes = block.shape[1]
    # A product with equal shares is faster than a mean.
    return block @ np.full(n_classes, 1 / n_classes)


class Ridges(NamedTuple):
    """Factors of the squares of weight - 1, of the bias and, for a matrix, of the other weights in the mean loss."""

    own: float
    bias: float
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
    """The affine map whose mean loss, with the ridges of a map of logits / temperature, is the lowest."""
    loss = _Loss(rows, start.temperature, ridges)
    point_at = _VectorPoint if ridges.between is None else _MatrixPoint
    theta = loss.parameters(start.near or AffineMap(np.array(1 / start.temperature)))
    point = point_at(loss, theta)
    for _ in range(_MAX_STEPS):
        step, gain = _newton_step(point, start.nats)
        if gain <= start.nats:
            return loss.map(point.theta + step)
        for size in _SIZES:
            trial = point_at(loss, point.theta + size * step)
            if trial.value <= point.value - 1e-4 * size * gain:
                break
        else:
            return loss.map(point.theta)
        point = trial
    return loss.map(point.theta)


def _newton_step(point: _Point, nats: float) -> tuple[Any, float]:
    """A Newton step, which is more exact near the minimum, and its decrease of the quadratic model."""
    step = np.zeros_like(point.gradient)
    residual = -point.gradient
    direction = point.divided(residual)
    size = float(np.vdot(residual, direction))
    # The error of an inexact step costs about its square.
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


class _Loss:
    """The mean loss of logits / unit with its ridges, as a function of the rows b and w, or b and W'."""

    def __init__(self, rows: Rows, unit: float, ridges: Ridges) -> None:
        self.rows = rows
        self.unit = unit
        self.ridges = ridges
        self.weights = np.ones(len(rows)) if rows.weights is None else rows.weights
        self.has_masks = rows.logits.min() == -np.inf
        n_classes = rows.logits.shape[1]
        # The sums over the rows, by their labels, of 1 and of the label's feature.
        scores = rows.logits[np.arange(len(rows)), rows.labels].astype(np.float64)
        counts = np.bincount(rows.labels, self.weights, n_classes)
        sums = np.bincount(rows.labels, self.weights * scores, n_classes)
        self.of_labels = np.stack([counts, sums / unit])
        if ridges.between is None:
            own = np.ones((1, n_classes))
            squares_of_weights = own * ridges.own
        else:
            own = np.eye(n_classes)
            squares_of_weights = np.where(own, ridges.own, ridges.between)
        # The parameters to which the ridges shrink, and the factor of each square.
        self.identity = np.vstack([np.zeros(n_classes), own])
        self.factors = np.vstack([np.full(n_classes, ridges.bias), squares_of_weights])

    def parameters(self, found: AffineMap) -> FloatArray:
        """The parameters of an affine map of the logits."""
        own = self.identity[1:]
        weight = found.weight * self.unit
        bias = found(np.zeros(own.shape[1]))
        return np.vstack([bias, weight.T if weight.ndim == 2 else weight * own])

    def map(self, theta: FloatArray) -> AffineMap:
        """The affine map of the logits with these parameters."""
        weight = theta[1] if self.ridges.between is None else theta[1:].T
        # A common offset changes no probability.
        bias = theta[0] - theta[0].mean()
        return AffineMap(weight / self.unit, bias)


class _Block(NamedTuple):
    """Some rows at a point; the features are 0 if masked."""

    weights: FloatArray
    labels: NDArray[Any]
    features: FloatArray
    probs: FloatArray
    losses: FloatArray


class _Point:
    """The penalised loss at certain parameters, for Newton's method."""

    def __init__(self, loss: _Loss, theta: FloatArray) -> None:
        self.theta = theta
        self._loss = loss
        self._n = len(loss.rows)
        # Sums over the rows, by class: of p and of p^2, each times 1, x and x^2.
        self._sums = np.zeros((3, theta.shape[1]))
        self._squares = np.zeros((3, theta.shape[1]))
        total: Any = 0.0
        for block in self._blocks():
            total += block.losses @ block.weights
            self._add(block)
        off = theta - loss.identity
        self.value = total / self._n + float(np.vdot(loss.factors, np.square(off)))
        self.gradient = self._slope() / self._n + 2 * loss.factors * off
        self._curvatures = (self._sums - self._squares) / self._n
        self._inverse = _inverse_blocks(self._curvatures, loss.ridges)

    def _blocks(self) -> Iterator[_Block]:
        """Iterate over the rows."""
        loss = self._loss
        for part, features in blocks(loss.rows.logits):
            labels = loss.rows.labels[part]
            features *= 1 / loss.unit
            masked = np.isneginf(features) if loss.has_masks else None
            if masked is not None:
                features[masked] = 0
            probs = self._scores(features)
            probs += self.theta[0]
            if masked is not None:
                probs[masked] = -np.inf
            probs -= probs.max(axis=1)[:, None]
            of_labels = probs[np.arange(len(labels)), labels]
            np.exp(probs, out=probs)
            # A product with ones is faster than a sum over rows.
            mass = probs @ np.ones(probs.shape[1])
            probs *= (1 / mass)[:, None]
            losses = np.log(mass) - of_labels
            yield _Block(loss.weights[part], labels, features, probs, losses)

    def _add_moments(self, block: _Block) -> FloatArray:
        """Add the sums of a block, and return its p x."""
        weights = block.weights
        probs = block.probs
        first = probs * block.features
        second = first * block.features
        self._sums += weights @ probs, weights @ first, weights @ second
        self._squares += (
            weights @ (probs * probs),
            weights @ (first * probs),
            weights @ (first * first),
        )
        return first

    def times_hessian(self, direction: FloatArray) -> FloatArray:
        """The product of the Hessian with a direction of the parameters."""
        ridges = 2 * self._loss.factors * direction
        return self._product(direction) / self._n + ridges

    def _scores(self, features: FloatArray) -> FloatArray:
        """The mapped features, without the bias."""
        raise NotImplementedError

    def _add(self, block: _Block) -> None:
        """Add a block to the sums, and keep what the products need of it."""
        raise NotImplementedError

    def _slope(self) -> FloatArray:
        """The sum over the rows of the slopes by the parameters, without the ridges."""
        raise NotImplementedError

    def _product(self, direction: FloatArray) -> FloatArray:
        """The sum over the rows, without the ridges."""
        raise NotImplementedError

    def divided(self, direction: FloatArray) -> FloatArray:
        """The product of the preconditioner with a direction: about the Hessian's inverse."""
        raise NotImplementedError


def _inverse_blocks(curvatures: FloatArray, ridges: Ridges) -> FloatArray:
    """The inverses (2, 2, C) of the curvature of each class's bias and own weight."""
    count, first, second = curvatures
    bias = 2 * ridges.bias + count
    own = 2 * ridges.own + second
    # Rounding may make it 0 for a class whose features are all equal.
    determinant = np.maximum(own * bias - first**2, 1e-13 * own * bias)
    return np.array([[own, -first], [-first, bias]]) / determinant


class _VectorPoint(_Point):
    """A point of a map with a weight for each class."""

    def __init__(self, loss: _Loss, theta: FloatArray) -> None:
        # The weights, p x and p of all rows; nothing if there are too many.
        self._kept: list[tuple[FloatArray, FloatArray, FloatArray]] = []
        # This adds the blocks.
        super().__init__(loss, theta)

    def _scores(self, features: FloatArray) -> FloatArray:
        return features * self.theta[1]

    def _add(self, block: _Block) -> None:
        first = self._add_moments(block)
        if self._loss.rows.logits.size <= _KEPT:
            self._kept.append((block.weights, first, block.probs))

    def _slope(self) -> FloatArray:
        return self._sums[:2] - self._loss.of_labels

    def _product(self, direction: FloatArray) -> FloatArray:
        total = direction[0] * self._sums[:2] + direction[1] * self._sums[1:]
        for weights, first, probs in self._kept or self._recomputed():
            change = weights * (probs @ direction[0] + first @ direction[1])
            total -= change @ probs, change @ first
        return total

    def _recomputed(self) -> Iterator[tuple[FloatArray, FloatArray, FloatArray]]:
        for block in self._blocks():
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

    def __init__(self, loss: _Loss, theta: FloatArray) -> None:
        between: Any = loss.ridges.between
        # Single precision is enough, unless some directions may be nearly flat.
        is_enough = min(between, loss.ridges.bias) > 1e-6
        self._dtype: Any = np.float32 if is_enough else np.float64
        self._kept: list[_KeptBlock] = []
        # p (1 - p) x_i x_j, of all classes.
        self._mixed: Any = 0.0
        self._by_weights = np.zeros_like(theta[1:])
        # This adds the blocks.
        super().__init__(loss, theta)
        count = self._curvatures[0]
        total_count = max(count.sum(), np.finfo(float).tiny)
        eigenvalues, self._basis = np.linalg.eigh(self._mixed / self._n / total_count)
        # Rounding may make eigenvalues negative.
        self._scale = np.outer(np.maximum(eigenvalues, 0), count) + 2 * between

    def _scores(self, features: FloatArray) -> FloatArray:
        return features @ self.theta[1:]

    def _add(self, block: _Block) -> None:
        weights = block.weights
        probs = block.probs
        self._add_moments(block)
        spread = weights * (1 - np.einsum("nc,nc->n", probs, probs))
        probs *= weights[:, None]
        kept = _KeptBlock(
            weights=weights.astype(self._dtype),
            features=block.features.astype(self._dtype),
            mass=probs.astype(self._dtype),
        )
        self._kept.append(kept)
        scaled = kept.features * spread.astype(self._dtype)[:, None]
        self._mixed += scaled.T @ kept.features
        probs[np.arange(len(block.labels)), block.labels] -= weights
        self._by_weights += block.features.T @ probs

    def _slope(self) -> FloatArray:
        by_bias = self._sums[0] - self._loss.of_labels[0]
        return np.vstack([by_bias, self._by_weights])

    def _product(self, direction: FloatArray) -> FloatArray:
        narrow = direction.astype(self._dtype)
        total = np.zeros_like(direction)
        for weights, features, mass in self._kept:
            change = features @ narrow[1:]
            change += narrow[0]
            mean = np.einsum("nc,nc->n", change, mass) / weights
            change -= mean[:, None]
            change *= mass
            total[0] += np.ones(len(change), change.dtype) @ change
            total[1:] += features.T @ change
        return total

    def divided(self, direction: FloatArray) -> FloatArray:
        weight = direction[1:]
        own_part = [direction[0], weight.diagonal()]
        bias, own = np.einsum("ijc,jc->ic", self._inverse, own_part)
        between = self._basis @ ((self._basis.T @ weight) / self._scale)
        return np.vstack([bias, between + np.diag(own)])
