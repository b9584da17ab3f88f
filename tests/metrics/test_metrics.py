"""The one-shot metrics against the papers' code and on what users get wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import softmax

import hf_calib.metrics as metrics
from hf_calib.metrics import CalibrationState
from hf_calib.metrics.sums import TopLabel, top_label_error
from tests.helpers.sampled import (
    EXACT,
    GOLDEN_EDGE_CASES,
    GOLDEN_PREDICTIONS,
    random_predictions,
)

# What every function of (probs, labels) promises is tested for each of these; other files test the rest.
NAMES = [
    "accuracy",
    "area_under_risk_coverage",
    "brier_score",
    "classwise_calibration_error",
    "expected_calibration_error",
    "maximum_calibration_error",
    "negative_log_likelihood",
    "root_brier_score",
]
ALL_METRICS = [getattr(metrics, name) for name in NAMES]


@pytest.fixture(params=GOLDEN_PREDICTIONS)
def predictions(request: pytest.FixtureRequest, golden: Path) -> dict[str, np.ndarray]:
    with np.load(golden / f"metrics_{request.param}.npz") as file:
        arrays = dict(file)
    arrays["probs"] = softmax(arrays["logits"], axis=1)
    return arrays


# Against the papers' code


@pytest.mark.parametrize("n_bins", [15, 10])
def test_calibration_errors_equal_the_papers_code(
    predictions: dict[str, np.ndarray], n_bins: int
) -> None:
    probs, labels = predictions["probs"], predictions["labels"]

    def error(**options: str) -> float:
        return metrics.expected_calibration_error(
            probs, labels, n_bins=n_bins, **options
        )

    assert error() == pytest.approx(predictions[f"ece_b{n_bins}"], **EXACT)
    assert error(binning="quantile") == pytest.approx(
        predictions[f"adaece_b{n_bins}"], **EXACT
    )
    assert error(norm="l2") == pytest.approx(predictions[f"l2ce_b{n_bins}"], **EXACT)
    assert error(norm="max") == pytest.approx(predictions[f"mce_b{n_bins}"], **EXACT)
    mce = metrics.maximum_calibration_error(probs, labels, n_bins=n_bins)
    assert mce == error(norm="max")


@pytest.mark.parametrize("n_bins", [15, 10])
def test_classwise_error_equals_the_papers_code_where_every_class_occurs(
    predictions: dict[str, np.ndarray], n_bins: int
) -> None:
    probs, labels = predictions["probs"], predictions["labels"]
    n_classes = probs.shape[1]
    ours = metrics.classwise_calibration_error(probs, labels, n_bins=n_bins)
    # Their average stops at the largest label; what is left of ours is the gap of the absent classes,
    # where any probability at all is too much.
    n_theirs = labels.max() + 1
    absent = probs[:, n_theirs:].mean(axis=0).sum()
    theirs = predictions[f"classwise_ece_b{n_bins}"]
    assert ours == pytest.approx((n_theirs * theirs + absent) / n_classes, **EXACT)


def test_scores_equal_the_papers_code(predictions: dict[str, np.ndarray]) -> None:
    probs, labels = predictions["probs"], predictions["labels"]
    assert metrics.negative_log_likelihood(probs, labels) == pytest.approx(
        predictions["nll"], **EXACT
    )
    assert metrics.brier_score(probs, labels) == pytest.approx(
        predictions["brier_sum_over_classes"], **EXACT
    )
    assert metrics.accuracy(probs, labels) == predictions["accuracy"]


@pytest.mark.parametrize("case", GOLDEN_EDGE_CASES)
def test_edge_cases_equal_the_papers_code(golden: Path, case: str) -> None:
    with np.load(golden / "metrics_edges.npz") as file:
        confidences, correct = (
            file[f"{case}__conf"],
            file[f"{case}__correct"].astype(float),
        )
        ece, mce, adaptive = (
            file[f"{case}__{key}_b15"] for key in ("ece_linspace", "mce", "adaece")
        )
    assert top_label_error(TopLabel(confidences, correct)) == pytest.approx(
        ece, **EXACT
    )
    assert top_label_error(TopLabel(confidences, correct), norm="max") == pytest.approx(
        mce, **EXACT
    )
    ours = top_label_error(TopLabel(confidences, correct), binning="quantile")
    is_least = confidences == confidences.min()
    if np.ptp(confidences) == 0:  # their 0 is an artefact: no example is in any bin
        assert adaptive == 0
        assert ours == pytest.approx(ece, **EXACT)
    elif is_least.sum() == 1:
        assert ours == pytest.approx(adaptive, **EXACT)
    else:  # Theirs drops all ties of the smallest confidence, up to a fifth of the rows.
        left_out = abs((confidences - correct)[is_least].sum()) / len(correct)
        assert adaptive < ours <= adaptive + left_out + 1e-12


def test_a_tie_of_the_smallest_confidence_is_not_left_out() -> None:
    probs = np.repeat([[0.6, 0.4], [0.9, 0.1]], 50, axis=0)
    labels = np.repeat([1, 0, 1], [50, 45, 5])
    state = CalibrationState(n_classes=2)
    state.update(probs, labels)
    for value in (
        metrics.expected_calibration_error(probs, labels, binning="quantile"),
        state.compute()["adaptive_ece"],
    ):
        assert value == pytest.approx(0.3, abs=1e-9)


@pytest.mark.parametrize("metric", ALL_METRICS, ids=NAMES)
def test_order_layout_and_width_do_not_matter_and_inputs_are_left_alone(
    metric: object,
) -> None:
    probs, labels = random_predictions(400, 5)
    before, value = (probs.copy(), labels.copy()), metric(probs, labels)
    assert type(value) is float
    order = np.random.default_rng(1).permutation(400)
    assert metric(probs[order], labels[order]) == pytest.approx(value, **EXACT)
    wide = np.zeros((800, 10))
    wide[::2, ::2] = probs
    for layout in (np.asfortranarray(probs), wide[::2, ::2]):
        assert metric(layout, labels) == pytest.approx(value, **EXACT)
    for dtype in (np.float16, np.float32):
        narrow = probs.astype(dtype)
        assert metric(narrow, labels) == metric(narrow.astype(np.float64), labels)
    np.testing.assert_array_equal(probs, before[0])
    np.testing.assert_array_equal(labels, before[1])


def test_perfect_and_hopeless_predictions() -> None:
    probs, labels = np.eye(3), np.arange(3)
    for metric in ALL_METRICS:
        assert metric(probs, labels) == (1 if metric is metrics.accuracy else 0)
    wrong = (labels + 1) % 3
    assert metrics.brier_score(probs, wrong) == 2
    assert metrics.expected_calibration_error(probs, wrong) == 1
    assert metrics.negative_log_likelihood(probs, wrong) == pytest.approx(
        708.396418532264
    )


# What users get wrong

GOOD = np.array([[0.9, 0.1], [0.4, 0.6]])


@pytest.mark.parametrize("metric", ALL_METRICS, ids=NAMES)
@pytest.mark.parametrize(
    ("probs", "labels", "error", "message"),
    [
        (
            [[4.0, -3.0], [0.4, 0.6]],
            [0, 1],
            ValueError,
            r"got 4 in row 0; .*softmax\(logits",
        ),
        ([[1e308, 1e308], [0.4, 0.6]], [0, 1], ValueError, r"lie in \[0, 1\]"),
        (
            [[np.nan, 0.1], [np.nan, np.inf]],
            [0, 1],
            ValueError,
            r"be finite, got nan in row 0",
        ),
        (
            [[0.9, 0.1], [0.9, 0.6]],
            [0, 1],
            ValueError,
            r"sum to 1, got 1\.5 in row 1; .*independent labels",
        ),
        (
            [[0.9], [0.6]],
            [0, 0],
            ValueError,
            r"sum to 1, got 0\.9 in row 0; .*np\.hstack\(\[1 - p, p\]\)",
        ),
        (
            [0.9, 0.6],
            [0, 1],
            ValueError,
            r"shape \(N, C\), got shape \(2,\); .*np\.stack",
        ),
        (
            np.empty((0, 2)),
            [],
            ValueError,
            r"hold at least one value, .* got shape \(0, 2\)",
        ),
        (
            [[1, 0], [0, 1]],
            [0, 1],
            TypeError,
            r"float array, got dtype int64; pass probs\.astype\(float\)",
        ),
        (GOOD, [0, 2], ValueError, r"labels to lie in 0\.\.1, got 2 in row 1; number"),
        (GOOD, [-1, 1], ValueError, r"got -1 in row 0"),
        (
            GOOD,
            [0, -100],
            ValueError,
            r"got -100 in row 1; .*; drop ignored rows first: keep = labels",
        ),
        (
            GOOD,
            [0.0, 1.0],
            TypeError,
            r"labels to be integers, got dtype float64; .*labels\.astype\(int\)",
        ),
        (GOOD, [True, False], TypeError, r"labels to be integers, got dtype bool"),
        (GOOD, [0], ValueError, r"labels to have shape \(2,\), got shape \(1,\)"),
        (
            GOOD,
            [[1, 0], [0, 1]],
            ValueError,
            r"labels to have shape \(2,\), got shape \(2, 2\)",
        ),
    ],
)
def test_bad_inputs_are_refused(
    metric: object, probs: object, labels: object, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        metric(np.asarray(probs), np.asarray(labels))


def test_rounded_rows_are_accepted_and_not_renormalised() -> None:
    probs = np.array([[0.333, 0.333, 0.3335]])
    assert metrics.negative_log_likelihood(probs, [0]) == pytest.approx(-np.log(0.333))
    with pytest.raises(ValueError, match=r"sum to 1, got 0\.9983 in row 0; .*rounded"):
        metrics.negative_log_likelihood(probs - [[0, 0, 0.0012]], [0])


@pytest.mark.parametrize("n_classes", [2, 3, 5, 9, 20])
def test_three_decimals_are_enough(n_classes: int) -> None:
    exact = np.random.default_rng(0).dirichlet(np.ones(n_classes), 2000)
    rows = [np.full(n_classes, 1 / n_classes), [0.3335, 0.6665, *[0] * n_classes]]
    rounded = np.vstack([exact, *[row[:n_classes] for row in rows]]).round(3)
    labels = rounded.argmax(axis=1)
    for dtype in (np.float64, np.float32):
        assert metrics.accuracy(rounded.astype(dtype), labels) == 1
    state = CalibrationState(n_classes=n_classes)
    state.update(rounded[-1:], labels[-1:])
    assert CalibrationState.from_bytes(state.to_bytes()).compute() == state.compute()


@pytest.mark.parametrize("n_classes", [21, 1000])
def test_scores_that_are_not_normalised_are_refused(n_classes: int) -> None:
    probs = np.full((1, n_classes), 1.02 / n_classes)
    with pytest.raises(ValueError, match=r"sum to 1, got 1\.02 in row 0"):
        metrics.accuracy(probs, [0])


@pytest.mark.parametrize(
    "call",
    [
        metrics.consistency_test,
        metrics.calibration_error_interval,
        lambda probs, labels: CalibrationState(n_classes=2).update(probs, labels),
    ],
)
def test_label_distributions_where_none_are_allowed(call: Any) -> None:
    probs = np.array([[0.9, 0.1], [0.4, 0.6]])
    with pytest.raises(ValueError, match=r"got shape \(2, 2\); .*argmax") as found:
        call(probs, probs)
    assert "matrix" not in str(found.value)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"n_bins": 0}, ValueError, "n_bins to be at least 1, got 0"),
        (
            {"n_bins": True},
            TypeError,
            "n_bins to be an integer, got True; the papers use n_bins=15",
        ),
        ({"n_bins": 10**9}, ValueError, "n_bins to be at most 10,000, got 1000000000"),
        ({"n_bins": 15.0}, TypeError, r"n_bins to be an integer, got 15\.0"),
        ({"binning": "quantil"}, ValueError, "got 'quantil'; did you mean 'quantile'"),
        ({"norm": "l3"}, ValueError, "norm to be one of 'l1', 'l2', 'max', got 'l3'"),
    ],
)
def test_bad_options_are_refused(
    options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        metrics.expected_calibration_error(GOOD, [0, 1], **options)


# The package


def test_public_names_are_sorted_and_exist() -> None:
    assert metrics.__all__ == sorted(metrics.__all__)
    assert all(callable(getattr(metrics, name)) for name in metrics.__all__)
