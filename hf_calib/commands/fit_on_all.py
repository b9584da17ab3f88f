"""A temperature or vector scaling on all rows of predictions that are not held at once: Newton's steps from sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_calib._errors import InputValueError, expected
from hf_calib.metrics.checks import FloatArray, row_chunks
from hf_calib.predictions.passes import run_pass
from hf_calib.predictions.samples import half_of
from hf_calib.predictions.shard_formats import Piece
from hf_calib.predictions.shards import Shards
from hf_calib.predictions.table_columns import softmax_of
from hf_calib.scaling import TemperatureScaling, VectorScaling

_MOST_STEPS = 20
_LEFT_TO_GAIN = (
    1e-14  # nats per row, before the last step: the parameters are then right to 1e-7 of their errors
)


@dataclass
class NewtonSums:
    """The negative log-likelihood at some parameters, with its derivatives, summed over rows.

    Args:
        loss: in nats.
        gradient: (K,).
        curvature: (K, K).
        n_rows: read.
        n_used: of them.
    """

    loss: float
    gradient: FloatArray
    curvature: FloatArray
    n_rows: int = 0
    n_used: int = 0

    def merge(self, other: NewtonSums) -> None:
        """Add other rows."""
        self.loss += other.loss
        self.gradient = self.gradient + other.gradient
        self.curvature = self.curvature + other.curvature
        self.n_rows += other.n_rows
        self.n_used += other.n_used

    @classmethod
    def empty(cls, n_parameters: int) -> NewtonSums:
        """Of no rows."""
        return cls(0.0, np.zeros(n_parameters), np.zeros((n_parameters, n_parameters)))


@dataclass(frozen=True)
class Deriving:
    """Sums the derivatives over the rows of a piece.

    Args:
        weight: of the logits: (1,) for all classes, or (C,).
        bias: (C,), or None for a temperature.
        half: of the rows, see `half_of`; None for all.
    """

    weight: FloatArray
    bias: FloatArray | None
    half: int | None

    def __call__(self, shards: Shards, number: int, piece: Piece) -> NewtonSums:
        found = NewtonSums.empty(len(self.weight) + (0 if self.bias is None else len(self.bias)))
        for first, batch in shards.batches(number, piece):
            logits, labels, weights = batch.as_logits(), batch.labels, batch.weights
            found.n_rows += len(labels)
            if self.half is not None:
                used = half_of(shards.row_hashes(number, first, len(labels))) == self.half
                logits, labels = logits[used], labels[used]
                weights = None if weights is None else weights[used]
            for part in row_chunks(*logits.shape):
                own = np.ones(len(labels[part])) if weights is None else weights[part]
                found.merge(self._of(logits[part].astype(np.float64), labels[part], own))
        return found

    def _of(self, logits: FloatArray, labels: NDArray[np.int64], weights: FloatArray) -> NewtonSums:
        logits = logits - logits.max(axis=1, keepdims=True) if self.bias is None else logits
        mapped = logits * self.weight + (0.0 if self.bias is None else self.bias)
        probs = np.ascontiguousarray(softmax_of(mapped))
        each = np.arange(len(labels))
        loss = -float(weights @ np.log(np.maximum(probs[each, labels], np.finfo(np.float64).tiny)))
        residuals = probs.copy()
        residuals[each, labels] -= 1
        residuals *= weights[:, None]
        if self.bias is None:
            moment = (probs * logits).sum(axis=1)
            slope = (residuals * logits).sum()
            variance = weights @ ((probs * logits**2).sum(axis=1) - moment**2)
            return NewtonSums(loss, np.array([slope]), np.array([[variance]]), 0, len(labels))
        weighed = probs * logits
        gradient = np.concatenate([(residuals * logits).sum(axis=0), residuals.sum(axis=0)])
        factors = np.concatenate([weighed, probs], axis=1)
        curvature = -factors.T @ (factors * weights[:, None])
        weighed, probs = weighed * weights[:, None], probs * weights[:, None]
        n_classes = logits.shape[1]
        own = ((weighed * logits).sum(axis=0), weighed.sum(axis=0), probs.sum(axis=0))
        for row, column, values in ((0, 0, own[0]), (0, 1, own[1]), (1, 0, own[1]), (1, 1, own[2])):
            classes = np.arange(n_classes)
            curvature[classes + row * n_classes, classes + column * n_classes] += values
        return NewtonSums(loss, gradient, curvature, 0, len(labels))


def fit_on_all(
    scaler: TemperatureScaling | VectorScaling, shards: Shards, *, half: int | None, workers: int | None
) -> int:
    """Go on from a map that was fitted on a sample to the one of all rows; return their number.

    A pass over the rows for each of Newton's steps: usually two, as a sample is near.

    Raises:
        ValueError: if it does not get there: the rows do not determine the parameters.
    """
    for _ in range(_MOST_STEPS):
        work = _deriving(scaler, half)
        sums = NewtonSums.empty(len(work.weight) + (0 if work.bias is None else len(work.bias)))
        run_pass(shards, work, sums, workers=workers)
        step = np.asarray(np.linalg.lstsq(sums.curvature, sums.gradient, rcond=1e-12)[0], dtype=np.float64)
        gain = float(step @ sums.gradient) / 2 / max(sums.n_used, 1)
        _move(scaler, work, step)
        if gain < _LEFT_TO_GAIN:
            return sums.n_used
    way_out = "fit it on a sample: leave --all-rows out"
    got = f"{_MOST_STEPS} that did not"
    raise InputValueError(expected("Newton's steps", "settle on the parameters", got, way_out))


def _deriving(scaler: Any, half: int | None) -> Deriving:
    if isinstance(scaler, TemperatureScaling):
        return Deriving(np.array([1 / scaler.temperature_]), None, half)
    return Deriving(scaler.weight_, scaler.bias_, half)


def _move(scaler: Any, work: Deriving, step: FloatArray) -> None:
    if work.bias is None:
        scaler.temperature_ = float(1 / (work.weight[0] - step[0]))
        return
    n_classes = len(work.weight)
    bias = work.bias - step[n_classes:]
    scaler.weight_, scaler.bias_ = work.weight - step[:n_classes], bias - bias.mean()
