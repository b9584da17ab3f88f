"""Reliability by isotonic regression: the CORP curve, its bands and decomposition; over- and under-confidence."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import isotonic_regression

from hf_calib._errors import check
from hf_calib.metrics.checks import (
    FloatArray,
    check_choice,
    check_confidence_level,
    check_n_resamples,
    check_probs_and_labels,
    check_seed,
)
from hf_calib.metrics.scores import SMALLEST_PROBABILITY
from hf_calib.metrics.sums import TopLabel, top_label

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
        labels: (N,) int in [0, C).
        score: "brier", $(x - y)^2$, or "log", the negative log-likelihood of y in nats.

    Returns:
        The score and its three parts. With "log" a confidence of 0 or 1 that is wrong costs 708 nats: the
        probability of what happened counts as 2e-308, as in `negative_log_likelihood`.

    Notes:
        The same rows choose the recalibration and are scored with it, so that noise counts as miscalibration, the more
        so with few rows. Confidences that are equal in float32 are recalibrated together.

    References:
        Dimitriadis, Gneiting and Jordan 2021, "Stable reliability diagrams for probabilistic classifiers", Eq. 1 to 3.

    >>> probs = [[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]]
    >>> found = corp_decomposition(probs, [0, 0, 1, 0])
    >>> [round(part, 4) for part in found]
    [0.175, 0.05, 0.0625, 0.1875]
    """
    check_choice("score", score, _SCORES)
    return decompose(top_label(*check_probs_and_labels(probs, labels)), score)


def decompose(top: TopLabel, score: Score) -> CorpDecomposition:
    """The same of rows whose top label is known."""
    _, rows, right = _pooled(top)
    n_rows = len(top.confidence)
    overall = np.full_like(rows, right.sum() / n_rows)
    own = _scores(top.confidence, np.ones(n_rows), top.correct, score) / n_rows
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
        labels: (N,) int in [0, C).
        n_resamples: of the labels, at least 1.
        confidence_level: of the band at each point, in (0, 1).

    Returns:
        The curve on the K different confidences.

    References:
        Dimitriadis, Gneiting and Jordan 2021, section on uncertainty quantification (consistency bands).

    >>> curve = corp_curve([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]], [0, 0, 1, 0], n_resamples=50)
    >>> curve.recalibrated.tolist()
    [0.5, 0.5, 1.0, 1.0]
    """
    check_n_resamples(n_resamples)
    check_confidence_level(confidence_level)
    check_seed(seed)
    top = top_label(*check_probs_and_labels(probs, labels))
    return curve_of(top, n_resamples=n_resamples, confidence_level=confidence_level, seed=seed)


def curve_of(top: TopLabel, *, n_resamples: int, confidence_level: float, seed: int) -> CorpCurve:
    """The same of rows whose top label is known."""
    values, rows, right = _pooled(top)
    rng = np.random.default_rng(seed)
    drawn = rng.binomial(rows.astype(np.int64), np.clip(values, 0, 1), size=(n_resamples, len(values)))
    curves = np.stack([_recalibrated(rows, hits) for hits in drawn])
    levels = [(1 - confidence_level) / 2, (1 + confidence_level) / 2]
    low, high = np.quantile(curves, levels, axis=0)
    return CorpCurve(values, _recalibrated(rows, right), low, high)


def _pooled(top: TopLabel) -> tuple[FloatArray, FloatArray, FloatArray]:
    """The confidences (K,) that differ in float32, the rows (K,) that have each, and the right ones (K,) of them."""
    order = np.argsort(top.confidence, kind="stable")
    ordered = top.confidence[order]
    starts = np.flatnonzero(np.diff(ordered.astype(np.float32), prepend=-1))
    rows = np.diff(starts, append=len(ordered)).astype(np.float64)
    return ordered[starts], rows, np.add.reduceat(top.correct[order], starts)


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


# Over- and under-confidence


class ConfidenceErrors(NamedTuple):
    """The top label's calibration error in its two directions.

    Args:
        over: of rows that are too sure; their part of E|confidence - accuracy|.
        under: of rows that are not sure enough.
        total: over + under, a lower bound of the calibration error of the top label, on average.
    """

    over: float
    under: float
    total: float


def confidence_errors(
    probs: ArrayLike, labels: ArrayLike, *, n_folds: int = 5, seed: int = 0
) -> ConfidenceErrors:
    r"""Split the calibration error of the top label into over- and under-confidence, each a lower bound.

    An ECE says how far confidences are from accuracies, and not on which side. Here a recalibration g, an isotonic
    regression on the other folds, says for each row on which side its confidence r is; what the row's own outcome y
    then says about it is unbiased:

    $$\widehat{\text{over}} = \frac{1}{N} \sum_i [g(r_i) < r_i]\,(r_i - y_i), \qquad
      \widehat{\text{under}} = \frac{1}{N} \sum_i [g(r_i) > r_i]\,(y_i - r_i)$$

    For whatever g the expectation of the sum is at most the calibration error $E\,|r - P(y = 1 \mid r)|$, and equal to
    it where g is on the right side everywhere: noise cannot add to it, as it does to an ECE.

    Args:
        labels: (N,) int in [0, C).
        n_folds: K, from 2 to N.
        seed: of the folds.

    Returns:
        Fractions. Each may be negative where there is nothing to find: a bound that stopped at 0 would be too large on
        average.

    Notes:
        The paper's own code takes a boosted classifier for g, and calls a confidence below .5 over-confident where it
        is too low: that of the other of two classes. Here over-confident is what states more than is right.

    References:
        "A variational estimator for Lp calibration errors", arXiv 2602.24230; for p = 1 and the top label.

    >>> rng = np.random.default_rng(0)
    >>> top = rng.uniform(0.5, 1.0, 4000)
    >>> labels = np.where(rng.random(4000) < top - 0.1, 0, 1)
    >>> found = confidence_errors(np.stack([top, 1 - top], axis=1), labels)
    >>> round(found.over, 2), abs(round(found.under, 2))
    (0.1, 0.0)
    """
    check_seed(seed)
    top = top_label(*check_probs_and_labels(probs, labels))
    n_rows = len(top.confidence)
    got = f"{n_folds} for {n_rows} rows"
    check(2 <= n_folds <= n_rows, "n_folds to be from 2 to the number of rows", got, "take 5, or more rows")
    fold = np.random.default_rng(seed).permutation(n_rows) % n_folds
    recalibrated = np.empty(n_rows)
    for k in range(n_folds):
        own = fold == k
        recalibrated[own] = _isotonic(top.part(~own), top.confidence[own])
    return errors_by_side(top, recalibrated)


def errors_by_side(top: TopLabel, recalibrated: FloatArray) -> ConfidenceErrors:
    """The errors by the side of its confidence that each row's recalibration (N,) from other rows is on."""
    gaps = top.confidence - top.correct
    over = float(gaps[recalibrated < top.confidence].sum() / len(gaps))
    under = float(-gaps[recalibrated > top.confidence].sum() / len(gaps))
    return ConfidenceErrors(over, under, over + under)


def _isotonic(top: TopLabel, at: FloatArray) -> FloatArray:
    """The isotonic regression of outcomes on confidences, linear between them and constant beyond."""
    values, places = np.unique(top.confidence, return_inverse=True)
    rows = np.bincount(places).astype(np.float64)
    fitted = isotonic_regression(np.bincount(places, top.correct) / rows, weights=rows).x
    return np.interp(at, values, fitted)
