"""Predictions of a token classifier, from the Hub or a folder, for tagged sentences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from datasets import ClassLabel, Dataset, Features, List, Value
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForTokenClassification

from hf_calib._errors import InputValueError, expected, few
from hf_calib.data.tokens import encode_words, read_sentences, tag_ids
from hf_calib.losses.statistics.definitions import IGNORE_INDEX
from hf_calib.metrics.entities import are_bio, check_seqeval
from hf_calib.predictions.files import Predictions
from hf_calib.predictions.rows import LabelledRows
from hf_calib.predictions.texts import TextClassifier, check_known_words, load_text_model


@dataclass(frozen=True, eq=False)
class SubWords:
    """Sentences that have been tokenized.

    Args:
        rows: S rows of sub-word ids and what goes with them.
        labels: S lists of the tags' ids, -100 for all but the first sub-word of a token.
        note: what the model does not read of them; None where it reads all.
    """

    rows: Sequence[dict[str, list[int]]]
    labels: Sequence[list[int]]
    note: str | None


@dataclass(frozen=True, eq=False)
class EncodedSentences:
    """Tagged sentences that a token classifier can read.

    Args:
        classifier: the one whose tokenizer they went through.
        inputs: S sentences.
        tag_names: C names, in the order of the logits.
    """

    classifier: TextClassifier
    inputs: SubWords
    tag_names: tuple[str, ...]

    def predict(
        self, *, batch_size: int = 32, on_progress: Callable[[int, int], None] | None = None
    ) -> Predictions:
        """Run the classifier: a row for each token that counts, sentence by sentence."""
        classifier, rows = self.classifier, self.inputs.rows
        labels = [np.array(each, dtype=np.int64) for each in self.inputs.labels]
        found: list[Any] = [None] * len(rows)
        # Longest first: a batch that does not fit in memory fails at once.
        order = np.argsort([-len(each) for each in labels], kind="stable")
        size = batch_size if classifier.can_pad else 1
        left = classifier.tokenizer.padding_side == "left"
        for chunk in np.array_split(order, math.ceil(len(rows) / size)):
            logits = classifier.logits(classifier.batch([rows[i] for i in chunk]))
            for i, padded in zip(chunk, logits, strict=True):
                own = padded[-len(labels[i]) :] if left else padded[: len(labels[i])]
                found[i] = own[labels[i] != IGNORE_INDEX]
            if on_progress is not None:
                on_progress(len(chunk), len(rows))
        all_labels = np.concatenate(labels)
        return Predictions(
            all_labels[all_labels != IGNORE_INDEX],
            logits=np.concatenate(found),
            class_names=self.tag_names,
            sentences=np.repeat(np.arange(len(rows)), [len(each) for each in found]),
        )


@dataclass(frozen=True)
class LabelledTokens(LabelledRows):
    """The tagged sentences that a model is run over, and how they are read; as `LabelledImages` are.

    Args:
        data: a json or parquet file, a folder or a data set on the Hub.
        config_name: configuration of a Hub data set.
        split: of a Hub data set or folder.
        text_column: the column of lists of tokens.
        label_column: the column of as long lists of tags: the model's names, or its ids.
        class_names: the data's names of the model's tags, in the model's order, if they differ.
        max_length: sub-words of a sentence, by default as many as the model reads; longer ones are truncated.
        batch_size: sentences of similar length at a time.
    """

    text_column: str = "text"
    label_column: str = "label"
    class_names: Sequence[str] | None = None
    max_length: int | None = None
    batch_size: int = 32

    encoding: ClassVar[str] = "tokenizing {:,} sentences"
    task: ClassVar[str] = "token-classification"

    def load_classifier(self, source: str, *, trust_remote_code: bool) -> TextClassifier:
        """The model, with its tokenizer."""
        return load_text_model(source, AutoModelForTokenClassification, trust_remote_code=trust_remote_code)

    def encode(self, classifier: TextClassifier, rows: Dataset) -> EncodedSentences:
        """Check and tokenize them, before the model is run."""
        model_names = classifier.class_names
        names = tuple(self.class_names or model_names)
        if len(names) != len(model_names) or len(set(names)) < len(names):
            requirement = f"name the model's {len(model_names)} tags ({few(model_names)}) once each"
            raise InputValueError(
                expected("class_names", requirement, few(names), "follow the model's order")
            )
        if are_bio(names):
            check_seqeval()
        name = self.source()["name"]
        tokens, tags = read_sentences(rows, self.text_column, self.label_column, name=name)
        features = Features({"tokens": List(Value("string")), "tags": List(ClassLabel(names=list(names)))})
        sentences = Dataset.from_dict(
            {"tokens": tokens, "tags": tag_ids(tags, names, name=name)}, features=features
        )
        encoded, note = encode_words(sentences, classifier.tokenizer, self.max_length or classifier.longest)
        inputs = SubWords(encoded.remove_columns("labels").to_list(), encoded["labels"][:], note)
        check_known_words(classifier, inputs.rows)
        return EncodedSentences(classifier, inputs, names)

    def encode_inputs(self, classifier: TextClassifier, rows: Dataset) -> Any:
        """Refuse rows without tags, which nothing reads."""
        way_out = "leave ood_data and target_data out"
        raise InputValueError(expected("data without tags", "be for texts or images", "tokens", way_out))

    def predict_logits(self, classifier: TextClassifier, inputs: Any, on_progress: Any = None) -> Any:
        """Never called: `encode_inputs` has refused."""
        raise NotImplementedError

    def as_served(self, rows: Dataset, n: int) -> list[str]:
        """The first n, as a pipeline takes them: texts."""
        return [" ".join(tokens) for tokens in rows[:n][self.text_column]]

    def first_batch(self, classifier: TextClassifier, served: Sequence[str]) -> dict[str, Tensor]:
        """What the model reads of these, or of the first where it cannot pad."""
        return classifier.first_batch(served, self.max_length)

    def served_logits(self, classifier: TextClassifier, served: Sequence[str]) -> NDArray[np.float32]:
        """(n, C) of each sub-word that a pipeline scores, text by text."""
        parts = []
        for text in served:
            (row,) = classifier.encode([text])
            special = classifier.tokenizer(text, return_special_tokens_mask=True)["special_tokens_mask"]
            (logits,) = classifier.logits(classifier.batch([row]))
            parts.append(logits[np.array(special[: len(logits)]) == 0])
        return np.concatenate(parts)

    def serving(self, classifier: TextClassifier, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        """Options of a pipeline with the model saved in a folder, and of its call: each sub-word has its score."""
        return {"aggregation_strategy": "none", "ignore_labels": []}, {}

    def identities(self, rows: Dataset) -> Iterator[tuple[str, ...]]:
        """What two tokens of the same sentence have in common, for each token."""
        for tokens in rows[self.text_column]:
            yield from [tuple(tokens)] * len(tokens)
