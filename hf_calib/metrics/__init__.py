"""Calibration metrics: numpy arrays in, plain floats out.

Arguments that a function does not explain mean the same everywhere: probs (N, C) float, rows that sum to 1; labels (N,)
int in [0, C), or soft labels (N, C) float, rows that sum to 1; n_bins M, at least 1; sample_weight (N,) of at least 0,
not all 0, None for equal weights; n_resamples, at least 1; seed, of the draws; confidence_level, in (0, 1).
What a function returns, unless it says otherwise, is a fraction in [0, 1].

The state that an evaluation fills batch by batch on the device is in `hf_calib.metrics.streaming`: it needs torch.
"""

from hf_calib.metrics.corp import (
    ConfidenceErrors,
    CorpCurve,
    CorpDecomposition,
    confidence_errors,
    corp_curve,
    corp_decomposition,
)
from hf_calib.metrics.entities import Entities, entity_scores, find_entities
from hf_calib.metrics.intervals import (
    ConsistencyTest,
    bootstrap_interval,
    calibration_error_interval,
    consistency_test,
)
from hf_calib.metrics.kernel import kde_calibration_error
from hf_calib.metrics.ranking import (
    OodDetection,
    RiskCoverage,
    area_under_risk_coverage,
    ood_auroc,
    ood_detection,
    risk_coverage_curve,
)
from hf_calib.metrics.scores import (
    BrierDecomposition,
    accuracy,
    brier_decomposition,
    brier_score,
    classwise_calibration_error,
    expected_calibration_error,
    maximum_calibration_error,
    negative_log_likelihood,
    root_brier_score,
    true_calibration_error,
)
from hf_calib.metrics.smooth import smooth_calibration_error, smooth_calibration_error_dual
from hf_calib.metrics.state import CalibrationState
from hf_calib.metrics.sums import Interval
from hf_calib.metrics.sweep import ece_sweep

__all__ = [
    "BrierDecomposition",
    "CalibrationState",
    "ConfidenceErrors",
    "ConsistencyTest",
    "CorpCurve",
    "CorpDecomposition",
    "Entities",
    "Interval",
    "OodDetection",
    "RiskCoverage",
    "accuracy",
    "area_under_risk_coverage",
    "bootstrap_interval",
    "brier_decomposition",
    "brier_score",
    "calibration_error_interval",
    "classwise_calibration_error",
    "confidence_errors",
    "consistency_test",
    "corp_curve",
    "corp_decomposition",
    "ece_sweep",
    "entity_scores",
    "expected_calibration_error",
    "find_entities",
    "kde_calibration_error",
    "maximum_calibration_error",
    "negative_log_likelihood",
    "ood_auroc",
    "ood_detection",
    "risk_coverage_curve",
    "root_brier_score",
    "smooth_calibration_error",
    "smooth_calibration_error_dual",
    "true_calibration_error",
]
