"""The metrics of a report, and how each gets its interval."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

import hf_calib.metrics as metrics
from hf_calib.metrics.intervals import METRICS, calibration_error_interval, percentile_intervals
from hf_calib.metrics.state import LOGGED_METRICS
from hf_calib.metrics.sums import Interval

# The kernel calibration error compares every pair of examples.
MAX_EXAMPLES_FOR_KDE = 2_000
# Rows that a metric which is called for each resample may read in all of them: seconds, not minutes.
_BUDGET = 1e7
_MOST_CALLS, _FEWEST_CALLS = 200, 50


class Settings(NamedTuple):
    """Settings that every number of a report is computed with."""

    n_bins: int
    confidence_level: float
    n_resamples: int
    seed: int


@dataclass(frozen=True)
class Measure:
    """A row of `MEASURES`: what is computed, what it is called, and how it gets its interval.

    An interval is the quantiles of resamples ("bootstrap"); of a binned ECE the errors of the population that go with
    the sample ("inversion": `calibration_error_interval`). The other measures of mis-calibration have none:
    noise makes each of them larger, and a resample adds that noise again.
    """

    title: str
    metric: str  # its name in `hf_calib.metrics`
    options: Mapping[str, Any] = field(default_factory=dict)
    binned: bool = False  # takes the report's number of bins
    part: str | None = None  # the field of what the metric returns
    interval: Literal["bootstrap", "inversion", "none"] = "none"
    n_examples: tuple[float, float] = (1, np.inf)  # left out of reports on fewer or more

    @property
    def is_counted(self) -> bool:
        """Whether a resample needs only the counts of the rows, which costs next to nothing."""
        return self.interval == "bootstrap" and METRICS[self.metric].sums is not None


_ECE = "expected_calibration_error"
_SPLIT = (50, np.inf)  # in folds of 10 and more

#: The metrics of a report: key -> `Measure`. Keys and titles are those of the trainer's log where it has them.
MEASURES: dict[str, Measure] = {
    "accuracy": Measure(LOGGED_METRICS["accuracy"], "accuracy", interval="bootstrap"),
    "nll": Measure(LOGGED_METRICS["nll"], "negative_log_likelihood", interval="bootstrap"),
    "brier": Measure(LOGGED_METRICS["brier"], "brier_score", interval="bootstrap"),
    "root_brier": Measure("Root Brier score", "root_brier_score", interval="bootstrap"),
    "brier_calibration": Measure(
        "Brier score, calibration part", "brier_decomposition", binned=True, part="calibration"
    ),
    "brier_refinement": Measure(
        "Brier score, refinement part", "brier_decomposition", binned=True, part="refinement"
    ),
    "corp_miscalibration": Measure(
        "Top label's Brier score, miscalibration (CORP)", "corp_decomposition", part="miscalibration"
    ),
    "corp_discrimination": Measure(
        "Top label's Brier score, discrimination (CORP)", "corp_decomposition", part="discrimination"
    ),
    "ece": Measure(LOGGED_METRICS["ece"], _ECE, binned=True, interval="inversion"),
    "adaptive_ece": Measure(
        LOGGED_METRICS["adaptive_ece"],
        _ECE,
        {"binning": "quantile"},
        binned=True,
        interval="inversion",
    ),
    "ece_debiased": Measure(
        "ECE, equal mass, debiased",
        _ECE,
        {"binning": "equal_mass", "debias": True},
        binned=True,
        interval="inversion",
    ),
    "ece_sweep": Measure("ECE, bins by sweep", "ece_sweep"),
    "smooth_ece": Measure("Smooth ECE", "smooth_calibration_error"),
    "kde_ece": Measure("Kernel ECE", "kde_calibration_error", n_examples=(2, MAX_EXAMPLES_FOR_KDE)),
    "classwise_ece": Measure(LOGGED_METRICS["classwise_ece"], "classwise_calibration_error", binned=True),
    "over_confidence": Measure(
        "Over-confidence, at least", "confidence_errors", part="over", n_examples=_SPLIT
    ),
    "under_confidence": Measure(
        "Under-confidence, at least", "confidence_errors", part="under", n_examples=_SPLIT
    ),
    "mce": Measure(LOGGED_METRICS["mce"], "maximum_calibration_error", binned=True),
    "area_under_risk_coverage": Measure(
        "Area under the risk-coverage curve", "area_under_risk_coverage", interval="bootstrap"
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
    counted = {key: measure for key, measure in asked.items() if measure.is_counted}
    intervals = percentile_intervals(
        [(measure.metric, dict(measure.options)) for measure in counted.values()],
        probs,
        labels,
        **_drawing(settings, settings.n_resamples),
    )
    found = dict(zip(counted, intervals, strict=True))
    n_resamples = {key: _affordable(measure, len(probs), settings) for key, measure in asked.items()}
    metrics = {
        key: found[key] if key in found else _measure(measure, probs, labels, settings, n_resamples[key])
        for key, measure in asked.items()
    }
    return metrics, n_resamples


def _drawing(settings: Settings, n_resamples: int) -> dict[str, Any]:
    return {
        "n_resamples": n_resamples,
        "confidence_level": settings.confidence_level,
        "seed": settings.seed,
    }


def _measure(
    measure: Measure, probs: NDArray[Any], labels: NDArray[np.int64], settings: Settings, n_resamples: int
) -> Interval:
    options = dict(measure.options) | ({"n_bins": settings.n_bins} if measure.binned else {})
    if measure.interval == "bootstrap" and n_resamples:
        drawing = _drawing(settings, n_resamples)
        return metrics.bootstrap_interval(measure.metric, probs, labels, **drawing, **options)
    result = getattr(metrics, measure.metric)(probs, labels, **options)
    value = float(result if measure.part is None else getattr(result, measure.part))
    value = max(value, 0.0)  # No measure is negative; an unbiased estimate of one may be.
    if measure.interval != "inversion":
        return Interval(value)
    options.pop("debias", None)  # with or without it, the error of the population is the same
    drawing = _drawing(settings, n_resamples)
    return calibration_error_interval(probs, labels, **drawing, **options)._replace(value=value)


def _affordable(measure: Measure, n_examples: int, settings: Settings) -> int:
    """How many resamples are worth their time; 0 where too few are, or the metric has no interval."""
    if measure.interval == "none":
        return 0
    if measure.is_counted or measure.interval == "inversion":
        return settings.n_resamples
    calls = min(_MOST_CALLS, int(_BUDGET // n_examples))
    return min(settings.n_resamples, calls) if calls >= _FEWEST_CALLS else 0
