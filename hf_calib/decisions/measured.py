"""Results of a rule on rows that it was not fitted on, with intervals."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betaincinv

from hf_calib.metrics.checks import FloatArray, row_chunks
from hf_calib.metrics.sums import Interval, interval_of

Results = dict[str, Interval]
# What `measure` of the rules may return, and how tables name it.
TITLES = {
    "answered": "Inputs answered",
    "accuracy": "Accuracy of the answers",
    "cost": "Mean cost of the decisions",
    "cost_argmax": "Mean cost of the most probable class",
    "saving": "Saving per input",
    "coverage": "Sets that hold the true class",
    "size": "Classes per set",
}


class PromiseCurve(NamedTuple):
    """Of each promised accuracy: the share answered, and the accuracy of the answers, None where there are none."""

    promised: tuple[float, ...]
    answered: tuple[float, ...]
    kept: tuple[Interval | None, ...]


def share(flags: NDArray[np.bool_], confidence_level: float = 0.95) -> Interval:
    """How many of N are true, with the exact interval of Clopper and Pearson."""
    n, k = len(flags), int(np.count_nonzero(flags))
    tail = (1 - confidence_level) / 2
    low = betaincinv(k, n - k + 1, tail) if k else 0.0
    high = betaincinv(k + 1, n - k, 1 - tail) if k < n else 1.0
    return Interval(k / n, float(low), float(high))


def mean(values: ArrayLike, confidence_level: float = 0.95, seed: int = 0) -> Interval:
    """A mean with its percentile bootstrap interval, of 1,000 resamples."""
    sample: FloatArray = np.asarray(values, dtype=np.float64)
    n, rng = len(sample), np.random.default_rng(seed)
    parts = row_chunks(1000, n, elements=2**20)
    means = [sample[rng.integers(0, n, (part.stop - part.start, n))].mean(axis=1) for part in parts]
    return interval_of(float(sample.mean()), np.concatenate(means), confidence_level)


def answers(decided: NDArray[np.int64], labels: NDArray[np.int64]) -> Results:
    """The share of inputs answered, and the accuracy of the answers unless there are none."""
    answered = decided >= 0
    found = {"answered": share(answered)}
    if answered.any():
        found["accuracy"] = share(decided[answered] == labels[answered])
    return found
