"""Calibration metrics: numpy arrays in, plain floats out.

The state that an evaluation fills batch by batch on the device is in `hf_calib.metrics.streaming`; it is
not imported here, because it needs torch.
"""

from typing import Any

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


def __getattr__(name: str) -> Any:
    """The report, which draws figures too, is loaded when it is first asked for."""
    if name in ("CalibrationReport", "calibration_report"):
        import hf_calib.report

        return getattr(hf_calib.report, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
