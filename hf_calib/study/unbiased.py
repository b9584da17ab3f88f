"""The calibration error without what noise adds to it, for differences of models."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hf_calib.metrics import sums
from hf_calib.metrics.checks import FloatArray, IntArray
from hf_calib.metrics.intervals import Populations
from hf_calib.metrics.sums import Binning, BinSums, TopLabel

_STEPS, _NARROWEST = 100, 1e-3  # of the gaps on either side of those of the data


class UnbiasedError(NamedTuple):
    """An error and its resamples (R,); below 0 where rows are nearer to their confidences than calibrated ones."""

    value: float
    draws: FloatArray


def unbiased_error(
    top: TopLabel,
    *,
    n_bins: int,
    binning: Binning = "uniform",
    n_resamples: int,
    seed: int,
    groups: IntArray | None = None,
) -> UnbiasedError:
    r"""The error of the population whose samples have on average this plain ECE: for differences of models.

    Noise makes an average of absolute gaps larger, the more so the smaller they are. Of the `Populations` this takes
    the one with $\sum_m |B_m|/N\, E|\mathcal N(g_m(\lambda), s_m^2(\lambda))|$ equal to the plain error. One below that
    of a calibrated population gives their difference: an estimate that stopped at 0 would be too large on average.
    A resample moves the gaps of that population as it moves those of the data.
    """
    n_rows = len(top.confidence)
    add = sums.binned_rows(top, n_bins, binning)
    found = Populations(BinSums(*add(None)))
    blocks = sums.draw_counts(n_rows, n_resamples, np.random.default_rng(seed), groups)
    resamples = np.stack([add(counts) for block in blocks for counts in block], axis=1)
    counts, confidence, correct = resamples[..., found.occupied]
    noise = np.where(counts > 0, (confidence - correct) / np.maximum(counts, 1) - found.gaps, 0)
    # The plain errors that samples of a line of populations have on average.
    growth = np.geomspace(_NARROWEST, -found.least, _STEPS)
    shrinkages = np.concatenate([found.most * np.linspace(1, 0, _STEPS), -growth])
    accuracies = found.accuracies(shrinkages)
    variances = accuracies * (1 - accuracies) / found.counts
    if groups is not None:
        variances *= _design_effect(top, sums.assign_bins(top.confidence, n_bins, binning), n_bins, groups)
    sizes = sums.mean_size(found.stated - accuracies, np.sqrt(variances))
    plain, errors = np.maximum.accumulate(sizes @ found.shares), found.errors(shrinkages)

    def estimate(of: FloatArray) -> FloatArray:
        return np.where(of < plain[0], of - plain[0], np.interp(of, plain, errors))

    nearest = float(np.interp(found.value, plain, shrinkages))
    gaps = found.stated - found.accuracies(nearest) + noise
    shares = counts / counts.sum(axis=1, keepdims=True)
    draws = estimate((shares * np.abs(gaps)).sum(axis=1))
    return UnbiasedError(float(estimate(np.array(found.value))), draws)


def _design_effect(top: TopLabel, bins: IntArray, n_bins: int, groups: IntArray) -> float:
    """How many times as large the variance of the gaps is as that of independent rows."""
    kept = bins < n_bins  # quantile bins leave out the row of the smallest confidence
    apart, bins, groups = (top.confidence - top.correct)[kept], bins[kept], groups[kept]
    apart = apart - (np.bincount(bins, apart) / np.maximum(np.bincount(bins), 1))[bins]
    _, members = np.unique(bins * (groups.max() + 1) + groups, return_inverse=True)
    together = np.bincount(members, apart)
    independent = float(apart @ apart)
    return float(together @ together) / independent if independent > 0 else 1.0
