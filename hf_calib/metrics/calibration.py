"""Binned calibration errors: how far stated confidence is from the frequency of being right.

Each metric runs the same stages: validate -> bin sums -> gaps -> norm. The streaming state joins at
"bin sums", so that the two cannot drift apart.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr

from hf_calib._errors import InputValueError, expected
from hf_calib.metrics._inputs import (
    check_choice,
    check_flag,
    check_n_bins,
    check_probs_and_any_labels,
    check_weights,
    row_chunks,
)
from hf_calib.metrics.binning import (
    BINNINGS,
    Binning,
    BinSums,
    FloatArray,
    IntArray,
    assign_bins,
    sum_bins,
    sum_uniform_bins,
    sum_uniform_gaps,
    uniform_bins,
    uniform_edges,
)

Norm = Literal["l1", "l2", "max"]
NORMS: tuple[Norm, ...] = ("l1", "l2", "max")

_FEW_CLASSES = 32  # up to here a comparison class by class is faster than argmax


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
        probs: (N, C) float, rows that sum to 1.
        labels: (N,) int in [0, C); or soft labels, (N, C) float, whose share of the predicted class is
            then the accuracy of an example.
        n_bins: M, at least 1.
        binning: "uniform", equal-width bins (lower, upper]; "quantile", equal-mass bins between
            interpolated quantiles; or "equal_mass", the sorted examples cut into M parts.
        norm: "l1"; "l2", the root of the weighted squared gaps; "max", the largest gap.
        debias: subtract what sampling noise alone adds to the value; not for "max".
        sample_weight: (N,) of at least 0, not all 0, for binning="uniform" without debias; None counts every example
            once.

    Returns:
        A fraction in [0, 1].

    Raises:
        TypeError: if a dtype is wrong.
        ValueError: if probs are not probabilities, labels or weights do not fit, an option is unknown, debias is
            asked for with norm="max" or soft labels, or weights are given with what has no weighted form.

    Notes:
        Two classes are no special case: this is the confidence of the winner, not of class 1.

        Quantile edges are interpolated as in the papers' code, which leaves out the smallest confidence and
        its ties. Where that would leave out everything (N = 1, or all confidences equal), their code returns
        0; here all examples then form one bin. "equal_mass" leaves nothing out, but where a cut falls among
        equal confidences, the value depends on the order of the examples.

        A perfectly calibrated model has a positive ECE on finite data, the more so the fewer examples are
        in a bin. For l2 the unbiased estimate of each squared gap is used, $A_m (1 - A_m) / (n_m - 1)$ less;
        bins with fewer than two examples count as 0. For l1 the expected excess of a gap whose accuracy is
        normal with variance $A_m (1 - A_m) / n_m$ is subtracted, in closed form where the reference draws
        random numbers. Below zero, both are 0.

    References:
        Guo et al. 2017; Nguyen and O'Connor 2015 (equal mass); Mukhoti et al. 2020 (the code compared with);
        Kumar et al. 2019, "Verified uncertainty calibration" (debiased, l2 and l1).

    >>> probs = [[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]]
    >>> round(expected_calibration_error(probs, [0, 1, 1]), 6)
    0.4
    """
    _check_options(n_bins, binning, norm, debias)
    checked, targets = check_probs_and_any_labels(probs, labels)
    if debias and targets.ndim == 2:
        way_out = "a soft label is not a draw, so it has no sampling noise to subtract"
        raise InputValueError(expected("debias", "be False for soft labels", debias, way_out))
    confidences, correct = top_label(checked, targets)
    weights = check_weights(sample_weight, len(checked))
    if weights is None:
        return top_label_calibration_error(
            confidences, correct, n_bins=n_bins, binning=binning, norm=norm, debias=debias
        )
    if binning != "uniform" or debias:
        got = f"binning={binning!r}, debias={debias}"
        way_out = "leave the weights out; CalibrationState has equal-mass bins of weights"
        requirement = "go with binning='uniform' and debias=False"
        raise InputValueError(expected("sample_weight", requirement, got, way_out))
    sums = weighted_bins(confidences, correct, weights, n_bins)
    return binned_error(sums, n_examples=float(weights.sum()), norm=norm)


def maximum_calibration_error(
    probs: ArrayLike, labels: ArrayLike, *, n_bins: int = 15, sample_weight: ArrayLike | None = None
) -> float:
    r"""Maximum calibration error (MCE): the largest gap of any equal-width bin.

    For a worst-case view. A bin with one example counts as much as one with thousands, so it is noisy; read
    it beside the bin counts. Same as ``expected_calibration_error(..., norm="max")``.

    $$\mathrm{MCE} = \max_m |A_m - C_m|$$

    Args:
        probs: (N, C) float, rows that sum to 1.
        labels: (N,) int in [0, C), or soft labels (N, C) float.
        n_bins: M, at least 1.
        sample_weight: (N,) of at least 0, not all 0; None counts every example once.

    Returns:
        A fraction in [0, 1].

    Raises:
        TypeError: if a dtype is wrong.
        ValueError: if probs are not probabilities, or labels or weights do not fit.

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

    Args:
        probs: (N, C) float, rows that sum to 1.
        labels: (N,) int in [0, C), or soft labels (N, C) float.
        n_bins: M, at least 1.
        sample_weight: (N,) of at least 0, not all 0; None counts every example once.

    Returns:
        A fraction in [0, 1].

    Raises:
        TypeError: if a dtype is wrong.
        ValueError: if probs are not probabilities, or labels or weights do not fit.

    Notes:
        The papers' code averages over max(label) + 1 classes, which differs when the last classes are absent
        from the labels (by 10/9 if one of ten is). Here the average is over all C.

    References:
        Kull et al. 2019; Mukhoti et al. 2020.

    >>> probs = [[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]]
    >>> round(classwise_calibration_error(probs, [0, 1, 1]), 6)
    0.4
    """
    n_bins = check_n_bins(n_bins)
    checked, targets = check_probs_and_any_labels(probs, labels)
    weights = check_weights(sample_weight, len(checked))
    return float(np.mean(class_gaps(class_sums(checked, targets, n_bins, weights))))


def top_label_calibration_error(
    confidences: FloatArray,
    correct: FloatArray,
    *,
    n_bins: int = 15,
    binning: Binning = "uniform",
    norm: Norm = "l1",
    debias: bool = False,
) -> float:
    """The ECE of confidences (N,) and correctness (N,) that were reduced from probabilities before."""
    n_bins = _check_options(n_bins, binning, norm, debias)
    n_examples = len(confidences)
    if binning == "uniform" and norm == "l1" and not debias:
        return float(np.abs(sum_uniform_gaps(confidences, correct, n_bins)).sum() / n_examples)
    if binning == "uniform":
        sums = sum_uniform_bins(confidences, correct, n_bins)
    else:
        sums = sum_bins(confidences, correct, assign_bins(confidences, n_bins, binning), n_bins)
    return binned_error(sums, n_examples=n_examples, norm=norm, debias=debias)


def weighted_bins(confidences: FloatArray, correct: FloatArray, weights: FloatArray, n_bins: int) -> BinSums:
    """The sums (M,) of equal-width bins, of weights in place of counts."""
    slots = uniform_bins(confidences, n_bins)
    terms = (weights, confidences * weights, correct * weights)
    return BinSums(*(np.bincount(slots, each, minlength=n_bins).astype(np.float64) for each in terms))


def top_label(probs: NDArray[Any], labels: NDArray[Any]) -> tuple[FloatArray, FloatArray]:
    """Reduce probs (N, C) to the confidence (N,) of the first most probable class and how right it is (N,).

    With labels (N,) that is 0 or 1, with soft labels (N, C) their share of the predicted class.
    """
    confidences, predicted = winners(probs)
    correct = labels[np.arange(len(probs)), predicted] if labels.ndim == 2 else predicted == labels
    return confidences, correct.astype(np.float64)


def winners(probs: NDArray[Any]) -> tuple[FloatArray, IntArray]:
    """The largest probability (N,) of each row and the first class (N,) that has it."""
    n_rows, n_classes = probs.shape
    if n_classes > _FEW_CLASSES:
        predicted = probs.argmax(axis=1)
        return probs[np.arange(n_rows), predicted].astype(np.float64), predicted
    confidences, predicted = np.empty(n_rows), np.empty(n_rows, np.intp)
    for part in row_chunks(n_rows, n_classes):
        confidences[part], predicted[part] = _winners_of_few(probs[part])
    return confidences, predicted


def _winners_of_few(probs: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """The same, class by class: argmax spends most of its time on getting from row to row."""
    columns = np.ascontiguousarray(probs.T)
    largest = columns.max(axis=0)
    is_largest = (columns == largest).view(np.uint8)
    if is_largest.sum(axis=0, dtype=np.uint8).max() > 1:  # ties
        return largest, probs.argmax(axis=1)
    classes = np.arange(len(columns), dtype=np.uint8)[:, None]
    return largest, (is_largest * classes).sum(axis=0, dtype=np.uint8)


def binned_error(sums: BinSums, *, n_examples: float, norm: Norm, debias: bool = False) -> float:
    """The last two stages, gaps and norm, on the sums (M,) of each bin."""
    gaps = np.abs(sums.confidence - sums.correct) / np.where(sums.counts > 0, sums.counts, 1)
    if norm == "max":
        return float(gaps.max())
    if norm == "l2":
        squares = gaps**2 - _squared_noise(sums) if debias else gaps**2
        return float(np.sqrt(max(np.sum(sums.counts * squares) / n_examples, 0.0)))
    if debias:
        gaps = 2 * gaps - _expected_gaps(sums, gaps)
    return float(max(np.sum(sums.counts * gaps) / n_examples, 0.0))


def class_gaps(sums: BinSums) -> FloatArray:
    """The binned gap of each class (C,) from sums (C, M); NaN for a class that was never evaluated."""
    n_examples = sums.counts.sum(axis=-1)
    weighted_gaps = np.abs(sums.confidence - sums.correct).sum(axis=-1)
    return weighted_gaps / np.where(n_examples > 0, n_examples, np.nan)


def class_sums(
    probs: NDArray[Any], labels: NDArray[Any], n_bins: int, weights: FloatArray | None = None
) -> BinSums:
    """Bin every probability by its class and value into sums (C, M), from labels (N,) or (N, C), perhaps of weights.

    Most probabilities are in the first bin, so that bin is what the others leave of each class's total, and
    only the others are sorted into bins. Rows go chunk by chunk: no temporary is (N, C).
    """
    n_classes = probs.shape[1]
    sums = BinSums(*np.zeros((3, n_classes, n_bins)))
    totals = BinSums(*np.zeros((3, n_classes)))
    for part in row_chunks(len(probs), n_classes):
        chunk = probs[part].astype(np.float64, copy=False)
        targets = labels[part]
        own = None if weights is None else weights[part]
        if own is None:
            stated, hits = chunk.sum(axis=0), targets.sum(axis=0) if targets.ndim == 2 else None
        else:
            stated, hits = own @ chunk, own @ targets if targets.ndim == 2 else None
        if hits is None:
            hits = np.bincount(targets, own, minlength=n_classes)
        for total, more in zip(totals, (len(chunk) if own is None else own.sum(), stated, hits), strict=True):
            total += more
        _add_upper_bins(sums, chunk, targets, own)
    for by_bin, total in zip(sums, totals, strict=True):
        by_bin[:, 0] = total - by_bin[:, 1:].sum(axis=1)
    return sums


def _add_upper_bins(
    sums: BinSums, probs: FloatArray, labels: NDArray[Any], weights: FloatArray | None
) -> None:
    """Add what lies above the first bin; what else is added to the first bin is overwritten later."""
    n_classes, n_bins = sums.counts.shape
    upper = np.flatnonzero(probs > uniform_edges(n_bins)[1])
    rows, classes = np.divmod(upper, n_classes)
    hits = labels[rows, classes] if labels.ndim == 2 else labels[rows] == classes
    values = probs.reshape(-1)[upper]
    slots = uniform_bins(values, n_bins) + classes * n_bins
    terms = (
        (None, values, hits)
        if weights is None
        else (weights[rows], values * weights[rows], hits * weights[rows])
    )
    for total, each in zip(sums, terms, strict=True):
        total += np.bincount(slots, each, minlength=total.size).reshape(total.shape)


def _check_options(n_bins: int, binning: str, norm: str, debias: bool) -> int:
    check_choice("binning", binning, BINNINGS)
    check_choice("norm", norm, NORMS)
    check_flag("debias", debias)
    if debias and norm == "max":
        way_out = "use norm='l1' or norm='l2', whose sampling noise is known"
        raise InputValueError(expected("debias", "be False with norm='max'", debias, way_out))
    return check_n_bins(n_bins)


def _squared_noise(sums: BinSums) -> FloatArray:
    """The part of each bin's squared gap due to label noise; all of the gap in a bin of one example."""
    members = np.maximum(sums.counts, 1)
    accuracy = sums.correct / members
    gaps = (sums.confidence - sums.correct) / members
    return np.where(sums.counts > 1, accuracy * (1 - accuracy) / np.maximum(members - 1, 1), gaps**2)


def _expected_gaps(sums: BinSums, gaps: FloatArray) -> FloatArray:
    """The mean of the absolute gap of each bin when its accuracy is drawn again: a folded normal."""
    members = np.maximum(sums.counts, 1)
    accuracy = sums.correct / members
    spread = np.sqrt(np.maximum(accuracy * (1 - accuracy), 0) / members)
    ratio = np.divide(gaps, spread, out=np.full_like(gaps, np.inf), where=spread > 0)
    density = np.sqrt(2 / np.pi) * np.exp(-(ratio**2) / 2)
    return spread * density + gaps * (1 - 2 * ndtr(-ratio))
