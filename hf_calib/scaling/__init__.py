"""Post-hoc calibration: scikit-learn estimators that are fitted on held-out logits and labels."""

from hf_calib.scaling.temperature import TemperatureScaling

__all__ = ["TemperatureScaling"]
