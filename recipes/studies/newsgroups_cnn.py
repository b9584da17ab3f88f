"""The global-pooling CNN on 20 Newsgroups, shared by several studies: options, data, and one run."""

import argparse
import tempfile
import warnings

from options import check_seeds, count, output_folder
from papers.dynamics import Trace, TrainingTrace
from papers.networks.global_pooling_cnn import (
    GlobalPoolingCNNConfig,
    GlobalPoolingCNNForSequenceClassification,
)
from papers.newsgroups import NEWSGROUPS, newsgroups_dataset, strip_headers
from papers.words import train_word_tokenizer
from transformers import DataCollatorWithPadding, PrinterCallback, set_seed

from hf_calib import CalibrationTrainer, CalibrationTrainingArguments
from hf_calib.data import choose_columns, draw_test, limit_samples, load_splits

SMALL = {
    "validation_rows": 1000,
    "max_length": 100,
    "vocab_size": 5000,
    "layers": 1,
    "batch_size": 64,
    "learning_rate": 3e-3,
}
PAPER = {
    "rows": 15_098,
    "validation_rows": 900,
    "epochs": 50,
    "max_length": 1000,
    "vocab_size": 20_000,
    "layers": 3,
    "batch_size": 128,
    "learning_rate": 1e-3,
}


def parse_options(description, *, seeds, rows, epochs):
    """Return the options of the command line, and the settings of the training that follow from them."""
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--data", default=NEWSGROUPS, help="This, a dataset on the Hub, or a folder."
    )
    parser.add_argument("--output", type=output_folder, default="outputs/studies")
    parser.add_argument("--seeds", type=int, nargs="+", default=seeds)
    parser.add_argument(
        "--rows", type=count, help=f"To train with; {rows:,} by default."
    )
    parser.add_argument("--validation_rows", type=count, help="1,000 by default.")
    parser.add_argument("--epochs", type=count, help=f"{epochs} by default.")
    parser.add_argument(
        "--full", action="store_true", help="The papers' sizes: hours on a CPU."
    )
    args = parser.parse_args()
    check_seeds(parser, args.seeds)
    sizes = PAPER if args.full else {"rows": rows, "epochs": epochs, **SMALL}
    given = {
        name: getattr(args, name) for name in ("rows", "validation_rows", "epochs")
    }
    return args, sizes | {
        name: value for name, value in given.items() if value is not None
    }


def load_posts(source, settings, seed, *, with_headers=True):
    """Tokenized training and validation rows, headers taken off, and the tokenizer; each seed draws its own."""
    posts = newsgroups_dataset() if source == NEWSGROUPS else load_splits(source)
    dataset = choose_columns(posts, text_column="text")
    dataset = draw_test(dataset, size=settings["validation_rows"], seed=seed)
    dataset = limit_samples(dataset, max_train_samples=settings["rows"], seed=seed)
    dataset = strip_headers(dataset) if with_headers else dataset
    length = settings["max_length"]
    tokenizer = train_word_tokenizer(
        dataset["train"]["text"], vocab_size=settings["vocab_size"], max_length=length
    )

    def tokenize(batch):
        return tokenizer(batch["text"], truncation=True, max_length=length)

    tokenized = dataset.map(tokenize, batched=True, remove_columns="text")
    return tokenized["train"], tokenized["test"], tokenizer


def make_trainer(
    posts,
    settings,
    folder,
    *,
    seed,
    callbacks=(),
    own_split=False,
    loss_function=None,
    **arguments,
):
    """A trainer whose evaluation rows are AdaFocal's validation split too, or with `own_split` a copy of them.

    A `loss_function` of logits and labels takes the place of a loss of the library.
    """
    train_rows, validation, tokenizer = posts
    warnings.filterwarnings(
        "ignore", message="The evaluation split is also the calibration split"
    )
    set_seed(seed)

    def of_outputs(outputs, labels, num_items_in_batch=None):
        return loss_function(outputs.logits, labels)

    network = GlobalPoolingCNNForSequenceClassification(
        GlobalPoolingCNNConfig(
            vocab_size=len(tokenizer),
            num_labels=1 + max(train_rows["label"]),
            num_conv_layers=settings["layers"],
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    trainer = CalibrationTrainer(
        network,
        CalibrationTrainingArguments(
            output_dir=folder,
            num_train_epochs=settings["epochs"],
            per_device_train_batch_size=settings["batch_size"],
            per_device_eval_batch_size=256,
            learning_rate=settings["learning_rate"],
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
            **arguments,
        ),
        train_dataset=train_rows,
        eval_dataset=validation,
        calibration_dataset=validation.select(range(len(validation)))
        if own_split
        else validation,
        data_collator=DataCollatorWithPadding(tokenizer),
        callbacks=list(callbacks),
        compute_loss_func=None if loss_function is None else of_outputs,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def train_with_trace(posts, settings, *, seed, n_rows, **arguments):
    """Train; return the trace, with `n_rows` single rows of training and validation, and the log."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(posts, settings, folder, seed=seed, **arguments)
        trainer.add_callback(
            TrainingTrace(trainer, n_training_rows=n_rows, n_kept_rows=n_rows)
        )
        trainer.train()
        return Trace.load(folder), trainer.state.log_history
