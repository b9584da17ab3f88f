"""Tiny models of every class that transformers maps to classification, and helpers for tests of folding."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import BertForSequenceClassification, PreTrainedModel
from transformers.models.auto import modeling_auto

TEXT = {
    **{
        "vocab_size": 60,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    },
    **{"intermediate_size": 32, "max_position_embeddings": 32},
}
# The layers that hold the logits' scale, by the class without "For...Classification".
ARCHITECTURES: dict[str, list[str]] = {
    **{
        key: ["classifier"]
        for key in ("Albert", "Beit", "Bert", "ConvNext", "CLIP", "DebertaV2", "DeiT")
    },
    **{
        key: ["classifier"]
        for key in ("Dinov2", "DistilBert", "EuroBert", "MobileBert", "MobileViT")
    },
    **{key: ["classifier"] for key in ("ModernBert", "PoolFormer", "Swin", "ViT")},
    **{
        key: ["classifier.out_proj"]
        for key in ("Camembert", "Electra", "MPNet", "Roberta", "XLMRoberta")
    },
    **{key: ["classification_head.out_proj"] for key in ("Bart", "T5")},
    **{key: ["score"] for key in ("GPT2", "Llama", "Qwen2")},
    "DeiTWithTeacher": ["cls_classifier", "distillation_classifier"],
    "ResNet": ["classifier.1"],
    "SwiftFormer": ["dist_head", "head"],
    "XLNet": ["logits_proj"],
}
TASKS = ("SEQUENCE", "TOKEN", "IMAGE")

# Whatever of these a config knows, by the names that architectures give to the same few numbers.
_SMALL: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "emb_dim"), 16
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(
        ("intermediate_size", "hidden_dim", "d_ff", "d_inner", "ffn_dim", "n_inner"), 32
    ),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 32),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 32),
    **dict.fromkeys(
        ("d_kv", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"),
        8,
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(
        ("num_key_value_heads", "n_group", "topk_group", "first_k_dense_replace"), 1
    ),
    **{
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "v_head_dim": 8,
        "vocab_size": 60,
    },
    **{
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 0,
    },
    **{
        "sep_token_id": 3,
        "cls_token_id": 3,
        "mask_token_id": 3,
        "image_size": 32,
        "patch_size": 8,
    },
}
_TWO_TOWERS: dict[str, Any] = {"text_config": {**_SMALL}, "vision_config": {**_SMALL}}
_TWO_KEYS = {"num_key_value_heads": 2}
_MIXED = {"layer_types": ["linear_attention", "full_attention"]}
_CONVNEXT: dict[str, Any] = {"hidden_sizes": [8, 8], "depths": [1, 1], "num_stages": 2}
_SWIN = {
    "depths": [1, 1],
    "num_heads": [1, 2],
    "embed_dim": 8,
    "patch_size": 2,
    "window_size": 4,
}
_RESNET = {
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
    "groups_width": 8,
}
_FOUR = {"depths": [1] * 4, "hidden_sizes": [8] * 4, "num_attention_heads": [1] * 4}

# What an architecture wants otherwise.
_OWN: dict[str, dict[str, Any]] = {
    **{
        key: {"pad_token_id": 1, "bos_token_id": 0}
        for key in ("camembert", "xlm-roberta")
    },
    **dict.fromkeys(
        (
            "axk1",
            "axk2",
            "deepseek_v2",
            "deepseek_v3",
            "diffllama",
            "minicpm3",
            "mistral4",
        ),
        _TWO_KEYS,
    ),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text"), _MIXED),
    "gptj": {"rotary_dim": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lilt": {"hidden_size": 24, "max_2d_position_embeddings": 1024},
    "xmod": {"default_language": "en_XX"},
    **dict.fromkeys(("clip", "gemma3", "metaclip_2", "siglip", "siglip2"), _TWO_TOWERS),
    **dict.fromkeys(("convnext", "convnextv2"), _CONVNEXT),
    **dict.fromkeys(("donut-swin", "swin", "swinv2"), _SWIN),
    **dict.fromkeys(("regnet", "resnet"), _RESNET),
    "levit": {
        **{
            "image_size": 64,
            "patch_size": 16,
            "hidden_sizes": [8] * 3,
            "num_attention_heads": [1] * 3,
        },
        **{"depths": [1] * 3, "key_dim": [8] * 3},
    },
    "mobilevit": {
        "patch_size": 2,
        "hidden_sizes": [8, 8, 8],
        "neck_hidden_sizes": [8, 8, 8, 8, 8, 8, 16],
    },
    "poolformer": {"hidden_sizes": [8] * 4, "depths": [1] * 4, "patch_size": 7},
    "pvt": {**_FOUR, "patch_size": 4},
    "pvt_v2": _FOUR,
    "segformer": {**_FOUR, "decoder_hidden_size": 8},
    "swiftformer": {"embed_dims": [8] * 4, "depths": [1] * 4},
}

# They cannot be built here, or not small.
NOT_BUILT = {
    "Bros": "takes boxes beside token ids",
    "DinatForImageClassification": "needs the package natten",
    "LayoutLM": "takes images and boxes beside token ids",
    "Perceiver": "its sizes are fixed in code: 50,000 positions",
    "ShieldGemma2": "a language model that says yes or no: its logits are those of two tokens, no head of its own",
    "TimmWrapper": "needs the package timm, which needs torchvision",
}
# `fold` refuses them, with this message.
REFUSED = {
    "PPLCNetForImageClassification": "expected model to return logits, got BaseModelOutput"  # nor do pipelines take it
}


def classifiers() -> list[str]:
    """The classes that transformers maps to a task of classification."""
    found: set[str] = set()
    for task in TASKS:
        names = getattr(modeling_auto, f"MODEL_FOR_{task}_CLASSIFICATION_MAPPING_NAMES")
        for classes in names.values():
            found |= {classes} if isinstance(classes, str) else set(classes)
    return sorted(found)


def randomised(model: PreTrainedModel) -> PreTrainedModel:
    """Replace the initial weights, whose zero biases and tiny logits would hide a wrong head."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def class_of(name: str) -> str:
    """The name of the class, of "Bert" or "DeiTWithTeacher"."""
    base = name.removesuffix("WithTeacher")
    kind = (
        "Sequence"
        if hasattr(transformers, f"{base}ForSequenceClassification")
        else "Image"
    )
    return f"{base}For{kind}Classification{name[len(base) :]}"


def build(name: str, **changes: Any) -> PreTrainedModel:
    """A model of a class, or of one of `ARCHITECTURES`, with 5 labels and random weights, a few thousand of them."""
    kind = getattr(transformers, name if "Classification" in name else class_of(name))
    config_class = kind.config_class
    known = {
        key
        for base in config_class.__mro__
        for key in getattr(base, "__annotations__", {})
    }
    known |= set(inspect.signature(config_class.__init__).parameters)
    settings = {
        key: value
        for key, value in _SMALL.items()
        if key in known or key.endswith("_token_id")
    }
    own = _OWN.get(config_class.model_type, {})
    config = config_class(**{**settings, **own, "num_labels": 5, **changes})
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind(config).parameters())
    assert size < 3_000_000, f"{size:,} parameters"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = randomised(kind(config))
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            module.weight.data[module.padding_idx] = 0  # as loading makes it for Funnel
    return model


def bert(**changes: Any) -> BertForSequenceClassification:
    return build("Bert", **changes)


def batch_for(model: PreTrainedModel) -> dict[str, torch.Tensor] | None:
    """Inputs of a model that takes more than token ids or pixels; None for those that `fold` makes by itself."""
    if type(model).__name__.startswith("Canine"):
        return {"input_ids": torch.arange(32).view(2, 16)}
    if not type(model).__name__.startswith("Siglip2"):
        return None
    pixels = torch.rand(2, 4, 3 * 8 * 8, generator=torch.Generator().manual_seed(2))
    mask = torch.ones(2, 4, dtype=torch.long)
    return {
        "pixel_values": pixels,
        "pixel_attention_mask": mask,
        "spatial_shapes": torch.full((2, 2), 2),
    }


def some_inputs(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Inputs unlike those that folding draws for itself."""
    generator = torch.Generator().manual_seed(2)
    if model.main_input_name == "pixel_values":
        size = getattr(
            getattr(model.config, "vision_config", model.config), "image_size", 48
        )
        return {"pixel_values": torch.rand(3, 3, size, size, generator=generator)}
    ids = torch.randint(10, 50, (1, 13), generator=generator)
    end = getattr(model.config, "eos_token_id", None)
    if end is not None:
        ids[:, -1] = end
    return {"input_ids": ids}


def logits_of(
    model: PreTrainedModel, inputs: Mapping[str, torch.Tensor] | None = None
) -> torch.Tensor:
    with torch.no_grad():
        return model(**(inputs or some_inputs(model))).logits


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same_weights(model: nn.Module, before: Mapping[str, torch.Tensor]) -> None:
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)


@contextmanager
def refused(model: PreTrainedModel, error: Any, message: str) -> Iterator[None]:
    """Expect an error that leaves weights and config alone."""
    before, config = weights_of(model), copy.deepcopy(model.config.to_dict())
    with pytest.raises(error, match=message):
        yield
    assert_same_weights(model, before)
    assert model.config.to_dict() == config
