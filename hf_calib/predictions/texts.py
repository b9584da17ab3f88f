"""Predictions of a classifier, from the Hub or a folder, for labelled texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hf_calib._errors import InputTypeError, InputValueError, expected
from hf_calib.predictions.files import Predictions
from hf_calib.predictions.labels import column_values, label_ids
from hf_calib.predictions.loading import check_problem, load_trained, refusals
from hf_calib.predictions.rows import LabelledRows

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

    def first_batch(self, texts: Sequence[str], max_length: int | None = None) -> dict[str, Tensor]:
        """What the model reads of texts, or of the first where it cannot pad."""
        return self.batch(self.encode(texts if self.can_pad else texts[:1], max_length))

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
    texts = column_values(rows, "text_column", column)
    if not all(isinstance(text, str) for text in texts):
        got = rows.features[column]
        raise InputTypeError(expected(f"column {column!r}", "hold texts", got, "choose another text_column"))
    return texts


@dataclass(frozen=True)
class LabelledTexts(LabelledRows):
    """The texts that a model is run over, and how they are read; see `load_rows` and `predict`."""

    text_column: str = "text"
    label_column: str = "label"
    class_names: Sequence[str] | None = None
    max_length: int | None = None
    batch_size: int = 32

    encoding: ClassVar[str] = "tokenizing {:,} texts"
    task: ClassVar[str] = "text-classification"

    def load_classifier(
        self, source: str, *, multi_label: bool = False, trust_remote_code: bool
    ) -> TextClassifier:
        """The model, with its tokenizer."""
        return load_classifier(source, multi_label=multi_label, trust_remote_code=trust_remote_code)

    def encode(self, classifier: TextClassifier, rows: Dataset) -> EncodedRows:
        """Check and tokenize them, before the model is run."""
        return encode_rows(
            classifier,
            rows,
            text_column=self.text_column,
            label_column=self.label_column,
            class_names=self.class_names,
            max_length=self.max_length,
        )

    def encode_inputs(self, classifier: TextClassifier, rows: Dataset) -> list[dict[str, list[int]]]:
        """Check and tokenize them; their labels are not read."""
        return encode_texts(classifier, rows, text_column=self.text_column, max_length=self.max_length)

    def notes(self, inputs: Any) -> tuple[str, ...]:
        """What a report says of them: nothing."""
        return ()

    def predict_logits(
        self,
        classifier: TextClassifier,
        inputs: Any,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> NDArray[np.float32]:
        """Run the classifier over inputs of `encode_inputs`."""
        return predict_logits(classifier, inputs, batch_size=self.batch_size, on_progress=on_progress)

    def as_served(self, rows: Dataset, n: int) -> list[str]:
        """The first n, as a pipeline takes them."""
        return list(rows[:n][self.text_column])

    def first_batch(self, classifier: TextClassifier, served: Sequence[str]) -> dict[str, Tensor]:
        """What the model reads of these, or of the first where it cannot pad."""
        return classifier.first_batch(served, self.max_length)

    def serving(self, classifier: TextClassifier, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        """Options of a pipeline with the model saved in a folder, and of its call."""
        cut = self.max_length or classifier.longest
        return {"top_k": None}, {"truncation": cut is not None, "max_length": cut}

    def identities(self, rows: Dataset) -> Iterable[str]:
        """What two rows of the same text have in common."""
        return rows[self.text_column]
