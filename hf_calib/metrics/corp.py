"""Reliability by isotonic regression: CORP curve and decomposition; over- and under-confidence."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from hf_calib.metrics import checks
from hf_calib.metrics.checks import FloatArray, IntArray
from hf_calib.metrics.sums import TopLabel, top_label, without_rounding


class CorpDecomposition(NamedTuple):
    """The parts of the top label's Brier score, miscalibration - discrimination + uncertainty.

    Recalibration would remove the miscalibration. The uncertainty is the score of using the
    accuracy as the confidence of every row, which recalibrated confidences reduce by the
    discrimination. All parts are at least 0.
    """

    score: float
    miscalibration: float
    discrimination: float
    uncertainty: float


class CorpCurve(NamedTuple):
    """The K different confidences, their recalibrated values and the ends of the band, (K,)."""

    confidences: FloatArray
    recalibrated: FloatArray
    low: FloatArray
    high: FloatArray


def corp_decomposition(probs: ArrayLike, labels: ArrayLike) -> CorpDecomposition:
    r"""Decompose the top label's mean Brier score $(x - y)^2$ by isotonic regression, without bins.

    Unlike in `brier_decomposition`, the recalibrated confidences $\hat x$ are the best
    non-decreasing function of x:

    $$\bar S = (\bar S(x) - \bar S(\hat x)) - (\bar S(\bar y) - \bar S(\hat x)) + \bar S(\bar y)$$

    where y is 1 if the prediction is correct, and $\bar y$ is the accuracy. Noise counts as
    miscalibration. Confidences that are equal up to the rounding of float32, in p and in 1 - p, are
    recalibrated together.

    Args:
        labels: (N,) int in [0, C).

    References:
        Dimitriadis, Gneiting and Jordan 2021, Stable reliability diagrams for probabilistic
        classifiers, Eq. 1 to 3.

    >>> found = corp_decomposition([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]], [0, 0, 1, 0])
    >>> [round(part, 4) for part in found]
    [0.175, 0.05, 0.0625, 0.1875]
    """
    return decompose(top_label(*checks.check_probs_and_labels(probs, labels)))


def decompose(top: TopLabel) -> CorpDecomposition:
    """The parts for rows with a known top label."""
    _, rows, right = _pooled(top)
    n_rows = len(top.confidence)
    wrong = rows - right
    # The score is that of the confidences themselves, the other parts are of the pooled ones.
    score = float(np.square(top.confidence - top.correct).mean())
    recalibrated = _recalibrated(rows, right)
    of_recalibrated = right @ (1 - recalibrated) ** 2 + wrong @ recalibrated**2
    best = float(of_recalibrated) / n_rows
    accuracy = float(top.correct.mean())
    uncertainty = accuracy * (1 - accuracy)
    return CorpDecomposition(
        score,
        max(score - best, 0.0),
        max(uncertainty - best, 0.0),
        uncertainty,
    )


def _pooled(
    top: TopLabel, *, exact: bool = False
) -> tuple[FloatArray, IntArray, FloatArray]:
    """The K confidences that differ, or by more than rounding, their rows and correct rows."""
    order = np.argsort(top.confidence)
    ordered = top.confidence[order]
    levels = ordered if exact else without_rounding(ordered)
    starts = np.flatnonzero(np.diff(levels, prepend=-1))
    rows = np.diff(starts, append=len(ordered))
    return ordered[starts], rows, np.add.reduceat(top.correct[order], starts)


def _recalibrated(rows: IntArray, right: FloatArray) -> FloatArray:
    """The non-decreasing accuracies (K,) nearest to the fractions of correct rows."""
    from scipy.optimize import isotonic_regression

    return np.asarray(isotonic_regression(right / rows, weights=rows).x.clip(0, 1))


def corp_curve(
    probs: ArrayLike,
    labels: ArrayLike,
    *,
    n_resamples: int = 1000,
    confidence_level: float = 0.9,
    seed: int = 0,
) -> CorpCurve:
    """The recalibrated confidence against the confidence, with the band of a calibrated model.

    It is a reliability diagram that does not depend on a number of bins;
    `hf_calib.plots.corp_diagram` draws it. The band is from labels drawn from the confidences. It
    is pointwise: in most samples a calibrated model also leaves it somewhere. `consistency_test`
    tests all confidences together.

    References:
        Dimitriadis, Gneiting and Jordan 2021, as in `corp_decomposition`, consistency bands.

    >>> probs = [[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]]
    >>> curve = corp_curve(probs, [0, 0, 1, 0], n_resamples=50)
    >>> curve.recalibrated.tolist()
    [0.5, 0.5, 1.0, 1.0]
    """
    top = top_label(*checks.check_probs_and_labels(probs, labels))
    return curve_of(
        top, n_resamples=n_resamples, confidence_level=confidence_level, seed=seed
    )


def curve_of(
    top: TopLabel, *, n_resamples: int, confidence_level: float, seed: int
) -> CorpCurve:
    """The curve for rows with a known top label."""
    rng = checks.check_draws(n_resamples, seed, confidence_level)
    values, rows, right = _pooled(top)
    drawn = rng.binomial(rows, values.clip(0, 1), size=(n_resamples, len(values)))
    curves = [_recalibrated(rows, hits) for hits in (right, *drawn)]
    levels = [(1 - confidence_level) / 2, (1 + confidence_level) / 2]
    return CorpCurve(values, curves[0], *np.quantile(curves[1:], levels, axis=0))


class ConfidenceErrors(NamedTuple):
    """E|confidence - accuracy| of the top label: of over- and under-confident rows, and the sum."""

    over: float
    under: float
    total: float


def confidence_errors(
    probs: ArrayLike, labels: ArrayLike, *, n_folds: int = 5, seed: int = 0
) -> ConfidenceErrors:
    r"""Split the top label's calibration error into over- and under-confidence, each a lower bound.

    A recalibration g, an isotonic regression on the other folds, decides whether the confidence r
    of a row is above or below it; given this side, the outcome y contributes without bias:

    $$\widehat{\text{over}} = \frac{1}{N} \sum_i [g(r_i) < r_i]\,(r_i - y_i), \qquad
      \widehat{\text{under}} = \frac{1}{N} \sum_i [g(r_i) > r_i]\,(y_i - r_i)$$

    For any g the mean of their sum is at most the calibration error $E\,|r - P(y = 1 \mid r)|$;
    each may be negative. In the authors' code g is a boosted classifier.

    Args:
        labels: (N,) int in [0, C).
        n_folds: number of folds, from 2 to N.

    References:
        "A variational estimator for Lp calibration errors", arXiv 2602.24230; for p = 1 and the top
        label.

    >>> rng = np.random.default_rng(0)
    >>> top = rng.uniform(0.5, 1.0, 4000)
    >>> labels = np.where(rng.random(4000) < top - 0.1, 0, 1)
    >>> found = confidence_errors(np.stack([top, 1 - top], axis=1), labels)
    >>> round(found.over, 2), abs(round(found.under, 2))
    (0.1, 0.0)
    """
    top = top_label(*checks.check_probs_and_labels(probs, labels))
    return cross_fitted_errors(top, n_folds=n_folds, seed=seed)


def cross_fitted_errors(
    top: TopLabel, *, n_folds: int = 5, seed: int = 0
) -> ConfidenceErrors:
    """The errors of rows with a known top label."""
    rng = checks.check_draws(1, seed)
    n_rows = len(top.confidence)
    checks.check_integer("n_folds", n_folds, 2, "use 5, or more rows", most=n_rows)
    # Each fold is recalibrated by a fit to the others, which has not seen its noise.
    folds = rng.permutation(n_rows) % n_folds
    recalibrated = np.empty(n_rows)
    for fold in range(n_folds):
        own = folds == fold
        values, rows, right = _pooled(top.part(~own), exact=True)
        recalibrated[own] = np.interp(
            top.confidence[own], values, _recalibrated(rows, right)
        )
    return errors_by_side(top, recalibrated)


def errors_by_side(top: TopLabel, recalibrated: FloatArray) -> ConfidenceErrors:
    """The errors of rows above and below their recalibrations (N,), fitted to other rows."""
    gaps = top.confidence - top.correct
    over = float(gaps[recalibrated < top.confidence].sum() / len(gaps))
    under = float(-gaps[recalibrated > top.confidence].sum() / len(gaps))
    return ConfidenceErrors(over, under, over + under)
