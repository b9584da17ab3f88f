"""Binned calibration errors, proper scores and accuracy.

`hf_calib.metrics` explains the arguments that they share.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_calib._errors import check
from hf_calib.metrics import checks, sums
from hf_calib.metrics.checks import FloatArray
from hf_calib.metrics.sums import Adder, Binning, Norm, SumMetric, mean_of

SMALLEST_PROBABILITY = np.finfo(np.float64).tiny


def expected_calibration_error(
    probs: ArrayLike,
    labels: ArrayLike,
    *,
    n_bins: int = 15,
    binning: Binning = "uniform",
    norm: Norm = "l1",
    debias: bool = False,
    sample_weight: ArrayLike | None = None,
) -> float:
    r"""Expected calibration error (ECE) of the top label.

    This is the metric that papers report, of the predicted class only;
    `classwise_calibration_error` covers every class. With ``binning="quantile"`` it is the adaptive
    ECE (AdaECE, ECE-EM), which is better if most confidences are near 1. With the accuracy $A_m$
    and the mean confidence $C_m$ of bin $B_m$,

    $$\mathrm{ECE}_p = \left(\sum_{m=1}^{M} \frac{|B_m|}{N} |A_m - C_m|^p\right)^{1/p}$$

    Args:
        binning: "uniform": equal-width bins (lower, upper]. "quantile": bins between interpolated
            quantiles, without the row with the smallest confidence, as in the papers' code, unless
            others tie with it. "equal_mass": the sorted examples in M parts, so that the order of
            equal confidences at a cut matters.
        norm: "l1", "l2" (the root of the weighted squared gaps) or "max" (the largest gap).
        debias: subtract the error that sampling noise alone adds, down to 0; not for "max". For l2
            this is $A_m (1 - A_m) / (n_m - 1)$ per squared gap, for l1 the expected excess of a gap
            with normal noise.
        sample_weight: as above, only for binning="uniform" without debias.

    References:
        Guo et al. 2017; Nguyen and O'Connor 2015 (equal mass); Mukhoti et al. 2020 (whose code
        gives the same values); Kumar et al. 2019 (debiased).

    >>> probs = [[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]]
    >>> round(expected_calibration_error(probs, [0, 1, 1]), 6)
    0.4
    """
    checks.check_choice("binning", binning, sums.BINNINGS)
    checks.check_choice("norm", norm, sums.NORMS)
    checks.check_flag("debias", debias)
    has_known_noise = norm != "max"
    way_out = "use norm='l1' or norm='l2', whose sampling noise is known"
    fits = has_known_noise or not debias
    check(fits, "debias to be False with norm='max'", debias, way_out)
    metric = sums.top_label_sums(checks.check_n_bins(n_bins), binning, norm, debias)
    rows, targets, weights = _checked(probs, labels, sample_weight)
    are_drawn = targets.ndim == 1
    way_out = "a soft label is not a draw, so it has no sampling noise to subtract"
    fits = are_drawn or not debias
    check(fits, "debias to be False for soft labels", debias, way_out)
    has_weighted_form = binning == "uniform" and not debias
    fits = weights is None or has_weighted_form
    requirement = "sample_weight to be used with binning='uniform' and debias=False"
    got = f"binning={binning!r}, debias={debias}"
    way_out = "leave the weights out; CalibrationState has equal-mass bins of weights"
    check(fits, requirement, got, way_out)
    top = sums.top_label(rows, targets)
    return metric(*top, weights)


def maximum_calibration_error(
    probs: ArrayLike,
    labels: ArrayLike,
    *,
    n_bins: int = 15,
    sample_weight: ArrayLike | None = None,
) -> float:
    """Maximum calibration error (MCE): the largest gap of any equal-width bin (Naeini et al. 2015).

    It shows the worst case, but is noisy: a bin with one example counts as much as a bin with
    thousands.

    >>> probs = [[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]]
    >>> round(maximum_calibration_error(probs, [0, 1, 1]), 6)
    0.8
    """
    return expected_calibration_error(
        probs, labels, n_bins=n_bins, norm="max", sample_weight=sample_weight
    )


def classwise_calibration_error(
    probs: ArrayLike,
    labels: ArrayLike,
    *,
    n_bins: int = 15,
    sample_weight: ArrayLike | None = None,
) -> float:
    r"""Classwise ECE: the ECE of each class's probability, averaged over all C classes.

    Use it if every probability matters; `expected_calibration_error` covers the predicted class
    only. The value falls with the number of classes. With the frequency $A_{m,c}$ of class c and
    its mean probability $C_{m,c}$ in bin m (Kull et al. 2019),

    $$\frac{1}{C} \sum_{c} \sum_{m} \frac{|B_{m,c}|}{N} |A_{m,c} - C_{m,c}|$$

    >>> probs = [[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]]
    >>> round(classwise_calibration_error(probs, [0, 1, 1]), 6)
    0.4
    """
    metric = sums.classwise_sums(checks.check_n_bins(n_bins))
    return metric(*_checked(probs, labels, sample_weight))


def negative_log_likelihood(
    probs: ArrayLike, labels: ArrayLike, *, sample_weight: ArrayLike | None = None
) -> float:
    r"""Mean negative log-likelihood (NLL) of the true class.

    Training and temperature scaling minimise it. Unlike `brier_score` it is dominated by confident
    errors.

    $$-\frac{1}{N} \sum_i \log p_{i, y_i} \quad\text{or, for soft labels,}\quad
    -\frac{1}{N} \sum_i \sum_c \eta_{i,c} \log p_{i,c}$$

    Returns:
        Nats per example, at least 0. A probability of 0 (in float16, below 6e-8) counts as 708.4
        nats.

    >>> round(negative_log_likelihood([[0.5, 0.5], [0.25, 0.75]], [0, 0]), 6)
    1.039721
    """
    return mean_of(negative_logs)(*_checked(probs, labels, sample_weight))


def brier_score(
    probs: ArrayLike, labels: ArrayLike, *, sample_weight: ArrayLike | None = None
) -> float:
    r"""Brier score: mean squared distance of the probabilities from the label (Brier 1950).

    It is a proper score in [0, 2], less sensitive to single confident errors than
    `negative_log_likelihood`. For two classes it is twice scikit-learn's value. Soft labels replace
    $[c = y_i]$.

    $$\frac{1}{N} \sum_i \sum_c (p_{i,c} - [c = y_i])^2$$

    >>> round(brier_score([[0.5, 0.5], [0.25, 0.75]], [0, 1]), 6)
    0.3125
    """
    return mean_of(squared_distances)(*_checked(probs, labels, sample_weight))


def root_brier_score(
    probs: ArrayLike, labels: ArrayLike, *, sample_weight: ArrayLike | None = None
) -> float:
    """Square root of the Brier score, which bounds the calibration error; in [0, sqrt(2)].

    It needs no bins, which can hide miscalibration: the l2 calibration error of the whole vector is
    never larger, at any sample size (Gruber and Buettner 2022).

    >>> round(root_brier_score([[0.5, 0.5], [0.25, 0.75]], [0, 1]), 6)
    0.559017
    """
    metric = mean_of(squared_distances, root=True)
    return metric(*_checked(probs, labels, sample_weight))


class BrierDecomposition(NamedTuple):
    """The two parts of the Brier score; their sum is the score."""

    calibration: float
    refinement: float


def brier_decomposition(
    probs: ArrayLike,
    labels: ArrayLike,
    *,
    n_bins: int = 15,
    sample_weight: ArrayLike | None = None,
) -> BrierDecomposition:
    r"""Split the Brier score into calibration, which recalibration can remove, and refinement.

    The parts show why one model has a better `brier_score` than another. The means of probabilities
    and labels are those of equal-width bins of confidence, with a row's classes sorted by
    probability, so that none cancels another:

    $$\text{calibration} = \sum_m \frac{n_m}{N} \|\bar p_m - \bar y_m\|^2$$

    Returns:
        Both parts, at least 0; their sum is the Brier score. With few examples per bin, noise
        counts as calibration error. (Murphy 1973; Stephenson et al. 2008.)

    >>> probs = [[0.75, 0.25], [0.25, 0.75], [0.75, 0.25], [0.75, 0.25]]
    >>> parts = brier_decomposition(probs, [0, 1, 0, 0])
    >>> (parts.calibration, parts.refinement)
    (0.125, 0.0)
    """
    rows = partial(_ordered_gaps, n_bins=checks.check_n_bins(n_bins))
    metric = SumMetric(rows, _brier_parts)
    added = metric.sums(*_checked(probs, labels, sample_weight))
    return BrierDecomposition(*metric.value(added, added[0].sum()))


def accuracy(
    probs: ArrayLike, labels: ArrayLike, *, sample_weight: ArrayLike | None = None
) -> float:
    """Fraction of examples whose most probable class, of several the first, is the true class.

    With soft labels it is the mean share of the predicted class.

    >>> accuracy([[0.5, 0.5], [0.25, 0.75]], [0, 0])
    0.5
    """
    return mean_of(shares_right)(*_checked(probs, labels, sample_weight))


def true_calibration_error(probs: ArrayLike, labels: ArrayLike) -> float:
    r"""True calibration error: the mean distance of the predicted distribution from the true one.

    Unlike in `expected_calibration_error`, errors of different examples cannot cancel. It needs the
    true class probabilities $\eta$, (N, C), of a known generator, or the shares of many annotators,
    whose sampling noise then adds to the value. It is at most sqrt(2) (Lin et al. 2025, Eq. 1).

    $$\frac{1}{N} \sum_i \|p_i - \eta_i\|_2$$

    >>> true_calibration_error([[0.5, 0.5], [1.0, 0.0]], [[0.8, 0.2], [1.0, 0.0]]).__round__(6)
    0.212132
    """
    rows = checks.check_probs(probs)
    shares = checks.check_soft_labels(labels, rows.shape, argument="labels")
    return mean_of(distances)(rows, shares)


def _checked(
    probs: ArrayLike, labels: ArrayLike, sample_weight: ArrayLike | None
) -> tuple[NDArray[Any], NDArray[Any], FloatArray | None]:
    rows, targets = checks.check_probs_and_any_labels(probs, labels)
    return rows, targets, checks.check_weights(sample_weight, len(rows))


# What a row adds


def shares_right(probs: NDArray[Any], labels: NDArray[Any]) -> FloatArray:
    """The correctness (N,) of the predicted class of each row."""
    return sums.top_label(probs, labels).correct


def negative_logs(probs: NDArray[Any], labels: NDArray[Any]) -> FloatArray:
    """The negative log-likelihood (N,) of each row."""
    if labels.ndim == 2:
        return np.einsum("nc,nc->n", labels, nats_of(probs))
    return nats_of(probs[np.arange(len(probs)), labels])


def nats_of(chances: NDArray[Any]) -> FloatArray:
    """The negative logarithms, which are finite for a chance of 0."""
    wide = chances.astype(np.float64, copy=False)
    return -np.log(np.maximum(wide, SMALLEST_PROBABILITY))


def distances(probs: NDArray[Any], labels: NDArray[Any]) -> FloatArray:
    """The Euclidean distance (N,) of each row from its label."""
    return np.sqrt(squared_distances(probs, labels))


def squared_distances(probs: NDArray[Any], labels: NDArray[Any]) -> FloatArray:
    """The squared distances (N,)."""
    gaps = sums.residuals(probs, labels)
    return np.einsum("nc,nc->n", gaps, gaps)


def _ordered_gaps(probs: NDArray[Any], labels: NDArray[Any], *, n_bins: int) -> Adder:
    """Sums (2 + C, M) in bins: rows, squares and gaps, of classes from most to least probable."""
    # A class that is likely in some rows and unlikely in others would cancel in their mean.
    order = np.argsort(-probs, axis=1, kind="stable")
    gaps = np.take_along_axis(sums.residuals(probs, labels), order, axis=1)
    squares = np.einsum("nc,nc->n", gaps, gaps)
    confidences = np.take_along_axis(probs, order[:, :1], axis=1)[:, 0]
    bins = sums.uniform_bins(confidences, n_bins)
    return sums.in_bins(bins, n_bins, 1.0, squares, *gaps.T)


def _brier_parts(added: FloatArray, n: Any) -> tuple[float, float]:
    counts, squares, *gaps = added
    squared_gaps = np.square(gaps).sum(axis=0)
    of_bins = squared_gaps / np.where(counts > 0, counts, 1)
    calibration = of_bins.sum() / n
    brier = squares.sum() / n
    # The refinement is a variance, which only rounding can make negative.
    return float(calibration), float(max(brier - calibration, 0.0))
