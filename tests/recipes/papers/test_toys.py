"""Posteriors against densities and draws; the interval of a mean against its coverage."""

from __future__ import annotations

import numpy as np
from papers.toys import gaussian_posteriors, two_moons_posteriors
from scipy import stats
from sklearn.datasets import make_moons

from hf_calib.metrics import expected_calibration_error


def test_gaussian_posteriors_are_the_ratio_of_densities() -> None:
    rng = np.random.default_rng(0)
    means, points = rng.uniform(-3, 3, (5, 2)), rng.normal(scale=3, size=(200, 2))
    densities = np.stack(
        [stats.multivariate_normal(mean).pdf(points) for mean in means], axis=1
    )
    wanted = densities / densities.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(
        gaussian_posteriors(points, means), wanted, rtol=1e-9, atol=1e-300
    )
    far = gaussian_posteriors(
        [[1e4, 0.0]], [[0.0, 0.0], [1.0, 0.0]]
    )  # where both densities are 0 in float64
    np.testing.assert_array_equal(far, [[0, 1]])


def test_two_moons_posteriors_are_calibrated_on_draws_of_scikit_learn() -> None:
    points, labels = make_moons(20_000, noise=0.3, random_state=0)
    probs = two_moons_posteriors(points, noise=0.3)
    assert expected_calibration_error(probs, labels) < 0.012
    assert ((probs.argmax(axis=1) == labels).mean()) > 0.9
