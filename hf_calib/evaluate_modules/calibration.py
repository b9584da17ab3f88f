"""A module for `evaluate`, which copies this file, with one metric per configuration."""

from collections.abc import Callable
from functools import partial
from typing import Any

import evaluate
import numpy as np
from datasets import Features, Sequence, Value

from hf_calib import metrics
from hf_calib._errors import check, did_you_mean

FUNCTIONS: dict[str, Callable[..., float]] = {
    "ece": metrics.expected_calibration_error,
    "adaptive_ece": partial(metrics.expected_calibration_error, binning="quantile"),
    "classwise_ece": metrics.classwise_calibration_error,
    "smooth_ece": metrics.smooth_calibration_error,
    "brier": metrics.brier_score,
}


class Calibration(evaluate.Metric):
    """The metric of hf_calib with the name of the configuration; 0 is best."""

    def _info(self) -> evaluate.MetricInfo:
        name = self.config_name
        check(
            name in FUNCTIONS,
            "the configuration to be a metric",
            repr(name),
            did_you_mean(name, FUNCTIONS),
        )
        return evaluate.MetricInfo(
            description=str(self.__doc__),
            citation="hf_calib.metrics names the papers of each function",
            inputs_description="predictions: probabilities (N, C), not logits; references: class indices (N,)",
            features=Features(
                {
                    "predictions": Sequence(Value("float64")),
                    "references": Value("int64"),
                }
            ),
        )

    def _compute(
        self, predictions: Any, references: Any, **options: Any
    ) -> dict[str, float]:
        name = self.config_name
        return {
            name: FUNCTIONS[name](
                np.asarray(predictions), np.asarray(references), **options
            )
        }
