"""The search by calibration error: its short cuts find what scoring every temperature finds."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import softmax

from hf_calib.scaling import TemperatureScaling
from hf_calib.scaling import temperature as module
from hf_calib.scaling._interpolation import ACCURACY, interpolation
from hf_calib.scaling._objectives import SigmoidObjective, SoftmaxObjective
from tests.helpers.sampled import sampled

TENTHS = np.arange(1, 101) / 10


class TestConfidences:
    @pytest.mark.parametrize("scale", [0.1, 1.0, 30.0, 1e4])
    def test_squares_are_as_good_as_exponentials(self, scale: float) -> None:
        logits, labels = sampled(100, 20, scale)
        ours = SoftmaxObjective(logits, labels).confidences_at((1 / TENTHS).tolist())
        expected = [softmax(logits / temperature, axis=1).max(axis=1) for temperature in TENTHS]
        np.testing.assert_allclose(ours, expected, rtol=1e-13)

    def test_in_any_order_and_more_than_once(self) -> None:
        objective = SoftmaxObjective(*sampled(50, 5, 1.0))
        betas = [2.0, 1.0, 0.5, 1.0, 3.0, 4.0]
        alone = [objective.confidences(beta) for beta in betas]
        np.testing.assert_allclose(objective.confidences_at(betas), alone, rtol=1e-14)

    def test_of_sigmoids(self) -> None:
        logits = np.array([[2.0, -4.0], [-np.inf, 1e4]])
        objective = SigmoidObjective(logits, np.array([[True, True], [False, True]]))
        found = objective.confidences_at([1.0, 0.5])
        larger = np.array([1 / (1 + np.exp(-2)), 1 / (1 + np.exp(-4)), 1, 1])
        np.testing.assert_allclose(found[0], larger, rtol=1e-14)
        np.testing.assert_allclose(found[1, 0], 1 / (1 + np.exp(-1)), rtol=1e-14)
        np.testing.assert_array_equal(objective.correct, [1, 0, 1, 1])


class TestInterpolation:
    @pytest.mark.parametrize("grid", [TENTHS, np.linspace(0.5, 3, 80), np.geomspace(0.02, 4, 300)])
    def test_every_gap_at_every_scale(self, grid: np.ndarray) -> None:
        found = interpolation(1 / grid)
        assert found is not None
        nodes, coefficients = found
        gaps = np.concatenate([[0], np.geomspace(1e-6, 1e5, 3000)])
        ours = np.exp(-np.outer(gaps, nodes)) @ coefficients.T
        assert np.abs(ours - np.exp(-np.outer(gaps, 1 / grid))).max() <= 2 * ACCURACY
        assert np.abs(coefficients).sum(axis=1).max() < 1e4  # rounding is not blown up

    def test_nodes_are_few_and_double_each_other(self) -> None:
        found = interpolation(1 / TENTHS)
        assert found is not None
        nodes = found[0]
        assert len(nodes) == 40
        assert sum(node / 2 not in nodes for node in nodes) == 4

    @pytest.mark.parametrize("grid", [[1.0], [1.0, 2.0], np.geomspace(1e-3, 1e3, 500), TENTHS[::5]])
    def test_where_it_does_not_pay(self, grid: np.ndarray) -> None:
        assert interpolation(1 / np.asarray(grid)) is None


class TestSearch:
    @pytest.fixture
    def every_score(self, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
        monkeypatch.setattr(module, "_MANY_CLASSES", 10**9)
        return monkeypatch

    @staticmethod
    def data(kind: str) -> tuple[np.ndarray, np.ndarray]:
        logits, labels = sampled(400, 150, 1.7, 0)
        if kind == "saturated":
            return np.where(logits == logits.max(axis=1, keepdims=True), 1e4, -1e4), labels
        if kind == "masked":
            masked = np.random.default_rng(0).random(logits.shape) < 0.5
            masked[np.arange(400), labels] = False
            return np.where(masked, -np.inf, logits), labels
        if kind == "on the edge of a bin":  # three equal logits, far above the rest: 1/3 at every T
            logits[:200] -= 1e4
            logits[:200, :3] = 5.0
            labels[:200] %= 3
        return logits, labels

    @pytest.mark.parametrize("criterion", ["ece", "adaptive_ece"])
    @pytest.mark.parametrize("kind", ["plain", "saturated", "masked", "on the edge of a bin"])
    def test_is_that_of_every_score(self, criterion: str, kind: str, every_score: pytest.MonkeyPatch) -> None:
        logits, labels = self.data(kind)
        slow = TemperatureScaling(criterion).fit(logits, labels).temperature_
        every_score.undo()
        assert TemperatureScaling(criterion).fit(logits, labels).temperature_ == slow

    def test_of_equally_good_temperatures_the_first(self) -> None:
        logits, labels = self.data("saturated")
        assert TemperatureScaling("ece").fit(logits, labels).temperature_ == 0.1
        assert TemperatureScaling("ece", grid=TENTHS[::-1]).fit(logits, labels).temperature_ == 10.0

    @pytest.mark.parametrize("multi_label", [False, True])
    def test_confidences_are_held_for_a_few_temperatures_only(
        self, multi_label: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "_CONFIDENCES", 1)  # then for as many as take an eighth of the logits
        logits, labels = sampled(300, 17, 2.0)
        if multi_label:
            labels = logits > np.random.default_rng(5).normal(size=logits.shape)
        few = TemperatureScaling("ece", multi_label=multi_label).fit(logits, labels).temperature_
        monkeypatch.undo()
        assert TemperatureScaling("ece", multi_label=multi_label).fit(logits, labels).temperature_ == few
