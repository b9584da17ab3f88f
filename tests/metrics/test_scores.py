"""Root Brier score and its decomposition, OOD AUROC, risk and coverage: against definitions and by hand."""

from __future__ import annotations

from itertools import permutations, product

import numpy as np
import pytest
from scipy.special import softmax
from scipy.stats import entropy

import hf_calib.metrics as metrics
from hf_calib.metrics.sums import uniform_bins
from tests.helpers.sampled import EXACT, labels_by, random_predictions

# Brier score


def test_root_brier_score_is_the_root_and_bounds_the_calibration_error() -> None:
    for seed in range(20):
        probs, labels = random_predictions(200, 5, seed)
        root = metrics.root_brier_score(probs, labels)
        assert root**2 == pytest.approx(metrics.brier_score(probs, labels), **EXACT)
        assert metrics.expected_calibration_error(probs, labels, norm="l2") <= root
        assert metrics.brier_decomposition(probs, labels).calibration <= root**2


def test_brier_score_of_certain_predictions_is_never_below_zero() -> None:
    probs = softmax(
        np.random.default_rng(0).uniform(20, 40, (5000, 1)) * np.eye(4)[np.arange(5000) % 4], axis=1
    )
    score = metrics.brier_score(probs, np.arange(5000) % 4)
    assert 0 <= score < 1e-15
    assert metrics.root_brier_score(probs, np.arange(5000) % 4) == pytest.approx(np.sqrt(score))


def loop_over_groups(probs: np.ndarray, soft: np.ndarray, n_bins: int) -> tuple[float, float]:
    """Calibration and refinement by their definitions, each on its own."""
    calibration = refinement = 0.0
    order = np.argsort(-probs, axis=1, kind="stable")
    residuals = np.take_along_axis(probs - soft, order, axis=1)
    bins = uniform_bins(probs.max(axis=1), n_bins)
    for index in np.unique(bins):
        members = residuals[bins == index]
        calibration += len(members) * (members.mean(axis=0) ** 2).sum()
        refinement += ((members - members.mean(axis=0)) ** 2).sum()
    return calibration / len(probs), refinement / len(probs)


@pytest.mark.parametrize("n_classes", [2, 3, 30])
@pytest.mark.parametrize("n_bins", [1, 15, 200])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_brier_decomposition_equals_its_definition_and_adds_up(
    n_classes: int, n_bins: int, dtype: type
) -> None:
    probs, labels = random_predictions(500, n_classes)
    narrow = probs.astype(dtype)
    parts = metrics.brier_decomposition(narrow, labels, n_bins=n_bins)
    expected = loop_over_groups(narrow.astype(np.float64), np.eye(n_classes)[labels], n_bins)
    assert parts == pytest.approx(expected, **EXACT)
    assert sum(parts) == pytest.approx(metrics.brier_score(narrow, labels), rel=1e-15)


def test_over_confidence_is_seen_although_every_class_is_predicted_equally_often() -> None:
    honest = np.full((1000, 10), 0.4 / 9)
    honest[np.arange(1000), np.arange(1000) % 10] = 0.6
    labels = labels_by(honest, np.random.default_rng(0))
    bold = softmax(3 * np.log(honest), axis=1)
    before, after = metrics.brier_decomposition(bold, labels), metrics.brier_decomposition(honest, labels)
    assert after.calibration < 0.01
    assert before.calibration > 0.1
    assert before.refinement == pytest.approx(after.refinement, abs=1e-12)  # the same information


def test_brier_decomposition_of_one_example_and_of_perfect_predictions() -> None:
    assert metrics.brier_decomposition([[0.3, 0.7]], [0]) == pytest.approx((0.98, 0), **EXACT)
    assert metrics.brier_decomposition(np.eye(3), np.arange(3)) == (0, 0)
    with pytest.raises(ValueError, match="n_bins to be at least 1, got 0"):
        metrics.brier_decomposition([[0.3, 0.7]], [0], n_bins=0)


# Out of distribution


@pytest.mark.parametrize("score", ["entropy", "max_probability"])
@pytest.mark.parametrize("decimals", [1, 12])
def test_ood_auroc_equals_a_count_over_all_pairs(score: str, decimals: int) -> None:
    rng = np.random.default_rng(0)
    first = np.round(rng.uniform(0.5, 1, 60), decimals), np.round(rng.uniform(0.4, 0.9, 45), decimals)
    inside, outside = (np.stack([p, 1 - p], axis=1) for p in first)
    low, high = (
        np.round(entropy(rows, axis=1), 12) if score == "entropy" else -rows.max(axis=1)
        for rows in (inside, outside)
    )
    pairs = [(out > row) + 0.5 * (out == row) for row, out in product(low, high)]
    assert metrics.ood_auroc(inside, outside, score=score) == pytest.approx(np.mean(pairs), **EXACT)


def test_ood_auroc_of_separate_equal_and_swapped_sets() -> None:
    sure, unsure = random_predictions(300, 4)[0], np.full((200, 4), 0.25)
    assert metrics.ood_auroc(sure, unsure) == 1
    assert metrics.ood_auroc(unsure, sure) == 0
    assert metrics.ood_auroc(sure, sure) == pytest.approx(0.5, **EXACT)
    assert metrics.ood_auroc(np.eye(4), np.eye(4)[[0]]) == 0.5
    narrow = metrics.ood_auroc(sure.astype(np.float16), unsure.astype(np.float32), score="max_probability")
    assert narrow == 1


def test_ood_auroc_accepts_probabilities_that_rounding_put_below_zero() -> None:
    assert metrics.ood_auroc([[1 + 1e-7, -1e-7]], [[0.5, 0.5]]) == 1


def test_ood_auroc_refuses_what_it_cannot_compare() -> None:
    two, three = np.full((2, 2), 0.5), np.full((2, 3), 1 / 3)
    with pytest.raises(ValueError, match="probs_out to have 2 columns, got 3 columns; pass the probs of one"):
        metrics.ood_auroc(two, three)
    with pytest.raises(ValueError, match=r"each row of probs_out to sum to 1, got 0\.9 in row 1"):
        metrics.ood_auroc(two, [[0.5, 0.5], [0.5, 0.4]])
    with pytest.raises(ValueError, match=r"probs_in to be finite, got nan"):
        metrics.ood_auroc([[np.nan, 0.5]], two)
    with pytest.raises(ValueError, match="score to be one of 'entropy', 'max_probability', got 'msp'"):
        metrics.ood_auroc(two, two, score="msp")


# Risk and coverage


def mean_over_orders(confidences: np.ndarray, correct: np.ndarray) -> np.ndarray:
    """The risk at each k, averaged over every order of the examples that confidence allows."""
    curves = []
    for order in permutations(range(len(confidences))):
        index = list(order)
        if (np.diff(confidences[index]) <= 0).all():
            curves.append(np.cumsum(1 - correct[index]) / np.arange(1, len(index) + 1))
    return np.mean(curves, axis=0)


@pytest.mark.parametrize("seed", range(5))
def test_risk_equals_its_mean_over_the_orders_of_ties(seed: int) -> None:
    rng = np.random.default_rng(seed)
    confidences, correct = rng.integers(1, 4, 7) / 4, rng.integers(0, 2, 7).astype(float)
    curve = metrics.risk_coverage_curve(confidences, correct)
    np.testing.assert_allclose(curve.coverage, np.arange(1, 8) / 7)
    np.testing.assert_allclose(curve.risk, mean_over_orders(confidences, correct), atol=1e-14)


def test_area_under_risk_coverage_by_hand() -> None:
    probs = [[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.4, 0.6]]
    for labels, area in (
        ([0, 0, 0, 1], (1 / 3 + 1 / 4) / 4),
        ([1, 0, 1, 1], (1 + 1 / 2 + 1 / 3 + 1 / 4) / 4),
        ([0, 0, 1, 1], 0),
        ([1, 1, 0, 0], 1),
    ):
        assert metrics.area_under_risk_coverage(probs, labels) == pytest.approx(area, **EXACT)


def test_a_change_of_confidence_that_keeps_the_order_changes_nothing() -> None:
    probs, labels = random_predictions(500, 2)
    colder = softmax(np.log(probs) / 2, axis=1)
    ours = metrics.area_under_risk_coverage(probs, labels)
    assert metrics.area_under_risk_coverage(colder, labels) == pytest.approx(ours, **EXACT)
    assert ours < 1 - metrics.accuracy(probs, labels) + 0.1


@pytest.mark.parametrize(
    ("confidences", "correct", "message"),
    [
        ([], [], r"have one shape \(N,\), N >= 1, got shapes \(0,\) and \(0,\)"),
        ([0.5], [1, 0], r"got shapes \(1,\) and \(2,\)"),
        ([[0.5, 0.5]], [[1, 0]], r"got shapes \(1, 2\)"),
        ([0.5, np.nan], [1, 0], "confidences to be finite, got 1 NaN or infinite values of 2"),
        ([0.5, 0.6], [1, np.inf], "correct to be finite, got 1 NaN or infinite"),
    ],
)
def test_risk_coverage_curve_refuses_what_is_no_curve(confidences: list, correct: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        metrics.risk_coverage_curve(confidences, correct)
