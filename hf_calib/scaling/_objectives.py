"""The negative log-likelihood as a function of one scale of the logits, and what a grid search needs.

Both objectives answer the same questions, read the logits block by block, and keep O(N) numbers beside
them. `beta` is 1 / T throughout; means are over the examples, in nats.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from hf_calib._errors import InputValueError, expected
from hf_calib.scaling._inputs import FloatArray, blocks

# Stands for -inf, whose product with a weight of 0 would be NaN.
_MASKED = -1e150

# Numbers below 1e-304 need not be exact, and arithmetic is many times slower where it underflows.
_LOG_TINY = -700.0
_ROOT_OF_TINY = float(np.exp(_LOG_TINY / 2))


class Curve(NamedTuple):
    """The negative log-likelihood at one beta, with its first and second derivative in beta."""

    value: float
    slope: float
    curvature: float


class _Objective:
    """An objective in beta, with its slopes at the ends: beta -> 0 (`drift`) and beta -> inf (`shortfall`)."""

    size: int  # examples
    drift: float  # mean over examples of (mean logit - label's logit)
    shortfall: float  # mean over examples of (largest logit - label's logit)

    @property
    def is_constant(self) -> bool:
        return self.drift == 0 == self.shortfall

    @property
    def is_separable(self) -> bool:
        return self.shortfall == 0

    @property
    def is_no_better_than_chance(self) -> bool:
        return self.drift >= 0

    def confidences(self, beta: float) -> FloatArray:
        """The largest probability of each example at one beta."""
        return self.confidences_at([beta])[0]

    def confidences_at(self, betas: Sequence[float]) -> FloatArray:
        raise NotImplementedError


class SoftmaxObjective(_Objective):
    """One label (N,) per row of logits (N, C), perhaps with weights (N,) above 0 whose mean is 1."""

    def __init__(
        self, logits: NDArray[Any], labels: NDArray[np.int64], weights: FloatArray | None = None
    ) -> None:
        self.logits, self.labels, self.size = logits, labels, len(labels)
        self.weights = weights
        self.largest, self.correct = np.empty(self.size), np.empty(self.size)
        own, mean = np.empty(self.size), np.empty(self.size)
        for rows, block in blocks(logits):
            each, truth = np.arange(len(block)), labels[rows]
            predicted = block.argmax(axis=1)
            self.correct[rows] = predicted == truth
            self.largest[rows] = block[each, predicted]
            own[rows] = block[each, truth]
            if not np.isneginf(own[rows]).any():  # else it is refused below
                block -= self.largest[rows, None]
                mean[rows] = _mean_of_allowed(block)
        _refuse_masked_labels(np.count_nonzero(np.isneginf(own)))
        own -= self.largest
        self.drift = float(np.average(mean - own, weights=weights))
        self.shortfall = float(np.average(-own, weights=weights))

    def nll(self, beta: float) -> Curve:
        log_mass = moment = variance = 0.0
        for rows, gaps in self._gaps():
            weights = gaps * beta
            np.exp(weights, out=weights)
            ones = np.ones(gaps.shape[1])
            mass = weights @ ones
            weights *= gaps
            mean = (weights @ ones) / mass
            weights *= gaps
            terms: tuple[Any, ...] = (np.log(mass), mean, (weights @ ones) / mass - mean**2)
            if self.weights is not None:
                terms = tuple(term * self.weights[rows] for term in terms)
            log_mass += terms[0].sum()
            moment += terms[1].sum()
            variance += terms[2].sum()
        value, slope, curvature = (float(total) / self.size for total in (log_mass, moment, variance))
        return Curve(value + beta * self.shortfall, slope + self.shortfall, curvature)

    def confidences_at(self, betas: Sequence[float]) -> FloatArray:
        """The largest probability of each row at each beta (B, N), for which no other is needed.

        A block stays in cache for all betas. Where one beta is twice another, as many of the papers' grid
        are, its weights are the other's squared: six times cheaper than new exponentials.
        """
        position = {beta: number for number, beta in enumerate(dict.fromkeys(betas))}
        roots = [beta for beta in position if beta / 2 not in position]
        found = np.empty((len(position), self.size))
        for rows, gaps in self._gaps():
            ones, lowest = np.ones(gaps.shape[1]), gaps.min()
            weights = np.empty_like(gaps)
            for root in roots:
                np.multiply(gaps, root, out=weights)
                if root * lowest < _LOG_TINY:
                    np.maximum(weights, _LOG_TINY, out=weights)
                np.exp(weights, out=weights)
                beta = root
                np.dot(weights, ones, out=found[position[beta], rows])
                while (beta := 2 * beta) in position:
                    if beta * lowest < _LOG_TINY:
                        weights += _ROOT_OF_TINY
                    weights *= weights
                    np.dot(weights, ones, out=found[position[beta], rows])
        np.divide(1, found, out=found)
        return found if len(found) == len(betas) else found[[position[beta] for beta in betas]]

    def every(self, step: int) -> SoftmaxObjective:
        weights = None if self.weights is None else self.weights[::step]
        if weights is not None:
            weights = weights / weights.mean()
        return SoftmaxObjective(self.logits[::step], self.labels[::step], weights)

    def _gaps(self) -> Iterator[tuple[slice, FloatArray]]:
        """Yield z - max(z)."""
        for rows, gaps in blocks(self.logits):
            gaps -= self.largest[rows, None]
            if gaps.min() < _MASKED:
                np.maximum(gaps, _MASKED, out=gaps)
            yield rows, gaps


class SigmoidObjective(_Objective):
    """A 0/1 label for each logit, both (N, C): every logit z is an example of two classes, (z, 0).

    Where `known` (N, C) is False the label is not known, and the logit is no example.
    """

    def __init__(
        self, logits: NDArray[Any], labels: NDArray[np.bool_], known: NDArray[np.bool_] | None = None
    ) -> None:
        self.logits = logits
        self.labels = labels
        self.known = known
        self.size = labels.size if known is None else int(np.count_nonzero(known))
        _refuse_masked_labels(np.count_nonzero(np.isneginf(logits) & labels))
        margin = shortfall = 0.0
        for margins in self._margins():
            margin += margins.sum()
            shortfall += np.maximum(-margins, 0).sum()
        self.drift = -margin / 2 / self.size
        self.shortfall = shortfall / self.size

    @property
    def correct(self) -> FloatArray:
        right = (self.logits > 0) == self.labels
        return (right.ravel() if self.known is None else right[self.known]).astype(np.float64)

    def nll(self, beta: float) -> Curve:
        total = np.zeros(3)
        for margins in self._margins():
            wrong = expit(-beta * margins)
            slopes = wrong * margins
            value = np.logaddexp(0, -beta * margins)
            total += value.sum(), -slopes.sum(), (slopes * (1 - wrong) * margins).sum()
        return Curve(*(total / self.size).tolist())

    def confidences_at(self, betas: Sequence[float]) -> FloatArray:
        """The larger of the two probabilities of each example at each beta (B, size)."""
        margins = np.concatenate(
            [
                np.abs(block.ravel() if self.known is None else block[self.known[rows]])
                for rows, block in blocks(self.logits)
            ]
        )
        return np.stack([expit(beta * margins) for beta in betas])

    def every(self, step: int) -> SigmoidObjective:
        known = None if self.known is None else self.known[::step]
        return SigmoidObjective(self.logits[::step], self.labels[::step], known)

    def _margins(self) -> Iterator[FloatArray]:
        """Yield how far logits are on their labels' side; a masked one is right whatever beta is."""
        for rows, block in blocks(self.logits):
            np.negative(block, out=block, where=~self.labels[rows])
            allowed = np.isfinite(block)
            if self.known is not None:
                allowed &= self.known[rows]
            yield block if allowed.all() else block[allowed]


def _mean_of_allowed(block: FloatArray) -> FloatArray:
    if block.min() > -np.inf:
        return block @ np.full(block.shape[1], 1 / block.shape[1])
    allowed = np.isfinite(block)
    return np.where(allowed, block, 0).sum(axis=1) / allowed.sum(axis=1)


def _refuse_masked_labels(count: np.integer[Any]) -> None:
    if count:
        got = f"-inf for the label of {count} examples"
        way_out = "mask only classes that cannot be the label"
        raise InputValueError(expected("logits", "be finite for every label", got, way_out))


Objective = SoftmaxObjective | SigmoidObjective
