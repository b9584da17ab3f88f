"""Smooth calibration error against the authors' code and the definition; the curve against plain sums."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.integrate import trapezoid
from scipy.special import softmax

from hf_calib.metrics import expected_calibration_error, smooth_calibration_error
from hf_calib.metrics.smooth import smooth_error, smooth_reliability
from hf_calib.metrics.sums import TopLabel
from tests.helpers.sampled import EXACT, GOLDEN_EDGE_CASES, GOLDEN_PREDICTIONS


def events(n_examples: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Over-confident predictions."""
    rng = np.random.default_rng(seed)
    confidences = rng.beta(5, 1, n_examples)
    return confidences, (rng.random(n_examples) < confidences**2).astype(float)


def mirrored_gaussian(at: np.ndarray, sources: np.ndarray, bandwidth: float) -> np.ndarray:
    """Kernel values (len(at), len(sources)), the sources mirrored at 0 and 1."""
    images = np.stack([sources, -sources, 2 - sources])
    distances = at[None, :, None] - images[:, None, :]
    return np.exp(-0.5 * (distances / bandwidth) ** 2).sum(axis=0) / (np.sqrt(2 * np.pi) * bandwidth)


def of_columns(confidences: np.ndarray, correct: np.ndarray, bandwidth: float | None = None) -> float:
    return smooth_error(TopLabel(confidences, correct), bandwidth=bandwidth)


class TestBandwidths:
    def test_the_smallest_fixed_point_is_two_steps(self) -> None:
        confidences = np.repeat([0.25, 0.5, 0.75, 1.0], 400)
        correct = np.concatenate([np.arange(400) < 400 * c for c in (0.25, 0.5, 0.75, 1.0)]).astype(float)
        found = smooth_reliability(confidences, correct).bandwidth
        assert found == 2 / 1024
        at_two = of_columns(confidences, correct, bandwidth=2 / 1024)
        assert of_columns(confidences, correct) == at_two
        assert at_two < 1 / 1024

    @pytest.mark.parametrize("bandwidth", [0.05, 20 / 2002, 20 / 2004, 20 / 2006, 0.003])
    def test_the_kernel_is_centred_whatever_the_size_of_the_grid(self, bandwidth: float) -> None:
        confidences, correct = events(200)
        curve = smooth_reliability(confidences, correct, bandwidth=bandwidth, grid_size=401)
        mirrored = smooth_reliability(1 - confidences, correct, bandwidth=bandwidth, grid_size=401)
        np.testing.assert_allclose(mirrored.density[::-1], curve.density, atol=1e-9 * curve.density.max())
        seen = curve.density > 1e-3
        np.testing.assert_allclose(mirrored.accuracy[::-1][seen], curve.accuracy[seen], atol=1e-6)
        lone = smooth_reliability(np.array([0.5]), np.ones(1), bandwidth=bandwidth, grid_size=401)
        assert lone.grid[lone.density.argmax()] == 0.5
        np.testing.assert_allclose(lone.density, lone.density[::-1], atol=1e-9 * lone.density.max())


class TestAgainstTheAuthorsCode:
    @pytest.mark.parametrize("case", GOLDEN_PREDICTIONS)
    def test_value_and_bandwidth(self, golden: Path, case: str) -> None:
        with np.load(golden / f"metrics_{case}.npz") as file:
            probs, labels = softmax(file["logits"], axis=1), file["labels"]
            value, bandwidth, at_005 = (file[f"smece{key}"] for key in ("", "_sigma", "_sigma0p05"))
        assert smooth_calibration_error(probs, labels) == pytest.approx(value, **EXACT)
        assert smooth_calibration_error(probs, labels, bandwidth=0.05) == pytest.approx(at_005, **EXACT)
        correct = (probs.argmax(axis=1) == labels).astype(float)
        assert smooth_reliability(probs.max(axis=1), correct).bandwidth == bandwidth

    @pytest.mark.parametrize("case", GOLDEN_EDGE_CASES)
    def test_edge_cases(self, golden: Path, case: str) -> None:
        with np.load(golden / "metrics_edges.npz") as file:
            confidences, correct = file[f"{case}__conf"], file[f"{case}__correct"].astype(float)
            value, bandwidth = file[f"{case}__smece"], file[f"{case}__smece_sigma"]
        assert of_columns(confidences, correct) == pytest.approx(value, **EXACT)
        assert smooth_reliability(confidences, correct).bandwidth == bandwidth

    @pytest.mark.parametrize(
        ("bandwidth", "value"),
        [
            (0.003, 0.4674365091471328),
            (0.0071, 0.38937076639100715),
            (0.01, 0.3191408953227631),
            (0.3, 0.1830991634366047),
            (1.0, 0.1612327713316204),
            (None, 0.20248816085379276),
        ],
    )
    def test_any_bandwidth_on_even_and_odd_grids(self, bandwidth: float | None, value: float) -> None:
        # Values of relplot 1.0.3; the grid has 3334 points for 0.003 and 1409 for 0.0071.
        confidences = (np.arange(50) + 0.5) / 50
        confidences[:3] = 0, 1, 1
        correct = (np.arange(50) % 3 > 0).astype(float)
        error = of_columns(confidences, correct, bandwidth=bandwidth)
        assert error == pytest.approx(value, **EXACT)


class TestSmoothCalibrationError:
    @pytest.mark.parametrize("bandwidth", [0.02, 0.05, 0.08])
    def test_is_the_share_of_the_smoothed_residual(self, bandwidth: float) -> None:
        confidences, correct = events(300)
        confidences = confidences.round(3).clip(0.001, 0.999)  # inner points of the kernel's grid
        kernel = mirrored_gaussian(np.linspace(0, 1, 1001), confidences, bandwidth)
        rows = np.stack([kernel @ (confidences - correct), kernel.sum(axis=1) + 1e-4])
        points = np.linspace(0, 1, max(200, round(10 / bandwidth)))
        at_points = [np.interp(points, np.linspace(0, 1, 1001), row) for row in rows]
        error = of_columns(confidences, correct, bandwidth=bandwidth)
        # Gaussians of 0.08 are 4e-9 of their height where they are cut off.
        assert error == pytest.approx(
            np.abs(at_points[0]).sum() / at_points[1].sum(), rel=1e-12 if bandwidth < 0.06 else 1e-8
        )

    @pytest.mark.parametrize("n_examples", [10, 1000, 100_000])
    def test_the_bandwidth_is_a_fixed_point(self, n_examples: int) -> None:
        confidences, correct = events(n_examples)
        bandwidth = smooth_reliability(confidences, correct).bandwidth
        error = of_columns(confidences, correct)
        assert error == of_columns(confidences, correct, bandwidth=bandwidth)
        assert error <= bandwidth
        below = bandwidth - 1 / 1024
        assert of_columns(confidences, correct, bandwidth=below) > below

    def test_a_nudge_over_a_bin_edge_does_not_show(self) -> None:
        p = np.array([0.6, 0.6 + 1e-7])  # 0.6 is the edge of a bin: the two are in different ones
        probs, labels = np.stack([p, 1 - p], axis=1), np.array([0, 1])
        tied = np.repeat(probs[:1], 2, axis=0)
        jump = expected_calibration_error(probs, labels) - expected_calibration_error(tied, labels)
        assert jump > 0.3
        smooth = smooth_calibration_error(probs, labels, bandwidth=0.1)
        assert smooth == pytest.approx(smooth_calibration_error(tied, labels, bandwidth=0.1), abs=1e-6)

    def test_sure_and_right_is_0_sure_and_wrong_is_nearly_1(self) -> None:
        assert smooth_calibration_error(np.eye(3), np.arange(3)) == 0
        hopeless = smooth_calibration_error(np.tile(np.eye(3), (1000, 1)), np.tile([1, 2, 0], 1000))
        assert hopeless == pytest.approx(1, abs=1e-4)

    def test_soft_labels(self) -> None:
        rng = np.random.default_rng(0)
        probs, labels = rng.dirichlet(np.ones(4), 200), rng.integers(0, 4, 200)
        one_hot = smooth_calibration_error(probs, np.eye(4)[labels])
        assert one_hot == smooth_calibration_error(probs, labels)
        assert smooth_calibration_error(probs, probs) == 0
        even = np.full_like(probs, 0.25)
        shift = smooth_calibration_error(probs, even, bandwidth=0.05)
        assert shift == pytest.approx((probs.max(axis=1) - 0.25).mean(), rel=1e-2)

    @pytest.mark.parametrize("bandwidth", [0, 9.999e-5, 1.1, np.nan, np.inf])
    def test_a_bandwidth_out_of_range_is_refused(self, bandwidth: float) -> None:
        with pytest.raises(
            ValueError, match=r"expected bandwidth to lie in \[0\.0001, 1\], got .*; bandwidth=None"
        ):
            smooth_calibration_error(np.eye(2), [0, 1], bandwidth=bandwidth)


class TestSmoothReliability:
    def test_is_the_kernel_regression(self) -> None:
        confidences, correct = events(500)
        confidences = confidences.round(3)  # on the kernel's grid of 1001 points, and so nothing is shared
        confidences[:5] = 0, 1, 1, 1, 0.5
        curve = smooth_reliability(confidences, correct, bandwidth=0.03, grid_size=201)
        kernel = mirrored_gaussian(curve.grid, confidences, 0.03)
        mass = kernel.sum(axis=1)
        np.testing.assert_allclose(curve.density, mass / 500, rtol=0, atol=1e-12)
        dense = mass > 1e-3 * mass.max()
        accuracy = (kernel @ correct)[dense] / mass[dense]
        np.testing.assert_allclose(curve.accuracy[dense], accuracy, rtol=0, atol=1e-12)

    @pytest.mark.parametrize("bandwidth", [0.0021, 0.01, 0.1, 1.0, None])
    def test_the_density_integrates_to_1(self, bandwidth: float | None) -> None:
        confidences, correct = events(200)
        confidences[:50] = 1
        curve = smooth_reliability(confidences, correct, bandwidth=bandwidth, grid_size=5001)
        assert trapezoid(curve.density, curve.grid) == pytest.approx(1, abs=1e-4)
        assert (curve.density >= 0).all()

    def test_nothing_is_claimed_where_nobody_is(self) -> None:
        curve = smooth_reliability(np.full(10, 0.9), np.arange(10) % 2.0, bandwidth=0.01, grid_size=11)
        np.testing.assert_array_equal(np.isnan(curve.accuracy), np.arange(11) != 9)
        assert curve.accuracy[9] == pytest.approx(0.5, **EXACT)
