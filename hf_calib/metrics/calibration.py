"""Binned calibration errors: how far stated confidence is from the frequency of being right.

Each metric runs the same stages: validate -> bin sums -> gaps -> norm. The streaming state joins at
"bin sums", so that the two cannot drift apart.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_calib.metrics._inputs import check_choice, check_n_bins, check_probs_and_labels
from hf_calib.metrics.binning import (
    BINNINGS,
    Binning,
    BinSums,
    FloatArray,
    assign_bins,
    sum_bins,
    uniform_bins,
)

Norm = Literal["l1", "l2", "max"]
NORMS: tuple[Norm, ...] = ("l1", "l2", "max")

_CHUNK_ELEMENTS = 2**18  # a chunk of rows and its temporaries stay in cache


def expected_calibration_error(
    probs: ArrayLike,
    labels: ArrayLike,
    *,
    n_bins: int = 15,
    binning: Binning = "uniform",
    norm: Norm = "l1",
) -> float:
    r"""Expected calibration error (ECE) of the top label.

    The usual number to report. It looks at the predicted class only; `classwise_calibration_error` looks at
    every class. With ``binning="quantile"`` it is the adaptive ECE (AdaECE, ECE-EM), whose bins hold equally
    many examples: better when most confidences are near 1 and equal-width bins are nearly empty.

    $$\mathrm{ECE}_p = \Big(\sum_{m=1}^{M} \frac{|B_m|}{N} |A_m - C_m|^p\Big)^{1/p}$$

    with $A_m$ the accuracy and $C_m$ the mean confidence of bin $B_m$.

    Args:
        probs: (N, C) float, rows that sum to 1.
        labels: (N,) int in [0, C).
        n_bins: M, at least 1.
        binning: "uniform", equal-width bins (lower, upper]; or "quantile", equal-mass bins.
        norm: "l1"; "l2", the root of the weighted squared gaps; "max", the largest gap.

    Returns:
        A fraction in [0, 1].

    Raises:
        TypeError: if a dtype is wrong.
        ValueError: if probs are no probabilities, labels do not fit, or an option is unknown.

    Notes:
        Quantile edges are interpolated as in the papers' code, which leaves out the smallest confidence and
        its ties. Where that would leave out everything (N = 1, or all confidences equal), their code returns
        0; here all examples then form one bin.

    References:
        Guo et al. 2017; Nguyen and O'Connor 2015 (equal mass); Mukhoti et al. 2020 (the code compared with).

    >>> probs = [[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]]
    >>> round(expected_calibration_error(probs, [0, 1, 1]), 6)
    0.4
    """
    confidences, correct = top_label(*check_probs_and_labels(probs, labels))
    return top_label_calibration_error(confidences, correct, n_bins=n_bins, binning=binning, norm=norm)


def maximum_calibration_error(probs: ArrayLike, labels: ArrayLike, *, n_bins: int = 15) -> float:
    r"""Maximum calibration error (MCE): the largest gap of any equal-width bin.

    For a worst-case view. A bin with one example counts as much as one with thousands, so it is noisy; read
    it beside the bin counts. Same as ``expected_calibration_error(..., norm="max")``.

    $$\mathrm{MCE} = \max_m |A_m - C_m|$$

    Args:
        probs: (N, C) float, rows that sum to 1.
        labels: (N,) int in [0, C).
        n_bins: M, at least 1.

    Returns:
        A fraction in [0, 1].

    Raises:
        TypeError: if a dtype is wrong.
        ValueError: if probs are no probabilities or labels do not fit.

    References:
        Naeini et al. 2015.

    >>> probs = [[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]]
    >>> round(maximum_calibration_error(probs, [0, 1, 1]), 6)
    0.8
    """
    return expected_calibration_error(probs, labels, n_bins=n_bins, norm="max")


def classwise_calibration_error(probs: ArrayLike, labels: ArrayLike, *, n_bins: int = 15) -> float:
    r"""Classwise ECE: the ECE of each class's probability, averaged over all C classes.

    For use where every probability matters, not the winner's alone (`expected_calibration_error`). All N
    examples count for every class, so with many classes most of them lie in the first bin and the value is
    small; compare it only at equal C.

    $$\frac{1}{C} \sum_{c} \sum_{m} \frac{|B_{m,c}|}{N} |A_{m,c} - C_{m,c}|$$

    with $A_{m,c}$ how often class c is true, and $C_{m,c}$ its mean probability, in bin m.

    Args:
        probs: (N, C) float, rows that sum to 1.
        labels: (N,) int in [0, C).
        n_bins: M, at least 1.

    Returns:
        A fraction in [0, 1].

    Raises:
        TypeError: if a dtype is wrong.
        ValueError: if probs are no probabilities or labels do not fit.

    Notes:
        The papers' code averages over max(label) + 1 classes, which differs when the last classes are absent
        from the labels (by 10/9 if one of ten is). Here the average is over all C.

    References:
        Kull et al. 2019; Mukhoti et al. 2020.

    >>> probs = [[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]]
    >>> round(classwise_calibration_error(probs, [0, 1, 1]), 6)
    0.4
    """
    checked, targets = check_probs_and_labels(probs, labels)
    return float(np.mean(class_gaps(_class_sums(checked, targets, check_n_bins(n_bins)))))


def top_label_calibration_error(
    confidences: FloatArray,
    correct: FloatArray,
    *,
    n_bins: int = 15,
    binning: Binning = "uniform",
    norm: Norm = "l1",
) -> float:
    """The ECE of confidences (N,) and correctness (N,) that were reduced from probabilities before."""
    n_bins = check_n_bins(n_bins)
    check_choice("binning", binning, BINNINGS)
    check_choice("norm", norm, NORMS)
    sums = sum_bins(confidences, correct, assign_bins(confidences, n_bins, binning), n_bins)
    return binned_error(sums, n_examples=len(confidences), norm=norm)


def top_label(probs: NDArray[Any], labels: NDArray[np.int64]) -> tuple[FloatArray, FloatArray]:
    """Reduce probs (N, C) to the confidence (N,) of the first most probable class and whether it is right."""
    predicted = probs.argmax(axis=1)
    confidences = probs[np.arange(len(probs)), predicted]
    return confidences.astype(np.float64), (predicted == labels).astype(np.float64)


def binned_error(sums: BinSums, *, n_examples: float, norm: Norm) -> float:
    """The last two stages, gaps and norm, on the sums (M,) of each bin."""
    gaps = np.abs(sums.confidence - sums.correct) / np.maximum(sums.counts, 1)
    if norm == "max":
        return float(gaps.max())
    if norm == "l2":
        return float(np.sqrt(np.sum(sums.counts * gaps**2) / n_examples))
    return float(np.sum(sums.counts * gaps) / n_examples)


def class_gaps(sums: BinSums) -> FloatArray:
    """The binned gap of each class (C,) from sums (C, M); NaN for a class that was never evaluated."""
    n_examples = sums.counts.sum(axis=-1)
    weighted_gaps = np.abs(sums.confidence - sums.correct).sum(axis=-1)
    return weighted_gaps / np.where(n_examples > 0, n_examples, np.nan)


def _class_sums(probs: NDArray[Any], labels: NDArray[np.int64], n_bins: int) -> BinSums:
    """Bin every probability by its class and value, rows chunk by chunk: no temporary is (N, C)."""
    n_classes = probs.shape[1]
    size = n_classes * n_bins
    counts, confidence, hits = np.zeros(size), np.zeros(size), np.zeros(size)
    first_slot = np.arange(n_classes) * n_bins
    step = max(1, _CHUNK_ELEMENTS // n_classes)
    for start in range(0, len(probs), step):
        chunk = probs[start : start + step].astype(np.float64)
        targets = labels[start : start + step]
        slots = uniform_bins(chunk, n_bins) + first_slot
        counts += np.bincount(slots.ravel(), minlength=size)
        confidence += np.bincount(slots.ravel(), chunk.ravel(), minlength=size)
        hits += np.bincount(slots[np.arange(len(chunk)), targets], minlength=size)
    shape = (n_classes, n_bins)
    return BinSums(counts.reshape(shape), confidence.reshape(shape), hits.reshape(shape))
