"""Train a language model on the next token of plain text with a calibration loss, and save it calibrated.

    python recipes/next_token.py --model Qwen/Qwen3-0.6B --train_file train.jsonl --test_file test.jsonl \
        --loss focal --output_dir outputs/next_token

The texts (rows with `text`) are joined, with an end token between them, and cut into blocks. The
first blocks of the training file are held out for the temperature and the gammas. Without
--test_file, the model is only trained, for example from scratch.
"""

import sys
from dataclasses import dataclass

from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    set_seed,
)
from transformers.hf_argparser import HfArg

from hf_calib import CalibrationTrainer, CalibrationTrainingArguments
from hf_calib.data.sources import load_rows
from hf_calib.experiments import parse_arguments, print_input_errors, train_and_report


@dataclass
class TextArguments:
    train_file: str = HfArg(help="jsonl, csv or parquet with a column text.")
    test_file: str | None = HfArg(default=None, help="Reported, nothing else.")
    model: str = HfArg(default="Qwen/Qwen3-0.6B", help="On the Hub or on disk.")
    block: int = HfArg(default=128, help="Tokens of a row.")
    max_train_tokens: int | None = HfArg(
        default=None, help="The first ones; all by default."
    )
    max_test_tokens: int = HfArg(default=4096, help="The first ones.")
    calibration_tokens: int = HfArg(
        default=8192, help="Held out of the training tokens."
    )
    resume: bool = HfArg(
        default=False, help="Resume from the last checkpoint in output_dir."
    )


# Errors in the input are one line each, without a traceback.
sys.excepthook = print_input_errors
text_args, training_args = parse_arguments(
    (TextArguments, CalibrationTrainingArguments)
)
set_seed(training_args.seed)
tokenizer = AutoTokenizer.from_pretrained(text_args.model)
if tokenizer.pad_token is None:
    tokenizer.pad_token = tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(text_args.model, dtype="float32")


def blocks(path: str, most: int | None) -> Dataset:
    """Rows of `block` tokens, each its own label; what is left at the end is dropped."""
    texts = [text or "" for text in load_rows(path)["text"]]
    tokens = []
    for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]:
        tokens += [*ids, tokenizer.eos_token_id]
    tokens = tokens[:most]
    size = text_args.block
    starts = range(0, len(tokens) - size + 1, size)
    rows = [tokens[start : start + size] for start in starts]
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


with training_args.main_process_first():
    train = blocks(text_args.train_file, text_args.max_train_tokens)
    test = None
    if text_args.test_file is not None:
        test = blocks(text_args.test_file, text_args.max_test_tokens)
n_held_out = max(1, text_args.calibration_tokens // text_args.block)
calibration = train.select(range(n_held_out))
train = train.select(range(n_held_out, len(train)))

trainer = CalibrationTrainer(
    model,
    training_args,
    train_dataset=train,
    eval_dataset=calibration,
    calibration_dataset=calibration,
    processing_class=tokenizer,
    data_collator=DataCollatorForSeq2Seq(tokenizer),
)
if test is None:
    trainer.train(resume_from_checkpoint=text_args.resume or None)
    trainer.save_model(training_args.output_dir)
else:
    train_and_report(trainer, test, resume=text_args.resume)
trainer.accelerator.end_training()
