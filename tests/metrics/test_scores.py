"""Root Brier score and its decomposition, OOD AUROC, risk and coverage: against definitions."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from scipy.special import softmax
from sklearn.isotonic import IsotonicRegression

import hf_calib.metrics as metrics
from hf_calib.metrics.sums import uniform_bins
from tests.helpers.sampled import EXACT, random_predictions

# Brier score


def test_brier_score_of_certain_predictions_is_never_below_zero() -> None:
    probs = softmax(
        np.random.default_rng(0).uniform(20, 40, (5000, 1))
        * np.eye(4)[np.arange(5000) % 4],
        axis=1,
    )
    score = metrics.brier_score(probs, np.arange(5000) % 4)
    assert 0 <= score < 1e-15
    assert metrics.root_brier_score(probs, np.arange(5000) % 4) == pytest.approx(
        np.sqrt(score)
    )


def loop_over_groups(
    probs: np.ndarray, soft: np.ndarray, n_bins: int
) -> tuple[float, float]:
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
    expected = loop_over_groups(
        narrow.astype(np.float64), np.eye(n_classes)[labels], n_bins
    )
    assert parts == pytest.approx(expected, **EXACT)
    assert sum(parts) == pytest.approx(metrics.brier_score(narrow, labels), rel=1e-15)


# Out of distribution


def test_ood_auroc_refuses_what_it_cannot_compare() -> None:
    two, three = np.full((2, 2), 0.5), np.full((2, 3), 1 / 3)
    with pytest.raises(
        ValueError,
        match="probs_out to have 2 columns, got 3 columns; pass the probs of one",
    ):
        metrics.ood_auroc(two, three)
    with pytest.raises(
        ValueError, match=r"each row of probs_out to sum to 1, got 0\.9 in row 1"
    ):
        metrics.ood_auroc(two, [[0.5, 0.5], [0.5, 0.4]])
    with pytest.raises(
        ValueError, match="score to be one of 'entropy', 'max_probability', got 'msp'"
    ):
        metrics.ood_auroc(two, two, score="msp")


# Risk and coverage


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("least", [0, 18])
def test_confidences_that_are_nearly_1_keep_their_order(
    least: int, dtype: type
) -> None:
    """The order is that of the logits' gaps, as far as the dtype of the probabilities can tell them apart."""
    rng = np.random.default_rng(0)
    gaps = rng.uniform(least, 36, 3_000)
    labels = (rng.random(3_000) < np.exp(-(gaps - least) / 3)).astype(int)
    probs = softmax(np.stack([gaps, 0 * gaps, 0 * gaps], axis=1).astype(dtype), axis=1)
    known = gaps if dtype is np.float64 else probs.max(axis=1).astype(np.float64)
    exact = metrics.risk_coverage_curve(known, labels == 0).risk.mean()
    found = metrics.area_under_risk_coverage(probs, labels)
    assert found == pytest.approx(exact, rel=5e-3)
    if dtype is np.float64:
        by_rank = metrics.corp_decomposition(probs, labels).discrimination
        assert by_rank == pytest.approx(discrimination(gaps, labels == 0), rel=1e-2)


def discrimination(scores: np.ndarray, correct: np.ndarray) -> float:
    """That of the Brier score, by the best rising function of the scores."""
    right = correct.astype(float)
    fitted = IsotonicRegression().fit(scores, right).predict(scores)
    spread = np.square(right - right.mean()) - np.square(right - fitted)
    return float(spread.mean())


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
    confidences, correct = (
        rng.integers(1, 4, 7) / 4,
        rng.integers(0, 2, 7).astype(float),
    )
    curve = metrics.risk_coverage_curve(confidences, correct)
    np.testing.assert_allclose(curve.coverage, np.arange(1, 8) / 7)
    np.testing.assert_allclose(
        curve.risk, mean_over_orders(confidences, correct), atol=1e-14
    )


@pytest.mark.parametrize(
    ("confidences", "correct", "message"),
    [
        ([0.5], [1, 0], r"got shapes \(1,\) and \(2,\)"),
        (
            [0.5, np.nan],
            [1, 0],
            "confidences to be finite, got 1 NaN or infinite values of 2",
        ),
    ],
)
def test_risk_coverage_curve_refuses_what_is_no_curve(
    confidences: list, correct: list, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        metrics.risk_coverage_curve(confidences, correct)
