"""Smooth calibration errors: a kernel instead of bins, and a supremum over witnesses."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import cache
from heapq import heappop, heappush, heapreplace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.fft import irfft, rfft

from hf_calib._errors import check
from hf_calib.metrics.checks import (
    FloatArray,
    check_probs_and_any_labels,
    check_real,
    row_chunks,
)
from hf_calib.metrics.sums import TopLabel, top_label

# The first four constants are relplot's and determine the value to the last digit.
# Bandwidths are multiples of 1/1024.
_BANDWIDTH_STEPS = 1024
# The least number of cells in twice the unit interval.
_CELLS = 2000
# The least number of points at which the error is summed.
_POINTS = 200
# Examples that are added everywhere, so that an empty range is not 0/0.
_EMPTY = 1e-4
# A grid has ten cells per bandwidth; below this it is larger than the data.
_SMALLEST_BANDWIDTH = 1e-4
# A smaller fraction of the largest density is rounding of the FFT.
_NEGLIGIBLE = 1e-10
# Temporaries of this many examples stay in cache, which is 3 times as fast.
_CHUNK = 2**15

Spread = Callable[[int], FloatArray]


class SmoothReliability(NamedTuple):
    """Accuracy, or NaN if no example is near, and density at equidistant points of [0, 1]."""

    grid: FloatArray
    accuracy: FloatArray
    density: FloatArray
    bandwidth: float


def smooth_calibration_error(
    probs: ArrayLike, labels: ArrayLike, *, bandwidth: float | None = None
) -> float:
    r"""Smooth calibration error (smECE) of the top label.

    It has no bins, so unlike `expected_calibration_error` it does not depend on edges. It needs
    O(N) time.

    $$\mathrm{smECE}_\sigma = \int_0^1 |\hat r_\sigma(t)| \, \mathrm{d}t, \qquad
    \hat r_\sigma(t) = \frac{1}{N} \sum_i K_\sigma(t, c_i) (c_i - a_i)$$

    where $c_i$ is the confidence, $a_i$ the correctness (0 or 1), and $K_\sigma$ a Gaussian
    reflected at 0 and 1.

    Args:
        bandwidth: the kernel's width in [0.0001, 1]; None finds the fixed point $\sigma =
            \mathrm{smECE}_\sigma$.

    References:
        Blasiok and Nakkiran 2023, Smooth ECE: principled reliability diagrams via kernel smoothing.
        As in relplot, the fixed point is a multiple of 1/1024, rounded up and at least 2/1024; the
        kernel is cut off at a distance of 1/2; and a confidence of exactly 0 or 1 counts half, as
        it is its own mirror image (one within 1/1000 of them between half and once). The integral
        above is .265 for .278, and .334 for .366, where a fifth and a half of the confidences are
        above .999.

    >>> probs = [[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]]
    >>> round(smooth_calibration_error(probs, [0, 1, 1]), 4)
    0.142
    """
    top = top_label(*check_probs_and_any_labels(probs, labels))
    return smooth_error(top, bandwidth=bandwidth)


def smooth_error(top: TopLabel, *, bandwidth: float | None = None) -> float:
    """The smECE of rows with a known top label."""
    spread = _spread(top.confidence, top.confidence - top.correct)
    if bandwidth is None:
        return _error(spread, _fixed_point(spread))
    way_out = "bandwidth=None chooses one"
    check_real("bandwidth", bandwidth, way_out)
    requirement = f"bandwidth to lie in [{_SMALLEST_BANDWIDTH}, 1]"
    fits = _SMALLEST_BANDWIDTH <= bandwidth <= 1
    check(fits, requirement, bandwidth, way_out)
    return _error(spread, bandwidth)


def smooth_reliability(
    confidences: FloatArray,
    correct: FloatArray,
    *,
    bandwidth: float | None = None,
    grid_size: int = 200,
) -> SmoothReliability:
    """The kernel regression of correctness on confidence, if None at the error's bandwidth."""
    if bandwidth is None:
        bandwidth = _fixed_point(_spread(confidences, confidences - correct))
    size = _grid_size(bandwidth)
    if size % 2 == 0:
        # An odd size has a centre.
        size += 1
    rows = _spread(confidences, correct)(size)
    # An end point is its own mirror image, so it counts twice.
    rows[:, [0, -1]] *= 2
    mass, hits = _smooth(rows, bandwidth).clip(0)
    near = mass > _NEGLIGIBLE * mass.max()
    accuracy = np.where(near, hits, np.nan) / np.where(near, mass, 1)
    density = mass / ((mass[1:] + mass[:-1]) / 2).mean()
    grid = np.linspace(0, 1, grid_size)
    accuracy_there = _at(grid, accuracy.clip(0, 1))
    return SmoothReliability(grid, accuracy_there, _at(grid, density), float(bandwidth))


def _spread(confidences: FloatArray, values: FloatArray) -> Spread:
    """Numbers and sums of values (2, G) at points of [0, 1], of which two share an example."""

    @cache
    def rows(size: int) -> FloatArray:
        counts = np.zeros(size)
        sums = np.zeros(size)
        n_cells = size - 1
        for part in row_chunks(len(confidences), elements=_CHUNK):
            place = confidences[part] * n_cells
            cell = np.minimum(place.astype(np.intp), n_cells - 1)
            share = place - cell
            own = values[part]
            above = np.bincount(cell, share, minlength=n_cells)
            counts[:-1] += np.bincount(cell, minlength=n_cells) - above
            counts[1:] += above
            above = np.bincount(cell, share * own, minlength=n_cells)
            sums[:-1] += np.bincount(cell, own, minlength=n_cells) - above
            sums[1:] += above
        return np.stack([counts, sums])

    return rows


def _error(spread: Spread, bandwidth: float) -> float:
    """The smECE at one bandwidth."""
    points = np.linspace(0, 1, max(round(10 / bandwidth), _POINTS))
    mass, residual = _smooth(spread(_grid_size(bandwidth)), bandwidth)
    total = (_at(points, mass) + _EMPTY).sum()
    return float(np.abs(_at(points, residual)).sum() / total)


def _fixed_point(spread: Spread) -> float:
    """The smallest multiple of 1/1024 that, as a bandwidth, is not below its error."""

    def is_enough(step: int) -> bool:
        width = step / _BANDWIDTH_STEPS
        return step > 1 and width >= _error(spread, width)

    return bisect_left(range(_BANDWIDTH_STEPS), True, key=is_enough) / _BANDWIDTH_STEPS


def _grid_size(bandwidth: float) -> int:
    """The number of points G: ten per bandwidth, and at least 1001."""
    return max(_CELLS, round(20 / bandwidth)) // 2 + 1


def _smooth(rows: FloatArray, bandwidth: float) -> FloatArray:
    """Convolve rows (..., G) with a Gaussian, mirrored at both ends and cut off at 1/2."""
    # A row and its mirror image are one period, so the wrap-around of the FFT is the mirror. For an
    # even G the middle of the kernel is between two points, as in the authors' code.
    size = rows.shape[-1]
    offsets = np.linspace(-0.5, 0.5, size)
    height = np.sqrt(2 * np.pi) * bandwidth
    kernel = np.exp(-0.5 * (offsets / bandwidth) ** 2) / height
    period = 2 * (size - 1)
    centred = np.roll(np.pad(kernel, (0, period - size)), -(size // 2))
    mirrored = np.concatenate([rows, rows[..., -2:0:-1]], axis=-1)
    return irfft(rfft(mirrored) * rfft(centred), n=period)[..., :size]


def _at(points: FloatArray, row: FloatArray) -> FloatArray:
    """Interpolate a row (G,) over [0, 1] at other points of it."""
    return np.interp(points, np.linspace(0, 1, len(row)), row)


def smooth_calibration_error_dual(probs: ArrayLike, labels: ArrayLike) -> float:
    r"""Smooth calibration error (smCE) of the top label, by its definition as a supremum.

    It is between half of and the whole distance to calibration. The papers' tables have its
    estimate by a kernel, `smooth_calibration_error`. The value is exact up to rounding, in O(N log
    N) time.

    $$\mathrm{smCE} = \sup_\eta \frac{1}{N} \sum_i \eta(c_i) \, (a_i - c_i)$$

    where $c_i$ is the confidence, $a_i$ the correctness, and $\eta$ any 1-Lipschitz function from
    [0, 1] to [-1, 1].

    References:
        Blasiok et al. 2023, A unifying theory of distance from calibration; Focal calibration loss,
        Definition 2.2.

    >>> probs = [[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]]
    >>> round(smooth_calibration_error_dual(probs, [0, 1, 1]), 4)
    0.1467
    """
    return smooth_error_dual(top_label(*check_probs_and_any_labels(probs, labels)))


def smooth_error_dual(top: TopLabel) -> float:
    """The smCE of rows with a known top label."""
    # A function that is 1-Lipschitz between neighbours is so between all pairs. So the supremum is
    # a linear program over the N values of the witness: |w_{i+1} - w_i| <= d_i = c_{i+1} - c_i and
    # |w_i| <= 1. With S_i the sum of the first i residuals, its dual is min  sum_i d_i |S_i - P_i|
    # +  sum_i |p_i|,    P_i = p_1 + ... + p_i,    P_N = S_N: each residual is cancelled in place at
    # a cost of 1, or moved along the line at a cost of d. No two p differ in sign: to cancel both
    # costs 2, to move one to the other costs at most 1, the length of [0, 1]. Hence their costs add
    # up to |S_N|, P rises from 0 to S_N (or falls, which the sign below handles), and the rest is
    # the monotone fit to S with weights d, whose bounds merely clip the unbounded fit. Tied
    # confidences have d = 0, so their order does not matter.
    order = np.argsort(top.confidence)
    distances = np.diff(top.confidence[order])
    running = np.cumsum((top.correct - top.confidence)[order]) / len(order)
    if running[-1] < 0:
        running = -running
    surplus = running[-1]
    differ = distances > 0
    sums = running[:-1][differ]
    distances = distances[differ]
    fitted = _monotone_fit(sums, distances).clip(0, surplus)
    return float(surplus + distances @ np.abs(sums - fitted))


def _monotone_fit(values: FloatArray, weights: FloatArray) -> FloatArray:
    """The non-decreasing sequence (N,) with the least weighted sum of distances to values (N,)."""
    # The least sum over the fits so far whose last value is at most x is convex in x, and constant
    # from some x on: `heap` contains the points where its slope changes, largest first, and the
    # changes. A new value adds its own slopes, -weight and +weight, and the rising part is cut off.
    heap: list[tuple[float, float]] = []
    best_last = np.empty_like(values)
    pairs = zip(values.tolist(), weights.tolist(), strict=True)
    for i, (value, weight) in enumerate(pairs):
        heappush(heap, (-value, 2 * weight))
        excess = weight
        while heap[0][1] <= excess:
            _, change = heappop(heap)
            excess -= change
        place, change = heap[0]
        heapreplace(heap, (place, change - excess))
        best_last[i] = -place
    # Backwards from the last value, each is the best that does not exceed the next.
    return np.minimum.accumulate(best_last[::-1])[::-1]
