"""Make a small language model for pretraining, if none can be downloaded: a Llama with random weights, and a tokenizer.

    python recipes/small_decoder.py FOLDER TEXTS.jsonl [--words World Sports Business Technology yes no A B C]
    python recipes/next_token.py --model FOLDER --train_file TEXTS.jsonl --output_dir outputs/pretrained

It has 4.5 million parameters by default; a few million tokens take hours on a CPU core. Each of the
words is one token after a space, so that it can be an answer. The texts are rows with `text`.
"""

import argparse
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = {"pad_token": "<pad>", "eos_token": "<eos>"}

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("folder", type=Path)
parser.add_argument("texts", type=Path)
parser.add_argument("--words", nargs="*", default=[])
parser.add_argument("--vocabulary", type=int, default=4096)
parser.add_argument("--hidden", type=int, default=256)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

with args.texts.open(encoding="utf-8") as file:
    texts = [json.loads(line)["text"] for line in file]
found = Tokenizer(BPE())
found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
found.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
room = args.vocabulary - len(args.words)
found.train_from_iterator(
    texts,
    BpeTrainer(
        vocab_size=room,
        special_tokens=list(SPECIAL.values()),
        initial_alphabet=alphabet,
        show_progress=False,
    ),
)
found.add_tokens(
    [f" {word}" for word in args.words if len(found.encode(f" {word}").ids) > 1]
)
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=found, model_max_length=512, **SPECIAL
)

torch.manual_seed(args.seed)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
)
model.save_pretrained(args.folder)
tokenizer.save_pretrained(args.folder)
print(
    f"{model.num_parameters():,} parameters, {len(tokenizer):,} tokens, in {args.folder}"
)
