"""What every scaler says to input that is not what it seems, and what scikit-learn asks of a classifier."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from scipy.special import softmax
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score

from hf_calib._errors import InputTypeError, InputValueError
from hf_calib.scaling import (
    AutoScaling,
    DirichletScaling,
    EnsembleTemperatureScaling,
    HistogramBinning,
    IsotonicScaling,
    MatrixScaling,
    PerLabelTemperatureScaling,
    SplineScaling,
    StructuredMatrixScaling,
    StructuredVectorScaling,
    TemperatureScaling,
    VectorScaling,
)
from tests.helpers.sampled import sampled

LOGITS, LABELS = sampled(80, 3, 2.0)
ALL: list[Any] = [
    TemperatureScaling,
    VectorScaling,
    MatrixScaling,
    StructuredVectorScaling,
    StructuredMatrixScaling,
    DirichletScaling,
    EnsembleTemperatureScaling,
    SplineScaling,
    IsotonicScaling,
    HistogramBinning,
    AutoScaling,
]


@pytest.mark.parametrize("kind", ALL)
class TestEach:
    def test_numbers_whose_squares_overflow(self, kind: Any) -> None:
        with pytest.raises(
            InputValueError, match=r"expected logits to be at most 1e\+100, got .*e\+30[01]; divide"
        ):
            kind().fit(1e300 * LOGITS, LABELS)

    @pytest.mark.parametrize("scale", [1e-30, 1e-300, 0.0])
    def test_numbers_that_are_as_good_as_equal(self, kind: Any, scale: float) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            probs = kind().fit(scale * LOGITS, LABELS).predict_proba(scale * LOGITS)
        assert np.isfinite(probs).all()

    def test_probabilities_are_no_logits(self, kind: Any) -> None:
        with pytest.warns(UserWarning, match=r"as probabilities do\. .* Pass numpy\.log\(probs\) instead"):
            kind().fit(softmax(LOGITS, axis=1).astype(np.float32), LABELS)

    def test_other_classes_than_those_of_fit(self, kind: Any) -> None:
        scaler = kind().fit(LOGITS, LABELS)
        for wrong in (LOGITS[:, :2], np.c_[LOGITS, LOGITS[:, 0]]):
            with pytest.raises(
                InputValueError, match=r"expected logits to have the 3 classes of fit, got shape"
            ):
                scaler.predict_proba(wrong)

    def test_it_is_a_classifier_of_scikit_learn(self, kind: Any) -> None:
        scaler = kind().fit(LOGITS, LABELS)
        np.testing.assert_array_equal(scaler.classes_, [0, 1, 2])
        predicted = scaler.predict(LOGITS)
        np.testing.assert_array_equal(predicted, scaler.predict_proba(LOGITS).argmax(axis=1))
        assert scaler.score(LOGITS, LABELS) == accuracy_score(LABELS, predicted)
        assert not hasattr(kind(), "classes_")

    def test_labels_that_are_names(self, kind: Any) -> None:
        with pytest.raises(
            InputTypeError, match=r"be integers, got dtype <U1; number them by the columns of logits"
        ):
            kind().fit(LOGITS, np.array(list("abc"))[LABELS])


def test_several_labels_a_row_are_predicted_as_0_and_1() -> None:
    labels = (np.random.default_rng(0).random(LOGITS.shape) < 1 / (1 + np.exp(-LOGITS))).astype(int)
    for scaler in (TemperatureScaling(multi_label=True), PerLabelTemperatureScaling()):
        scaler.fit(LOGITS, labels)
        np.testing.assert_array_equal(scaler.predict(LOGITS), LOGITS > 0)
        np.testing.assert_array_equal(scaler.classes_, [0, 1, 2])


def test_a_model_is_no_criterion() -> None:
    message = (
        "expected criterion to be a name, got a LogisticRegression; a scaler wraps no model: fit it on the m"
    )
    with pytest.raises(InputTypeError, match=message):
        TemperatureScaling(LogisticRegression()).fit(LOGITS, LABELS)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [TemperatureScaling, AutoScaling, StructuredVectorScaling])
def test_a_word_is_no_truth_value(kind: Any) -> None:
    with pytest.raises(
        InputTypeError, match="expected multi_label to be True or False, got 'no'; write it without"
    ):
        kind(multi_label="no").fit(LOGITS, LABELS)


def test_a_seed_below_0() -> None:
    with pytest.raises(
        InputValueError, match="expected random_state to be at least 0, got -1; random_state=0 is"
    ):
        AutoScaling(random_state=-1).fit(LOGITS, LABELS)
