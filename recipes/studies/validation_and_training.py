"""Does validation tell about training? Calibration of both, bin by bin, under focal losses with gamma 0, 3, 4, 5.

    python recipes/studies/validation_and_training.py

AdaFocal (Ghosh et al. 2022), figures 1, 2, 7 to 14 (20 Newsgroups: 14): 15 equal-mass bins of the validation
confidences; the error C_val - A_val of each, and the mean probability of the label in training rows: of those in the
same bin (common binning), and in 15 equal-mass bins of their own (independent binning). In common bins both means lie
between the same edges, so that they agree nearly by construction; independent ones can differ.
Here the global-pooling CNN, smaller, on a part of 20 Newsgroups. About 2 minutes.
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
from hf_calib.analysis import Trace
from hf_calib.data import choose_columns, draw_test, limit_samples, load_splits, strip_headers
from hf_calib.models import (
    GlobalPoolingCNNConfig,
    GlobalPoolingCNNForSequenceClassification,
    train_word_tokenizer,
)
from hf_calib.plots import save_figure, small_multiples


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
    parser.add_argument("--rows", type=int, default=1500, help="training rows")
    parser.add_argument("--validation", type=int, default=1000, help="validation rows")
    parser.add_argument("--max_length", type=int, default=100, help="words of a text, the last ones")
    parser.add_argument("--vocab_size", type=int, default=5000)
    parser.add_argument("--layers", type=int, default=1, help="convolutions of the network")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--full", action="store_true", help="the paper's sizes: hours on a CPU")
    options = parser.parse_args(argv)
    if options.full:
        paper = {"rows": 15_098, "validation": 900, "max_length": 1000, "vocab_size": 20_000}
        vars(options).update(paper, layers=3, batch_size=128, learning_rate=1e-3, epochs=50)
    return options


GAMMAS = (0, 3, 4, 5)
SHOWN = (0, 7, 14)  # the paper's lower, middle and upper bin


def main(argv=None):
    options = parse(argv)
    start = time.time()
    name, runs, traces = "validation_and_training", [], {}
    for seed in options.seeds:
        data = load(
            options.data, options.rows, options.validation, options.max_length, options.vocab_size, seed
        )
        for gamma in GAMMAS:
            with tempfile.TemporaryDirectory() as folder:
                train(folder, options, data, seed=seed, loss="focal", loss_kwargs={"gamma": float(gamma)})
                trace = Trace.load(folder)
            held_out, own = trace.sets["eval"], trace.sets["training"]
            traces[seed, gamma] = held_out, own
            tracked = correlations(own.label_probability, held_out.bin_confidence)
            independent = np.array([mean_of_parts(row) for row in own.row_label_probability])
            runs.append(
                {
                    "seed": seed,
                    "gamma": gamma,
                    "accuracy": held_out.accuracy[-1],
                    "adaptive_ece": held_out.adaptive_ece.tolist(),
                    "training_accuracy": own.accuracy[-1],
                    "training_adaptive_ece": own.adaptive_ece[-1],
                    "gaps_at_the_end": listed(held_out.gaps[-1]),
                    "confidence_at_the_end": listed(held_out.bin_confidence[-1]),
                    "training_confidence_at_the_end": listed(own.label_probability[-1]),
                    "correlation_over_epochs": listed(tracked),
                    "independent_training_confidence_at_the_end": listed(independent[-1]),
                    "independent_correlation_over_epochs": listed(
                        correlations(independent, held_out.bin_confidence)
                    ),
                    "independent_distance": np.nanmean(
                        np.abs(independent - held_out.bin_confidence), axis=1
                    ).tolist(),
                    "mean_training_rows_in_bin": own.label_counts.mean(axis=0).tolist(),
                }
            )
            print(
                f"seed {seed}  gamma {gamma}: accuracy {held_out.accuracy[-1]:.3f}, adaptive ECE "
                f"{held_out.adaptive_ece[-1]:.3f} (training rows {own.adaptive_ece[-1]:.3f}), median correlation of "
                f"C_train and C_val over the epochs {np.nanmedian(tracked):.2f}",
                flush=True,
            )
    results = {
        "settings": settings_of(options),
        "runs": runs,
        "summary": summary(runs),
        "seconds": time.time() - start,
    }
    first = options.seeds[0]
    for kind, figure in figures({gamma: traces[first, gamma] for gamma in GAMMAS}).items():
        save_figure(figure, options.output / f"{name}_{kind}.png")
    write(results, options.output / f"{name}.json")
    print(json.dumps(results["summary"], indent=1))
    print(f"written to {options.output}/{name}*, {results['seconds']:.0f} s")


def settings_of(options):
    return {key: value for key, value in vars(options).items() if key not in ("data", "output")}


def listed(values):
    return [None if np.isnan(value) else round(float(value), 4) for value in values]


def mean_of_parts(values, n_bins=15):
    """(M,) means of equal-mass bins of their own."""
    return np.array([part.mean() for part in np.array_split(np.sort(values), n_bins)])


def correlations(ours, theirs):
    """Of each bin over the epochs; NaN where a bin was empty in half of them."""
    found = []
    for a, b in zip(ours.T, theirs.T, strict=True):
        both = np.isfinite(a) & np.isfinite(b)
        found.append(np.corrcoef(a[both], b[both])[0, 1] if 2 * both.sum() > len(a) else np.nan)
    return np.array(found)


def summary(runs):
    """For each gamma mean and standard deviation over seeds; and which gamma is the best in how many bins."""
    of_gamma = {}
    for gamma in GAMMAS:
        own = [run for run in runs if run["gamma"] == gamma]
        ece = [run["adaptive_ece"][-1] for run in own]
        tracked = [np.nanmedian(np.array(run["correlation_over_epochs"], dtype=float)) for run in own]
        of_gamma[gamma] = {
            "accuracy": round(float(np.mean([run["accuracy"] for run in own])), 4),
            "adaptive_ece": round(float(np.mean(ece)), 4),
            "adaptive_ece_sd": round(float(np.std(ece, ddof=1)), 4) if len(ece) > 1 else None,
            "training_adaptive_ece": round(float(np.mean([run["training_adaptive_ece"] for run in own])), 4),
            "median_correlation": listed([np.mean(tracked)])[0],
            "independent_distance_at_first": round(
                float(np.mean([run["independent_distance"][0] for run in own])), 4
            ),
            "independent_distance_at_the_end": round(
                float(np.mean([run["independent_distance"][-1] for run in own])), 4
            ),
        }
    gaps = np.array(
        [[run["gaps_at_the_end"] for run in runs if run["gamma"] == g] for g in GAMMAS], dtype=float
    )
    of_bins = np.nan_to_num(np.abs(gaps.mean(axis=1)), nan=np.inf)
    best = np.argmin(of_bins[:, np.isfinite(of_bins).any(axis=0)], axis=0)
    lowest = min(of_gamma, key=lambda gamma: of_gamma[gamma]["adaptive_ece"])
    return {
        "of_gamma": of_gamma,
        "lowest_adaptive_ece": lowest,
        "best_gamma_of_each_bin": [GAMMAS[k] for k in best],
        "bins_where_another_gamma_is_better": int(sum(GAMMAS[k] != lowest for k in best)),
    }


def figures(traces):
    names = {gamma: "cross entropy" if gamma == 0 else f"focal {gamma}" for gamma in traces}
    bins = range(next(iter(traces.values()))[0].gaps.shape[1])
    gaps = {
        f"bin {m}": {names[g]: (held_out.epochs, held_out.gaps[:, m]) for g, (held_out, _) in traces.items()}
        for m in bins
    }
    both = {
        f"{names[g]}, bin {m}": {
            "training rows": (own.epochs, own.label_probability[:, m]),
            "training rows, bins of their own": (
                own.epochs,
                [mean_of_parts(row)[m] for row in own.row_label_probability],
            ),
            "validation rows": (held_out.epochs, held_out.bin_confidence[:, m]),
            "accuracy on validation": (held_out.epochs, held_out.bin_accuracy[:, m]),
        }
        for m in SHOWN
        for g, (held_out, own) in traces.items()
    }
    return {
        "gaps": small_multiples(gaps, xlabel="epoch", ylabel="confidence - accuracy on validation", level=0),
        "correspondence": small_multiples(both, xlabel="epoch", ylabel="mean in the validation's bin"),
    }


if __name__ == "__main__":
    main()
