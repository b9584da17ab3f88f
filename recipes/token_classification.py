"""Fine-tune a token classifier with a calibration loss, and save it calibrated.

    python recipes/token_classification.py --config recipes/configs/wnut17_minilm.yaml \
        --config recipes/configs/losses/focal.yaml --output_dir outputs/wnut17

On several GPUs, replace `python` by `accelerate launch --config_file
recipes/accelerate/8_gpus.yaml` or by `torchrun --nproc_per_node 8`.
"""

import sys
from dataclasses import dataclass

from transformers import (
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
    set_seed,
)
from transformers.hf_argparser import HfArg

from hf_calib import CalibrationTrainer, CalibrationTrainingArguments
from hf_calib.data import DataArguments, load_tagged, tag_maps, tokenize_words
from hf_calib.experiments import parse_arguments, print_input_errors, train_and_report


@dataclass
class ModelArguments:
    model: str = HfArg(default="bert-base-cased", help="A model on the Hub or on disk.")
    max_length: int = HfArg(default=128, help="Sub-words of a sentence.")
    resume: bool = HfArg(
        default=False, help="Resume from the last checkpoint in output_dir."
    )

    def __post_init__(self):
        if self.max_length < 1:
            raise SystemExit(
                f"expected max_length to be at least 1, got {self.max_length}"
            )


# Errors in the input are one line each, without a traceback.
sys.excepthook = print_input_errors
model_args, data_args, training_args = parse_arguments(
    (ModelArguments, DataArguments, CalibrationTrainingArguments)
)
set_seed(training_args.seed)

# Data: train, calibration (gammas, temperature, choice of the checkpoint) and test (reported,
# nothing else).
with training_args.main_process_first():
    dataset = load_tagged(data_args)

# Model and tokenizer. Byte-level tokenizers read words with the space before them.
tokenizer = AutoTokenizer.from_pretrained(model_args.model, add_prefix_space=True)
# A head for other tags is replaced.
model = AutoModelForTokenClassification.from_pretrained(
    model_args.model, ignore_mismatched_sizes=True, **tag_maps(dataset)
)
# GPT-2 and Llama were never trained on padded batches.
if tokenizer.pad_token is None:
    tokenizer.pad_token = tokenizer.eos_token
model.config.pad_token_id = tokenizer.pad_token_id

with training_args.main_process_first():
    splits = {
        name: tokenize_words(rows, tokenizer, max_length=model_args.max_length)
        for name, rows in dataset.items()
    }

# Train, report, save.
trainer = CalibrationTrainer(
    model,
    training_args,
    train_dataset=splits["train"],
    eval_dataset=splits["calibration"],
    calibration_dataset=splits["calibration"],
    processing_class=tokenizer,
    data_collator=DataCollatorForTokenClassification(tokenizer),
)
train_and_report(trainer, splits["test"], resume=model_args.resume)
trainer.accelerator.end_training()
