"""The calibration metrics of an evaluation, computed in one go from all logits."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from scipy.special import softmax

from hf_calib.metrics import (
    accuracy,
    brier_score,
    classwise_calibration_error,
    expected_calibration_error,
    maximum_calibration_error,
    negative_log_likelihood,
)
from hf_calib.metrics.state import LOGGED_METRICS

NAMES = tuple(LOGGED_METRICS)


def one_shot(logits: np.ndarray, labels: np.ndarray, *, n_bins: int = 15) -> dict[str, float]:
    """All metrics of (N, C) logits at once, in float64."""
    probs = softmax(logits.astype(np.float64), axis=1)
    bins = {"n_bins": n_bins}
    return {
        "accuracy": accuracy(probs, labels),
        "ece": expected_calibration_error(probs, labels, **bins),
        "adaptive_ece": expected_calibration_error(probs, labels, binning="quantile", **bins),
        "classwise_ece": classwise_calibration_error(probs, labels, **bins),
        "mce": maximum_calibration_error(probs, labels, **bins),
        "nll": negative_log_likelihood(probs, labels),
        "brier": brier_score(probs, labels),
    }


def assert_reports(
    metrics: Mapping[str, float], wanted: Mapping[str, float], prefix: str, suffix: str = ""
) -> None:
    for name in NAMES:
        assert metrics[f"{prefix}_{name}{suffix}"] == pytest.approx(wanted[name], rel=2e-6, abs=1e-7), name
