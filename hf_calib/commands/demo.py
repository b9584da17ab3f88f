"""`hf-calib demo`: from real text to a calibrated model in a plain pipeline, in minutes and with no network.

Width, learning rate, dropout and epochs were chosen among about fifteen runs with cross entropy and data seed 1, for
a run that is short, over-fits visibly and that a temperature corrects, as seen on the test split of that seed. Seeds
split the same paragraphs anew, so the test split of the default seed 0 shares rows with it. The number of paragraphs
was halved later, for time. No setting of focal or adafocal was tuned.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import shutil
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from datasets import DatasetDict
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from scipy.special import softmax
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

from hf_calib._files import check_output, whole_folder
from hf_calib.data import docstring_dataset, label_maps
from hf_calib.metrics import accuracy, bootstrap_interval, calibration_error_interval, consistency_test
from hf_calib.metrics.sums import top_label
from hf_calib.plots import reliability_grid, save_figure
from hf_calib.trainer.config import CalibrationTrainingArguments
from hf_calib.trainer.trainer import CalibrationTrainer

LOSSES: dict[str, dict[str, Any]] = {
    "cross_entropy": {},
    "focal": {"loss_kwargs": {"gamma": 3.0}},
    "adafocal": {"gamma_update_steps": 25, "gamma_update_samples": 500},
}
MAX_LENGTH = 32  # tokens; most paragraphs are shorter, and twice as many would take twice the time


@dataclass
class Outcome:
    """One loss: probabilities on the test split before and after its temperature, and where its model lies."""

    model: Path
    temperature: float
    calibration_nll: float  # After the temperature. The best loss is chosen by it, not by the test split.
    labels: NDArray[np.int64]
    before: NDArray[np.float64]
    after: NDArray[np.float64]


def run_demo(output_dir: str | Path, *, epochs: int = 10, max_per_class: int = 1500, seed: int = 0) -> None:
    """Train with cross entropy and two calibration losses, compare them, and serve the best one.

    The three runs share the available cores, one process each. Prints accuracy, NLL and ECE on the test split with
    their intervals, before and after the temperature; writes `reliability.png` and the model with the lowest NLL on
    the calibration split, its temperature folded in, to `output_dir`.

    Raises:
        ValueError: if `output_dir` cannot be written, before anything is trained.
    """
    output_dir = Path(output_dir)
    check_output(output_dir / "model")
    console = Console()
    quiet_libraries()
    console.print("Which Python library does this paragraph of documentation come from?", style="bold")
    sys.stdout.flush()  # Through a pipe the first line would otherwise arrive with the last.
    dataset = docstring_dataset(max_per_class=max_per_class, seed=seed)
    sizes = ", ".join(f"{len(rows):,} {name}" for name, rows in dataset.items())
    console.print(f"Built from the docstrings of the installed libraries: {sizes} examples.\n")
    sys.stdout.flush()
    tokenizer = train_tokenizer(dataset["train"]["text"])
    tokenized = dataset.map(
        lambda batch: tokenizer(batch["text"], truncation=True, max_length=MAX_LENGTH), batched=True
    )
    with tempfile.TemporaryDirectory() as scratch:
        tokenized.save_to_disk(Path(scratch) / "rows")
        tokenizer.save_pretrained(Path(scratch) / "tokenizer")
        outcomes = train_all(Path(scratch), console, epochs=epochs, seed=seed)
        best = min(outcomes, key=lambda name: outcomes[name].calibration_nll)
        with whole_folder(output_dir / "model") as folder:
            shutil.copytree(outcomes[best].model, folder, dirs_exist_ok=True)
    console.print(comparison(outcomes))
    console.print(
        "A temperature T is the one with the lowest NLL on the calibration split; it changes no prediction, and it "
        "can lower the NLL where it raises the ECE. In brackets: 95% intervals, of the ECE by test inversion. By "
        "chance: the ECE that a perfectly calibrated model with these confidences would show on as many rows; a value "
        "near it is noise.\n",
        highlight=False,
        markup=False,
    )
    figure = output_dir / "reliability.png"
    rows = {
        title: {name: top_label(getattr(o, state), o.labels) for name, o in outcomes.items()}
        for title, state in (("before", "before"), ("after the temperature", "after"))
    }
    save_figure(reliability_grid(rows, title="Before and after the temperature, test split"), figure)
    console.print(f"Reliability diagrams: {figure}", soft_wrap=True)
    show_pipeline(console, output_dir / "model", dataset, best)


def train_all(scratch: Path, console: Console, *, epochs: int, seed: int) -> dict[str, Outcome]:
    """Train with each loss, as many at a time as there are cores, and show how far each run is."""
    # Not forked: torch has threads, which a fork does not take along.
    context = multiprocessing.get_context("spawn")
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with (
        context.Manager() as manager,
        ProcessPoolExecutor(min(n_cores, len(LOSSES)), mp_context=context) as pool,
        progress_bar(console) as progress,
    ):
        steps = manager.Queue()
        runs = {name: pool.submit(train, name, scratch, steps, epochs=epochs, seed=seed) for name in LOSSES}
        bars = {name: progress.add_task(name, start=False, total=None) for name in LOSSES}
        while not all(run.done() for run in runs.values()) or not steps.empty():
            try:
                name, step, n_steps = steps.get(timeout=0.2)
            except queue.Empty:
                continue
            progress.start_task(bars[name])  # A run that waits for a core takes no time yet.
            progress.update(bars[name], completed=step, total=n_steps)
        return {name: run.result() for name, run in runs.items()}


def quiet_libraries() -> None:
    """Silence what libraries print and draw."""
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


def train(name: str, scratch: Path, steps: Any, *, epochs: int, seed: int) -> Outcome:
    """Train a small BERT from scratch with one loss, fit its temperature and save it, in a process of its own."""
    quiet_libraries()
    # A model this small gains little from more threads, and the other runs have the other cores.
    torch.set_num_threads(1)
    dataset = DatasetDict.load_from_disk(scratch / "rows")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(scratch / "tokenizer")
    set_seed(seed)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        hidden_dropout_prob=0.3,
        max_position_embeddings=MAX_LENGTH,
        pad_token_id=tokenizer.pad_token_id,
        **label_maps(dataset),
    )
    args = CalibrationTrainingArguments(
        output_dir=str(scratch / name),
        loss=name,
        **LOSSES[name],
        calibration_method="temperature",  # one number, to compare the losses by
        num_train_epochs=epochs,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=256,
        learning_rate=1e-3,
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
        callbacks=[_Steps(steps, name)],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    found = trainer.predict(dataset["test"])
    logits, labels = np.asarray(found.predictions, dtype=np.float64), np.asarray(found.label_ids)
    held_out = trainer.evaluate(dataset["calibration"])
    trainer.evaluate(dataset["test"], metric_key_prefix="test")  # The model's card shows these values.
    trainer.save_calibrated_model(scratch / name / "model")
    return Outcome(
        scratch / name / "model",
        trainer.calibration_map.temperature_,
        held_out["eval_nll_calibrated"],
        labels,
        softmax(logits, axis=1),
        trainer.calibration_map.predict_proba(logits),
    )


class _Steps(TrainerCallback):
    """Tells the process that draws the bars how far this run is."""

    def __init__(self, steps: Any, name: str) -> None:
        self.steps, self.name = steps, name

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % 10 == 0 or state.global_step == state.max_steps:
            self.steps.put((self.name, state.global_step, state.max_steps))


def progress_bar(console: Console) -> Progress:
    """A bar, steps and the time for each training."""
    columns = (TextColumn("{task.description:<14}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    return Progress(*columns, TimeElapsedColumn(), console=console)


def comparison(outcomes: Mapping[str, Outcome]) -> Table:
    """Two rows per loss, before and after its temperature; fits into 80 columns."""
    n_rows = len(next(iter(outcomes.values())).labels)
    table = Table(
        title=f"Test split, {n_rows:,} rows",
        box=SIMPLE_HEAD,
        title_justify="left",
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for column in ("", "accuracy", "NLL", "ECE", "by chance"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for name, outcome in outcomes.items():
        table.add_row(name, *measured(outcome.before, outcome.labels))
        after = f"  after T = {outcome.temperature:.3f}"
        table.add_row(after, *measured(outcome.after, outcome.labels))
    return table


def measured(probs: NDArray[np.float64], labels: NDArray[np.int64]) -> list[str]:
    """The cells of one row of the table."""
    nll = bootstrap_interval("negative_log_likelihood", probs, labels)
    ece = calibration_error_interval(probs, labels)
    return [
        f"{accuracy(probs, labels):.3f}",
        f"{nll.value:.2f} [{nll.low:.2f}, {nll.high:.2f}]",
        f"{ece.value:.3f} [{ece.low:.3f}, {ece.high:.3f}]",
        f"{consistency_test(probs, labels).expected:.3f}",
    ]


def show_pipeline(console: Console, model_dir: Path, dataset: DatasetDict, loss: str) -> None:
    """Two predictions of the saved model, by transformers alone."""
    classify = pipeline("text-classification", model=str(model_dir), device="cpu")
    console.print(
        f"\nThe {loss} model, its temperature folded in, in a plain pipeline: "
        f'pipeline("text-classification", model="{model_dir}")',
        soft_wrap=True,
    )
    names = dataset["test"].features["label"].names
    rows = dataset["test"].shuffle(seed=0)
    first = rows[0]
    for row in (first, next((row for row in rows if row["label"] != first["label"]), rows[1])):
        prediction = classify(row["text"], truncation=True)[0]
        text = row["text"] if len(row["text"]) <= 90 else row["text"][:87] + "..."
        console.print(f"  {text!r}", style="italic", highlight=False, markup=False, soft_wrap=True)
        console.print(
            f"    -> {prediction['label']}, {prediction['score']:.0%} sure (it is from {names[row['label']]})",
            highlight=False,
        )
    console.print(
        f"\nOn your own rows: hf-calib evaluate {model_dir} --data yours.csv --output measured, with columns text and "
        "label.",
        soft_wrap=True,
        highlight=False,
    )
