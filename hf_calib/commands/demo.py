"""`hf-calib demo`: from real text to a calibrated model in a plain pipeline,
in minutes and with no network.

The settings were chosen for cross entropy, so that it over-fits visibly and a temperature corrects
it; the test split shares rows with the one that they were seen on. No setting of focal or adafocal
was tuned.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import transformers
from numpy.typing import NDArray
from tokenizers import BertWordPieceTokenizer
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
)

from hf_calib._files import check_output
from hf_calib.commands.console import Done
from hf_calib.data import docstring_dataset, label_maps
from hf_calib.metrics import (
    accuracy,
    bootstrap_interval,
    calibration_error_interval,
    consistency_test,
)
from hf_calib.metrics.sums import top_label
from hf_calib.plots import reliability_grid, save_figure
from hf_calib.predictions.predictions import SINGLE_LABEL
from hf_calib.trainer import CalibrationTrainer, CalibrationTrainingArguments

if TYPE_CHECKING:
    from hf_calib.commands.options import Demo
    from hf_calib.commands.source import Running

LOSSES: dict[str, dict[str, Any]] = {
    "cross_entropy": {},
    "focal": {"loss_kwargs": {"gamma": 3.0}},
    "adafocal": {"gamma_update_steps": 25, "gamma_update_samples": 500},
}
# Tokens; most paragraphs are shorter, and twice as many would take twice the time.
MAX_LENGTH = 32
_SEED = 0
_ROW = "{:<17} {:>8} {:>18} {:>21} {:>9}"
_HOW_TO_READ = (
    "A temperature T has the lowest NLL on the calibration split. It changes no prediction, and it can raise the ECE. "
    "In brackets: 95% intervals, of the ECE by test inversion. By chance: the ECE that a perfectly calibrated model "
    "with these confidences would show on as many rows. A value near it is noise."
)


def run(options: Demo, running: Running) -> Done:
    """Train with three losses, compare them on the test split before and after a temperature,
    and serve the best one.

    Writes `reliability.png` and the model with the lowest NLL on the calibration split, its
    temperature folded in.
    """
    model = options.output / "model"
    check_output(model)
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    running.stages("reading the docstrings of the installed libraries")
    dataset = docstring_dataset(max_per_class=options.max_per_class, seed=_SEED)
    tokenizer = train_tokenizer(dataset["train"]["text"])
    rows = dataset.map(
        lambda batch: tokenizer(batch["text"], truncation=True), batched=True
    )
    trainers = {}
    losses = {}
    with tempfile.TemporaryDirectory() as scratch:
        for i, loss in enumerate(LOSSES, 1):
            running.stages(f"training with {loss}, {i} of {len(LOSSES)}")
            trainer = train(loss, rows, tokenizer, scratch, options.epochs)
            trainers[loss] = trainer
            logged = trainer.evaluate(rows["calibration"])
            # The best model is chosen without the test split, on which all are
            # reported.
            losses[loss] = logged["eval_nll_calibrated"]
        running.stages("measuring the models, and saving the best one")
        best = min(losses, key=losses.__getitem__)
        # For the model's card.
        trainers[best].evaluate(rows["test"], metric_key_prefix="test")
        trainers[best].save_calibrated_model(model)
    labels = np.array(dataset["test"]["label"])
    table = [
        f"Test split, {len(labels):,} rows",
        _ROW.format("", "accuracy", "NLL", "ECE", "by chance"),
    ]
    tops: Any = {"before": {}, "after the temperature": {}}
    for loss, trainer in trainers.items():
        logits: Any = trainer.predict(rows["test"]).predictions
        scaler = trainer.calibration_map
        probs = SINGLE_LABEL.probabilities(logits)
        served_probs = scaler.predict_proba(logits)
        table.append(measured(loss, probs, labels))
        title = f"  after T = {scaler.temperature_:.3f}"
        table.append(measured(title, served_probs, labels))
        tops["before"][loss] = top_label(probs, labels)
        tops["after the temperature"][loss] = top_label(served_probs, labels)
    grid = reliability_grid(tops, title="Before and after the temperature, test split")
    save_figure(grid, options.output / "reliability.png")
    table.append(_HOW_TO_READ)
    again = f"hf-calib evaluate {model} --data yours.csv"
    lines = [
        "Which Python library does this paragraph of documentation come from?",
        "The rows are docstrings of the installed libraries.",
        "",
        *table,
        "",
        f"The {best} model, its temperature folded in, in a plain pipeline:",
        *served(model, dataset["test"]),
        "",
        f"On your own rows (text, label): {again}",
    ]
    record = {"best": best, "output": str(options.output)}
    return Done(lines, record)


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A WordPiece vocabulary of the training texts."""
    wordpiece = BertWordPieceTokenizer(lowercase=True)
    wordpiece.train_from_iterator(
        texts, vocab_size=8000, min_frequency=2, show_progress=False
    )
    return PreTrainedTokenizerFast(
        # The wrapper has no public name for its tokenizer.
        tokenizer_object=wordpiece._tokenizer,
        model_max_length=MAX_LENGTH,
        model_input_names=["input_ids", "attention_mask"],
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


def train(
    loss: str, rows: Any, tokenizer: Any, scratch: str, epochs: int
) -> CalibrationTrainer:
    """Train a small BERT from scratch, and fit its temperature to the calibration split."""
    # All losses start from the same weights.
    transformers.set_seed(_SEED)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        hidden_dropout_prob=0.3,
        max_position_embeddings=MAX_LENGTH,
        pad_token_id=tokenizer.pad_token_id,
        **label_maps(rows),
    )
    quiet: Any = {"save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    args = CalibrationTrainingArguments(
        output_dir=scratch,
        loss=loss,
        **LOSSES[loss],
        # One number, to compare the losses by.
        calibration_method="temperature",
        num_train_epochs=epochs,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=256,
        learning_rate=1e-3,
        warmup_steps=0.1,
        **quiet,
        # Without an accelerator, torch warns of pinned memory.
        dataloader_pin_memory=False,
        seed=_SEED,
    )
    trainer = CalibrationTrainer(
        BertForSequenceClassification(config),
        args,
        train_dataset=rows["train"],
        calibration_dataset=rows["calibration"],
        processing_class=tokenizer,
    )
    # Without progress bars, the Trainer prints every log.
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return trainer


def measured(name: str, probs: NDArray[Any], labels: NDArray[Any]) -> str:
    """A row of the table of metrics, which fits into 80 columns."""
    nll = "{:.2f} [{:.2f}, {:.2f}]".format(
        *bootstrap_interval("negative_log_likelihood", probs, labels)
    )
    ece = "{:.3f} [{:.3f}, {:.3f}]".format(*calibration_error_interval(probs, labels))
    chance = f"{consistency_test(probs, labels).expected:.3f}"
    return _ROW.format(name, f"{accuracy(probs, labels):.3f}", nll, ece, chance)


def served(model: Path, rows: Any) -> Iterator[str]:
    """Two predictions of the saved model, by transformers alone, and how they were made."""
    classify = transformers.pipeline(
        "text-classification", model=str(model), device="cpu"
    )
    yield f'pipeline("text-classification", model="{model}")'
    for row in rows.shuffle(seed=0).select(range(2)):
        answer = classify(row["text"], truncation=True)[0]
        truth = rows.features["label"].int2str(row["label"])
        yield f"  {row['text'][:70]!r}"
        yield f"    -> {answer['label']}, {answer['score']:.0%} sure (it is from {truth})"
