"""Tiny models of every architecture whose head is found, and helpers for tests of folding."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import BertForSequenceClassification, PreTrainedModel

TEXT = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
}


DECODER = {**TEXT, "num_key_value_heads": 1}


IMAGE = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 16,
    "patch_size": 8,
}


SEQ2SEQ = {
    "vocab_size": 60,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 32,
}


T5 = {
    "vocab_size": 60,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 1,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}


DISTILBERT = {
    "vocab_size": 60,
    "dim": 16,
    "n_layers": 2,
    "n_heads": 2,
    "hidden_dim": 32,
    "max_position_embeddings": 32,
}


GPT2 = {
    "vocab_size": 60,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 32,
    "bos_token_id": 58,
    "eos_token_id": 59,
}


XLNET = {"vocab_size": 60, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32}


MOBILEVIT = {
    "image_size": 32,
    "hidden_sizes": [8, 8, 8],
    "neck_hidden_sizes": [8, 8, 8, 8, 8, 8, 16],
    "num_attention_heads": 2,
}


SWIN = {
    "image_size": 16,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [1, 1],
    "num_heads": [1, 2],
    "window_size": 4,
}


RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}


SWIFTFORMER = {"image_size": 32, "embed_dims": [8, 8, 8, 8], "depths": [1, 1, 1, 1]}


def token_ids(*roles: str) -> dict[str, int]:
    return {f"{role}_token_id": number for number, role in enumerate(roles)}


# (model class without "For...Classification", config, the layers that hold the logits' scale)
ARCHITECTURES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("Albert", {**TEXT, "embedding_size": 8}, ["classifier"]),
    ("Bart", {**SEQ2SEQ, "pad_token_id": 1}, ["classification_head.out_proj"]),
    ("Beit", IMAGE, ["classifier"]),
    ("Bert", TEXT, ["classifier"]),
    ("Camembert", TEXT, ["classifier.out_proj"]),
    (
        "ConvNext",
        {"hidden_sizes": [8, 8], "depths": [1, 1], "num_stages": 2, "image_size": 32},
        ["classifier"],
    ),
    ("CLIP", {"vision_config": IMAGE, "text_config": {**TEXT, **token_ids("bos", "eos")}}, ["classifier"]),
    ("DebertaV2", TEXT, ["classifier"]),
    ("DeiT", IMAGE, ["classifier"]),
    ("DeiTWithTeacher", IMAGE, ["cls_classifier", "distillation_classifier"]),
    ("Dinov2", IMAGE, ["classifier"]),
    ("DistilBert", DISTILBERT, ["classifier"]),
    ("Electra", {**TEXT, "embedding_size": 16}, ["classifier.out_proj"]),
    ("EuroBert", {**DECODER, **token_ids("pad", "bos", "eos", "mask")}, ["classifier"]),
    ("GPT2", GPT2, ["score"]),
    ("Llama", DECODER, ["score"]),
    (
        "MobileBert",
        {**TEXT, "embedding_size": 8, "true_hidden_size": 16, "intra_bottleneck_size": 16},
        ["classifier"],
    ),
    ("MobileViT", MOBILEVIT, ["classifier"]),
    ("ModernBert", {**TEXT, **token_ids("pad", "bos", "eos", "cls", "sep")}, ["classifier"]),
    ("MPNet", TEXT, ["classifier.out_proj"]),
    ("PoolFormer", {"hidden_sizes": [8] * 4, "depths": [1] * 4, "image_size": 32}, ["classifier"]),
    ("Qwen2", {**DECODER, "pad_token_id": 0}, ["score"]),
    ("ResNet", RESNET, ["classifier.1"]),
    ("Roberta", TEXT, ["classifier.out_proj"]),
    ("SwiftFormer", SWIFTFORMER, ["dist_head", "head"]),
    ("Swin", SWIN, ["classifier"]),
    ("T5", T5, ["classification_head.out_proj"]),
    ("ViT", IMAGE, ["classifier"]),
    ("XLMRoberta", TEXT, ["classifier.out_proj"]),
    ("XLNet", XLNET, ["logits_proj"]),
]


def randomised(model: PreTrainedModel) -> PreTrainedModel:
    """Replace the initial weights, whose zero biases and tiny logits would hide a wrong head."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def build(name: str, config: Mapping[str, Any], **changes: Any) -> PreTrainedModel:
    base = name.removesuffix("WithTeacher")
    settings = getattr(transformers, f"{base}Config")(**{"num_labels": 5, **config, **changes})
    kind = "Sequence" if hasattr(transformers, f"{base}ForSequenceClassification") else "Image"
    suffix = "WithTeacher" if name.endswith("WithTeacher") else ""
    return randomised(getattr(transformers, f"{base}For{kind}Classification{suffix}")(settings))


def bert(**changes: Any) -> BertForSequenceClassification:
    return build("Bert", TEXT, **changes)


def some_inputs(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Inputs unlike those that folding draws for itself."""
    generator = torch.Generator().manual_seed(2)
    if model.main_input_name == "pixel_values":
        size = getattr(getattr(model.config, "vision_config", model.config), "image_size", 48)
        return {"pixel_values": torch.rand(3, 3, size, size, generator=generator)}
    ids = torch.randint(10, 50, (1, 13), generator=generator)
    end = getattr(model.config, "eos_token_id", None)
    if end is not None:
        ids[:, -1] = end
    return {"input_ids": ids}


def logits_of(model: PreTrainedModel, inputs: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
    with torch.no_grad():
        return model(**(inputs or some_inputs(model))).logits


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same_weights(model: nn.Module, before: Mapping[str, torch.Tensor]) -> None:
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)


@contextmanager
def refused(model: PreTrainedModel, error: type[Exception], message: str) -> Iterator[None]:
    """Expect an error that leaves weights and config alone."""
    before, config = weights_of(model), copy.deepcopy(model.config.to_dict())
    with pytest.raises(error, match=message):
        yield
    assert_same_weights(model, before)
    assert model.config.to_dict() == config


class Squashed(BertForSequenceClassification):
    """Its logits are not a linear function of any layer."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits.tanh()
        return outputs
