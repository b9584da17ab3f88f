"""Smooth calibration errors: a kernel in place of bins, its reliability curve, and a supremum over witnesses.

Examples are spread over a grid once, in O(N); every bandwidth tried after that is a convolution on the grid, by FFT.
The supremum is a linear program on a line: dually, a monotone fit, which a heap solves in O(N log N).
"""

from __future__ import annotations

from functools import cache
from heapq import heappop, heappush, heapreplace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.fft import irfft, rfft
from scipy.integrate import trapezoid

from hf_calib._errors import check
from hf_calib.metrics.checks import FloatArray, as_floats, check_probs_and_any_labels, row_chunks
from hf_calib.metrics.sums import TopLabel, top_label

# These decide the value to the last digit, and are relplot's.
_BANDWIDTH_STEPS = 1024  # the bandwidths that are tried are multiples of 1/1024
_CELLS = 2000  # in twice the unit interval, at the least
_POINTS = 200  # at which the error is summed, at the least
_EMPTY = 1e-4  # examples that are added everywhere, so that an empty stretch is not 0/0

_SMALLEST_BANDWIDTH = 1e-4  # a grid has ten cells to a bandwidth: below this it outgrows the data
_NEGLIGIBLE = 1e-10  # of the largest density: less is the rounding of the FFT
_CHUNK = 2**15  # examples whose temporaries stay in cache


class SmoothReliability(NamedTuple):
    """A reliability diagram without bins, at equidistant points of [0, 1]."""

    grid: FloatArray
    accuracy: FloatArray  # NaN where no example is near
    density: FloatArray  # of the confidences; integrates to 1
    bandwidth: float


def smooth_calibration_error(probs: ArrayLike, labels: ArrayLike, *, bandwidth: float | None = None) -> float:
    r"""Smooth calibration error (smECE) of the top label.

    The calibration error to use where bins are a nuisance: it changes continuously with the probabilities, has no bin
    count to choose, and is a consistent measure of the distance to calibration. Unlike `expected_calibration_error`
    it cannot be moved by nudging confidences over an edge; unlike `kde_calibration_error` it takes O(N) time.

    $$\mathrm{smECE}_\sigma = \int_0^1 |\hat r_\sigma(t)| \, \mathrm{d}t, \qquad
    \hat r_\sigma(t) = \frac{1}{N} \sum_i K_\sigma(t, c_i) (c_i - a_i)$$

    with $c_i$ the confidence, $a_i$ whether it is right and $K_\sigma$ a Gaussian of width $\sigma$ reflected
    at 0 and 1. The bandwidth is by default the fixed point $\sigma = \mathrm{smECE}_\sigma$.

    Args:
        bandwidth: the kernel's width in [0.0001, 1]; None finds the fixed point.

    Returns:
        A fraction in [0, 1].

    Notes:
        Equal to relplot's smECE: the fixed point is rounded up to a multiple of 1/1024, at least 2; the kernel is cut
        off at a distance of 1/2, and the integral divided by that of the density; an example at 0 or 1 counts half.

    References:
        Blasiok and Nakkiran 2023, Smooth ECE: principled reliability diagrams via kernel smoothing.

    >>> probs = [[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]]
    >>> round(smooth_calibration_error(probs, [0, 1, 1]), 4)
    0.142
    """
    return smooth_error(top_label(*check_probs_and_any_labels(probs, labels)), bandwidth=bandwidth)


def smooth_reliability(
    confidences: ArrayLike, correct: ArrayLike, *, bandwidth: float | None = None, grid_size: int = 200
) -> SmoothReliability:
    r"""The accuracy at each confidence, smoothed by a kernel, for a reliability diagram without bins.

    The curve of `smooth_calibration_error`. For a confidence band pass the bandwidth that the first call chose to the
    calls on the resamples.

    $$\hat a(t) = \frac{\sum_i K_\sigma(t, c_i) \, a_i}{\sum_i K_\sigma(t, c_i)}$$

    Args:
        confidences: (N,) float in [0, 1].
        correct: (N,) float in [0, 1], 1 where the prediction is right.
        bandwidth: the kernel's width in [0.0001, 1]; None takes the one of the smooth calibration error.
        grid_size: at how many points of [0, 1] the curve is wanted, at least 2.

    Returns:
        `SmoothReliability`, (grid_size,) each. The accuracy is NaN where no example is within some six bandwidths.

    References:
        Blasiok and Nakkiran 2023 (the reflected Gaussian kernel); Nadaraya 1964; Watson 1964.

    >>> curve = smooth_reliability([0.6, 0.9], [0, 1], bandwidth=0.1, grid_size=5)
    >>> curve.accuracy.round(3)
    array([  nan, 0.   , 0.001, 0.502, 0.999])
    """
    stated, right = _check_columns(confidences, correct)
    check(grid_size >= 2, "grid_size to be at least 2", grid_size, "200 points look smooth")
    if bandwidth is None:
        bandwidth = _fixed_point(_Spread(stated, stated - right))
    # An odd size centres the kernel on a point.
    rows = _Spread(stated, right).rows(_grid_size(_check_bandwidth(bandwidth)) | 1)
    rows[:, [0, -1]] *= 2  # an end point is its own mirror image: here both count
    mass, hits = _smooth(rows, bandwidth).clip(0)
    near = mass > _NEGLIGIBLE * mass.max()
    accuracy = np.where(near, hits, np.nan) / np.where(near, mass, 1)
    density = mass / trapezoid(mass, dx=1 / (len(mass) - 1))
    grid = np.linspace(0, 1, grid_size)
    return SmoothReliability(grid, _at(grid, accuracy.clip(0, 1)), _at(grid, density), float(bandwidth))


def smooth_error(top: TopLabel, *, bandwidth: float | None = None) -> float:
    """The smECE of rows whose top label is known."""
    spread = _Spread(top.confidence, top.confidence - top.correct)
    return _error(spread, _fixed_point(spread) if bandwidth is None else _check_bandwidth(bandwidth))


class _Spread:
    """Examples spread over G equidistant points of [0, 1], for each G that is asked for."""

    def __init__(self, confidences: FloatArray, values: FloatArray) -> None:
        self._confidences = confidences
        self._values = values
        self.rows = cache(self._add_up)

    def _add_up(self, size: int) -> FloatArray:
        """(2, G): number and sum of values at each point; an example is shared between two by its distance to each."""
        below, above = np.zeros((2, 2, size - 1))
        for part in row_chunks(len(self._confidences), elements=_CHUNK):
            values = self._values[part]
            position = self._confidences[part] * (size - 1)
            cell = np.minimum(position.astype(np.intp), size - 2)
            position -= cell
            for row, weight in enumerate((None, values)):
                share = position if weight is None else position * weight
                upper = np.bincount(cell, share, minlength=size - 1)
                above[row] += upper
                below[row] += np.bincount(cell, weight, minlength=size - 1) - upper
        return np.pad(below, ((0, 0), (0, 1))) + np.pad(above, ((0, 0), (1, 0)))


def _error(spread: _Spread, bandwidth: float) -> float:
    """The smECE at one bandwidth."""
    points = np.linspace(0, 1, max(round(10 / bandwidth), _POINTS))
    mass, residual = (_at(points, row) for row in _smooth(spread.rows(_grid_size(bandwidth)), bandwidth))
    return float(np.abs(residual).sum() / (mass + _EMPTY).sum())


def _fixed_point(spread: _Spread) -> float:
    """The smallest bandwidth, to 1/1024, that is not below its error."""
    below, above = 0, _BANDWIDTH_STEPS
    while above - below > 1:
        middle = (below + above) // 2
        bandwidth = middle / _BANDWIDTH_STEPS
        if middle == 1 or bandwidth < _error(spread, bandwidth):
            below = middle
        else:
            above = middle
    return above / _BANDWIDTH_STEPS


def _grid_size(bandwidth: float) -> int:
    """G: ten points to a bandwidth, and no fewer than 1001."""
    return max(_CELLS, round(20 / bandwidth)) // 2 + 1


def _smooth(rows: FloatArray, bandwidth: float) -> FloatArray:
    """Convolve rows (..., G) with a Gaussian, mirrored at both ends, cut off at half the interval.

    A row and its mirror image make one period of 2(G - 1) points, so the FFT's wrap-around is the mirror.
    For an even G the kernel's middle lies between two points; values then equal those of the authors' code.
    """
    size = rows.shape[-1]
    offsets = np.linspace(-0.5, 0.5, size)
    kernel = np.exp(-0.5 * (offsets / bandwidth) ** 2) / (np.sqrt(2 * np.pi) * bandwidth)
    period = 2 * (size - 1)
    centred = np.roll(np.pad(kernel, (0, period - size)), -(size // 2))
    mirrored = np.concatenate([rows, rows[..., -2:0:-1]], axis=-1)
    return irfft(rfft(mirrored) * rfft(centred), n=period)[..., :size]


def _at(points: FloatArray, row: FloatArray) -> FloatArray:
    """Interpolate a row (G,) over [0, 1] at other points of it."""
    return np.interp(points, np.linspace(0, 1, len(row)), row)


def _check_bandwidth(bandwidth: float) -> float:
    fits = _SMALLEST_BANDWIDTH <= bandwidth <= 1
    check(fits, f"bandwidth to lie in [{_SMALLEST_BANDWIDTH}, 1]", bandwidth, "bandwidth=None chooses one")
    return float(bandwidth)


def _check_columns(confidences: ArrayLike, correct: ArrayLike) -> tuple[FloatArray, FloatArray]:
    """Return both as float64 (N,), or say what is wrong with them."""
    arrays = as_floats("confidences", confidences), as_floats("correct", correct)
    for name, values in zip(("confidences", "correct"), arrays, strict=True):
        fits = values.ndim == 1 and values.size > 0 and values.shape == arrays[0].shape
        requirement = f"{name} to be as long as the other of confidences and correct, (N,) with N > 0"
        check(fits, requirement, f"shape {values.shape}", "pass one of each an example")
        outside = ~((values >= 0) & (values <= 1))
        got = f"{values[outside.argmax()]} in row {outside.argmax()} ({outside.sum()} such rows)"
        check(not outside.any(), f"{name} to lie in [0, 1]", got, "pass probabilities")
    return arrays


# The supremum


def smooth_calibration_error_dual(probs: ArrayLike, labels: ArrayLike) -> float:
    r"""Smooth calibration error (smCE) of the top label, by its definition as a supremum.

    The error that the theory speaks of: at least half of the lower distance to calibration and at most all of it, and
    a bound on what a smooth recalibration can save. `smooth_calibration_error` (smECE) is the kernel estimate that
    the papers' tables report, and has a reliability curve; this one has no bandwidth.

    $$\mathrm{smCE} = \sup_\eta \frac{1}{N} \sum_i \eta(c_i) \, (a_i - c_i)$$

    with $c_i$ the confidence, $a_i$ whether it is right, and $\eta$ any 1-Lipschitz function from [0, 1] to [-1, 1].

    Returns:
        A fraction in [0, 1], no smaller than the difference between accuracy and mean confidence, and no
        larger than the expected calibration error with a bin for each confidence.

    Notes:
        Exact up to rounding; O(N log N). It is a plug-in: a small sample has an error by chance.
        The Brier score's post-processing gap lies between smCE^2 and 2 smCE.

    References:
        Blasiok et al. 2023, A unifying theory of distance from calibration; Focal calibration loss,
        Definition 2.2 (Equation 7).

    >>> probs = [[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]]
    >>> round(smooth_calibration_error_dual(probs, [0, 1, 1]), 4)
    0.1467
    """
    return smooth_error_dual(top_label(*check_probs_and_any_labels(probs, labels)))


def smooth_error_dual(top: TopLabel) -> float:
    """The smCE of rows whose top label is known."""
    # A function that is 1-Lipschitz between neighbours is so between all pairs. So the supremum is a linear program
    # over the N values of the witness: |w_{i+1} - w_i| <= d_i = c_{i+1} - c_i and |w_i| <= 1. With S_i the sum of
    # the first i residuals, its dual is
    #     min  sum_i d_i |S_i - P_i|  +  sum_i |p_i|,    P_i = p_1 + ... + p_i,    P_N = S_N:
    # each residual is cancelled where it is, at a price of 1, or carried along the line at a price of d.
    # No two p differ in sign: to cancel both costs 2, to carry one to the other costs at most 1, the
    # length of [0, 1]. Hence their prices add up to |S_N|, P rises from 0 to S_N (or falls, which the sign below
    # takes care of), and what remains is the monotone fit to S with weights d, whose bounds merely clip the fit
    # without them. Tied confidences have d = 0, so that their order does not matter.
    order = np.argsort(top.confidence)
    distances = np.diff(top.confidence[order])
    running = np.cumsum((top.correct - top.confidence)[order]) / len(order)
    surplus = abs(running[-1])
    sums = running[:-1][distances > 0] * (1 if running[-1] >= 0 else -1)
    distances = distances[distances > 0]
    fitted = _monotone_fit(sums, distances).clip(0, surplus)
    return float(surplus + distances @ np.abs(sums - fitted))


def _monotone_fit(values: FloatArray, weights: FloatArray) -> FloatArray:
    """The nondecreasing (N,) with the least weighted sum of absolute differences from the values (N,).

    The least sum over the fits so far whose last value is at most x is convex in x, and constant from some x on:
    `heap` holds the points where its slope changes, largest first, and by how much. A new value adds its own
    slopes, -weight and +weight, and what rises is cut off.
    """
    heap: list[tuple[float, float]] = []
    best_last = np.empty_like(values)
    for i, (value, weight) in enumerate(zip(values.tolist(), weights.tolist(), strict=True)):
        heappush(heap, (-value, 2 * weight))
        excess = weight
        while heap[0][1] <= excess:
            excess -= heappop(heap)[1]
        heapreplace(heap, (heap[0][0], heap[0][1] - excess))
        best_last[i] = -heap[0][0]
    # From the last one backwards: each the best that does not exceed the next.
    return np.minimum.accumulate(best_last[::-1])[::-1]
