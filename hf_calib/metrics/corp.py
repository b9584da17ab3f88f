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

    Recalibrated confidences would save the miscalibration. The uncertainty is the score of stating the overall accuracy
    for every row, of which recalibrated confidences save the discrimination. Both savings are at least 0.
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
        Rows choose the recalibration and are scored with it, so that noise counts as miscalibration; confidences that
        are equal in float32 are recalibrated together.

    References:
        Dimitriadis, Gneiting and Jordan 2021, Stable reliability diagrams for probabilistic classifiers, Eq. 1 to 3.

    >>> found = corp_decomposition([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]], [0, 0, 1, 0])
    >>> [round(part, 4) for part in found]
    [0.175, 0.05, 0.0625, 0.1875]
    """
    check_choice("score", score, ("brier", "log"))
    return decompose(top_label(*check_probs_and_labels(probs, labels)), score)


def decompose(top: TopLabel, score: Score) -> CorpDecomposition:
    """The parts for rows whose top label is known."""
    from sklearn.isotonic import IsotonicRegression

    def mean_score(stated: FloatArray) -> float:
        if score == "brier":
            return float(((stated - top.correct) ** 2).mean())
        of_outcome = np.where(top.correct == 1, stated, 1 - stated)
        return -float(np.log(np.maximum(of_outcome, SMALLEST_PROBABILITY)).mean())

    tied = top.confidence.astype(np.float32).astype(np.float64)
    best = mean_score(IsotonicRegression().fit_transform(tied, top.correct).clip(0, 1))
    own, uncertainty = mean_score(top.confidence), mean_score(np.full_like(tied, top.correct.mean()))
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
    labels (N,) are drawn from the confidences, and recalibrated. It is pointwise: the curve of a calibrated model, too,
    leaves it somewhere in most samples. `consistency_test` tests all confidences together.

    References:
        That of `corp_decomposition`, section on uncertainty quantification (consistency bands).

    >>> curve = corp_curve([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]], [0, 0, 1, 0], n_resamples=50)
    >>> curve.recalibrated.tolist()
    [0.5, 0.5, 1.0, 1.0]
    """
    top = top_label(*check_probs_and_labels(probs, labels))
    return curve_of(top, n_resamples=n_resamples, confidence_level=confidence_level, seed=seed)


def curve_of(top: TopLabel, *, n_resamples: int, confidence_level: float, seed: int) -> CorpCurve:
    """The curve for rows whose top label is known."""
    from sklearn.isotonic import isotonic_regression

    check_n_resamples(n_resamples)
    check_confidence_level(confidence_level)
    rng = np.random.default_rng(check_seed(seed))
    order = np.argsort(top.confidence, kind="stable")
    ordered = top.confidence[order]
    starts = np.flatnonzero(np.diff(ordered.astype(np.float32), prepend=-1))
    values, rows = ordered[starts], np.diff(starts, append=len(ordered))
    right = np.add.reduceat(top.correct[order], starts)
    drawn = rng.binomial(rows, values.clip(0, 1), size=(n_resamples, len(values)))
    curves = [isotonic_regression(hits / rows, sample_weight=rows).clip(0, 1) for hits in (right, *drawn)]
    levels = [(1 - confidence_level) / 2, (1 + confidence_level) / 2]
    return CorpCurve(values, curves[0], *np.quantile(curves[1:], levels, axis=0))


class ConfidenceErrors(NamedTuple):
    """E|confidence - accuracy| of the top label: its part of rows that are too sure, of others, and their sum."""

    over: float
    under: float
    total: float


def confidence_errors(
    probs: ArrayLike, labels: ArrayLike, *, n_folds: int = 5, seed: int = 0
) -> ConfidenceErrors:
    r"""Split the calibration error of the top label into over- and under-confidence, each a lower bound.

    A recalibration g, an isotonic regression on the other folds, says on which side of it a row's confidence r is; what
    the row's own outcome y then says about it is unbiased:

    $$\widehat{\text{over}} = \frac{1}{N} \sum_i [g(r_i) < r_i]\,(r_i - y_i), \qquad
      \widehat{\text{under}} = \frac{1}{N} \sum_i [g(r_i) > r_i]\,(y_i - r_i)$$

    For any g their sum is on average at most the calibration error $E\,|r - P(y = 1 \mid r)|$: noise adds nothing to
    it, unlike to an ECE, and each may be negative. The authors' code has a boosted classifier for g.

    Args:
        labels: (N,) int in [0, C).
        n_folds: from 2 to N.

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

    rng = np.random.default_rng(check_seed(seed))
    top = top_label(*check_probs_and_labels(probs, labels))
    n_rows = len(top.confidence)
    got = f"{n_folds} for {n_rows} rows"
    check(2 <= n_folds <= n_rows, "n_folds to be from 2 to the number of rows", got, "take 5, or more rows")
    folds = PredefinedSplit(rng.permutation(n_rows) % n_folds)
    regression = IsotonicRegression(out_of_bounds="clip")
    return errors_by_side(top, cross_val_predict(regression, top.confidence, top.correct, cv=folds))


def errors_by_side(top: TopLabel, recalibrated: FloatArray) -> ConfidenceErrors:
    """The errors by the side of its confidence that each row's recalibration (N,) from other rows is on."""
    gaps = top.confidence - top.correct
    over = float(gaps[recalibrated < top.confidence].sum() / len(gaps))
    under = float(-gaps[recalibrated > top.confidence].sum() / len(gaps))
    return ConfidenceErrors(over, under, over + under)
