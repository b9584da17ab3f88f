"""Calibration metrics: numpy arrays in, plain floats out.

The state that an evaluation fills batch by batch on the device is in `hf_calib.metrics.streaming`; it is
not imported here, because it needs torch.
"""

from hf_calib.metrics.calibration import (
    classwise_calibration_error,
    expected_calibration_error,
    maximum_calibration_error,
)
from hf_calib.metrics.proper_scores import accuracy, brier_score, negative_log_likelihood

__all__ = [
    "accuracy",
    "brier_score",
    "classwise_calibration_error",
    "expected_calibration_error",
    "maximum_calibration_error",
    "negative_log_likelihood",
]
