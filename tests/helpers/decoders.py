"""Small decoders of local text: a vocabulary, random weights, and next tokens learnt in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Metaspace
from tokenizers.trainers import BpeTrainer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_calib.language_models import for_causal_lm
from hf_calib.losses import make_loss


def tokenizer_of(texts: list[str], words: Sequence[str]) -> PreTrainedTokenizerFast:
    """Byte pairs of the texts; each of the words is one token after a space."""
    made = Tokenizer(BPE(unk_token="[UNK]"))
    made.pre_tokenizer = Metaspace()
    special = {"unk_token": "[UNK]", "pad_token": "[PAD]", "eos_token": "[EOS]"}
    made.train_from_iterator(texts, BpeTrainer(vocab_size=3000, special_tokens=list(special.values())))
    made.add_tokens([f" {word}" for word in words])
    return PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=512, **special)


def decoder(tokenizer: Any, **more: Any) -> LlamaForCausalLM:
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=1, pad_token_id=1, eos_token_id=2,
                         bos_token_id=None, **{**size, **more})  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config)


def learn(model: Any, tokenizer: Any, texts: list[str], steps: int = 300) -> None:
    """Next tokens, in a loop of one's own."""
    transformers.set_seed(0)
    loss = for_causal_lm(make_loss("cross_entropy"))
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = torch.randint(len(texts), (steps, 16))
    model.train()
    for batch in batches.tolist():
        chosen = [texts[i] for i in batch]
        encoded = tokenizer(chosen, truncation=True, max_length=48, padding=True, return_tensors="pt")
        labels = encoded["input_ids"].masked_fill(encoded["attention_mask"] == 0, -100)
        loss(model(**{k: encoded[k] for k in ("input_ids", "attention_mask")}), labels).backward()
        optimiser.step()
        optimiser.zero_grad()
