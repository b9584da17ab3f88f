"""The post-processing gap against brute force and closed forms."""

from __future__ import annotations

import numpy as np
import pytest
from papers.post_processing import post_processing_gap
from scipy.optimize import minimize


def as_probs(confidences: object) -> np.ndarray:
    """Top-label confidences as probabilities of two classes or, below a half, of eleven; label 0 is the top one."""
    c = np.asarray(confidences, dtype=float)
    return np.stack([c, *[(1 - c) / 10] * 10], axis=1)


def gap(confidences: object, correct: object, smooth: str = "update") -> float:
    return post_processing_gap(
        as_probs(confidences), 1 - np.asarray(correct, dtype=int), smooth=smooth
    )


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
    reach, start = (
        np.abs(confidences[i] - confidences[j]),
        confidences * (smooth == "update"),
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
