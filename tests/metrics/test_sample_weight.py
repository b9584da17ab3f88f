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
@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e6])
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
        (np.zeros(N), "hold a weight above 0, got zeros"),
        (np.array(["a"] * N), "sample_weight to hold real numbers"),
    ],
)
def test_refused(weights: np.ndarray, message: str) -> None:
    for metric in WEIGHTED.values():
        with pytest.raises(InputError, match=message):
            metric(PROBS, LABELS, sample_weight=weights)
