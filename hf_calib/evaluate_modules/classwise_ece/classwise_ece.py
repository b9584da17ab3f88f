from hf_calib.evaluate_modules import base
from hf_calib.metrics import classwise_calibration_error


class ClasswiseECE(base.ProbabilityMetric):
    """Binned calibration error of each class's probability, averaged over the classes. A fraction, 0 is best."""

    key = "classwise_ece"
    function = staticmethod(classwise_calibration_error)
    citation = "Kull et al. 2019, Beyond temperature scaling"
