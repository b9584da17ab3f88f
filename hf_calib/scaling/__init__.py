"""Post-hoc calibration: scikit-learn estimators that are fitted on held-out logits and labels."""

from hf_calib.scaling.histogram import HistogramBinning
from hf_calib.scaling.isotonic import IsotonicScaling
from hf_calib.scaling.spline import SplineScaling
from hf_calib.scaling.temperature import TemperatureScaling
from hf_calib.scaling.vector_matrix import MatrixScaling, VectorScaling

__all__ = [
    "HistogramBinning",
    "IsotonicScaling",
    "MatrixScaling",
    "SplineScaling",
    "TemperatureScaling",
    "VectorScaling",
]
