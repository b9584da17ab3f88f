"""Folding: a fitted scaler is written into a model's classification head, which then needs no code of ours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import nn

from hf_calib._errors import InputTypeError, InputValueError, expected, few
from hf_calib.export.heads import (
    agree,
    find_heads,
    float64_logits,
    has_bias_when_loaded,
    has_tied_head,
    linear_layers,
    probe_of,
    synthetic_batch,
    transform,
    transformed,
    undisturbed,
)
from hf_calib.export.rerankers import applies_sigmoid, classifier_of, is_cross_encoder, scores_tokens
from hf_calib.scaling.affine import AffineMap, FloatArray
from hf_calib.scaling.saved_map import (
    OF_PAIRS,
    config_record,
    fitted_numbers,
    foldable_method,
    is_multi_label,
    map_title,
    recorded_in,
)

if TYPE_CHECKING:
    from sklearn.base import BaseEstimator
    from transformers import PreTrainedModel

_Model = TypeVar("_Model", bound=nn.Module)

_FIT_AGAIN = "fit it again, on finite logits"
# Those that a record may hold.
PARAMETERS = (
    *("temperature", "temperatures", "weight", "bias", "sha256", "choice"),
    *("scaler", "train_prior", "target_prior"),
)
# All that a record says of a map, where it is and what it was fitted on; the rest is about the training.
OF_THE_MAP = ("method", *OF_PAIRS, *PARAMETERS, "folded", "head", "criterion", "split", "n_examples")


class _FittedMap(NamedTuple):
    """A scaler as an affine map of the logits, and the parameters that are recorded of it."""

    method: str
    mapping: AffineMap
    parameters: dict[str, Any]

    @property
    def name(self) -> str:
        return map_title(self.method)

    def no_head(self, got: str) -> str:
        """The message where it cannot be folded."""
        if self.method == "temperature":
            requirement = "have a linear head whose division divides the logits"
            way_out = "divide the logits outside the model instead, with TemperatureScaling.transform"
        else:
            requirement = f"have a linear head that {self.name} can be folded into"
            way_out = "keep the scaler beside the model, and call its predict_proba on the logits"
        return expected("model", requirement, got, way_out)


def fold(model: _Model, scaler: BaseEstimator, *, batch: Mapping[str, Any] | None = None) -> _Model:
    r"""Write a fitted scaler into the classification head, in place, so that the model returns scaled logits.

    Use it before saving, pushing or exporting: plain pipelines and exports of the model are then calibrated
    (docs/guides/serve.md has what servers do). `fold_temperature` does the same with a bare number. Scalers that are
    not a linear function of the logits (Dirichlet, ensemble, spline, isotonic, histogram) cannot be folded.

    $$(A W) h + (A b + c) = A (W h + b) + c$$

    with A = 1/T (temperature), diag(1/T_1, ..., 1/T_C) (per label), diag(w) (vector) or the whole matrix.

    The head is found by what it does, not by its name: it is the linear layer with one output per label whose
    transformation transforms the logits in the same way. Where logits are an average of several heads, all of
    them are transformed. Of a causal language model whose head is its input embedding, the last norm takes the
    temperature. On any failure the weights are as they were, bit for bit.

    Args:
        model: a transformers classifier of sequences, tokens or images, in float32 or float64; its
            problem_type (softmax or sigmoid) must be the scaler's. Or a `sentence_transformers.CrossEncoder`;
            its activation_fn decides then, and one logit with a sigmoid takes a scaler with multi_label=True; where
            the logit is that of a language model's tokens (`LogitScore`), a temperature.
        scaler: fitted on this model's logits.
        batch: inputs of the model, on which the head is found and checked; a few rows are enough. None draws
            token ids or pixels that fit the model's config.

    Returns:
        The same model. `model.config.calibration`, a dict that is saved with it, records this: "method"
        ("temperature", "per_label_temperature", "vector", "matrix" or "prior_correction"), "folded", "head"
        (names of the layers) and the scaler's parameters, of a matrix its SHA-256; of a prior correction both
        priors, the method of the "scaler" before it, and its parameters. Other entries are kept.

    Raises:
        TypeError: if the scaler cannot be folded; if model or batch is of the wrong type.
        ValueError: if the scaler is not fitted, has parameters that are not finite or a temperature that is not
            above 0, or is for other classes or another problem type; if the model was folded before, is a
            regression, holds PEFT layers, or has 16-bit weights (whose rounding is 1e-4 to 1e-3 of the logits);
            if no head is found; if the head would need a bias that loading would drop.

    Notes:
        The new logits agree with the scaler's to 1e-5 of the largest. Training mode, requires_grad, gradients
        and random states are left as they were.

        A CrossEncoder's scaler is fitted on `model.predict(pairs, activation_fn=torch.nn.Identity())`, with one
        label `[:, None]`, and labels of the same shape. Where its own activation_fn is the identity, as in
        rerankers trained for ranking only, `predict` returns the scaled logits: set
        `model.activation_fn = torch.nn.Sigmoid()` before it is saved, and it returns calibrated probabilities.

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
    _fold(model, _fitted_map(model, scaler), batch)
    return model


def fold_and_return_head(
    model: nn.Module, scaler: BaseEstimator, batch: Mapping[str, Any] | None
) -> dict[str, torch.Tensor]:
    """Do what `fold` does; return the head's tensors from before, by their names in the state dict."""
    return _fold(model, _fitted_map(model, scaler), batch)


def fold_temperature(model: _Model, temperature: float, *, batch: Mapping[str, Any] | None = None) -> _Model:
    r"""Divide the classification head by a temperature, in place, so that the model returns logits / T.

    Use it before saving, pushing or exporting: plain pipelines and exports of the model are then calibrated
    (docs/guides/serve.md has what servers do). `TemperatureScaling` fits T, and scales logits that you already have;
    `fold` takes it, and other scalers.

    $$(W / T) h + b / T = (W h + b) / T$$

    The head is found by what it does, not by its name: it is the linear layer with one output per label (or,
    where logits are an average of several heads, the layers) whose division divides the logits. On any failure
    the weights are as they were, bit for bit.

    Args:
        model: a transformers classifier of sequences, tokens or images, softmax or sigmoid, in float32 or
            float64; or a `sentence_transformers.CrossEncoder`.
        temperature: T, finite and above 0.
        batch: inputs of the model, on which the head is found and checked; a few rows are enough. None draws
            token ids or pixels that fit the model's config.

    Returns:
        The same model. `model.config.calibration`, a dict that is saved with it, records this: "method",
        "temperature", "folded" and "head" (names of the layers). Other entries are kept.

    Raises:
        TypeError: if temperature is not a number; if model or batch is of the wrong type.
        ValueError: if temperature is out of range; if the model was folded before, is a regression, holds PEFT
            layers, or has 16-bit weights (whose rounding is 1e-4 to 1e-3 of the logits); if no head is found.

    Notes:
        The new logits agree with logits / T to 1e-5 of the largest. Training mode, requires_grad, gradients
        and random states are left as they were.

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
    way_out = "1.0 leaves the logits as they are"
    _fold(model, _temperature_map("temperature", temperature, way_out), batch)
    return model


def check_can_be_folded(model: nn.Module) -> dict[str, Any]:
    """Raise for a model that `fold` refuses whatever the scaler; cheap, so to be called before any fitting.

    Returns:
        What `model.config.calibration` holds already.

    Raises:
        TypeError: if it is not a transformers model.
        ValueError: if it was folded before, is a regression, holds PEFT layers, or has 16-bit weights.
    """
    check_is_plain(model)
    classifier = classifier_of(model)
    recorded = recorded_in(classifier.config)
    if recorded.get("folded"):
        method = recorded.get("method", "temperature")
        what = (
            f"temperature {recorded.get('temperature')}" if method == "temperature" else f"{method} scaling"
        )
        way_out = (
            "undo it with hf_calib.unfold(model) or hf-calib unfold; if this model's head was replaced since, set "
            "model.config.calibration = None"
        )
        raise InputValueError(
            expected("model", "be folded only once", f"a model with {what} in its head", way_out)
        )
    problem_type = getattr(classifier.config, "problem_type", None)
    num_labels = getattr(classifier.config, "num_labels", None)
    of_pairs = OF_PAIRS.items() <= recorded.items()
    if problem_type == "regression" or (num_labels == 1 and not applies_sigmoid(model) and not of_pairs):
        got = f"problem_type={problem_type!r} and num_labels={num_labels}"
        way_out = (
            "only logits have a temperature; for one sigmoid set problem_type='multi_label_classification'"
        )
        raise InputValueError(expected("model", "be a classifier", got, way_out))
    return recorded


def check_is_plain(model: nn.Module) -> None:
    """Raise unless it is a transformers model, or a CrossEncoder, whose weights can be changed in float32.

    Raises:
        TypeError: if it is not a transformers model.
        ValueError: if it holds PEFT layers, or has 16-bit weights.
    """
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        way_out = "pass the model itself, without its DistributedDataParallel or other wrapper"
        raise InputTypeError(expected("model", "be a transformers model", type(model).__name__, way_out))
    classifier = classifier_of(model)
    wrapped = [
        name for name, module in classifier.named_modules() if type(module).__module__.startswith("peft.")
    ]
    configs = getattr(classifier, "peft_config", None) or {}
    if any(getattr(config, "is_prompt_learning", False) for config in configs.values()):
        way_out = "it cannot be merged: keep the map beside the adapter, as trainer.save_model does"
        got = f"prompts that are learned ({type(classifier).__name__})"
        raise InputValueError(expected("model", "be a plain transformers model", got, way_out))
    if wrapped:
        got = f"PEFT layers ({wrapped[0] or type(classifier).__name__})"
        way_out = (
            "fold into the result of model.merge_and_unload()"
            if hasattr(classifier, "merge_and_unload")
            else "merge them: peft.AutoPeftModelForSequenceClassification.from_pretrained(folder).merge_and_unload()"
        )
        raise InputValueError(expected("model", "be a plain transformers model", got, way_out))
    for name, parameter in classifier.named_parameters():
        if parameter.is_meta or parameter.is_inference():
            got = f"{name} on the meta device" if parameter.is_meta else f"{name}, an inference tensor"
            way_out = "load it with from_pretrained, outside of torch.inference_mode()"
            raise InputValueError(expected("model", "have weights that can be changed", got, way_out))
        if parameter.dtype not in (torch.float32, torch.float64):
            got = f"{parameter.dtype} in {name}"
            way_out = "call model.float() first (and quantise, if you do, afterwards)"
            if not parameter.dtype.is_floating_point:
                way_out = "fold the model before it is quantised"
            raise InputValueError(expected("model", "have float32 or float64 weights", got, way_out))


def _fold(model: nn.Module, fitted: _FittedMap, batch: Mapping[str, Any] | None) -> dict[str, torch.Tensor]:
    """Fold; return the head's tensors from before."""
    recorded = check_can_be_folded(model)
    classifier = classifier_of(model)
    inputs = synthetic_batch(classifier) if batch is None else _checked_batch(classifier, batch)
    mapping = fitted.mapping
    with undisturbed(classifier):
        logits = _informative_logits(classifier, inputs, mapping)
        heads = find_heads(classifier, inputs, logits, probe_of(mapping))
        if heads is None:
            layers = list(linear_layers(classifier, logits.shape[-1]))
            quantised = [
                name for name, m in classifier.named_modules() if ".quantized." in type(m).__module__
            ]
            if quantised and not layers:
                got = f"quantised layers ({few(quantised)})"
                way_out = "fold the model before it is quantised"
                raise InputValueError(expected("model", "have its head in float32 or float64", got, way_out))
            if has_tied_head(classifier):
                raise InputValueError(_tied(classifier, fitted))
            raise InputValueError(fitted.no_head(f"{layers or 'no such layers'}"))
        _check_biases(classifier, heads, fitted)
        with transformed(heads, mapping):
            if not agree(float64_logits(classifier, inputs), mapping(logits)):
                at = f"at {fitted.parameters['temperature']}" if fitted.method == "temperature" else "with it"
                raise InputValueError(fitted.no_head(f"{sorted(heads)}, which lose precision {at}"))
        before = {
            f"{name}.{part}": parameter.detach().clone()
            for name, head in heads.items()
            for part, parameter in head.named_parameters(recurse=False)
        }
        transform(heads, mapping)
    kept = {key: value for key, value in recorded.items() if key not in PARAMETERS}
    record = {"method": fitted.method, **fitted.parameters, "folded": True, "head": sorted(heads)}
    classifier.config.calibration = {**kept, **record}
    return before


def affine_map_of(scaler: Any) -> AffineMap:
    """The map of a fitted scaler that folds; without a bias where it has none but zeros."""
    weight, bias = scaler.affine_map()
    return AffineMap(weight, None if bias is None or not bias.any() else bias)


def _fitted_map(model: nn.Module, scaler: Any) -> _FittedMap:
    """The affine map that a scaler is, once it is known to be one for this kind of model."""
    from sklearn.utils.validation import check_is_fitted

    method = foldable_method(scaler)
    check_is_fitted(scaler)
    _check_problem_type(model, is_multi_label(scaler))
    if method != "temperature" and scores_tokens(model):
        # The score is a difference of two of the head's outputs: nothing else of them makes a slope or an offset.
        requirement = "be a temperature for a CrossEncoder of a language model"
        way_out = "fit TemperatureScaling(multi_label=True), or call the scaler's predict_proba on the scores"
        raise InputValueError(expected("scaler", requirement, type(scaler).__name__, way_out))
    if method == "temperature":
        return _temperature_map("scaler.temperature_", scaler.temperature_, _FIT_AGAIN)
    if method == "prior_correction" and scaler.scaler is not None:
        _fitted_map(model, scaler.scaler)  # for its checks
    for name, value in fitted_numbers(scaler).items():
        if name in PARAMETERS:
            _check_numbers(f"{name}_", value, above_0=name == "temperatures")
    _check_numbers("weight_", scaler.affine_map().weight)
    return _FittedMap(method, affine_map_of(scaler), config_record(scaler))


def _temperature_map(argument: str, temperature: Any, way_out: str) -> _FittedMap:
    if not isinstance(temperature, Real) or isinstance(temperature, bool):
        way_out = "pass a float, such as TemperatureScaling().fit(logits, labels).temperature_"
        raise InputTypeError(expected(argument, "be a number", type(temperature).__name__, way_out))
    number = float(temperature)
    if not (math.isfinite(number) and number > 0):
        raise InputValueError(expected(argument, "be finite and above 0", number, way_out))
    return _FittedMap("temperature", AffineMap(np.array(1 / number)), {"temperature": number})


def _check_problem_type(model: nn.Module, multi_label: bool) -> None:
    """Raise for a scaler of sigmoids in a model whose pipelines apply the softmax, and the reverse."""
    if multi_label == applies_sigmoid(model):
        return
    kind = "a multi-label" if multi_label else "a single-label"
    if is_cross_encoder(model):
        got = f"num_labels={model.num_labels} and activation_fn={model.activation_fn}"
        way_out = f"fit the scaler with multi_label={not multi_label}, or set model.activation_fn"
    else:
        got = f"problem_type={getattr(getattr(model, 'config', None), 'problem_type', None)!r}"
        way_out = "pipelines choose sigmoid or softmax by model.config.problem_type: set it, or fit the other scaler"
    raise InputValueError(expected("model", f"be {kind} classifier, as the scaler is", got, way_out))


def _check_numbers(name: str, values: Any, *, above_0: bool = False) -> None:
    numbers = np.array(values, dtype=np.float64)
    if not np.isfinite(numbers).all():
        raise InputValueError(expected(f"scaler.{name}", "be finite", "NaN or infinity", _FIT_AGAIN))
    if above_0 and not (numbers > 0).all():
        raise InputValueError(expected(f"scaler.{name}", "be above 0", numbers.min(), _FIT_AGAIN))


def _informative_logits(model: PreTrainedModel, inputs: Mapping[str, Any], mapping: AffineMap) -> FloatArray:
    """The logits; raise if no head can be found by them, or if the scaler has other classes."""
    logits = float64_logits(model, inputs)
    n_fitted = len(mapping.weight) if mapping.weight.ndim else logits.shape[-1]
    if logits.shape[-1] != n_fitted:
        way_out = "fit it on this model's logits"
        requirement = f"be fitted on {logits.shape[-1]} classes, as the model has"
        raise InputValueError(expected("scaler", requirement, n_fitted, way_out))
    if not (np.isfinite(logits).all() and logits.any()):
        got = "all 0" if not logits.any() else "NaN or infinity"
        way_out = "pass a batch of real inputs, or check the model's weights"
        raise InputValueError(expected("the model's logits", "be finite and not all 0", got, way_out))
    return logits


def _tied(model: PreTrainedModel, fitted: _FittedMap) -> str:
    if fitted.method != "temperature":
        way_out = "fit TemperatureScaling, which its last norm takes, or set tie_word_embeddings=False in its config"
        return expected(
            "model", f"have a head of its own for {fitted.name}", "one tied to its embedding", way_out
        )
    way_out = f"set model.generation_config.temperature = {fitted.parameters['temperature']:.4g}"
    got = f"{type(model).__name__}, whose head is its embedding and none of whose norms does so"
    return expected("model", "have a layer whose division divides the logits", got, way_out)


def _check_biases(model: PreTrainedModel, heads: Mapping[str, nn.Module], fitted: _FittedMap) -> None:
    """Raise where a head would need a bias that is lost as soon as the model is saved and loaded."""
    if fitted.mapping.bias is None:
        return
    for name, head in heads.items():
        if getattr(head, "bias", None) is None and not has_bias_when_loaded(model, name):
            got = f"{name} without one, and {type(model).__name__} makes none when it is loaded"
            way_out = "fit TemperatureScaling, which needs none, or keep the scaler beside the model"
            raise InputValueError(
                expected("model", f"have a bias in its head for {fitted.name}", got, way_out)
            )


def _checked_batch(model: PreTrainedModel, batch: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(batch, Mapping):
        way_out = 'pass the model\'s inputs, such as {"input_ids": ids, "attention_mask": mask}'
        raise InputTypeError(expected("batch", "be a dict of tensors", type(batch).__name__, way_out))
    return {
        name: value.to(model.device) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
        if name != "labels"
    }
