"""The table of scalers: which class each method is, what it needs, and whether a model's head can hold it."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Literal, NamedTuple

import numpy as np

from hf_calib._errors import InputTypeError, expected


class ScalerEntry(NamedTuple):
    """One row of `SCALERS`.

    Args:
        name, module: of the class, and where it is in `hf_calib.scaling`.
        needs: "labels" (N,) of single-label data, "label_matrix" (N, C) of multi-label data, or the
            "training_loss" or "priors", and then no labels; or labels and the "groups" (N,) of the rows.
        foldable, bias: whether `hf_calib.fold` can write it into the head, and whether that then needs a bias.
    """

    name: str
    module: str
    needs: Literal["labels", "label_matrix", "training_loss", "priors", "groups"] = "labels"
    foldable: bool = False
    bias: bool = False

    def load(self) -> Any:
        """The class; scikit-learn is imported here, not with the table."""
        return getattr(import_module(f"hf_calib.scaling.{self.module}"), self.name)


#: The scalers: name of the method -> `ScalerEntry`. Names are those of the command line and of a model's
#: `config.calibration`; foldable ones come first.
SCALERS: dict[str, ScalerEntry] = {
    "temperature": ScalerEntry("TemperatureScaling", "temperature", "labels", True),
    "per_label_temperature": ScalerEntry("PerLabelTemperatureScaling", "temperature", "label_matrix", True),
    "vector": ScalerEntry("VectorScaling", "linear", "labels", True, True),
    "matrix": ScalerEntry("MatrixScaling", "linear", "labels", True, True),
    "structured_vector": ScalerEntry("StructuredVectorScaling", "linear", "labels", True, True),
    "structured_matrix": ScalerEntry("StructuredMatrixScaling", "linear", "labels", True, True),
    "auto": ScalerEntry("AutoScaling", "auto", "labels", True),
    "prior_correction": ScalerEntry("PriorCorrection", "priors", "priors", True),
    "dirichlet": ScalerEntry("DirichletScaling", "linear"),
    "ensemble_temperature": ScalerEntry("EnsembleTemperatureScaling", "curves"),
    "histogram": ScalerEntry("HistogramBinning", "curves"),
    "isotonic": ScalerEntry("IsotonicScaling", "curves"),
    "spline": ScalerEntry("SplineScaling", "curves"),
    "grouped": ScalerEntry("GroupedScaling", "grouped", "groups"),
    "inverse_link": ScalerEntry("InverseLink", "inverse", "training_loss"),
}
# What the commands offer: their models and files of predictions have one label per row.
SINGLE_LABEL_SCALERS = {method: entry for method, entry in SCALERS.items() if entry.needs == "labels"}
FOLDABLE_SCALERS = {method: entry for method, entry in SCALERS.items() if entry.foldable}


def method_of(scaler: Any, folds: bool = False) -> str:
    """The method of a scaler, or of the one that it is derived from; TypeError for any other object."""
    entries = FOLDABLE_SCALERS if folds else SCALERS
    methods = {(f"hf_calib.scaling.{entry.module}", entry.name): method for method, entry in entries.items()}
    for kind in type(scaler).__mro__:
        if (kind.__module__, kind.__name__) in methods:
            return methods[kind.__module__, kind.__name__]
    way_out = "pass a scaler of hf_calib.scaling, or of a class derived from one"
    if folds:
        way_out = "keep the scaler beside the model with its save_pretrained, for hf_calib.pipeline"
    names = ", ".join(entry.name for entry in entries.values())
    raise InputTypeError(expected("scaler", f"be one of {names}", type(scaler).__name__, way_out))


def foldable_method(scaler: Any) -> str:
    """The same for one that folds; TypeError for any other scaler, too."""
    return method_of(scaler, folds=True)


def is_multi_label(scaler: Any) -> bool:
    """Whether a scaler's probabilities are sigmoids, not the softmax."""
    return bool(getattr(scaler, "multi_label", False))


def fitted_numbers(scaler: Any) -> dict[str, Any]:
    """The fitted parameters, where these are at most a number per class."""
    names = [name for name in vars(scaler) if name.endswith("_") and not name.startswith("_")]
    arrays = {name.removesuffix("_"): np.asarray(getattr(scaler, name)) for name in names}
    return {name: a.tolist() for name, a in arrays.items() if a.ndim <= 1 and a.dtype.kind in "fiu"}
