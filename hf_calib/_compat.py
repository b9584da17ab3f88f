"""Work-arounds for versions of other libraries, each with the version that ends it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn


def load_saved_names(model: Any) -> None:
    """Let the Trainer load a model's checkpoints that have other names of parameters than the model
    in memory.

    Since transformers 5, `save_pretrained` writes some architectures (ViT, DeiT, BEiT, Swin; DINOv2
    from 5.23) so, and the Trainer's `load_state_dict` passes over those parameters. Still so in
    5.23; ends with the first version that has transformers pull request 48822 (issue 48805).
    """
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping

    # A class with a loader of its own knows its own names.
    plain = (
        isinstance(model, PreTrainedModel)
        and type(model).load_state_dict is nn.Module.load_state_dict
    )
    if plain and get_model_conversion_mapping(model):
        model.load_state_dict = MethodType(load_state_dict, model)


def load_state_dict(
    model: nn.Module, state_dict: Mapping[str, Tensor], *args: Any, **kwargs: Any
) -> Any:
    """`nn.Module.load_state_dict` of names as `save_pretrained` writes them,
    or as the model has them.
    """
    if not state_dict.keys() <= model.state_dict().keys():
        state_dict = _with_names_in_memory(model, state_dict)
    return nn.Module.load_state_dict(model, state_dict, *args, **kwargs)


def _with_names_in_memory(model: Any, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename and convert a saved state dict as `from_pretrained` does."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    # The conversion replaces parameters, which an optimizer may hold:
    # it gets a copy of the model without data.
    empty: dict[int, Any] = {
        id(b): torch.empty_like(b, device="meta") for b in model.buffers()
    }
    for parameter in model.parameters():
        empty[id(parameter)] = nn.Parameter(
            torch.empty_like(parameter, device="meta"), requires_grad=False
        )
    skeleton = copy.deepcopy(model, empty)
    mapping: Any = get_model_conversion_mapping(skeleton)
    convert_and_load_state_dict_in_model(
        skeleton, dict(saved), LoadStateDictConfig(weight_mapping=mapping)
    )
    found = nn.Module.state_dict(skeleton)
    # Parameters that were not saved are still without data, and are missing in the
    # result as they are in the file.
    return {name: value for name, value in found.items() if not value.is_meta}


@contextmanager
def full_float32() -> Iterator[None]:
    """Switch TF32 and bfloat16 products off for the length of a with block.

    Once a program has set `fp32_precision`, the interface of torch 2.9, the older one refuses to
    answer. The older one can go once torch 2.9 is the oldest supported.
    """
    switch: Any = torch.set_float32_matmul_precision
    try:
        # "highest" and "ieee" are the names of full float32 in the two interfaces.
        before, full = torch.get_float32_matmul_precision(), "highest"
    except RuntimeError:
        switch = partial(setattr, torch.backends.cuda.matmul, "fp32_precision")
        before, full = torch.backends.cuda.matmul.fp32_precision, "ieee"
    switch(full)
    try:
        yield
    finally:
        switch(before)
