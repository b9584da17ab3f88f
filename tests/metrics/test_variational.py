"""Over- and under-confidence: against the authors' library, and by simulation of known errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hf_calib.metrics import confidence_errors
from hf_calib.metrics.corp import errors_by_side
from hf_calib.metrics.sums import TopLabel


def two_classes(top: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.stack([top, 1 - top], axis=1), np.where(right, 0, 1)


def test_the_authors_values(golden: Path) -> None:
    """Confidences above one half, where over-confidence is the same in both; half of their norm over two classes."""
    with np.load(golden / "variational.npz", allow_pickle=False) as file:
        found = errors_by_side(
            TopLabel(file["confidences"], file["correct"].astype(float)), file["recalibrated"]
        )
        assert found.over == pytest.approx(float(file["over"]), abs=1e-7)
        assert found.under == pytest.approx(float(file["under"]), abs=1e-7)
        assert found.total == pytest.approx(float(file["total"]), abs=1e-7)


@pytest.mark.parametrize(("shift", "over", "under"), [(0.1, 0.1, 0.0), (-0.08, 0.0, 0.08), (0.0, 0.0, 0.0)])
def test_on_average_each_side_is_at_most_what_it_is(shift: float, over: float, under: float) -> None:
    found = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        top = rng.uniform(0.55, 0.9, 1000)
        found.append(confidence_errors(*two_classes(top, rng.random(1000) < top - shift), seed=seed))
    mean_over, mean_under, total = np.mean(found, axis=0)
    noise = 3 * 0.45 / np.sqrt(60_000)
    assert over - 0.02 <= mean_over <= over + noise
    assert under - 0.02 <= mean_under <= under + noise
    assert total <= over + under + noise


def test_both_sides_at_once() -> None:
    rng = np.random.default_rng(0)
    top = rng.uniform(0.5, 1.0, 40_000)
    accuracy = np.where(top > 0.75, top - 0.1, top + 0.06)
    found = confidence_errors(*two_classes(top, rng.random(40_000) < accuracy))
    assert found.over == pytest.approx(0.05, abs=0.006)
    assert found.under == pytest.approx(0.03, abs=0.006)
    assert found.total == found.over + found.under


def test_it_depends_on_nothing_but_its_seed() -> None:
    rng = np.random.default_rng(1)
    top = rng.uniform(0.5, 1.0, 300)
    rows = two_classes(top, rng.random(300) < top)
    assert confidence_errors(*rows, seed=3) == confidence_errors(*rows, seed=3)
    assert confidence_errors(*rows, seed=3) != confidence_errors(*rows, seed=4)


def test_few_rows_and_equal_confidences() -> None:
    equal = two_classes(np.full(400, 0.8), np.arange(400) % 5 > 0)
    assert (
        -0.08 < confidence_errors(*equal).total < 0.02
    )  # each fold is as far off as the others are on the other side
    assert np.isfinite(confidence_errors([[0.9, 0.1], [0.6, 0.4]], [0, 1], n_folds=2)).all()


@pytest.mark.parametrize(("n_folds", "n_rows"), [(1, 10), (5, 4), (0, 10)])
def test_refused(n_folds: int, n_rows: int) -> None:
    rows = two_classes(np.full(n_rows, 0.8), np.ones(n_rows, bool))
    with pytest.raises(ValueError, match="n_folds to be from 2 to the number of rows"):
        confidence_errors(*rows, n_folds=n_folds)
