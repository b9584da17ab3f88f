from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.special import softmax

from hf_calib.scaling import SplineScaling
from tests.helpers.sampled import sampled

KINDS = ["natural", "parabolic", "cubic"]


@pytest.fixture
def case(golden: Path) -> dict[str, np.ndarray]:
    with np.load(golden / "posthoc_ets_spline_isotonic_K5.npz") as arrays:
        return dict(arrays)


class TestAgainstTheAuthorsCode:
    @pytest.mark.parametrize("kind", KINDS)
    def test_the_curve(self, case: dict[str, np.ndarray], kind: str) -> None:
        scaler = SplineScaling(kind).fit(case["logits_val"], case["labels_val"])
        np.testing.assert_allclose(scaler.scores_, np.sort(case["top_scores_val"]), rtol=1e-13)
        expected = case[f"spline_{kind}_k6_fitted_at_sorted_val"]
        np.testing.assert_allclose(scaler.accuracies_, expected, rtol=0, atol=1e-12)

    @pytest.mark.parametrize("kind", KINDS)
    def test_on_other_data(self, case: dict[str, np.ndarray], kind: str) -> None:
        scaler = SplineScaling(kind).fit(case["logits_val"], case["labels_val"])
        ours = scaler.predict_confidence(case["logits_test"])
        np.testing.assert_allclose(ours, case[f"spline_{kind}_k6_test_npinterp"], rtol=0, atol=1e-12)


def least_squares_slopes(values: np.ndarray, n_knots: int, condition: str) -> np.ndarray:
    """The same spline by truncated powers, its end conditions as linear constraints on their coefficients."""
    steps, knots = np.linspace(0, 1, len(values)), np.linspace(0, 1, n_knots)
    inner = knots[1:-1]

    def derivative(at: np.ndarray, order: int) -> np.ndarray:
        powers = [np.polynomial.Polynomial.basis(k).deriv(order)(at) for k in range(4)]
        factor = [1, 3, 6, 6][order]
        tails = [factor * np.maximum(at - knot, 0) ** (3 - order) * (at >= knot) for knot in inner]
        return np.stack(powers + tails, axis=1)

    middles = (knots[1:] + knots[:-1]) / 2
    rows = {
        "natural": derivative(np.array([0.0, 1.0]), 2),
        "parabolic": derivative(middles[[0, -1]], 3),
        "cubic": derivative(middles[[0, -2]], 3) - derivative(middles[[1, -1]], 3),
    }[condition]
    free = np.linalg.svd(rows)[2][2:].T
    coefficients = free @ np.linalg.lstsq(derivative(steps, 0) @ free, values, rcond=None)[0]
    return derivative(steps, 1) @ coefficients


class TestCurve:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("n_knots", [4, 6, 9])
    def test_is_the_nearest_spline(self, kind: str, n_knots: int) -> None:
        logits, labels = sampled(300, 4, 2.0)
        probs = softmax(logits, axis=1)
        order = np.argsort(probs.max(axis=1))
        scores, correct = probs.max(axis=1)[order], (probs.argmax(axis=1) == labels)[order]
        slopes = least_squares_slopes(np.cumsum(correct - scores) / 300, n_knots, kind)
        scaler = SplineScaling(kind, n_knots=n_knots).fit(logits, labels)
        np.testing.assert_allclose(scaler.accuracies_, np.clip(scores + slopes, 0, 1), atol=1e-9)

    def test_equal_confidences_get_their_accuracy(self) -> None:
        logits = np.tile([[2.0, 0.0], [0.0, 2.0]], (50, 1))
        labels = np.array([0, 1, 1, 1] * 25)  # three right in four
        scaler = SplineScaling().fit(logits, labels)
        assert len(scaler.scores_) == 1
        # The N sums lie at the steps 0, 1 / (N - 1), ..., 1 in the paper's code: a factor of (N - 1) / N.
        exact = scaler.scores_[0] + (0.75 - scaler.scores_[0]) * 99 / 100
        assert scaler.accuracies_[0] == pytest.approx(exact, rel=1e-12)

    def test_the_order_of_the_examples_makes_no_difference(self) -> None:
        logits, labels = sampled(200, 3, 2.0)
        logits, labels = np.vstack([logits, logits[:150]]), np.append(labels, labels[::-1][:150])  # ties
        order = np.random.default_rng(1).permutation(350)
        one, other = SplineScaling().fit(logits, labels), SplineScaling().fit(logits[order], labels[order])
        assert len(one.scores_) == 200
        np.testing.assert_array_equal(one.scores_, other.scores_)
        np.testing.assert_allclose(one.accuracies_, other.accuracies_, rtol=1e-12)

    def test_constant_beyond_what_was_seen(self) -> None:
        logits, labels = sampled(100, 3, 1.0)
        scaler = SplineScaling().fit(logits, labels)
        beyond = scaler.predict_confidence([[90.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
        np.testing.assert_array_equal(beyond, scaler.accuracies_[[-1, 0]])


class TestProbabilities:
    def test_the_others_keep_their_proportions(self) -> None:
        logits, labels = sampled(1000, 4, 3.0)
        scaler = SplineScaling().fit(logits, labels)
        probs, confidences = scaler.predict_proba(logits), scaler.predict_confidence(logits)
        free = np.isclose(probs.max(axis=1), confidences, rtol=1e-14)
        assert free.mean() > 0.8
        before = np.sort(softmax(logits, axis=1), axis=1)[:, :-1]
        after = np.sort(probs, axis=1)[:, :-1]
        ratios = after / before
        np.testing.assert_allclose(ratios, ratios[:, :1].repeat(3, axis=1), rtol=1e-9)

    def test_a_confidence_below_the_next_class_is_lifted_just_above_it(self) -> None:
        logits, _ = sampled(200, 3, 1.0)
        scaler = SplineScaling().fit(logits, logits.argmin(axis=1))  # always wrong
        probs = scaler.predict_proba([[1.0, 0.5, -3.0], [0.0, 2.0, 2.0]])
        np.testing.assert_array_equal(probs.argmax(axis=1), [0, 1])
        share = 1 / (1 + np.exp(-3.5))  # of what the others get, the runner-up's
        assert probs[0, 0] == pytest.approx(share / (1 + share), rel=1e-14)
        assert probs[0, 0] > probs[0, 1] == pytest.approx(probs[0, 0], rel=1e-14)
        np.testing.assert_allclose(probs.sum(axis=1), 1, rtol=1e-14)

    def test_saturated_and_masked_logits(self) -> None:
        logits, labels = sampled(500, 3, 4.0)
        scaler = SplineScaling().fit(logits, labels)
        top = scaler.accuracies_[-1]
        extreme = [[1e4, -1e4, -1e4], [1e4, -1e4, -np.inf], [0.0, -np.inf, -np.inf], [1e4, 0.0, -1e4]]
        expected = [[top, (1 - top) / 2, (1 - top) / 2], [top, 1 - top, 0], [1, 0, 0], [top, 1 - top, 0]]
        assert 0.5 < top < 1
        np.testing.assert_allclose(scaler.predict_proba(extreme), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("scaler", "n", "message"),
    [
        (SplineScaling("quadratic"), 50, "expected spline to be one of .* got 'quadratic'"),
        (SplineScaling(n_knots=3), 50, "expected n_knots to be an integer of at least 4, got 3"),
        (SplineScaling(n_knots=5.5), 50, "expected n_knots to be an integer of at least 4, got 5.5"),
        (SplineScaling(), 5, "at least n_knots=6 rows, got 5 examples; use TemperatureScaling"),
        (SplineScaling(), 1, "at least n_knots=6 rows, got 1 examples"),
    ],
)
def test_refused(scaler: SplineScaling, n: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scaler.fit(*sampled(n, 3, 1.0))
