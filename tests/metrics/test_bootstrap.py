"""Bootstrap intervals: the fast paths against scipy's bootstrap draw by draw, closed forms, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from scipy import stats
from scipy.special import softmax

import hf_calib.metrics as metrics
from hf_calib.metrics import bootstrap_interval, consistency_test
from hf_calib.metrics.intervals import METRICS
from hf_calib.metrics.sums import BINNINGS, TopLabel, top_label_error, top_label_sums
from tests.helpers.sampled import EXACT, labels_by

ECE = "expected_calibration_error"
ERRORS = [(norm, False) for norm in ("l1", "l2", "max")] + [("l1", True), ("l2", True)]
# Few bins for "max": in small ones the largest gap is often the same, and ties are for rounding to break.
BINNED = [
    {
        "binning": binning,
        "norm": norm,
        "debias": debias,
        "n_bins": 2 if norm == "max" else 6,
    }
    for binning in BINNINGS
    for norm, debias in ERRORS
]


def predictions(
    n_examples: int, n_classes: int = 4, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Over-confident predictions, in the order of their confidence."""
    rng = np.random.default_rng(seed)
    logits = 1.5 * rng.standard_normal((n_examples, n_classes))
    true = softmax(logits, axis=1)
    labels = labels_by(true, rng)
    probs = softmax(1.7 * logits, axis=1)
    order = np.argsort(probs.max(axis=1), kind="stable")
    return probs[order], labels[order]


def scipy_interval(
    function: Callable[..., float],
    probs: np.ndarray,
    labels: np.ndarray,
    n_resamples: int,
) -> tuple[float, float]:
    """The same draws, evaluated by calling the metric on the drawn rows, in the order of the data."""

    def metric(rows: np.ndarray) -> float:
        rows = np.sort(rows)
        return function(probs[rows], labels[rows])

    result = stats.bootstrap(
        (np.arange(len(probs)),),
        metric,
        vectorized=False,
        n_resamples=n_resamples,
        method="percentile",
        random_state=np.random.default_rng(0),
    )
    return tuple(result.confidence_interval)


# Against scipy: the same draws, so the same interval


@pytest.mark.parametrize(
    ("name", "options"),
    [(ECE, options) for options in BINNED]
    + [("maximum_calibration_error", {"n_bins": 2})]
    + [
        (name, {})
        for name in (
            "accuracy",
            "brier_score",
            "negative_log_likelihood",
            "root_brier_score",
        )
    ]
    + [("classwise_calibration_error", {})],
)
def test_metrics_of_sums_equal_scipys_bootstrap(
    name: str, options: dict[str, object]
) -> None:
    probs, labels = predictions(150)
    ours = bootstrap_interval(name, probs, labels, n_resamples=100, **options)
    function = partial(getattr(metrics, name), **options)
    assert ours[1:] == pytest.approx(
        scipy_interval(function, probs, labels, 100), **EXACT
    )
    assert ours.value == function(probs, labels)


def test_any_function_equals_scipys_bootstrap() -> None:
    probs, labels = predictions(80)

    def spread_of_confidence(
        probs: np.ndarray, labels: np.ndarray, power: int
    ) -> float:
        return np.std(probs.max(axis=1) ** power) + np.mean(labels == 0)

    ours = bootstrap_interval(
        spread_of_confidence, probs, labels, n_resamples=100, power=2
    )
    function = partial(spread_of_confidence, power=2)
    assert ours[1:] == pytest.approx(
        scipy_interval(function, probs, labels, 100), **EXACT
    )


# Resamples in counts, and in rows


@pytest.mark.parametrize("n_bins", [1, 5, 40])
@pytest.mark.parametrize("binning", BINNINGS)
@pytest.mark.parametrize("n_values", [1, 2, 5, 1000])
def test_counts_of_tied_confidences_on_bin_edges(
    n_bins: int, binning: str, n_values: int
) -> None:
    for n_examples in (2, 3, 30):
        rng = np.random.default_rng(n_examples)
        confidences = rng.integers(1, n_values + 1, n_examples) / n_values
        top = TopLabel(confidences, rng.integers(0, 2, n_examples).astype(float))
        drawn = np.random.default_rng(1).multinomial(
            n_examples, np.full(n_examples, 1 / n_examples), 5
        )
        # Repeated rows keep the order of the data within ties.
        order = np.argsort(confidences, kind="stable")
        for norm, debias in ERRORS:
            options = {
                "n_bins": n_bins,
                "binning": binning,
                "norm": norm,
                "debias": debias,
            }
            metric = top_label_sums(**options)
            ours = [
                metric.value(metric.rows(*top)(counts), n_examples) for counts in drawn
            ]
            rows = [np.repeat(order, counts[order]) for counts in drawn]
            expected = [top_label_error(top.part(each), **options) for each in rows]
            np.testing.assert_allclose(ours, expected, rtol=1e-10, atol=1e-9)


def soft_labels(probs: np.ndarray) -> np.ndarray:
    return softmax(np.random.default_rng(0).standard_normal(probs.shape), axis=1)


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize(
    "metric", [name for name in METRICS if name != "kde_calibration_error"]
)
def test_every_name_means_the_function_of_that_name(metric: str, soft: bool) -> None:
    probs, labels = predictions(60, 3)
    probs[0] = [1, 0, 0]
    labels = (
        soft_labels(probs) if soft or metric == "true_calibration_error" else labels
    )
    by_name = bootstrap_interval(metric, probs, labels, n_resamples=10)
    by_function = bootstrap_interval(
        getattr(metrics, metric), probs, labels, n_resamples=10
    )
    assert by_name == pytest.approx(by_function, rel=1e-10, abs=1e-12)
    assert all(type(number) is float for number in by_name)


# Options


@pytest.mark.parametrize("debias", [False, True])
def test_an_interval_that_excludes_its_value_points_to_one_that_holds(
    debias: bool,
) -> None:
    """Of a model that is calibrated, noise is all that there is, and a resample has it twice."""
    rng = np.random.default_rng(4)
    top = rng.uniform(0.5, 1, 300)
    probs = np.stack([top, 1 - top], axis=1)
    labels = np.where(rng.random(300) < top, 0, 1)
    with pytest.warns(
        UserWarning, match=r"excludes the value, 0.* Use calibration_error_interval\."
    ):
        found = bootstrap_interval(ECE, probs, labels, n_resamples=200, debias=debias)
    assert found.value < found.low


@pytest.mark.parametrize(
    "metric", [ECE, "accuracy", "classwise_calibration_error", metrics.brier_score]
)
def test_blocks_change_nothing(metric: object, monkeypatch: pytest.MonkeyPatch) -> None:
    probs, labels = predictions(90)
    whole = bootstrap_interval(metric, probs, labels, n_resamples=25)
    monkeypatch.setattr("hf_calib.metrics.sums._BLOCK_ELEMENTS", 300)
    monkeypatch.setattr("hf_calib.metrics.checks.CHUNK_ELEMENTS", 64)
    assert bootstrap_interval(metric, probs, labels, n_resamples=25) == pytest.approx(
        whole, **EXACT
    )


# What users get wrong


def of_some(probs: np.ndarray, labels: np.ndarray) -> float:
    return np.inf if labels[0] == labels[-1] else 1.0


@pytest.mark.parametrize(
    ("metric", "options", "error", "message"),
    [
        (
            "expected_calibration_eror",
            {},
            ValueError,
            "did you mean 'expected_calibration_error'",
        ),
        (
            "kde_calibration_error",
            {},
            ValueError,
            "may see an example twice, got .* use consistency_test",
        ),
        (
            3,
            {},
            TypeError,
            "metric to be a name or a function of probs and labels, got int",
        ),
        (
            ECE,
            {"confidence_level": 95},
            ValueError,
            r"to lie in \(0, 1\), got 95; use 0\.95",
        ),
        (ECE, {"bins": 10}, TypeError, "bins"),
        (
            lambda p, y: np.nan,
            {},
            ValueError,
            "expected the metric to be finite, got nan",
        ),
        (
            of_some,
            {"n_resamples": 50},
            ValueError,
            "to be finite, got NaN or infinity for .* of 50",
        ),
    ],
)
def test_bad_options_are_refused(
    metric: object, options: dict[str, object], error: type[Exception], message: str
) -> None:
    probs, labels = np.array([[0.9, 0.1], [0.4, 0.6]]), np.array([0, 1])
    with pytest.raises(error, match=message):
        bootstrap_interval(metric, probs, labels, **options)


@pytest.mark.parametrize("function", [bootstrap_interval, consistency_test])
@pytest.mark.parametrize("metric", ["accuracy", metrics.accuracy, ECE])
def test_options_that_a_metric_lacks(function: Any, metric: Any) -> None:
    probs, labels = np.array([[0.9, 0.1], [0.4, 0.6]]), np.array([0, 1])
    data = (metric, probs, labels)
    given = {}
    if function is consistency_test:
        data, given = (probs, labels), {"metric": metric}
    weighted = "expected a metric of resamples to be without sample_weight, got weights"
    with pytest.raises(TypeError, match=weighted):
        function(*data, sample_weight=[1.0, 2.0], **given)
    with pytest.raises(TypeError, match=r"options to be those of .*, got 'bin'; "):
        function(*data, bin=3, **given)


def test_options_of_another_function_are_its_own() -> None:
    def share(probs: np.ndarray, labels: np.ndarray, **options: float) -> float:
        return options["part"]

    probs, labels = np.array([[0.9, 0.1], [0.4, 0.6]]), np.array([0, 1])
    assert bootstrap_interval(share, probs, labels, part=0.5).value == 0.5
