"""The consistency test: p-values that are uniform on calibrated data and small on others, and exact odds."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from scipy import stats
from scipy.special import softmax

import hf_calib.metrics as metrics
from hf_calib.metrics import ConsistencyTest, consistency_test
from hf_calib.metrics.intervals import label_sampler, top_label_simulation
from hf_calib.metrics.sums import BINNINGS, TopLabel, top_label_error

ECE = "expected_calibration_error"
MCE = "maximum_calibration_error"
CLASSWISE = "classwise_calibration_error"


def predictions(
    seed: int, n_examples: int = 200, n_classes: int = 4, sharpness: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Labels from probabilities; what is stated is sharper than they are, or as they are."""
    rng = np.random.default_rng(seed)
    logits = 2 * rng.standard_normal((n_examples, n_classes))
    # The largest of logits with Gumbel noise is drawn with the probabilities of their softmax.
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
    return softmax(sharpness * logits, axis=1), labels


def p_values(metric: object, sharpness: float = 1.0, n_tests: int = 200, **options: object) -> np.ndarray:
    return np.array(
        [
            consistency_test(
                *predictions(seed, sharpness=sharpness),
                metric=metric,
                n_resamples=99,
                seed=10_000 + seed,
                **options,
            ).p_value
            for seed in range(n_tests)
        ]
    )


def odd_classes(probs: np.ndarray, labels: np.ndarray) -> float:
    """A metric that is not one of ours."""
    return float(np.mean((labels % 2 - probs[:, 1::2].sum(axis=1)) ** 2))


@pytest.mark.parametrize(
    ("metric", "options"),
    [
        *[(ECE, {"binning": binning}) for binning in BINNINGS],
        (ECE, {"norm": "l2"}),
        (CLASSWISE, {}),
        ("brier_score", {}),
        (odd_classes, {}),
    ],
)
@pytest.mark.deep
def test_p_values_are_uniform_on_calibrated_data(metric: object, options: dict[str, object]) -> None:
    assert stats.kstest(p_values(metric, **options), "uniform").pvalue > 0.01


@pytest.mark.parametrize(("metric", "options"), [(MCE, {}), (ECE, {"debias": True})])
def test_p_values_of_a_discrete_metric_are_never_too_small(
    metric: object, options: dict[str, object]
) -> None:
    # The largest gap is often that of the same one-example bin, and a debiased error often 0.
    values = p_values(metric, n_tests=100, **options)
    for level in (0.05, 0.1, 0.3, 0.5):
        assert stats.binomtest(int((values <= level).sum()), len(values), level, "greater").pvalue > 0.01


@pytest.mark.parametrize(
    ("metric", "options"),
    [
        *[(ECE, {"binning": binning}) for binning in BINNINGS],
        (CLASSWISE, {}),
        ("brier_score", {}),
        pytest.param("smooth_calibration_error", {}, marks=pytest.mark.deep),
        ("kde_calibration_error", {"bandwidth": 0.05}),
    ],
)
def test_overconfidence_is_found(metric: str, options: dict[str, object]) -> None:
    values = p_values(metric, sharpness=2.5, n_tests=10, **options)
    assert np.mean(values <= 0.05) >= 0.9


def test_the_top_label_does_not_see_the_other_classes() -> None:
    rng = np.random.default_rng(0)
    probs = np.tile([0.5, 0.4, 0.1], (3000, 1))
    labels = rng.choice(3, size=3000, p=[0.5, 0.1, 0.4])
    assert consistency_test(probs, labels).p_value > 0.05
    assert consistency_test(probs, labels, metric=CLASSWISE).p_value == 1 / 1001


# Exact odds


@pytest.mark.parametrize("metric", [ECE, MCE, CLASSWISE, "brier_score", "ece_sweep"])
def test_p_value_and_expected_equal_a_sum_over_all_labels(metric: str) -> None:
    probs = np.array([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.1, 0.8, 0.1], [0.3, 0.35, 0.35]])
    labels = np.array([2, 0, 1, 0])
    function = getattr(metrics, metric)
    value = function(probs, labels)
    p_value = mean = 0.0
    for drawn in product(range(3), repeat=4):
        chance = probs[np.arange(4), drawn].prod()
        error = function(probs, np.array(drawn))
        mean += chance * error
        p_value += chance * (error >= value - 1e-12)
    result = consistency_test(probs, labels, metric=metric, n_resamples=1500)
    assert result.value == value
    # Five standard errors of 1,500 draws.
    assert result.p_value == pytest.approx(
        p_value, abs=5 * np.sqrt(p_value * (1 - p_value) / 1500) + 1 / 1501
    )
    assert result.expected == pytest.approx(mean, abs=0.03)


def test_p_value_counts_itself() -> None:
    certain, wrong = np.eye(2), np.array([1, 0])
    assert consistency_test(certain, wrong, n_resamples=9) == ConsistencyTest(1.0, 0.1, 0.0)
    assert consistency_test(certain, np.array([0, 1]), n_resamples=9) == ConsistencyTest(0.0, 1.0, 0.0)
    for metric in (CLASSWISE, "brier_score"):
        assert consistency_test(certain, wrong, metric=metric, n_resamples=9).p_value == 0.1


def test_one_example() -> None:
    probs, right, wrong = np.array([[0.8, 0.2]]), np.array([0]), np.array([1])
    for metric in (ECE, MCE, CLASSWISE):
        assert consistency_test(probs, right, metric=metric).p_value == 1
        p_value = consistency_test(probs, wrong, metric=metric, n_resamples=4000).p_value
        assert p_value == pytest.approx(0.2, abs=0.03)


# The cheap forms


@pytest.mark.parametrize("n_values", [1, 5, 1000])
@pytest.mark.parametrize("binning", BINNINGS)
@pytest.mark.parametrize(("norm", "debias"), [("l1", False), ("l2", True), ("max", False)])
def test_top_label_draws_equal_the_metric(n_values: int, binning: str, norm: str, debias: bool) -> None:
    confidences = np.random.default_rng(0).integers(1, n_values + 1, 80) / n_values
    options = {"n_bins": 7, "binning": binning, "norm": norm, "debias": debias}
    # The order in which rows get their draws: that of the bins.
    order = np.argsort(confidences, kind="stable")
    simulate = top_label_simulation(confidences[order], **options)
    for seed in range(20):
        correct = np.random.default_rng(seed).random(81)[:80] < confidences[order]
        expected = top_label_error(TopLabel(confidences[order], correct.astype(float)), **options)
        assert simulate(np.random.default_rng(seed)) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_classwise_draws_equal_the_metric() -> None:
    probs, labels = predictions(0, n_examples=100)
    by_name = consistency_test(probs, labels, metric=CLASSWISE, n_resamples=50, n_bins=6)
    by_function = consistency_test(
        probs, labels, metric=metrics.classwise_calibration_error, n_resamples=50, n_bins=6
    )
    assert by_name == pytest.approx(by_function, rel=1e-12)


class FixedPoints:
    """In place of a generator: the points are given."""

    def __init__(self, points: np.ndarray) -> None:
        self.points = points

    def random(self, size: int) -> np.ndarray:
        assert size == len(self.points)
        return self.points


@pytest.mark.parametrize("n_classes", [1, 2, 3, 4, 5, 8, 9, 100])
@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_drawn_class_is_where_the_point_falls(n_classes: int, dtype: type) -> None:
    rng = np.random.default_rng(n_classes)
    probs = softmax(3 * rng.standard_normal((60, n_classes)), axis=1).astype(dtype)
    probs[:n_classes] = np.eye(n_classes)[: len(probs[:n_classes])]
    cumulated = probs.astype(np.float64).cumsum(axis=1)
    cumulated /= cumulated[:, -1:]
    exact = cumulated[np.arange(60), rng.integers(0, n_classes, 60)]  # points on the cuts
    for points in (
        rng.random(60),
        np.zeros(60),
        np.full(60, np.nextafter(1, 0)),
        np.where(exact < 1, exact, 0),
    ):
        drawn = label_sampler(probs)(FixedPoints(points))
        expected = [np.searchsorted(row, u, side="right") for row, u in zip(cumulated, points, strict=True)]
        np.testing.assert_array_equal(drawn, expected)
        assert (probs[np.arange(60), drawn] > 0).all()


def test_drawn_classes_have_the_frequencies_of_the_row() -> None:
    row = np.array([0.05, 0.0, 0.25, 0.1, 0.6])
    drawn = label_sampler(np.tile(row, (20_000, 1)))(np.random.default_rng(0))
    counts = np.bincount(drawn, minlength=5)
    assert counts[1] == 0
    assert stats.chisquare(counts[row > 0], 20_000 * row[row > 0]).pvalue > 0.01


# Options and refusals


def test_seed_repeats_and_results_are_floats() -> None:
    probs, labels = predictions(0, sharpness=1.1)
    result = consistency_test(probs, labels)
    assert result == consistency_test(probs, labels)
    assert result != consistency_test(probs, labels, seed=1)
    assert all(type(number) is float for number in result)


@pytest.mark.parametrize("metric", [ECE, MCE, CLASSWISE, metrics.brier_score])
def test_narrow_floats_and_inputs_left_alone(metric: object) -> None:
    probs, labels = predictions(0)
    narrow = probs.astype(np.float16)
    before = narrow.copy(), labels.copy()
    ours = consistency_test(narrow, labels, metric=metric, n_resamples=20)
    wide = consistency_test(narrow.astype(np.float64), labels, metric=metric, n_resamples=20)
    assert ours == pytest.approx(wide, rel=1e-12)
    np.testing.assert_array_equal(narrow, before[0])
    np.testing.assert_array_equal(labels, before[1])


GOOD: tuple[object, object] = (np.array([[0.9, 0.1], [0.4, 0.6]]), np.array([0, 1]))


@pytest.mark.parametrize(
    ("data", "options", "error", "message"),
    [
        (GOOD, {"metric": "expected_calibration_eror"}, ValueError, "did you mean"),
        (GOOD, {"metric": 3}, TypeError, "metric to be a name or a function"),
        (GOOD, {"metric": lambda p, y: np.nan}, ValueError, "the metric to be finite, got nan"),
        (
            GOOD,
            {"metric": lambda p, y: 1.0 if y[0] < y[1] else np.nan},
            ValueError,
            "metric of each resample",
        ),
        (GOOD, {"n_resamples": 0}, ValueError, "n_resamples to be at least 1"),
        (GOOD, {"n_resamples": 1.5}, TypeError, "n_resamples to be an integer"),
        (GOOD, {"n_bins": 0}, ValueError, "n_bins to be at least 1"),
        (GOOD, {"binning": "equal"}, ValueError, "expected binning to be one of"),
        (GOOD, {"bins": 3}, TypeError, "bins"),
        ((GOOD[0], GOOD[0]), {}, ValueError, r"labels to have shape \(2,\), got shape \(2, 2\)"),
        ((np.array([[4.0, -3.0]]), np.array([0])), {}, ValueError, "these look like logits"),
    ],
)
def test_bad_input_is_refused(
    data: tuple[object, object], options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        consistency_test(*data, **options)


def test_a_function_gets_its_options() -> None:
    seen: list[int] = []

    def metric(probs: np.ndarray, labels: np.ndarray, power: int) -> float:
        seen.append(power)
        return float(np.mean(labels**power))

    consistency_test(*GOOD, metric=metric, n_resamples=3, power=2)
    assert seen == [2, 2, 2, 2]
