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
from hf_calib.metrics.sums import SumMetric, classwise_sums, top_label_sums

MetricFunction = Callable[..., float]


class Metric(NamedTuple):
    """A row of `METRICS`, or a user's own function.

    Args:
        function: of probs (N, C) and labels, with the metric's options.
        sums: of the options, where the metric is one of sums of rows: its resamples then cost O(N) additions.
        of_top: of a `TopLabel` and the options, where the metric reads no more: its resamples are (N,), not (N, C).
        allows_copies: whether the metric has a meaning on rows that repeat.
        higher_is_better: its direction.
    """

    function: MetricFunction
    sums: Callable[..., SumMetric] | None = None
    of_top: MetricFunction | None = None
    allows_copies: bool = True
    higher_is_better: bool = False


METRICS = {
    "accuracy": Metric(scores.accuracy, scores.accuracy_sums, higher_is_better=True),
    "area_under_risk_coverage": Metric(ranking.area_under_risk_coverage, of_top=ranking.mean_risk),
    "brier_score": Metric(scores.brier_score, scores.brier_sums),
    "classwise_calibration_error": Metric(scores.classwise_calibration_error, classwise_sums),
    "ece_sweep": Metric(sweep.ece_sweep, of_top=sweep.sweep_error),
    "expected_calibration_error": Metric(scores.expected_calibration_error, top_label_sums),
    # It leaves each example out of its own estimate, but could not leave out its copies in a resample.
    "kde_calibration_error": Metric(kernel.kde_calibration_error, allows_copies=False),
    "maximum_calibration_error": Metric(
        scores.maximum_calibration_error, partial(top_label_sums, norm="max")
    ),
    "negative_log_likelihood": Metric(scores.negative_log_likelihood, scores.nll_sums),
    "root_brier_score": Metric(scores.root_brier_score, partial(scores.brier_sums, root=True)),
    "smooth_calibration_error": Metric(smooth.smooth_calibration_error, of_top=smooth.smooth_error),
    "smooth_calibration_error_dual": Metric(
        smooth.smooth_calibration_error_dual, of_top=smooth.smooth_error_dual
    ),
    "true_calibration_error": Metric(scores.true_calibration_error, scores.distance_sums),
}


def find_metric(metric: str | MetricFunction) -> Metric:
    """The row of a name, or one for a function."""
    if metric is kernel.kde_calibration_error:
        return METRICS["kde_calibration_error"]
    if callable(metric):
        return Metric(metric)
    if not isinstance(metric, str):
        way_out = "for example 'expected_calibration_error'"
        got = type(metric).__name__
        raise InputTypeError(expected("metric", "be a name or a function of probs and labels", got, way_out))
    check_choice("metric", metric, tuple(METRICS))
    return METRICS[metric]
