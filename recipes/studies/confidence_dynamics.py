"""What confidence does as the training goes on: maximum logits, the rival's probability, learned rows, ECE.

    python recipes/studies/confidence_dynamics.py

Dual focal loss (Tao et al. 2023), figure 4: ECE by epoch, its moving average with factor 0.5, maximum logits, the
probability of the label's rival. AdaFocal (Ghosh et al. 2022), figure 34 (appendix M): maximum logits of training rows
by the epoch at which they were learned. Here the global-pooling CNN, smaller, on a part of 20 Newsgroups.
About 2 minutes.
"""

import argparse
import json
import os
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
from transformers import DataCollatorWithPadding, PrinterCallback, set_seed

from hf_calib import CalibrationTrainer, CalibrationTrainingArguments, TrainingTrace
from hf_calib.analysis import Trace, learned_epoch, learned_groups, moving_average
from hf_calib.data import choose_columns, draw_test, limit_samples, load_splits, strip_headers
from hf_calib.models import (
    GlobalPoolingCNNConfig,
    GlobalPoolingCNNForSequenceClassification,
    train_word_tokenizer,
)
from hf_calib.plots import group_boxes, save_figure, small_multiples, spread_by_epoch


def load(data, n_train, n_validation, max_length, vocab_size, seed):
    """Tokenized train and validation rows, headers taken off, and the tokenizer."""
    dataset = draw_test(choose_columns(load_splits(data), text_column="text"), size=n_validation, seed=seed)
    dataset = strip_headers(limit_samples(dataset, max_train_samples=n_train, seed=seed))
    tokenizer = train_word_tokenizer(dataset["train"]["text"], vocab_size=vocab_size, max_length=max_length)

    def tokenize(batch):
        return tokenizer(batch["text"], truncation=True, max_length=max_length)

    tokenized = dataset.map(tokenize, batched=True, remove_columns="text")
    return tokenized["train"], tokenized["test"], tokenizer


def train(folder, options, data, *, seed, **settings):
    """Train the CNN; return the trainer, whose trace is in the folder."""
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
        eval_dataset=validation,  # AdaFocal's validation split: bins, gammas and what is drawn
        calibration_dataset=validation,
        data_collator=DataCollatorWithPadding(tokenizer),
        callbacks=[TrainingTrace(n_training_rows=1000, n_kept_rows=1000)],
    )
    trainer.remove_callback(PrinterCallback)
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
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--rows", type=int, default=2000, help="training rows")
    parser.add_argument("--validation", type=int, default=1000, help="validation rows")
    parser.add_argument("--max_length", type=int, default=100, help="words of a text, the last ones")
    parser.add_argument("--vocab_size", type=int, default=5000)
    parser.add_argument("--layers", type=int, default=1, help="convolutions of the network")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--full", action="store_true", help="the paper's sizes: hours on a CPU")
    options = parser.parse_args(argv)
    if options.full:
        paper = {"rows": 15_098, "validation": 900, "max_length": 1000, "vocab_size": 20_000}
        vars(options).update(paper, layers=3, batch_size=128, learning_rate=1e-3, epochs=50)
    return options


LOSSES = {
    "cross entropy": {"loss": "cross_entropy"},
    "FLSD-53": {"loss": "flsd"},
    "dual focal": {"loss": "dual_focal"},
    "AdaFocal": {"loss": "adafocal"},
}


def main(argv=None):
    options = parse(argv)
    start = time.time()
    name, runs, traces = "confidence_dynamics", [], {}
    boundaries = sorted({options.epochs // 4, options.epochs // 3, options.epochs // 2})
    for seed in options.seeds:
        data = load(
            options.data, options.rows, options.validation, options.max_length, options.vocab_size, seed
        )
        for loss, settings in LOSSES.items():
            with tempfile.TemporaryDirectory() as folder:
                train(folder, options, data, seed=seed, **settings)
                traces[seed, loss] = trace = Trace.load(folder)
            held_out = trace.sets["eval"]
            runs.append(
                {
                    "seed": seed,
                    "loss": loss,
                    "accuracy": held_out.accuracy[-1],
                    "ece": held_out.ece.tolist(),
                    "ece_smoothed": moving_average(held_out.ece).tolist(),
                    "max_logit_quartiles": quartiles(held_out.row_max_logit[-1]),
                    "rival_quartiles": quartiles(held_out.row_rival_probability[-1]),
                    "groups": groups_of(trace, boundaries, True),
                }
            )
            print(
                f"seed {seed}  {loss:<14} accuracy {held_out.accuracy[-1]:.3f}, ECE {held_out.ece[-1]:.3f}, median "
                f"maximum logit {runs[-1]['max_logit_quartiles'][1]:.1f}, median rival "
                f"{runs[-1]['rival_quartiles'][1]:.3f}",
                flush=True,
            )
    results = {
        "settings": {key: value for key, value in vars(options).items() if key not in ("data", "output")},
        "boundaries": boundaries,
        "runs": runs,
        "seconds": time.time() - start,
    }
    seed = options.seeds[0]
    for kind, figure in figures({loss: traces[seed, loss] for loss in LOSSES}, boundaries).items():
        save_figure(figure, options.output / f"{name}_{kind}.png")
    write(results, options.output / f"{name}.json")
    print(f"written to {options.output}/{name}*, {results['seconds']:.0f} s")


def quartiles(values):
    return [round(float(value), 4) for value in np.quantile(values, [0.25, 0.5, 0.75])]


def groups_of(trace, boundaries, only_numbers=False):
    """Maximum logits at the end of training rows, by the epoch at which they were learned."""
    own = trace.sets["training"]
    groups = learned_groups(learned_epoch(own.epochs, own.row_correct), boundaries)
    logits = {name: own.row_max_logit[-1][mask] for name, mask in groups.items()}
    if not only_numbers:
        return logits
    return {
        name: {"rows": len(values), "quartiles": quartiles(values) if len(values) else None}
        for name, values in logits.items()
    }


def figures(traces, boundaries):
    error = {loss: (trace.sets["eval"].epochs, trace.sets["eval"].ece) for loss, trace in traces.items()}
    smooth = {loss: (epochs, moving_average(ece)) for loss, (epochs, ece) in error.items()}
    both = {"eval": "validation rows", "training": "training rows"}
    logits, rivals = (
        {
            title: {
                loss: (trace.sets[key].epochs, getattr(trace.sets[key], values))
                for loss, trace in traces.items()
            }
            for key, title in both.items()
        }
        for values in ("row_max_logit", "row_rival_probability")
    )
    return {
        "ece": small_multiples(
            {"validation rows": smooth}, faint={"validation rows": error}, xlabel="epoch", ylabel="ECE"
        ),
        "max_logit": spread_by_epoch(logits, ylabel="maximum logit"),
        "rival": spread_by_epoch(rivals, ylabel="probability of the label's rival"),
        "learned": group_boxes(
            {loss: groups_of(trace, boundaries) for loss, trace in traces.items()},
            xlabel="maximum logit at the end, training rows",
            ylabel="learned at epoch",
        ),
    }


if __name__ == "__main__":
    main()
