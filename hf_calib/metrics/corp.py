"""Reliability by isotonic regression (CORP): the recalibrated curve, its bands, and the decomposition of a score."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import isotonic_regression

from hf_calib.metrics.checks import (
    FloatArray,
    check_choice,
    check_confidence_level,
    check_n_resamples,
    check_probs_and_labels,
    check_seed,
)
from hf_calib.metrics.scores import SMALLEST_PROBABILITY
from hf_calib.metrics.sums import top_label

Score = Literal["brier", "log"]
_SCORES = ("brier", "log")


class CorpDecomposition(NamedTuple):
    """A mean score of the top label, in parts: score = miscalibration - discrimination + uncertainty.

    Args:
        score: of the confidences as they are.
        miscalibration: by how much the score falls when the confidences are recalibrated; at least 0.
        discrimination: by how much the recalibrated ones are better than the overall accuracy; at least 0.
        uncertainty: the score of the overall accuracy, stated for every row.
    """

    score: float
    miscalibration: float
    discrimination: float
    uncertainty: float


class CorpCurve(NamedTuple):
    """The recalibrated confidence as a function of the confidence, on its K different values.

    Args:
        confidences: (K,) rising.
        recalibrated: (K,) the frequency of right predictions, never falling.
        low: (K,) of the pointwise band in which the curve of a calibrated model would be at each confidence.
        high: (K,).
    """

    confidences: FloatArray
    recalibrated: FloatArray
    low: FloatArray
    high: FloatArray


def corp_decomposition(probs: ArrayLike, labels: ArrayLike, *, score: Score = "brier") -> CorpDecomposition:
    r"""Decompose the top label's mean score by isotonic regression, without bins.

    `brier_decomposition` cuts the confidences into bins, and changes with them; here the recalibrated confidences
    $\hat x_i$ are the best of all non-decreasing functions of the confidences, found by pooling adjacent violators:

    $$\bar S = \underbrace{\bar S(x) - \bar S(\hat x)}_{\text{miscalibration}}
             - \underbrace{(\bar S(\bar y) - \bar S(\hat x))}_{\text{discrimination}}
             + \underbrace{\bar S(\bar y)}_{\text{uncertainty}}$$

    with y = 1 where the prediction is right, and $\bar y$ the accuracy.

    Args:
        probs: (N, C) float, rows that sum to 1.
        labels: (N,) int in [0, C).
        score: "brier", $(x - y)^2$, or "log", the negative log-likelihood of y in nats.

    Returns:
        The score and its three parts. With "log" a confidence of 0 or 1 that is wrong costs 708 nats: the
        probability of what happened counts as 2e-308, as in `negative_log_likelihood`.

    Raises:
        TypeError: if a dtype is wrong.
        ValueError: if probs are not probabilities, labels do not fit, or there is no such score.

    Notes:
        The same rows choose the recalibration and are scored with it, so that noise counts as miscalibration; with few
        rows more of it. The curve has no parameter to choose. Confidences that are equal in float32 are recalibrated
        together, so that ties which rounding broke stay ties.

    References:
        Dimitriadis, Gneiting and Jordan 2021, "Stable reliability diagrams for probabilistic classifiers", Eq. 1 to 3.

    >>> probs = [[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]]
    >>> found = corp_decomposition(probs, [0, 0, 1, 0])
    >>> [round(part, 4) for part in found]
    [0.175, 0.05, 0.0625, 0.1875]
    """
    check_choice("score", score, _SCORES)
    return decompose_top_label(*top_label(*check_probs_and_labels(probs, labels)), score)


def decompose_top_label(confidences: FloatArray, correct: FloatArray, score: Score) -> CorpDecomposition:
    """The same of confidences (N,) and correctness (N,)."""
    _, rows, right = _pooled(confidences, correct)
    n_rows = len(confidences)
    overall = np.full_like(rows, right.sum() / n_rows)
    own = _scores(confidences, np.ones(n_rows), correct, score) / n_rows
    best = _scores(_recalibrated(rows, right), rows, right, score) / n_rows
    uncertainty = _scores(overall, rows, right, score) / n_rows
    return CorpDecomposition(own, max(own - best, 0.0), max(uncertainty - best, 0.0), uncertainty)


def corp_curve(
    probs: ArrayLike,
    labels: ArrayLike,
    *,
    n_resamples: int = 1000,
    confidence_level: float = 0.9,
    seed: int = 0,
) -> CorpCurve:
    r"""The recalibrated confidence against the confidence, with the band of a calibrated model.

    For a reliability diagram that no number of bins decides; `hf_calib.plots.corp_diagram` draws it. The band is of
    consistency: labels are drawn from the confidences themselves, and recalibrated. It is pointwise: the curve of a
    calibrated model, too, leaves it somewhere in most samples. `consistency_test` tests all confidences together.

    Args:
        probs: (N, C) float, rows that sum to 1.
        labels: (N,) int in [0, C).
        n_resamples: of the labels, at least 1.
        confidence_level: of the band at each point, in (0, 1).
        seed: of the draws.

    Returns:
        The curve on the K different confidences.

    Raises:
        TypeError: if a dtype is wrong.
        ValueError: if probs are not probabilities, labels do not fit, or an option is out of range.

    References:
        Dimitriadis, Gneiting and Jordan 2021, section on uncertainty quantification (consistency bands).

    >>> curve = corp_curve([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]], [0, 0, 1, 0], n_resamples=50)
    >>> curve.recalibrated.tolist()
    [0.5, 0.5, 1.0, 1.0]
    """
    check_n_resamples(n_resamples)
    check_confidence_level(confidence_level)
    check_seed(seed)
    return top_label_corp_curve(
        *top_label(*check_probs_and_labels(probs, labels)),
        n_resamples=n_resamples,
        confidence_level=confidence_level,
        seed=seed,
    )


def top_label_corp_curve(
    confidences: FloatArray, correct: FloatArray, *, n_resamples: int, confidence_level: float, seed: int
) -> CorpCurve:
    """The same of confidences (N,) and correctness (N,)."""
    values, rows, right = _pooled(confidences, correct)
    rng = np.random.default_rng(seed)
    drawn = rng.binomial(rows.astype(np.int64), np.clip(values, 0, 1), size=(n_resamples, len(values)))
    curves = np.stack([_recalibrated(rows, hits) for hits in drawn])
    levels = [(1 - confidence_level) / 2, (1 + confidence_level) / 2]
    low, high = np.quantile(curves, levels, axis=0)
    return CorpCurve(values, _recalibrated(rows, right), low, high)


def _pooled(confidences: FloatArray, correct: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """The confidences (K,) that differ in float32, the rows (K,) that have each, and the right ones (K,) of them."""
    order = np.argsort(confidences, kind="stable")
    ordered = confidences[order]
    starts = np.flatnonzero(np.diff(ordered.astype(np.float32), prepend=-1))
    rows = np.diff(starts, append=len(ordered)).astype(np.float64)
    return ordered[starts], rows, np.add.reduceat(correct[order], starts)


def _recalibrated(rows: FloatArray, right: FloatArray) -> FloatArray:
    """The non-decreasing frequencies (K,) nearest to those of the values."""
    return np.asarray(np.clip(isotonic_regression(right / rows, weights=rows).x, 0, 1))


def _scores(stated: FloatArray, rows: FloatArray, right: FloatArray, score: Score) -> float:
    """The sum of the scores of all rows."""
    wrong = rows - right
    if score == "brier":
        return float(right @ (1 - stated) ** 2 + wrong @ stated**2)
    logs = [np.log(np.maximum(each, SMALLEST_PROBABILITY)) for each in (stated, 1 - stated)]
    return -float(right @ logs[0] + wrong @ logs[1])
