"""Writes a temperature into a model's classification head, so that no code of ours is needed to use it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_calib._checks import expected

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

TOLERANCE = 1e-5  # of the largest logit

_PROBE = (
    2.0  # a power of two: dividing by it rounds nothing, and T itself may be too near 1 to tell heads apart
)
_ROWS, _TOKENS = 4, 8  # of a made-up batch


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
    temperature = _checked_temperature(temperature)
    recorded = _checked_model(model)
    inputs = _made_up_batch(model) if batch is None else _checked_batch(model, batch)
    with _undisturbed(model):
        logits = _logits(model, inputs)
        heads = _find_heads(model, inputs, logits)
        with _divided(heads, temperature):
            if not _equal(_logits(model, inputs), logits / temperature):
                raise ValueError(_no_head(f"{sorted(heads)}, which lose precision at {temperature}"))
        _divide(heads, temperature)
    record = {"method": "temperature", "temperature": temperature, "folded": True, "head": sorted(heads)}
    model.config.calibration = {**recorded, **record}
    return model


def _checked_temperature(temperature: float) -> float:
    if not isinstance(temperature, Real) or isinstance(temperature, bool):
        way_out = "pass a float, such as TemperatureScaling().fit(logits, labels).temperature_"
        raise TypeError(expected("temperature", "be a number", type(temperature).__name__, way_out))
    if not (math.isfinite(temperature) and temperature > 0):
        way_out = "1.0 leaves the logits as they are"
        raise ValueError(expected("temperature", "be finite and above 0", temperature, way_out))
    return float(temperature)


def _checked_model(model: PreTrainedModel) -> dict[str, Any]:
    """Refuse what cannot be folded; return what `config.calibration` holds already."""
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        way_out = "pass the model itself, without its DistributedDataParallel or other wrapper"
        raise TypeError(expected("model", "be a transformers model", type(model).__name__, way_out))
    recorded = dict(getattr(model.config, "calibration", None) or {})
    if recorded.get("folded"):
        got = f"a model with temperature {recorded.get('temperature')} in its head"
        way_out = "load the model from before; if it was trained since, set model.config.calibration = None"
        raise ValueError(expected("model", "be folded only once", got, way_out))
    wrapped = [name for name, module in model.named_modules() if type(module).__module__.startswith("peft.")]
    if wrapped:
        got = f"PEFT layers ({wrapped[0] or type(model).__name__})"
        way_out = "fold into the result of model.merge_and_unload()"
        raise ValueError(expected("model", "be a plain transformers model", got, way_out))
    for name, parameter in model.named_parameters():
        if parameter.dtype not in (torch.float32, torch.float64):
            got = f"{parameter.dtype} in {name}"
            way_out = "call model.float() first (and quantise, if you do, afterwards)"
            raise ValueError(expected("model", "have float32 or float64 weights", got, way_out))
    return recorded


def _checked_batch(model: PreTrainedModel, batch: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(batch, Mapping):
        way_out = 'pass the model\'s inputs, such as {"input_ids": ids, "attention_mask": mask}'
        raise TypeError(expected("batch", "be a dict of tensors", type(batch).__name__, way_out))
    return {
        name: value.to(model.device) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
        if name != "labels"
    }


def _made_up_batch(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    config, name = model.config, model.main_input_name
    generator = torch.Generator().manual_seed(0)
    vocabulary = getattr(config.get_text_config(), "vocab_size", None)
    if name == "input_ids" and vocabulary:
        values = _token_ids(config.get_text_config(), generator)
    elif name == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", 224)
        height, width = (size, size) if isinstance(size, int) else size
        channels = getattr(vision, "num_channels", 3)
        values = torch.randn(_ROWS, channels, height, width, generator=generator, dtype=model.dtype)
    else:
        way_out = "pass batch, a few rows of the model's inputs"
        raise ValueError(expected("model", "take input_ids or pixel_values", f"{name!r}", way_out))
    return {name: values.to(model.device)}


def _token_ids(config: PreTrainedConfig, generator: torch.Generator) -> torch.Tensor:
    """Draw ordinary tokens, with one end token last, which sequence-to-sequence classifiers look for."""
    roles = ("pad", "bos", "eos", "sep", "cls", "mask", "decoder_start")
    special = {role: getattr(config, f"{role}_token_id", None) for role in roles}
    reserved = {token for ids in special.values() for token in (ids if isinstance(ids, list) else [ids])}
    ordinary = torch.tensor([token for token in range(config.vocab_size) if token not in reserved])
    rows = 1 if special["pad"] is None else _ROWS  # decoders take no second row without a padding token
    ids = ordinary[torch.randint(len(ordinary), (rows, _TOKENS), generator=generator)]
    end = special["eos"]
    if end is not None:
        ids[:, -1] = end[0] if isinstance(end, list) else end
    return ids


@contextmanager
def _undisturbed(model: PreTrainedModel) -> Iterator[None]:
    """Run the model for inference in full precision, and leave every mode and random state as it was."""
    training = {module: module.training for module in model.modules()}
    cuda = [model.device] if model.device.type == "cuda" else []
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices=cuda),
        torch.autocast(model.device.type, enabled=False),
        _full_float32(),
    ):
        model.eval()
        try:
            yield
        finally:
            for module, mode in training.items():
                module.training = mode


@contextmanager
def _full_float32() -> Iterator[None]:
    """Switch TF32 and bfloat16 products off, which would round the divided weights unlike the undivided."""
    try:
        before = torch.get_float32_matmul_precision()
    except (
        RuntimeError
    ):  # set through the interface of torch 2.9, after which the older one refuses to answer
        matmul = torch.backends.cuda.matmul
        newer, matmul.fp32_precision = matmul.fp32_precision, "ieee"
        try:
            yield
        finally:
            matmul.fp32_precision = newer
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _logits(model: PreTrainedModel, inputs: Mapping[str, Any]) -> torch.Tensor:
    # The class's forward: mixed-precision training leaves one on the instance that rounds to 16 bits.
    try:
        outputs = type(model).forward(model, **inputs)
    except Exception as error:
        way_out = "pass batch, a few rows of the model's inputs"
        raise ValueError(expected("batch", "be what the model takes", repr(error), way_out)) from error
    logits = outputs[0] if isinstance(outputs, tuple) else getattr(outputs, "logits", None)
    if not isinstance(logits, torch.Tensor):
        way_out = "pass a classifier, such as AutoModelForSequenceClassification makes"
        raise TypeError(expected("model", "return logits", type(outputs).__name__, way_out))
    return logits.double()


def _find_heads(
    model: PreTrainedModel, inputs: Mapping[str, Any], logits: torch.Tensor
) -> dict[str, nn.Linear]:
    """Return the layers, by name, whose division divides the logits."""
    if not (logits.isfinite().all() and logits.any()):
        got = "all 0" if not logits.any() else "NaN or infinity"
        way_out = "pass a batch of real inputs, or check the model's weights"
        raise ValueError(expected("the model's logits", "be finite and not all 0", got, way_out))
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.out_features == logits.shape[-1]
    }
    # From the last, which is nearly always the head. Several heads that are averaged stand beside the body.
    candidates = [{name: layers[name]} for name in reversed(layers)]
    body = f"{model.base_model_prefix}."
    candidates.append({name: layer for name, layer in layers.items() if not name.startswith(body)})
    for heads in candidates:
        with _divided(heads, _PROBE):
            if _equal(_logits(model, inputs), logits / _PROBE):
                return heads
    raise ValueError(_no_head(f"{list(layers) or 'no such layers'}"))


def _no_head(got: str) -> str:
    way_out = "divide the logits outside the model instead, with TemperatureScaling.transform"
    return expected("model", "have a linear head whose division divides the logits", got, way_out)


def _equal(logits: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool((logits - wanted).abs().max() <= TOLERANCE * wanted.abs().max())


@contextmanager
def _divided(heads: Mapping[str, nn.Linear], divisor: float) -> Iterator[None]:
    """Divide for the length of a with block; the weights come back bit for bit."""
    parameters = _parameters(heads)
    saved = [parameter.clone() for parameter in parameters]
    try:
        _divide(heads, divisor)
        yield
    finally:
        for parameter, value in zip(parameters, saved, strict=True):
            parameter.copy_(value)


def _divide(heads: Mapping[str, nn.Linear], divisor: float) -> None:
    for parameter in _parameters(heads):
        parameter.div_(divisor)


def _parameters(heads: Mapping[str, nn.Linear]) -> list[nn.Parameter]:
    """List each weight and bias once, also where heads share them."""
    return list({id(p): p for head in heads.values() for p in head.parameters(recurse=False)}.values())
