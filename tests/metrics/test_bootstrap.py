"""Bootstrap intervals: the fast paths against scipy's bootstrap draw by draw, closed forms, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from scipy import stats
from scipy.special import softmax

import hf_calib.metrics as metrics
from hf_calib.metrics import Interval, bootstrap_interval
from hf_calib.metrics.intervals import percentile_intervals
from hf_calib.metrics.sums import (
    BINNINGS,
    SumMetric,
    TopLabel,
    as_bin_sums,
    binned_error,
    binned_rows,
    classwise_sums,
    top_label_error,
    top_label_sums,
)
from hf_calib.metrics.table import METRICS
from tests.helpers.sampled import labels_by

EXACT = {"rel": 1e-12, "abs": 1e-14}
ECE = "expected_calibration_error"
ERRORS = [(norm, False) for norm in ("l1", "l2", "max")] + [("l1", True), ("l2", True)]
MEANS = ["accuracy", "brier_score", "negative_log_likelihood", "root_brier_score"]


def predictions(n_examples: int, n_classes: int = 4, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Over-confident predictions, in the order of their confidence."""
    rng = np.random.default_rng(seed)
    logits = 1.5 * rng.standard_normal((n_examples, n_classes))
    true = softmax(logits, axis=1)
    labels = labels_by(true, rng)
    probs = softmax(1.7 * logits, axis=1)
    order = np.argsort(probs.max(axis=1), kind="stable")
    return probs[order], labels[order]


def scipy_interval(
    function: Callable[..., float], probs: np.ndarray, labels: np.ndarray, n_resamples: int
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


@pytest.mark.parametrize("binning", BINNINGS)
@pytest.mark.parametrize(("norm", "debias"), ERRORS)
def test_binned_errors_equal_scipys_bootstrap(binning: str, norm: str, debias: bool) -> None:
    probs, labels = predictions(150)
    # Few bins for "max": in small ones the largest gap is often the same, and ties are for rounding to break.
    n_bins = 2 if norm == "max" else 6
    options = {"binning": binning, "norm": norm, "debias": debias, "n_bins": n_bins}
    ours = bootstrap_interval(ECE, probs, labels, n_resamples=100, **options)
    function = partial(metrics.expected_calibration_error, **options)
    theirs = scipy_interval(function, probs, labels, 100)
    assert ours[1:] == pytest.approx(theirs, **EXACT)
    assert ours.value == function(probs, labels)


@pytest.mark.parametrize("name", [*MEANS, "maximum_calibration_error", "classwise_calibration_error"])
def test_other_fast_metrics_equal_scipys_bootstrap(name: str) -> None:
    probs, labels = predictions(150)
    options = {"n_bins": 2} if name == "maximum_calibration_error" else {}
    function = partial(getattr(metrics, name), **options)
    ours = bootstrap_interval(name, probs, labels, n_resamples=100, **options)
    assert ours[1:] == pytest.approx(scipy_interval(function, probs, labels, 100), **EXACT)
    assert ours.value == function(probs, labels)


def test_any_function_equals_scipys_bootstrap() -> None:
    probs, labels = predictions(80)

    def spread_of_confidence(probs: np.ndarray, labels: np.ndarray, power: int) -> float:
        return np.std(probs.max(axis=1) ** power) + np.mean(labels == 0)

    ours = bootstrap_interval(spread_of_confidence, probs, labels, n_resamples=100, power=2)
    function = partial(spread_of_confidence, power=2)
    assert ours[1:] == pytest.approx(scipy_interval(function, probs, labels, 100), **EXACT)


def test_draws_are_distributed_as_scipys_with_another_seed() -> None:
    probs, labels = predictions(400)
    theirs = stats.bootstrap(
        (np.arange(400),),
        lambda rows: metrics.expected_calibration_error(probs[rows], labels[rows]),
        vectorized=False,
        n_resamples=1500,
        method="percentile",
        random_state=np.random.default_rng(99),
    ).bootstrap_distribution
    counts = np.random.default_rng(7).multinomial(400, np.full(400, 1 / 400), size=1500)
    ours = evaluated(top_label_sums(), probs, labels, counts)
    assert stats.ks_2samp(ours, theirs).pvalue > 0.01


# The forms that the draws are evaluated in


def evaluated(metric: SumMetric, probs: np.ndarray, labels: np.ndarray, counts: np.ndarray) -> np.ndarray:
    return metric.value(counts @ metric.rows(probs, labels), counts.sum(axis=1))


def drawn_rows(counts: np.ndarray) -> np.ndarray:
    return np.repeat(np.arange(len(counts)), counts)


def ties(n_examples: int, n_values: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Unsorted confidences on bin edges, each many times, right and wrong."""
    rng = np.random.default_rng(seed)
    return rng.integers(1, n_values + 1, n_examples) / n_values, rng.integers(0, 2, n_examples).astype(float)


@pytest.mark.parametrize("n_bins", [1, 5, 40])
@pytest.mark.parametrize("binning", BINNINGS)
@pytest.mark.parametrize("n_values", [1, 2, 5, 1000])
def test_top_label_counts(n_bins: int, binning: str, n_values: int) -> None:
    for n_examples in (2, 3, 30):
        confidences, correct = ties(n_examples, n_values, seed=n_examples)
        for norm, debias in ERRORS:
            options = {"n_bins": n_bins, "binning": binning, "norm": norm, "debias": debias}
            rows = binned_rows(TopLabel(confidences, correct), n_bins, binning)

            def error(
                rows: np.ndarray, options: dict = options, data: tuple = (confidences, correct)
            ) -> float:
                return top_label_error(TopLabel(data[0][rows], data[1][rows]), **options)

            # Repeated rows keep the order of the data within ties.
            order = np.argsort(confidences, kind="stable")
            counts = np.random.default_rng(1).multinomial(n_examples, np.full(n_examples, 1 / n_examples), 5)
            expected = [error(order[drawn_rows(each[order])]) for each in counts]
            ours = binned_error(as_bin_sums(counts @ rows), n_examples, norm, debias=debias)
            np.testing.assert_allclose(ours, expected, rtol=1e-10, atol=1e-9)


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("n_bins", [1, 2, 15])
@pytest.mark.parametrize("n_classes", [1, 2, 7])
def test_classwise_counts(n_classes: int, n_bins: int, soft: bool) -> None:
    probs, labels = predictions(40, n_classes, seed=3)
    probs[:3] = np.eye(n_classes)[[0, -1, 0]]  # on the outer edges
    if soft:
        labels = softmax(np.random.default_rng(0).standard_normal(probs.shape), axis=1)
    function = partial(metrics.classwise_calibration_error, n_bins=n_bins)
    assert_same_metric(classwise_sums(n_bins), function, probs, labels)


def test_probabilities_rounded_above_one_are_in_the_last_bin() -> None:
    probs = np.array([[np.nextafter(np.float32(1), np.float32(2)), 0], [0.5, 0.5]], dtype=np.float32)
    labels = np.array([0, 1])
    for n_bins in (1, 2):
        function = partial(metrics.classwise_calibration_error, n_bins=n_bins)
        assert_same_metric(classwise_sums(n_bins), function, probs, labels)


def assert_same_metric(
    fast: SumMetric, function: Callable[..., float], probs: np.ndarray, labels: np.ndarray
) -> None:
    n_examples = len(probs)
    counts = np.random.default_rng(1).multinomial(n_examples, np.full(n_examples, 1 / n_examples), size=6)
    slow = [function(probs[drawn], labels[drawn]) for drawn in map(drawn_rows, counts)]
    np.testing.assert_allclose(evaluated(fast, probs, labels, counts), slow, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", MEANS)
@pytest.mark.parametrize("soft", [False, True])
def test_means_equal_the_metric_on_hard_and_soft_labels(name: str, soft: bool) -> None:
    probs, labels = predictions(60, 3)
    probs[0] = [1, 0, 0]
    if soft:
        labels = softmax(np.random.default_rng(0).standard_normal(probs.shape), axis=1)
    options = {"n_resamples": 50}
    fast = bootstrap_interval(name, probs, labels, **options)
    assert fast == pytest.approx(
        bootstrap_interval(getattr(metrics, name), probs, labels, **options), **EXACT
    )


@pytest.mark.parametrize("metric", [name for name in METRICS if name != "kde_calibration_error"])
def test_every_name_means_the_function_of_that_name(metric: str) -> None:
    probs, labels = predictions(60, 3)
    if metric == "true_calibration_error":
        labels = softmax(np.random.default_rng(0).standard_normal(probs.shape), axis=1)
    by_name = bootstrap_interval(metric, probs, labels, n_resamples=10)
    by_function = bootstrap_interval(getattr(metrics, metric), probs, labels, n_resamples=10)
    assert by_name == pytest.approx(by_function, rel=1e-10, abs=1e-12)
    assert all(type(number) is float for number in by_name)


# Closed forms, and what the docstring says


def test_accuracy_interval_is_the_binomials() -> None:
    probs, labels = predictions(500)
    interval = bootstrap_interval("accuracy", probs, labels, n_resamples=4000, confidence_level=0.9)
    exact = stats.binom(500, interval.value)
    for end, level in ((interval.low, 0.05), (interval.high, 0.95)):
        # The level that the end has really, within five standard errors of 4,000 draws.
        assert exact.cdf(end * 500 - 1) - 0.018 < level < exact.cdf(end * 500) + 0.018


def test_intervals_of_a_proper_score_hold_the_truth_as_often_as_they_say() -> None:
    held = 0
    truth = metrics.brier_score(*predictions(200_000, seed=1234))
    for seed in range(100):
        interval = bootstrap_interval("brier_score", *predictions(250, seed=seed), n_resamples=300, seed=seed)
        held += interval.low <= truth <= interval.high
    assert stats.binomtest(held, 100, 0.95).pvalue > 0.001


def test_debiasing_brings_percentile_intervals_of_the_ece_back_to_the_truth() -> None:
    held = {False: 0, True: 0}
    for seed in range(30):
        rng = np.random.default_rng(seed)
        top = rng.integers(8, 15, 2000) / 15 + 1 / 30
        probs = np.stack([top, 1 - top], axis=1)
        labels = np.where(rng.random(2000) < top - 0.02, 0, 1)
        for debias in held:
            _, low, high = bootstrap_interval(ECE, probs, labels, n_resamples=100, seed=seed, debias=debias)
            held[debias] += low <= 0.02 <= high
    # As the docstring says: about half, and nine tenths.
    assert held[False] < 22
    assert held[True] > 22


# Options


def test_confidence_level_widens_and_seed_repeats() -> None:
    probs, labels = predictions(200)
    narrow = bootstrap_interval("brier_score", probs, labels, confidence_level=0.5)
    wide = bootstrap_interval("brier_score", probs, labels, confidence_level=0.99)
    assert wide.low < narrow.low < narrow.high < wide.high
    assert bootstrap_interval("brier_score", probs, labels, confidence_level=0.5) == narrow
    assert bootstrap_interval("brier_score", probs, labels, confidence_level=0.5, seed=1) != narrow


@pytest.mark.parametrize("debias", [False, True])
def test_an_interval_that_excludes_its_value_points_to_one_that_holds(debias: bool) -> None:
    """Of a model that is calibrated, noise is all that there is, and a resample has it twice."""
    rng = np.random.default_rng(4)
    top = rng.uniform(0.5, 1, 300)
    probs = np.stack([top, 1 - top], axis=1)
    labels = np.where(rng.random(300) < top, 0, 1)
    with pytest.warns(UserWarning, match=r"excludes the value, 0.* Use calibration_error_interval\."):
        found = bootstrap_interval(ECE, probs, labels, n_resamples=200, debias=debias)
    assert found.value < found.low


@pytest.mark.parametrize("metric", [ECE, "accuracy", "classwise_calibration_error", metrics.brier_score])
def test_blocks_change_nothing(metric: object, monkeypatch: pytest.MonkeyPatch) -> None:
    probs, labels = predictions(90)
    whole = bootstrap_interval(metric, probs, labels, n_resamples=25)
    monkeypatch.setattr("hf_calib.metrics.resamples.BLOCK_ELEMENTS", 300)
    monkeypatch.setattr("hf_calib.metrics.checks.CHUNK_ELEMENTS", 64)
    assert bootstrap_interval(metric, probs, labels, n_resamples=25) == pytest.approx(whole, **EXACT)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("metric", [ECE, "classwise_calibration_error", *MEANS])
def test_narrow_floats_and_inputs_left_alone(metric: str, dtype: type) -> None:
    probs, labels = predictions(100)
    narrow = probs.astype(dtype)
    before = narrow.copy(), labels.copy()
    ours = bootstrap_interval(metric, narrow, labels, n_resamples=20)
    wide = bootstrap_interval(metric, narrow.astype(np.float64), labels, n_resamples=20)
    assert ours == pytest.approx(wide, **EXACT)
    np.testing.assert_array_equal(narrow, before[0])
    np.testing.assert_array_equal(labels, before[1])


# Where there is nothing to spread


@pytest.mark.parametrize("metric", [ECE, "classwise_calibration_error", "accuracy", metrics.brier_score])
@pytest.mark.parametrize("n_examples", [1, 30])
def test_equal_examples_give_the_value_alone(metric: object, n_examples: int) -> None:
    probs, labels = np.tile([0.3, 0.7], (n_examples, 1)), np.zeros(n_examples, dtype=int)
    interval = bootstrap_interval(metric, probs, labels, n_resamples=50)
    assert interval == Interval(interval.value, interval.value, interval.value)
    function = getattr(metrics, metric) if isinstance(metric, str) else metric
    assert interval.value == function(probs, labels)


# What users get wrong


@pytest.mark.parametrize(
    ("metric", "options", "error", "message"),
    [
        ("expected_calibration_eror", {}, ValueError, "did you mean 'expected_calibration_error'"),
        ("ood_auroc", {}, ValueError, "expected metric to be one of 'accuracy'"),
        ("kde_calibration_error", {}, ValueError, "may see an example twice, got .* use consistency_test"),
        (metrics.kde_calibration_error, {}, ValueError, "may see an example twice"),
        (3, {}, TypeError, "metric to be a name or a function of probs and labels, got int"),
        (ECE, {"n_resamples": 0}, ValueError, "n_resamples to be at least 1, got 0; 1000 is usual"),
        (ECE, {"n_resamples": 10.5}, TypeError, r"n_resamples to be an integer, got 10\.5"),
        (
            ECE,
            {"confidence_level": 95},
            ValueError,
            r"confidence_level to lie in \(0, 1\), got 95; use 0\.95",
        ),
        (ECE, {"confidence_level": float("nan")}, ValueError, "confidence_level"),
        (ECE, {"binning": "equal"}, ValueError, "expected binning to be one of"),
        (ECE, {"n_bins": 0}, ValueError, "n_bins to be at least 1"),
        (ECE, {"bins": 10}, TypeError, "bins"),
        (lambda p, y: np.nan, {}, ValueError, "expected the metric to be finite, got nan"),
        (
            lambda p, y: np.inf if y[0] == y[-1] else 1.0,
            {"n_resamples": 50},
            ValueError,
            "metric of each resample to be finite, got NaN or infinity for .* of 50",
        ),
    ],
)
def test_bad_options_are_refused(
    metric: object, options: dict[str, object], error: type[Exception], message: str
) -> None:
    probs, labels = np.array([[0.9, 0.1], [0.4, 0.6]]), np.array([0, 1])
    with pytest.raises(error, match=message):
        bootstrap_interval(metric, probs, labels, **options)


@pytest.mark.parametrize(
    ("probs", "labels", "message"),
    [
        ([[4.0, -3.0]], [0], "these look like logits"),
        ([[np.nan, 0.1]], [0], "NaN or infinite"),
        ([[0.5, 0.5]], [2], r"labels to lie in 0\.\.1"),
        (np.empty((0, 2)), np.empty(0, dtype=int), "at least one value"),
    ],
)
def test_bad_inputs_are_refused_for_a_function_too(probs: object, labels: object, message: str) -> None:
    for metric in (ECE, lambda p, y: 0.0):
        with pytest.raises(ValueError, match=message):
            bootstrap_interval(metric, np.asarray(probs), np.asarray(labels))


def test_several_metrics_share_their_resamples() -> None:
    probs, labels = predictions(600)
    settings = {"n_resamples": 30, "confidence_level": 0.9, "seed": 4}
    asked = [*((name, {}) for name in MEANS), (ECE, {"binning": "equal_mass", "debias": True})]
    asked += [("classwise_calibration_error", {"n_bins": 5}), ("maximum_calibration_error", {})]
    together = percentile_intervals(asked, probs, labels, **settings)
    assert together == [
        bootstrap_interval(name, probs, labels, **options, **settings) for name, options in asked
    ]


@pytest.mark.parametrize(
    ("name", "value"), [("n_resamples", 0), ("n_resamples", True), ("confidence_level", 1.0), ("seed", -1)]
)
def test_several_metrics_refuse_what_one_refuses(name: str, value: object) -> None:
    probs, labels = predictions(20)
    settings = {"n_resamples": 30, "confidence_level": 0.9, "seed": 4, name: value}
    with pytest.raises((ValueError, TypeError), match=name):
        percentile_intervals([("accuracy", {})], probs, labels, **settings)
