"""Toys whose true class probabilities are known, so that calibration is measured without bins."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import logsumexp, softmax

from hf_calib._errors import InputValueError, expected
from hf_calib.metrics.checks import FloatArray, as_floats, check_number

_FARTHEST = 1e6
_ROWS = 1_000  # of points at a time, which bounds the memory of their distances


def gaussian_posteriors(points: ArrayLike, means: ArrayLike) -> FloatArray:
    r"""Class probabilities of points from equally likely Gaussians with unit covariance.

    $$\eta_k(x) = \frac{\mathcal{N}(x; \mu_k, I)}{\sum_j \mathcal{N}(x; \mu_j, I)}$$

    Args:
        points: (N, D) numbers in [-1e6, 1e6].
        means: (C, D) numbers in [-1e6, 1e6]: the centre of each class.

    Returns:
        (N, C) float64, rows that sum to 1.

    Raises:
        TypeError: if either holds no numbers.
        ValueError: if the shapes do not fit, or a value is out of range.

    References:
        Lin et al. 2025, "Uncertainty weighted gradients for model calibration", Eq. 13.

    >>> gaussian_posteriors([[0.0], [1.0]], [[-1.0], [1.0]]).round(6)
    array([[0.5     , 0.5     ],
           [0.119203, 0.880797]])
    """
    centres = as_floats("means", means)
    if centres.ndim != 2 or not centres.size:
        way_out = "pass a centre for each class"
        raise InputValueError(expected("means", "have shape (C, D)", f"shape {centres.shape}", way_out))
    _check_range("means", centres)
    checked = _points(points, centres.shape[1])
    # |x|^2 is the same for all classes, and left out; what all centres share would cost digits.
    middle = centres.mean(axis=0)
    checked, centres = checked - middle, centres - middle
    return softmax(checked @ centres.T - 0.5 * (centres**2).sum(axis=1), axis=1)


def two_moons_posteriors(points: ArrayLike, *, noise: float = 0.2) -> FloatArray:
    r"""Class probabilities of points from `sklearn.datasets.make_moons`, both moons equally likely.

    The upper moon, class 0, is the half circle (cos t, sin t), the lower one, class 1, is
    (1 - cos t, 1/2 - sin t), each with t even in [0, pi] and Gaussian noise in both coordinates. The density of a
    moon is the integral over t, by Simpson's rule.

    $$\eta_k(x) \propto \int_0^\pi \exp\left(-\frac{\|x - m_k(t)\|^2}{2 \sigma^2}\right) \, dt$$

    Args:
        points: (N, 2) numbers in [-1e6, 1e6].
        noise: the standard deviation sigma, at least 0.01.

    Returns:
        (N, 2) float64, rows that sum to 1.

    Raises:
        TypeError: if the points or the noise are not numbers.
        ValueError: if the shape does not fit, or a value is out of range.

    >>> two_moons_posteriors([[0.5, 0.25], [0.0, 1.0]]).round(4)
    array([[0.5   , 0.5   ],
           [0.9938, 0.0062]])
    """
    if not 0.01 <= check_number("noise", noise, "0.2 is usual") < np.inf:
        raise InputValueError(expected("noise", "be a finite number, at least 0.01", noise, "0.2 is usual"))
    checked = _points(points, 2)
    half_steps = int(np.ceil(8 * np.pi / noise))  # a step is a sixteenth of the noise
    angles = np.linspace(0, np.pi, 2 * half_steps + 1)
    upper = np.stack([np.cos(angles), np.sin(angles)])
    log_simpson = np.log(np.r_[1, np.tile([4, 2], half_steps - 1), 4, 1])
    log_density = np.empty((len(checked), 2))
    for moon, curve in enumerate((upper, np.array([[1.0], [0.5]]) - upper)):
        for start in range(0, len(checked), _ROWS):
            part = slice(start, start + _ROWS)
            distances = ((checked[part, :, None] - curve) ** 2).sum(axis=1)
            log_density[part, moon] = logsumexp(log_simpson - distances / (2 * noise**2), axis=1)
    return softmax(log_density, axis=1)


def _points(points: ArrayLike, dimensions: int) -> FloatArray:
    checked = as_floats("points", points)
    if checked.ndim != 2 or checked.shape[1] != dimensions:
        got = f"shape {checked.shape}"
        raise InputValueError(
            expected("points", f"have shape (N, {dimensions})", got, "pass one row a point")
        )
    _check_range("points", checked)
    return checked


def _check_range(name: str, values: FloatArray) -> None:
    """Beyond it squares leave no digits for the differences that count."""
    far = ~(np.abs(values) <= _FARTHEST)  # of NaN too
    if far.any():
        requirement, got = f"be finite numbers, at most {_FARTHEST:g} in size", values[far][0]
        raise InputValueError(expected(name, requirement, got, "leave those out, or scale them"))
