"""Fine-tune MiniLM on four text datasets, on two of them until it over-fits, and save its logits.

    python benchmarks/posthoc_training.py --data ../shared/data --model MINILM --output outputs/posthoc

`MINILM` is sentence-transformers/all-MiniLM-L6-v2, or a folder that contains it. The data folder
has one folder per dataset, as published by its authors: CSV or Parquet files with a text and a
label column.

Each run trains with cross entropy in `CalibrationTrainer` on part of the training split; the pool
that calibration rows are drawn from (validation rows, or training rows that were left out) and the
test rows are predicted at its end. One file per run, NAME-SEED.npz, is written at the end. A run
whose file exists is skipped.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from datasets import Dataset, disable_progress_bars
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    set_seed,
)

from hf_calib import CalibrationTrainer, CalibrationTrainingArguments

BATCH_SIZE = 32


class Frames(NamedTuple):
    """Texts and labels as published; without validation rows the pool is None.

    Labels are (N,) integers, or (N, C) floats of 0 and 1.
    """

    train: pd.DataFrame
    pool: pd.DataFrame | None
    test: pd.DataFrame
    n_labels: int


class Task(NamedTuple):
    """A dataset and how to train on it: its frames, tokens of a text, training rows, epochs, learning rate."""

    read: Callable[[Path], Frames]
    max_length: int
    n_train: int | None
    epochs: int
    learning_rate: float = 5e-5


def main() -> None:
    args = parse_args()
    disable_progress_bars()
    args.output.mkdir(parents=True, exist_ok=True)
    running = args.output / "running"
    for seed in args.seeds:
        for name in args.tasks:
            path = args.output / f"{name}-{seed}.npz"
            if not path.exists():
                task = TASKS[name]
                arrays = train_and_predict(args.model, task, args.data, seed, running)
                unfinished = path.with_suffix(".unfinished.npz")
                np.savez(unfinished, **arrays)
                unfinished.rename(path)
            with np.load(path) as saved:
                found = describe(saved["test_logits"], saved["test_labels"])
            print(f"{path.name}: {found}", flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--output", type=Path, default=Path("outputs/posthoc"))
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    return parser.parse_args()


def ag_news(folder: Path) -> Frames:
    train = pd.read_csv(folder / "ag_news" / "train_20k.csv.gz")
    test = pd.read_csv(folder / "ag_news" / "test.csv.gz")
    return Frames(train, None, test, 4)


def clinc150(folder: Path) -> Frames:
    """All 150 intents and class 150, out of scope: .7% of the training rows, 3% of the pool, 18% of the test."""
    frames = []
    for split in ("train", "val", "test"):
        inside = pd.read_csv(folder / "clinc150" / f"{split}.csv.gz")
        outside = pd.read_csv(folder / "clinc150" / f"oos_{split}.csv.gz")
        frames.append(pd.concat([inside, outside], ignore_index=True))
    return Frames(*frames, 151)


def newsgroups(folder: Path) -> Frames:
    """The by-date split without headers, quotes and footers."""
    frames = []
    for split in ("train", "test"):
        path = folder / "20newsgroups" / f"{split}.parquet"
        frame = pd.read_parquet(path, columns=["text_stripped", "label"])
        frames.append(frame.rename(columns={"text_stripped": "text"}))
    train, test = frames
    return Frames(train, None, test, 20)


def go_emotions(folder: Path) -> Frames:
    """Multi-label: 27 emotions and neutral."""
    frames = []
    for split in ("train", "dev", "test"):
        rows = pd.read_csv(folder / "goemotions" / f"{split}.csv.gz")
        labels = []
        for chosen in rows["labels"].astype(str).str.split():
            is_chosen = np.isin(np.arange(28), [int(number) for number in chosen])
            labels.append(is_chosen.astype(np.float32))
        frames.append(pd.DataFrame({"text": rows["text"], "label": labels}))
    return Frames(*frames, 28)


TASKS = {
    "ag_news": Task(ag_news, max_length=64, n_train=4000, epochs=3),
    "clinc150": Task(clinc150, max_length=32, n_train=None, epochs=3),
    "20newsgroups": Task(newsgroups, max_length=128, n_train=4000, epochs=3),
    "goemotions": Task(go_emotions, max_length=48, n_train=12_000, epochs=3),
    "ag_news_over_fitted": Task(
        ag_news, max_length=64, n_train=1000, epochs=15, learning_rate=1e-4
    ),
    "clinc150_over_fitted": Task(
        clinc150, max_length=32, n_train=3000, epochs=15, learning_rate=4e-4
    ),
}


def draw_splits(frames: Frames, n_train: int | None, seed: int) -> list[Dataset]:
    """Draw the training rows; without validation rows, what is left of the training split is the pool."""
    order = np.random.default_rng(seed).permutation(len(frames.train))
    train = frames.train.iloc[order[:n_train]]
    pool = frames.pool
    if pool is None:
        pool = frames.train.iloc[order[n_train:][:6000]]
    splits = []
    for frame in (train, pool, frames.test):
        rows = frame[["text", "label"]].reset_index(drop=True)
        splits.append(Dataset.from_pandas(rows))
    return splits


def train_and_predict(
    model_name: str, task: Task, data: Path, seed: int, running: Path
) -> dict[str, np.ndarray]:
    """The logits and labels of the pool and of the test rows."""
    set_seed(seed)
    frames = task.read(data)
    splits = draw_splits(frames, task.n_train, seed)
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    is_multi_label = np.ndim(splits[0][0]["label"]) == 1
    problem = "multi_label" if is_multi_label else "single_label"
    model = AutoModelForSequenceClassification.from_pretrained(
        model_name,
        num_labels=frames.n_labels,
        problem_type=f"{problem}_classification",
    )

    def tokenize(batch: dict[str, list[str | None]]) -> Any:
        texts = [text or "" for text in batch["text"]]
        return tokenizer(texts, truncation=True, max_length=task.max_length)

    train, pool, test = (
        rows.map(tokenize, batched=True, remove_columns="text") for rows in splits
    )
    has_gpu = torch.cuda.is_available()
    trainer = CalibrationTrainer(
        model,
        CalibrationTrainingArguments(
            output_dir=str(running),
            loss="cross_entropy",
            temperature_criterion="none",
            num_train_epochs=task.epochs,
            per_device_train_batch_size=BATCH_SIZE,
            per_device_eval_batch_size=128,
            learning_rate=task.learning_rate,
            train_sampling_strategy="group_by_length",
            warmup_steps=0.06,
            bf16=has_gpu or torch.backends.mkldnn.is_available(),
            seed=seed,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not has_gpu,
        ),
        train_dataset=train,
        eval_dataset=pool,
        calibration_dataset=pool,
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
    )
    trainer.train()
    arrays = {}
    for role, rows in (("pool", pool), ("test", test)):
        predicted = trainer.predict(rows)
        arrays[f"{role}_logits"] = np.asarray(predicted.predictions, dtype=np.float32)
        arrays[f"{role}_labels"] = np.asarray(predicted.label_ids)
    return arrays


def describe(logits: np.ndarray, labels: np.ndarray) -> str:
    if labels.ndim == 2:
        right = ((logits > 0) == labels).mean()
        return f"{logits.shape}, {right:.4f} of the decisions are right"
    accuracy = (logits.argmax(axis=1) == labels).mean()
    return f"{logits.shape}, accuracy {accuracy:.4f}"


if __name__ == "__main__":
    main()
