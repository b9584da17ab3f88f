"""Heads, the layers that compute a model's logits: finding them by their effect, and changing them."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_calib._compat import full_float32
from hf_calib._errors import InputValueError, check, expected
from hf_calib.metrics.checks import check_type
from hf_calib.scaling.affine import AffineMap, FloatArray

# The largest difference, relative to the largest logit.
TOLERANCE = 1e-5

# The rows of a synthetic batch.
_ROWS = 4
_TOKENS = 8


def synthetic_batch(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return a few random rows of token ids or pixels that fit the model's config."""
    name, config = model.main_input_name, model.config
    text = config.get_text_config()
    # A generator of its own leaves the user's random state unchanged.
    generator = torch.Generator().manual_seed(0)
    drawable = name == "pixel_values" or (
        name == "input_ids" and bool(getattr(text, "vocab_size", None))
    )
    way_out = "pass batch, a few rows of the model's inputs"
    check(drawable, "model to take input_ids or pixel_values", f"{name!r}", way_out)
    if name == "input_ids":
        return {name: _token_ids(text, generator).to(model.device)}
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", 224)
    height, width = (size, size) if isinstance(size, int) else size
    shape = (_ROWS, getattr(vision, "num_channels", 3), height, width)
    return {
        name: torch.randn(shape, generator=generator, dtype=model.dtype).to(
            model.device
        )
    }


def _token_ids(config: PreTrainedConfig, generator: torch.Generator) -> torch.Tensor:
    """Draw ordinary tokens and one end token, which sequence-to-sequence classifiers need."""
    roles = ("pad", "bos", "eos", "sep", "cls", "mask", "decoder_start")
    special = {role: getattr(config, f"{role}_token_id", None) for role in roles}
    reserved = {
        token
        for ids in special.values()
        for token in (ids if isinstance(ids, list) else [ids])
    }
    ordinary = torch.tensor(
        [token for token in range(config.vocab_size) if token not in reserved]
    )
    # Without a padding token, decoders accept one row only.
    rows = 1 if special["pad"] is None else _ROWS
    ids = ordinary[torch.randint(len(ordinary), (rows, _TOKENS), generator=generator)]
    end = special["eos"]
    if end is not None:
        ids[:, -1] = end[0] if isinstance(end, list) else end
    return ids


@contextmanager
def undisturbed(model: PreTrainedModel) -> Iterator[None]:
    """A context for inference in full precision that restores every mode and random state."""
    training = {module: module.training for module in model.modules()}
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    # By default fork_rng saves the states of all GPUs.
    cuda = [model.device] if model.device.type == "cuda" else []
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices=cuda),
        torch.autocast(model.device.type, enabled=False),
        full_float32(),
    ):
        model.eval()
        try:
            yield
        finally:
            # Modules may be in different modes, and `model.train()` would set them
            # alike.
            for module, mode in training.items():
                module.training = mode
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def float64_logits(model: PreTrainedModel, inputs: Mapping[str, Any]) -> FloatArray:
    """Return the model's logits for a batch in float64."""
    # It uses the class's forward, because mixed-precision training leaves one on the instance that
    # rounds to 16 bits.
    try:
        outputs = type(model).forward(model, **inputs)
    except Exception as error:
        way_out = "pass batch, a few rows of the model's inputs"
        raise InputValueError(
            expected("batch", "be what the model takes", repr(error), way_out)
        ) from error
    logits: Any = (
        outputs[0] if isinstance(outputs, tuple) else getattr(outputs, "logits", None)
    )
    way_out = "pass a classifier, such as AutoModelForSequenceClassification makes"
    check_type(
        isinstance(logits, torch.Tensor),
        "model to return logits",
        type(outputs).__name__,
        way_out,
    )
    return logits.detach().cpu().double().numpy()


def find_heads(
    model: PreTrainedModel,
    inputs: Mapping[str, Any],
    logits: FloatArray,
    mapping: AffineMap,
) -> dict[str, nn.Module]:
    """Return the layers, by name, whose transformation transforms the logits in the same way;
    empty if there are none.

    They are linear layers or, for the temperature of a language model whose head is its embedding,
    its last norm. The test uses a map of the same kind that is far from the identity, so that it
    separates heads from other layers.
    """
    scales = np.linspace(0.5, 2, logits.shape[-1])
    # The matrix also permutes the classes, so that no diagonal passes for it.
    kinds = [np.array(0.5), scales, np.roll(np.diag(scales), 1, axis=0)]
    probe = AffineMap(kinds[mapping.weight.ndim])
    tied = mapping.weight.ndim == 0 and has_tied_head(model)
    layers = (
        norms_of_hidden_size(model) if tied else linear_layers(model, logits.shape[-1])
    )
    # The last layer is tried first, because it is nearly always the head.
    # Averaged heads are next to the body.
    candidates = [{name: layers[name]} for name in reversed(layers)]
    candidates += (
        [] if tied else [linear_layers(model, logits.shape[-1], beside_the_body=True)]
    )
    for heads in candidates:
        with transformed(heads, probe):
            if agree(float64_logits(model, inputs), probe(logits)):
                return heads
    return {}


def linear_layers(
    model: Any, n_outputs: int, *, beside_the_body: bool = False
) -> dict[str, Any]:
    """Return all linear layers with this number of outputs, by name."""
    body = f"{getattr(model, 'base_model_prefix', '')}."
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module.out_features == n_outputs
        and not (beside_the_body and name.startswith(body))
    }


def has_tied_head(model: Any) -> bool:
    """Whether the head shares its weight with the input embedding, as in many language models."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return (
        head is not None
        and getattr(head, "weight", None) is model.get_input_embeddings().weight
    )


def norms_of_hidden_size(model: Any) -> dict[str, Any]:
    """Return the norms by name and in order: layers with only one or two parameters per hidden
    unit.
    """
    size = (getattr(model.config.get_text_config(), "hidden_size", None),)
    return {
        name: module
        for name, module in model.named_modules()
        if "weight" in dict(module.named_parameters())
        and all(
            name in ("weight", "bias") and p.shape == size
            for name, p in module.named_parameters()
        )
    }


def agree(logits: FloatArray, wanted: FloatArray) -> bool:
    """Whether two sets of logits are equal up to `TOLERANCE`."""
    return bool(np.abs(logits - wanted).max() <= TOLERANCE * np.abs(wanted).max())


@contextmanager
def transformed(heads: Mapping[str, nn.Module], mapping: AffineMap) -> Iterator[None]:
    """A context with transformed heads, which restores the weights bit for bit."""
    before = tensors_of(heads)
    try:
        transform(heads, mapping)
        yield
    finally:
        restore(heads, before)


def tensors_of(heads: Mapping[str, nn.Module]) -> dict[str, torch.Tensor]:
    """Return copies of the heads' weights and biases by their names in the model's state dict."""
    return {
        f"{name}.{part}": parameter.detach().clone()
        for name, head in heads.items()
        for part, parameter in head.named_parameters(recurse=False)
    }


@torch.no_grad()
def restore(
    heads: Mapping[str, nn.Module], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Restore the result of `tensors_of`, and remove a bias that did not exist."""
    for name, head in heads.items():
        for part, parameter in list(head.named_parameters(recurse=False)):
            if f"{name}.{part}" in tensors:
                parameter.copy_(tensors[f"{name}.{part}"])
            else:
                head.register_parameter(part, None)


def transform(heads: Mapping[str, nn.Module], mapping: AffineMap) -> None:
    """Apply an affine map to the heads' outputs, by changing each weight and bias once,
    also if heads share them.
    """
    done: set[int] = set()
    scaled = AffineMap(mapping.weight)
    for head in heads.values():
        if (
            isinstance(head, nn.Linear)
            and head.bias is None
            and mapping.bias is not None
        ):
            zeros = head.weight.new_zeros(head.out_features)
            head.bias = nn.Parameter(zeros, requires_grad=head.weight.requires_grad)
        for name, parameter in head.named_parameters(recurse=False):
            if id(parameter) not in done:
                done.add(id(parameter))
                # In float64, a weight is rounded only once.
                values = parameter.detach().cpu().double().numpy()
                if isinstance(head, nn.Linear):
                    new = mapping(values) if name == "bias" else scaled(values.T).T
                else:
                    zero = 0.0 if name == "bias" else _weight_of_zero(head)
                    new = scaled(values - zero) + zero
                parameter.copy_(torch.from_numpy(new))


def _weight_of_zero(norm: Any) -> float:
    """The weight at which a norm returns its bias only: 0,
    or -1 if it multiplies by 1 + weight (Gemma).
    """
    bare = copy.deepcopy(norm)
    for parameter in bare.parameters():
        parameter.zero_()
    # A constant input would be 0 once a norm has subtracted its mean.
    ramp = torch.arange(
        norm.weight.numel(), dtype=norm.weight.dtype, device=norm.weight.device
    )
    return -1.0 if bool(bare(ramp[None]).any()) else 0.0


def as_loaded(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model as `from_pretrained` builds it, without weights;
    it drops biases that it does not have.
    """
    with torch.device("meta"):
        return type(model)(copy.deepcopy(model.config))


def head_loses_bias(model: Any, n_outputs: int | None) -> bool:
    """Whether no layer that can be the head has a bias when the model is loaded; False if unknown.

    Only the class and the config are used, because the model may have adapters and sharded weights.
    """
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    if n_outputs is None or not isinstance(model, PreTrainedModel):
        return False
    try:
        fresh = as_loaded(model)
    # A user's class may need more than a config.
    except TypeError:
        return False
    layers = linear_layers(fresh, n_outputs, beside_the_body=True) or linear_layers(
        fresh, n_outputs
    )
    return bool(layers) and all(layer.bias is None for layer in layers.values())
