"""The calibration metrics of an evaluation, computed in one go from all logits."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import pytest
from scipy.special import softmax

from hf_calib import metrics
from hf_calib.metrics.state import LOGGED_METRICS

NAMES = tuple(LOGGED_METRICS)


def one_shot(
    logits: np.ndarray, labels: np.ndarray, *, n_bins: int = 15
) -> dict[str, float]:
    """All metrics of (N, C) logits at once, in float64."""
    probs = softmax(logits.astype(np.float64), axis=1)
    errors = {
        "ece": metrics.expected_calibration_error,
        "adaptive_ece": partial(metrics.expected_calibration_error, binning="quantile"),
        "classwise_ece": metrics.classwise_calibration_error,
        "mce": metrics.maximum_calibration_error,
    }
    scores = {
        "accuracy": metrics.accuracy,
        "brier": metrics.brier_score,
        "nll": metrics.negative_log_likelihood,
    }
    found = {name: score(probs, labels) for name, score in scores.items()}
    return found | {
        name: error(probs, labels, n_bins=n_bins) for name, error in errors.items()
    }


def assert_reports(
    found: Mapping[str, float],
    wanted: Mapping[str, float],
    prefix: str,
    suffix: str = "",
) -> None:
    ours = {name: found[f"{prefix}_{name}{suffix}"] for name in NAMES}
    assert ours == pytest.approx(
        {name: wanted[name] for name in NAMES}, rel=2e-6, abs=1e-7
    )
