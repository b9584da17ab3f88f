"""The post-processing gap against brute force and closed forms."""

from __future__ import annotations

import numpy as np
import pytest
from papers.post_processing import post_processing_gap
from scipy.optimize import minimize

TIGHT = {"rel": 0, "abs": 1e-12}


def as_probs(confidences: object) -> np.ndarray:
    """Top-label confidences as probabilities of two classes or, below a half, of eleven; label 0 is the top one."""
    c = np.asarray(confidences, dtype=float)
    return np.stack([c, *[(1 - c) / 10] * 10], axis=1)


def gap(confidences: object, correct: object, smooth: str = "update") -> float:
    return post_processing_gap(as_probs(confidences), 1 - np.asarray(correct, dtype=int), smooth=smooth)


def sample(n_examples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    confidences = rng.uniform(0.1, 0.999, n_examples)
    return confidences, (rng.random(n_examples) < confidences**3).astype(int)


@pytest.mark.parametrize("smooth", ["update", "map"])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("n_examples", [1, 2, 3, 8])
def test_equals_brute_force(n_examples: int, seed: int, smooth: str) -> None:
    confidences, correct = sample(n_examples, seed)
    i, j = np.triu_indices(n_examples, k=1)
    reach, start = np.abs(confidences[i] - confidences[j]), confidences * (smooth == "update")

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
