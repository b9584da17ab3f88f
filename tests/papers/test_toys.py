"""Posteriors against densities and draws; the interval of a mean against its coverage."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from sklearn.datasets import make_moons

from hf_calib.metrics import expected_calibration_error
from hf_calib.papers import gaussian_posteriors, mean_interval, two_moons_posteriors


def test_gaussian_posteriors_are_the_ratio_of_densities() -> None:
    rng = np.random.default_rng(0)
    means, points = rng.uniform(-3, 3, (5, 2)), rng.normal(scale=3, size=(200, 2))
    densities = np.stack([stats.multivariate_normal(mean).pdf(points) for mean in means], axis=1)
    wanted = densities / densities.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(gaussian_posteriors(points, means), wanted, rtol=1e-9, atol=1e-300)
    # Far from 0, where the squares alone would leave no digits.
    shift = np.full(2, 9e5)
    shifted = gaussian_posteriors(points + shift, means + shift)
    np.testing.assert_allclose(shifted, wanted, rtol=1e-7, atol=1e-300)
    far = gaussian_posteriors([[1e4, 0.0]], [[0.0, 0.0], [1.0, 0.0]])  # where both densities are 0 in float64
    np.testing.assert_array_equal(far, [[0, 1]])


def test_gaussian_posteriors_are_calibrated_on_draws() -> None:
    rng = np.random.default_rng(1)
    means = np.array([[0.0, 0.0], [1.5, 0.0], [0.0, 1.5]])
    labels = rng.integers(3, size=40_000)
    probs = gaussian_posteriors(means[labels] + rng.normal(size=(40_000, 2)), means)
    assert expected_calibration_error(probs, labels) < 0.01


def test_two_moons_posteriors_are_calibrated_on_draws_of_scikit_learn() -> None:
    points, labels = make_moons(20_000, noise=0.3, random_state=0)
    probs = two_moons_posteriors(points, noise=0.3)
    assert expected_calibration_error(probs, labels) < 0.012
    assert ((probs.argmax(axis=1) == labels).mean()) > 0.9
    # The moons are each other's image under (x, y) -> (1 - x, 1/2 - y).
    np.testing.assert_allclose(two_moons_posteriors([1, 0.5] - points[:50], noise=0.3)[:, ::-1], probs[:50])
    # The integral by another rule.
    angles = (np.arange(200_000) + 0.5) * np.pi / 200_000
    upper = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    for point in ([0.5, 0.3], [1.9, 0.1], [-1.2, -0.4]):
        kernels = [np.exp(-((point - moon) ** 2).sum(axis=1) / 0.08) for moon in (upper, [1, 0.5] - upper)]
        share = kernels[0].sum() / np.sum(kernels)
        assert two_moons_posteriors([point])[0, 0] == pytest.approx(share, rel=1e-6)
    narrow = two_moons_posteriors([[3.0, 3.0], [-1.0, 0.0]], noise=0.01)
    assert np.isfinite(narrow).all()
    assert narrow[1, 0] == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: gaussian_posteriors([[0.0]], [[0.0, 1.0]]),
            r"points to have shape \(N, 2\), got shape \(1, 1\)",
        ),
        (lambda: gaussian_posteriors([[0.0]], [0.0, 1.0]), r"means to have shape \(C, D\), got shape \(2,\)"),
        (
            lambda: gaussian_posteriors([[0.0]], [[1e200]]),
            "means to be finite numbers, at most 1e.06 in size, got 1e",
        ),
        (
            lambda: two_moons_posteriors([[0.0, np.nan]]),
            "points to be finite numbers, at most 1e.06 in size, got nan",
        ),
        (
            lambda: two_moons_posteriors([[0.0, 0.0]], noise="0.2"),
            "noise to be a number, got '0.2'; 0.2 is usual",
        ),
        (lambda: two_moons_posteriors([[0.0, 0.0]], noise=0.0), "noise to be a finite number, at least 0.01"),
        (lambda: mean_interval([1.0]), "values to be at least two numbers"),
        (lambda: mean_interval([1.0, np.nan]), "values to be finite, got 1 NaN or infinite of 2"),
    ],
)
def test_what_is_refused(call: object, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"expected {message}"):
        call()  # type: ignore[operator]


def test_the_interval_is_students_and_covers() -> None:
    values = np.random.default_rng(0).normal(size=(2_000, 5))
    found = np.array([mean_interval(row) for row in values])
    wanted = np.stack(
        stats.t.interval(0.95, 4, loc=values.mean(axis=1), scale=stats.sem(values, axis=1)), axis=1
    )
    np.testing.assert_allclose(found[:, 1:], wanted)
    assert ((found[:, 1] < 0) & (found[:, 2] > 0)).mean() == pytest.approx(0.95, abs=0.015)
