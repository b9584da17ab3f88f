from hf_calib.evaluate_modules import base
from hf_calib.metrics import smooth_calibration_error


class SmoothECE(base.ProbabilityMetric):
    """Smooth calibration error of the top label (smECE), which needs no bins. A fraction, 0 is best."""

    key = "smooth_ece"
    function = staticmethod(smooth_calibration_error)
    citation = "Blasiok and Nakkiran 2023, Smooth ECE"
