"""The consistency test: p-values that are uniform on calibrated data and small on others, and exact odds."""

from __future__ import annotations

from functools import partial
from itertools import product

import numpy as np
import pytest
from scipy import stats
from scipy.special import softmax

import hf_calib.metrics as metrics
from hf_calib.metrics import consistency_test
from hf_calib.metrics.sums import BINNINGS

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


def p_values(
    metric: object, sharpness: float = 1.0, n_tests: int = 200, **options: object
) -> np.ndarray:
    found = []
    for seed in range(n_tests):
        settings = {"metric": metric, "n_resamples": 99, "seed": 10_000 + seed}
        found.append(
            consistency_test(
                *predictions(seed, sharpness=sharpness), **settings, **options
            )
        )
    return np.array([each.p_value for each in found])


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
def test_p_values_are_uniform_on_calibrated_data(
    metric: object, options: dict[str, object]
) -> None:
    assert stats.kstest(p_values(metric, **options), "uniform").pvalue > 0.01


@pytest.mark.parametrize(("metric", "options"), [(MCE, {}), (ECE, {"debias": True})])
def test_p_values_of_a_discrete_metric_are_never_too_small(
    metric: object, options: dict[str, object]
) -> None:
    # The largest gap is often that of the same one-example bin, and a debiased error often 0.
    values = p_values(metric, n_tests=100, **options)
    for level in (0.05, 0.1, 0.3, 0.5):
        assert (
            stats.binomtest(
                int((values <= level).sum()), len(values), level, "greater"
            ).pvalue
            > 0.01
        )


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


# Exact odds


@pytest.mark.parametrize(
    ("metric", "options"),
    [(ECE, {"binning": binning, "n_bins": 3}) for binning in BINNINGS]
    + [
        (ECE, {"norm": "l2", "debias": True}),
        (ECE, {"norm": "max"}),
        (MCE, {}),
        (CLASSWISE, {"n_bins": 3}),
    ]
    + [("brier_score", {})],
)
def test_p_value_and_expected_equal_a_sum_over_all_labels(
    metric: str, options: dict[str, object]
) -> None:
    probs = np.array(
        [[0.6, 0.4, 0.0], [0.2, 0.2, 0.6], [0.1, 0.8, 0.1], [0.3, 0.35, 0.35]]
    )
    labels = np.array([1, 0, 1, 0])
    function = partial(getattr(metrics, metric), **options)
    value = function(probs, labels)
    p_value = mean = 0.0
    for drawn in product(range(3), repeat=4):
        chance = probs[np.arange(4), drawn].prod()
        error = function(probs, np.array(drawn))
        mean += chance * error
        p_value += chance * (error >= value - 1e-12)
    result = consistency_test(probs, labels, metric=metric, n_resamples=1500, **options)
    assert result.value == value
    # Five standard errors of 1,500 draws.
    near = 5 * np.sqrt(p_value * (1 - p_value) / 1500) + 1 / 1501
    assert result.p_value == pytest.approx(p_value, abs=near)
    assert result.expected == pytest.approx(mean, abs=0.03)


# Options and refusals


GOOD: tuple[object, object] = (np.array([[0.9, 0.1], [0.4, 0.6]]), np.array([0, 1]))


@pytest.mark.parametrize(
    ("data", "options", "error", "message"),
    [
        (GOOD, {"metric": "expected_calibration_eror"}, ValueError, "did you mean"),
        (
            GOOD,
            {"metric": lambda p, y: np.nan},
            ValueError,
            "the metric to be finite, got nan",
        ),
        (
            GOOD,
            {"metric": lambda p, y: 1.0 if y[0] < y[1] else np.nan},
            ValueError,
            "of each resample",
        ),
        (
            (GOOD[0], GOOD[0]),
            {},
            ValueError,
            r"labels to have shape \(2,\), got shape \(2, 2\)",
        ),
    ],
)
def test_bad_input_is_refused(
    data: tuple[object, object],
    options: dict[str, object],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        consistency_test(*data, **options)
