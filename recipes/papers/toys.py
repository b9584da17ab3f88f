"""Toy problems with known class probabilities, so that calibration is measured without bins."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import logsumexp, softmax

from hf_calib._errors import check

_ROWS = 1_000  # of points at a time, which bounds the memory of their distances


def gaussian_posteriors(points: ArrayLike, means: ArrayLike) -> NDArray[np.float64]:
    r"""Class probabilities (N, C) of points (N, D) from equally likely Gaussians with unit covariance, centres (C, D).

    $$\eta_k(x) = \frac{\mathcal{N}(x; \mu_k, I)}{\sum_j \mathcal{N}(x; \mu_j, I)}$$

    References:
        Lin et al. 2025, "Uncertainty weighted gradients for model calibration", Eq. 13.

    >>> gaussian_posteriors([[0.0], [1.0]], [[-1.0], [1.0]]).round(6)
    array([[0.5     , 0.5     ],
           [0.119203, 0.880797]])
    """
    at, centres = np.asarray(points, np.float64), np.asarray(means, np.float64)
    # |x|^2 is the same for all classes, and left out; what all centres share would cost digits.
    middle = centres.mean(axis=0)
    at, centres = at - middle, centres - middle
    return softmax(at @ centres.T - 0.5 * (centres**2).sum(axis=1), axis=1)


def two_moons_posteriors(
    points: ArrayLike, *, noise: float = 0.2
) -> NDArray[np.float64]:
    r"""Class probabilities (N, 2) of points (N, 2) from `sklearn.datasets.make_moons`, both moons equally likely.

    The upper moon, class 0, is the half circle (cos t, sin t), the lower one, class 1, is
    (1 - cos t, 1/2 - sin t), each with t even in [0, pi] and Gaussian noise in both coordinates. The density of a
    moon is the integral over t, by Simpson's rule.

    $$\eta_k(x) \propto \int_0^\pi \exp\left(-\frac{\|x - m_k(t)\|^2}{2 \sigma^2}\right) \, dt$$

    >>> two_moons_posteriors([[0.5, 0.25], [0.0, 1.0]]).round(4)
    array([[0.5   , 0.5   ],
           [0.9938, 0.0062]])
    """
    check(noise >= 0.01, "noise to be at least 0.01", noise, "0.2 is usual")
    at = np.asarray(points, np.float64)
    half_steps = int(np.ceil(8 * np.pi / noise))  # a step is a sixteenth of the noise
    angles = np.linspace(0, np.pi, 2 * half_steps + 1)
    upper = np.stack([np.cos(angles), np.sin(angles)])
    log_simpson = np.log(np.r_[1, np.tile([4, 2], half_steps - 1), 4, 1])
    log_density = np.empty((len(at), 2))
    for moon, curve in enumerate((upper, np.array([[1.0], [0.5]]) - upper)):
        for start in range(0, len(at), _ROWS):
            part = slice(start, start + _ROWS)
            distances = ((at[part, :, None] - curve) ** 2).sum(axis=1)
            log_density[part, moon] = logsumexp(
                log_simpson - distances / (2 * noise**2), axis=1
            )
    return softmax(log_density, axis=1)
