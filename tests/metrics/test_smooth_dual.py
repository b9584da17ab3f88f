"""The dual smooth calibration error against the linear program of its definition, closed forms, and theory."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import linprog

from hf_calib.metrics import bootstrap_interval, smooth_calibration_error_dual
from hf_calib.metrics.smooth import smooth_error_dual
from hf_calib.metrics.sums import TopLabel
from tests.helpers.sampled import EXACT, two_classes


def smooth_error(confidences: object, correct: object) -> float:
    return smooth_error_dual(TopLabel(np.asarray(confidences, dtype=float), np.asarray(correct, dtype=float)))


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


def sample(n_examples: int, seed: int, power: float = 2.0) -> tuple[np.ndarray, np.ndarray]:
    """Predictions that are over-confident for a power above 1, and under-confident below."""
    rng = np.random.default_rng(seed)
    confidences = rng.beta(5, 1, n_examples)
    return confidences, (rng.random(n_examples) < confidences**power).astype(float)


class TestAgainstTheLinearProgram:
    @pytest.mark.parametrize("seed", range(6))
    @pytest.mark.parametrize("n_examples", [1, 2, 3, 20, 100])
    def test_over_all_pairs(self, n_examples: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        # Every third sample has ties, confidences of exactly 0 and 1, and every other one has soft labels.
        confidences = rng.integers(0, 6, n_examples) / 5 if seed % 3 == 0 else rng.random(n_examples)
        correct = rng.random(n_examples) if seed % 2 else rng.integers(0, 2, n_examples).astype(float)
        expected = by_all_pairs(confidences, correct)
        assert smooth_error(confidences, correct) == pytest.approx(expected, rel=0, abs=1e-9)


class TestClosedForms:
    def test_one_confidence(self) -> None:
        assert smooth_error([0.8] * 4, [1, 0, 0, 0]) == pytest.approx(0.55, **EXACT)
        assert smooth_error([0.3], [1]) == pytest.approx(0.7, **EXACT)

    def test_two_confidences_that_err_alike_add_up(self) -> None:
        assert smooth_error([0.6, 0.9], [0, 0]) == pytest.approx((0.6 + 0.9) / 2, **EXACT)

    def test_two_confidences_that_err_apart_are_as_smooth_as_they_are_near(self) -> None:
        # Residuals .4 and -.9 at a distance of .3: the witness is -1 at the larger one, and -.7 at the other.
        assert smooth_error([0.6, 0.9], [1, 0]) == pytest.approx((0.9 - 0.4 * 0.7) / 2, **EXACT)

    def test_residuals_that_cancel_are_carried_over_the_distance(self) -> None:
        # .1 too much at .4 and .1 too little at .9.
        assert smooth_error([0.4, 0.9], [0.3, 1.0]) == pytest.approx(0.1 * 0.5 / 2, **EXACT)

    def test_ends(self) -> None:
        assert smooth_error([1, 1], [0, 0]) == 1
        assert smooth_error([0, 1], [0, 1]) == 0
        assert smooth_error([0, 1], [1, 0]) == pytest.approx(0.5, **EXACT)

    def test_calibrated_groups_have_none(self) -> None:
        confidences = np.repeat([0.25, 0.5, 0.75, 1.0], 4)
        correct = np.concatenate([np.arange(4) < 4 * c for c in (0.25, 0.5, 0.75, 1.0)])
        assert smooth_error(confidences, correct) == pytest.approx(0, abs=1e-15)

    def test_many_classes_score_the_top_label(self) -> None:
        probs = np.array([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6]])
        assert smooth_calibration_error_dual(probs, [0, 1]) == pytest.approx(0.1, **EXACT)
        soft = np.array([[0.6, 0.4, 0.0], [0.2, 0.2, 0.6]])
        assert smooth_calibration_error_dual(probs, soft) == 0


class TestInvariances:
    def test_order_and_repetition(self) -> None:
        confidences, correct = sample(200, seed=1)
        confidences = confidences.round(2)  # ties
        value = smooth_error(confidences, correct)
        order = np.random.default_rng(0).permutation(200)
        assert smooth_error(confidences[order], correct[order]) == pytest.approx(value, **EXACT)
        assert smooth_error(np.tile(confidences, 3), np.tile(correct, 3)) == pytest.approx(value, **EXACT)

    def test_it_is_continuous_in_the_confidences(self) -> None:
        confidences, correct = sample(200, seed=3)
        nudged = (confidences + 1e-7 * np.random.default_rng(0).standard_normal(200)).clip(0, 1)
        # A nudge by e moves a residual and the witness by e each.
        assert smooth_error(nudged, correct) == pytest.approx(smooth_error(confidences, correct), abs=1e-6)


class TestTheory:
    @pytest.mark.parametrize("power", [0.2, 1.0, 5.0])
    def test_between_the_mean_difference_and_the_error_per_confidence(self, power: float) -> None:
        confidences, correct = sample(300, seed=5, power=power)
        confidences = confidences.round(1)
        groups = [confidences == value for value in np.unique(confidences)]
        per_confidence = sum(abs((correct - confidences)[group].sum()) for group in groups) / 300
        value = smooth_error(confidences, correct)
        assert abs((correct - confidences).mean()) - 1e-12 <= value <= per_confidence + 1e-12

    def test_a_large_sample_shows_the_true_error(self) -> None:
        # E[c - c^2] of Beta(5, 1): 5/6 - 5/7. The residual has one sign, so that the witness is -1.
        assert smooth_error(*sample(100_000, seed=7)) == pytest.approx(5 / 6 - 5 / 7, abs=0.005)


def test_it_has_a_name_among_the_metrics() -> None:
    confidences, correct = sample(200, seed=8)
    probs, labels = two_classes((1 + confidences) / 2, correct)
    interval = bootstrap_interval("smooth_calibration_error_dual", probs, labels, n_resamples=50)
    assert interval.low < smooth_calibration_error_dual(probs, labels) < interval.high
