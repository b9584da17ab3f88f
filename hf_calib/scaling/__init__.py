"""Post-hoc calibration: scikit-learn estimators that are fitted on held-out logits and labels."""

from hf_calib.scaling.dirichlet import DirichletScaling
from hf_calib.scaling.ensemble_temperature import EnsembleTemperatureScaling
from hf_calib.scaling.histogram import HistogramBinning
from hf_calib.scaling.inverse_link import InverseLink
from hf_calib.scaling.isotonic import IsotonicScaling
from hf_calib.scaling.per_label_temperature import PerLabelTemperatureScaling
from hf_calib.scaling.spline import SplineScaling
from hf_calib.scaling.temperature import TemperatureScaling
from hf_calib.scaling.vector_matrix import MatrixScaling, VectorScaling

__all__ = [
    "DirichletScaling",
    "EnsembleTemperatureScaling",
    "HistogramBinning",
    "InverseLink",
    "IsotonicScaling",
    "MatrixScaling",
    "PerLabelTemperatureScaling",
    "SplineScaling",
    "TemperatureScaling",
    "VectorScaling",
]
