"""The top label, which bin a confidence falls into, sums that do not drift, equal-mass bins, and debiased errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import softmax
from scipy.stats import norm as normal

import hf_calib.metrics as metrics
from hf_calib.metrics.sums import (
    TopLabel,
    bin_sums,
    top_label,
    top_label_error,
    uniform_bins,
    uniform_edges,
)
from tests.helpers.sampled import EXACT, GOLDEN_PREDICTIONS


def confidences_and_correct(
    n_examples: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    confidences = rng.beta(4, 1, n_examples)
    return confidences, (rng.random(n_examples) < confidences**2).astype(float)


# The top label


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("n_classes", [1, 2, 31, 32, 33, 300])
def test_top_label_is_the_first_of_the_largest(
    n_classes: int, dtype: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_calib.metrics.checks.CHUNK_ELEMENTS", 20 * n_classes)
    rng = np.random.default_rng(n_classes)
    probs, labels = (
        softmax(rng.standard_normal((500, n_classes)), axis=1),
        rng.integers(0, n_classes, 500),
    )
    probs[::50, -1] = probs[::50].max(axis=1)  # ties, in some chunks only
    probs = probs.astype(dtype)
    confidences, correct = top_label(probs, labels)
    np.testing.assert_array_equal(confidences, probs.max(axis=1).astype(float))
    np.testing.assert_array_equal(correct, probs.argmax(axis=1) == labels)
    shares = np.eye(n_classes)[labels]
    np.testing.assert_array_equal(top_label(probs, shares)[1], correct)


# The bin of a value


def values_around_the_edges(n_bins: int, dtype: type) -> np.ndarray:
    """Every edge and its neighbours a few floats away, random values, and the ends of the range."""
    edges = np.concatenate([uniform_edges(n_bins), np.arange(n_bins + 1) / n_bins])
    near, below, above = [edges.astype(dtype)], edges.astype(dtype), edges.astype(dtype)
    for _ in range(4):
        below, above = np.nextafter(below, dtype(-1)), np.nextafter(above, dtype(2))
        near += [below, above]
    rng = np.random.default_rng(n_bins)
    random = np.concatenate([rng.random(500), 10 ** rng.uniform(-30, 0, 200)])
    ends = [0.0, -0.0, 1.0, 1 + 1e-6, -1e-6, 5e-324, 1e-45]
    return np.concatenate([*near, random.astype(dtype), np.array(ends).astype(dtype)])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize(
    "n_bins", [*range(1, 40), 64, 97, 100, 1000, 4097, 10**6, 10**7]
)
def test_bins_are_those_of_a_search_among_the_edges(n_bins: int, dtype: type) -> None:
    values = values_around_the_edges(min(n_bins, 4097), dtype)
    searched = np.searchsorted(
        uniform_edges(n_bins)[1:-1], values.astype(np.float64), side="left"
    )
    np.testing.assert_array_equal(uniform_bins(values, n_bins), searched)


# Sums


def test_sums_do_not_drift_at_thirty_million_rows() -> None:
    n_examples = 3 * 10**7
    # One number seen as many: every addition rounds the same way, which is the worst case.
    confidences = np.broadcast_to(np.float64(0.7), n_examples)
    correct = np.broadcast_to(np.float64(1.0), n_examples)
    assert top_label_error(TopLabel(confidences, correct)) == pytest.approx(
        0.3, rel=1e-12
    )
    sums = bin_sums(TopLabel(confidences[: 10**7], correct[: 10**7]), 15)
    assert sums.counts[10] == 10**7
    assert sums.confidence[10] == pytest.approx(0.7e7, rel=1e-12)


# Equal mass


@pytest.mark.parametrize("name", GOLDEN_PREDICTIONS)
def test_equal_mass_errors_equal_the_authors_code(golden: Path, name: str) -> None:
    with np.load(golden / f"metrics_{name}.npz") as file:
        arrays = dict(file)
    probs, labels = softmax(arrays["logits"], axis=1), arrays["labels"]

    def error(**options: object) -> float:
        return metrics.expected_calibration_error(
            probs, labels, binning="equal_mass", **options
        )

    assert error() == pytest.approx(arrays["vc_ece_em_b15_l1_plugin"], **EXACT)
    assert error(norm="l2") == pytest.approx(arrays["vc_em_b15_l2_plugin"], **EXACT)
    assert error(norm="l2", debias=True) == pytest.approx(
        arrays["vc_em_b15_l2_debiased"], **EXACT
    )
    unclipped = arrays["vc_em_b15_l2_debiased_squared_unclipped"]
    assert error(norm="l2", debias=True) ** 2 == pytest.approx(
        max(unclipped, 0), rel=1e-11
    )
    # Theirs is the mean of 200,000 random draws; this is what those converge to.
    assert error(debias=True) == pytest.approx(
        arrays["vc_em_b15_l1_debiased_mc200k"], abs=1e-4
    )


# Debiased


def bins_by_hand(
    confidences: np.ndarray, correct: np.ndarray
) -> list[tuple[float, ...]]:
    """(count, accuracy, confidence) of each of the 15 equal-width bins that is not empty."""
    bins = np.ceil(confidences * 15)
    members = [bins == m for m in np.unique(bins)]
    return [
        (each.sum(), correct[each].mean(), confidences[each].mean()) for each in members
    ]


@pytest.mark.parametrize("n_examples", [40, 400, 4000])
def test_debiased_l1_subtracts_the_excess_of_a_folded_normal(n_examples: int) -> None:
    confidences, correct = confidences_and_correct(n_examples)
    value = 0.0
    for count, accuracy, confidence in bins_by_hand(confidences, correct):
        gap, spread = (
            abs(confidence - accuracy),
            np.sqrt(accuracy * (1 - accuracy) / count),
        )
        mean = gap
        if spread > 0:
            drawn = normal(gap, spread).pdf
            around = (gap - 12 * spread, gap + 12 * spread)
            mean = quad(
                lambda x: abs(x) * drawn(x),  # noqa: B023
                *around,
                points=[0, gap],
                limit=200,
            )[0]
        value += count / n_examples * (2 * gap - mean)
    ours = top_label_error(TopLabel(confidences, correct), debias=True)
    assert ours == pytest.approx(max(value, 0), rel=1e-9, abs=1e-12)


def test_debiased_l2_leaves_out_bins_of_one_example() -> None:
    confidences, correct = confidences_and_correct(60)
    squares = sum(
        count
        / 60
        * ((confidence - accuracy) ** 2 - accuracy * (1 - accuracy) / (count - 1))
        for count, accuracy, confidence in bins_by_hand(confidences, correct)
        if count > 1
    )
    assert any(count == 1 for count, *_ in bins_by_hand(confidences, correct))
    ours = top_label_error(TopLabel(confidences, correct), norm="l2", debias=True)
    assert ours == pytest.approx(np.sqrt(max(squares, 0)), **EXACT)


@pytest.mark.parametrize("binning", ["uniform", "quantile", "equal_mass"])
@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_debiased_values_of_one_example_and_of_equal_confidences_are_finite(
    binning: str, norm: str
) -> None:
    options = {"binning": binning, "norm": norm, "debias": True}
    one = top_label_error(TopLabel(np.array([1.0]), np.array([0.0])), **options)
    assert one == (
        1 if norm == "l1" else 0
    )  # a single draw has no spread, and no unbiased square
    equal = top_label_error(TopLabel(np.full(50, 0.9), np.ones(50)), **options)
    assert equal == pytest.approx(0.1, **EXACT)


def test_debias_is_refused_where_it_has_no_meaning() -> None:
    probs = np.array([[0.9, 0.1], [0.4, 0.6]])
    with pytest.raises(
        ValueError, match="debias to be False with norm='max', got True; use norm='l1'"
    ):
        metrics.expected_calibration_error(probs, [0, 1], norm="max", debias=True)
    with pytest.raises(
        ValueError,
        match="debias to be False for soft labels, got True; a soft label is no",
    ):
        metrics.expected_calibration_error(probs, probs, debias=True)
