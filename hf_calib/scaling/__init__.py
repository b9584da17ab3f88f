"""Post-hoc calibration: scikit-learn estimators that are fitted on held-out logits and labels, and shifts of priors.

Arguments that a class does not explain mean the same everywhere: logits (N, C) of any real dtype, read in float64,
where -inf masks a class that is not the label and stays masked; maps that mix the classes refuse it. Once fitted, the
methods take logits of any shape that ends in C. labels (N,) int in [0, C) without -100 or, with multi_label, (N, C) of
0 and 1, and -100 where a label is not known, of sigmoid outputs; sample_weight (N,) of at least 0, None for equal ones.
An affine map has `weight_`, () or (C,), which multiplies the logits, or (C, C), which mixes them, and `bias_` (C,),
which sums to 0 but for sigmoids; `transform` gives its logits. All but temperatures can change the predicted class.

The classes are loaded when they are first used, so that the command line can read the table of them at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hf_calib.scaling.methods import SCALERS, ScalerEntry

if TYPE_CHECKING:
    from hf_calib.scaling._base import Scaler
    from hf_calib.scaling.auto import AutoScaling
    from hf_calib.scaling.curves import (
        EnsembleTemperatureScaling,
        HistogramBinning,
        IsotonicScaling,
        SplineScaling,
    )
    from hf_calib.scaling.grouped import GroupedScaling
    from hf_calib.scaling.inverse import InverseLink
    from hf_calib.scaling.linear import (
        DirichletScaling,
        MatrixScaling,
        StructuredMatrixScaling,
        StructuredVectorScaling,
        VectorScaling,
    )
    from hf_calib.scaling.priors import PriorCorrection, PriorEstimate, estimate_prior
    from hf_calib.scaling.saved_map import load_map, save_map
    from hf_calib.scaling.temperature import PerLabelTemperatureScaling, TemperatureScaling

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

_MODULES = {entry.name: entry.module for entry in SCALERS.values()} | {
    "PriorEstimate": "priors",
    "Scaler": "_base",
    "estimate_prior": "priors",
    "load_map": "saved_map",
    "save_map": "saved_map",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"hf_calib.scaling.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
