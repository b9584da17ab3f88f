"""CORP: the decomposition and the curve against scikit-learn's isotonic regression, and the band by simulation."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.isotonic import IsotonicRegression

from hf_calib.metrics import (
    accuracy,
    area_under_risk_coverage,
    corp_curve,
    corp_decomposition,
    negative_log_likelihood,
)

Array = NDArray[np.float64]


def sample(n_rows: int, shift: float, seed: int) -> tuple[Array, NDArray[np.int64]]:
    rng = np.random.default_rng(seed)
    top = np.round(0.5 + 0.49 * rng.beta(4, 1.5, n_rows), 2)  # with ties
    right = rng.random(n_rows) < top - shift
    return np.stack([top, 1 - top], axis=1), np.where(right, 0, 1)


@pytest.mark.parametrize("score", ["brier", "log"])
@pytest.mark.parametrize("shift", [-0.05, 0.0, 0.2])
def test_the_parts_are_those_of_an_isotonic_regression(score: str, shift: float) -> None:
    probs, labels = sample(800, shift, 0)
    top, right = probs[:, 0], (labels == 0).astype(float)
    recalibrated = IsotonicRegression(y_min=0, y_max=1).fit_transform(top, right)

    def mean(stated: Array) -> float:
        if score == "brier":
            return float(((stated - right) ** 2).mean())
        stated = np.clip(stated, 1e-38, 1)
        return float(-np.where(right == 1, np.log(stated), np.log(np.clip(1 - stated, 1e-38, 1))).mean())

    found = corp_decomposition(probs, labels, score=score)
    overall = mean(np.full_like(top, right.mean()))
    assert found.score == pytest.approx(mean(top))
    assert found.miscalibration == pytest.approx(mean(top) - mean(recalibrated), abs=1e-12)
    assert found.discrimination == pytest.approx(overall - mean(recalibrated), abs=1e-12)
    assert found.uncertainty == pytest.approx(overall)
    assert found.score == pytest.approx(found.miscalibration - found.discrimination + found.uncertainty)


def test_a_model_that_knows_nothing_and_one_that_is_recalibrated() -> None:
    labels = np.array([0, 0, 1, 0])
    constant = corp_decomposition(np.tile([0.75, 0.25], (4, 1)), labels)
    assert constant[1:3] == (0.0, 0.0)
    assert constant.score == constant.uncertainty == 0.1875
    perfect = corp_decomposition(np.eye(2)[labels], labels)
    assert perfect == (0.0, 0.0, 0.0, 0.0)  # all right: there is nothing to tell


def test_the_curve_never_falls_and_is_that_of_the_different_confidences() -> None:
    probs, labels = sample(500, 0.1, 1)
    curve = corp_curve(probs, labels, n_resamples=100)
    np.testing.assert_array_equal(curve.confidences, np.unique(probs[:, 0]))
    assert (np.diff(curve.recalibrated) >= 0).all()
    assert (curve.low <= curve.high).all()
    expected = IsotonicRegression().fit(probs[:, 0], labels == 0).predict(curve.confidences)
    np.testing.assert_allclose(curve.recalibrated, expected, atol=1e-9)
    again = corp_curve(probs, labels, n_resamples=100)
    np.testing.assert_array_equal(curve.low, again.low)
    shuffled = np.random.default_rng(0).permutation(500)
    np.testing.assert_allclose(
        corp_curve(probs[shuffled], labels[shuffled], n_resamples=1).recalibrated, curve.recalibrated
    )


def test_the_band_holds_the_curve_of_a_calibrated_model_at_nine_points_of_ten() -> None:
    inside, left = [], 0
    for seed in range(60):
        curve = corp_curve(*sample(400, 0.0, seed), n_resamples=200)
        held = (curve.low <= curve.recalibrated) & (curve.recalibrated <= curve.high)
        inside.append(held[5:-5].mean())  # pointwise; at the ends steps of few rows jump
        left += not held.all()
    assert 0.85 <= np.mean(inside) <= 0.97
    assert left > 30  # so that leaving it somewhere shows nothing
    outside = corp_curve(*sample(2000, 0.15, 0), n_resamples=200)
    assert (outside.recalibrated < outside.low).mean() > 0.8


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: corp_decomposition([[0.9, 0.1]], [0], score="nll"), "score to be one of 'brier', 'log'"),
        (lambda: corp_decomposition([[0.9, 0.3]], [0]), "probs"),
        (lambda: corp_decomposition(np.empty((0, 2)), []), "probs"),
        (lambda: corp_curve([[0.9, 0.1]], [2]), "labels"),
        (lambda: corp_curve([[0.9, 0.1]], [0], confidence_level=1.5), "confidence_level"),
        (lambda: corp_curve([[0.9, 0.1]], [0], n_resamples=0), "n_resamples"),
        (lambda: corp_curve([[np.nan, 0.1]], [0]), "probs"),
    ],
)
def test_refused(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]


def test_one_row() -> None:
    assert corp_decomposition([[0.9, 0.1]], [0]).uncertainty == 0.0
    curve = corp_curve([[0.9, 0.1]], [1], n_resamples=20)
    assert curve.recalibrated.tolist() == [0.0]
    assert accuracy([[0.9, 0.1]], [1]) == 0.0


@pytest.mark.parametrize("n_rows", [6, 2])
def test_ties_that_rounding_broke_are_ties(n_rows: int) -> None:
    """0.7 and the next float64 above it, as a division by a row's sum leaves them."""
    exact = np.full(n_rows, 0.7)
    broken = np.where(np.arange(n_rows) % 2 == 0, np.nextafter(0.7, 1), 0.7)
    correct = (np.arange(n_rows) % 2 == 0).astype(int)
    probs, nearly = (np.stack([top, 1 - top], axis=1) for top in (exact, broken))
    labels = 1 - correct
    for score in ("brier", "log"):
        wanted = corp_decomposition(probs, labels, score=score)
        assert corp_decomposition(nearly, labels, score=score) == pytest.approx(wanted, abs=1e-12)
    assert corp_curve(nearly, labels, n_resamples=1).recalibrated.tolist() == [0.5]
    assert area_under_risk_coverage(nearly, labels) == 0.5


def test_a_wrong_certainty_costs_as_much_as_in_the_log_likelihood() -> None:
    certain = np.array([[1.0, 0.0]])
    found = corp_decomposition(certain, [1], score="log").score
    assert found == pytest.approx(negative_log_likelihood(certain, [1]))
    assert found == pytest.approx(708.4, abs=0.1)


def test_the_score_is_of_the_confidences_as_they_are() -> None:
    """Confidences near 1 that are one in float32 differ in what a wrong answer costs."""
    rest = np.array([1e-9, 1e-12])
    found = corp_decomposition(np.stack([1 - rest, rest], axis=1), [1, 1], score="log")
    assert found.score == pytest.approx(-np.log(rest).mean(), rel=1e-4)
