"""The table of the metrics that have a name in `bootstrap_interval`, `consistency_test`, reports and studies.

A new metric is a function of probs and labels, its row here, and its test.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from hf_calib._errors import InputTypeError, expected
from hf_calib.metrics import kernel, ranking, scores, smooth, sweep
from hf_calib.metrics.checks import check_choice
from hf_calib.metrics.sums import SumMetric, classwise_sums, mean_of, top_label_sums

MetricFunction = Callable[..., float]


class Metric(NamedTuple):
    """A row of `METRICS`, or a user's own function."""

    function: MetricFunction  # of probs and labels, and the metric's options
    sums: Callable[..., SumMetric] | None = None  # of the options: resamples then cost O(N) additions
    of_top: MetricFunction | None = None  # of a `TopLabel`, where the metric reads no more


METRICS = {
    row.function.__name__: row
    for row in (
        Metric(scores.accuracy, partial(mean_of, scores.shares_right)),
        Metric(ranking.area_under_risk_coverage, of_top=ranking.mean_risk),
        Metric(scores.brier_score, partial(mean_of, scores.squared_distances)),
        Metric(scores.classwise_calibration_error, classwise_sums),
        Metric(sweep.ece_sweep, of_top=sweep.sweep_error),
        Metric(scores.expected_calibration_error, top_label_sums),
        Metric(kernel.kde_calibration_error),
        Metric(scores.maximum_calibration_error, partial(top_label_sums, norm="max")),
        Metric(scores.negative_log_likelihood, partial(mean_of, scores.negative_logs)),
        Metric(scores.root_brier_score, partial(mean_of, scores.squared_distances, root=True)),
        Metric(smooth.smooth_calibration_error, of_top=smooth.smooth_error),
        Metric(smooth.smooth_calibration_error_dual, of_top=smooth.smooth_error_dual),
        Metric(scores.true_calibration_error, partial(mean_of, scores.distances)),
    )
}


def find_metric(metric: str | MetricFunction) -> Metric:
    """The row of a name, or one for a function."""
    if callable(metric):
        return Metric(metric)
    if not isinstance(metric, str):
        way_out = "for example 'expected_calibration_error'"
        got = type(metric).__name__
        raise InputTypeError(expected("metric", "be a name or a function of probs and labels", got, way_out))
    check_choice("metric", metric, tuple(METRICS))
    return METRICS[metric]
