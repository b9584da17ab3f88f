"""Toy problems with known class probabilities, so that calibration is measured without bins; and their networks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.special import logsumexp, softmax
from torch import Tensor, nn

from hf_calib._errors import check
from hf_calib.losses import CalibrationLoss

# Points at a time, which bounds the memory of their distances.
_ROWS = 1_000


def gaussian_posteriors(points: ArrayLike, means: ArrayLike) -> NDArray[np.float64]:
    r"""Class probabilities (N, C) of points (N, D) from equally likely Gaussians with unit covariance, centres (C, D).

    $$\eta_k(x) = \frac{\mathcal{N}(x; \mu_k, I)}{\sum_j \mathcal{N}(x; \mu_j, I)}$$

    References:
        Lin et al. 2025, "Uncertainty weighted gradients for model calibration", Eq. 13.

    >>> gaussian_posteriors([[0.0], [1.0]], [[-1.0], [1.0]]).round(6)
    array([[0.5     , 0.5     ],
           [0.119203, 0.880797]])
    """
    centres = np.asarray(means, np.float64)
    # What all centres share would cost digits.
    middle = centres.mean(axis=0)
    centres = centres - middle
    at = np.asarray(points, np.float64) - middle
    # |x|^2 is the same for all classes, and left out.
    log_density = at @ centres.T - 0.5 * (centres**2).sum(axis=1)
    return softmax(log_density, axis=1)


def two_moons_posteriors(
    points: ArrayLike, *, noise: float = 0.2
) -> NDArray[np.float64]:
    r"""Class probabilities (N, 2) of points (N, 2) from `sklearn.datasets.make_moons`, both moons equally likely.

    The upper moon, class 0, is the half circle (cos t, sin t), the lower one, class 1, is (1 - cos
    t, 1/2 - sin t), each with t even in [0, pi] and Gaussian noise in both coordinates. The density
    of a moon is the integral over t, by Simpson's rule.

    $$\eta_k(x) \propto \int_0^\pi \exp\left(-\frac{\|x - m_k(t)\|^2}{2 \sigma^2}\right) \, dt$$

    >>> two_moons_posteriors([[0.5, 0.25], [0.0, 1.0]]).round(4)
    array([[0.5   , 0.5   ],
           [0.9938, 0.0062]])
    """
    check(noise >= 0.01, "noise to be at least 0.01", noise, "0.2 is usual")
    at = np.asarray(points, np.float64)
    # A step is a sixteenth of the noise.
    half_steps = int(np.ceil(8 * np.pi / noise))
    angles = np.linspace(0, np.pi, 2 * half_steps + 1)
    upper = np.stack([np.cos(angles), np.sin(angles)])
    lower = np.array([[1.0], [0.5]]) - upper
    log_simpson = np.log(np.r_[1, np.tile([4, 2], half_steps - 1), 4, 1])
    log_density = np.empty((len(at), 2))
    for moon, curve in enumerate((upper, lower)):
        for start in range(0, len(at), _ROWS):
            part = slice(start, start + _ROWS)
            squares = ((at[part, :, None] - curve) ** 2).sum(axis=1)
            log_terms = log_simpson - squares / (2 * noise**2)
            log_density[part, moon] = logsumexp(log_terms, axis=1)
    return softmax(log_density, axis=1)


def perceptron(*widths: int) -> nn.Sequential:
    """Linear layers of these widths, inputs and classes included, with a ReLU between two.

    >>> [tuple(layer.weight.shape) for layer in perceptron(2, 10, 3)[::2]]
    [(10, 2), (3, 10)]
    """
    layers: list[nn.Module] = []
    for n_in, n_out in pairwise(widths):
        layers += [nn.Linear(n_in, n_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def train_with_adam(
    network: nn.Module,
    loss: CalibrationLoss,
    inputs: Tensor,
    labels: Tensor,
    *,
    epochs: int,
    batch_size: int,
    learning_rate: float = 1e-3,
) -> None:
    """Train in a plain loop, in batches that torch's global generator draws."""
    optimizer = torch.optim.Adam(network.parameters(), lr=learning_rate)
    for _ in range(epochs):
        for batch in torch.randperm(len(labels)).split(batch_size):
            optimizer.zero_grad()
            loss(network(inputs[batch]), labels[batch]).backward()
            optimizer.step()
