"""The dual smooth calibration error against the linear program of its definition."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import linprog

from hf_calib.metrics import smooth_calibration_error_dual
from hf_calib.metrics.smooth import smooth_error_dual
from hf_calib.metrics.sums import TopLabel
from tests.helpers.sampled import EXACT


def smooth_error(confidences: object, correct: object) -> float:
    return smooth_error_dual(
        TopLabel(np.asarray(confidences, dtype=float), np.asarray(correct, dtype=float))
    )


def by_all_pairs(confidences: np.ndarray, correct: np.ndarray) -> float:
    """The definition: a witness value for each example, and every pair of them constrained."""
    n_examples = len(confidences)
    i, j = np.triu_indices(n_examples, k=1)
    differences = np.eye(n_examples)[i] - np.eye(n_examples)[j]
    reach = np.abs(confidences[i] - confidences[j])
    found = linprog(
        -(correct - confidences) / n_examples,
        A_ub=np.vstack([differences, -differences]),
        b_ub=np.concatenate([reach, reach]),
        bounds=(-1, 1),
    )
    assert found.success
    return -float(found.fun)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("n_examples", [1, 2, 3, 20, 100])
def test_over_all_pairs(n_examples: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    # Every third sample has ties, confidences of exactly 0 and 1, and every other one has soft labels.
    confidences = (
        rng.integers(0, 6, n_examples) / 5 if seed % 3 == 0 else rng.random(n_examples)
    )
    correct = (
        rng.random(n_examples)
        if seed % 2
        else rng.integers(0, 2, n_examples).astype(float)
    )
    expected = by_all_pairs(confidences, correct)
    assert smooth_error(confidences, correct) == pytest.approx(
        expected, rel=0, abs=1e-9
    )


def test_many_classes_score_the_top_label() -> None:
    probs = np.array([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6]])
    assert smooth_calibration_error_dual(probs, [0, 1]) == pytest.approx(0.1, **EXACT)
    soft = np.array([[0.6, 0.4, 0.0], [0.2, 0.2, 0.6]])
    assert smooth_calibration_error_dual(probs, soft) == 0
