"""Post-hoc calibrators: scikit-learn estimators that are fitted to held-out logits and labels.

Arguments that a class does not explain have the same meaning in every class;
`docs/reference/scaling.md` explains them. Classes are imported at their first use, so that the
command line can read the table without delay.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from hf_calib.scaling._base import Scaler as Scaler
    from hf_calib.scaling.affine import DirichletScaling as DirichletScaling
    from hf_calib.scaling.affine import MatrixScaling as MatrixScaling
    from hf_calib.scaling.affine import (
        PerLabelTemperatureScaling as PerLabelTemperatureScaling,
    )
    from hf_calib.scaling.affine import (
        StructuredMatrixScaling as StructuredMatrixScaling,
    )
    from hf_calib.scaling.affine import (
        StructuredVectorScaling as StructuredVectorScaling,
    )
    from hf_calib.scaling.affine import TemperatureScaling as TemperatureScaling
    from hf_calib.scaling.affine import VectorScaling as VectorScaling
    from hf_calib.scaling.auto import AutoScaling as AutoScaling
    from hf_calib.scaling.curves import (
        EnsembleTemperatureScaling as EnsembleTemperatureScaling,
    )
    from hf_calib.scaling.curves import HistogramBinning as HistogramBinning
    from hf_calib.scaling.curves import IsotonicScaling as IsotonicScaling
    from hf_calib.scaling.curves import SplineScaling as SplineScaling
    from hf_calib.scaling.priors import PriorCorrection as PriorCorrection
    from hf_calib.scaling.saved_map import load_map as load_map
    from hf_calib.scaling.saved_map import save_map as save_map


class ScalerEntry(NamedTuple):
    """A row of `SCALERS`.

    Args:
        name, module: name of the class, and its module in `hf_calib.scaling`.
        needs: "labels" (N,) of single-label data, "label_matrix" (N, C) of multi-label data, or
            "priors" without labels.
        foldable, bias: whether `hf_calib.fold` can write it into the head, and whether the head
            then needs a bias.
    """

    name: str
    module: str
    needs: Literal["labels", "label_matrix", "priors"] = "labels"
    foldable: bool = False
    bias: bool = False

    def load(self) -> Any:
        """Return the class. Scikit-learn is imported here, not with the table."""
        return getattr(import_module(f"hf_calib.scaling.{self.module}"), self.name)


#: All calibrators by method name, each a `ScalerEntry`, foldable ones first. The command line and
#: the `config.calibration` of a model use these names.
SCALERS: dict[str, ScalerEntry] = {
    "temperature": ScalerEntry("TemperatureScaling", "affine", foldable=True),
    "per_label_temperature": ScalerEntry(
        "PerLabelTemperatureScaling", "affine", "label_matrix", foldable=True
    ),
    "vector": ScalerEntry("VectorScaling", "affine", foldable=True, bias=True),
    "matrix": ScalerEntry("MatrixScaling", "affine", foldable=True, bias=True),
    "structured_vector": ScalerEntry(
        "StructuredVectorScaling", "affine", foldable=True, bias=True
    ),
    "structured_matrix": ScalerEntry(
        "StructuredMatrixScaling", "affine", foldable=True, bias=True
    ),
    "auto": ScalerEntry("AutoScaling", "auto", foldable=True),
    "prior_correction": ScalerEntry(
        "PriorCorrection", "priors", "priors", foldable=True
    ),
    "dirichlet": ScalerEntry("DirichletScaling", "affine"),
    "ensemble_temperature": ScalerEntry("EnsembleTemperatureScaling", "curves"),
    "histogram": ScalerEntry("HistogramBinning", "curves"),
    "isotonic": ScalerEntry("IsotonicScaling", "curves"),
    "spline": ScalerEntry("SplineScaling", "curves"),
}
# The methods of the commands, whose models and files of predictions have one label per row.
SINGLE_LABEL_SCALERS = {
    method: entry for method, entry in SCALERS.items() if entry.needs == "labels"
}
FOLDABLE_SCALERS = {
    method: entry for method, entry in SCALERS.items() if entry.foldable
}

# The public names that are imported at their first use.
_MODULES = {entry.name: entry.module for entry in SCALERS.values()}
_MODULES["Scaler"] = "_base"
_MODULES["load_map"] = "saved_map"
_MODULES["save_map"] = "saved_map"
__all__ = sorted([*_MODULES, "SCALERS", "ScalerEntry"])


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"hf_calib.scaling.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
