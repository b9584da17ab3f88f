"""The affine fit: checked rows of logits with labels, and the weight and bias with the lowest penalised loss.

Newton's steps are solved by conjugate gradients. The preconditioner is the sum of the exact curvature of the weight and
bias of each class, and an approximation for a matrix: a Kronecker product of one curvature with a number per class.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import isclose
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_expit, log_softmax

from hf_calib.metrics.checks import FloatArray, check_flag, check_weights
from hf_calib.scaling._base import (
    AffineMap,
    as_binary_labels,
    as_class_labels,
    as_matrix,
    blocks,
)

LEFT_TO_GAIN = 1e-7  # In nats per example, before the last step.
_MAX_STEPS = 200
_MAX_PRODUCTS = 250  # Products with the Hessian for one step.
_KEPT = 2**20  # The most probabilities kept for products; the rest is recomputed.
_LEAST_STEP = (
    1e-8  # If not even this Newton step lowers the value, only rounding is left.
)

# Cosine similarities need a T near 0.01, and raw scores of 10,000 a T near 10,000. With a larger T the
# probabilities would be so equal that float32 no longer ranks them.
BOUNDS = (1e-5, 1e5)
_SMALL_STEP = (
    1e-5  # In log T; after a Newton step this small, twice as many digits are correct.
)
_FAR = np.log(4)  # The farthest step of bisection.
_MOST_STEPS = 100  # Bisection alone would need about 40.
_SAMPLE_STEP = 16  # With many rows, every 16th row gives the first guess.
_MASKED = -1e150  # It replaces -inf, whose product with a weight of 0 would be NaN.

Linear = Callable[[FloatArray], FloatArray]


@dataclass(frozen=True)
class Rows:
    """Checked logits (N, C) and labels: the class of each row (N,), or for sigmoids the mask (N, C) of labels 1."""

    logits: NDArray[Any]
    labels: NDArray[Any]
    weights: FloatArray | None = None  # (N,), above 0 with mean 1.
    known: NDArray[np.bool_] | None = (
        None  # (N, C) for sigmoids; None if all are known.
    )

    @classmethod
    def checked(
        cls,
        logits: ArrayLike,
        labels: ArrayLike,
        weights: ArrayLike | None = None,
        multi_label: bool = False,
    ) -> Rows:
        """Check the arguments of a user, and return the rows that count."""
        check_flag("multi_label", multi_label)
        matrix = as_matrix(logits, least_columns=1 if multi_label else 2)
        if multi_label:
            positive, known = as_binary_labels(labels, matrix)
            return cls(matrix, positive, known=known)
        rows = cls(
            matrix, as_class_labels(labels, matrix), check_weights(weights, len(matrix))
        )
        return rows[
            slice(None)
            if rows.weights is None or rows.weights.all()
            else rows.weights > 0
        ]

    def __len__(self) -> int:
        return len(self.logits)

    def __getitem__(self, chosen: Any) -> Rows:
        weights = (
            None
            if self.weights is None
            else self.weights[chosen] / self.weights[chosen].mean()
        )
        known = None if self.known is None else self.known[chosen]
        return Rows(self.logits[chosen], self.labels[chosen], weights, known)

    @property
    def sigmoid(self) -> bool:
        return self.labels.ndim == 2

    def with_logits(self, logits: FloatArray) -> Rows:
        return replace(self, logits=logits)

    def two_classes(self, column: int | slice = slice(None)) -> Rows:
        """The known examples of one label or of all labels, as rows of two classes with the logits -z/2 and z/2."""
        known = slice(None) if self.known is None else self.known[:, column]
        half = self.logits[:, column][known].ravel().astype(np.float64) / 2
        return Rows(
            np.stack([-half, half], axis=1),
            self.labels[:, column][known].ravel().astype(np.int64),
        )

    def losses(self, logits: FloatArray) -> FloatArray:
        """The negative log-likelihood (N,) of each row with other logits."""
        if self.sigmoid:
            losses = log_expit(np.where(self.labels, logits, -logits))
            return -losses.sum(axis=1, where=True if self.known is None else self.known)
        return -log_softmax(logits, axis=1)[np.arange(len(self)), self.labels]


def warn_undetermined(what: str, stacklevel: int) -> None:
    way_out = "Fit on more or harder examples; check that labels number the columns, and the logits' scale."
    warnings.warn(
        f"The data do not determine {what}. {way_out}", UserWarning, stacklevel
    )


class ScaledLoss:
    """The mean NLL of rows as a function of beta = 1 / T, with the slopes `drift` at 0 and `shortfall` at infinity."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows = rows.two_classes() if rows.sigmoid else rows
        self.largest, self.correct, own, mean = np.empty((4, len(rows)))
        for part, block in blocks(rows.logits):
            each, labels = np.arange(len(block)), rows.labels[part]
            predicted = block.argmax(axis=1)
            self.correct[part] = predicted == labels
            self.largest[part] = block[each, predicted]
            block -= self.largest[part, None]
            own[part] = block[each, labels]
            masks, c = block.min() == -np.inf, block.shape[1]
            mean[part] = (
                block.mean(axis=1, where=np.isfinite(block))
                if masks
                else block @ np.full(c, 1 / c)
            )
        self.weights = np.ones(len(rows)) if rows.weights is None else rows.weights
        self.drift = float((mean - own) @ self.weights) / len(rows)
        self.shortfall = float(-own @ self.weights) / len(rows)
        self.is_constant = self.drift == 0 == self.shortfall

    def problem(self, temperature: float) -> str | None:
        """The reason why the data do not determine the best temperature, or nothing."""
        if self.is_constant:
            return "the logits of each row are equal"
        if self.shortfall == 0:
            return "every label is ranked first"
        if self.drift >= 0:
            return "labels score no better than the average class"
        return f"the best one is out of {BOUNDS}" if temperature in BOUNDS else None

    def warn(self, temperature: float, stacklevel: int = 3) -> None:
        """Warn if the data do not determine T; `stacklevel` 3 is the caller of the method that calls this one."""
        problem = self.problem(temperature)
        if problem:
            warn_undetermined(
                f"the temperature: {problem}. It is {temperature:g}", stacklevel + 1
            )

    def _gaps(self) -> Iterator[tuple[slice, FloatArray]]:
        """The logits minus the largest logit of the row."""
        for part, block in blocks(self.rows.logits):
            block -= self.largest[part, None]
            if block.min() < _MASKED:
                np.maximum(block, _MASKED, out=block)
            yield part, block

    def at(self, beta: float) -> tuple[float, float, float]:
        """The value, the slope and the curvature at beta."""
        totals = np.zeros(3)
        for part, gaps in self._gaps():
            terms = gaps * beta
            np.exp(terms, out=terms)
            ones = np.ones(gaps.shape[1])
            mass = terms @ ones
            terms *= gaps
            mean = (terms @ ones) / mass
            terms *= gaps
            weights, variance = self.weights[part], (terms @ ones) / mass - mean**2
            totals += np.log(mass) @ weights, mean @ weights, variance @ weights
        value, slope, curvature = (totals / len(self.rows)).tolist()
        return value + beta * self.shortfall, slope + self.shortfall, curvature

    def masses(self, betas: FloatArray) -> dict[float, FloatArray]:
        """The softmax denominators (N,) at each beta: the largest probability of a row is 1 / mass."""
        found = {beta: np.empty(len(self.rows)) for beta in betas.tolist()}
        roots = [
            beta for beta in found if beta / 2 not in found
        ]  # Other exponentials are squares.
        for part, gaps in self._gaps():
            ones, powers = np.ones(gaps.shape[1]), np.empty_like(gaps)
            for beta in roots:
                np.exp(np.multiply(gaps, beta, out=powers), out=powers)
                np.dot(powers, ones, out=found[beta][part])
                while (beta := 2 * beta) in found:
                    powers *= powers
                    np.dot(powers, ones, out=found[beta][part])
        return found

    def near_masses(self, betas: FloatArray, octaves: int) -> Iterator[FloatArray]:
        """The `masses` in the order of the betas, accurate to 1e-9, from four exponentials and their squares."""
        # For all gaps, exp(beta gap) is a least-squares sum of its values at four betas per octave.
        roots = betas.min() * 2.0 ** (np.arange(4) / 4 - 1)
        nodes = np.outer(2.0 ** np.arange(octaves + 3), roots).ravel()
        samples = -np.append(0, np.geomspace(1e-3, 50, 200)) / betas.min()
        at_nodes, at_betas = (
            np.exp(np.outer(samples, numbers)) for numbers in (nodes, betas)
        )
        weights = np.linalg.lstsq(at_nodes, at_betas, rcond=1e-13)[0]
        masses = np.stack([*self.masses(nodes).values()])
        return (row @ masses for row in weights.T)

    def best_temperature(self, guess: float | None = None) -> float:
        """The T within `BOUNDS` with the lowest value; 1 if the value does not depend on T."""
        if self.is_constant:
            return 1.0
        if self.drift >= 0:
            return BOUNDS[1]
        if guess is None and len(self.rows) >= 100 * _SAMPLE_STEP:
            guess = ScaledLoss(self.rows[::_SAMPLE_STEP]).best_temperature()
        # If each label is ranked first, one more example with an unknown label is added.
        target = self.shortfall or -self.drift / (len(self.rows) + 1)
        low, high = -np.log(BOUNDS[::-1])
        # Without better information, labels are assumed to be about 3 nats ahead.
        beta = -3 / self.drift if guess is None or guess == BOUNDS[1] else 1 / guess
        log_beta, step = np.log(beta).clip(low, high), np.inf
        for _ in range(_MOST_STEPS):
            beta = np.exp(log_beta)
            _, slope, curvature = self.at(beta)
            gap = self.shortfall - slope  # It falls to the target.
            low, high = (low, log_beta) if gap < target else (log_beta, high)
            # A Newton step of the logarithms, where the gap is nearly linear, or bisection if it does not shrink.
            newton = (
                np.log(gap / target) * gap / (beta * curvature)
                if min(gap, curvature) > 0
                else np.inf
            )
            pays = low < log_beta + newton < high and abs(newton) < abs(step) / 2
            step = newton if pays else np.clip((low + high) / 2 - log_beta, -_FAR, _FAR)
            log_beta += step
            if abs(step) <= _SMALL_STEP:
                break
        found = float(np.exp(-log_beta))
        return next(
            (
                bound
                for bound in BOUNDS
                if isclose(found, bound, rel_tol=10 * _SMALL_STEP)
            ),
            found,
        )


class Ridges(NamedTuple):
    """Factors of the squares of weight - 1, of the bias and, for a matrix, of the other weights in the mean loss."""

    own: float
    bias: float
    between: float | None = None


def fit_affine(
    rows: Rows,
    unit: float,
    ridges: Ridges,
    start: AffineMap | None = None,
    nats: float = LEFT_TO_GAIN,
) -> AffineMap:
    """The affine map whose mean loss, with the ridges of a map of logits / unit, is within `nats` of the lowest."""
    loss = _PenalisedLoss(rows, unit, ridges)
    theta = loss.parameters(start or AffineMap(np.array(1 / unit)))
    value, gradient, product, divide = loss(theta)
    for _ in range(_MAX_STEPS):
        step, gain = _newton_step(gradient, product, divide, nats)
        if gain <= nats:
            return loss.map(theta + step)
        size = 1.0
        while (trial := loss(theta + size * step))[0] > value - 1e-4 * size * gain:
            # This is the minimum of the parabola through both values and the slope, which is -2 gain.
            excess = trial[0] - value + 2 * gain * size
            parabola = gain * size / excess if np.isfinite(excess) else 0.0
            size *= min(max(parabola, 0.1), 0.5)
            if size < _LEAST_STEP:
                return loss.map(theta)
        theta = theta + size * step
        value, gradient, product, divide = trial
    return loss.map(theta)


def _newton_step(
    gradient: FloatArray, product: Linear, divide: Linear, nats: float
) -> tuple[Any, float]:
    """A Newton step, which is more exact near the minimum, and its decrease of the quadratic model."""
    step, residual = np.zeros_like(gradient), -gradient
    direction = divide(residual)
    size = float(np.vdot(residual, direction))
    # The error of an inexact step costs about its square.
    enough = max(size * min(0.1, size), nats**2)
    for _ in range(_MAX_PRODUCTS):
        if size <= enough:
            break
        curved = product(direction)
        curvature = float(np.vdot(direction, curved))
        if curvature <= 0:  # The loss is flat up to rounding.
            break
        step += size / curvature * direction
        residual -= size / curvature * curved
        divided = divide(residual)
        last, size = size, float(np.vdot(residual, divided))
        direction = divided + size / last * direction
    return step, -float(np.vdot(gradient, step)) / 2


class _PenalisedLoss:
    """The mean loss of logits / unit with its ridges, as a function of the rows b and w, or b and W'."""

    def __init__(self, rows: Rows, unit: float, ridges: Ridges) -> None:
        self.rows, self.unit, self.ridges, self.mixes = (
            rows,
            unit,
            ridges,
            ridges.between is not None,
        )
        c, self.between = rows.logits.shape[1], ridges.between or 0.0
        own = np.eye(c) if self.mixes else np.ones((1, c))
        self.identity = np.vstack([np.zeros(c), own])
        self.factors = np.vstack(
            [np.full(c, ridges.bias), np.where(own, ridges.own, self.between)]
        )
        self.masks = rows.logits.min() == -np.inf
        # Single precision is enough for the products, unless some directions may be nearly flat.
        self.narrow: Any = (
            np.float32 if min(self.between, ridges.bias) > 1e-6 else np.float64
        )
        self.weights = np.ones(len(rows)) if rows.weights is None else rows.weights

    def parameters(self, found: AffineMap) -> FloatArray:
        """The parameters of an affine map of the logits."""
        weight = found.weight * self.unit
        own = weight.T if weight.ndim == 2 else weight * self.identity[1:]
        return np.vstack([found(np.zeros(own.shape[1])), own])

    def map(self, theta: FloatArray) -> AffineMap:
        """The affine map of the logits with these parameters."""
        weight = theta[1:].T if self.mixes else theta[1]
        return AffineMap(weight / self.unit, theta[0] - theta[0].mean())

    def __call__(self, theta: FloatArray) -> tuple[float, FloatArray, Linear, Linear]:
        """The value, the gradient, the product with the Hessian, and the preconditioner."""
        n, c = self.rows.logits.shape
        value: Any = 0.0
        mixed: Any = 0.0  # p (1 - p) x_i x_j, for the preconditioner of a matrix.
        sums, squares = np.zeros((2, 3, c))  # Sums of p and of p^2, times 1, x and x^2.
        gradient = np.zeros_like(theta)
        kept = []  # They are kept for the products.
        for weights, labels, features, probs, losses in self._blocks(theta):
            own = np.arange(len(labels)), labels
            value += losses @ weights
            first = probs * features
            sums += weights @ probs, weights @ first, weights @ (first * features)
            squares += (
                weights @ (probs * probs),
                weights @ (first * probs),
                weights @ (first * first),
            )
            if self.mixes:
                spread = weights * (1 - np.einsum("nc,nc->n", probs, probs))
                probs *= weights[:, None]
                kept.append(
                    [each.astype(self.narrow) for each in (weights, features, probs)]
                )
                mixed += (kept[-1][1] * spread.astype(self.narrow)[:, None]).T @ kept[
                    -1
                ][1]
                probs[own] -= weights
                gradient[1:] += features.T @ probs
            else:
                gradient[1] -= np.bincount(labels, weights * features[own], c)
                if n * c <= _KEPT:
                    kept.append([weights, first, probs])
            gradient[0] -= np.bincount(labels, weights, c)
        by_class = 1 if self.mixes else 2
        gradient[:by_class] += sums[:by_class]

        def product(direction: FloatArray) -> FloatArray:
            if self.mixes:
                total, narrow = np.zeros_like(direction), direction.astype(self.narrow)
                for weights, features, mass in kept:
                    change = features @ narrow[1:]
                    change += narrow[0]
                    change -= (np.einsum("nc,nc->n", change, mass) / weights)[:, None]
                    change *= mass
                    total[0] += np.ones(len(change), change.dtype) @ change
                    total[1:] += features.T @ change
            else:
                total = direction[0] * sums[:2] + direction[1] * sums[1:]
                for weights, first, probs in kept or (
                    (w, x * p, p) for w, _, x, p, _ in self._blocks(theta)
                ):
                    change = weights * (probs @ direction[0] + first @ direction[1])
                    total -= change @ probs, change @ first
            return total / n + 2 * self.factors * direction

        off = theta - self.identity
        value = value / n + float(np.vdot(self.factors, np.square(off)))
        gradient = gradient / n + 2 * self.factors * off
        return value, gradient, product, self._division((sums - squares) / n, mixed / n)

    def _division(self, moments: FloatArray, mixed: FloatArray) -> Linear:
        """The preconditioner."""
        count, first, second = moments
        bias, own = 2 * self.ridges.bias + count, 2 * self.ridges.own + second
        determinant = np.maximum(own * bias - first**2, 1e-13 * own * bias)
        inverse = np.array([[own, -first], [-first, bias]]) / determinant
        if not self.mixes:
            return lambda vector: np.einsum("ijc,jc->ic", inverse, vector)
        eigenvalues, basis = np.linalg.eigh(
            mixed / max(count.sum(), np.finfo(float).tiny)
        )
        scale = np.outer(np.maximum(eigenvalues, 0), count) + 2 * self.between

        def divide(vector: FloatArray) -> FloatArray:
            bias, own = np.einsum(
                "ijc,jc->ic", inverse, [vector[0], vector[1:].diagonal()]
            )
            return np.vstack(
                [bias, basis @ ((basis.T @ vector[1:]) / scale) + np.diag(own)]
            )

        return divide

    def _blocks(self, theta: FloatArray) -> Iterator[tuple[FloatArray, ...]]:
        """Iterate over weights, labels, features (0 if masked), probabilities and losses of the rows."""
        for part, features in blocks(self.rows.logits):
            labels = self.rows.labels[part]
            features *= 1 / self.unit
            masked = np.isneginf(features) if self.masks else None
            if masked is not None:
                features[masked] = 0
            probs = features @ theta[1:] if self.mixes else features * theta[1]
            probs += theta[0]
            if masked is not None:
                probs[masked] = -np.inf
            probs -= probs.max(axis=1)[:, None]
            own = probs[np.arange(len(labels)), labels]
            np.exp(probs, out=probs)
            mass = probs @ np.ones(probs.shape[1])
            probs *= (1 / mass)[:, None]
            yield self.weights[part], labels, features, probs, np.log(mass) - own
