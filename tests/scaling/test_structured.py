"""Structured scaling against the authors' maps, and against the objective written down again."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import expit, log_softmax

from hf_calib.scaling import StructuredMatrixScaling, StructuredVectorScaling, TemperatureScaling

KINDS = [StructuredVectorScaling, StructuredMatrixScaling]
Structured = StructuredVectorScaling | StructuredMatrixScaling


def sampled(n: int, c: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    logits = 2 * rng.normal(size=(n, c))
    return 2 * logits, (logits + np.linspace(0, 1, c) + rng.gumbel(size=(n, c))).argmax(axis=1)


def nll(logits: np.ndarray, labels: np.ndarray) -> float:
    return float(-log_softmax(logits, axis=1)[np.arange(len(labels)), labels].mean())


class TestAuthorsMaps:
    """probmetrics 1.3.0, `SVSCalibrator` and `SMSCalibrator`: their `_fit_bfgs` on the logits divided by the

    plain temperature, their objective minimised by torch down to a gradient of 1e-8 (by default theirs stops up
    to 5e-4 away).
    """

    @pytest.mark.parametrize("penalty", [1.0, 0.1])
    @pytest.mark.parametrize("case", ["N300_K5", "N400_K12", "N40_K6_absent"])
    def test_are_ours(self, case: str, penalty: float, golden: Path) -> None:
        with np.load(golden / "structured_scaling.npz") as arrays:
            logits, labels = arrays[f"{case}_logits"], arrays[f"{case}_labels"]
            theirs = {name: arrays[f"{case}_penalty{penalty:g}_{name}"] for name in NAMES}
            temperature = float(arrays[f"{case}_temperature"])
        assert TemperatureScaling().fit(logits, labels).temperature_ == pytest.approx(temperature, rel=1e-9)
        for name, kind in zip(("svs", "sms"), KINDS, strict=True):
            ours = kind(penalty).fit(logits, labels)
            np.testing.assert_allclose(ours.weight_, theirs[f"{name}_weight"], atol=1e-6)
            np.testing.assert_allclose(ours.bias_, theirs[f"{name}_bias"], atol=1e-6)


NAMES = ["svs_weight", "svs_bias", "sms_weight", "sms_bias"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_strong_penalty_leaves_the_temperature(kind: type[Structured]) -> None:
    logits, labels = sampled(300, 4)
    temperature = TemperatureScaling().fit(logits, labels)
    np.testing.assert_allclose(
        kind(1e9).fit(logits, labels).transform(logits), temperature.transform(logits), atol=1e-6
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_weaker_penalty_fits_better(kind: type[Structured]) -> None:
    logits, labels = sampled(500, 5)
    losses = [nll(kind(p).fit(logits, labels).transform(logits), labels) for p in (10.0, 1.0, 0.1, 0.001)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.01


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["one class", "one row", "absent", "separable", "constant", "inverted"])
def test_data_that_determine_little(kind: type[Structured], case: str) -> None:
    """Finite, and better than uniform probabilities by whatever is known, or equal to them."""
    logits, labels = sampled(60, 8)
    if case == "one class":
        labels[:] = 3
    elif case == "one row":
        logits, labels = logits[:1], labels[:1]
    elif case == "absent":
        labels[labels > 4] = 0
    elif case == "separable":
        labels = logits.argmax(axis=1)
    elif case == "constant":
        logits = np.zeros_like(logits)
    else:
        labels = logits.argmin(axis=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        scaler = kind().fit(logits, labels)
    assert np.isfinite(scaler.weight_).all()
    assert np.isfinite(scaler.bias_).all()
    assert nll(scaler.transform(logits), labels) <= np.log(8) + 1e-6


def test_a_temperature_that_is_not_determined_is_said() -> None:
    logits, _ = sampled(60, 4)
    for kind in KINDS:
        with pytest.warns(UserWarning, match="All 60 labels are ranked first") as caught:
            kind().fit(logits, logits.argmax(axis=1))
        assert [warning.filename for warning in caught] == [__file__]


class TestTwoClasses:
    @pytest.mark.parametrize("penalty", [1.0, 0.01])
    def test_is_the_affine_map_of_the_difference(self, penalty: float) -> None:
        logits, labels = sampled(200, 2)
        temperature = TemperatureScaling().fit(logits, labels).temperature_
        difference = (logits[:, 1] - logits[:, 0]) / temperature

        def loss(theta: np.ndarray) -> float:
            scores = (1 + theta[0]) * difference + theta[1]
            ridge = penalty * (4 * theta[0] ** 2 + theta[1] ** 2) / 200
            return float(np.logaddexp(0, np.where(labels == 1, -scores, scores)).mean() + ridge)

        found = minimize(loss, np.zeros(2), method="Nelder-Mead", options={"xatol": 1e-10, "fatol": 1e-15}).x
        expected = expit((1 + found[0]) * difference + found[1])
        for kind in KINDS:
            scaler = kind(penalty).fit(logits, labels)
            np.testing.assert_allclose(scaler.predict_proba(logits)[:, 1], expected, atol=1e-6)
            assert scaler.weight_.shape == ((2,) if kind is StructuredVectorScaling else (2, 2))

    def test_the_ridge_is_that_of_more_classes(self) -> None:
        """C (|v|^2 + |b|^2) for v = (v, v) and b = (-b/2, b/2) is 4 v^2 + b^2."""
        v, b = 0.3, 0.7
        assert 2 * (2 * v**2 + 2 * (b / 2) ** 2) == pytest.approx(4 * v**2 + b**2)

    def test_a_row_with_a_masked_class_tells_nothing(self) -> None:
        logits, labels = sampled(200, 2)
        masked = np.array([[1.0, -np.inf], [-np.inf, 2.0]])
        with_them = StructuredVectorScaling().fit(np.vstack([logits, masked]), [*labels, 0, 1])
        alone = StructuredVectorScaling().fit(logits, labels)
        np.testing.assert_allclose(with_them.weight_, alone.weight_, rtol=0.02)
        np.testing.assert_array_equal(with_them.predict_proba(masked), [[1, 0], [0, 1]])


class TestMultiLabel:
    def test_each_label_is_a_problem_of_two_classes(self) -> None:
        rng = np.random.default_rng(0)
        logits = rng.normal(size=(300, 3)) * 3
        labels = (rng.random((300, 3)) < expit(logits / 2 + [-1, 0, 1])).astype(int)
        labels[:40, 1] = -100
        scaler = StructuredVectorScaling(0.5, multi_label=True).fit(logits, labels)
        temperature = TemperatureScaling(multi_label=True).fit(logits, labels).temperature_
        for column in range(3):
            known = labels[:, column] >= 0
            x, sign = logits[known, column] / temperature, np.where(labels[known, column] == 1, 1, -1)

            def loss(theta: np.ndarray, x: np.ndarray = x, sign: np.ndarray = sign) -> float:
                scores = (1 + theta[0]) * x + theta[1]
                return float(
                    np.logaddexp(0, -sign * scores).sum() + 0.5 * (4 * theta[0] ** 2 + theta[1] ** 2)
                )

            found = minimize(
                loss, np.zeros(2), method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-12}
            ).x
            assert scaler.weight_[column] * temperature == pytest.approx(1 + found[0], abs=1e-4)
            assert scaler.bias_[column] == pytest.approx(found[1], abs=1e-4)

    def test_a_label_without_examples_keeps_the_shared_temperature(self) -> None:
        rng = np.random.default_rng(0)
        logits = rng.normal(size=(100, 2))
        labels = (rng.random((100, 2)) < expit(logits)).astype(int)
        labels[:, 1] = -100
        scaler = StructuredVectorScaling(multi_label=True).fit(logits, labels)
        temperature = TemperatureScaling(multi_label=True).fit(logits, labels).temperature_
        assert scaler.weight_[1] == pytest.approx(1 / temperature)
        assert scaler.bias_[1] == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("penalty", [0.0, -1.0, np.nan, np.inf, "1", None])
def test_refused_penalties(kind: type[Structured], penalty: object) -> None:
    with pytest.raises(ValueError, match="expected penalty to be a finite number above 0"):
        kind(penalty).fit(*sampled(50, 3))
