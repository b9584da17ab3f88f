"""Little data: calibration on out-of-fold logits, against a fifth of the rows held out for it.

    python benchmarks/cross_calibration.py --data ../shared/data/ag_news --model MINILM --output outputs/cross

`MINILM` is sentence-transformers/all-MiniLM-L6-v2, or a folder that holds it; the data folder has AG News as CSV.
Each seed draws its own 300 training rows and 2,000 test rows. Killed, it goes on where it was.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from datasets import Dataset, disable_progress_bars
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, set_seed

from hf_calib import CalibrationTrainer, CalibrationTrainingArguments, cross_calibrate

METRICS = ("accuracy", "nll", "brier", "ece", "classwise_ece")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--output", type=Path, default=Path("outputs/cross_calibration"))
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--max-steps", type=int, default=-1, help="of each training, in place of epochs")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    args = parser.parse_args()
    disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    train, test = (tokenized(args.data / f"{name}.csv.gz", tokenizer) for name in ("train_20k", "test"))
    print(f"{'seed':<5}{'':<34}" + "".join(f"{name:>15}" for name in (*METRICS, "temperature")), flush=True)
    for seed in args.seeds:
        rng = np.random.default_rng(seed)
        rows = train.select(rng.permutation(len(train))[: args.rows])
        test_rows = test.select(rng.permutation(len(test))[:2000])
        folder = args.output / str(seed)

        def make_trainer(train_dataset: Any, output_dir: str, seed: int = seed, **held_out: Any) -> Any:
            model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=4)
            arguments = CalibrationTrainingArguments(
                output_dir=output_dir,
                loss="cross_entropy",
                num_train_epochs=args.epochs,
                max_steps=args.max_steps,
                per_device_train_batch_size=16,
                per_device_eval_batch_size=128,
                learning_rate=1e-4,
                warmup_steps=0.1,
                seed=seed,
                bf16=torch.cuda.is_available() or torch.backends.mkldnn.is_available(),
                save_total_limit=1,
                report_to="none",
                disable_tqdm=True,
                logging_strategy="no",
                use_cpu=not torch.cuda.is_available(),
            )
            collator = DataCollatorWithPadding(tokenizer)
            return CalibrationTrainer(
                model, arguments, train_dataset=train_dataset, data_collator=collator, **held_out
            )

        n_held_out = args.rows // args.folds
        set_seed(seed)
        trainer = make_trainer(
            rows.select(range(n_held_out, args.rows)),
            str(folder / "held_out"),
            calibration_dataset=rows.select(range(n_held_out)),
        )
        trainer.train()
        report(seed, f"{args.rows - n_held_out} rows", trainer, test_rows, f"T from {n_held_out} rows")
        found = cross_calibrate(make_trainer, rows, args.folds, output_dir=folder / "cross", seed=seed)
        report(seed, f"{args.rows} rows", found.trainer, test_rows, f"T from {args.folds} folds")


def tokenized(path: Path, tokenizer: Any) -> Dataset:
    rows = Dataset.from_pandas(pd.read_csv(path)[["text", "label"]])
    return rows.map(
        lambda batch: tokenizer(batch["text"], truncation=True, max_length=64),
        batched=True,
        remove_columns="text",
    )


def report(seed: int, trained_on: str, trainer: Any, test_rows: Dataset, after: str) -> None:
    metrics = trainer.evaluate(test_rows)
    for title, suffix, temperature in (
        (trained_on, "", ""),
        (f"{trained_on}, {after}", "_calibrated", f"{trainer.temperature:.3f}"),
    ):
        cells = [f"{metrics[f'eval_{name}{suffix}']:>15.4f}" for name in METRICS]
        print(f"{seed:<5}{title:<34}{''.join(cells)}{temperature:>15}", flush=True)


if __name__ == "__main__":
    main()
