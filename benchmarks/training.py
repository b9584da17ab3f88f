"""Time of a training step of `CalibrationTrainer` for each loss, against the stock Trainer's with cross entropy.

    python benchmarks/training.py --dtypes float32 bfloat16 --losses focal adafocal mmce
    python benchmarks/training.py --evaluation 5000  # batches of 8 rows, of a network of one narrow layer

The network is BERT-base with random weights, or one of your own (`--model`); the tokens are random.
Each round trains all of them in turn for some steps; the first steps of each are not timed. The
table gives medians over the rounds of the ratio to the stock Trainer in the same round.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from statistics import median
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_calib import CalibrationTrainer, CalibrationTrainingArguments
from hf_calib.losses import LOSSES

STOCK = "stock Trainer"
WARM_UP = 10  # steps


def main() -> None:
    args = parse_args()
    if args.evaluation:
        compare_evaluations(args)
        return
    place = "cuda" if torch.cuda.is_available() else "cpu"
    print(
        f"torch {torch.__version__}, {place}, batches of {args.batch_size} x {args.length} tokens"
    )
    for dtype in args.dtypes:
        rounds = [
            {name: step_seconds(name, dtype, args) for name in (STOCK, *args.losses)}
            for _ in range(args.rounds)
        ]
        print(
            f"{dtype}: a step of the {STOCK} takes {1e3 * median(r[STOCK] for r in rounds):.2f} ms"
        )
        for name in args.losses:
            ratios = [seconds[name] / seconds[STOCK] for seconds in rounds]
            print(
                f"  {name:<24}{median(ratios):.3f}  ({min(ratios):.3f} to {max(ratios):.3f})",
                flush=True,
            )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--losses", nargs="+", default=list(LOSSES), choices=LOSSES, metavar="LOSS"
    )
    parser.add_argument(
        "--dtypes", nargs="+", default=["float32"], choices=("float32", "bfloat16")
    )
    parser.add_argument(
        "--model",
        help="a name on the Hub or a folder; by default BERT-base, random weights",
    )
    parser.add_argument("--labels", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--length", type=int, default=128, help="tokens")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--evaluation",
        type=int,
        metavar="BATCHES",
        help="time evaluations, and no steps",
    )
    return parser.parse_args()


def step_seconds(name: str, dtype: str, args: argparse.Namespace) -> float:
    """Seconds of one training step after the warm-up."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {
            "output_dir": folder,
            "per_device_train_batch_size": args.batch_size,
            "max_steps": WARM_UP + args.steps,
            "bf16": dtype == "bfloat16",
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "logging_strategy": "no",
        }
        rest: dict[str, Any] = {
            "model": make_model(args),
            "train_dataset": make_rows(args),
            "callbacks": [clock],
        }
        if name == STOCK:
            trainer = Trainer(args=TrainingArguments(**settings), **rest)
        else:
            arguments = CalibrationTrainingArguments(
                **settings, loss=name, calibration_method="none"
            )
            trainer = CalibrationTrainer(
                args=arguments, calibration_dataset=make_rows(args), **rest
            )
        trainer.train()
    return (clock.end - clock.begin) / args.steps


def compare_evaluations(args: argparse.Namespace) -> None:
    """Print the time of an evaluation over the stock Trainer's, where its own work for each batch counts most."""
    size = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    ids = torch.randint(5, 64, (8 * args.evaluation, 8))
    rows = Dataset.from_dict(
        {"input_ids": ids.tolist(), "labels": (torch.arange(len(ids)) % 4).tolist()}
    )
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {
            "output_dir": folder,
            "report_to": "none",
            "disable_tqdm": True,
        }
        models = [
            BertForSequenceClassification(
                BertConfig(vocab_size=64, num_labels=4, **size)
            )
            for _ in range(3)
        ]
        arguments = CalibrationTrainingArguments(**settings)
        splits: dict[str, Any] = {
            "eval_dataset": rows,
            "calibration_dataset": rows.select(range(400)),
        }
        trainers = {
            STOCK: Trainer(models[0], TrainingArguments(**settings), eval_dataset=rows),
            "with metrics": CalibrationTrainer(models[1], arguments, **splits),
            "and after a map": CalibrationTrainer(models[2], arguments, **splits),
        }
        trainers["and after a map"].fit_temperature()
        for trainer in trainers.values():
            trainer.remove_callback(PrinterCallback)
        rounds = [
            {name: evaluation_seconds(each) for name, each in trainers.items()}
            for _ in range(args.rounds)
        ]
    for name in trainers:
        print(
            f"  {name:<24}{median(seconds[name] / seconds[STOCK] for seconds in rounds):.3f}"
        )


def evaluation_seconds(trainer: Trainer) -> float:
    """Processor time of an evaluation."""
    begin = time.process_time()
    trainer.evaluate()
    return time.process_time() - begin


class Clock(TrainerCallback):
    """When the first timed step begins, and when the last has ended on the device."""

    def on_step_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        if state.global_step in (WARM_UP, state.max_steps):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.begin, self.end = getattr(self, "end", 0.0), time.perf_counter()


def make_model(args: argparse.Namespace) -> PreTrainedModel:
    torch.manual_seed(0)
    if args.model is None:
        return BertForSequenceClassification(BertConfig(num_labels=args.labels))
    return AutoModelForSequenceClassification.from_pretrained(
        args.model, num_labels=args.labels
    )


def make_rows(args: argparse.Namespace) -> Dataset:
    """Random tokens for all steps, so that the only evaluation, at the epoch's end, is not timed."""
    shape = ((WARM_UP + args.steps) * args.batch_size, args.length)
    columns = {
        "input_ids": torch.randint(1000, 20000, shape),
        "attention_mask": torch.ones(shape, dtype=torch.int64),
        "labels": torch.arange(shape[0]) % args.labels,
    }
    return Dataset.from_dict(
        {name: tensor.tolist() for name, tensor in columns.items()}
    ).with_format("torch")


if __name__ == "__main__":
    main()
