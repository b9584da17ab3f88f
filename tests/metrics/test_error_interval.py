"""The interval of the ECE: its ends by their definition, its coverage by simulation, and refusals."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from hf_calib.metrics import calibration_error_interval, expected_calibration_error
from hf_calib.metrics.intervals import interval_of_bins
from hf_calib.metrics.sums import BINNINGS, BinSums
from tests.helpers.sampled import two_classes

LEVEL = 0.95


def one_bin(n_rows: int, n_right: int, confidence: float) -> BinSums:
    return BinSums(
        *(
            np.array([value])
            for value in (float(n_rows), n_rows * confidence, float(n_right))
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_right", "confidence"), [(70, 0.8), (85, 0.8), (60, 0.95), (30, 0.3)]
)
def test_the_ends_in_one_bin_are_those_of_the_binomial(
    n_right: int, confidence: float
) -> None:
    """In one bin the error is |confidence - accuracy|, and the tests behind the interval have closed forms."""
    value, low, high = interval_of_bins(
        one_bin(100, n_right, confidence),
        n_resamples=20_000,
        confidence_level=LEVEL,
        seed=0,
    )
    assert value == pytest.approx(abs(confidence - n_right / 100))
    side = 1 if confidence * 100 >= n_right else -1
    distances = np.abs(np.arange(101) / 100 - confidence)

    def tails(error: float) -> tuple[float, float]:
        chances = stats.binom.pmf(np.arange(101), 100, confidence - side * error)
        return chances[distances <= value + 1e-9].sum(), chances[
            distances >= value - 1e-9
        ].sum()

    errors = np.linspace(0, 0.5, 2001)
    errors = errors[
        (confidence - side * errors >= 0) & (confidence - side * errors <= 1)
    ]
    within = [error for error in errors if min(tails(error)) > (1 - LEVEL) / 2]
    assert (low, high) == pytest.approx((within[0], within[-1]), abs=0.004)


@pytest.mark.parametrize("binning", BINNINGS)
def test_its_value_is_the_plain_error_and_its_seed_repeats(binning: str) -> None:
    rng = np.random.default_rng(1)
    confidences = rng.beta(8, 2, 500) * 0.5 + 0.5
    probs, labels = two_classes(confidences, rng.random(500) < confidences - 0.1)
    bins = {"binning": binning, "n_bins": 10}
    found = calibration_error_interval(probs, labels, **bins, seed=3)
    assert found.value == pytest.approx(
        expected_calibration_error(probs, labels, **bins)
    )
    assert 0 < found.low < found.high
    assert found == calibration_error_interval(probs, labels, **bins, seed=3)
    wide = calibration_error_interval(
        probs, labels, **bins, seed=3, confidence_level=0.999
    )
    assert wide.low < found.low < found.high < wide.high


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": [[0.5, 0.5]]}, "labels"),
        ({"confidence_level": 1.0}, "confidence_level to"),
        ({"probs": [[0.7, 0.7]]}, "row of probs to"),
    ],
)
def test_refusals(change: dict[str, object], message: str) -> None:
    arguments = {"probs": [[0.9, 0.1]], "labels": [0]} | change
    with pytest.raises(ValueError, match=message):
        calibration_error_interval(**arguments)


# Coverage

N_BINS = 15
POPULATION = 200_000
CONFIDENCES = {
    "near 1": lambda rng: 1 - 0.05 * rng.beta(0.6, 2, POPULATION),
    "high": lambda rng: 1 - 0.5 * rng.beta(0.6, 4, POPULATION),
    "wide": lambda rng: rng.uniform(0.5, 1, POPULATION),
}
# Confidence minus accuracy, up to a factor.
GAPS = {
    "over-confident": lambda c: np.ones_like(c),
    "temperature": lambda c: c * (1 - c) + 0.002,
    "of both signs": lambda c: np.where(np.ceil(c * N_BINS) % 2 == 0, 1.0, -1.0),
    "in few bins": lambda c: (c < np.quantile(c, 0.3)) * 1.0,
}
ERRORS = (0.005, 0.02, 0.05, 0.15)
SIZES = (200, 1000, 10_000)


def population_error(confidences: np.ndarray, accuracies: np.ndarray) -> float:
    bins = np.ceil(confidences * N_BINS).astype(int) - 1
    return float(np.abs(np.bincount(bins, confidences - accuracies)).sum() / len(bins))


def accuracies_of(
    confidences: np.ndarray, gaps: np.ndarray, error: float
) -> np.ndarray | None:
    """Accuracies with this error in the population; None where such gaps cannot have it."""
    scale = error / np.abs(gaps).mean()
    for _ in range(30):
        accuracies = np.clip(confidences - scale * gaps, 0, 1)
        found = population_error(confidences, accuracies)
        scale *= error / max(found, 1e-9)
    return accuracies if abs(found - error) < 0.01 * error else None


@pytest.mark.deep
@pytest.mark.parametrize("n_rows", SIZES)
def test_intervals_hold_the_error_of_the_population(n_rows: int) -> None:
    n_draws = 100
    rng = np.random.default_rng(n_rows)
    shares = {}
    for confidence, gap, error in itertools.product(CONFIDENCES, GAPS, ERRORS):
        population = CONFIDENCES[confidence](rng)
        accuracies = accuracies_of(population, GAPS[gap](population), error)
        if accuracies is None:
            continue
        held = 0
        for _ in range(n_draws):
            rows = rng.integers(0, POPULATION, n_rows)
            data = two_classes(population[rows], rng.random(n_rows) < accuracies[rows])
            _, low, high = calibration_error_interval(
                *data, n_bins=N_BINS, n_resamples=200
            )
            held += low <= error <= high
        shares[confidence, gap, error] = held / n_draws
        # Beyond chance no setting is below 93%.
        chance = stats.binomtest(held, n_draws, 0.93, alternative="less").pvalue
        assert chance > 0.0005, (confidence, gap, error)
    assert len(shares) > 35
    assert 0.93 < np.mean(list(shares.values())) < 0.98
