"""Writes a fitted scaler into a model's classification head, so that no code of ours is needed to use it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from hf_calib._errors import InputTypeError, InputValueError, expected
from hf_calib.export.heads import (
    LinearMap,
    change,
    changed,
    equal,
    find_heads,
    linear_layers,
    logits_of,
    made_up_batch,
    reloads_with_bias,
    undisturbed,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_calib.scaling import MatrixScaling, PerLabelTemperatureScaling, TemperatureScaling, VectorScaling

_FITTED = ("temperature", "temperatures", "weight", "bias")  # what a record may hold of a scaler


class _Change(NamedTuple):
    """What is done to the logits, and what is written down of it."""

    method: str
    linear_map: LinearMap
    fitted: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.method.replace('_', ' ')} scaling"

    def no_head(self, got: str) -> str:
        if self.method == "temperature":
            requirement = "have a linear head whose division divides the logits"
            way_out = "divide the logits outside the model instead, with TemperatureScaling.transform"
        else:
            requirement = f"have a linear head that {self.name} can be folded into"
            way_out = "keep the scaler beside the model, and call its predict_proba on the logits"
        return expected("model", requirement, got, way_out)


def fold(
    model: PreTrainedModel,
    scaler: TemperatureScaling | VectorScaling | MatrixScaling | PerLabelTemperatureScaling,
    *,
    batch: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    r"""Write a fitted scaler into the classification head, in place, so that the model returns scaled logits.

    Use it before saving, pushing or exporting: pipelines, inference servers and ONNX exports of the model are
    then calibrated. `fold_temperature` does the same with a bare number. Scalers that are no linear function
    of the logits (Dirichlet, ensemble, spline, isotonic, histogram) have no place in a linear layer.

    $$(A W) h + (A b + c) = A (W h + b) + c$$

    with A = 1/T (temperature), diag(1/T_1, ..., 1/T_C) (per label), diag(w) (vector) or the whole matrix.

    The head is found by what it does, not by its name: of the linear layers with one output per label, the
    one whose change changes the logits alike. Where logits are an average of several heads, each gets the
    same change. On any failure the weights are as they were, bit for bit.

    Args:
        model: a transformers classifier of sequences, tokens or images, in float32 or 64; its problem_type
            says softmax or sigmoid, and must be the scaler's.
        scaler: fitted on this model's logits.
        batch: inputs of the model, to find and check the head on; a few rows do. None makes up token ids or
            pixels from the model's config.

    Returns:
        The same model. `model.config.calibration`, a dict that is saved with it, says so: "method"
        ("temperature", "per_label_temperature", "vector" or "matrix"), "folded", "head" (names of the layers)
        and the scaler's numbers, but for a matrix; beside what it already held.

    Raises:
        TypeError: if the scaler cannot be folded; if model or batch are of another kind.
        ValueError: if the scaler is not fitted, or for other classes or another problem type; if the model was
            folded before, holds PEFT layers, or has 16-bit weights (whose rounding is 1e-4 to 1e-3 of the
            logits); if no head is found; if the head would need a bias that loading would drop.

    Notes:
        New logits agree with the scaler's to 1e-5 of the largest. Training mode, requires_grad, gradients and
        the random state are left as they were.

    References:
        Guo et al. 2017, "On calibration of modern neural networks", section 4.2.

    >>> from transformers import BertConfig, BertForSequenceClassification
    >>> from hf_calib.scaling import TemperatureScaling
    >>> config = BertConfig(
    ...     vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    ... )
    >>> scaler = TemperatureScaling().fit([[2.0, 0.0], [2.0, 0.0], [0.0, 2.0]], [0, 1, 1])
    >>> model = fold(BertForSequenceClassification(config), scaler)
    >>> model.config.calibration["method"], model.config.calibration["head"]
    ('temperature', ['classifier'])
    """
    return _fold(model, _change_of(model, scaler), batch)


def fold_temperature(
    model: PreTrainedModel, temperature: float, *, batch: Mapping[str, Any] | None = None
) -> PreTrainedModel:
    r"""Divide the classification head by a temperature, in place, so that the model returns logits / T.

    Use it before saving, pushing or exporting: pipelines, inference servers and ONNX exports of the model are
    then calibrated. `TemperatureScaling` finds T, and scales logits that you already have.

    $$(W / T) h + b / T = (W h + b) / T$$

    The head is found by what it does, not by its name: of the linear layers with one output per label, the
    one (or, where logits are an average of several heads, those) whose division divides the logits. On any
    failure the weights are as they were, bit for bit.

    Args:
        model: a transformers classifier of sequences, tokens or images, softmax or sigmoid, in float32 or 64.
        temperature: T, finite and above 0.
        batch: inputs of the model, to find and check the head on; a few rows do. None makes up token ids or
            pixels from the model's config.

    Returns:
        The same model. `model.config.calibration`, a dict that is saved with it, says so: "method",
        "temperature", "folded" and "head" (names of the layers), beside what it already held.

    Raises:
        TypeError: if temperature is no number, or model or batch of another kind.
        ValueError: if temperature is out of range; if the model was folded before, holds PEFT layers, or has
            16-bit weights (whose rounding is 1e-4 to 1e-3 of the logits); if no head is found.

    Notes:
        New logits agree with logits / T to 1e-5 of the largest. Training mode, requires_grad, gradients and
        the random state are left as they were.

    References:
        Guo et al. 2017, "On calibration of modern neural networks" (temperature scaling).

    >>> from transformers import BertConfig, BertForSequenceClassification
    >>> config = BertConfig(
    ...     vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    ... )
    >>> model = fold_temperature(BertForSequenceClassification(config), 1.5)
    >>> model.config.calibration
    {'method': 'temperature', 'temperature': 1.5, 'folded': True, 'head': ['classifier']}
    """
    return _fold(model, _temperature_change(_checked_temperature(temperature)), batch)


def check_can_be_folded(model: PreTrainedModel) -> dict[str, Any]:
    """Refuse a model that `fold` would refuse whatever the scaler; cheap, so to be done before any fitting.

    Returns:
        What `model.config.calibration` holds already.

    Raises:
        TypeError: if it is no transformers model.
        ValueError: if it was folded before, holds PEFT layers, or has 16-bit weights.
    """
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        way_out = "pass the model itself, without its DistributedDataParallel or other wrapper"
        raise InputTypeError(expected("model", "be a transformers model", type(model).__name__, way_out))
    recorded = dict(getattr(model.config, "calibration", None) or {})
    if recorded.get("folded"):
        method = recorded.get("method", "temperature")
        what = (
            f"temperature {recorded.get('temperature')}" if method == "temperature" else f"{method} scaling"
        )
        way_out = "load the model from before; if it was trained since, set model.config.calibration = None"
        raise InputValueError(
            expected("model", "be folded only once", f"a model with {what} in its head", way_out)
        )
    wrapped = [name for name, module in model.named_modules() if type(module).__module__.startswith("peft.")]
    if wrapped:
        got = f"PEFT layers ({wrapped[0] or type(model).__name__})"
        way_out = "fold into the result of model.merge_and_unload()"
        raise InputValueError(expected("model", "be a plain transformers model", got, way_out))
    for name, parameter in model.named_parameters():
        if parameter.dtype not in (torch.float32, torch.float64):
            got = f"{parameter.dtype} in {name}"
            way_out = "call model.float() first (and quantise, if you do, afterwards)"
            raise InputValueError(expected("model", "have float32 or float64 weights", got, way_out))
    return recorded


def _fold(model: PreTrainedModel, wanted: _Change, batch: Mapping[str, Any] | None) -> PreTrainedModel:
    recorded = check_can_be_folded(model)
    inputs = made_up_batch(model) if batch is None else _checked_batch(model, batch)
    linear_map = wanted.linear_map
    with undisturbed(model):
        logits = _telling_logits(model, inputs, linear_map)
        heads = find_heads(model, inputs, logits, linear_map.probe())
        if heads is None:
            layers = list(linear_layers(model, logits.shape[-1]))
            raise InputValueError(wanted.no_head(f"{layers or 'no such layers'}"))
        _check_biases(model, heads, wanted)
        with changed(heads, linear_map):
            if not equal(logits_of(model, inputs), linear_map(logits)):
                at = f"at {wanted.fitted['temperature']}" if wanted.method == "temperature" else "with it"
                raise InputValueError(wanted.no_head(f"{sorted(heads)}, which lose precision {at}"))
        change(heads, linear_map)
    kept = {key: value for key, value in recorded.items() if key not in _FITTED}
    record = {"method": wanted.method, **wanted.fitted, "folded": True, "head": sorted(heads)}
    model.config.calibration = {**kept, **record}
    return model


def _change_of(model: PreTrainedModel, scaler: Any) -> _Change:
    """What a scaler does to the logits."""
    from sklearn.utils.validation import check_is_fitted

    from hf_calib.scaling import MatrixScaling, PerLabelTemperatureScaling, TemperatureScaling, VectorScaling

    foldable = (TemperatureScaling, VectorScaling, MatrixScaling, PerLabelTemperatureScaling)
    if not isinstance(scaler, foldable):
        names = ", ".join(kind.__name__ for kind in foldable)
        way_out = "keep the scaler beside the model, and call its predict_proba on the logits"
        raise InputTypeError(expected("scaler", f"be one of {names}", type(scaler).__name__, way_out))
    check_is_fitted(scaler)
    per_label = isinstance(scaler, PerLabelTemperatureScaling)
    _check_problem_type(model, per_label or getattr(scaler, "multi_label", False))
    if isinstance(scaler, TemperatureScaling):
        return _temperature_change(scaler.temperature_)
    if per_label:
        temperatures = _checked_numbers("temperatures_", scaler.temperatures_)
        return _Change(
            "per_label_temperature", LinearMap(1 / temperatures), {"temperatures": temperatures.tolist()}
        )
    weight, bias = (_checked_numbers(name, getattr(scaler, name)) for name in ("weight_", "bias_"))
    linear_map = LinearMap(weight, bias if bias.any() else None)
    if isinstance(scaler, MatrixScaling):  # C x C numbers have no place in a config file
        return _Change("matrix", linear_map, {})
    return _Change("vector", linear_map, {"weight": weight.tolist(), "bias": bias.tolist()})


def _temperature_change(temperature: float) -> _Change:
    weight = torch.tensor(1 / temperature, dtype=torch.float64)
    return _Change("temperature", LinearMap(weight), {"temperature": temperature})


def _check_problem_type(model: PreTrainedModel, multi_label: bool) -> None:
    """Refuse a scaler for the sigmoid in a model whose pipelines apply the softmax, and the reverse."""
    problem_type = getattr(getattr(model, "config", None), "problem_type", None)
    if multi_label == (problem_type == "multi_label_classification"):
        return
    kind = "a multi-label" if multi_label else "a single-label"
    way_out = (
        "pipelines choose sigmoid or softmax by model.config.problem_type: set it, or fit the other scaler"
    )
    got = f"problem_type={problem_type!r}"
    raise InputValueError(expected("model", f"be {kind} classifier, as the scaler is", got, way_out))


def _checked_numbers(name: str, values: Any) -> torch.Tensor:
    numbers = np.array(values, dtype=np.float64)
    if not np.isfinite(numbers).all():
        way_out = "fit it again, on finite logits"
        raise InputValueError(expected(f"scaler.{name}", "be finite", "NaN or infinity", way_out))
    return torch.from_numpy(numbers)


def _telling_logits(model: PreTrainedModel, inputs: Mapping[str, Any], linear_map: LinearMap) -> torch.Tensor:
    """The logits, refused where they tell nothing about heads or have other classes than the scaler."""
    logits = logits_of(model, inputs)
    n_fitted = len(linear_map.weight) if linear_map.weight.ndim else logits.shape[-1]
    if logits.shape[-1] != n_fitted:
        way_out = "fit it on this model's logits"
        requirement = f"be fitted on {logits.shape[-1]} classes, as the model has"
        raise InputValueError(expected("scaler", requirement, n_fitted, way_out))
    if not (logits.isfinite().all() and logits.any()):
        got = "all 0" if not logits.any() else "NaN or infinity"
        way_out = "pass a batch of real inputs, or check the model's weights"
        raise InputValueError(expected("the model's logits", "be finite and not all 0", got, way_out))
    return logits


def _check_biases(model: PreTrainedModel, heads: Mapping[str, nn.Linear], wanted: _Change) -> None:
    """Refuse to give a head a bias that is lost as soon as the model is saved and loaded."""
    if wanted.linear_map.bias is None:
        return
    for name, head in heads.items():
        if head.bias is None and not reloads_with_bias(model, name):
            got = f"{name} without one, and {type(model).__name__} makes none when it is loaded"
            way_out = "fit TemperatureScaling, which needs none, or keep the scaler beside the model"
            raise InputValueError(
                expected("model", f"have a bias in its head for {wanted.name}", got, way_out)
            )


def _checked_temperature(temperature: float) -> float:
    if not isinstance(temperature, Real) or isinstance(temperature, bool):
        way_out = "pass a float, such as TemperatureScaling().fit(logits, labels).temperature_"
        raise InputTypeError(expected("temperature", "be a number", type(temperature).__name__, way_out))
    if not (math.isfinite(temperature) and temperature > 0):
        way_out = "1.0 leaves the logits as they are"
        raise InputValueError(expected("temperature", "be finite and above 0", temperature, way_out))
    return float(temperature)


def _checked_batch(model: PreTrainedModel, batch: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(batch, Mapping):
        way_out = 'pass the model\'s inputs, such as {"input_ids": ids, "attention_mask": mask}'
        raise InputTypeError(expected("batch", "be a dict of tensors", type(batch).__name__, way_out))
    return {
        name: value.to(model.device) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
        if name != "labels"
    }
