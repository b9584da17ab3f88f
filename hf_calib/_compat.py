"""Work-arounds for versions of other libraries, each with the version that ends it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer


class ConvertedWeights(NamedTuple):
    """A saved state dict under the model's own names, and the saved names that the model does not have."""

    weights: dict[str, Tensor]
    unknown: list[str]
    misshapen: list[str]


def with_names_in_memory(model: PreTrainedModel, saved: Mapping[str, Tensor]) -> ConvertedWeights:
    """Rename and convert a saved state dict as `from_pretrained` does.

    Since transformers 5, `save_pretrained` writes some architectures (ViT, DeiT, BEiT, Swin; DINOv2 from 5.23)
    with other parameter names than they have in memory. The Trainer loads checkpoints without converting the
    names back, so those parameters are left as they are. Still so in 5.23; ends with the first version that
    has transformers pull request 48822 (issue 48805).
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig
    from transformers.utils import logging

    # The conversion replaces parameters, which an optimizer may hold: it gets a copy of the model without data.
    empty: dict[int, Any] = {id(b): torch.empty_like(b, device="meta") for b in model.buffers()}
    for parameter in model.parameters():
        empty[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
    skeleton = copy.deepcopy(model, empty)
    mapping: Any = get_model_conversion_mapping(skeleton)
    config = LoadStateDictConfig(weight_mapping=mapping)
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        info, _ = convert_and_load_state_dict_in_model(skeleton, dict(saved), config)
    finally:
        if bars:
            logging.enable_progress_bar()
    weights = {name: value for name, value in skeleton.state_dict().items() if not value.is_meta}
    unknown = {*info.unexpected_keys, *info.conversion_errors}
    misshapen = {name for name, *_ in info.mismatched_keys}
    return ConvertedWeights(weights, sorted(unknown), sorted(misshapen))


def declare_loss_scaled(trainer: Trainer) -> None:
    """Tell the Trainer that the loss is already divided by the rows of the whole accumulated batch.

    Otherwise it divides by the accumulation steps as well. Before transformers 5.19 it reads only the second
    attribute, which can go once 5.19 is the oldest version supported.
    """
    trainer.loss_is_scaled_for_ga = True
    trainer.model_accepts_loss_kwargs = True


@contextmanager
def full_float32() -> Iterator[None]:
    """Switch TF32 and bfloat16 products off for the length of a with block.

    Once a program has set `fp32_precision`, the interface of torch 2.9, the older one refuses to answer. The
    older one can go once torch 2.9 is the oldest supported.
    """
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:
        matmul: Any = torch.backends.cuda.matmul
        newer = matmul.fp32_precision
        matmul.fp32_precision = "ieee"
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


def program_of(exported: Any) -> Any:
    """The program in an exporter's result: an `onnx_ir.Model`, or an `ExportedProgram` of torch.

    Newer versions wrap it. In 5.17 an ONNX exporter returns torch's `ONNXProgram`, another one the program itself;
    ends with the first version that returns `ExportedModel` as the oldest supported.
    """
    if hasattr(exported, "components"):
        return exported.program
    return getattr(exported, "model", exported)
