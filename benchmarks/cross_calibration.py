"""Little data: a temperature on out-of-fold logits, against one on a fifth of the rows that is held out for it.

    python benchmarks/cross_calibration.py --model MINILM --data ../shared/data --output outputs/cross

`MINILM` is sentence-transformers/all-MiniLM-L6-v2, or a folder that holds it; the data folder has AG News,
20 Newsgroups and CLINC150. For each dataset and seed: training rows drawn anew, K trainings that each leave a fold out,
one on all rows, and one without a fifth of them. All trainings take the same number of steps, since one on fewer rows
and steps would be less confident than the one that its map is for. Killed, it goes on after the last finished line.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from datasets import Dataset, disable_progress_bars
from scipy.special import softmax
from sklearn.model_selection import StratifiedKFold
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, set_seed

from hf_calib import CalibrationTrainer, CalibrationTrainingArguments
from hf_calib.metrics import accuracy, expected_calibration_error, negative_log_likelihood
from hf_calib.scaling import TemperatureScaling

# File of training rows, of test rows, column of texts, rows to train on, steps.
DATASETS = {
    "ag_news": ("ag_news/train_20k.csv.gz", "ag_news/test.csv.gz", "text", 300, 95),
    "20newsgroups": ("20newsgroups/train.parquet", "20newsgroups/test.parquet", "text_stripped", 1000, 190),
    "clinc150": ("clinc150/train.csv.gz", "clinc150/test.csv.gz", "text", 3000, 560),
}
N_FOLDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--output", type=Path, default=Path("outputs/cross_calibration"))
    parser.add_argument("--datasets", nargs="+", default=list(DATASETS), choices=DATASETS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    args = parser.parse_args()
    disable_progress_bars()
    args.output.mkdir(parents=True, exist_ok=True)
    lines = args.output / "results.jsonl"
    done = [json.loads(line) for line in lines.read_text().splitlines()] if lines.is_file() else []
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    for seed in args.seeds:
        for name in args.datasets:
            if any((row["dataset"], row["seed"]) == (name, seed) for row in done):
                continue
            found = measure(args, tokenizer, name, seed)
            with lines.open("a") as file:
                file.write(json.dumps({"dataset": name, "seed": seed, **found}) + "\n")
    for line in lines.read_text().splitlines():
        print(line)


def measure(args: argparse.Namespace, tokenizer: Any, name: str, seed: int) -> dict[str, Any]:
    """Accuracy, NLL and ECE on 2,000 test rows of both ways, before and after their temperature."""
    train_file, test_file, column, n_rows, n_steps = DATASETS[name]
    rng = np.random.default_rng(seed)
    train, test = (
        drawn(args.data / path, column, n, rng, tokenizer)
        for path, n in ((train_file, n_rows), (test_file, 2000))
    )
    labels = np.array(train["label"])
    folds = list(StratifiedKFold(N_FOLDS, shuffle=True, random_state=seed).split(labels, labels))

    def logits_of(rows: Any, *others: Dataset) -> list[np.ndarray[Any, Any]]:
        """Train on some rows; the logits of others."""
        set_seed(seed)
        n_classes = 1 + int(max(labels.max(), max(test["label"])))
        model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=n_classes)
        arguments = CalibrationTrainingArguments(
            output_dir=str(args.output / "trainer"),
            calibration_method="none",
            max_steps=n_steps,
            per_device_train_batch_size=16,
            per_device_eval_batch_size=128,
            learning_rate=1e-4,
            warmup_steps=0.1,
            seed=seed,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_strategy="no",
        )
        collator = DataCollatorWithPadding(tokenizer)
        trainer = CalibrationTrainer(
            model, arguments, train_dataset=train.select(rows), data_collator=collator
        )
        trainer.train()
        return [np.asarray(trainer.predict(each).predictions, np.float64) for each in others]

    first_fold, rest = folds[0][1], folds[0][0]
    calibration, held_out_test = logits_of(rest, train.select(first_fold), test)
    out_of_fold = np.empty((len(labels), calibration.shape[1]))
    out_of_fold[first_fold] = calibration
    for rows, fold in folds[1:]:
        (out_of_fold[fold],) = logits_of(rows, train.select(fold))
    (all_test,) = logits_of(np.arange(len(labels)), test)
    ways = {
        "held_out": (held_out_test, calibration, labels[first_fold]),
        "out_of_fold": (all_test, out_of_fold, labels),
    }
    found: dict[str, Any] = {}
    for way, (logits, fitted_on, fitted_labels) in ways.items():
        scaler = TemperatureScaling().fit(fitted_on, fitted_labels)
        found[way] = {"temperature": scaler.temperature_}
        targets = np.array(test["label"])
        for state, probs in (
            ("before", softmax(logits, axis=1)),
            ("after", scaler.predict_proba(logits)),
        ):
            found[way][state] = {
                "accuracy": accuracy(probs, targets),
                "nll": negative_log_likelihood(probs, targets),
                "ece": expected_calibration_error(probs, targets),
            }
    return found


def drawn(path: Path, column: str, n_rows: int, rng: np.random.Generator, tokenizer: Any) -> Dataset:
    """Random rows of a file, tokenized."""
    table = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
    chosen = table.iloc[rng.permutation(len(table))[:n_rows]]
    rows = Dataset.from_dict({"text": chosen[column].tolist(), "label": chosen["label"].tolist()})
    return rows.map(
        lambda batch: tokenizer(batch["text"], truncation=True, max_length=64),
        batched=True,
        remove_columns="text",
    )


if __name__ == "__main__":
    main()
