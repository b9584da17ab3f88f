from functools import partial

from hf_calib.evaluate_modules import base
from hf_calib.metrics import expected_calibration_error


class AdaptiveECE(base.ProbabilityMetric):
    """Expected calibration error of the top label, 15 equal-mass bins. A fraction, 0 is best."""

    key = "adaptive_ece"
    function = staticmethod(partial(expected_calibration_error, binning="quantile"))
    citation = "Mukhoti et al. 2020, Calibrating deep neural networks using focal loss"
