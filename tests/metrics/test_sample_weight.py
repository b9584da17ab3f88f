"""`sample_weight`: rows that are repeated and rows that have weights give the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import hf_calib.metrics as metrics
from hf_calib import InputError

RNG = np.random.default_rng(0)
N, C = 400, 4
PROBS = RNG.dirichlet(np.ones(C), N)
LABELS = RNG.integers(0, C, N)
SOFT = RNG.dirichlet(np.ones(C), N)
TIMES = RNG.integers(0, 4, N)
ROWS = np.repeat(np.arange(N), TIMES)

WEIGHTED: dict[str, Callable[..., Any]] = {
    "accuracy": metrics.accuracy,
    "nll": metrics.negative_log_likelihood,
    "brier": metrics.brier_score,
    "root brier": metrics.root_brier_score,
    "ece": metrics.expected_calibration_error,
    "ece l2": partial(metrics.expected_calibration_error, norm="l2", n_bins=7),
    "mce": metrics.maximum_calibration_error,
    "classwise": metrics.classwise_calibration_error,
    "classwise, one bin": partial(metrics.classwise_calibration_error, n_bins=1),
    "brier parts": metrics.brier_decomposition,
}


@pytest.mark.parametrize("name", WEIGHTED)
@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e6, 3e-100, 3e99])
def test_repeated_rows(name: str, scale: float) -> None:
    metric = WEIGHTED[name]
    for labels in (LABELS, SOFT):
        found = metric(PROBS, labels, sample_weight=scale * TIMES)
        assert found == pytest.approx(
            metric(PROBS[ROWS], labels[ROWS]), rel=1e-10, abs=1e-14
        )
        assert metric(PROBS, labels, sample_weight=np.ones(N)) == pytest.approx(
            metric(PROBS, labels), rel=1e-12
        )


def test_what_has_no_weighted_form_says_so() -> None:
    for options in (
        {"binning": "quantile"},
        {"binning": "equal_mass"},
        {"debias": True},
    ):
        with pytest.raises(
            InputError,
            match=r"sample_weight to be used with binning='uniform' and debias=",
        ):
            metrics.expected_calibration_error(
                PROBS, LABELS, sample_weight=TIMES, **options
            )


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.ones(N - 1), r"sample_weight to have shape \(400,\), got shape \(399,\)"),
        (
            np.where(np.arange(N) == 7, -1.0, 1.0),
            r"be finite and at least 0, got -1 in row 7",
        ),
        (
            np.where(np.arange(N) == 7, np.nan, 1.0),
            r"be finite and at least 0, got nan in row 7",
        ),
        (
            np.where(np.arange(N) == 7, np.inf, 1.0),
            r"be finite and at least 0, got inf in row 7",
        ),
        (
            np.full(N, 1e308),
            r"be at most 1e\+100, got 1e\+308 in row 0; divide them all",
        ),
        (
            np.where(np.arange(N) == 7, 1e101, 1.0),
            r"be at most 1e\+100, got 1e\+101 in row 7",
        ),
        (np.full(N, 5e-324), r"hold a weight of at least 1e-100, got 4.94066e-324"),
        (np.zeros(N), "hold a weight above 0, got zeros"),
        (np.array(["a"] * N), "sample_weight to hold real numbers"),
    ],
)
def test_refused(weights: np.ndarray, message: str) -> None:
    for metric in WEIGHTED.values():
        with pytest.raises(InputError, match=message):
            metric(PROBS, LABELS, sample_weight=weights)


def test_weights_of_a_state_whose_squares_would_overflow() -> None:
    """States are merged, so that their weights cannot be scaled by the largest of all."""
    state = metrics.CalibrationState(n_classes=C)
    with pytest.raises(InputError, match=r"weights to be at most 1e\+100, got 1e\+200"):
        state.update(PROBS, LABELS, np.full(N, 1e200))
    state.update(PROBS, LABELS, np.full(N, 1e-200))
    found = state.compute()
    assert found["nll"] == pytest.approx(metrics.negative_log_likelihood(PROBS, LABELS))
    assert state.top_label.effective_rows()[0] in (0, pytest.approx(N))
    state.update(PROBS, LABELS, np.full(N, 1e100))
    assert state.compute()["ece"] == pytest.approx(
        metrics.expected_calibration_error(PROBS, LABELS)
    )
