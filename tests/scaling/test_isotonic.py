from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.special import log_softmax, softmax

from hf_calib.scaling import IsotonicScaling
from tests.helpers.sampled import sampled

KINDS = ["one_vs_rest", "joint"]


@pytest.fixture
def case(golden: Path) -> dict[str, np.ndarray]:
    with np.load(golden / "posthoc_ets_spline_isotonic_K5.npz") as arrays:
        return dict(arrays)


@pytest.mark.parametrize(("kind", "key"), [("one_vs_rest", "irova_probs_test"), ("joint", "mir_probs_test")])
def test_equals_the_authors_code(case: dict[str, np.ndarray], kind: str, key: str) -> None:
    scaler = IsotonicScaling(kind).fit(case["logits_val"], case["labels_val"])
    theirs = case[key]  # not normalised; 1e-9 of the probabilities is added
    scores = scaler.class_scores(case["logits_test"])
    own = 1e-9 * softmax(case["logits_test"], axis=1)
    np.testing.assert_allclose(scores + own, theirs, rtol=0, atol=1e-12)
    probs = scaler.predict_proba(case["logits_test"])
    np.testing.assert_allclose(probs, theirs / theirs.sum(axis=1, keepdims=True), rtol=0, atol=1e-12)


def pooled(values: np.ndarray) -> np.ndarray:
    """Isotonic regression by its min-max formula: max over starts of min over ends of the mean."""
    n = len(values)
    sums = np.append(0, np.cumsum(values))
    means = [[(sums[j + 1] - sums[i]) / (j + 1 - i) for j in range(i, n)] for i in range(n)]
    return np.array([max(min(means[i][k - i :]) for i in range(k + 1)) for k in range(n)])


def test_one_vs_rest_is_the_isotonic_regression_of_each_class() -> None:
    logits, labels = sampled(40, 3, 2.0)
    probs = softmax(logits, axis=1)
    scores = IsotonicScaling().fit(logits, labels).class_scores(logits)
    for number in range(3):
        order = np.argsort(probs[:, number])
        expected = pooled((labels[order] == number).astype(float))
        np.testing.assert_allclose(scores[order, number], expected, atol=1e-12)


def test_joint_is_the_isotonic_regression_of_all_probabilities() -> None:
    logits, labels = sampled(15, 3, 2.0)
    probs, is_label = softmax(logits, axis=1).ravel(), np.eye(3)[labels].ravel()
    order = np.argsort(probs)
    scores = IsotonicScaling("joint").fit(logits, labels).class_scores(logits)
    np.testing.assert_allclose(scores.ravel()[order], pooled(is_label[order]), atol=1e-12)


@pytest.mark.parametrize("temperature", [0.3, 3.0])
def test_joint_keeps_the_accuracy(temperature: float) -> None:
    logits, labels = sampled(600, 10, temperature)
    fresh = sampled(5000, 10, temperature, seed=1)[0]
    probs = IsotonicScaling("joint").fit(logits, labels).predict_proba(fresh)
    np.testing.assert_array_equal(probs.argmax(axis=1), fresh.argmax(axis=1))


def test_one_vs_rest_mends_classes_that_are_wrong_in_different_ways() -> None:
    rng = np.random.default_rng(0)
    truth = rng.normal(scale=2, size=(6000, 3))
    labels = (truth + rng.gumbel(size=truth.shape)).argmax(axis=1)
    logits = log_softmax(truth, axis=1) + np.array([1.5, 0.0, -1.5])  # one class too high, one too low

    def error(kind: str) -> float:
        probs = IsotonicScaling(kind).fit(logits[:3000], labels[:3000]).predict_proba(logits[3000:])
        return float(np.abs(probs.mean(axis=0) - np.bincount(labels[3000:]) / 3000).max())

    assert error("one_vs_rest") < 0.03 < error("joint")


def test_refused() -> None:
    logits, labels = sampled(20, 3, 1.0)
    with pytest.raises(ValueError, match="expected multiclass to be one of 'one_vs_rest', 'joint'"):
        IsotonicScaling("multi").fit(logits, labels)
    with pytest.raises(ValueError, match="NaN"):
        IsotonicScaling().fit(np.where(logits > 2, np.nan, logits), labels)
    with pytest.raises(TypeError, match="be integers"):
        IsotonicScaling().fit(logits, labels / 2)
    with pytest.raises(ValueError, match="at least 2 classes"):
        IsotonicScaling().fit(logits[:, :1], labels * 0)
    scaler = IsotonicScaling().fit(logits, labels)
    with pytest.raises(ValueError, match="the 3 classes of fit"):
        scaler.predict_proba(logits[:, :2])
