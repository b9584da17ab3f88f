"""A study's report as a record of JSON's own types."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hf_calib.metrics.binning import mean_bins, sum_bins, uniform_bins
from hf_calib.study.results import CONFIDENCE_LEVEL, Panel, StudyResults

_PAIR = ("loss", "method")
_TRIPLE = (*_PAIR, "metric")
_N_BINS = 15


def to_dict(results: StudyResults) -> dict[str, Any]:
    """Everything in the report; what is undefined or infinite is None, predictions are summed in bins."""
    values = [
        {"loss": loss, "seed": seed, "method": method, "metric": metric, "value": _finite(value)}
        for (loss, seed, method, metric), value in results.values.items()
    ]
    return {
        "losses": list(results.losses),
        "seeds": list(results.seeds),
        "methods": list(results.methods),
        "metrics": dict(results.metrics),
        "n_test": results.n_test,
        "n_calibration": results.n_calibration,
        "n_classes": results.n_classes,
        "n_resamples": results.n_resamples,
        "confidence_level": CONFIDENCE_LEVEL,
        "baseline": None if results.baseline is None else dict(zip(_PAIR, results.baseline, strict=True)),
        "advice": list(results.advice),
        "notes": list(results.notes),
        "missing": [
            {"loss": loss, "seed": seed, "reason": reason} for (loss, seed), reason in results.missing.items()
        ],
        "means": _records(_TRIPLE, results.means),
        "differences": _records(_TRIPLE, results.differences),
        "ranks": _records(_TRIPLE, results.ranks),
        "training_time": _records(("loss",), {(loss,): time for loss, time in results.training_time.items()}),
        "reliability": [
            {"loss": loss, "method": method, "bins": _bins(panel)}
            for (loss, method), panel in results.panels.items()
        ],
        "values": values,
    }


def _records(names: tuple[str, ...], table: Mapping[Any, Any]) -> list[dict[str, Any]]:
    """A record for each row: what it is of, and the fields of its Estimate or Difference."""
    return [
        {
            **dict(zip(names, key, strict=True)),
            **{field: _finite(number) for field, number in row._asdict().items()},
        }
        for key, row in table.items()
    ]


def _finite(number: float | None) -> float | None:
    return None if number is None or not math.isfinite(number) else number


def _bins(panel: Panel) -> list[dict[str, float]]:
    """The bins (lower, upper] of a reliability diagram that hold predictions."""
    numbers = uniform_bins(panel.confidences, _N_BINS)
    bins = mean_bins(sum_bins(panel.confidences, panel.correct, numbers, _N_BINS))
    return [
        {
            "lower": m / _N_BINS,
            "upper": (m + 1) / _N_BINS,
            "count": int(bins.counts[m]),
            "confidence": float(bins.confidence[m]),
            "accuracy": float(bins.accuracy[m]),
        }
        for m in range(_N_BINS)
        if bins.counts[m]
    ]
