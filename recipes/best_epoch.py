"""Choose the epoch of a run by its NLL on held-out rows, before and after a temperature; docs/guides/best_epoch.md.

    python recipes/best_epoch.py --config recipes/configs/20newsgroups_cnn.yaml --calibration_strategy evaluate \
        --temperature_criterion nll --seed 0 --results best_epoch.csv
    python recipes/best_epoch.py --table best_epoch.csv

Each run adds its epochs to the results: `eval_loss` and `eval_nll_calibrated` of the held-out rows,
and the test rows' metrics. Seeds that are in the results are not run again.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import pandas
from markdown_tables import table_lines
from papers.networks.global_pooling_cnn import (
    GlobalPoolingCNNConfig,
    GlobalPoolingCNNForSequenceClassification,
)
from papers.words import train_word_tokenizer
from transformers import DataCollatorWithPadding, TrainerCallback, set_seed
from transformers.hf_argparser import HfArg

from hf_calib import CalibrationTrainer, CalibrationTrainingArguments
from hf_calib.data import DataArguments, label_maps, load_data
from hf_calib.experiments import parse_arguments, print_input_errors

CRITERIA = ("eval_loss", "eval_nll_calibrated")
MEASURED = ("accuracy", "nll", "nll_calibrated", "ece", "ece_calibrated")


@dataclass
class ModelArguments:
    model: str = HfArg(
        default="global_pooling_cnn", help="This network, as the config says."
    )
    max_length: int = HfArg(default=250, help="Words of a text, from its end.")
    results: Path = HfArg(
        default=Path("best_epoch.csv"), help="The file that epochs go to."
    )

    def __post_init__(self):
        if self.max_length < 1:
            raise SystemExit(
                f"expected max_length to be at least 1, got {self.max_length}"
            )


class TestAtEachEpoch(TrainerCallback):
    """Measures the test rows after each evaluation, with the temperature that was fitted for it."""

    def __init__(self, trainer, test):
        self.trainer = trainer
        self.test = test
        self.epochs = {}

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        found = self.trainer.predict(self.test).metrics
        epoch = round(state.epoch)
        self.epochs[epoch] = {
            "seed": args.seed,
            "epoch": epoch,
            **{name: metrics[name] for name in CRITERIA},
            **{name: found[f"test_{name}"] for name in MEASURED},
        }


def run(model_args, data_args, args):
    """The epochs of one run."""
    set_seed(args.seed)
    dataset = load_data(data_args)
    tokenizer = train_word_tokenizer(
        dataset["train"]["text"], max_length=model_args.max_length
    )
    sizes = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    config = GlobalPoolingCNNConfig(**sizes, **label_maps(dataset))
    length = model_args.max_length

    def tokenize(batch):
        return tokenizer(batch["text"], truncation=True, max_length=length)

    rows = dataset.map(tokenize, batched=True, remove_columns="text")
    trainer = CalibrationTrainer(
        GlobalPoolingCNNForSequenceClassification(config),
        args,
        train_dataset=rows["train"],
        eval_dataset=rows["calibration"],
        calibration_dataset=rows["calibration"],
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
    )
    epochs = TestAtEachEpoch(trainer, rows["test"])
    trainer.add_callback(epochs)
    trainer.train()
    return pandas.DataFrame(epochs.epochs.values())


def table(results):
    """The epochs that each criterion chooses, and the means over the seeds of the test rows' metrics, in lines."""
    by_seed = results.groupby("seed")
    chosen = {f"`{name}`": by_seed[name].idxmin() for name in CRITERIA}
    chosen["the last"] = by_seed["epoch"].idxmax()
    header = ["epoch by", "epochs", "accuracy", "NLL", "NLL after T", "ECE"]
    header.append("ECE after T")
    rows = []
    for name, places in chosen.items():
        runs = results.loc[places]
        means = [f"{runs[measure].mean():.3f}" for measure in MEASURED]
        rows.append([name, ", ".join(map(str, runs["epoch"])), *means])
    return "\n".join(table_lines(header, rows))


if __name__ == "__main__":
    # Errors in the input are one line each.
    sys.excepthook = print_input_errors
    if sys.argv[1] == "--table":
        print(table(pandas.read_csv(sys.argv[2])))
        sys.exit()
    model_args, data_args, training_args = parse_arguments(
        (ModelArguments, DataArguments, CalibrationTrainingArguments)
    )
    there = [pandas.read_csv(model_args.results)] if model_args.results.exists() else []
    if not any(training_args.seed in set(epochs["seed"]) for epochs in there):
        epochs = pandas.concat([*there, run(model_args, data_args, training_args)])
        epochs.to_csv(model_args.results, index=False, float_format="%.6f")
