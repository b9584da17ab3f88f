"""Tiny causal language models of many architectures."""

from __future__ import annotations

from typing import Any

import torch
import transformers

DECODER = {
    **{
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
    },
    **{
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
    },
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
NO_GROUPS = {
    name: value for name, value in DECODER.items() if name != "num_key_value_heads"
}
GPT2 = {
    "vocab_size": 64,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 64,
    "pad_token_id": 0,
}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}
OPT = {**NO_GROUPS, "ffn_dim": 32, "word_embed_proj_dim": 16}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", DECODER),
    "Llama, tied": ("Llama", {**DECODER, "tie_word_embeddings": True}),
    "Mistral": ("Mistral", DECODER),
    "Qwen2": ("Qwen2", DECODER),
    "Qwen2, tied": ("Qwen2", {**DECODER, "tie_word_embeddings": True}),
    "Qwen3": ("Qwen3", {**DECODER, "head_dim": 8}),
    "Gemma": ("Gemma", {**DECODER, "head_dim": 8}),
    "Phi3": ("Phi3", DECODER),
    "SmolLM3": ("SmolLM3", DECODER),
    "Olmo2": ("Olmo2", DECODER),
    "StableLm": ("StableLm", DECODER),
    "Starcoder2": ("Starcoder2", DECODER),
    "GPT2": ("GPT2", GPT2),
    "GPTNeoX": ("GPTNeoX", NO_GROUPS),
    "OPT": ("OPT", OPT),
}


def language_model(name: str = "Llama", **more: Any) -> Any:
    """A random causal language model in evaluation mode, whose logits spread."""
    kind, settings = ARCHITECTURES[name]
    config = getattr(transformers, f"{kind}Config")(**{**settings, **more})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.get_output_embeddings().weight *= 20
    return model.eval()
