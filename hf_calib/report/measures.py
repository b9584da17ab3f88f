"""The metrics of a report, and how many resamples their intervals take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import hf_calib.metrics as metrics
from hf_calib.metrics.bootstrap import Interval, percentile_intervals
from hf_calib.metrics.by_name import METRICS
from hf_calib.metrics.logged import LOGGED_METRICS

# The kernel calibration error compares every pair of examples.
MAX_EXAMPLES_FOR_KDE = 2_000
# What a metric that is called for each resample may cost, in values read by all of them: seconds, not minutes.
_BUDGET = 2e7
_MOST_CALLS, _FEWEST_CALLS = 200, 50


class Settings(NamedTuple):
    """Settings that every number of a report is computed with."""

    n_bins: int
    confidence_level: float
    n_resamples: int
    seed: int


@dataclass(frozen=True)
class Measure:
    """A row of `MEASURES`: what is computed, how it is resampled, and what it is called."""

    title: str
    metric: str  # its name in `hf_calib.metrics`
    options: Mapping[str, Any] = field(default_factory=dict)
    binned: bool = False  # takes the report's number of bins
    part: str | None = None  # the field of what the metric returns
    cost: int = 0  # of a call, per example, beyond reading it; as much as reading so many values
    n_examples: tuple[float, float] = (1, np.inf)  # left out of reports on fewer or more

    @property
    def resampling(self) -> str:
        """The inputs that a bootstrap resample draws; see `hf_calib.metrics.by_name.Metric`."""
        return METRICS[self.metric].resampling if self.part is None else "rows"


_ECE = "expected_calibration_error"
_DEBIASED = {"binning": "equal_mass", "debias": True}

# Keys and titles are those of the trainer's log where it has them.
MEASURES: dict[str, Measure] = {
    "accuracy": Measure(LOGGED_METRICS["accuracy"].title, "accuracy"),
    "nll": Measure(LOGGED_METRICS["nll"].title, "negative_log_likelihood"),
    "brier": Measure(LOGGED_METRICS["brier"].title, "brier_score"),
    "root_brier": Measure("Root Brier score", "root_brier_score"),
    "brier_calibration": Measure(
        "Brier score, calibration part",
        "brier_decomposition",
        binned=True,
        part="calibration",
    ),
    "brier_refinement": Measure(
        "Brier score, refinement part",
        "brier_decomposition",
        binned=True,
        part="refinement",
    ),
    "ece": Measure(LOGGED_METRICS["ece"].title, _ECE, binned=True),
    "adaptive_ece": Measure(LOGGED_METRICS["adaptive_ece"].title, _ECE, {"binning": "quantile"}, binned=True),
    "ece_debiased": Measure("ECE, equal mass, debiased", _ECE, _DEBIASED, binned=True),
    "ece_sweep": Measure("ECE, bins by sweep", "ece_sweep"),
    "smooth_ece": Measure(
        "Smooth ECE",
        "smooth_calibration_error",
    ),
    "kde_ece": Measure("Kernel ECE", "kde_calibration_error", n_examples=(2, MAX_EXAMPLES_FOR_KDE)),
    "classwise_ece": Measure(
        LOGGED_METRICS["classwise_ece"].title, "classwise_calibration_error", binned=True
    ),
    "mce": Measure(LOGGED_METRICS["mce"].title, "maximum_calibration_error", binned=True),
    "post_processing_gap": Measure(
        "Post-processing gap of the top label's squared error",
        "post_processing_gap",
        cost=40,
    ),
    "area_under_risk_coverage": Measure(
        "Area under the risk-coverage curve",
        "area_under_risk_coverage",
    ),
}


def measure_all(
    probs: NDArray[Any], labels: NDArray[np.int64], settings: Settings
) -> tuple[dict[str, Interval], dict[str, int]]:
    """Every metric that the number of examples allows, with its interval, by key; and its number of resamples."""
    asked = {
        key: measure
        for key, measure in MEASURES.items()
        if measure.n_examples[0] <= len(probs) <= measure.n_examples[1]
    }
    counted = {key: measure for key, measure in asked.items() if measure.resampling == "counts"}
    intervals = percentile_intervals(
        [(measure.metric, _options(measure, settings)) for measure in counted.values()],
        probs,
        labels,
        n_resamples=settings.n_resamples,
        confidence_level=settings.confidence_level,
        seed=settings.seed,
    )
    found = dict(zip(counted, intervals, strict=True))
    n_resamples = {
        key: settings.n_resamples
        if key in counted
        else _affordable(measure, probs.shape, settings.n_resamples)
        for key, measure in asked.items()
    }
    metrics = {
        key: found[key] if key in found else _measure(measure, probs, labels, settings, n_resamples[key])
        for key, measure in asked.items()
    }
    return metrics, n_resamples


def _options(measure: Measure, settings: Settings) -> dict[str, Any]:
    return dict(measure.options) | ({"n_bins": settings.n_bins} if measure.binned else {})


def _measure(
    measure: Measure, probs: NDArray[Any], labels: NDArray[np.int64], settings: Settings, n_resamples: int
) -> Interval:
    options = _options(measure, settings)

    def compute(rows: NDArray[Any], targets: NDArray[np.int64]) -> float:
        result = getattr(metrics, measure.metric)(rows, targets, **options)
        return float(result if measure.part is None else getattr(result, measure.part))

    if not n_resamples:
        return Interval(compute(probs, labels))
    by_name = measure.part is None
    return metrics.bootstrap_interval(
        measure.metric if by_name else compute,
        probs,
        labels,
        n_resamples=n_resamples,
        confidence_level=settings.confidence_level,
        seed=settings.seed,
        **(options if by_name else {}),
    )


def _affordable(measure: Measure, shape: tuple[int, ...], n_resamples: int) -> int:
    """How many resamples are worth their time; 0 where too few are."""
    n_examples, n_classes = shape
    if measure.resampling == "none":
        return 0
    width = 2 if measure.resampling == "top_label" else n_classes
    calls = min(_MOST_CALLS, int(_BUDGET // (n_examples * (width + measure.cost))))
    return min(n_resamples, calls) if calls >= _FEWEST_CALLS else 0
