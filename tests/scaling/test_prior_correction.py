"""The correction by known class frequencies of other data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.special import log_softmax, softmax

from hf_calib import InputError
from hf_calib.metrics import negative_log_likelihood
from hf_calib.scaling import (
    MatrixScaling,
    PriorCorrection,
    TemperatureScaling,
    VectorScaling,
)

EVEN = np.full(3, 1 / 3)
CENTRES = np.array([[0.0, 0.0], [2.5, 0.0], [1.0, 2.0]])
SHIFTED = np.array([0.7, 0.2, 0.1])


def draw(
    rng: np.random.Generator, n: int, prior: np.ndarray = EVEN
) -> tuple[np.ndarray, np.ndarray]:
    """Normal features of three classes: the logits of the exact posterior under even shares, and labels."""
    labels = rng.choice(3, size=n, p=prior)
    features = CENTRES[labels] + rng.normal(size=(n, 2))
    return features @ CENTRES.T - (CENTRES**2).sum(axis=1) / 2, labels


class TestCorrection:
    def test_is_the_rule_of_bayes(self) -> None:
        logits, labels = draw(np.random.default_rng(0), 4000, SHIFTED)
        correction = PriorCorrection(EVEN, SHIFTED)
        wanted = softmax(logits, axis=1) * SHIFTED
        probs = correction.predict_proba(logits)
        np.testing.assert_allclose(
            probs, wanted / wanted.sum(axis=1, keepdims=True), rtol=1e-12
        )
        before = negative_log_likelihood(softmax(logits, axis=1), labels)
        assert negative_log_likelihood(probs, labels) < before - 0.1
        np.testing.assert_allclose(probs.mean(axis=0), SHIFTED, atol=0.02)
        back = PriorCorrection(SHIFTED, EVEN).transform(correction.transform(logits))
        np.testing.assert_allclose(back, logits, atol=1e-12)

    @pytest.mark.parametrize(
        "first", [TemperatureScaling(), VectorScaling(), MatrixScaling()]
    )
    def test_comes_after_the_map(self, first: Any) -> None:
        logits, labels = draw(np.random.default_rng(0), 500)
        first.fit(2 * logits, labels)
        correction = PriorCorrection(EVEN, SHIFTED, first)
        wanted = log_softmax(first.transform(2 * logits) + np.log(SHIFTED), axis=1)
        np.testing.assert_allclose(
            log_softmax(correction.transform(2 * logits), axis=1), wanted, atol=1e-9
        )
        np.testing.assert_allclose(
            correction.affine_map()(2 * logits), correction.transform(2 * logits)
        )

    def test_a_masked_class_stays_masked(self) -> None:
        probs = PriorCorrection(EVEN, SHIFTED).predict_proba([[1.0, -np.inf, 0.0]])
        assert probs[0, 1] == 0
        assert probs.sum() == pytest.approx(1)

    @pytest.mark.parametrize(
        ("prior", "message"),
        [
            ([0.5, 0.3, 0.1], "to sum to 1, got 0.9; divide it by its sum, or pass"),
            ([0.5, 0.5, 0.0], "to be above 0 for every class, got 0 for class 2; give"),
            ([0.5, 0.5, np.nan], "to be above 0 for every class, got nan for class 2"),
            ([0.5, 0.5], "to have the 3 classes of train_prior, got 2"),
        ],
    )
    def test_refused(self, prior: Any, message: str) -> None:
        with pytest.raises(InputError, match=f"^expected target_prior {message}"):
            PriorCorrection(EVEN, prior)
        with pytest.raises(InputError, match="to hold numbers, got dtype bool"):
            PriorCorrection(np.array([True, True, True]), SHIFTED)
