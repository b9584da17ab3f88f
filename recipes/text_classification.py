"""Fine-tune a text classifier with a calibration loss, and save it calibrated.

    python recipes/text_classification.py --config recipes/configs/20newsgroups_bert.yaml \
        --config recipes/configs/losses/adafocal_every_10_steps.yaml --output_dir outputs/20newsgroups

On several GPUs, replace `python` by `accelerate launch --config_file
recipes/accelerate/8_gpus.yaml` or by `torchrun --nproc_per_node 8`.
"""

import sys
from dataclasses import dataclass

from papers.dynamics import TrainingTrace
from papers.networks.global_pooling_cnn import (
    GlobalPoolingCNNConfig,
    GlobalPoolingCNNForSequenceClassification,
)
from papers.newsgroups import StudyDataArguments, load_study_data
from papers.words import load_glove, train_word_tokenizer
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    set_seed,
)
from transformers.hf_argparser import HfArg

from hf_calib import CalibrationTrainer, CalibrationTrainingArguments
from hf_calib.data import label_maps, load_ood, multi_hot
from hf_calib.experiments import parse_arguments, print_input_errors, train_and_report


@dataclass
class ModelArguments:
    model: str = HfArg(
        default="bert-base-uncased",
        help="A model on the Hub or on disk, or 'global_pooling_cnn', trained from scratch.",
    )
    max_length: int = HfArg(default=128, help="Tokens of a text in training.")
    eval_max_length: int | None = HfArg(
        default=None, help="Tokens of a text in evaluation; by default as in training."
    )
    vocab_size: int = HfArg(default=20000, help="Size of the CNN's vocabulary.")
    glove_file: str | None = HfArg(
        default=None, help="Word vectors for the CNN, glove.6B.100d.txt."
    )
    training_trace: bool = HfArg(
        default=False,
        help="Record at each evaluation what the papers' figures need, in training_trace.json.",
    )
    resume: bool = HfArg(
        default=False, help="Resume from the last checkpoint in output_dir."
    )

    def __post_init__(self):
        for name in ("max_length", "eval_max_length"):
            length = getattr(self, name)
            if length is not None and length < 1:
                raise SystemExit(f"expected {name} to be at least 1, got {length}")


# Errors in the input are one line each, without a traceback.
sys.excepthook = print_input_errors
model_args, data_args, training_args = parse_arguments(
    (ModelArguments, StudyDataArguments, CalibrationTrainingArguments)
)
set_seed(training_args.seed)

# Data: train, calibration (gammas, temperature, choice of the checkpoint) and test (reported,
# nothing else).
with training_args.main_process_first():
    dataset = load_study_data(data_args)
    elsewhere = load_ood(data_args)
labels = label_maps(dataset)
# Several labels per row become floats.
dataset = multi_hot(dataset)

# Model and tokenizer.
if model_args.model == "global_pooling_cnn":
    tokenizer = train_word_tokenizer(
        dataset["train"]["text"],
        vocab_size=model_args.vocab_size,
        max_length=model_args.max_length,
    )
    config = GlobalPoolingCNNConfig(
        vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **labels
    )
    if model_args.glove_file is not None:
        vectors, coverage = load_glove(model_args.glove_file, tokenizer)
        config.embedding_size = vectors.shape[1]
        print(f"{coverage:.1%} of the words have a GloVe vector")
    model = GlobalPoolingCNNForSequenceClassification(config)
    if model_args.glove_file is not None:
        # Frozen, as in the papers.
        model.set_word_vectors(vectors)
else:
    tokenizer = AutoTokenizer.from_pretrained(model_args.model)
    # A head for other classes is replaced.
    model = AutoModelForSequenceClassification.from_pretrained(
        model_args.model, ignore_mismatched_sizes=True, **labels
    )
    # GPT-2 and Llama were never trained on padded batches.
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id


def tokenize(rows, max_length):
    def ids(batch):
        return tokenizer(batch["text"], truncation=True, max_length=max_length)

    return rows.map(ids, batched=True, remove_columns="text")


with training_args.main_process_first():
    eval_length = model_args.eval_max_length or model_args.max_length
    train = tokenize(dataset["train"], model_args.max_length)
    calibration = tokenize(dataset["calibration"], eval_length)
    test = tokenize(dataset["test"], eval_length)
    elsewhere = {name: tokenize(rows, eval_length) for name, rows in elsewhere.items()}

# Train, report, save.
trainer = CalibrationTrainer(
    model,
    training_args,
    train_dataset=train,
    eval_dataset=calibration,
    calibration_dataset=calibration,
    processing_class=tokenizer,
    data_collator=DataCollatorWithPadding(tokenizer),
)
if model_args.training_trace:
    trainer.add_callback(TrainingTrace(trainer, test_dataset=test))
train_and_report(trainer, test, elsewhere=elsewhere, resume=model_args.resume)
trainer.accelerator.end_training()
