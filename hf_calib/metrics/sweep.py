"""ECE_sweep: as many bins as the data support, instead of a number that somebody chose."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from hf_calib.metrics.checks import FloatArray, IntArray, check_choice, check_probs_and_any_labels
from hf_calib.metrics.sums import TopLabel, top_label, uniform_bins, uniform_edges

SweepBinning = Literal["equal_mass", "uniform"]
SweepNorm = Literal["l1", "l2"]

# Means that are equal but for rounding do not decrease; those of fewer than a million 0/1 labels that
# differ at all differ by more.
_ROUNDING = 1e-12


def ece_sweep(
    probs: ArrayLike,
    labels: ArrayLike,
    *,
    binning: SweepBinning = "equal_mass",
    norm: SweepNorm = "l1",
) -> float:
    r"""Expected calibration error with the largest number of bins whose accuracies do not decrease.

    To compare models without choosing a number of bins: few bins hide errors, many bins measure noise. A
    more confident prediction should be right at least as often, so the bins are made finer until that fails.
    `expected_calibration_error` keeps the number of bins fixed, `smooth_calibration_error` has none.

    $$M^* = \max \{ M : A_1 \le A_2 \le \ldots \le A_{M'} \text{ for all } M' \le M \}$$

    Args:
        binning: "equal_mass", the sorted examples cut into parts of equal counts; or "uniform", equal-width
            bins (lower, upper], of which empty ones are passed over.
        norm: "l1"; or "l2", the root of the weighted squared gaps.

    Returns:
        A fraction in [0, 1].

    Notes:
        The search starts with two bins, stops at N - 1, and falls back to one bin. The authors' code takes
        the l2 norm unless told otherwise; l1 here, as in the other calibration errors. Where a cut of
        "equal_mass" falls among equal confidences, the value depends on the order of the examples.

    References:
        Roelofs et al. 2022, "Mitigating bias in calibration error estimation", algorithm 1.

    >>> probs = [[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]]
    >>> round(ece_sweep(probs, [0, 0, 1, 1]), 6)
    0.15
    """
    check_choice("binning", binning, ("equal_mass", "uniform"))
    check_choice("norm", norm, ("l1", "l2"))
    top = top_label(*check_probs_and_any_labels(probs, labels))
    return sweep_error(top, binning=binning, norm=norm)


def sweep_error(top: TopLabel, *, binning: SweepBinning = "equal_mass", norm: SweepNorm = "l1") -> float:
    """The ECE_sweep of rows whose top label is known."""
    order = np.argsort(top.confidence, kind="stable")
    confidences, correct = top.part(order)
    n_bins = _finest_monotone(confidences, correct, binning)
    bounds = _bounds(confidences, n_bins, binning, 0, len(confidences) - 1)
    counts = np.diff(bounds)
    gaps = np.abs(np.add.reduceat(confidences - correct, bounds[:-1])) / counts
    if norm == "l2":
        return float(np.sqrt(np.sum(counts * gaps**2) / len(confidences)))
    return float(np.sum(counts * gaps) / len(confidences))


def _finest_monotone(confidences: FloatArray, correct: FloatArray, binning: SweepBinning) -> int:
    """The number of bins that the sweep over the sorted examples (N,) ends at."""
    n_examples = len(confidences)
    if (np.diff(correct) >= 0).all():  # whatever the bins, their means do not decrease either
        return max(n_examples - 1, 1)
    # A bin before the first or behind the last of these is all wrong or all right: it breaks no order.
    first = int(np.argmax(correct > correct.min()))
    last = n_examples - 1 - int(np.argmax(correct[::-1] < correct.max()))
    running = np.concatenate([[0.0], np.cumsum(correct)])
    for n_bins in range(2, n_examples):
        bounds = _bounds(confidences, n_bins, binning, first, last)
        accuracy = np.diff(running[bounds]) / np.diff(bounds)
        if (np.diff(accuracy) < -_ROUNDING).any():
            return n_bins - 1
    return max(n_examples - 1, 1)


def _bounds(confidences: FloatArray, n_bins: int, binning: SweepBinning, first: int, last: int) -> IntArray:
    """Where the bins from that of example `first` to that of `last` start and end; without empty bins."""
    n_examples = len(confidences)
    if binning == "equal_mass":  # example i is in bin floor(i M / N)
        bins = np.arange(first * n_bins // n_examples, last * n_bins // n_examples + 2)
        return -(-bins * n_examples // n_bins)
    edges = uniform_edges(n_bins)
    edges[0], edges[-1] = -np.inf, np.inf
    lowest, highest = uniform_bins(confidences[[first, last]], n_bins)
    return np.unique(np.searchsorted(confidences, edges[lowest : highest + 2], side="right"))
