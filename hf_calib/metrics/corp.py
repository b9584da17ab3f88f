"""Reliability by isotonic regression: the CORP curve, its bands and decomposition; over- and under-confidence."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

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


class CorpDecomposition(NamedTuple):
    """A mean score of the top label, in parts: score = miscalibration - discrimination + uncertainty.

    Miscalibration, at least 0, is what recalibrated confidences save; discrimination, at least 0, what these save over
    stating the overall accuracy for every row; uncertainty is the score of that.
    """

    score: float
    miscalibration: float
    discrimination: float
    uncertainty: float


class CorpCurve(NamedTuple):
    """The K different confidences, the recalibrated ones, and the ends of a calibrated model's band; each (K,)."""

    confidences: FloatArray
    recalibrated: FloatArray
    low: FloatArray
    high: FloatArray


def corp_decomposition(probs: ArrayLike, labels: ArrayLike, *, score: Score = "brier") -> CorpDecomposition:
    r"""Decompose the top label's mean score by isotonic regression, without bins.

    Unlike in `brier_decomposition`, the recalibrated confidences $\hat x$ are the best non-decreasing function of x:

    $$\bar S = (\bar S(x) - \bar S(\hat x)) - (\bar S(\bar y) - \bar S(\hat x)) + \bar S(\bar y)$$

    with y = 1 where the prediction is right, and $\bar y$ the accuracy.

    Args:
        labels: (N,) int in [0, C).
        score: "brier", $(x - y)^2$, or "log", the negative log-likelihood of y in nats, of 708 at the most.

    Notes:
        Rows choose the recalibration and are scored with it, so that noise counts as miscalibration. Confidences that
        are equal in float32 are recalibrated together.

    References:
        Dimitriadis, Gneiting and Jordan 2021, "Stable reliability diagrams for probabilistic classifiers", Eq. 1 to 3.

    >>> probs = [[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]]
    >>> found = corp_decomposition(probs, [0, 0, 1, 0])
    >>> [round(part, 4) for part in found]
    [0.175, 0.05, 0.0625, 0.1875]
    """
    check_choice("score", score, ("brier", "log"))
    return decompose(top_label(*check_probs_and_labels(probs, labels)), score)


def decompose(top: TopLabel, score: Score) -> CorpDecomposition:
    """The same of rows whose top label is known."""
    _, rows, right = _pooled(top)
    overall = np.full_like(rows, right.sum() / rows.sum())
    own = _mean_score(top.confidence, np.ones_like(top.correct), top.correct, score)
    best = _mean_score(_recalibrated(rows, right), rows, right, score)
    uncertainty = _mean_score(overall, rows, right, score)
    return CorpDecomposition(own, max(own - best, 0.0), max(uncertainty - best, 0.0), uncertainty)


def corp_curve(
    probs: ArrayLike,
    labels: ArrayLike,
    *,
    n_resamples: int = 1000,
    confidence_level: float = 0.9,
    seed: int = 0,
) -> CorpCurve:
    """The recalibrated confidence against the confidence, with the band of a calibrated model.

    For a reliability diagram that no number of bins decides; `hf_calib.plots.corp_diagram` draws it. For the band,
    labels (N,) are drawn from the confidences themselves, and recalibrated. It is pointwise: the curve of a calibrated
    model, too, leaves it somewhere in most samples. `consistency_test` tests all confidences together.

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
    low, high = np.quantile(curves, [(1 - confidence_level) / 2, (1 + confidence_level) / 2], axis=0)
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
    from sklearn.isotonic import isotonic_regression

    return np.asarray(isotonic_regression(right / rows, sample_weight=rows, y_min=0, y_max=1))


def _mean_score(stated: FloatArray, rows: FloatArray, right: FloatArray, score: Score) -> float:
    """Of K values stated for so many rows each, of which so many are right."""
    if score == "brier":
        if_right, if_wrong = (1 - stated) ** 2, stated**2
    else:
        if_right, if_wrong = (-np.log(np.maximum(p, SMALLEST_PROBABILITY)) for p in (stated, 1 - stated))
    return float(right @ if_right + (rows - right) @ if_wrong) / float(rows.sum())


# Over- and under-confidence


class ConfidenceErrors(NamedTuple):
    """E|confidence - accuracy| of the top label: its part of rows that are too sure, of others, and their sum."""

    over: float
    under: float
    total: float


def confidence_errors(
    probs: ArrayLike, labels: ArrayLike, *, n_folds: int = 5, seed: int = 0
) -> ConfidenceErrors:
    r"""Split the calibration error of the top label into over- and under-confidence, each a lower bound.

    A recalibration g, an isotonic regression on the other folds, says for each row on which side its confidence r is;
    what the row's own outcome y then says about it is unbiased:

    $$\widehat{\text{over}} = \frac{1}{N} \sum_i [g(r_i) < r_i]\,(r_i - y_i), \qquad
      \widehat{\text{under}} = \frac{1}{N} \sum_i [g(r_i) > r_i]\,(y_i - r_i)$$

    For any g their sum is on average at most the calibration error $E\,|r - P(y = 1 \mid r)|$, and equal to it where
    g is on the right side everywhere: noise cannot add to it, as it does to an ECE.

    Args:
        labels: (N,) int in [0, C).
        n_folds: K, from 2 to N.

    Returns:
        Fractions. Each may be negative where there is nothing to find, so that it is a bound on average.

    Notes:
        The authors' code has a boosted classifier for g, and calls a confidence below .5 over if it is too low.

    References:
        "A variational estimator for Lp calibration errors", arXiv 2602.24230; for p = 1 and the top label.

    >>> rng = np.random.default_rng(0)
    >>> top = rng.uniform(0.5, 1.0, 4000)
    >>> labels = np.where(rng.random(4000) < top - 0.1, 0, 1)
    >>> found = confidence_errors(np.stack([top, 1 - top], axis=1), labels)
    >>> round(found.over, 2), abs(round(found.under, 2))
    (0.1, 0.0)
    """
    from sklearn.isotonic import IsotonicRegression
    from sklearn.model_selection import PredefinedSplit, cross_val_predict

    check_seed(seed)
    top = top_label(*check_probs_and_labels(probs, labels))
    n_rows = len(top.confidence)
    got = f"{n_folds} for {n_rows} rows"
    check(2 <= n_folds <= n_rows, "n_folds to be from 2 to the number of rows", got, "take 5, or more rows")
    folds = PredefinedSplit(np.random.default_rng(seed).permutation(n_rows) % n_folds)
    regression = IsotonicRegression(out_of_bounds="clip")
    return errors_by_side(top, cross_val_predict(regression, top.confidence, top.correct, cv=folds))


def errors_by_side(top: TopLabel, recalibrated: FloatArray) -> ConfidenceErrors:
    """The errors by the side of its confidence that each row's recalibration (N,) from other rows is on."""
    gaps = top.confidence - top.correct
    over = float(gaps[recalibrated < top.confidence].sum() / len(gaps))
    under = float(-gaps[recalibrated > top.confidence].sum() / len(gaps))
    return ConfidenceErrors(over, under, over + under)
