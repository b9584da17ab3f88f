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
    Scaler,
    SplineScaling,
)
from tests.helpers.sampled import sampled

BINNINGS = ["uniform", "equal_mass"]
CURVES = ["one_vs_rest", "joint"]


@pytest.fixture(scope="module")
def case(golden: Path) -> dict[str, np.ndarray]:
    with np.load(golden / "posthoc_ets_spline_isotonic_K5.npz") as arrays:
        return dict(arrays)


def by_loops(probs: np.ndarray, labels: np.ndarray, edges: np.ndarray, new: np.ndarray) -> np.ndarray:
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
        frequency = (labels[members] == column).mean() if members.any() else sum(bins[number]) / 2
        scores[row, column] = frequency
    return scores


@pytest.mark.parametrize("kind", BINNINGS)
@pytest.mark.parametrize(("c", "n_bins"), [(2, 15), (4, 7), (3, 1), (3, 90)])
def test_is_the_frequency_in_the_bin(kind: str, c: int, n_bins: int) -> None:
    logits, labels = sampled(80, c, 2.0)
    fresh = sampled(40, c, 2.0, seed=1)[0]
    scaler = HistogramBinning(n_bins, binning=kind).fit(logits, labels)
    expected = by_loops(softmax(logits, axis=1), labels, scaler.edges_, softmax(fresh, axis=1))
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


def test_a_probability_on_an_edge_is_in_the_bin_below() -> None:
    logits, labels = [[0.0, 0.0], [0.0, 0.0], [2.0, 0.0], [0.0, 2.0]], [0, 1, 0, 1]
    scaler = HistogramBinning(2).fit(logits, labels)
    np.testing.assert_allclose(scaler.frequencies_, [[1 / 3, 1], [1 / 3, 1]])
    np.testing.assert_allclose(scaler.class_scores([[0.0, 0.0]]), [[1 / 3, 1 / 3]])
    by_mass = HistogramBinning(2, binning="equal_mass").fit(logits, labels)
    assert by_mass.edges_[0, 1] == 0.5
    np.testing.assert_allclose(by_mass.frequencies_[0], [1 / 3, 1])


def test_a_row_that_only_got_zeros_keeps_the_models_probabilities() -> None:
    rows = np.array([[0.45, 0.35, 0.2], [0.35, 0.45, 0.2], [0.05, 0.05, 0.9]])
    scaler = HistogramBinning(2).fit(np.log(rows), np.array([2, 2, 2]))
    assert scaler.class_scores(np.log([[0.4, 0.1, 0.5]]))[0, :2].tolist() == [0, 0]
    scaler.frequencies_[:] = 0
    np.testing.assert_allclose(scaler.predict_proba(np.log(rows)), rows, rtol=1e-12)


@pytest.mark.parametrize("scaling", [HistogramBinning(), IsotonicScaling(), IsotonicScaling("joint")])
def test_a_masked_class_stays_masked(scaling: HistogramBinning | IsotonicScaling) -> None:
    """Also where the class of the lowest bin is right now and then."""
    logits, labels = sampled(300, 4, 2.0)
    scaling.fit(logits, labels)
    masked = np.where([False, False, True, False], -np.inf, logits)
    probs = scaling.predict_proba(masked)
    assert (probs[:, 2] == 0).all()
    np.testing.assert_allclose(probs.sum(axis=1), 1)
    assert (scaling.class_scores(masked)[:, 2] == 0).all()


@pytest.mark.parametrize(("kind", "key"), [("one_vs_rest", "irova_probs_test"), ("joint", "mir_probs_test")])
def test_equals_the_authors_code(case: dict[str, np.ndarray], kind: str, key: str) -> None:
    scaler = IsotonicScaling(kind).fit(case["logits_val"], case["labels_val"])
    theirs = case[key]  # not normalised; 1e-9 of the probabilities is added
    scores = scaler.class_scores(case["logits_test"])
    own = 1e-9 * softmax(case["logits_test"], axis=1)
    np.testing.assert_allclose(scores + own, theirs, rtol=0, atol=1e-12)
    probs = scaler.predict_proba(case["logits_test"])
    np.testing.assert_allclose(probs, theirs / theirs.sum(axis=1, keepdims=True), rtol=0, atol=1e-12)


def test_the_spline_is_that_of_the_authors(case: dict[str, np.ndarray]) -> None:
    scaler = SplineScaling().fit(case["logits_val"], case["labels_val"])
    np.testing.assert_allclose(scaler.scores_, np.sort(case["top_scores_val"]), rtol=1e-13)
    expected = case["spline_natural_k6_fitted_at_sorted_val"]
    np.testing.assert_allclose(scaler.accuracies_, expected, rtol=0, atol=1e-12)
    ours = scaler.predict_confidence(case["logits_test"])
    np.testing.assert_allclose(ours, case["spline_natural_k6_test_npinterp"], rtol=0, atol=1e-12)


class TestCurveOfSpline:
    def test_equal_confidences_get_their_accuracy(self) -> None:
        logits = np.tile([[2.0, 0.0], [0.0, 2.0]], (50, 1))
        labels = np.array([0, 1, 1, 1] * 25)  # three right in four
        scaler = SplineScaling().fit(logits, labels)
        assert len(scaler.scores_) == 1
        # The N sums lie at the steps 0, 1 / (N - 1), ..., 1 in the paper's code: a factor of (N - 1) / N.
        exact = scaler.scores_[0] + (0.75 - scaler.scores_[0]) * 99 / 100
        assert scaler.accuracies_[0] == pytest.approx(exact, rel=1e-12)


class TestProbabilitiesOfSpline:
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
        (HistogramBinning(0), 20, "n_bins to be at least 1, got 0"),
        (HistogramBinning(binning="quantile"), 20, "expected binning to be one of .* got 'quantile'"),
        (IsotonicScaling("multi"), 20, "expected multiclass to be one of 'one_vs_rest', 'joint'"),
        (SplineScaling(n_knots=3), 50, "expected n_knots to be at least 4, got 3"),
        (SplineScaling(), 5, "at least n_knots=6 rows, got 5 examples; use TemperatureScaling"),
        (SplineScaling(), 1, "at least n_knots=6 rows, got 1 examples"),
    ],
)
def test_refused(scaler: Scaler, n: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scaler.fit(*sampled(n, 3, 1.0))


SIMPLEX = np.array([(a, b, 1 - a - b) for a, b in product(np.linspace(0, 1, 41), repeat=2) if a + b <= 1])


def noisy(n: int, c: int, temperature: float, noise: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    """Logits `temperature` times too large; a part of the labels is pure noise, which the uniform part corrects."""
    rng = np.random.default_rng(0)
    logits = rng.normal(scale=2, size=(n, c))
    labels = (logits + rng.gumbel(size=(n, c))).argmax(axis=1)
    return logits * temperature, np.where(rng.random(n) < noise, rng.integers(c, size=n), labels)


def mixture(logits: np.ndarray, temperature: float, weights: np.ndarray) -> np.ndarray:
    scaled, plain = softmax(logits / temperature, axis=1), softmax(logits, axis=1)
    return weights[0] * scaled + weights[1] * plain + weights[2] / logits.shape[1]


def mse(probs: np.ndarray, labels: np.ndarray) -> float:
    return float(np.mean((probs - np.eye(probs.shape[1])[labels]) ** 2))


class TestMixtureOfTheAuthors:
    def test_objective_is_at_most_theirs(self, case: dict[str, np.ndarray]) -> None:
        logits, labels = case["logits_val"], case["labels_val"]
        scaler = EnsembleTemperatureScaling().fit(logits, labels)
        ours = mse(scaler.predict_proba(logits), labels)
        assert ours <= float(case["ets_objective_mse_at_w"]) + 1e-10
        assert scaler.temperature_ == pytest.approx(float(case["ets_T"]), rel=1e-6)
        np.testing.assert_allclose(scaler.weights_, case["ets_w"], atol=1e-5)


class TestTemperatureOfMixture:
    @pytest.mark.parametrize("true_temperature", [0.1, 4.0])
    def test_mse_is_the_least_of_a_dense_grid(self, true_temperature: float) -> None:
        logits, labels = noisy(400, 6, true_temperature)
        temperature = EnsembleTemperatureScaling().fit(logits, labels).temperature_
        grid = np.geomspace(0.02, 20, 2000)
        least = min(mse(softmax(logits / t, axis=1), labels) for t in grid)
        assert mse(softmax(logits / temperature, axis=1), labels) <= least + 1e-15

    @pytest.mark.parametrize("factor", [1e-3, 1e3])
    def test_follows_the_scale_of_the_logits(self, factor: float) -> None:
        logits, labels = noisy(400, 6, 1.0)
        one, other = (EnsembleTemperatureScaling().fit(f * logits, labels) for f in (1, factor))
        assert other.temperature_ == pytest.approx(factor * one.temperature_, rel=1e-6)


class TestWeightsOfMixture:
    @pytest.mark.parametrize("true_temperature", [0.5, 3.0])
    @pytest.mark.parametrize("noise", [0.0, 1.0])
    def test_no_point_of_the_simplex_is_better(self, true_temperature: float, noise: float) -> None:
        logits, labels = noisy(300, 4, true_temperature, noise)
        if noise == 1.0:
            logits[np.arange(300), labels] += 0.5  # a little better than chance
        scaler = EnsembleTemperatureScaling().fit(logits, labels)
        ours = mse(scaler.predict_proba(logits), labels)
        others = [mse(mixture(logits, scaler.temperature_, w), labels) for w in SIMPLEX]
        assert ours <= min(others) + 1e-14
        assert scaler.weights_.min() >= 0
        assert scaler.weights_.sum() == pytest.approx(1, abs=1e-15)


class TestEdgesOfMixture:
    def test_saturated_logits(self) -> None:
        logits = np.where(np.eye(3)[[0, 1, 2, 0] * 25], 1e4, -1e4).astype(np.float16)
        labels = np.array([0, 1, 2, 1] * 25)
        probs = EnsembleTemperatureScaling().fit(logits, labels).predict_proba(logits)  # right 3 times in 4
        np.testing.assert_allclose(probs[np.arange(100), logits.argmax(axis=1)], 0.75, atol=1e-8)


def test_the_uniform_part_alone_still_ranks() -> None:
    rng = np.random.default_rng(3)
    logits, labels = rng.normal(size=(200, 3)), rng.integers(0, 3, 200)
    with pytest.warns(UserWarning, match="no better than the average class"):
        scaler = EnsembleTemperatureScaling().fit(logits, labels)
    assert scaler.weights_[1] == pytest.approx(0, abs=1e-12)  # the first part is uniform, too
    probs = scaler.predict_proba(logits)
    np.testing.assert_allclose(probs, 1 / 3, atol=1e-6)
    np.testing.assert_array_equal(probs.argmax(axis=1), logits.argmax(axis=1))
