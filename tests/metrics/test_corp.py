"""CORP against scikit-learn's isotonic regression and by simulation; over- and under-confidence of known errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.isotonic import IsotonicRegression

from hf_calib.metrics import (
    area_under_risk_coverage,
    confidence_errors,
    corp_curve,
    corp_decomposition,
)
from hf_calib.metrics.corp import errors_by_side
from hf_calib.metrics.sums import TopLabel
from tests.helpers.sampled import two_classes

Array = NDArray[np.float64]


def sample(n_rows: int, shift: float, seed: int) -> tuple[Array, NDArray[np.int64]]:
    rng = np.random.default_rng(seed)
    top = np.round(0.5 + 0.49 * rng.beta(4, 1.5, n_rows), 2)  # with ties
    right = rng.random(n_rows) < top - shift
    return two_classes(top, right)


@pytest.mark.parametrize("shift", [-0.05, 0.0, 0.2])
def test_the_parts_are_those_of_an_isotonic_regression(shift: float) -> None:
    probs, labels = sample(800, shift, 0)
    top, right = probs[:, 0], (labels == 0).astype(float)
    recalibrated = IsotonicRegression(y_min=0, y_max=1).fit_transform(top, right)

    def mean(stated: Array) -> float:
        return float(((stated - right) ** 2).mean())

    found = corp_decomposition(probs, labels)
    overall = mean(np.full_like(top, right.mean()))
    assert found.score == pytest.approx(mean(top))
    assert found.miscalibration == pytest.approx(
        mean(top) - mean(recalibrated), abs=1e-12
    )
    assert found.discrimination == pytest.approx(
        overall - mean(recalibrated), abs=1e-12
    )
    assert found.uncertainty == pytest.approx(overall)
    assert found.score == pytest.approx(
        found.miscalibration - found.discrimination + found.uncertainty
    )


def test_the_curve_never_falls_and_is_that_of_the_different_confidences() -> None:
    probs, labels = sample(500, 0.1, 1)
    curve = corp_curve(probs, labels, n_resamples=100)
    np.testing.assert_array_equal(curve.confidences, np.unique(probs[:, 0]))
    assert (np.diff(curve.recalibrated) >= 0).all()
    assert (curve.low <= curve.high).all()
    expected = (
        IsotonicRegression().fit(probs[:, 0], labels == 0).predict(curve.confidences)
    )
    np.testing.assert_allclose(curve.recalibrated, expected, atol=1e-9)
    shuffled = np.random.default_rng(0).permutation(500)
    np.testing.assert_allclose(
        corp_curve(probs[shuffled], labels[shuffled], n_resamples=1).recalibrated,
        curve.recalibrated,
    )


def test_the_band_holds_the_curve_of_a_calibrated_model_at_nine_points_of_ten() -> None:
    inside, left = [], 0
    for seed in range(60):
        curve = corp_curve(*sample(400, 0.0, seed), n_resamples=200)
        held = (curve.low <= curve.recalibrated) & (curve.recalibrated <= curve.high)
        inside.append(
            held[5:-5].mean()
        )  # pointwise; at the ends steps of few rows jump
        left += not held.all()
    assert 0.85 <= np.mean(inside) <= 0.97
    assert left > 30  # so that leaving it somewhere shows nothing
    outside = corp_curve(*sample(2000, 0.15, 0), n_resamples=200)
    assert (outside.recalibrated < outside.low).mean() > 0.8


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: corp_curve([[0.9, 0.1]], [0], confidence_level=1.5),
            "confidence_level",
        ),
    ],
)
def test_refused(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]


@pytest.mark.parametrize("n_rows", [6, 2])
def test_ties_that_rounding_broke_are_ties(n_rows: int) -> None:
    """0.7 and the next float64 above it, as a division by a row's sum leaves them."""
    exact = np.full(n_rows, 0.7)
    broken = np.where(np.arange(n_rows) % 2 == 0, np.nextafter(0.7, 1), 0.7)
    correct = (np.arange(n_rows) % 2 == 0).astype(int)
    probs, nearly = (np.stack([top, 1 - top], axis=1) for top in (exact, broken))
    labels = 1 - correct
    wanted = corp_decomposition(probs, labels)
    assert corp_decomposition(nearly, labels) == pytest.approx(wanted, abs=1e-12)
    assert corp_curve(nearly, labels, n_resamples=1).recalibrated.tolist() == [0.5]
    assert area_under_risk_coverage(nearly, labels) == 0.5


# Over- and under-confidence


def test_the_authors_values(golden: Path) -> None:
    """Confidences above one half, where over-confidence is the same in both; half of their norm over two classes."""
    with np.load(golden / "variational.npz", allow_pickle=False) as file:
        found = errors_by_side(
            TopLabel(file["confidences"], file["correct"].astype(float)),
            file["recalibrated"],
        )
        assert found.over == pytest.approx(float(file["over"]), abs=1e-7)
        assert found.under == pytest.approx(float(file["under"]), abs=1e-7)
        assert found.total == pytest.approx(float(file["total"]), abs=1e-7)


@pytest.mark.parametrize(
    ("shift", "over", "under"), [(0.1, 0.1, 0.0), (-0.08, 0.0, 0.08), (0.0, 0.0, 0.0)]
)
def test_on_average_each_side_is_at_most_what_it_is(
    shift: float, over: float, under: float
) -> None:
    found = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        top = rng.uniform(0.55, 0.9, 1000)
        found.append(
            confidence_errors(
                *two_classes(top, rng.random(1000) < top - shift), seed=seed
            )
        )
    mean_over, mean_under, total = np.mean(found, axis=0)
    noise = 3 * 0.45 / np.sqrt(60_000)
    assert over - 0.02 <= mean_over <= over + noise
    assert under - 0.02 <= mean_under <= under + noise
    assert total <= over + under + noise
