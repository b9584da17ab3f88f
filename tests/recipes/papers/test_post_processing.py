"""The post-processing gap against brute force, closed forms, and the theory that bounds it."""

from __future__ import annotations

import numpy as np
import pytest
from papers.post_processing import post_processing_gap
from scipy.optimize import minimize

from hf_calib.metrics import smooth_calibration_error_dual

TIGHT = {"rel": 0, "abs": 1e-12}


def as_probs(confidences: object) -> np.ndarray:
    """Top-label confidences as probabilities of two classes or, below a half, of eleven; label 0 is the top one."""
    c = np.asarray(confidences, dtype=float)
    return np.stack([c, *[(1 - c) / 10] * 10], axis=1)


def gap(confidences: object, correct: object, smooth: str = "update") -> float:
    return post_processing_gap(as_probs(confidences), 1 - np.asarray(correct, dtype=int), smooth=smooth)


def sample(n_examples: int, seed: int, power: float = 3.0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    confidences = rng.uniform(0.1, 0.999, n_examples)
    return confidences, (rng.random(n_examples) < confidences**power).astype(int)


@pytest.mark.parametrize("smooth", ["update", "map"])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("n_examples", [1, 2, 3, 8])
def test_equals_brute_force(n_examples: int, seed: int, smooth: str) -> None:
    confidences, correct = sample(n_examples, seed)
    i, j = np.triu_indices(n_examples, k=1)
    reach, start = (
        np.abs(confidences[i] - confidences[j]),
        confidences if smooth == "update" else 0 * confidences,
    )

    def within_reach(mapped: np.ndarray) -> np.ndarray:
        difference = (mapped - start)[i] - (mapped - start)[j]
        return np.concatenate([reach - difference, reach + difference])

    found = minimize(
        lambda mapped: ((mapped - correct) ** 2).mean(),
        confidences,
        bounds=[(0, 1)] * n_examples,
        constraints={"type": "ineq", "fun": within_reach},
        options={"ftol": 1e-14, "maxiter": 1000},
    )
    assert found.success
    expected = ((confidences - correct) ** 2).mean() - found.fun
    assert gap(confidences, correct, smooth) == pytest.approx(expected, rel=0, abs=2e-7)


@pytest.mark.parametrize("n_examples", [20, 300])
@pytest.mark.parametrize("power", [0.2, 1.0, 5.0])
def test_is_bounded_by_the_smooth_calibration_error(power: float, n_examples: int) -> None:
    confidences, correct = sample(n_examples, seed=0, power=power)
    smooth = smooth_calibration_error_dual(as_probs(confidences), 1 - correct)
    assert smooth**2 - 1e-9 <= gap(confidences, correct) <= 2 * smooth + 1e-9


def test_closed_forms() -> None:
    assert gap([0.8] * 4, [1, 0, 0, 0]) == pytest.approx((0.8 - 0.25) ** 2, **TIGHT)
    assert gap([1.0, 1.0], [0, 0]) == pytest.approx(1, **TIGHT)
    assert gap([1.0, 1.0, 1.0], [1, 1, 1]) == 0
    # Residuals -0.4 and 0.3 at a distance of 0.2: the updates are a and a + 0.2.
    a = (2 * -0.4 + (0.3 - 0.2)) / 3
    left = (2 * (-0.4 - a) ** 2 + (0.3 - a - 0.2) ** 2) / 3
    assert gap([0.9, 0.9, 0.7], [1, 0, 1]) == pytest.approx((2 * 0.16 + 0.09) / 3 - left, **TIGHT)
    # Right at .6 and wrong at .7: a map falls by .1 at most, where an update leaves the order as it is.
    assert gap([0.6, 0.7], [1, 0], "map") == pytest.approx((0.16 + 0.49) / 2 - 0.45**2, **TIGHT)
    assert gap([0.6, 0.7], [1, 0]) == pytest.approx((0.16 + 0.49) / 2 - 0.25, **TIGHT)
    # Wrong at .6 and right at .7: an update stretches the distance to .2, a map keeps it at .1.
    assert gap([0.6, 0.7], [0, 1], "map") == pytest.approx((0.36 + 0.09) / 2 - 0.45**2, **TIGHT)
    assert gap([0.6, 0.7], [0, 1]) == pytest.approx((0.36 + 0.09) / 2 - 0.4**2, **TIGHT)
    # Calibrated at each confidence.
    confidences, correct = np.repeat([0.5, 0.75, 1.0], [2, 4, 5]), np.repeat([1, 0, 1, 0, 1], [1, 1, 3, 1, 5])
    assert gap(confidences, correct) == pytest.approx(0, **TIGHT)
    thrice = gap(np.tile(confidences**2, 3), np.tile(correct, 3))
    assert thrice == pytest.approx(gap(confidences**2, correct), **TIGHT)
