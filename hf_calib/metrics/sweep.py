"""ECE_sweep: as many bins as the data support, instead of a number that somebody chose."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from hf_calib.metrics.checks import check_choice, check_probs_and_any_labels
from hf_calib.metrics.sums import TopLabel, top_label

SweepNorm = Literal["l1", "l2"]
_ROUNDING = 1e-12  # means of fewer than a million 0/1 labels that differ at all differ by more


def ece_sweep(probs: ArrayLike, labels: ArrayLike, *, norm: SweepNorm = "l1") -> float:
    r"""Expected calibration error with the largest number of equal-mass bins whose accuracies do not decrease.

    Few bins hide errors, many measure noise: bins are made finer until a more confident one is right less often
    (Roelofs et al. 2022). The value depends on the order of equal confidences at a cut.

    $$M^* = \max \{ M < N : A_1 \le A_2 \le \ldots \le A_{M'} \text{ for all } M' \le M \}$$

    Args:
        norm: "l1"; or "l2", the root of the weighted squared gaps, which is the authors' default.

    >>> probs = [[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]]
    >>> round(ece_sweep(probs, [0, 0, 1, 1]), 6)
    0.15
    """
    check_choice("norm", norm, ("l1", "l2"))
    return sweep_error(top_label(*check_probs_and_any_labels(probs, labels)), norm=norm)


def sweep_error(top: TopLabel, *, norm: SweepNorm = "l1") -> float:
    """The same of rows whose top label is known."""
    confidences, correct = top.part(np.argsort(top.confidence, kind="stable"))
    n_examples, running = len(correct), np.append(0.0, np.cumsum(correct))
    # Whatever the bins of outcomes in order, their means are in order too.
    n_bins = max(n_examples - 1, 1) if (np.diff(correct) >= 0).all() else 1
    bounds = -(-np.arange(n_bins + 1) * n_examples // n_bins)  # example i is in bin floor(i M / N)
    for finer in range(n_bins + 1, n_examples):
        candidate = -(-np.arange(finer + 1) * n_examples // finer)
        accuracy = np.diff(running[candidate]) / np.diff(candidate)
        if (np.diff(accuracy) < -_ROUNDING).any():
            break
        bounds = candidate
    counts = np.diff(bounds)
    gaps = np.abs(np.add.reduceat(confidences - correct, bounds[:-1])) / counts
    power = 1 if norm == "l1" else 2
    return float((np.sum(counts * gaps**power) / n_examples) ** (1 / power))
