"""The table of the metrics that have a name in `bootstrap_interval` and `consistency_test`.

A metric is a function of probs and labels. Many have a cheaper form on resamples; a row says which.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hf_calib._errors import InputTypeError, expected
from hf_calib.metrics._resampled import AnyMetric, Classwise, Mean, Resampled, TopLabel
from hf_calib.metrics._simulated import Simulation, classwise_simulation, top_label_simulation
from hf_calib.metrics.checks import check_choice
from hf_calib.metrics.kernel import kde_calibration_error
from hf_calib.metrics.post_processing import post_processing_gap
from hf_calib.metrics.scores import (
    accuracy,
    brier_score,
    classwise_calibration_error,
    expected_calibration_error,
    maximum_calibration_error,
    negative_log_likelihood,
    negative_logs,
    root_brier_score,
    squared_distances,
    true_calibration_error,
)
from hf_calib.metrics.selective import area_under_risk_coverage, mean_risk
from hf_calib.metrics.smooth import smooth_calibration_error, top_label_smooth_error
from hf_calib.metrics.smooth_dual import smooth_calibration_error_dual, top_label_smooth_error_dual
from hf_calib.metrics.soft_labels import uncertainty_correlation
from hf_calib.metrics.sums import top_label, winners
from hf_calib.metrics.sweep import ece_sweep, top_label_sweep

MetricFunction = Callable[..., float]


class Metric(NamedTuple):
    """A row of `METRICS`, or a user's own function.

    Args:
        function: of probs (N, C) and labels, with the metric's options.
        resampled: makes the form that a bootstrap evaluates, from probs, labels and the options; None calls
            the function with the drawn rows.
        simulated: makes the form that is evaluated on labels drawn from probs, from probs and the options;
            None calls the function with the drawn labels.
        resampling: what a resample reads: only how often it drew each row ("counts"); the drawn confidences
            and whether they are right ("top_label"); the drawn rows ("rows"). "none" if the metric has no
            meaning on rows that repeat.
    """

    function: MetricFunction
    resampled: Callable[..., Resampled] | None = None
    simulated: Callable[..., Simulation] | None = None
    resampling: Literal["counts", "top_label", "rows", "none"] = "rows"


def _accuracy(probs: NDArray[Any], labels: NDArray[Any]) -> Resampled:
    return Mean(top_label(probs, labels)[1])


def _nll(probs: NDArray[Any], labels: NDArray[Any]) -> Resampled:
    return Mean(negative_logs(probs, labels))


def _brier(probs: NDArray[Any], labels: NDArray[Any], *, root: bool = False) -> Resampled:
    return Mean(squared_distances(probs, labels), root=root)


def _distance(probs: NDArray[Any], labels: NDArray[Any]) -> Resampled:
    return Mean(np.sqrt(squared_distances(probs, labels)))


def _binned(probs: NDArray[Any], labels: NDArray[Any], **options: Any) -> Resampled:
    confidences, correct = top_label(probs, labels)
    return TopLabel(confidences, correct, **options)


def _simulated(probs: NDArray[Any], **options: Any) -> Simulation:
    return top_label_simulation(winners(probs)[0], **options)


def _of_top_label(metric: MetricFunction) -> Callable[..., Resampled]:
    """The form of a metric of (confidences, correct), whose resamples are (N,) and not (N, C)."""

    def resampled(probs: NDArray[Any], labels: NDArray[Any], **options: Any) -> Resampled:
        return AnyMetric(partial(metric, **options), *top_label(probs, labels))

    return resampled


METRICS: dict[str, Metric] = {
    "accuracy": Metric(accuracy, _accuracy, resampling="counts"),
    "area_under_risk_coverage": Metric(
        area_under_risk_coverage, _of_top_label(mean_risk), resampling="top_label"
    ),
    "brier_score": Metric(brier_score, _brier, resampling="counts"),
    "classwise_calibration_error": Metric(
        classwise_calibration_error, Classwise, classwise_simulation, resampling="counts"
    ),
    "ece_sweep": Metric(ece_sweep, _of_top_label(top_label_sweep), resampling="top_label"),
    "expected_calibration_error": Metric(
        expected_calibration_error, _binned, _simulated, resampling="counts"
    ),
    # It leaves each example out of its own estimate, but could not leave out its copies in a resample.
    "kde_calibration_error": Metric(kde_calibration_error, resampling="none"),
    "maximum_calibration_error": Metric(
        maximum_calibration_error,
        partial(_binned, norm="max"),
        partial(_simulated, norm="max"),
        resampling="counts",
    ),
    "negative_log_likelihood": Metric(negative_log_likelihood, _nll, resampling="counts"),
    "post_processing_gap": Metric(post_processing_gap),
    "root_brier_score": Metric(root_brier_score, partial(_brier, root=True), resampling="counts"),
    "smooth_calibration_error": Metric(
        smooth_calibration_error, _of_top_label(top_label_smooth_error), resampling="top_label"
    ),
    "smooth_calibration_error_dual": Metric(
        smooth_calibration_error_dual, _of_top_label(top_label_smooth_error_dual), resampling="top_label"
    ),
    "true_calibration_error": Metric(true_calibration_error, _distance, resampling="counts"),
    "uncertainty_correlation": Metric(uncertainty_correlation),
}


def find_metric(metric: str | MetricFunction) -> Metric:
    """The row of a name, or one for a function."""
    if metric is kde_calibration_error:
        return METRICS["kde_calibration_error"]
    if callable(metric):
        return Metric(metric)
    if not isinstance(metric, str):
        way_out = "for example 'expected_calibration_error'"
        got = type(metric).__name__
        raise InputTypeError(expected("metric", "be a name or a function of probs and labels", got, way_out))
    check_choice("metric", metric, tuple(METRICS))
    return METRICS[metric]
