"""Maps of probabilities against loops, formulas and the values of their authors' code."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from scipy.special import softmax

from hf_calib.scaling import (
    EnsembleTemperatureScaling,
    HistogramBinning,
    IsotonicScaling,
    SplineScaling,
)
from tests.helpers.sampled import sampled

BINNINGS = ["uniform", "equal_mass"]


@pytest.fixture(scope="module")
def case(golden: Path) -> dict[str, np.ndarray]:
    with np.load(golden / "posthoc_ets_spline_isotonic_K5.npz") as arrays:
        return dict(arrays)


def by_loops(
    probs: np.ndarray, labels: np.ndarray, edges: np.ndarray, new: np.ndarray
) -> np.ndarray:
    """The frequency of the class in the bin (low, high] of each new probability; the midpoint if empty."""
    scores = np.empty_like(new)
    for row, column in np.ndindex(*new.shape):
        low_high = zip(edges[column, :-1], edges[column, 1:], strict=True)
        bins = list(low_high)
        # The first bin takes what lies below it, the last what lies above.
        found = [b for b, (_, high) in enumerate(bins[:-1]) if new[row, column] <= high]
        number = found[0] if found else len(bins) - 1
        low = -np.inf if number == 0 else bins[number][0]
        high = np.inf if number == len(bins) - 1 else bins[number][1]
        members = (probs[:, column] > low) & (probs[:, column] <= high)
        frequency = (
            (labels[members] == column).mean()
            if members.any()
            else sum(bins[number]) / 2
        )
        scores[row, column] = frequency
    return scores


@pytest.mark.parametrize("kind", BINNINGS)
@pytest.mark.parametrize(("c", "n_bins"), [(2, 15), (4, 7), (3, 1), (3, 90)])
def test_is_the_frequency_in_the_bin(kind: str, c: int, n_bins: int) -> None:
    logits, labels = sampled(80, c, 2.0)
    fresh = sampled(40, c, 2.0, seed=1)[0]
    scaler = HistogramBinning(n_bins, binning=kind).fit(logits, labels)
    expected = by_loops(
        softmax(logits, axis=1), labels, scaler.edges_, softmax(fresh, axis=1)
    )
    np.testing.assert_allclose(scaler.class_scores(fresh), expected, rtol=1e-12)
    expected += 1e-9 * softmax(fresh, axis=1)
    expected /= expected.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(scaler.predict_proba(fresh), expected, rtol=1e-9)


def test_equal_mass_bins_hold_equal_numbers() -> None:
    logits, labels = sampled(1000, 3, 2.0)
    scaler = HistogramBinning(10, binning="equal_mass").fit(logits, labels)
    for column, edges in zip(softmax(logits, axis=1).T, scaler.edges_, strict=True):
        counts = np.bincount(np.searchsorted(edges[1:-1], column, side="left"))
        assert len(counts) == 10
        assert counts.max() - counts.min() <= 2


@pytest.mark.parametrize(
    "scaling", [HistogramBinning(), IsotonicScaling(), IsotonicScaling("joint")]
)
def test_a_masked_class_stays_masked(
    scaling: HistogramBinning | IsotonicScaling,
) -> None:
    """Also where the class of the lowest bin is right now and then."""
    logits, labels = sampled(300, 4, 2.0)
    scaling.fit(logits, labels)
    masked = np.where([False, False, True, False], -np.inf, logits)
    probs = scaling.predict_proba(masked)
    assert (probs[:, 2] == 0).all()
    np.testing.assert_allclose(probs.sum(axis=1), 1)
    assert (scaling.class_scores(masked)[:, 2] == 0).all()


@pytest.mark.parametrize(
    ("kind", "key"), [("one_vs_rest", "irova_probs_test"), ("joint", "mir_probs_test")]
)
def test_equals_the_authors_code(
    case: dict[str, np.ndarray], kind: str, key: str
) -> None:
    scaler = IsotonicScaling(kind).fit(case["logits_val"], case["labels_val"])
    theirs = case[key]  # not normalised; 1e-9 of the probabilities is added
    scores = scaler.class_scores(case["logits_test"])
    own = 1e-9 * softmax(case["logits_test"], axis=1)
    np.testing.assert_allclose(scores + own, theirs, rtol=0, atol=1e-12)
    probs = scaler.predict_proba(case["logits_test"])
    np.testing.assert_allclose(
        probs, theirs / theirs.sum(axis=1, keepdims=True), rtol=0, atol=1e-12
    )


def test_the_spline_is_that_of_the_authors(case: dict[str, np.ndarray]) -> None:
    scaler = SplineScaling().fit(case["logits_val"], case["labels_val"])
    np.testing.assert_allclose(
        scaler.scores_, np.sort(case["top_scores_val"]), rtol=1e-13
    )
    expected = case["spline_natural_k6_fitted_at_sorted_val"]
    np.testing.assert_allclose(scaler.accuracies_, expected, rtol=0, atol=1e-12)
    ours = scaler.predict_confidence(case["logits_test"])
    np.testing.assert_allclose(
        ours, case["spline_natural_k6_test_npinterp"], rtol=0, atol=1e-12
    )


def test_the_spline_keeps_a_predicted_class_that_is_never_right_first() -> None:
    logits, _ = sampled(400, 5, 1.0)
    scaler = SplineScaling().fit(logits, logits.argmin(axis=1))
    fresh, _ = sampled(2000, 5, 1.0, seed=1)
    ranked = np.sort(scaler.predict_proba(fresh), axis=1)
    assert (ranked[:, -1] > ranked[:, -2]).all()
    np.testing.assert_array_equal(scaler.predict(fresh), fresh.argmax(axis=1))


def test_the_only_class_that_is_left_has_all_of_the_probability() -> None:
    scaler = SplineScaling().fit(*sampled(400, 3, 3.0))
    probs = scaler.predict_proba([[-np.inf, 1.0, -np.inf]])
    np.testing.assert_array_equal(probs, [[0, 1, 0]])


def test_the_temperature_of_equal_logits_stays_1() -> None:
    scaler = EnsembleTemperatureScaling()
    with pytest.warns(UserWarning, match="logits of each row are equal. It is 1"):
        scaler.fit(np.full((5, 3), 0.1), np.array([0, 1, 2, 0, 1]))
    assert scaler.temperature_ == 1


def test_uniform_probabilities_still_rank_the_classes() -> None:
    logits, labels = sampled(200, 4, 1.0)
    scaler = EnsembleTemperatureScaling().fit(logits, labels)
    scaler.weights_ = np.array([0.0, 0.0, 1.0])
    np.testing.assert_allclose(scaler.predict_proba(logits), 0.25, rtol=1e-8)
    np.testing.assert_array_equal(scaler.predict(logits), logits.argmax(axis=1))


SIMPLEX = np.array(
    [
        (a, b, 1 - a - b)
        for a, b in product(np.linspace(0, 1, 41), repeat=2)
        if a + b <= 1
    ]
)


def noisy(
    n: int, c: int, temperature: float, noise: float = 0.1
) -> tuple[np.ndarray, np.ndarray]:
    """Logits `temperature` times too large; a part of the labels is pure noise, which the uniform part corrects."""
    rng = np.random.default_rng(0)
    logits = rng.normal(scale=2, size=(n, c))
    labels = (logits + rng.gumbel(size=(n, c))).argmax(axis=1)
    return logits * temperature, np.where(
        rng.random(n) < noise, rng.integers(c, size=n), labels
    )


def mixture(logits: np.ndarray, temperature: float, weights: np.ndarray) -> np.ndarray:
    scaled, plain = softmax(logits / temperature, axis=1), softmax(logits, axis=1)
    return weights[0] * scaled + weights[1] * plain + weights[2] / logits.shape[1]


def mse(probs: np.ndarray, labels: np.ndarray) -> float:
    return float(np.mean((probs - np.eye(probs.shape[1])[labels]) ** 2))


def test_objective_is_at_most_theirs(case: dict[str, np.ndarray]) -> None:
    logits, labels = case["logits_val"], case["labels_val"]
    scaler = EnsembleTemperatureScaling().fit(logits, labels)
    ours = mse(scaler.predict_proba(logits), labels)
    assert ours <= float(case["ets_objective_mse_at_w"]) + 1e-10
    assert scaler.temperature_ == pytest.approx(float(case["ets_T"]), rel=1e-6)
    np.testing.assert_allclose(scaler.weights_, case["ets_w"], atol=1e-5)


@pytest.mark.parametrize("true_temperature", [0.1, 4.0])
def test_mse_is_the_least_of_a_dense_grid(true_temperature: float) -> None:
    logits, labels = noisy(400, 6, true_temperature)
    temperature = EnsembleTemperatureScaling().fit(logits, labels).temperature_
    grid = np.geomspace(0.02, 20, 2000)
    least = min(mse(softmax(logits / t, axis=1), labels) for t in grid)
    assert mse(softmax(logits / temperature, axis=1), labels) <= least + 1e-15


def test_the_farthest_temperature_of_the_brier_score() -> None:
    """Large logits that rank no label first: the score falls up to 30 times the bound of T."""
    logits = np.array([[1e7, 0.0], [0.0, 1e7]] * 5)
    scaler = EnsembleTemperatureScaling()
    with pytest.warns(UserWarning, match="no better than the average class"):
        scaler.fit(logits, np.array([1, 0] * 5))
    assert scaler.temperature_ == pytest.approx(3e6, rel=1e-12)


@pytest.mark.parametrize("true_temperature", [0.5, 3.0])
@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_no_point_of_the_simplex_is_better(
    true_temperature: float, noise: float
) -> None:
    logits, labels = noisy(300, 4, true_temperature, noise)
    if noise == 1.0:
        logits[np.arange(300), labels] += 0.5  # a little better than chance
    scaler = EnsembleTemperatureScaling().fit(logits, labels)
    ours = mse(scaler.predict_proba(logits), labels)
    others = [mse(mixture(logits, scaler.temperature_, w), labels) for w in SIMPLEX]
    assert ours <= min(others) + 1e-14
    assert scaler.weights_.min() >= 0
    assert scaler.weights_.sum() == pytest.approx(1, abs=1e-15)
