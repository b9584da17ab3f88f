"""`hf-calib demo`: from real text to a calibrated model in a plain pipeline, in minutes and with no network."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from datasets import DatasetDict
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from tokenizers import BertWordPieceTokenizer
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    TrainerCallback,
    pipeline,
    set_seed,
)

from hf_calib.data import docstring_dataset, label_maps
from hf_calib.plots import reliability_grid, save_figure
from hf_calib.trainer.arguments import CalibrationTrainingArguments
from hf_calib.trainer.trainer import CalibrationTrainer

LOSSES: dict[str, dict[str, Any]] = {
    "cross_entropy": {},
    "focal": {"loss_kwargs": {"gamma": 3.0}},
    "adafocal": {"gamma_update_steps": 25, "gamma_update_samples": 300},
}
MAX_LENGTH = 64


@dataclass
class Outcome:
    """What one loss came to on the test split."""

    trainer: CalibrationTrainer
    metrics: Mapping[str, float]
    panels: Mapping[str, tuple[np.ndarray, np.ndarray]]


def run_demo(output_dir: str | Path, *, epochs: int = 6, max_per_class: int = 800, seed: int = 0) -> None:
    """Train with cross entropy and two calibrated losses, compare them, and serve the best one.

    Prints accuracy, NLL, ECE and adaptive ECE on the test split, before and after the temperature; writes
    `reliability.png` and the model with the best likelihood, its temperature folded in, to `output_dir`.
    """
    output_dir = Path(output_dir)
    console = Console()
    quiet_libraries()
    torch.set_num_threads(
        1
    )  # a model this small gains little from more, and loses much where cores are shared
    console.print("Which Python library does this paragraph of documentation come from?", style="bold")
    dataset = docstring_dataset(max_per_class=max_per_class, seed=seed)
    sizes = ", ".join(f"{len(rows):,} {name}" for name, rows in dataset.items())
    console.print(
        f"Built from the docstrings of the installed libraries: {sizes} examples.\n", soft_wrap=True
    )
    tokenizer = train_tokenizer(dataset["train"]["text"])
    tokenized = dataset.map(
        lambda batch: tokenizer(batch["text"], truncation=True, max_length=MAX_LENGTH), batched=True
    )
    with progress_bar(console) as progress, tempfile.TemporaryDirectory() as scratch:
        outcomes = {
            name: train(name, tokenized, tokenizer, scratch, progress, epochs=epochs, seed=seed)
            for name in LOSSES
        }
        console.print(comparison(outcomes))
        best = min(outcomes, key=lambda name: outcomes[name].metrics["test_nll_calibrated"])
        outcomes[best].trainer.save_calibrated_model(output_dir / "model")
    picture = output_dir / "reliability.png"
    rows = {row: {name: o.panels[row] for name, o in outcomes.items()} for row in outcomes[best].panels}
    save_figure(reliability_grid(rows, title="Before and after the temperature, test split"), picture)
    console.print(f"Reliability diagrams: {picture}", soft_wrap=True)
    show_pipeline(console, output_dir / "model", dataset, best)


def quiet_libraries() -> None:
    """Leave the screen to the comparison."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    import datasets

    datasets.disable_progress_bars()


def train_tokenizer(texts: Any) -> PreTrainedTokenizerBase:
    """A WordPiece vocabulary of the training texts."""
    wordpiece = BertWordPieceTokenizer(lowercase=True)
    wordpiece.train_from_iterator(texts, vocab_size=8000, min_frequency=2, show_progress=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=wordpiece._tokenizer,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=MAX_LENGTH,
        model_input_names=["input_ids", "attention_mask"],
    )


def train(
    name: str,
    dataset: DatasetDict,
    tokenizer: PreTrainedTokenizerBase,
    scratch: str,
    progress: Progress,
    *,
    epochs: int,
    seed: int,
) -> Outcome:
    """Fine-tune a small BERT from scratch with one loss."""
    set_seed(seed)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=MAX_LENGTH,
        pad_token_id=tokenizer.pad_token_id,
        **label_maps(dataset),
    )
    args = CalibrationTrainingArguments(
        output_dir=str(Path(scratch) / name),
        loss=name,
        **LOSSES[name],
        num_train_epochs=epochs,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=256,
        learning_rate=5e-4,
        warmup_steps=0.1,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=seed,
    )
    trainer = CalibrationTrainer(
        BertForSequenceClassification(config),
        args,
        train_dataset=dataset["train"],
        calibration_dataset=dataset["calibration"],
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        callbacks=[_Bar(progress, name)],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    metrics = trainer.evaluate(dataset["test"], metric_key_prefix="test")
    assert trainer.last_evaluation is not None
    return Outcome(trainer, metrics, trainer.last_evaluation.panels())


class _Bar(TrainerCallback):
    """One line of the progress display for each training."""

    def __init__(self, progress: Progress, name: str) -> None:
        self.progress, self.name = progress, name

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.task = self.progress.add_task(self.name, total=state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.progress.update(self.task, completed=state.global_step)


def progress_bar(console: Console) -> Progress:
    """A bar, steps and the time for each training."""
    columns = (TextColumn("{task.description:<14}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    return Progress(*columns, TimeElapsedColumn(), console=console)


def comparison(outcomes: Mapping[str, Outcome]) -> Table:
    """The before/after table."""
    table = Table(
        title="Test split, before → after the temperature T",
        box=SIMPLE_HEAD,
        title_justify="left",
        pad_edge=False,
    )
    for column in ("loss", "accuracy", "T", "NLL", "ECE", "adaptive ECE"):
        table.add_column(column, justify="left" if column == "loss" else "right", no_wrap=True)
    for name, outcome in outcomes.items():
        m = outcome.metrics
        pairs = [
            f"{m[f'test_{k}']:.3f}→{m[f'test_{k}_calibrated']:.3f}" for k in ("nll", "ece", "adaptive_ece")
        ]
        table.add_row(name, f"{m['test_accuracy']:.3f}", f"{m['temperature']:.2f}", *pairs)
    return table


def show_pipeline(console: Console, model_dir: Path, dataset: DatasetDict, loss: str) -> None:
    """Two predictions of the saved model, by transformers alone."""
    classify = pipeline("text-classification", model=str(model_dir), device="cpu")
    console.print(
        f"\nThe {loss} model, its temperature folded in, in a plain pipeline: "
        f'pipeline("text-classification", model="{model_dir}")',
        soft_wrap=True,
    )
    names = dataset["test"].features["label"].names
    for row in (dataset["test"][i] for i in range(2)):
        prediction = classify(row["text"])[0]
        text = row["text"] if len(row["text"]) <= 90 else row["text"][:87] + "..."
        console.print(f"  {text!r}", style="italic", highlight=False, markup=False, soft_wrap=True)
        console.print(
            f"    -> {prediction['label']}, {prediction['score']:.0%} sure (it is from {names[row['label']]})",
            highlight=False,
        )
