"""Smooth calibration errors: a kernel instead of bins, its reliability curve, and a supremum over witnesses."""

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
_BANDWIDTH_STEPS = 1024  # Bandwidths are multiples of 1/1024.
_CELLS = 2000  # The least number of cells in twice the unit interval.
_POINTS = 200  # The least number of points at which the error is summed.
_EMPTY = 1e-4  # Examples that are added everywhere, so that an empty range is not 0/0.
_SMALLEST_BANDWIDTH = (
    1e-4  # A grid has ten cells per bandwidth; below this it is larger than the data.
)
_NEGLIGIBLE = 1e-10  # A smaller fraction of the largest density is rounding of the FFT.
_CHUNK = (
    2**15
)  # Temporaries of this many examples stay in cache, which is 3 times as fast.

Spread = Callable[[int], FloatArray]


class SmoothReliability(NamedTuple):
    """Accuracy (NaN if no example is near) and density of the confidences at equidistant points of [0, 1]."""

    grid: FloatArray
    accuracy: FloatArray
    density: FloatArray
    bandwidth: float


def smooth_calibration_error(
    probs: ArrayLike, labels: ArrayLike, *, bandwidth: float | None = None
) -> float:
    r"""Smooth calibration error (smECE) of the top label.

    It has no bins, so unlike `expected_calibration_error` it does not depend on edges. It needs O(N) time.

    $$\mathrm{smECE}_\sigma = \int_0^1 |\hat r_\sigma(t)| \, \mathrm{d}t, \qquad
    \hat r_\sigma(t) = \frac{1}{N} \sum_i K_\sigma(t, c_i) (c_i - a_i)$$

    where $c_i$ is the confidence, $a_i$ the correctness (0 or 1), and $K_\sigma$ a Gaussian reflected at 0 and 1.

    Args:
        bandwidth: the kernel's width in [0.0001, 1]; None finds the fixed point $\sigma = \mathrm{smECE}_\sigma$.

    References:
        Blasiok and Nakkiran 2023, Smooth ECE: principled reliability diagrams via kernel smoothing. As in relplot, the
        fixed point is a multiple of 1/1024, rounded up and at least 2/1024; the kernel is cut off at a distance of 1/2;
        and a confidence of exactly 0 or 1 counts half, as it is its own mirror image (one within 1/1000 of them between
        half and once). The integral above is .265 for .278, and .334 for .366, where a fifth and a half of the
        confidences are above .999.

    >>> probs = [[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]]
    >>> round(smooth_calibration_error(probs, [0, 1, 1]), 4)
    0.142
    """
    return smooth_error(
        top_label(*check_probs_and_any_labels(probs, labels)), bandwidth=bandwidth
    )


def smooth_error(top: TopLabel, *, bandwidth: float | None = None) -> float:
    """The smECE of rows with a known top label."""
    if bandwidth is not None:
        way_out = "bandwidth=None chooses one"
        check_real("bandwidth", bandwidth, way_out)
        requirement = f"bandwidth to lie in [{_SMALLEST_BANDWIDTH}, 1]"
        fits = _SMALLEST_BANDWIDTH <= bandwidth <= 1
        check(fits, requirement, bandwidth, way_out)
    spread = _spread(top.confidence, top.confidence - top.correct)
    return _error(spread, _fixed_point(spread) if bandwidth is None else bandwidth)


def smooth_reliability(
    confidences: FloatArray,
    correct: FloatArray,
    *,
    bandwidth: float | None = None,
    grid_size: int = 200,
) -> SmoothReliability:
    """The kernel regression of correctness on confidence, by default at the bandwidth of the error."""
    if bandwidth is None:
        bandwidth = _fixed_point(_spread(confidences, confidences - correct))
    rows = _spread(confidences, correct)(
        _grid_size(bandwidth) | 1
    )  # An odd size has a centre.
    rows[:, [0, -1]] *= 2  # An end point is its own mirror image, so it counts twice.
    mass, hits = _smooth(rows, bandwidth).clip(0)
    near = mass > _NEGLIGIBLE * mass.max()
    accuracy = np.where(near, hits, np.nan) / np.where(near, mass, 1)
    density = mass / ((mass[1:] + mass[:-1]) / 2).mean()
    grid = np.linspace(0, 1, grid_size)
    return SmoothReliability(
        grid, _at(grid, accuracy.clip(0, 1)), _at(grid, density), float(bandwidth)
    )


def _spread(confidences: FloatArray, values: FloatArray) -> Spread:
    """Numbers and sums of values (2, G) at G equidistant points of [0, 1]; the two nearest share an example."""

    @cache
    def rows(size: int) -> FloatArray:
        found = np.zeros((2, size))
        for part in row_chunks(len(confidences), elements=_CHUNK):
            share = confidences[part] * (size - 1)
            cell = np.minimum(share.astype(np.intp), size - 2)
            share -= cell
            for row, weights in zip(found, (None, values[part]), strict=True):
                above = np.bincount(
                    cell,
                    share if weights is None else share * weights,
                    minlength=size - 1,
                )
                row[:-1] += np.bincount(cell, weights, minlength=size - 1) - above
                row[1:] += above
        return found

    return rows


def _error(spread: Spread, bandwidth: float) -> float:
    """The smECE at one bandwidth."""
    points = np.linspace(0, 1, max(round(10 / bandwidth), _POINTS))
    mass, residual = (
        _at(points, row) for row in _smooth(spread(_grid_size(bandwidth)), bandwidth)
    )
    return float(np.abs(residual).sum() / (mass + _EMPTY).sum())


def _fixed_point(spread: Spread) -> float:
    """The smallest multiple of 1/1024 that, as a bandwidth, is not below its error."""
    widths = np.arange(_BANDWIDTH_STEPS) / _BANDWIDTH_STEPS
    step = bisect_left(
        widths,
        True,
        key=lambda width: width > widths[1] and width >= _error(spread, width),
    )
    return step / _BANDWIDTH_STEPS


def _grid_size(bandwidth: float) -> int:
    """The number of points G: ten per bandwidth, and at least 1001."""
    return max(_CELLS, round(20 / bandwidth)) // 2 + 1


def _smooth(rows: FloatArray, bandwidth: float) -> FloatArray:
    """Convolve rows (..., G) with a Gaussian, mirrored at both ends, cut off at half the interval."""
    # A row and its mirror image are one period, so the wrap-around of the FFT is the mirror. For an even G the middle
    # of the kernel is between two points, as in the authors' code.
    size = rows.shape[-1]
    offsets = np.linspace(-0.5, 0.5, size)
    kernel = np.exp(-0.5 * (offsets / bandwidth) ** 2) / (
        np.sqrt(2 * np.pi) * bandwidth
    )
    period = 2 * (size - 1)
    centred = np.roll(np.pad(kernel, (0, period - size)), -(size // 2))
    mirrored = np.concatenate([rows, rows[..., -2:0:-1]], axis=-1)
    return irfft(rfft(mirrored) * rfft(centred), n=period)[..., :size]


def _at(points: FloatArray, row: FloatArray) -> FloatArray:
    """Interpolate a row (G,) over [0, 1] at other points of it."""
    return np.interp(points, np.linspace(0, 1, len(row)), row)


def smooth_calibration_error_dual(probs: ArrayLike, labels: ArrayLike) -> float:
    r"""Smooth calibration error (smCE) of the top label, by its definition as a supremum.

    It is between half of and the whole distance to calibration. The papers' tables have its estimate by a kernel,
    `smooth_calibration_error`. The value is exact up to rounding, in O(N log N) time.

    $$\mathrm{smCE} = \sup_\eta \frac{1}{N} \sum_i \eta(c_i) \, (a_i - c_i)$$

    where $c_i$ is the confidence, $a_i$ the correctness, and $\eta$ any 1-Lipschitz function from [0, 1] to [-1, 1].

    References:
        Blasiok et al. 2023, A unifying theory of distance from calibration; Focal calibration loss, Definition 2.2.

    >>> probs = [[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]]
    >>> round(smooth_calibration_error_dual(probs, [0, 1, 1]), 4)
    0.1467
    """
    return smooth_error_dual(top_label(*check_probs_and_any_labels(probs, labels)))


def smooth_error_dual(top: TopLabel) -> float:
    """The smCE of rows with a known top label."""
    # A function that is 1-Lipschitz between neighbours is so between all pairs. So the supremum is a linear program
    # over the N values of the witness: |w_{i+1} - w_i| <= d_i = c_{i+1} - c_i and |w_i| <= 1. With S_i the sum of
    # the first i residuals, its dual is
    #     min  sum_i d_i |S_i - P_i|  +  sum_i |p_i|,    P_i = p_1 + ... + p_i,    P_N = S_N:
    # each residual is cancelled in place at a cost of 1, or moved along the line at a cost of d.
    # No two p differ in sign: to cancel both costs 2, to move one to the other costs at most 1, the
    # length of [0, 1]. Hence their costs add up to |S_N|, P rises from 0 to S_N (or falls, which the sign below
    # handles), and the rest is the monotone fit to S with weights d, whose bounds merely clip the unbounded
    # fit. Tied confidences have d = 0, so their order does not matter.
    order = np.argsort(top.confidence)
    distances = np.diff(top.confidence[order])
    running = np.cumsum((top.correct - top.confidence)[order]) / len(order)
    surplus = abs(running[-1])
    sums = running[:-1][distances > 0] * (1 if running[-1] >= 0 else -1)
    distances = distances[distances > 0]
    fitted = _monotone_fit(sums, distances).clip(0, surplus)
    return float(surplus + distances @ np.abs(sums - fitted))


def _monotone_fit(values: FloatArray, weights: FloatArray) -> FloatArray:
    """The non-decreasing sequence (N,) with the least weighted sum of absolute differences to the values (N,)."""
    # The least sum over the fits so far whose last value is at most x is convex in x, and constant from some x on:
    # `heap` contains the points where its slope changes, largest first, and the changes. A new value adds its own
    # slopes, -weight and +weight, and the rising part is cut off.
    heap: list[tuple[float, float]] = []
    best_last = np.empty_like(values)
    for i, (value, weight) in enumerate(
        zip(values.tolist(), weights.tolist(), strict=True)
    ):
        heappush(heap, (-value, 2 * weight))
        excess = weight
        while heap[0][1] <= excess:
            excess -= heappop(heap)[1]
        heapreplace(heap, (heap[0][0], heap[0][1] - excess))
        best_last[i] = -heap[0][0]
    # Backwards from the last value, each is the best that does not exceed the next.
    return np.minimum.accumulate(best_last[::-1])[::-1]
