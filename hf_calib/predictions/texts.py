"""Predictions of a classifier, from the Hub or a folder, for labelled texts."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import ClassLabel, Dataset
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hf_calib._errors import (
    InputTypeError,
    InputValueError,
    did_you_mean,
    differ_invisibly,
    expected,
    few,
    look_alikes,
)
from hf_calib.data.sources import load_rows as load_rows  # where it was first
from hf_calib.data.splits import read_column
from hf_calib.predictions.files import Predictions

# What broken or missing files of a model raise.
_UNLOADABLE = (
    OSError,
    ValueError,
    KeyError,
    ImportError,
    EOFError,
    RuntimeError,  # weights of another shape
    SafetensorError,
    pickle.UnpicklingError,
)

# A folder without a tokenizer gets one from transformers that knows 5 special tokens and no word.
_LEAST_VOCABULARY = 0.5  # of the model's
_MOST_UNKNOWN = 0.5  # of the tokens
_ROWS_CHECKED = 10_000
_SAVE_ITS_TOKENIZER = "save the tokenizer that the model was trained with into the model's folder"


@dataclass(frozen=True, eq=False)
class TextClassifier:
    """A model and its tokenizer, as a pipeline would load them, but in float32.

    Args:
        model: a sequence classifier, in evaluation mode.
        tokenizer: its tokenizer.
        class_names: C names, in the order of the logits.
    """

    model: Any
    tokenizer: Any
    class_names: tuple[str, ...]

    def encode(self, texts: Sequence[str], max_length: int | None = None) -> list[dict[str, list[int]]]:
        """Token ids and what goes with them, truncated to max_length, by default what the model can read."""
        limit = max_length or self.longest
        encoded = self.tokenizer(list(texts), truncation=limit is not None, max_length=limit)
        return [dict(zip(encoded, row, strict=True)) for row in zip(*encoded.values(), strict=True)]

    def batch(self, rows: Sequence[dict[str, list[int]]]) -> dict[str, Tensor]:
        """Padded tensors on the model's device."""
        if len(rows) == 1:  # needs no padding token, which decoders often lack
            made = {name: torch.tensor([values]) for name, values in rows[0].items()}
        else:
            made = self.tokenizer.pad(list(rows), return_tensors="pt")
        return {name: values.to(self.model.device) for name, values in made.items()}

    @property
    def processing_class(self) -> Any:
        """What is saved beside the model: the tokenizer."""
        return self.tokenizer

    @property
    def can_pad(self) -> bool:
        """Whether both model and tokenizer know a padding token."""
        return None not in (self.tokenizer.pad_token_id, getattr(self.model.config, "pad_token_id", None))

    @torch.inference_mode()
    def logits(self, batch: dict[str, Tensor]) -> NDArray[np.float32]:
        """(N, C) float32."""
        return self.model(**batch).logits.float().cpu().numpy()

    @property
    def _positions_of_padding(self) -> int:
        """Positions that RoBERTa and the like reserve: a text's own start after the padding token's."""
        found = (
            getattr(module, "padding_idx", None)
            for name, module in self.model.named_modules()
            if name.endswith("position_embeddings")
        )
        return max((index + 1 for index in found if index is not None), default=0)

    @property
    def longest(self) -> int | None:
        """The most tokens that the model can read; None if neither tokenizer nor config says so."""
        positions = getattr(self.model.config, "max_position_embeddings", None)
        if positions is not None:
            positions -= self._positions_of_padding
        limits = (self.tokenizer.model_max_length, positions)
        known = [limit for limit in limits if limit is not None and 0 < limit < 1_000_000]
        return min(known, default=None)


def load_classifier(
    name: str | Path, *, multi_label: bool = False, trust_remote_code: bool = False
) -> TextClassifier:
    """Load a fine-tuned sequence classifier, on the accelerator where there is one.

    Args:
        name: a model on the Hub, or a local folder.
        multi_label: whether it has several labels per text, in place of one.
        trust_remote_code: whether code that comes with the model may run here.

    Raises:
        ValueError: if it cannot be loaded, has no trained head or no tokenizer of its own, or is of the other kind
            or a regression.
    """
    classifier = load_text_model(
        name, AutoModelForSequenceClassification, trust_remote_code=trust_remote_code
    )
    check_problem(classifier.model.config, "text", multi_label=multi_label)
    return classifier


def check_problem(config: Any, what: str, *, multi_label: bool) -> None:
    """Refuse the configuration of a model with several labels a row where one is wanted, or the other way round."""
    if multi_label:
        fits = config.problem_type == "multi_label_classification"
        requirement, way_out = "have several labels", "set its problem_type to multi_label_classification"
    else:
        fits = config.problem_type in (None, "single_label_classification") and config.num_labels > 1
        requirement = "choose one of several classes"
        way_out = f"several labels per {what} can be scaled with PerLabelTemperatureScaling in Python"
    if not fits:
        got = f"problem_type={config.problem_type!r} and {config.num_labels} outputs"
        raise InputValueError(expected("the model", requirement, got, way_out))


def load_text_model(name: str | Path, model_class: Any, *, trust_remote_code: bool = False) -> TextClassifier:
    """Load a fine-tuned classifier of texts or tokens, of any problem type, as `load_classifier` does.

    Args:
        name: a model on the Hub, or a local folder.
        model_class: AutoModelForSequenceClassification or AutoModelForTokenClassification.
        trust_remote_code: whether code that comes with the model may run here.

    Raises:
        ValueError: if it cannot be loaded, or has no trained head or no tokenizer of its own.
    """
    model = load_trained(name, model_class, trust_remote_code=trust_remote_code)
    with refusals("the model", "be loadable", name, _SAVE_ITS_TOKENIZER):
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    config = model.config
    known = len(tokenizer)
    needed = getattr(config.get_text_config(), "vocab_size", None) or 0
    if known < _LEAST_VOCABULARY * needed:
        got = f"one of {known:,} tokens, for a model that has {needed:,}"
        raise InputValueError(expected("the model", "come with its tokenizer", got, _SAVE_ITS_TOKENIZER))
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    names = tuple(str(config.id2label[i]) for i in range(config.num_labels))
    return TextClassifier(model.to(device).eval(), tokenizer, names)


def load_trained(name: str | Path, model_class: Any, *, trust_remote_code: bool = False) -> Any:
    """Load a model in float32, and check that none of its weights are new.

    Raises:
        ValueError: if it cannot be loaded, or has no trained head.
    """
    way_out = "name a fine-tuned classifier on the Hub or in a folder; check that its files are complete"
    with refusals("the model", "be loadable", name, way_out):
        model, report = model_class.from_pretrained(
            name, dtype=torch.float32, output_loading_info=True, trust_remote_code=trust_remote_code
        )
    if report["missing_keys"]:
        got = f"no {few(sorted(report['missing_keys']))} in {name}"
        raise InputValueError(expected("the model", "be a fine-tuned classifier", got, "train it first"))
    return model


def predict(
    classifier: TextClassifier,
    rows: Dataset,
    *,
    text_column: str = "text",
    label_column: str = "label",
    class_names: Sequence[str] | None = None,
    max_length: int | None = None,
    batch_size: int = 32,
    on_progress: Callable[[int, int], None] | None = None,
) -> Predictions:
    """Run a classifier over labelled texts.

    Args:
        classifier: from `load_classifier`.
        rows: from `load_rows`, or any dataset with these columns.
        text_column: the column of texts.
        label_column: the column of labels: the model's class names (in upper or lower case), or its class ids.
        class_names: the data's names of the model's classes, in the model's order, if they differ.
        max_length: tokens per text, by default as many as the model reads; longer texts are truncated.
        batch_size: texts of similar length are batched together.
        on_progress: called with the number of rows done and of all rows.

    Returns:
        Predictions with (N, C) float32 logits, in the rows' order.

    Raises:
        ValueError: if there are no rows, a column is missing or has gaps, the tokenizer does not know the texts,
            or labels do not fit the model.
        TypeError: if a column holds anything but texts or classes.
    """
    encoded = encode_rows(
        classifier,
        rows,
        text_column=text_column,
        label_column=label_column,
        class_names=class_names,
        max_length=max_length,
    )
    return encoded.predict(batch_size=batch_size, on_progress=on_progress)


@dataclass(frozen=True, eq=False)
class EncodedRows:
    """Labelled texts that a classifier can read: they have been checked and tokenized.

    Args:
        classifier: the one whose tokenizer they went through.
        inputs: N rows of token ids and what goes with them.
        labels: (N,) int64, the model's ids.
    """

    classifier: TextClassifier
    inputs: Sequence[dict[str, list[int]]]
    labels: NDArray[np.int64]

    def predict(
        self, *, batch_size: int = 32, on_progress: Callable[[int, int], None] | None = None
    ) -> Predictions:
        """Run the classifier; see `predict`."""
        logits = predict_logits(self.classifier, self.inputs, batch_size=batch_size, on_progress=on_progress)
        return Predictions(self.labels, logits=logits, class_names=self.classifier.class_names)


def predict_logits(
    classifier: TextClassifier,
    tokens: Sequence[dict[str, list[int]]],
    *,
    batch_size: int = 32,
    on_progress: Callable[[int, int], None] | None = None,
) -> NDArray[np.float32]:
    """Run a classifier over tokens from `encode_texts`; the logits (N, C) are in their order."""
    _check_positive("batch_size", batch_size)
    logits = np.empty((len(tokens), len(classifier.class_names)), dtype=np.float32)
    # Longest first: a batch that does not fit in memory fails at once.
    order = np.argsort([-len(row["input_ids"]) for row in tokens], kind="stable")
    size = batch_size if classifier.can_pad else 1
    for chunk in np.array_split(order, math.ceil(len(order) / size)):
        logits[chunk] = classifier.logits(classifier.batch([tokens[i] for i in chunk]))
        if on_progress is not None:
            on_progress(len(chunk), len(order))
    return logits


def encode_rows(
    classifier: TextClassifier,
    rows: Dataset,
    *,
    text_column: str = "text",
    label_column: str = "label",
    class_names: Sequence[str] | None = None,
    max_length: int | None = None,
) -> EncodedRows:
    """Check and tokenize labelled texts without running the model; arguments and errors as for `predict`."""
    _check_rows(rows, max_length)
    labels = label_ids(rows, label_column, classifier.class_names, class_names)
    tokens = encode_texts(classifier, rows, text_column=text_column, max_length=max_length)
    return EncodedRows(classifier, tokens, labels)


def encode_texts(
    classifier: TextClassifier, rows: Dataset, *, text_column: str = "text", max_length: int | None = None
) -> list[dict[str, list[int]]]:
    """Check and tokenize texts, whose labels are not read; arguments and errors as for `predict`."""
    _check_rows(rows, max_length)
    tokens = classifier.encode(_texts(rows, text_column), max_length)
    empty = [i for i, row in enumerate(tokens) if not row["input_ids"]]
    if empty:
        got = f"none in {len(empty)} of {len(tokens)} rows (first in row {empty[0]})"
        raise InputValueError(expected("texts", "have at least one token", got, "remove these rows"))
    check_known_words(classifier, tokens)
    return tokens


def _check_rows(rows: Dataset, max_length: int | None) -> None:
    _check_positive("max_length", max_length)
    if len(rows) == 0:
        raise InputValueError(expected("data", "have rows", "none", "check the file or the split"))


def check_known_words(classifier: TextClassifier, tokens: Sequence[dict[str, list[int]]]) -> None:
    """Refuse a tokenizer that does not know the texts, or whose ids the model does not."""
    tokenizer = classifier.tokenizer
    step = math.ceil(len(tokens) / _ROWS_CHECKED)
    ids = np.concatenate([np.asarray(row["input_ids"]) for row in tokens[::step]])
    needed = getattr(classifier.model.config.get_text_config(), "vocab_size", None)
    if needed is not None and ids.max() >= needed:
        got = f"{ids.max()}"
        raise InputValueError(
            expected("token ids", f"be below the model's {needed:,}", got, _SAVE_ITS_TOKENIZER)
        )
    unknown = tokenizer.unk_token_id
    around = set(tokenizer.all_special_ids) - {unknown}
    words = ids[~np.isin(ids, list(around))]
    n_unknown = int(np.count_nonzero(words == unknown))
    if n_unknown > _MOST_UNKNOWN * len(words) or not len(words):
        got = f"{n_unknown:,} unknown ones of {len(words):,}" if len(words) else "special tokens only"
        way_out = f"{_SAVE_ITS_TOKENIZER}, or check the language of the texts"
        raise InputValueError(expected("the tokens of the texts", "be known to the tokenizer", got, way_out))


def _check_positive(argument: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise InputValueError(expected(argument, "be at least 1", value, "leave it out for the default"))


def _texts(rows: Dataset, column: str) -> list[str]:
    texts = _column(rows, "text_column", column)
    if not all(isinstance(text, str) for text in texts):
        got = rows.features[column]
        raise InputTypeError(expected(f"column {column!r}", "hold texts", got, "choose another text_column"))
    return texts


def _column(rows: Dataset, argument: str, column: str) -> list[Any]:
    if column not in rows.column_names:
        requirement = f"be one of {', '.join(rows.column_names)}"
        way_out = did_you_mean(column, rows.column_names)
        raise InputValueError(expected(argument, requirement, repr(column), way_out))
    stored = read_column(rows, column)
    if stored.null_count:
        got = f"{stored.null_count} without"
        raise InputValueError(
            expected(f"column {column!r}", "have a value in every row", got, "remove these rows")
        )
    return stored.to_pylist()


def label_ids(
    rows: Dataset, column: str, model_names: Sequence[str], data_names: Sequence[str] | None
) -> NDArray[np.int64]:
    """The model's ids of the data's labels: by name if both have names, else the numbers themselves.

    Arguments and errors as for `predict`; an error names the first row that is wrong.
    """
    names = list(model_names if data_names is None else data_names)
    if len(names) != len(model_names) or len(set(names)) < len(names):
        requirement = f"name the model's {len(model_names)} classes ({few(model_names)}) once each"
        raise InputValueError(expected("class_names", requirement, few(names), "follow the model's order"))
    labels = _column(rows, "label_column", column)
    feature = rows.features[column]
    if isinstance(feature, ClassLabel) and -1 in labels:  # how the Hub marks labels that are withheld
        way_out = "choose a split that is labelled, such as 'validation'"
        raise InputValueError(expected("the rows", "be labelled", -1, way_out))
    if isinstance(labels[0], float) and all(label.is_integer() for label in labels):
        labels = [int(label) for label in labels]  # pandas writes integers so where some were missing
    unnamed = data_names is None and list(model_names) == [f"LABEL_{i}" for i in range(len(names))]
    if isinstance(feature, ClassLabel) and not unnamed:
        labels = [feature.names[label] for label in labels]
    elif isinstance(labels[0], bool):
        labels = [str(label) for label in labels]
    elif isinstance(labels[0], int) and all(name.lstrip("-").isdigit() for name in names):
        labels = [str(label) for label in labels]  # a csv file cannot say that its 1, 2, 3 are names
    elif isinstance(labels[0], int) and data_names is not None:
        way_out = "leave class_names out where the labels are the model's ids"
        raise InputValueError(
            expected("class_names", f"name the labels of {column!r}", "numbers there", way_out)
        )
    if isinstance(labels[0], str):
        return _ids_of_names(labels, names, column)
    return _checked_ids(labels, names, column)


def _ids_of_names(labels: list[str], names: list[str], column: str) -> NDArray[np.int64]:
    blank = [i for i, label in enumerate(labels) if not label.strip()]
    if blank:
        got = f"none in {len(blank)} rows (first in row {blank[0]})"
        raise InputValueError(
            expected(f"column {column!r}", "hold a label in every row", got, "remove these rows")
        )
    number = {name: i for i, name in enumerate(names)}
    folded = {name.casefold(): i for name, i in number.items()}
    if len(folded) == len(number):  # no two classes differ in case only
        number |= {label: folded[label.casefold()] for label in set(labels) if label.casefold() in folded}
    unknown = sorted(set(labels) - set(number))
    if unknown:
        requirement = f"hold the model's classes ({few(names)})"
        pair = look_alikes(unknown, names)
        got = few(list(map(repr, unknown))) + (f" ({differ_invisibly(pair)})" if pair else "")
        first = next(row for row, label in enumerate(labels) if label not in number)
        got = f"{got} (first in row {first})"
        way_out = "give the data's names of the model's classes, in the model's order, as class_names"
        raise InputValueError(expected(f"column {column!r}", requirement, got, way_out))
    return np.array([number[label] for label in labels], dtype=np.int64)


def _checked_ids(labels: list[Any], names: list[str], column: str) -> NDArray[np.int64]:
    if not all(isinstance(label, int) for label in labels):
        got = type(labels[0]).__name__
        way_out = "choose another label_column"
        raise InputTypeError(expected(f"column {column!r}", "hold one class in each row", got, way_out))
    outside = sorted({label for label in labels if not 0 <= label < len(names)})
    if outside:
        requirement = f"hold the model's ids, 0..{len(names) - 1}"
        way_out = "choose another label_column or split, or write the names of the classes"
        first = next(row for row, label in enumerate(labels) if label in outside)
        got = f"{few(outside)} (first in row {first})"
        raise InputValueError(expected(f"column {column!r}", requirement, got, way_out))
    return np.array(labels, dtype=np.int64)


@contextmanager
def refusals(argument: str, requirement: str, got: object, way_out: str) -> Iterator[None]:
    """Turn the libraries' errors about a name into one line that says what to do."""
    try:
        yield
    except _UNLOADABLE as error:
        cause = " ".join(str(error).split())
        raise InputValueError(expected(argument, requirement, f"{got} ({cause})", way_out)) from error
