"""The ECE by sweep of AdaFocal's tables 5 and 6."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

# Different means of fewer than a million 0/1 labels differ by more.
_ROUNDING = 1e-12


def ece_sweep(
    probs: ArrayLike, labels: ArrayLike, *, norm: Literal["l1", "l2"] = "l1"
) -> float:
    r"""Expected calibration error with the largest number of equal-mass bins whose accuracies do not decrease.

    Few bins hide errors and many bins measure noise. The number of bins grows until a more
    confident bin has a lower accuracy. The value depends on the order of equal confidences at a
    cut.

    $$M^* = \max \{ M < N : A_1 \le A_2 \le \ldots \le A_{M'} \text{ for all } M' \le M \}$$

    Args:
        probs: (N, C) float, rows that sum to 1.
        labels: (N,) int in [0, C).
        norm: "l1" or "l2". "l2" is the root of the weighted squared gaps, the authors' default.

    References:
        Roelofs et al. 2022, "Mitigating bias in calibration error estimation".

    >>> probs = [[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]]
    >>> round(ece_sweep(probs, [0, 0, 1, 1]), 6)
    0.15
    """
    rows = np.asarray(probs, dtype=np.float64)
    correct = rows.argmax(axis=1) == np.asarray(labels)
    return sweep_error(rows.max(axis=1), correct.astype(np.float64), norm=norm)


def sweep_error(
    confidences: NDArray[np.float64],
    correct: NDArray[np.float64],
    *,
    norm: Literal["l1", "l2"] = "l1",
) -> float:
    """`ece_sweep` of confidences (N,) and correctness (N,), 0 or 1."""
    order = np.argsort(confidences, kind="stable")
    confidences = confidences[order]
    correct = correct[order]
    starts = _largest_monotone_bins(correct)
    sizes = np.diff(starts, append=len(correct))
    gaps = np.abs(np.add.reduceat(confidences - correct, starts)) / sizes
    power = {"l1": 1, "l2": 2}[norm]
    mean = np.sum(sizes * gaps**power) / len(correct)
    return float(mean ** (1 / power))


def _largest_monotone_bins(correct: NDArray[np.float64]) -> NDArray[np.intp]:
    """The first row of each bin, for rows in the order of their confidences."""
    n_rows = len(correct)
    running = np.append(0.0, np.cumsum(correct))
    n_bins = 1
    if (np.diff(correct) >= 0).all():
        # If the outcomes are in order, so are the means of any bins.
        n_bins = max(n_rows - 1, 1)
    for finer in range(n_bins + 1, n_rows):
        bounds = np.append(_starts(finer, n_rows), n_rows)
        accuracies = np.diff(running[bounds]) / np.diff(bounds)
        if (np.diff(accuracies) < -_ROUNDING).any():
            break
        n_bins = finer
    return _starts(n_bins, n_rows)


def _starts(n_bins: int, n_rows: int) -> NDArray[np.intp]:
    """The first row of each of M bins, where row i of N is in bin floor(i M / N)."""
    upwards = np.arange(n_bins) * n_rows + n_bins - 1
    return upwards // n_bins
