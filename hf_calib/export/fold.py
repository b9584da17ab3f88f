"""Folding of a fitted calibrator into a model's classification head,
which then needs no code of this library.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import nn

from hf_calib._errors import check
from hf_calib.export.heads import (
    agree,
    as_loaded,
    find_heads,
    float64_logits,
    has_tied_head,
    linear_layers,
    synthetic_batch,
    tensors_of,
    transform,
    transformed,
    undisturbed,
)
from hf_calib.metrics.checks import check_real, check_type
from hf_calib.scaling import TemperatureScaling, saved_map
from hf_calib.scaling.affine import AffineMap, FloatArray
from hf_calib.scaling.saved_map import (
    OF_PAIRS,
    has_bias,
    map_title,
    method_of,
    temperature_of,
)

if TYPE_CHECKING:
    from sklearn.base import BaseEstimator

_Model = TypeVar("_Model", bound=nn.Module)
Batch = Mapping[str, Any]

# The entries of a record with the numbers or the name of the calibrator.
PARAMETERS = (
    *("temperature", "temperatures", "weight", "bias", "sha256", "choice"),
    *("scaler", "train_prior", "target_prior"),
)
# All entries of a record about the calibrator, its head and its rows;
# the others are about the training.
OF_THE_MAP = (
    "method",
    *OF_PAIRS,
    *PARAMETERS,
    "folded",
    "head",
    "criterion",
    "split",
    "n_examples",
)


def fold(model: _Model, scaler: BaseEstimator, *, batch: Batch | None = None) -> _Model:
    r"""Fold a fitted calibrator into the classification head, in place,
    so that the model returns calibrated logits.

    Use it before saving, pushing or exporting: plain pipelines and exports of the model are then
    calibrated (docs/guides/serve.md covers servers). `fold_temperature` does the same with a
    number. Calibrators that are not an affine function of the logits (Dirichlet, ensemble, spline,
    isotonic, histogram) cannot be folded.

    $$(A W) h + (A b + c) = A (W h + b) + c$$

    where A is 1/T (temperature), diag(1/T_1, ..., 1/T_C) (per label), diag(w) (vector) or the whole
    matrix.

    The head is found by its effect, not by its name: it is the linear layer with one output per
    label whose transformation transforms the logits in the same way. If the logits are an average
    of several heads, all of them are transformed. If the head of a causal language model is its
    input embedding, the temperature is folded into the last norm. After any failure the weights are
    unchanged, bit for bit.

    Args:
        model: a transformers classifier of sequences, tokens or images in float32 or float64, whose
            problem_type (softmax or sigmoid) is that of the calibrator. Or a
            `sentence_transformers.CrossEncoder`, whose activation_fn decides: one logit with a
            sigmoid needs a calibrator with multi_label=True, and the logit of a language model's
            tokens (`LogitScore`) needs a temperature.
        scaler: a calibrator fitted to this model's logits.
        batch: a few rows of model inputs, on which the head is found and checked. None draws token
            ids or pixels that fit the model's config.

    Returns:
        The same model. The dict `model.config.calibration`, which is saved with it, has "method"
        ("temperature", "per_label_temperature", "vector", "matrix" or "prior_correction"),
        "folded", "head" (names of the layers) and the calibrator's parameters, or the SHA-256 of a
        matrix. For a prior correction it has both priors, and the method and parameters of the
        "scaler" before it. Other entries are kept.

    Raises:
        TypeError: if the calibrator cannot be folded, or model or batch has the wrong type.
        ValueError: if the calibrator is not fitted, or is for other classes or another problem
            type; if the model was folded before, is a regression, has PEFT layers, or has 16-bit
            weights (whose rounding is 1e-4 to 1e-3 of the logits); if no head is found, or it would
            need a bias that loading would drop.

    Notes:
        The new logits agree with the calibrator's to 1e-5 of the largest. Training mode,
        requires_grad, gradients and random states do not change. docs/guides/pairs.md covers
        rerankers.

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
    fold_and_return_head(model, scaler, batch)
    return model


def fold_temperature(
    model: _Model, temperature: float, *, batch: Batch | None = None
) -> _Model:
    r"""Divide the classification head by a temperature, in place,
    so that the model returns logits / T.

    It is `fold` with a fitted `TemperatureScaling`, for a temperature given as a number:

    $$(W / T) h + b / T = (W h + b) / T$$

    Args:
        model: as in `fold`, with softmax or sigmoid.
        temperature: T, in [1e-5, 1e5].
        batch: as in `fold`.

    Returns:
        The same model, with its record in `model.config.calibration`.

    Raises:
        TypeError: if temperature is not a number, or model or batch has the wrong type.
        ValueError: if temperature is out of range, or the model cannot be folded.

    >>> from transformers import BertConfig, BertForSequenceClassification
    >>> config = BertConfig(
    ...     vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    ... )
    >>> model = fold_temperature(BertForSequenceClassification(config), 1.5)
    >>> model.config.calibration
    {'method': 'temperature', 'temperature': 1.5, 'folded': True, 'head': ['classifier']}
    """
    low, high = saved_map.BOUNDS
    way_out = (
        "pass a float, such as TemperatureScaling().fit(logits, labels).temperature_"
    )
    check_real("temperature", temperature, way_out)
    requirement = f"temperature to lie in [{low:g}, {high:g}]"
    in_range = low <= temperature <= high
    way_out = "1.0 does not change the logits"
    check(in_range, requirement, temperature, way_out)
    scaler = TemperatureScaling(multi_label=applies_sigmoid(model))
    scaler.temperature_ = float(temperature)
    return fold(model, scaler, batch=batch)


def fold_and_return_head(
    model: nn.Module, scaler: Any, batch: Batch | None
) -> dict[str, torch.Tensor]:
    """Fold like `fold`, and return the head's previous tensors by their names in the state dict."""
    recorded = check_can_be_folded(model)
    _check_scaler(model, scaler)
    weight, bias = scaler.affine_map()
    # A bias of zeros would be added to a head that has none.
    mapping = AffineMap(weight, bias if has_bias(scaler) else None)
    classifier = classifier_of(model)
    inputs = (
        synthetic_batch(classifier)
        if batch is None
        else _on_device(batch, classifier.device)
    )
    with undisturbed(classifier):
        logits = float64_logits(classifier, inputs)
        _check_logits(logits, mapping)
        heads = find_heads(classifier, inputs, logits, mapping)
        _check_heads(classifier, heads, scaler, logits.shape[-1])
        # At an extreme temperature a weight in float32 loses digits, so the fold is
        # tried first.
        with transformed(heads, mapping):
            agrees = agree(float64_logits(classifier, inputs), mapping(logits))
        at = (
            "with it"
            if temperature_of(scaler) is None
            else f"at {temperature_of(scaler)}"
        )
        _check_holds(agrees, scaler, f"{sorted(heads)}, which lose precision {at}")
        before = tensors_of(heads)
        transform(heads, mapping)
    # Numbers of an earlier calibrator are not of this one.
    kept = {key: value for key, value in recorded.items() if key not in PARAMETERS}
    record = {
        "method": method_of(scaler, folds=True),
        **saved_map.config_record(scaler),
        "folded": True,
        "head": sorted(heads),
    }
    classifier.config.calibration = {**kept, **record}
    return before


# Models


def check_can_be_folded(model: nn.Module) -> dict[str, Any]:
    """Raise if no calibrator can be folded into the model;
    return the content of `model.config.calibration`.

    The check is cheap, so it can be called before any fit.
    """
    check_is_plain(model)
    config = classifier_of(model).config
    recorded = saved_map.recorded_in(config)
    method = recorded.get("method", "temperature")
    what = (
        f"temperature {recorded.get('temperature')}"
        if method == "temperature"
        else f"{method} scaling"
    )
    way_out = "undo it with hf_calib.unfold(model) or hf-calib unfold; if the head was replaced since, set "
    way_out += "model.config.calibration = None"
    got = f"a model with {what} in its head"
    check(not recorded.get("folded"), "model to be folded only once", got, way_out)
    problem_type, n_labels = (
        getattr(config, "problem_type", None),
        getattr(config, "num_labels", None),
    )
    of_pairs = OF_PAIRS.items() <= recorded.items()
    # A single logit without a sigmoid is a regression, unless it is a reward that was
    # fitted over pairs.
    classifies = n_labels != 1 or applies_sigmoid(model) or of_pairs
    got = f"problem_type={problem_type!r} and num_labels={n_labels}"
    way_out = "only logits have a temperature; for one sigmoid set problem_type='multi_label_classification'"
    check(
        classifies and problem_type != "regression",
        "model to be a classifier",
        got,
        way_out,
    )
    return recorded


def check_is_plain(model: nn.Module) -> None:
    """Raise unless the model is a transformers model or CrossEncoder whose weights can be changed
    in float32.
    """
    classifier = classifier_of(model)
    is_model = isinstance(classifier, nn.Module) and hasattr(classifier, "config")
    # A compiled model passes its attributes on, and refuses the inputs that a fold is tried on.
    is_model = is_model and not hasattr(classifier, "_orig_mod")
    way_out = "pass the model itself, without torch.compile, DistributedDataParallel or another wrapper"
    check_type(
        is_model, "model to be a transformers model", type(model).__name__, way_out
    )
    modules = classifier.named_modules()
    peft = [
        name for name, module in modules if type(module).__module__.startswith("peft.")
    ]
    way_out = "fold into the result of model.merge_and_unload()"
    if not hasattr(classifier, "merge_and_unload"):
        way_out = "merge them: peft.AutoPeftModelForSequenceClassification.from_pretrained(folder).merge_and_unload()"
    way_out += "; learned prompts cannot be merged: trainer.save_model keeps the map next to the adapter"
    got = f"PEFT layers ({''.join(peft[:1]) or type(classifier).__name__})"
    check(not peft, "model to be a plain transformers model", got, way_out)
    for name, parameter in classifier.named_parameters():
        way_out = "call model.float() first (and quantise, if you do, afterwards)"
        if not parameter.dtype.is_floating_point:
            way_out = "fold the model before it is quantised"
        wide = parameter.dtype in (torch.float32, torch.float64)
        got = f"{parameter.dtype} in {name}"
        check(wide, "model to have float32 or float64 weights", got, way_out)
        is_there = not (parameter.is_meta or parameter.is_inference())
        got = f"{name} on the meta device, or made in torch.inference_mode()"
        way_out = "load it with from_pretrained, outside of torch.inference_mode()"
        check(is_there, "model to have weights that can be changed", got, way_out)


def _on_device(batch: Batch, device: torch.device) -> dict[str, Any]:
    """The inputs of a batch, without labels, on the model's device."""
    way_out = (
        'pass the model\'s inputs, such as {"input_ids": ids, "attention_mask": mask}'
    )
    check_type(
        isinstance(batch, Mapping),
        "batch to be a dict of tensors",
        type(batch).__name__,
        way_out,
    )
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return {
        name: each.to(device) if hasattr(each, "to") else each
        for name, each in inputs.items()
    }


def _check_logits(logits: FloatArray, mapping: AffineMap) -> None:
    """Raise if no head can be found from these logits, or if the calibrator has other classes."""
    n_classes = logits.shape[-1]
    n_fitted = len(mapping.weight) if mapping.weight.ndim else n_classes
    requirement = f"scaler to be fitted on {n_classes} classes, as the model has"
    check(n_fitted == n_classes, requirement, n_fitted, "fit it on this model's logits")
    # Logits of 0 stay the same whichever layer is scaled.
    informative = bool(np.isfinite(logits).all() and logits.any())
    got = "NaN or infinity" if logits.any() else "all 0"
    way_out = "pass a batch of real inputs, or check the model's weights"
    check(informative, "the model's logits to be finite and not all 0", got, way_out)


# Calibrators in models


def _check_scaler(model: nn.Module, scaler: Any) -> None:
    """Raise if a calibrator is not fitted, or is not for the probabilities of the model's
    pipelines.
    """
    # A prior correction may follow another calibrator.
    before = getattr(scaler, "scaler", None)
    for each in (scaler,) if before is None else (scaler, before):
        method_of(each, folds=True)
        numbers = [name for name in ("weight_", "bias_") if name in each._fitted]
        saved_map.check_parameters(each, *numbers)
    multi_label = scaler.multi_label
    got = f"problem_type={getattr(classifier_of(model).config, 'problem_type', None)!r}"
    way_out = "pipelines choose sigmoid or softmax by config.problem_type: set it, or fit the other scaler"
    if is_cross_encoder(model):
        got = f"num_labels={model.num_labels} and activation_fn={model.activation_fn}"
        way_out = f"fit the scaler with multi_label={not multi_label}, or set model.activation_fn"
    kind = "a multi-label" if multi_label else "a single-label"
    same = multi_label == applies_sigmoid(model)
    check(same, f"model to be {kind} classifier, as the scaler is", got, way_out)
    # The logit is a difference of two of the head's outputs, which has no other slope or offset.
    holds = not scores_tokens(model) or temperature_of(scaler) is not None
    way_out = "fit TemperatureScaling(multi_label=True), or call the scaler's predict_proba on the scores"
    requirement = "scaler to be a temperature for a CrossEncoder of a language model"
    check(holds, requirement, type(scaler).__name__, way_out)


def _check_heads(
    model: Any, heads: Mapping[str, nn.Module], scaler: Any, n_classes: int
) -> None:
    """Raise if no head was found, or it would need a bias that is lost when the model is saved and
    loaded.
    """
    title, temperature = (
        map_title(method_of(scaler, folds=True)),
        temperature_of(scaler),
    )
    if not heads and has_tied_head(model):
        way_out = "fit TemperatureScaling, for its last norm, or set tie_word_embeddings=False in its config"
        requirement = f"model to have a head of its own for {title}"
        check(
            temperature is not None, requirement, "one tied to its embedding", way_out
        )
        way_out = f"set model.generation_config.temperature = {temperature:.4g}"
        got = f"{type(model).__name__}, whose head is its embedding and none of whose norms does so"
        check(
            False,
            "model to have a layer whose division divides the logits",
            got,
            way_out,
        )
    _check_holds(
        bool(heads),
        scaler,
        f"{list(linear_layers(model, n_classes)) or 'no such layers'}",
    )
    for name, head in heads.items():
        if has_bias(scaler) and getattr(head, "bias", None) is None:
            keeps = as_loaded(model).get_submodule(name).bias is not None
            got = f"{name} without one, and {type(model).__name__} makes none when it is loaded"
            way_out = "fit TemperatureScaling, which needs none, or keep the scaler with the model"
            check(keeps, f"model to have a bias in its head for {title}", got, way_out)


def _check_holds(holds: bool, scaler: Any, got: str) -> None:
    """Raise if the calibrator cannot be folded into the head."""
    title = map_title(method_of(scaler, folds=True))
    requirement = f"model to have a linear head that {title} can be folded into"
    way_out = "keep the scaler with the model, and call its predict_proba on the logits"
    if temperature_of(scaler) is not None:
        requirement = "model to have a linear head whose division divides the logits"
        way_out = "divide the logits outside the model instead, with TemperatureScaling.transform"
    check(holds, requirement, got, way_out)


def _kinds(model: Any) -> set[str]:
    """The names of the object's sentence-transformers classes,
    since that package may not be installed.
    """
    return {
        kind.__name__
        for kind in type(model).__mro__
        if kind.__module__.startswith("sentence_transformers.")
    }


def is_cross_encoder(model: Any) -> bool:
    """Whether the model is a `sentence_transformers.CrossEncoder`."""
    return "CrossEncoder" in _kinds(model)


def classifier_of(model: Any) -> Any:
    """Return the transformers model of a CrossEncoder, a classifier or a language model;
    other models are unchanged.
    """
    if not is_cross_encoder(model):
        way_out = (
            "fit a scaler on the logits of the classifier that takes its embeddings"
        )
        check_type(
            not _kinds(model), "model to be a classifier", type(model).__name__, way_out
        )
        return model
    modules = [type(module).__name__ for module in model.children()]
    # No other module of a CrossEncoder may follow that model; an ONNX session is not a module.
    plain = modules[1:] in ([], ["LogitScore"]) and isinstance(model.model, nn.Module)
    got = f"{type(model.model).__name__} in {modules}"
    way_out = "keep the scaler with the model, and call its predict_proba on the logits"
    check(plain, "model to be one transformers model in torch", got, way_out)
    return model.model


def scores_tokens(model: Any) -> bool:
    """Whether the model is a CrossEncoder of a language model,
    whose score is a logit or a difference of two.
    """
    return (
        is_cross_encoder(model)
        and type([*model.children()][-1]).__name__ == "LogitScore"
    )


def applies_sigmoid(model: Any) -> bool:
    """Whether the probabilities are sigmoids, by a CrossEncoder's activation or a model's
    problem_type.
    """
    config = getattr(classifier_of(model), "config", None)
    multi_label = getattr(config, "problem_type", None) == "multi_label_classification"
    if not is_cross_encoder(model):
        return multi_label
    # If it applies nothing, a pipeline of the saved folder decides.
    answers = {
        nn.Sigmoid: True,
        nn.Softmax: False,
        nn.Identity: multi_label or model.num_labels == 1,
    }
    found = [
        answer
        for kind, answer in answers.items()
        if isinstance(model.activation_fn, kind)
    ]
    requirement = "model to apply a sigmoid, a softmax or nothing to its logits"
    got = f"activation_fn={model.activation_fn}"
    check(bool(found), requirement, got, "set model.activation_fn = torch.nn.Sigmoid()")
    return found[0]
