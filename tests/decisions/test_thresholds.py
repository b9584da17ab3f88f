"""Thresholds per label: against all thresholds tried one by one, and the promised precision by simulation."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from scipy.special import expit
from scipy.stats import binom
from sklearn.metrics import f1_score

from hf_calib._errors import InputTypeError, InputValueError
from hf_calib.decisions import LabelThresholds


def drawn(
    n: int, *, seed: int = 0, shifts: tuple[float, ...] = (0.0, -1.5, -3.0)
) -> tuple[np.ndarray, np.ndarray]:
    """Probs (n, C) of labels that are ever rarer, too low by a factor of two in the logit, and the labels."""
    rng = np.random.default_rng(seed)
    logits = 2 * rng.standard_normal((n, len(shifts))) + np.array(shifts)
    labels = (rng.random(logits.shape) < expit(logits)).astype(int)
    return expit(logits / 2 - 0.5), labels


def all_cuts(probs: np.ndarray) -> list[float]:
    values = np.unique(probs)
    return [0.0, *((values[1:] + values[:-1]) / 2), 1.0]


def f1(labels: np.ndarray, predicted: np.ndarray) -> float:
    """Of one label, or micro F1 of several."""
    return 2 * (labels * predicted).sum() / (labels.sum() + predicted.sum())


def test_f1_macro_is_the_best_f1_of_each_label() -> None:
    probs, labels = drawn(200)
    rule = LabelThresholds().fit(probs, labels)
    for c in range(3):
        best = max(f1(labels[:, c], probs[:, c] > t) for t in all_cuts(probs[:, c]))
        assert f1_score(labels[:, c], rule.predict(probs)[:, c]) == pytest.approx(best)


def test_cost_is_the_least() -> None:
    probs, labels = drawn(300)
    rule = LabelThresholds(costs=(1, 5)).fit(probs, labels)

    def cost(c: int, predicted: np.ndarray) -> float:
        return (predicted & (labels[:, c] == 0)).sum() + 5 * (
            ~predicted & (labels[:, c] == 1)
        ).sum()

    for c in range(3):
        assert cost(c, rule.predict(probs)[:, c]) == min(
            cost(c, probs[:, c] > t) for t in all_cuts(probs[:, c])
        )


def test_a_rare_label_is_named() -> None:
    probs, labels = drawn(400)
    labels[:, 2] = np.arange(400) < 5
    message = "Label 2: fewer than 10 positives, which determine no threshold well"
    with pytest.warns(UserWarning, match=message):
        rule = LabelThresholds().fit(probs, labels)
    best = max(f1(labels[:, 2], probs[:, 2] > t) for t in all_cuts(probs[:, 2]))
    found = f1(labels[:, 2], rule.predict(probs)[:, 2])
    assert found == pytest.approx(best)


@pytest.mark.filterwarnings("ignore:Label 1")
def test_a_label_without_positives_is_never_predicted() -> None:
    probs, labels = drawn(400, shifts=(0.0, -1.5))
    labels[:, 1] = 0
    for options in ({}, {"costs": (1, 5)}, {"precision": 0.6}):
        with pytest.warns(UserWarning, match="The rule never predicts label 1: no"):
            rule = LabelThresholds(**options).fit(probs, labels)
        assert rule.predict(probs).any(axis=0).tolist() == [True, False]


def test_a_label_that_is_always_predicted_leaves_its_share_of_delta() -> None:
    """A precision that all rows have needs no threshold, so the other label is tested at all of delta."""
    probs, labels = drawn(500, seed=2, shifts=(0.0, 0.0))
    labels[:, 0] = 1
    both = LabelThresholds(precision=0.75).fit(probs, labels)
    alone = LabelThresholds(precision=0.75).fit(probs[:, 1:], labels[:, 1:])
    half = LabelThresholds(precision=0.75, delta=0.025)
    half.fit(probs[:, 1:], labels[:, 1:])
    assert both.thresholds_[0] == 0
    assert alone.thresholds_[0] <= both.thresholds_[1] < half.thresholds_[0]


@pytest.mark.slow
def test_the_promised_precision_is_broken_in_at_most_delta_of_the_draws() -> None:
    """Of all labels together; the slack is that of 200 draws at a true rate of delta."""
    probs, labels = drawn(20_000)
    rounded = probs.astype(np.float32).astype(np.float64)
    rng = np.random.default_rng(1)
    broken, predicted = 0, 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(200):
            rows = rng.integers(len(probs), size=500)
            rule = LabelThresholds(precision=0.8).fit(probs[rows], labels[rows])
            found = rounded > rule.thresholds_
            counts = found.sum(axis=0)
            broken += bool(((labels * found).sum(axis=0) < 0.8 * counts).any())
            predicted += counts[0] > 0
    assert broken <= binom.ppf(0.999, 200, 0.05)
    assert predicted > 180


def test_ties_are_predicted_together() -> None:
    probs = np.repeat([[0.9], [0.5], [0.1]], [20, 20, 20], axis=0)
    labels = np.repeat([[1], [1], [0]], [20, 20, 20], axis=0)
    rule = LabelThresholds().fit(probs, labels)
    assert rule.thresholds_[0] == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"precision": 0.9, "costs": (1, 5)},
            r"precision or costs to be given, not both, got precision=0.9 with costs=\(1, 5\); leave",
        ),
        ({"precision": 1.5}, r"precision to lie in \(0, 1\), got 1.5"),
        ({"delta": 0.0}, r"delta to lie in \(0, 1\), got 0.0"),
        ({"costs": (1, 0)}, r"costs to be two numbers above 0, got \(1, 0\)"),
        ({"costs": (1, np.nan)}, r"costs to be two numbers above 0, got \(1, nan\)"),
        ({"costs": (1, 2, 3)}, r"costs to be two numbers above 0, got \(1, 2, 3\)"),
    ],
)
def test_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputValueError, match=message):
        LabelThresholds(**options)  # type: ignore[arg-type]


def test_rows() -> None:
    probs, labels = drawn(50)
    for wrong, message in (
        ((probs * 2, labels), r"probs to lie in \[0, 1\]"),
        ((probs, labels[:, :2]), r"labels to have shape \(50, 3\)"),
        ((probs, labels * -100), "labels to be 0 or 1, got also -100"),
        (
            (probs, labels * 0),
            "labels to hold a positive, got none; pass rows that have labels",
        ),
    ):
        with pytest.raises(InputValueError, match=message):
            LabelThresholds().fit(*wrong)
    rule = LabelThresholds(precision=0.99)
    with pytest.raises(
        InputValueError, match=r"to promise precision=0.99 with delta=0.025, got 50"
    ):
        rule.fit(probs[:, :2], labels[:, :2])


def test_measured_by_a_metric_of_several_labels() -> None:
    probs, labels = drawn(200)
    rule = LabelThresholds().fit(probs, labels)
    message = "expected measure to be called on a rule with one class per row, got LabelThresholds"
    with pytest.raises(InputTypeError, match=message):
        rule.measure(probs, labels)
