from hf_calib.evaluate_modules import base
from hf_calib.metrics import brier_score


class Brier(base.ProbabilityMetric):
    """Brier score: squared distance of the probabilities to the one-hot label, summed over classes. 0 to 2."""

    key = "brier"
    function = staticmethod(brier_score)
    citation = "Brier 1950, Verification of forecasts expressed in terms of probability"
