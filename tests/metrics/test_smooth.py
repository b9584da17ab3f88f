"""Smooth calibration error against the authors' code and the definition; the curve against plain sums."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.special import softmax

from hf_calib.metrics import smooth_calibration_error
from hf_calib.metrics.smooth import smooth_error, smooth_reliability
from hf_calib.metrics.sums import TopLabel
from tests.helpers.sampled import EXACT, GOLDEN_EDGE_CASES, GOLDEN_PREDICTIONS


def events(n_examples: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Over-confident predictions."""
    rng = np.random.default_rng(seed)
    confidences = rng.beta(5, 1, n_examples)
    return confidences, (rng.random(n_examples) < confidences**2).astype(float)


def mirrored_gaussian(
    at: np.ndarray, sources: np.ndarray, bandwidth: float
) -> np.ndarray:
    """Kernel values (len(at), len(sources)), the sources mirrored at 0 and 1."""
    images = np.stack([sources, -sources, 2 - sources])
    distances = at[None, :, None] - images[:, None, :]
    return np.exp(-0.5 * (distances / bandwidth) ** 2).sum(axis=0) / (
        np.sqrt(2 * np.pi) * bandwidth
    )


def of_columns(
    confidences: np.ndarray, correct: np.ndarray, bandwidth: float | None = None
) -> float:
    return smooth_error(TopLabel(confidences, correct), bandwidth=bandwidth)


class TestAgainstTheAuthorsCode:
    @pytest.mark.parametrize("case", GOLDEN_PREDICTIONS)
    def test_value_and_bandwidth(self, golden: Path, case: str) -> None:
        with np.load(golden / f"metrics_{case}.npz") as file:
            probs, labels = softmax(file["logits"], axis=1), file["labels"]
            value, bandwidth, at_005 = (
                file[f"smece{key}"] for key in ("", "_sigma", "_sigma0p05")
            )
        assert smooth_calibration_error(probs, labels) == pytest.approx(value, **EXACT)
        assert smooth_calibration_error(probs, labels, bandwidth=0.05) == pytest.approx(
            at_005, **EXACT
        )
        correct = (probs.argmax(axis=1) == labels).astype(float)
        assert smooth_reliability(probs.max(axis=1), correct).bandwidth == bandwidth

    @pytest.mark.parametrize("case", GOLDEN_EDGE_CASES)
    def test_edge_cases(self, golden: Path, case: str) -> None:
        with np.load(golden / "metrics_edges.npz") as file:
            confidences, correct = (
                file[f"{case}__conf"],
                file[f"{case}__correct"].astype(float),
            )
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
    def test_any_bandwidth_on_even_and_odd_grids(
        self, bandwidth: float | None, value: float
    ) -> None:
        # Values of relplot 1.0.3; the grid has 3334 points for 0.003 and 1409 for 0.0071.
        confidences = (np.arange(50) + 0.5) / 50
        confidences[:3] = 0, 1, 1
        correct = (np.arange(50) % 3 > 0).astype(float)
        error = of_columns(confidences, correct, bandwidth=bandwidth)
        assert error == pytest.approx(value, **EXACT)


class TestSmoothCalibrationError:
    def test_sure_and_right_is_0_sure_and_wrong_is_nearly_1(self) -> None:
        assert smooth_calibration_error(np.eye(3), np.arange(3)) == 0
        hopeless = smooth_calibration_error(
            np.tile(np.eye(3), (1000, 1)), np.tile([1, 2, 0], 1000)
        )
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
            ValueError,
            match=r"expected bandwidth to lie in \[0\.0001, 1\], got .*; bandwidth=None",
        ):
            smooth_calibration_error(np.eye(2), [0, 1], bandwidth=bandwidth)


class TestSmoothReliability:
    def test_is_the_kernel_regression(self) -> None:
        confidences, correct = events(500)
        confidences = confidences.round(
            3
        )  # on the kernel's grid of 1001 points, and so nothing is shared
        confidences[:5] = 0, 1, 1, 1, 0.5
        curve = smooth_reliability(confidences, correct, bandwidth=0.03, grid_size=201)
        kernel = mirrored_gaussian(curve.grid, confidences, 0.03)
        mass = kernel.sum(axis=1)
        np.testing.assert_allclose(curve.density, mass / 500, rtol=0, atol=1e-12)
        dense = mass > 1e-3 * mass.max()
        accuracy = (kernel @ correct)[dense] / mass[dense]
        np.testing.assert_allclose(curve.accuracy[dense], accuracy, rtol=0, atol=1e-12)

    def test_nothing_is_claimed_where_nobody_is(self) -> None:
        curve = smooth_reliability(
            np.full(10, 0.9), np.arange(10) % 2.0, bandwidth=0.01, grid_size=11
        )
        np.testing.assert_array_equal(np.isnan(curve.accuracy), np.arange(11) != 9)
        assert curve.accuracy[9] == pytest.approx(0.5, **EXACT)
