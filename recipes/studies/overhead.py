"""What the updates of AdaFocal's gammas cost: their share of an epoch's time, and the forward passes they add.

    python recipes/studies/overhead.py

AdaFocal (Ghosh et al. 2022), appendix J: an epoch of ResNet-50 on CIFAR-10 79,123 ms, the pass over the validation set
2,886 ms, bins and gammas 8 ms. Here an evaluation of the calibration split is used again, so that an update after it
adds no pass. Half a minute; the global-pooling CNN, smaller, on a part of 20 Newsgroups.
"""

import argparse
import json
import os
import tempfile
import time
import warnings
from functools import wraps
from pathlib import Path

from transformers import DataCollatorWithPadding, PrinterCallback, set_seed

from hf_calib import CalibrationTrainer, CalibrationTrainingArguments
from hf_calib.data import choose_columns, draw_test, limit_samples, load_splits, strip_headers
from hf_calib.models import (
    GlobalPoolingCNNConfig,
    GlobalPoolingCNNForSequenceClassification,
    train_word_tokenizer,
)


def load(data, n_train, n_validation, max_length, vocab_size, seed):
    """Tokenized train and validation rows, headers taken off, and the tokenizer."""
    dataset = draw_test(choose_columns(load_splits(data), text_column="text"), size=n_validation, seed=seed)
    dataset = strip_headers(limit_samples(dataset, max_train_samples=n_train, seed=seed))
    tokenizer = train_word_tokenizer(dataset["train"]["text"], vocab_size=vocab_size, max_length=max_length)

    def tokenize(batch):
        return tokenizer(batch["text"], truncation=True, max_length=max_length)

    tokenized = dataset.map(tokenize, batched=True, remove_columns="text")
    return tokenized["train"], tokenized["test"], tokenizer


def train(folder, options, data, *, seed, prepare, own=False, **settings):
    """Train the CNN, after `prepare(trainer)`; own: the calibration split is another set than the evaluation's."""
    train_rows, validation, tokenizer = data
    set_seed(seed)
    config = GlobalPoolingCNNConfig(
        vocab_size=len(tokenizer),
        num_labels=20,
        num_conv_layers=options.layers,
        pad_token_id=tokenizer.pad_token_id,
    )
    arguments = CalibrationTrainingArguments(
        output_dir=folder,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=256,
        learning_rate=options.learning_rate,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        eval_strategy="epoch",
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        calibration_method="none",
        seed=seed,
        **settings,
    )
    trainer = CalibrationTrainer(
        GlobalPoolingCNNForSequenceClassification(config),
        arguments,
        train_dataset=train_rows,
        eval_dataset=validation,
        calibration_dataset=validation.select(range(len(validation))) if own else validation,
        data_collator=DataCollatorWithPadding(tokenizer),
    )
    trainer.remove_callback(PrinterCallback)
    prepare(trainer)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The evaluation split is also the calibration split")
        trainer.train()
    return trainer


def write(results, path):
    """The whole file, or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")
    os.replace(unfinished, path)


def parse(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="sklearn/20newsgroups", help="folder or name on the Hub")
    parser.add_argument("--output", type=Path, default=Path("outputs/studies"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rows", type=int, default=2000, help="training rows")
    parser.add_argument("--validation", type=int, default=1000, help="validation rows")
    parser.add_argument("--max_length", type=int, default=100, help="words of a text, the last ones")
    parser.add_argument("--vocab_size", type=int, default=5000)
    parser.add_argument("--layers", type=int, default=1, help="convolutions of the network")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--full", action="store_true", help="the paper's sizes: hours on a CPU")
    options = parser.parse_args(argv)
    if options.full:
        paper = {"rows": 15_098, "validation": 900, "max_length": 1000, "vocab_size": 20_000}
        vars(options).update(paper, layers=3, batch_size=128, learning_rate=1e-3, epochs=50)
    return options


SETTINGS = {
    "focal, fixed gamma": {"loss": "focal"},
    "every epoch, at the evaluation": {"loss": "adafocal"},
    "every epoch, a split of its own": {"loss": "adafocal", "own": True},
    "every 10 steps": {"loss": "adafocal", "gamma_update_steps": 10},
    "every 10 steps, 250 rows": {"loss": "adafocal", "gamma_update_steps": 10, "gamma_update_samples": 250},
    "every step, 250 rows": {"loss": "adafocal", "gamma_update_steps": 1, "gamma_update_samples": 250},
}


def main(argv=None):
    options = parse(argv)
    start = time.time()
    name, runs = "overhead", []
    for seed in options.seeds:
        data = load(
            options.data, options.rows, options.validation, options.max_length, options.vocab_size, seed
        )
        for setting, chosen in SETTINGS.items():
            with tempfile.TemporaryDirectory() as folder:
                runs.append(
                    {"seed": seed, "setting": setting, **measured(folder, options, data, seed, dict(chosen))}
                )
            run = runs[-1]
            print(
                f"{setting:<34} epoch {run['epoch_seconds']:6.2f} s, updates {run['update_seconds']:6.3f} s an epoch "
                f"({100 * run['share_of_epoch']:5.2f}%), of it bins and gammas {1000 * run['table_seconds']:.2f} ms an "
                f"update; {run['passes_per_epoch']:.2f} passes over held-out rows an epoch beyond the evaluations",
                flush=True,
            )
    results = {
        "settings": {key: value for key, value in vars(options).items() if key not in ("data", "output")},
        "paper": {"epoch_ms": 79_123, "pass_ms": 2_886, "table_ms": 8, "share": (2_886 + 8) / 79_123},
        "runs": runs,
        "seconds": time.time() - start,
    }
    write(results, options.output / f"{name}.json")
    print(f"written to {options.output}/{name}.json, {results['seconds']:.0f} s")


def measured(folder, options, data, seed, settings):
    """Processor time of training steps and of updates, and the rows that go through the model without a gradient."""
    spent = {"update": 0.0, "table": 0.0, "step": 0.0}
    rows = {"held out": 0}

    def timed(name, function):
        @wraps(function)
        def call(*args, **kwargs):
            began = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] += time.process_time() - began

        return call

    def count(module, args, kwargs, output):
        if not module.training:
            rows["held out"] += len(output.logits)

    def prepare(trainer):
        trainer.update_adaptive_loss = timed("update", trainer.update_adaptive_loss)
        trainer.training_step = timed("step", trainer.training_step)
        if hasattr(trainer.calibration_loss, "update"):
            trainer.calibration_loss.update = timed("table", trainer.calibration_loss.update)
        trainer.model.register_forward_hook(count, with_kwargs=True)

    trainer = train(folder, options, data, prepare=prepare, seed=seed, **settings)
    updates = sum("gamma_00" in entry for entry in trainer.state.log_history)
    evaluated = options.epochs * len(trainer.eval_dataset)
    return {
        "updates": updates,
        "epoch_seconds": spent["step"] / options.epochs,
        "update_seconds": spent["update"] / options.epochs,
        "share_of_epoch": spent["update"] / spent["step"],
        "table_seconds": spent["table"] / max(updates, 1),
        "held_out_rows": rows["held out"],
        "rows_beyond_the_evaluations": rows["held out"] - evaluated,
        "passes_per_epoch": (rows["held out"] - evaluated) / evaluated,
    }


if __name__ == "__main__":
    main()
