"""The results of a finished study: numbers, intervals and sentences; what its report renders."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hf_calib.metrics.checks import FloatArray
from hf_calib.metrics.sums import TopLabel, bin_sums, mean_bins

CONFIDENCE_LEVEL = 0.95  # of every interval
LEVEL = 0.05  # of the corrected p: a difference below it is beyond chance
UNSCALED = "none"  # the method of the network as trained
HIGHER_IS_BETTER = frozenset(
    {"accuracy"}
)  # of the metrics of a study; of the others the smaller value is better

_PAIR = ("loss", "method")
_TRIPLE = (*_PAIR, "metric")
_N_BINS = 15


class Detectable(NamedTuple):
    """The difference of a metric that a study would find in 80% of the cases.

    Args:
        value: a true difference of this size, in the metric's unit, by the mean variances of its comparisons.
        fewest_seeds: that would find half of it, as often, if the seeds vary as little as they may by what the study
            tells; None if more than 100, or any number, would not.
        most_seeds: the same, if they vary as much as they may.
    """

    value: float
    fewest_seeds: int | None
    most_seeds: int | None


class Estimate(NamedTuple):
    """A mean over seeds.

    Args:
        value: the mean.
        low: lower end of its 95% interval; None where there is none.
        high: upper end.
        n_seeds: trainings behind the mean. With one, the interval covers the test rows only.
    """

    value: float
    low: float | None
    high: float | None
    n_seeds: int


class Difference(NamedTuple):
    """A paired difference to the baseline: a loss with its map, minus the baseline, over the seeds of both.

    Args:
        value: the mean over seeds.
        low: lower end of its 95% interval, not corrected for the number of comparisons; None where there is none.
        high: upper end.
        p: two-sided; None where there is no interval.
        p_corrected: by Holm, over all comparisons of the metric.
        n_seeds: seeds that both have. With one, interval and p cover the test rows only.
        fewest_seeds: that would find a true difference of this size in 80% of studies, if the seeds vary as little as
            they may (80% interval); None where more than 100, or any number, would not.
        most_seeds: the same, if they vary as much as they may.
    """

    value: float
    low: float | None
    high: float | None
    p: float | None
    p_corrected: float | None
    n_seeds: int
    fewest_seeds: int | None = None
    most_seeds: int | None = None


class Panel(NamedTuple):
    """The test predictions of all seeds of a loss with a map, for a reliability diagram.

    Args:
        confidences: (seeds x N,) of the predicted class.
        correct: (seeds x N,) 1 where the prediction is right, else 0.
    """

    confidences: FloatArray
    correct: FloatArray


@dataclass(frozen=True)
class StudyResults:
    """Results of a study of losses x seeds; made by `measure_study`.

    A "none" among the methods is the network as trained; the others are post-hoc maps. A metric that is undefined for a
    cell has no entry in `values`, and one without any value none in the other tables.

    Args:
        losses: labels, in the study's order; those without a finished cell too.
        seeds: in the study's order.
        methods: "none" first, then the maps.
        metrics: key -> title.
        values: (loss, seed, method, metric) -> value of one training.
        means: (loss, method, metric) -> mean over seeds.
        baseline: (loss, method) that the differences are to; None where nothing is finished.
        differences: (loss, method, metric) -> paired difference to the baseline; the baseline itself is not in it.
        missing: (loss, seed) -> why the cell has no numbers.
        panels: (loss, method) -> pooled test predictions.
        n_test: test rows N, or tokens, shared by all cells; 0 where nothing is finished.
        n_calibration: rows that the maps were fitted on.
        n_classes: C.
        n_resamples: of the bootstrap; a slow metric has fewer, which a note says.
        advice: sentences that follow from the numbers.
        notes: sentences on what the numbers cannot tell, and on what was left out.
        counted: what n_test and n_classes count: test tokens, or labels, of other kinds of tasks.
        detectable: metric -> the true difference that the study would have found in 80% of cases.
        variance: over seeds, of each pair of losses its "own", or "pooled".
        equal_variances: (method, metric) -> Bartlett's p that the losses vary alike over the seeds, if pooled.
    """

    losses: tuple[str, ...]
    seeds: tuple[int, ...]
    methods: tuple[str, ...]
    metrics: Mapping[str, str]
    values: Mapping[tuple[str, int, str, str], float]
    means: Mapping[tuple[str, str, str], Estimate]
    baseline: tuple[str, str] | None
    differences: Mapping[tuple[str, str, str], Difference]
    missing: Mapping[tuple[str, int], str]
    panels: Mapping[tuple[str, str], Panel] = field(repr=False, compare=False)
    n_test: int
    n_calibration: int
    n_classes: int
    n_resamples: int
    advice: tuple[str, ...]
    notes: tuple[str, ...]
    counted: tuple[str, str] = ("test rows", "classes")
    detectable: Mapping[str, Detectable] = field(default_factory=dict)
    variance: str = "own"
    equal_variances: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Everything, of JSON's own types, as report.json holds it."""
        return _record(self)


def _record(results: StudyResults) -> dict[str, Any]:
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
        "detectable": _records(
            ("metric",), {(metric,): found for metric, found in results.detectable.items()}
        ),
        "variance": results.variance,
        "equal_variances": [
            {"method": method, "metric": metric, "p": p}
            for (method, metric), p in results.equal_variances.items()
        ],
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
    bins = mean_bins(bin_sums(TopLabel(panel.confidences, panel.correct), _N_BINS))
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
