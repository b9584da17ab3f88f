"""Post-hoc calibration: scikit-learn estimators that are fitted on held-out logits and labels."""

from hf_calib.scaling.dirichlet import DirichletScaling
from hf_calib.scaling.ensemble_temperature import EnsembleTemperatureScaling
from hf_calib.scaling.per_label_temperature import PerLabelTemperatureScaling
from hf_calib.scaling.temperature import TemperatureScaling
from hf_calib.scaling.vector_matrix import MatrixScaling, VectorScaling

__all__ = [
    "DirichletScaling",
    "EnsembleTemperatureScaling",
    "MatrixScaling",
    "PerLabelTemperatureScaling",
    "TemperatureScaling",
    "VectorScaling",
]
