"""Prediction sets: coverage by simulation, and the values of MAPIE."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.special import softmax
from scipy.stats import beta, binomtest

from hf_calib._errors import InputValueError
from hf_calib.decisions import PredictionSets

METHODS = ("lac", "aps")


def drawn(
    n: int, *, rng: np.random.Generator, n_classes: int = 5
) -> tuple[np.ndarray, np.ndarray]:
    """Over-confident probs (n, C), and labels of classes that differ in frequency and in difficulty."""
    labels = rng.choice(
        n_classes, size=n, p=np.arange(1, n_classes + 1) / sum(range(1, n_classes + 1))
    )
    logits = rng.standard_normal((n, n_classes))
    logits[np.arange(n), labels] += 0.5 + 0.5 * labels
    return softmax(3 * logits, axis=1), labels


@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.3])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("data", ["few", "many", "sharp"])
def test_the_sets_of_mapie(golden: Path, data: str, method: str, alpha: float) -> None:
    """SplitConformalClassifier of MAPIE 1.6.0; APS with its random numbers at 1 and the last label included."""
    with np.load(golden / "prediction_sets_mapie.npz") as file:
        probs, labels = file[f"{data}_probs"], file[f"{data}_labels"]
        wanted = file[f"{data}_{method}_{alpha}"]
        quantile = file[f"{data}_{method}_{alpha}_quantile"]
    half = len(probs) // 2
    sets = PredictionSets(alpha=alpha, method=method).fit(probs[:half], labels[:half])
    # The threshold is a little above the quantile, so that rounding moves no score across it.
    thresholds = np.full(probs.shape[1], quantile + 5e-7)
    np.testing.assert_allclose(sets.thresholds_, thresholds, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(sets.predict(probs[half:]), wanted)


@pytest.mark.filterwarnings("ignore:Class 0")  # in some draws it has too few rows
@pytest.mark.parametrize("by_class", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_coverage(method: str, by_class: bool) -> None:
    """The mean over draws of calibration rows lies within four standard errors of what split conformal gives.

    That is k / (n + 1) for n rows, k = ceil((n + 1) (1 - alpha)): by class between 1 - alpha and that + 1 / (n + 1).
    """
    rng = np.random.default_rng(0)
    probs, labels = drawn(100_000, rng=rng)
    n_draws, n, alpha = 150, 199, 0.1
    found = np.empty((n_draws, 6))
    for i in range(n_draws):
        rows = rng.integers(len(probs), size=n)
        sets = PredictionSets(alpha=alpha, method=method, by_class=by_class)
        sets.fit(probs[rows], labels[rows])
        test = rng.integers(len(probs), size=2000)
        covered = sets.predict(probs[test])[np.arange(2000), labels[test]]
        found[i] = [
            covered.mean(),
            *(covered[labels[test] == c].mean() for c in range(5)),
        ]
    error = found.std(axis=0) / np.sqrt(n_draws)
    means = found.mean(axis=0)
    if by_class:
        assert (means[1:] >= 1 - alpha - 4 * error[1:]).all()
        assert means[0] < 1 - alpha + 0.04
    else:
        assert abs(means[0] - 180 / 200) < 4 * error[0]
        assert means[1:].min() < 1 - alpha - 0.05  # which is what by_class is for


def test_by_class_is_one_threshold_for_the_rows_of_each() -> None:
    probs, labels = drawn(2000, rng=np.random.default_rng(1))
    sets = PredictionSets(by_class=True).fit(probs, labels)
    for c in range(5):
        alone = PredictionSets().fit(probs[labels == c], labels[labels == c])
        assert sets.thresholds_[c] == alone.thresholds_[0]


def test_a_class_with_few_rows_is_in_every_set() -> None:
    probs, labels = drawn(300, rng=np.random.default_rng(3), n_classes=3)
    labels[:] = np.where(np.arange(300) < 5, 0, 1 + labels % 2)
    message = r"^Class 0: fewer rows than the 9 that alpha=0\.1 needs, so .* Use more "
    with pytest.warns(UserWarning, match=message):
        sets = PredictionSets(by_class=True).fit(probs, labels)
    assert sets.predict(probs)[:, 0].all()


def test_as_many_rows_as_a_class_needs_are_no_few() -> None:
    probs, labels = drawn(300, rng=np.random.default_rng(3), n_classes=3)
    labels[:] = np.where(np.arange(300) < 9, 0, 1 + labels % 2)
    sets = PredictionSets(by_class=True).fit(probs, labels)
    assert sets.thresholds_[0] < 1


def test_a_class_with_few_rows_is_in_sets_whose_probabilities_round_to_more_than_one() -> (
    None
):
    probs = np.tile([[0.0, 1 / 3, 1 / 3, 1 / 3]], (90, 1))
    with pytest.warns(UserWarning, match="Class 0: fewer rows"):
        sets = PredictionSets(by_class=True, method="aps").fit(
            probs, 1 + np.arange(90) % 3
        )
    assert sets.predict(probs[:1])[0, 0]


def test_what_is_measured() -> None:
    probs, labels = drawn(4000, rng=np.random.default_rng(4))
    sets = PredictionSets().fit(probs[:2000], labels[:2000])
    found = sets.measure(probs[2000:], labels[2000:])
    members = sets.predict(probs[2000:])
    n_held = members[np.arange(2000), labels[2000:]].sum()
    exact = binomtest(n_held, 2000).proportion_ci(method="exact")
    assert found["coverage"] == pytest.approx(
        (n_held / 2000, exact.low, exact.high), rel=1e-9
    )
    sizes, resamples = (
        members.sum(axis=1),
        np.random.default_rng(0).integers(0, 2000, (1000, 2000)),
    )
    low, high = np.quantile(sizes[resamples].mean(axis=1), [0.025, 0.975])
    assert found["size"] == pytest.approx((sizes.mean(), low, high), rel=1e-12)


def test_refusals() -> None:
    probs, labels = drawn(50, rng=np.random.default_rng(5))
    with pytest.raises(InputValueError, match=r"alpha to lie in \(0, 1\), got 1.0"):
        PredictionSets(alpha=1.0)
    message = r"at least 99 for alpha=0.01, got 50; pass more rows, or alpha=0.01961"
    with pytest.raises(InputValueError, match=message):
        PredictionSets(alpha=0.01).fit(probs, labels)
    with pytest.raises(InputValueError, match="at least 1,000,000,000,000,000,000 for"):
        PredictionSets(alpha=1e-320).fit(probs, labels)
    with pytest.raises(InputValueError, match="have the 5 columns of fit"):
        PredictionSets().fit(probs, labels).predict(np.full((2, 4), 0.25))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Class 0")
@pytest.mark.parametrize("by_class", [False, True])
@pytest.mark.parametrize("decimals", [None, 1])
def test_the_rows_of_the_fit_tell_the_coverage_of_new_inputs(
    by_class: bool, decimals: int | None
) -> None:
    rng = np.random.default_rng(0)
    probs, labels = drawn(50_000, rng=rng)
    if decimals is not None:
        top = probs.max(axis=1, keepdims=True).round(decimals)
        probs = np.where(probs == probs.max(axis=1, keepdims=True), top, (1 - top) / 4)
    n_missed = 0
    for _ in range(100):
        rows = rng.integers(len(probs), size=300)
        sets = PredictionSets(alpha=0.1, by_class=by_class).fit(
            probs[rows], labels[rows]
        )
        value, low, high = sets.measure_fit(probs[rows], labels[rows])["coverage"]
        decided = sets.predict(probs)[np.arange(len(probs)), labels]
        assert 0 <= low <= value <= high <= 1
        n_missed += not low <= decided.mean() <= high
    assert n_missed <= 12  # the 99.9% quantile of 100 draws at 5%


def test_the_coverage_of_new_inputs_has_a_beta_distribution() -> None:
    probs, labels = drawn(199, rng=np.random.default_rng(1))
    found = PredictionSets(alpha=0.1).fit(probs, labels).measure_fit(probs, labels)
    ends = beta.ppf([0.025, 0.975], 180, 20)  # k = 180 of 199 rows
    assert tuple(found["coverage"]) == pytest.approx((180 / 199, *ends))


def test_equal_scores_at_the_threshold_may_cover_as_many_new_inputs() -> None:
    """190 of 199 rows are covered, ten more than the 180 that alpha asks for: up to the next row's score."""
    labels = np.repeat([0, 1], [190, 9])
    probs = np.tile([[0.9, 0.1]], (199, 1))
    found = PredictionSets(alpha=0.1).fit(probs, labels).measure_fit(probs, labels)
    ends = [beta.ppf(0.025, 180, 20), beta.ppf(0.975, 191, 9)]
    assert tuple(found["coverage"]) == pytest.approx((190 / 199, *ends))


def test_classes_of_equal_probability_are_in_the_order_of_the_columns() -> None:
    probs = np.tile([[0.4, 0.4, 0.2]], (20, 1))
    sets = PredictionSets(alpha=0.3, method="aps").fit(probs, np.zeros(20, int))
    assert sets.predict(probs[:1]).tolist() == [[True, False, False]]
