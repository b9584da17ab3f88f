"""Ensemble temperature scaling against the authors' values and against dense searches of its two problems."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from scipy.special import softmax
from sklearn.exceptions import NotFittedError

from hf_calib.scaling import EnsembleTemperatureScaling
from hf_calib.scaling.curves import MSE_BOUNDS

SIMPLEX = np.array([(a, b, 1 - a - b) for a, b in product(np.linspace(0, 1, 41), repeat=2) if a + b <= 1])


@pytest.fixture(scope="module")
def case(golden: Path) -> dict[str, np.ndarray]:
    with np.load(golden / "posthoc_ets_spline_isotonic_K5.npz") as arrays:
        return dict(arrays)


def sampled(n: int, c: int, temperature: float, noise: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
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


def nll(probs: np.ndarray, labels: np.ndarray) -> float:
    return float(-np.log(probs[np.arange(len(labels)), labels]).mean())


class TestAgainstTheAuthorsCode:
    def test_objective_is_at_most_theirs(self, case: dict[str, np.ndarray]) -> None:
        logits, labels = case["logits_val"], case["labels_val"]
        scaler = EnsembleTemperatureScaling().fit(logits, labels)
        ours = mse(scaler.predict_proba(logits), labels)
        assert ours <= float(case["ets_objective_mse_at_w"]) + 1e-10
        assert scaler.temperature_ == pytest.approx(float(case["ets_T"]), rel=1e-6)
        np.testing.assert_allclose(scaler.weights_, case["ets_w"], atol=1e-5)


class TestTemperature:
    @pytest.mark.parametrize("true_temperature", [0.1, 4.0])
    def test_mse_is_the_least_of_a_dense_grid(self, true_temperature: float) -> None:
        logits, labels = sampled(400, 6, true_temperature)
        temperature = EnsembleTemperatureScaling().fit(logits, labels).temperature_
        grid = np.geomspace(*MSE_BOUNDS, 2000)
        least = min(mse(softmax(logits / t, axis=1), labels) for t in grid)
        assert mse(softmax(logits / temperature, axis=1), labels) <= least + 1e-15

    @pytest.mark.deep
    def test_a_large_problem_that_starts_from_a_sample(self) -> None:
        logits, labels = sampled(45_000, 100, 2.0)
        temperature = EnsembleTemperatureScaling().fit(logits.astype(np.float32), labels).temperature_
        values = [mse(softmax(logits / (temperature * f), axis=1), labels) for f in (0.999, 1, 1.001)]
        assert np.argmin(values) == 1

    @pytest.mark.parametrize("factor", [1e-3, 1e3])
    def test_out_of_bounds(self, factor: float) -> None:
        logits, labels = sampled(400, 6, 1.0)
        with pytest.warns(UserWarning, match=r"searched, \(0\.05, 5\.0\), or far .*criterion=.nll."):
            EnsembleTemperatureScaling().fit(logits * factor, labels)


class TestWeights:
    @pytest.mark.filterwarnings("ignore:The best temperature")
    @pytest.mark.parametrize(("criterion", "loss"), [("mse", mse), ("nll", nll)])
    @pytest.mark.parametrize("true_temperature", [0.5, 3.0])
    @pytest.mark.parametrize("noise", [0.0, 1.0])
    def test_no_point_of_the_simplex_is_better(
        self, criterion: str, loss: object, true_temperature: float, noise: float
    ) -> None:
        assert callable(loss)
        logits, labels = sampled(300, 4, true_temperature, noise)
        if noise == 1.0:
            logits[np.arange(300), labels] += 0.5  # a little better than chance
        scaler = EnsembleTemperatureScaling(criterion).fit(logits, labels)
        ours = loss(scaler.predict_proba(logits), labels)
        others = [loss(mixture(logits, scaler.temperature_, w), labels) for w in SIMPLEX]
        assert ours <= min(others) + 1e-14
        assert scaler.weights_.min() >= 0
        assert scaler.weights_.sum() == pytest.approx(1, abs=1e-15)

    def test_nll_optimality_conditions(self) -> None:
        logits, labels = sampled(2000, 4, 3.0, 0.3)
        scaler = EnsembleTemperatureScaling("nll").fit(logits, labels)
        parts = [mixture(logits, scaler.temperature_, w)[np.arange(2000), labels] for w in np.eye(3)]
        slopes = np.mean(np.array(parts) / (scaler.weights_ @ parts), axis=1)
        assert slopes.max() <= 1 + 1e-7  # no part could gain by more weight
        np.testing.assert_allclose(slopes[scaler.weights_ > 0], 1, atol=1e-7)

    def test_of_equal_parts_only_one_is_taken(self) -> None:
        with pytest.warns(UserWarning, match="The temperature was set to 1"):
            scaler = EnsembleTemperatureScaling().fit(np.zeros((4, 2)), np.array([0, 1, 0, 1]))
        assert sorted(scaler.weights_) == [0, 0, 1]


class TestEdges:
    @pytest.mark.parametrize("criterion", ["mse", "nll"])
    def test_masked_classes_stay_masked(self, criterion: str) -> None:
        logits, labels = sampled(300, 4, 2.0)
        masked = np.hstack([logits, np.full((300, 1), -np.inf)])
        plain = EnsembleTemperatureScaling(criterion).fit(logits, labels)
        scaler = EnsembleTemperatureScaling(criterion).fit(masked, labels)
        np.testing.assert_allclose(scaler.weights_, plain.weights_, atol=1e-7)
        probs = scaler.predict_proba(masked)
        np.testing.assert_allclose(probs[:, :4], plain.predict_proba(logits), atol=1e-7)
        assert (probs[:, 4] == 0).all()

    def test_saturated_logits(self) -> None:
        logits = np.where(np.eye(3)[[0, 1, 2, 0] * 25], 1e4, -1e4).astype(np.float16)
        labels = np.array([0, 1, 2, 1] * 25)
        with pytest.warns(UserWarning, match="at the end of the range that is searched"):
            probs = EnsembleTemperatureScaling().fit(logits, labels).predict_proba(logits)
        # Right 3 times in 4, which the uniform part alone can say.
        np.testing.assert_allclose(probs[np.arange(100), logits.argmax(axis=1)], 0.75, atol=1e-8)

    def test_refused(self) -> None:
        logits, labels = sampled(100, 3, 1.0)
        with pytest.raises(ValueError, match="did you mean 'nll'"):
            EnsembleTemperatureScaling("nl").fit(logits, labels)
        with pytest.raises(NotFittedError):
            EnsembleTemperatureScaling().predict_proba(logits)
        scaler = EnsembleTemperatureScaling().fit(logits, labels)
        with pytest.raises(ValueError, match="have the 3 classes of fit"):
            scaler.predict_proba(np.zeros((2, 4)))
        with pytest.raises(ValueError, match="allow at least one class, got -inf for every class in 1 rows"):
            scaler.predict_proba(np.full((1, 3), -np.inf))


def test_the_uniform_part_alone_still_ranks() -> None:
    rng = np.random.default_rng(3)
    logits, labels = rng.normal(size=(200, 3)), rng.integers(0, 3, 200)
    with pytest.warns(UserWarning, match="below the mean logit of their rows"):
        scaler = EnsembleTemperatureScaling().fit(logits, labels)
    np.testing.assert_array_equal(scaler.weights_, [0, 0, 1])
    probs = scaler.predict_proba(logits)
    np.testing.assert_allclose(probs, 1 / 3, atol=1e-8)
    np.testing.assert_array_equal(probs.argmax(axis=1), logits.argmax(axis=1))
