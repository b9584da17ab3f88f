"""Metrics of label distributions: what they must equal, and refusals."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import entr, softmax

import hf_calib.metrics as metrics
from tests.helpers.sampled import EXACT

NAMES = [
    "accuracy",
    "area_under_risk_coverage",
    "brier_decomposition",
    "brier_score",
    "classwise_calibration_error",
    "expected_calibration_error",
    "maximum_calibration_error",
    "negative_log_likelihood",
    "root_brier_score",
]


def random_soft(
    n_examples: int, n_classes: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    truth = softmax(3 * rng.standard_normal((n_examples, n_classes)), axis=1)
    probs = softmax(
        np.log(truth) * 1.7 + 0.5 * rng.standard_normal(truth.shape), axis=1
    )
    return probs, truth


# What they must equal


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n_classes", [2, 10, 40])
def test_one_hot_distributions_give_what_class_indices_give(
    name: str, n_classes: int
) -> None:
    probs, truth = random_soft(500, n_classes)
    labels = truth.argmax(axis=1)
    labels[::3] = 0
    metric = getattr(metrics, name)
    hard = metric(probs, labels)
    for dtype in (np.float16, np.float32, np.float64):
        assert metric(probs, np.eye(n_classes, dtype=dtype)[labels]) == pytest.approx(
            hard, **EXACT
        )


@pytest.mark.parametrize("name", [n for n in NAMES if n != "brier_decomposition"])
def test_predicting_the_truth_is_perfect(name: str) -> None:
    _, truth = random_soft(500, 5)
    top = truth.max(axis=1)
    perfect = {
        "accuracy": top.mean(),
        "negative_log_likelihood": entr(truth).sum(axis=1).mean(),
        "area_under_risk_coverage": (
            np.cumsum(1 - np.sort(top)[::-1]) / np.arange(1, 501)
        ).mean(),
    }
    assert getattr(metrics, name)(truth, truth) == pytest.approx(
        perfect.get(name, 0), **EXACT
    )


def test_scores_equal_their_mean_over_labels_drawn_from_the_distributions() -> None:
    probs, truth = random_soft(300, 4)
    rows = np.repeat(
        probs, 4, axis=0
    )  # each row once for each class it may turn out to be
    log_losses = -np.log(rows[np.arange(1200), np.arange(1200) % 4])
    assert metrics.negative_log_likelihood(probs, truth) == pytest.approx(
        log_losses @ truth.ravel() / 300, **EXACT
    )
    squares = (
        ((rows - np.tile(np.eye(4), (300, 1))) ** 2).sum(axis=1) @ truth.ravel() / 300
    )
    spread = (1 - (truth**2).sum(axis=1)).mean()
    assert metrics.brier_score(probs, truth) + spread == pytest.approx(squares, **EXACT)


def test_a_share_of_a_class_of_probability_zero_is_large_but_finite() -> None:
    value = metrics.negative_log_likelihood([[1.0, 0.0]], [[0.75, 0.25]])
    assert value == pytest.approx(708.396418532264 / 4)
    assert metrics.negative_log_likelihood([[1.0, 0.0]], [[1.0, 0.0]]) == 0


@pytest.mark.parametrize("name", [*NAMES, "true_calibration_error"])
def test_chunks_order_and_width_of_floats_do_not_matter(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    probs, truth = random_soft(300, 4)
    probs = probs.astype(np.float32).astype(float)
    metric, order = getattr(metrics, name), np.random.default_rng(2).permutation(300)
    whole = metric(probs, truth)
    assert metric(probs[order], truth[order]) == pytest.approx(whole, **EXACT)
    assert metric(probs.astype(np.float32), truth) == pytest.approx(whole, **EXACT)
    assert metric(np.asfortranarray(probs), np.asfortranarray(truth)) == pytest.approx(
        whole, **EXACT
    )
    monkeypatch.setattr("hf_calib.metrics.checks.CHUNK_ELEMENTS", 20)
    assert metric(probs, truth) == pytest.approx(whole, **EXACT)


# True calibration error


def test_true_calibration_error_is_the_mean_distance() -> None:
    probs, truth = random_soft(200, 7)
    assert metrics.true_calibration_error(probs, truth) == pytest.approx(
        np.mean([np.linalg.norm(p - eta) for p, eta in zip(probs, truth, strict=True)]),
        **EXACT,
    )
    assert metrics.true_calibration_error(truth, truth) == 0
    assert metrics.true_calibration_error(np.eye(2), np.eye(2)[::-1]) == pytest.approx(
        np.sqrt(2)
    )


# What users get wrong

GOOD = np.array([[0.9, 0.1], [0.4, 0.6]])


@pytest.mark.parametrize("name", [*NAMES, "true_calibration_error"])
@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([[0.9, 0.1]], r"labels to have shape \(2, 2\), got shape \(1, 2\)"),
        ([[0.5, 0.3, 0.2]] * 2, r"labels to have shape \(2, 2\), got shape \(2, 3\)"),
        (
            [[0.9, 0.1], [0.9, 0.3]],
            r"row of labels to sum to 1, got 1\.2 in row 1; divide each row by its",
        ),
        ([[0.9, 0.1], [np.nan, 0.3]], r"labels to be finite, got nan in row 1"),
        (
            [[31.0, 20.0], [0.5, 0.5]],
            r"lie in \[0, 1\], got 31 in row 0; divide each row by its sum",
        ),
        ([[1.1, -0.1], [0.5, 0.5]], r"labels to lie in \[0, 1\], got 1\.1 in row 0"),
    ],
)
def test_bad_distributions_are_refused(name: str, labels: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(metrics, name)(GOOD, np.array(labels))
