"""Calibration errors of bins, proper scores and accuracy; their common arguments are those of `hf_calib.metrics`."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_calib._errors import check
from hf_calib.metrics.checks import (
    FloatArray,
    check_choice,
    check_flag,
    check_n_bins,
    check_probs_and_any_labels,
    check_probs_and_soft_labels,
    check_weights,
)
from hf_calib.metrics.sums import (
    BINNINGS,
    NORMS,
    Adder,
    Binning,
    Norm,
    SumMetric,
    classwise_sums,
    mean_of,
    top_label,
    top_label_sums,
    uniform_bins,
)

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

    The usual number to report. It looks at the predicted class only; `classwise_calibration_error` looks at every
    class. With ``binning="quantile"`` it is the adaptive ECE (AdaECE, ECE-EM): better when most confidences are near 1
    and equal-width bins are nearly empty. With the accuracy $A_m$ and the mean confidence $C_m$ of bin $B_m$,

    $$\mathrm{ECE}_p = \left(\sum_{m=1}^{M} \frac{|B_m|}{N} |A_m - C_m|^p\right)^{1/p}$$

    Args:
        labels: of soft labels the share of the predicted class is the accuracy of an example.
        binning: "uniform", equal-width bins (lower, upper]; "quantile", equal-mass bins between interpolated quantiles;
            or "equal_mass", the sorted examples cut into M parts.
        norm: "l1"; "l2", the root of the weighted squared gaps; "max", the largest gap.
        debias: subtract what sampling noise alone adds to the value; not for "max".
        sample_weight: for binning="uniform" without debias.

    Notes:
        "quantile" leaves out the smallest confidence and its ties, as the papers' code does; where that would leave out
        everything, all examples form one bin (their code returns 0). "equal_mass" leaves nothing out, but the value
        depends on the order of equal confidences at a cut. With debias, $A_m (1 - A_m) / (n_m - 1)$ is subtracted from
        each squared gap for l2, and bins of one example count as 0; for l1, the expected excess of a gap whose accuracy
        is normal with variance $A_m (1 - A_m) / n_m$. Below zero, both are 0.

    References:
        Guo et al. 2017; Nguyen and O'Connor 2015 (equal mass); Mukhoti et al. 2020 (the code compared with);
        Kumar et al. 2019, "Verified uncertainty calibration" (debiased, l2 and l1).

    >>> probs = [[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]]
    >>> round(expected_calibration_error(probs, [0, 1, 1]), 6)
    0.4
    """
    check_choice("binning", binning, BINNINGS)
    check_choice("norm", norm, NORMS)
    check_flag("debias", debias)
    way_out = "use norm='l1' or norm='l2', whose sampling noise is known"
    check(not (debias and norm == "max"), "debias to be False with norm='max'", debias, way_out)
    metric = top_label_sums(check_n_bins(n_bins), binning, norm, debias)
    rows, targets, weights = _checked(probs, labels, sample_weight)
    way_out = "a soft label is not a draw, so it has no sampling noise to subtract"
    check(not debias or targets.ndim == 1, "debias to be False for soft labels", debias, way_out)
    fits = weights is None or (binning == "uniform" and not debias)
    requirement = "sample_weight to go with binning='uniform' and debias=False"
    way_out = "leave the weights out; CalibrationState has equal-mass bins of weights"
    check(fits, requirement, f"binning={binning!r}, debias={debias}", way_out)
    return metric(rows, targets, weights)


def maximum_calibration_error(
    probs: ArrayLike, labels: ArrayLike, *, n_bins: int = 15, sample_weight: ArrayLike | None = None
) -> float:
    r"""Maximum calibration error (MCE): the largest gap of any equal-width bin (Naeini et al. 2015).

    For a worst-case view. A bin with one example counts as much as one with thousands, so it is noisy; read it beside
    the bin counts. Same as ``expected_calibration_error(..., norm="max")``.

    $$\mathrm{MCE} = \max_m |A_m - C_m|$$

    >>> probs = [[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]]
    >>> round(maximum_calibration_error(probs, [0, 1, 1]), 6)
    0.8
    """
    return expected_calibration_error(probs, labels, n_bins=n_bins, norm="max", sample_weight=sample_weight)


def classwise_calibration_error(
    probs: ArrayLike, labels: ArrayLike, *, n_bins: int = 15, sample_weight: ArrayLike | None = None
) -> float:
    r"""Classwise ECE: the ECE of each class's probability, averaged over all C classes.

    For use where every probability matters, not the winner's alone (`expected_calibration_error`). With many classes
    most examples lie in a class's first bin and the value is small; compare it only at equal C. With $A_{m,c}$ how
    often class c is true, and $C_{m,c}$ its mean probability, in bin m,

    $$\frac{1}{C} \sum_{c} \sum_{m} \frac{|B_{m,c}|}{N} |A_{m,c} - C_{m,c}|$$

    References:
        Kull et al. 2019; Mukhoti et al. 2020, whose code averages over max(label) + 1 classes.

    >>> probs = [[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]]
    >>> round(classwise_calibration_error(probs, [0, 1, 1]), 6)
    0.4
    """
    return classwise_sums(check_n_bins(n_bins))(*_checked(probs, labels, sample_weight))


def negative_log_likelihood(
    probs: ArrayLike, labels: ArrayLike, *, sample_weight: ArrayLike | None = None
) -> float:
    r"""Mean negative log-likelihood (NLL) of the true class.

    The score that training minimises and temperature scaling is fitted by. Unlike the ECE it cannot be made small by a
    useless model; unlike `brier_score` it is unbounded and punishes confident errors hardest. With soft labels $\eta$
    it is the cross entropy, whose smallest value is the labels' own entropy.

    $$-\frac{1}{N} \sum_i \log p_{i, y_i} \quad\text{or}\quad
    -\frac{1}{N} \sum_i \sum_c \eta_{i,c} \log p_{i,c}$$

    Returns:
        Nats per example, at least 0. A probability of 0 for what is true counts as the smallest normal float64, 708.4
        nats. float16 underflows to 0 below 6e-8: take the softmax in float32.

    >>> round(negative_log_likelihood([[0.5, 0.5], [0.25, 0.75]], [0, 0]), 6)
    1.039721
    """
    return mean_of(negative_logs)(*_checked(probs, labels, sample_weight))


def brier_score(probs: ArrayLike, labels: ArrayLike, *, sample_weight: ArrayLike | None = None) -> float:
    r"""Brier score: mean squared distance between the probabilities and the one-hot label (Brier 1950).

    A bounded proper score, less moved by single confident errors than `negative_log_likelihood`. Squares are summed
    over the classes, so for two classes it is twice the positive-class form of scikit-learn. With soft labels $\eta$ it
    is the mean of $\|p_i - \eta_i\|^2$, without the labels' own spread.

    $$\frac{1}{N} \sum_i \sum_c (p_{i,c} - [c = y_i])^2$$

    Returns:
        A number in [0, 2], smaller is better.

    >>> round(brier_score([[0.5, 0.5], [0.25, 0.75]], [0, 1]), 6)
    0.3125
    """
    return mean_of(squared_distances)(*_checked(probs, labels, sample_weight))


def root_brier_score(probs: ArrayLike, labels: ArrayLike, *, sample_weight: ArrayLike | None = None) -> float:
    r"""Square root of the Brier score, an upper bound of the calibration error of all classes.

    In the units of a probability, unlike `brier_score`. No binning can hide miscalibration from it: the l2 calibration
    error of the whole vector is never larger, at any sample size (Gruber and Buettner 2022).

    Returns:
        $\sqrt{\mathrm{BS}}$, a number in [0, sqrt(2)], smaller is better.

    >>> round(root_brier_score([[0.5, 0.5], [0.25, 0.75]], [0, 1]), 6)
    0.559017
    """
    return mean_of(squared_distances, root=True)(*_checked(probs, labels, sample_weight))


class BrierDecomposition(NamedTuple):
    """The two parts of the Brier score; their sum is the score."""

    calibration: float
    refinement: float


def brier_decomposition(
    probs: ArrayLike, labels: ArrayLike, *, n_bins: int = 15, sample_weight: ArrayLike | None = None
) -> BrierDecomposition:
    r"""Split the Brier score into calibration (what recalibration can remove) and refinement (what it cannot).

    Tells why one model's `brier_score` is better than another's. Examples are grouped by the equal-width bin of their
    confidence. Each row's classes are put in order of their probability, so that over-confidence in one class is not
    cancelled by that in another. With the means $\bar p_m$ and $\bar y_m$ of ordered probabilities and labels,

    $$\mathrm{BS} = \underbrace{\sum_m \frac{n_m}{N} \|\bar p_m - \bar y_m\|^2}_{\text{calibration}}
    + \underbrace{\frac{1}{N} \sum_m \sum_{i \in m} \|(p_i - y_i) - (\bar p_m - \bar y_m)\|^2}_{
    \text{refinement}}$$

    Returns:
        calibration and refinement, both at least 0; their sum is the Brier score, whatever the bins. With few examples
        in a bin, noise counts as calibration error; take fewer bins.

    References:
        Murphy 1973; DeGroot and Fienberg 1983; Stephenson, Coelho and Jolliffe 2008 (within-bin terms).

    >>> parts = brier_decomposition([[0.75, 0.25], [0.25, 0.75], [0.75, 0.25], [0.75, 0.25]], [0, 1, 0, 0])
    >>> (parts.calibration, parts.refinement)
    (0.125, 0.0)
    """
    rows = partial(_ordered_gaps, n_bins=check_n_bins(n_bins))
    checked = _checked(probs, labels, sample_weight)
    calibration = SumMetric(rows, _squared_gaps)(*checked)
    # Rounding alone can make the refinement negative: it is a variance.
    return BrierDecomposition(calibration, max(mean_of(squared_distances)(*checked) - calibration, 0.0))


def accuracy(probs: ArrayLike, labels: ArrayLike, *, sample_weight: ArrayLike | None = None) -> float:
    """Fraction of examples whose most probable class is the true one; the first of tied classes counts.

    To read beside every calibration number: a model can be calibrated and useless. With soft labels it is the mean
    share of the predicted class.

    >>> accuracy([[0.5, 0.5], [0.25, 0.75]], [0, 0])
    0.5
    """
    return mean_of(shares_right)(*_checked(probs, labels, sample_weight))


def true_calibration_error(probs: ArrayLike, labels: ArrayLike) -> float:
    r"""True calibration error: the mean distance of the predicted distribution from the true one.

    What the binned errors stand in for when only one label per example is known. It needs the true class probabilities
    $\eta$: those of a known generator, or the shares of many annotators. Unlike `expected_calibration_error` it judges
    each example, so nothing cancels; it is 0 only for a perfect model (Lin et al. 2025, Eq. 1).

    $$\frac{1}{N} \sum_i \|p_i - \eta_i\|_2$$

    Args:
        labels: (N, C) float: the distribution of each example's label.

    Returns:
        A number in [0, sqrt(2)]. Shares of n annotators scatter around the truth by about
        $\sqrt{(1 - \|\eta\|^2) / n}$, and that is part of it.

    >>> true_calibration_error([[0.5, 0.5], [1.0, 0.0]], [[0.8, 0.2], [1.0, 0.0]]).__round__(6)
    0.212132
    """
    return mean_of(distances)(*check_probs_and_soft_labels(probs, labels))


def _checked(
    probs: ArrayLike, labels: ArrayLike, sample_weight: ArrayLike | None
) -> tuple[NDArray[Any], NDArray[Any], FloatArray | None]:
    rows, targets = check_probs_and_any_labels(probs, labels)
    return rows, targets, check_weights(sample_weight, len(rows))


# What a row adds


def shares_right(probs: NDArray[Any], labels: NDArray[Any]) -> FloatArray:
    """How right the predicted class (N,) of each row is."""
    return top_label(probs, labels).correct


def negative_logs(probs: NDArray[Any], labels: NDArray[Any]) -> FloatArray:
    """The negative log-likelihood (N,) of each row."""
    seen = probs if labels.ndim == 2 else probs[np.arange(len(probs)), labels]
    logs = np.log(np.maximum(seen.astype(np.float64), SMALLEST_PROBABILITY))
    return -(np.einsum("nc,nc->n", labels, logs) if labels.ndim == 2 else logs)


def distances(probs: NDArray[Any], labels: NDArray[Any]) -> FloatArray:
    """The Euclidean distance (N,) of each row from its label."""
    return np.sqrt(squared_distances(probs, labels))


def squared_distances(probs: NDArray[Any], labels: NDArray[Any]) -> FloatArray:
    """Their squares."""
    rows = probs.astype(np.float64, copy=False)
    if labels.ndim == 2:
        difference = rows - labels
        return np.einsum("nc,nc->n", difference, difference)
    squares = np.einsum("nc,nc->n", rows, rows) - 2 * rows[np.arange(len(rows)), labels] + 1
    return np.maximum(squares, 0)  # which rounding can miss where a row is its label


def _ordered_gaps(probs: NDArray[Any], labels: NDArray[Any], *, n_bins: int) -> Adder:
    """Rows (M, 1), and rows minus their labels (M, C), classes from most to least probable, in bins of confidence."""
    rows = probs.astype(np.float64, copy=False)
    order = np.argsort(-rows, axis=1, kind="stable")
    ordered = np.take_along_axis(rows, order, axis=1)
    true = np.take_along_axis(labels, order, axis=1) if labels.ndim == 2 else order == labels[:, None]
    columns = np.column_stack([np.ones(len(rows)), ordered - true])
    members = uniform_bins(ordered[:, 0], n_bins) == np.arange(n_bins)[:, None]
    return lambda weights: np.asarray((members * weights) @ columns)


def _squared_gaps(sums: FloatArray, n: Any) -> FloatArray:
    counts, gaps = sums[:, 0], sums[:, 1:]
    return np.asarray((np.einsum("mc,mc->m", gaps, gaps) / np.where(counts > 0, counts, 1)).sum() / n)
