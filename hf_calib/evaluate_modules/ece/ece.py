from hf_calib.evaluate_modules import base
from hf_calib.metrics import expected_calibration_error


class ECE(base.ProbabilityMetric):
    """Expected calibration error of the top label, 15 equal-width bins. A fraction, 0 is best."""

    key = "ece"
    function = staticmethod(expected_calibration_error)
    citation = "Guo et al. 2017, On calibration of modern neural networks"
