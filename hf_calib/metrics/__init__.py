"""Calibration metrics: functions of numpy arrays that return floats.

These arguments have the same meaning in every function. probs: (N, C) float, rows that sum to 1.
labels: (N,) int in [0, C), or soft labels (N, C) float, rows that sum to 1. n_bins: M, at least 1.
sample_weight: (N,) of at least 0, not all 0; None for equal weights. n_resamples: at least 1. seed:
the seed of the draws. confidence_level: in (0, 1). Unless a function says otherwise, it returns a
fraction in [0, 1].

`CalibrationState` is updated in batches. It needs torch only for `update_logits`.
"""

from hf_calib.metrics.corp import ConfidenceErrors as ConfidenceErrors
from hf_calib.metrics.corp import CorpCurve as CorpCurve
from hf_calib.metrics.corp import CorpDecomposition as CorpDecomposition
from hf_calib.metrics.corp import confidence_errors as confidence_errors
from hf_calib.metrics.corp import corp_curve as corp_curve
from hf_calib.metrics.corp import corp_decomposition as corp_decomposition
from hf_calib.metrics.entities import Entities as Entities
from hf_calib.metrics.entities import entity_scores as entity_scores
from hf_calib.metrics.entities import find_entities as find_entities
from hf_calib.metrics.intervals import ConsistencyTest as ConsistencyTest
from hf_calib.metrics.intervals import bootstrap_interval as bootstrap_interval
from hf_calib.metrics.intervals import (
    calibration_error_interval as calibration_error_interval,
)
from hf_calib.metrics.intervals import consistency_test as consistency_test
from hf_calib.metrics.kernel import kde_calibration_error as kde_calibration_error
from hf_calib.metrics.ranking import OodDetection as OodDetection
from hf_calib.metrics.ranking import RiskCoverage as RiskCoverage
from hf_calib.metrics.ranking import (
    area_under_risk_coverage as area_under_risk_coverage,
)
from hf_calib.metrics.ranking import ood_auroc as ood_auroc
from hf_calib.metrics.ranking import ood_detection as ood_detection
from hf_calib.metrics.ranking import risk_coverage_curve as risk_coverage_curve
from hf_calib.metrics.scores import BrierDecomposition as BrierDecomposition
from hf_calib.metrics.scores import accuracy as accuracy
from hf_calib.metrics.scores import brier_decomposition as brier_decomposition
from hf_calib.metrics.scores import brier_score as brier_score
from hf_calib.metrics.scores import (
    classwise_calibration_error as classwise_calibration_error,
)
from hf_calib.metrics.scores import (
    expected_calibration_error as expected_calibration_error,
)
from hf_calib.metrics.scores import (
    maximum_calibration_error as maximum_calibration_error,
)
from hf_calib.metrics.scores import negative_log_likelihood as negative_log_likelihood
from hf_calib.metrics.scores import root_brier_score as root_brier_score
from hf_calib.metrics.scores import true_calibration_error as true_calibration_error
from hf_calib.metrics.smooth import smooth_calibration_error as smooth_calibration_error
from hf_calib.metrics.smooth import (
    smooth_calibration_error_dual as smooth_calibration_error_dual,
)
from hf_calib.metrics.state import CalibrationState as CalibrationState
from hf_calib.metrics.sums import Interval as Interval

__all__ = [name for name in dir() if callable(globals()[name]) and name[0] != "_"]
