"""Metrics of labels that are drawn from the probabilities themselves, as `consistency_test` asks for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_calib.metrics.checks import FloatArray, IntArray
from hf_calib.metrics.sums import (
    BinnedRows,
    Binning,
    Norm,
    as_bin_sums,
    assign_bins,
    binned_error,
    uniform_bins,
)

Simulation = Callable[[np.random.Generator], float]


def top_label_simulation(
    confidences: FloatArray,
    *,
    n_bins: int = 15,
    binning: Binning = "uniform",
    norm: Norm = "l1",
    debias: bool = False,
) -> Simulation:
    """Confidences stay, so their bins and sums do; only the number of right ones in each bin is drawn."""
    bins = assign_bins(confidences, n_bins, binning)
    order = np.argsort(bins, kind="stable")
    # Correctness (N + 1,) in the order of the bins; the last one, never right, ends the last bin.
    chances = np.append(confidences[order], 0.0)
    cuts = np.searchsorted(bins[order], np.arange(n_bins + 1))
    empty = cuts[:-1] == cuts[1:]  # of which reduceat would give the first row of the next
    stated = as_bin_sums(
        np.ones(len(bins)) @ BinnedRows(bins, n_bins, None, confidences, np.zeros(len(bins)))
    )

    def simulate(rng: np.random.Generator) -> float:
        right = rng.random(len(chances)) < chances
        hits = np.where(empty, 0.0, np.add.reduceat(right, cuts, dtype=np.int64)[:-1])
        sums = stated._replace(correct=hits)
        return float(binned_error(sums, len(confidences), norm, debias=debias))

    return simulate


def classwise_simulation(probs: NDArray[Any], *, n_bins: int = 15) -> Simulation:
    """Only the hits of each class's bins are drawn."""
    n_examples, n_classes = probs.shape
    size = n_classes * n_bins
    slots = uniform_bins(probs, n_bins).astype(np.int32)
    slots += np.arange(n_classes, dtype=np.int32) * n_bins
    stated = np.bincount(slots.ravel(), probs.ravel(), minlength=size)
    rows = np.arange(n_examples)
    draw = label_sampler(probs)

    def simulate(rng: np.random.Generator) -> float:
        hits = np.bincount(slots[rows, draw(rng)], minlength=size)
        return float(np.abs(stated - hits).sum() / (n_examples * n_classes))

    return simulate


def label_sampler(probs: NDArray[Any]) -> Callable[[np.random.Generator], IntArray]:
    """Draw one class per row of probs (N, C): halve the cumulated row log C times."""
    n_examples, n_classes = probs.shape
    cumulated = probs.astype(np.float64).clip(min=0).cumsum(axis=1)
    cumulated /= cumulated[:, -1:]
    first = np.arange(n_examples) * n_classes
    flat = cumulated.ravel()
    steps = [2**k for k in reversed(range((n_classes - 1).bit_length()))]

    def draw(rng: np.random.Generator) -> IntArray:
        points = rng.random(n_examples)
        classes = np.zeros(n_examples, dtype=np.intp)
        for step in steps:
            ahead = np.minimum(classes + step, n_classes)
            # Everything up to class `ahead - 1` lies at or below the point: the class is not among them.
            classes = np.where(flat[first + ahead - 1] <= points, ahead, classes)
        return classes

    return draw
