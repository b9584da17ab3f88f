"""Calibration errors of bins, proper scores and accuracy; their common arguments are those of `hf_calib.metrics`."""

from __future__ import annotations

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
    row_chunks,
)
from hf_calib.metrics.sums import (
    BINNINGS,
    NORMS,
    Binning,
    Norm,
    SumMetric,
    classwise_sums,
    mean_of,
    top_label,
    top_label_error,
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

    The usual number to report. It looks at the predicted class only; `classwise_calibration_error` looks at
    every class. With ``binning="quantile"`` it is the adaptive ECE (AdaECE, ECE-EM), whose bins hold equally
    many examples: better when most confidences are near 1 and equal-width bins are nearly empty.

    $$\mathrm{ECE}_p = \left(\sum_{m=1}^{M} \frac{|B_m|}{N} |A_m - C_m|^p\right)^{1/p}$$

    with $A_m$ the accuracy and $C_m$ the mean confidence of bin $B_m$.

    Args:
        labels: of soft labels the share of the predicted class is the accuracy of an example.
        binning: "uniform", equal-width bins (lower, upper]; "quantile", equal-mass bins between
            interpolated quantiles; or "equal_mass", the sorted examples cut into M parts.
        norm: "l1"; "l2", the root of the weighted squared gaps; "max", the largest gap.
        debias: subtract what sampling noise alone adds to the value; not for "max".
        sample_weight: for binning="uniform" without debias.

    Returns:
        A fraction in [0, 1].

    Notes:
        Quantile edges are interpolated as in the papers' code, which leaves out the smallest confidence and
        its ties; where that would leave out everything, all examples form one bin (their code returns 0).
        "equal_mass" leaves nothing out, but the value depends on the order of equal confidences at a cut.

        A calibrated model has a positive ECE on finite data. With debias, $A_m (1 - A_m) / (n_m - 1)$ is
        subtracted from each squared gap for l2, and bins of one example count as 0; for l1, the expected
        excess of a gap whose accuracy is normal with variance $A_m (1 - A_m) / n_m$. Below zero, both are 0.

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
    n_bins = check_n_bins(n_bins)
    checked, targets = check_probs_and_any_labels(probs, labels)
    way_out = "a soft label is not a draw, so it has no sampling noise to subtract"
    check(not debias or targets.ndim == 1, "debias to be False for soft labels", debias, way_out)
    weights = check_weights(sample_weight, len(checked))
    fits = weights is None or (binning == "uniform" and not debias)
    requirement = "sample_weight to go with binning='uniform' and debias=False"
    way_out = "leave the weights out; CalibrationState has equal-mass bins of weights"
    check(fits, requirement, f"binning={binning!r}, debias={debias}", way_out)
    options: Any = {"n_bins": n_bins, "binning": binning, "norm": norm, "debias": debias}
    return top_label_error(top_label(checked, targets), weights=weights, **options)


def maximum_calibration_error(
    probs: ArrayLike, labels: ArrayLike, *, n_bins: int = 15, sample_weight: ArrayLike | None = None
) -> float:
    r"""Maximum calibration error (MCE): the largest gap of any equal-width bin.

    For a worst-case view. A bin with one example counts as much as one with thousands, so it is noisy; read
    it beside the bin counts. Same as ``expected_calibration_error(..., norm="max")``.

    $$\mathrm{MCE} = \max_m |A_m - C_m|$$

    Returns:
        A fraction in [0, 1].

    References:
        Naeini et al. 2015.

    >>> probs = [[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]]
    >>> round(maximum_calibration_error(probs, [0, 1, 1]), 6)
    0.8
    """
    return expected_calibration_error(probs, labels, n_bins=n_bins, norm="max", sample_weight=sample_weight)


def classwise_calibration_error(
    probs: ArrayLike, labels: ArrayLike, *, n_bins: int = 15, sample_weight: ArrayLike | None = None
) -> float:
    r"""Classwise ECE: the ECE of each class's probability, averaged over all C classes.

    For use where every probability matters, not the winner's alone (`expected_calibration_error`). All N
    examples count for every class, so with many classes most of them lie in the first bin and the value is
    small; compare it only at equal C.

    $$\frac{1}{C} \sum_{c} \sum_{m} \frac{|B_{m,c}|}{N} |A_{m,c} - C_{m,c}|$$

    with $A_{m,c}$ how often class c is true, and $C_{m,c}$ its mean probability, in bin m.

    Returns:
        A fraction in [0, 1].

    Notes:
        The papers' code averages over max(label) + 1 classes, fewer when the last ones are absent from the labels.

    References:
        Kull et al. 2019; Mukhoti et al. 2020.

    >>> probs = [[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]]
    >>> round(classwise_calibration_error(probs, [0, 1, 1]), 6)
    0.4
    """
    return _checked(classwise_sums(check_n_bins(n_bins)), probs, labels, sample_weight)


class BrierDecomposition(NamedTuple):
    """The two parts of the Brier score; their sum is the score."""

    calibration: float
    refinement: float


def negative_log_likelihood(
    probs: ArrayLike, labels: ArrayLike, *, sample_weight: ArrayLike | None = None
) -> float:
    r"""Mean negative log-likelihood (NLL) of the true class.

    The score that training minimises and temperature scaling is fitted by. Unlike the ECE it cannot be made
    small by a useless model; unlike `brier_score` it is unbounded and punishes confident errors hardest.

    $$-\frac{1}{N} \sum_i \log p_{i, y_i} \quad\text{or}\quad
    -\frac{1}{N} \sum_i \sum_c \eta_{i,c} \log p_{i,c}$$

    the second with soft labels $\eta$: the cross entropy, whose smallest value is the labels' own entropy.

    Returns:
        Nats per example, at least 0.

    Notes:
        A probability of 0 for what is true counts as the smallest normal float64, 708.4 nats, so that one row
        does not turn the mean into infinity. float16 underflows to 0 below 6e-8: take the softmax in float32.

    >>> round(negative_log_likelihood([[0.5, 0.5], [0.25, 0.75]], [0, 0]), 6)
    1.039721
    """
    return _checked(nll_sums(), probs, labels, sample_weight)


def brier_score(probs: ArrayLike, labels: ArrayLike, *, sample_weight: ArrayLike | None = None) -> float:
    r"""Brier score: mean squared distance between the probabilities and the one-hot label.

    A bounded proper score, less moved by single confident errors than `negative_log_likelihood`. Squares are
    summed over the classes, so for two classes it is twice the positive-class form of scikit-learn.

    $$\frac{1}{N} \sum_i \sum_c (p_{i,c} - [c = y_i])^2$$

    With soft labels $\eta$ it is the mean of $\|p_i - \eta_i\|^2$, without the labels' own spread.

    Returns:
        A number in [0, 2], smaller is better.

    References:
        Brier 1950.

    >>> round(brier_score([[0.5, 0.5], [0.25, 0.75]], [0, 1]), 6)
    0.3125
    """
    return _checked(brier_sums(), probs, labels, sample_weight)


def root_brier_score(probs: ArrayLike, labels: ArrayLike, *, sample_weight: ArrayLike | None = None) -> float:
    r"""Square root of the Brier score, an upper bound of the calibration error of all classes.

    In the units of a probability, unlike `brier_score`. No binning can hide miscalibration from it: the l2
    calibration error of the whole vector is never larger, at any sample size, so it is the number to
    compare recalibrated versions of one model by.

    $$\mathrm{RBS} = \sqrt{\mathrm{BS}}$$

    Returns:
        A number in [0, sqrt(2)], smaller is better.

    References:
        Gruber and Buettner 2022, "Better uncertainty calibration via proper scores for classification".

    >>> round(root_brier_score([[0.5, 0.5], [0.25, 0.75]], [0, 1]), 6)
    0.559017
    """
    return _checked(brier_sums(root=True), probs, labels, sample_weight)


def brier_decomposition(
    probs: ArrayLike, labels: ArrayLike, *, n_bins: int = 15, sample_weight: ArrayLike | None = None
) -> BrierDecomposition:
    r"""Split the Brier score into calibration (what recalibration can remove) and refinement (what it cannot).

    Tells why one model's `brier_score` is better than another's. Examples are grouped by the equal-width bin
    of their confidence. Each row's classes are put in order of their probability, first the prediction, then
    the runner-up, and so on, so that over-confidence in one class is not cancelled by that in another.

    $$\mathrm{BS} = \underbrace{\sum_m \frac{n_m}{N} \|\bar p_m - \bar y_m\|^2}_{\text{calibration}}
    + \underbrace{\frac{1}{N} \sum_m \sum_{i \in m} \|(p_i - y_i) - (\bar p_m - \bar y_m)\|^2}_{
    \text{refinement}}$$

    with $\bar p_m$ and $\bar y_m$ the means of the ordered probabilities and labels of bin m.

    Returns:
        calibration and refinement, both at least 0; their sum is the Brier score, whatever the bins.

    Notes:
        Where all probabilities of a bin are equal, the refinement is the classical sum of $\bar y (1 - \bar y)$
        over the classes. With few examples in a bin, noise counts as calibration error; take fewer bins.

    References:
        Murphy 1973; DeGroot and Fienberg 1983; Stephenson, Coelho and Jolliffe 2008 (within-bin terms).

    >>> parts = brier_decomposition([[0.75, 0.25], [0.25, 0.75], [0.75, 0.25], [0.75, 0.25]], [0, 1, 0, 0])
    >>> (parts.calibration, parts.refinement)
    (0.125, 0.0)
    """
    n_bins = check_n_bins(n_bins)
    checked, targets = check_probs_and_any_labels(probs, labels)
    weights = check_weights(sample_weight, len(checked))
    counts, residuals = np.zeros(n_bins), np.zeros((n_bins, checked.shape[1]))
    for part in row_chunks(*checked.shape):
        ordered, difference = _in_order_of_probability(checked[part], targets[part])
        members = (uniform_bins(ordered[:, 0], n_bins) == np.arange(n_bins)[:, None]).astype(np.float64)
        if weights is not None:
            members *= weights[part]
        counts += members.sum(axis=1)
        residuals += members @ difference
    squares = np.einsum("mc,mc->m", residuals, residuals) / np.where(counts > 0, counts, 1)
    calibration = float(squares.sum() / counts.sum())
    # Rounding alone can make the refinement negative: it is a variance.
    return BrierDecomposition(calibration, max(brier_sums()(checked, targets, weights) - calibration, 0.0))


def accuracy(probs: ArrayLike, labels: ArrayLike, *, sample_weight: ArrayLike | None = None) -> float:
    r"""Fraction of examples whose most probable class is the true one; the first of tied classes counts.

    To read beside every calibration number: a model can be calibrated and useless. With soft labels it is
    the mean share of the predicted class, the accuracy to expect if labels are drawn from them.

    $$\frac{1}{N} \sum_i [\arg\max_c p_{i,c} = y_i]$$

    Returns:
        A fraction in [0, 1].

    >>> accuracy([[0.5, 0.5], [0.25, 0.75]], [0, 0])
    0.5
    """
    return _checked(accuracy_sums(), probs, labels, sample_weight)


def true_calibration_error(probs: ArrayLike, labels: ArrayLike) -> float:
    r"""True calibration error: the mean distance of the predicted distribution from the true one.

    What the binned errors stand in for when only one label per example is known. It needs the true class
    probabilities $\eta$: those of a known generator, or the shares of many annotators. Unlike
    `expected_calibration_error` it judges each example, so nothing cancels; it is 0 only for a perfect model.

    $$\frac{1}{N} \sum_i \|p_i - \eta_i\|_2$$

    Args:
        labels: (N, C) float: the distribution of each example's label.

    Returns:
        A number in [0, sqrt(2)].

    Notes:
        Shares of n annotators scatter around the truth by about $\sqrt{(1 - \|\eta\|^2) / n}$, and that is
        part of the value.

    References:
        Lin et al. 2025, "Uncertainty weighted gradients for model calibration", Eq. 1.

    >>> true_calibration_error([[0.5, 0.5], [1.0, 0.0]], [[0.8, 0.2], [1.0, 0.0]]).__round__(6)
    0.212132
    """
    return distance_sums()(*check_probs_and_soft_labels(probs, labels))


# The metrics, by what a row adds


def _checked(
    metric: SumMetric, probs: ArrayLike, labels: ArrayLike, sample_weight: ArrayLike | None
) -> float:
    """The metric of unchecked arguments."""
    checked, targets = check_probs_and_any_labels(probs, labels)
    return metric(checked, targets, check_weights(sample_weight, len(checked)))


def accuracy_sums() -> SumMetric:
    """The accuracy."""
    return mean_of(lambda probs, labels: top_label(probs, labels).correct)


def nll_sums() -> SumMetric:
    """The negative log-likelihood."""
    return mean_of(negative_logs)


def brier_sums(*, root: bool = False) -> SumMetric:
    """The Brier score, or its root."""
    return mean_of(squared_distances, root=root)


def distance_sums() -> SumMetric:
    """The true calibration error."""
    return mean_of(lambda probs, labels: np.sqrt(squared_distances(probs, labels)))


def negative_logs(probs: NDArray[Any], labels: NDArray[Any]) -> FloatArray:
    """The negative log-likelihood (N,) of each row."""
    if labels.ndim == 1:
        return -_safe_log(probs[np.arange(len(probs)), labels])
    logs = np.empty(len(probs))
    for part in row_chunks(*probs.shape):
        logs[part] = np.einsum("nc,nc->n", labels[part], _safe_log(probs[part]))
    return -logs


def squared_distances(probs: NDArray[Any], labels: NDArray[Any]) -> FloatArray:
    """The squared Euclidean distance (N,) of each row from its label."""
    squares = np.empty(len(probs))
    for part in row_chunks(*probs.shape):
        rows = probs[part].astype(np.float64, copy=False)
        if labels.ndim == 2:
            difference = rows - labels[part]
            squares[part] = np.einsum("nc,nc->n", difference, difference)
        else:
            true_class = rows[np.arange(len(rows)), labels[part]]
            squares[part] = np.einsum("nc,nc->n", rows, rows) - 2 * true_class + 1
    return np.maximum(squares, 0)  # which rounding can miss where a row is its label


def _safe_log(probs: NDArray[Any]) -> FloatArray:
    return np.log(np.maximum(probs.astype(np.float64, copy=False), SMALLEST_PROBABILITY))


def _in_order_of_probability(probs: NDArray[Any], labels: NDArray[Any]) -> tuple[FloatArray, FloatArray]:
    """The rows, and the rows minus their labels, each with its classes from most to least probable."""
    rows = probs.astype(np.float64, copy=False)
    order = np.argsort(-rows, axis=1, kind="stable")
    ordered = np.take_along_axis(rows, order, axis=1)
    if labels.ndim == 2:
        return ordered, ordered - np.take_along_axis(labels, order, axis=1)
    return ordered, ordered - (order == labels[:, None])
