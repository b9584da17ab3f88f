"""The error without what noise adds to it: its value, and the intervals of differences in simulations."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from hf_calib.metrics.intervals import resampled_metrics
from hf_calib.metrics.sums import TopLabel, uniform_bins
from hf_calib.study.statistics import unbiased_error

N_BINS = 15
Array = NDArray[np.float64]
Gaps = Callable[[Array], Array]


def shift(size: float) -> Gaps:
    return lambda confidences: np.full_like(confidences, size)


def both_signs(size: float) -> Gaps:
    return lambda confidences: size * np.where(uniform_bins(confidences, N_BINS) % 2, 1.0, -1.0)


def tilt(size: float) -> Gaps:
    return lambda confidences: size * (c := confidences - 0.84) / np.abs(c).mean()


def top_bin(size: float) -> Gaps:
    return lambda confidences: size * (c := (confidences > 14 / 15).astype(float)) / c.mean()


def error_of(confidences: Array, accuracies: Array) -> float:
    sums = np.bincount(uniform_bins(confidences, N_BINS), confidences - accuracies, minlength=N_BINS)
    return float(np.abs(sums).sum() / len(confidences))


def measured(confidences: Array, correct: Array, n_resamples: int) -> tuple[float, Array]:
    return unbiased_error(
        TopLabel(confidences, correct), "uniform", n_bins=N_BINS, n_resamples=n_resamples, seed=0
    )


def coverage(n_rows: int, first: Gaps, second: Gaps, n_draws: int, seed: int = 0) -> tuple[float, float]:
    """How often the interval of a difference holds the true one: of these errors, and of plain ones."""
    rng = np.random.default_rng(seed)
    held = np.zeros(2)
    for _ in range(n_draws):
        base = 0.5 + 0.49 * rng.beta(4, 1.5, n_rows)
        both = [base, np.clip(base + rng.normal(0, 0.03, n_rows), 0.5001, 0.9999)]
        common, found, plain, true = rng.normal(size=n_rows), [], [], []
        for confidences, gaps in zip(both, (first, second), strict=True):
            accuracies = np.clip(confidences - gaps(confidences), 0, 1)
            # Right predictions, which two models on the same rows have mostly in common.
            correct = (stats.norm.cdf(0.8 * common + 0.6 * rng.normal(size=n_rows)) < accuracies).astype(
                float
            )
            found.append(measured(confidences, correct, 100))
            probs = np.stack([confidences, 1 - confidences], axis=1)
            labels = (1 - correct).astype(int)
            asked = [("expected_calibration_error", {"n_bins": N_BINS})]
            (draws,) = resampled_metrics(asked, probs, labels, n_resamples=100, seed=0)
            plain.append((error_of(confidences, correct), draws))
            true.append(error_of(confidences, accuracies))
        for i, (one, other) in enumerate((found, plain)):
            reach = stats.norm.isf(0.025) * (one[1] - other[1]).std(ddof=1)
            held[i] += abs(one[0] - other[0] - (true[0] - true[1])) <= reach
    return tuple(held / n_draws)  # type: ignore[return-value]


def test_on_average_it_is_the_true_error_down_to_zero() -> None:
    rng = np.random.default_rng(0)
    for size in (0.0, 0.03, 0.1):
        found = []
        for _ in range(60):
            confidences = 0.5 + 0.49 * rng.beta(4, 1.5, 2000)
            accuracies = np.clip(confidences - size, 0, 1)
            correct = (rng.random(2000) < accuracies).astype(float)
            found.append(measured(confidences, correct, 2)[0])
        # The plain error is .02 at 0.
        assert abs(np.mean(found) - size) < 0.005, size


def test_rows_that_are_drawn_in_groups_are_less_certain() -> None:
    """Each row ten times is as much as once."""
    rng = np.random.default_rng(3)
    confidences = rng.uniform(0.5, 1, 400)
    correct = (rng.random(400) < confidences).astype(float)
    once, draws = measured(confidences, correct, 200)
    groups = np.repeat(np.arange(400), 10)
    top = TopLabel(confidences[groups], correct[groups])
    ten, others = unbiased_error(top, "uniform", n_bins=N_BINS, n_resamples=200, seed=0, groups=groups)
    assert ten == pytest.approx(once, abs=0.004)
    assert others.std() == pytest.approx(draws.std(), rel=0.1)


@pytest.mark.parametrize("n_rows", [1, 30])
def test_few_rows_and_one_bin(n_rows: int) -> None:
    value, draws = measured(np.full(n_rows, 0.9), np.ones(n_rows), 20)
    assert np.isfinite([value, *draws]).all()
    assert value <= 0.1


def test_a_calibrated_model_and_another_one_are_told_apart_as_they_are() -> None:
    ours, plain = coverage(2000, shift(0.041), shift(0.0), 30)
    assert ours >= 0.8
    assert plain <= 0.8


SETTINGS = [
    *((shift(size), shift(0.0)) for size in (0.005, 0.041, 0.15)),
    *((shift(0.02), shift(0.02)), (both_signs(0.04), shift(0.0)), (top_bin(0.04), shift(0.0))),
    *((tilt(0.04), shift(0.0)), (tilt(0.1), shift(0.02))),
]


@pytest.mark.deep
@pytest.mark.parametrize("n_rows", [500, 2000, 10_000])
def test_intervals_of_differences_hold_the_true_one(n_rows: int) -> None:
    found = [coverage(n_rows, *setting, 150, seed=i) for i, setting in enumerate(SETTINGS)]
    ours = [each for each, _ in found]
    assert min(ours) >= 0.87, found
    assert 0.92 <= np.mean(ours) <= 0.98, found
    assert min(plain for _, plain in found) <= 0.80, found
