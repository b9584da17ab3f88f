"""Post-hoc calibration: scikit-learn estimators that are fitted on held-out logits and labels, and shifts of priors.

The classes are loaded when they are first used, so that the command line can read the table of them at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hf_calib.scaling.methods import SCALERS, ScalerEntry

if TYPE_CHECKING:
    from hf_calib.scaling.auto import AutoScaling
    from hf_calib.scaling.dirichlet import DirichletScaling
    from hf_calib.scaling.ensemble_temperature import EnsembleTemperatureScaling
    from hf_calib.scaling.grouped import GroupedScaling
    from hf_calib.scaling.histogram import HistogramBinning
    from hf_calib.scaling.inverse_link import InverseLink
    from hf_calib.scaling.isotonic import IsotonicScaling
    from hf_calib.scaling.per_label_temperature import PerLabelTemperatureScaling
    from hf_calib.scaling.prior_correction import PriorCorrection
    from hf_calib.scaling.prior_shift import PriorEstimate, estimate_prior
    from hf_calib.scaling.saved_map import load_map, save_map
    from hf_calib.scaling.scaler import Scaler
    from hf_calib.scaling.spline import SplineScaling
    from hf_calib.scaling.structured import StructuredMatrixScaling, StructuredVectorScaling
    from hf_calib.scaling.temperature import TemperatureScaling
    from hf_calib.scaling.vector_matrix import MatrixScaling, VectorScaling

__all__ = [
    "SCALERS",
    "AutoScaling",
    "DirichletScaling",
    "EnsembleTemperatureScaling",
    "GroupedScaling",
    "HistogramBinning",
    "InverseLink",
    "IsotonicScaling",
    "MatrixScaling",
    "PerLabelTemperatureScaling",
    "PriorCorrection",
    "PriorEstimate",
    "Scaler",
    "ScalerEntry",
    "SplineScaling",
    "StructuredMatrixScaling",
    "StructuredVectorScaling",
    "TemperatureScaling",
    "VectorScaling",
    "estimate_prior",
    "load_map",
    "save_map",
]


def __getattr__(name: str) -> Any:
    if name in ("load_map", "save_map"):
        return getattr(import_module("hf_calib.scaling.saved_map"), name)
    if name == "Scaler":
        return import_module("hf_calib.scaling.scaler").Scaler
    if name in ("PriorEstimate", "estimate_prior"):
        return getattr(import_module("hf_calib.scaling.prior_shift"), name)
    entry = next((entry for entry in SCALERS.values() if entry.name == name), None)
    if entry is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return entry.load()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
