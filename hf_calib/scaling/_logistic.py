"""Penalised two-class fits, one for each column: sigmoid((1 + v) x + b)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from hf_calib.scaling._inputs import FloatArray, blocks
from hf_calib.scaling._linear import LEFT_TO_GAIN, Linear
from hf_calib.scaling._newton import Point, minimise


def fit_columns(
    logits: NDArray[Any],
    positive: NDArray[np.bool_],
    known: NDArray[np.bool_] | None,
    unit: float,
    penalty: float,
) -> tuple[Linear, bool]:
    """Return 1 + v and b of each column of logits / unit, and whether they converged.

    Each column minimises its summed loss + penalty (4 v^2 + b^2). That is the ridge of structured scaling,
    C (|v|^2 + |b|^2), for the two classes with the logits x / 2 and -x / 2. Where `known` is False, or a logit
    is -inf, there is no example.
    """
    c = logits.shape[1]
    size = logits.size
    penalties = penalty * np.array([[4.0], [1.0]]) / size
    start = np.stack([np.ones(c), np.zeros(c)])

    def evaluate(theta: FloatArray) -> Point:
        loss, gradient, moments = 0.0, np.zeros((2, c)), np.zeros((3, c))
        for rows, block in blocks(logits):
            counts = np.isfinite(block) if known is None else np.isfinite(block) & known[rows]
            block /= unit
            block[~counts] = 0
            scores = block * theta[0] + theta[1]
            sign = np.where(positive[rows], 1.0, -1.0)
            loss += np.logaddexp(0, -sign * scores).sum(where=counts)
            residuals = np.where(counts, -sign * expit(-sign * scores), 0)
            gradient += (residuals * block).sum(axis=0), residuals.sum(axis=0)
            spread = np.where(counts, expit(scores) * expit(-scores), 0)
            moments += spread.sum(axis=0), (spread * block).sum(axis=0), (spread * block**2).sum(axis=0)
        value = loss / size + float((penalties * np.square(theta - start)).sum())
        gradient = gradient / size + 2 * penalties * (theta - start)
        count, first, second = moments / size
        by_weight, by_bias = second + 2 * penalties[0], count + 2 * penalties[1]
        hessian = np.array([[by_weight, first], [first, by_bias]])
        inverse = np.array([[by_bias, -first], [-first, by_weight]]) / (by_weight * by_bias - first**2)

        def product(direction: FloatArray) -> FloatArray:
            return np.einsum("ijc,jc->ic", hessian, direction)

        def precondition(vector: FloatArray) -> FloatArray:
            return np.einsum("ijc,jc->ic", inverse, vector)

        return Point(value, gradient, product, lambda: precondition)

    (weight, bias), converged = minimise(evaluate, start, LEFT_TO_GAIN)
    return (weight, bias), converged
