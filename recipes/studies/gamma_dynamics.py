"""How AdaFocal's gammas move: how often they are updated, their limit, the number of bins, lambda.

    python recipes/studies/gamma_dynamics.py

AdaFocal (Ghosh et al. 2022), figures 5, 16, 53 and 54, appendices H, I and N. Updated at the end of each epoch, every
100, 10 and 1 steps, and by figure 53's schedule (each epoch, then every few steps, then each step; shorter here,
where 100 steps are more than an epoch). Here the global-pooling CNN, smaller, on a part of 20 Newsgroups, one seed.
About 3 minutes.
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
from hf_calib.analysis import Trace, moving_average
from hf_calib.data import choose_columns, draw_test, limit_samples, load_splits, strip_headers
from hf_calib.models import (
    GlobalPoolingCNNConfig,
    GlobalPoolingCNNForSequenceClassification,
    train_word_tokenizer,
)
from hf_calib.plots import gamma_dynamics, save_figure, small_multiples


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
        callbacks=[TrainingTrace(n_training_rows=0, n_kept_rows=0)],
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
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
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


SAMPLES = 250  # of the validation split, for updates by steps


def main(argv=None):
    options = parse(argv)
    start = time.time()
    name, runs, traces, histories = "gamma_dynamics", [], {}, {}
    schedule = {options.epochs // 2: 100 if options.full else 10, options.epochs * 4 // 5: 1}
    for seed in options.seeds:
        data = load(
            options.data, options.rows, options.validation, options.max_length, options.vocab_size, seed
        )
        for group, settings in studied(schedule).items():
            for setting, chosen in settings.items():
                if (seed, setting) in traces:  # the default is in each group
                    continue
                began = time.time()
                with tempfile.TemporaryDirectory() as folder:
                    trainer = train(folder, options, data, seed=seed, **chosen)
                    trace = Trace.load(folder)
                found = trace.sets["eval"]
                traces[seed, setting], histories[seed, setting] = trace, trainer.state.log_history
                gammas = trace.gammas_after
                runs.append(
                    {
                        "seed": seed,
                        "group": group,
                        "setting": setting,
                        "updates": sum("gamma_00" in entry for entry in trainer.state.log_history),
                        "accuracy": found.accuracy[-1],
                        "ece": found.ece.tolist(),
                        "adaptive_ece": found.adaptive_ece.tolist(),
                        "mean_ece_over_epochs": float(found.ece.mean()),
                        "gammas_at_the_end": [float(f"{gamma:.4g}") for gamma in gammas[-1]]
                        if gammas.size
                        else None,
                        "largest_gamma": float(gammas.max()) if gammas.size else None,
                        "seconds": time.time() - began,
                    }
                )
                print(
                    f"seed {seed}  {setting:<22} {runs[-1]['updates']:>4} updates, accuracy {found.accuracy[-1]:.3f}, "
                    f"ECE {found.ece[-1]:.3f} at the end and {found.ece.mean():.3f} on average over the epochs",
                    flush=True,
                )
    results = {
        "settings": {key: value for key, value in vars(options).items() if key not in ("data", "output")},
        "schedule": schedule,
        "samples_for_updates_by_steps": SAMPLES,
        "runs": runs,
        "seconds": time.time() - start,
    }
    seed = options.seeds[0]
    save_figure(gamma_dynamics(histories[seed, "every 10 steps"]), options.output / f"{name}_bins.png")
    groups = studied(schedule)
    gammas = {
        setting: of_three_bins(histories[seed, setting])
        for settings in groups.values()
        for setting in settings
        if any("gamma_00" in entry for entry in histories[seed, setting])
    }
    figure = small_multiples(gammas, xlabel="step", ylabel="gamma", level=0, logarithmic=True)
    save_figure(figure, options.output / f"{name}_settings.png")
    errors = {
        group: {s: (traces[seed, s].sets["eval"].epochs, traces[seed, s].sets["eval"].ece) for s in settings}
        for group, settings in groups.items()
    }
    smooth = {
        group: {s: (epochs, moving_average(ece)) for s, (epochs, ece) in lines.items()}
        for group, lines in errors.items()
    }
    figure = small_multiples(smooth, faint=errors, xlabel="epoch", ylabel="ECE on validation")
    save_figure(figure, options.output / f"{name}_ece.png")
    write(results, options.output / f"{name}.json")
    print(f"written to {options.output}/{name}*, {results['seconds']:.0f} s")


def studied(schedule):
    """Group -> setting -> arguments. The default, an update after each epoch, stands in each group."""
    default = {"every epoch": {"loss": "adafocal"}}

    def every(steps):
        return {"loss": "adafocal", "gamma_update_steps": steps, "gamma_update_samples": SAMPLES}

    def with_(**kwargs):
        return {"loss": "adafocal", "loss_kwargs": kwargs}

    return {
        "updates": {
            "cross entropy": {"loss": "cross_entropy"},
            **default,
            **{f"every {steps} steps" if steps > 1 else "every step": every(steps) for steps in (100, 10, 1)},
            "schedule": {
                "loss": "adafocal",
                "gamma_update_schedule": schedule,
                "gamma_update_samples": SAMPLES,
            },
        },
        "limit of gamma": {
            **default,
            "gamma max 50": with_(gamma_max=50.0),
            "gamma max infinite": with_(gamma_max="inf"),
        },
        "number of bins": {**default, "5 bins": with_(n_bins=5), "30 bins": with_(n_bins=30)},
        "lambda": {**default, "lambda 0.1": with_(update_rate=0.1), "lambda 5": with_(update_rate=5.0)},
    }


def of_three_bins(history):
    """The gamma of the lowest, the middle and the highest bin at each update."""
    entries = [entry for entry in history if "gamma_00" in entry]
    n_bins = sum(key.startswith("gamma_") for key in entries[0])
    steps = np.array([entry["step"] for entry in entries])
    places = {"lowest bin": 0, "middle bin": n_bins // 2, "highest bin": n_bins - 1}
    return {
        name: (steps, np.array([entry[f"gamma_{m:02d}"] for entry in entries])) for name, m in places.items()
    }


if __name__ == "__main__":
    main()
