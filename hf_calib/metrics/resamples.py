"""Resamples with replacement, told by how often each drew each row, and intervals of what was measured on them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hf_calib.metrics.checks import FloatArray, row_chunks

SAME = 1e-12  # values this near to each other differ by rounding only
_BLOCK_ELEMENTS = 2**20  # drawn at a time: a block of resamples stays in cache or near it


class Interval(NamedTuple):
    """A value and the ends of its confidence interval, which need not hold it; without any, both are None."""

    value: float
    low: Any = None
    high: Any = None


def interval_of(value: float, draws: FloatArray, confidence_level: float) -> Interval:
    """The percentile interval of resampled values (B,); where all are equal, they are the value."""
    if np.abs(draws - value).max() <= SAME:
        return Interval(value, value, value)
    low, high = np.quantile(draws, [(1 - confidence_level) / 2, (1 + confidence_level) / 2])
    return Interval(value, float(low), float(high))


def draw_counts(n_examples: int, n_resamples: int, rng: np.random.Generator) -> Iterator[NDArray[Any]]:
    """How often each resample drew each row, (R, N) for blocks of R resamples."""
    for part in row_chunks(n_resamples, n_examples, elements=_BLOCK_ELEMENTS):
        drawn = rng.integers(0, n_examples, (part.stop - part.start, n_examples))
        yield np.stack([np.bincount(rows, minlength=n_examples) for rows in drawn], dtype=np.float64)
