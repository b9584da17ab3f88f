"""Which numbers a report holds, and how each comes by its interval."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import hf_calib.metrics as metrics

# The KDE calibration error compares every pair of examples.
MAX_EXAMPLES_FOR_KDE = 2_000
# What resampling a metric without a fast path may read, in values: seconds, not minutes.
_BUDGET = 5e7
_FEWEST_RESAMPLES = 50  # fewer give no interval worth printing


class Settings(NamedTuple):
    """What every number of a report is computed with."""

    n_bins: int
    confidence_level: float
    n_resamples: int
    seed: int


@dataclass(frozen=True)
class Measurement:
    """A metric's value and its bootstrap interval; `low` and `high` are None where there is none."""

    value: float
    low: float | None = None
    high: float | None = None
    n_resamples: int = 0


@dataclass(frozen=True)
class Measure:
    """A row of `MEASURES`: what is computed, and how it is to be read."""

    title: str
    metric: str | Callable[..., float]  # the name of a metric, or a function of (probs, labels)
    options: Mapping[str, Any] = field(default_factory=dict)
    binned: bool = False  # takes the report's number of bins
    higher_is_better: bool = False
    resampled_fast: bool = False  # the bootstrap needs no second look at the probabilities
    max_examples: int | None = None  # left out of reports on more


def _brier_calibration(probs: NDArray[Any], labels: NDArray[np.int64], *, n_bins: int) -> float:
    return metrics.brier_decomposition(probs, labels, n_bins=n_bins).calibration


def _brier_refinement(probs: NDArray[Any], labels: NDArray[np.int64], *, n_bins: int) -> float:
    return metrics.brier_decomposition(probs, labels, n_bins=n_bins).refinement


_ECE = "expected_calibration_error"
_DEBIASED = {"binning": "equal_mass", "debias": True}

# Keys are those of the trainer's log where it has them.
MEASURES: dict[str, Measure] = {
    "accuracy": Measure("Accuracy", "accuracy", higher_is_better=True, resampled_fast=True),
    "nll": Measure("Negative log-likelihood (nats)", "negative_log_likelihood", resampled_fast=True),
    "brier": Measure("Brier score", "brier_score", resampled_fast=True),
    "root_brier": Measure("Root Brier score", "root_brier_score", resampled_fast=True),
    "brier_calibration": Measure("Brier score, calibration part", _brier_calibration, binned=True),
    "brier_refinement": Measure("Brier score, refinement part", _brier_refinement, binned=True),
    "ece": Measure("Expected calibration error", _ECE, binned=True, resampled_fast=True),
    "adaptive_ece": Measure(
        "Adaptive calibration error", _ECE, {"binning": "quantile"}, binned=True, resampled_fast=True
    ),
    "ece_debiased": Measure(
        "Expected calibration error, equal mass, debiased", _ECE, _DEBIASED, binned=True, resampled_fast=True
    ),
    "ece_sweep": Measure("Expected calibration error, bins by sweep", "ece_sweep"),
    "smooth_ece": Measure("Smooth calibration error", "smooth_calibration_error"),
    "kde_ece": Measure(
        "Kernel calibration error", "kde_calibration_error", max_examples=MAX_EXAMPLES_FOR_KDE
    ),
    "classwise_ece": Measure(
        "Classwise calibration error", "classwise_calibration_error", binned=True, resampled_fast=True
    ),
    "mce": Measure(
        "Maximum calibration error", "maximum_calibration_error", binned=True, resampled_fast=True
    ),
    "post_processing_gap": Measure("Post-processing gap (Brier score)", "post_processing_gap"),
    "area_under_risk_coverage": Measure("Area under the risk-coverage curve", "area_under_risk_coverage"),
}


def measure_all(probs: NDArray[Any], labels: NDArray[np.int64], settings: Settings) -> dict[str, Measurement]:
    """Every metric that the number of examples allows, with its interval, by key."""
    return {
        key: _measure(measure, probs, labels, settings)
        for key, measure in MEASURES.items()
        if (measure.max_examples is None or len(probs) <= measure.max_examples) and _there(measure)
    }


def _there(measure: Measure) -> bool:
    known = (
        measure.metric in dir(metrics)
        if isinstance(measure.metric, str)
        else "brier_decomposition" in dir(metrics)
    )
    return known and "debias" not in measure.options


def _measure(
    measure: Measure, probs: NDArray[Any], labels: NDArray[np.int64], settings: Settings
) -> Measurement:
    options = dict(measure.options) | ({"n_bins": settings.n_bins} if measure.binned else {})
    n_resamples = _affordable(measure, probs.size, settings.n_resamples)
    if not n_resamples or not hasattr(metrics, "bootstrap_interval"):
        compute = getattr(metrics, measure.metric) if isinstance(measure.metric, str) else measure.metric
        return Measurement(float(compute(probs, labels, **options)))
    interval = metrics.bootstrap_interval(
        measure.metric,
        probs,
        labels,
        n_resamples=n_resamples,
        confidence_level=settings.confidence_level,
        seed=settings.seed,
        **options,
    )
    return Measurement(float(interval.value), float(interval.low), float(interval.high), n_resamples)


def _affordable(measure: Measure, n_values: int, n_resamples: int) -> int:
    """How many resamples are worth their time; 0 where too few are."""
    if measure.resampled_fast:
        return n_resamples
    affordable = int(_BUDGET // n_values)
    return min(n_resamples, affordable) if affordable >= _FEWEST_RESAMPLES else 0
