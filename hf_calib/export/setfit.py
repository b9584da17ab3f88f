"""SetFit models: a head on sentence embeddings, of scikit-learn or of torch, that takes a temperature and an offset."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hf_calib._errors import InputValueError, expected
from hf_calib.scaling.affine import AffineMap, FloatArray


def is_setfit(model: Any) -> bool:
    """Whether it is a `setfit.SetFitModel`; told by name, as that package may not be installed."""
    return type(model).__module__.split(".")[0] == "setfit" and type(model).__name__ == "SetFitModel"


def fold_into_setfit(model: Any, mapping: AffineMap, record: dict[str, Any]) -> None:
    """Write a map into the head, in place; `model.model_head.calibration` keeps the record, and is saved with it.

    Raises:
        ValueError: if the head has one already, is of several labels a row or no linear one of scikit-learn or torch,
            or the map has a factor of its own for each class: the log-probabilities that it was fitted on are the
            head's logits up to a number for each row, which only a common factor leaves without effect.
    """
    head = model.model_head
    if getattr(head, "calibration", None):
        got, way_out = f"a head with {head.calibration['method']} in it", "load or train the model again"
        raise InputValueError(expected("model", "be folded only once", got, way_out))
    if mapping.weight.ndim == 2 or np.ptp(mapping.weight) > 0:
        got, way_out = (
            "a factor for each class",
            "fit TemperatureScaling on np.log(model.predict_proba(texts))",
        )
        raise InputValueError(expected("scaler", "multiply all logits of a SetFitModel alike", got, way_out))
    factor = float(mapping.weight.flat[0])
    offset = None if mapping.bias is None else mapping.bias
    if hasattr(head, "coef_") and hasattr(head, "decision_function"):
        _into_sklearn(head, factor, offset)
    elif isinstance(getattr(head, "linear", None), torch.nn.Linear) and not head.multitarget:
        _into_torch(head, factor, offset)
    else:
        way_out = "keep the scaler beside the model, and call its predict_proba on np.log(model.predict_proba(texts))"
        requirement = "have one linear head, with one label a row,"
        raise InputValueError(expected("a SetFitModel", requirement, type(head).__name__, way_out))
    head.calibration = record


def _into_sklearn(head: Any, factor: float, offset: FloatArray | None) -> None:
    n_classes = len(head.classes_)
    shift = np.zeros(n_classes) if offset is None else _of(offset, n_classes)
    if len(head.coef_) == 1:  # two classes: one row, for the second against the first
        shift = shift[1:] - shift[:1]
    head.intercept_ = factor * head.intercept_ + shift
    head.coef_ = factor * head.coef_


def _into_torch(head: Any, factor: float, offset: FloatArray | None) -> None:
    n_classes = head.linear.out_features
    shift = torch.from_numpy(np.zeros(n_classes) if offset is None else _of(offset, n_classes))
    if head.linear.bias is None and offset is not None:
        way_out = "fit TemperatureScaling, which needs none"
        raise InputValueError(expected("the SetFitHead", "have a bias for this scaler", "none", way_out))
    with torch.no_grad():
        head.linear.weight *= factor
        if head.linear.bias is not None:
            # The head divides by these after its linear layer.
            scale = head.temperature + head.eps
            head.linear.bias.copy_(factor * head.linear.bias + scale * shift.to(head.linear.bias))


def _of(offset: FloatArray, n_classes: int) -> FloatArray:
    if len(offset) != n_classes:
        requirement = f"be fitted on {n_classes} classes, as the model has"
        raise InputValueError(expected("scaler", requirement, len(offset), "fit it on this model's logits"))
    return offset
