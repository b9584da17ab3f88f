"""The global-pooling CNN on 20 Newsgroups, shared by several studies: options, data, and one run."""

import tempfile
import time
import warnings
from typing import Any, NamedTuple

from options import count, parse, study_parser
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
    parser = study_parser(description, seeds=seeds, data=NEWSGROUPS)
    by_default = f"To train with; {rows:,} by default."
    parser.add_argument("--rows", type=count, help=by_default)
    parser.add_argument("--validation_rows", type=count, help="1,000 by default.")
    parser.add_argument("--epochs", type=count, help=f"{epochs} by default.")
    larger = "The papers' sizes: hours on a CPU."
    parser.add_argument("--full", action="store_true", help=larger)
    args = parse(parser)
    settings = PAPER if args.full else {"rows": rows, "epochs": epochs, **SMALL}
    settings = dict(settings)
    for name in ("rows", "validation_rows", "epochs"):
        given = getattr(args, name)
        if given is not None:
            settings[name] = given
    return args, settings


def load_posts(source, settings, seed, *, with_headers=True):
    """Tokenized training and validation rows, headers taken off, and the tokenizer; each seed draws its own."""
    posts = newsgroups_dataset() if source == NEWSGROUPS else load_splits(source)
    dataset = choose_columns(posts, text_column="text")
    dataset = draw_test(dataset, size=settings["validation_rows"], seed=seed)
    dataset = limit_samples(dataset, max_train_samples=settings["rows"], seed=seed)
    if with_headers:
        dataset = strip_headers(dataset)
    length = settings["max_length"]
    texts = dataset["train"]["text"]
    tokenizer = train_word_tokenizer(
        texts, vocab_size=settings["vocab_size"], max_length=length
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

    config = GlobalPoolingCNNConfig(
        vocab_size=len(tokenizer),
        num_labels=1 + max(train_rows["label"]),
        num_conv_layers=settings["layers"],
        pad_token_id=tokenizer.pad_token_id,
    )
    training_args = CalibrationTrainingArguments(
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
    )
    calibration = validation
    if own_split:
        calibration = validation.select(range(len(validation)))
    trainer = CalibrationTrainer(
        GlobalPoolingCNNForSequenceClassification(config),
        training_args,
        train_dataset=train_rows,
        eval_dataset=validation,
        calibration_dataset=calibration,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_loss_func=None if loss_function is None else of_outputs,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


class TracedRun(NamedTuple):
    seed: int
    name: Any
    trace: Trace
    log: list
    seconds: float


def traced_runs(args, settings, members, *, n_rows):
    """Train each of the members, name -> arguments, with each seed, and follow `n_rows` of training and validation."""
    for seed in args.seeds:
        posts = load_posts(args.data, settings, seed)
        for name, arguments in members.items():
            began = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                trainer = make_trainer(posts, settings, folder, seed=seed, **arguments)
                trainer.add_callback(
                    TrainingTrace(trainer, n_training_rows=n_rows, n_kept_rows=n_rows)
                )
                trainer.train()
                trace = Trace.load(folder)
            seconds = round(time.perf_counter() - began, 1)
            yield TracedRun(seed, name, trace, trainer.state.log_history, seconds)
