"""Classifiers of tokens: tagged sentences, a row of predictions for each token that counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from datasets import ClassLabel, Dataset, Features, List, Value
from numpy.typing import NDArray

from hf_calib._errors import InputValueError, expected
from hf_calib._text import plain_name
from hf_calib.data.tokens import encode_words, read_sentences, tag_ids
from hf_calib.losses.statistics.definitions import IGNORE_INDEX
from hf_calib.models.classifier import Encoded, Progress
from hf_calib.models.labels import names_in_data
from hf_calib.models.reading import Reading
from hf_calib.models.texts import TextClassifier, check_known_words


class SubWords(NamedTuple):
    """S tokenized sentences: their sub-words, and which of these are the first of a token."""

    rows: Sequence[dict[str, list[int]]]
    counted: Sequence[NDArray[np.bool_]]


class TokenClassifier(TextClassifier):
    """A token classifier and its tokenizer."""

    def encode(self, rows: Dataset, reading: Reading, *, name: str, labelled: bool = True) -> Encoded:
        """Check and tokenize tagged sentences."""
        if not labelled:
            return self.encode_inputs(rows, reading, name=name)
        names = names_in_data(self.class_names, reading.class_names, "tags")
        reading.refuse("text_pair_column")
        shown = plain_name(name)
        tokens, tags = read_sentences(rows, reading.text_column, reading.label_column, name=shown)
        features = Features({"tokens": List(Value("string")), "tags": List(ClassLabel(names=list(names)))})
        sentences = Dataset.from_dict(
            {"tokens": tokens, "tags": tag_ids(tags, names, name=shown)}, features=features
        )
        encoded, note = encode_words(sentences, self.tokenizer, reading.max_length or self.longest)
        labels = [np.array(each, dtype=np.int64) for each in encoded["labels"]]
        counted = [each != IGNORE_INDEX for each in labels]
        inputs = SubWords(encoded.remove_columns("labels").to_list(), counted)
        check_known_words(self, inputs.rows)
        of_tokens = np.concatenate(labels)
        return Encoded(
            inputs,
            of_tokens[of_tokens != IGNORE_INDEX],
            np.repeat(np.arange(len(labels)), [np.count_nonzero(each) for each in counted]),
            note,
        )

    def encode_inputs(self, rows: Dataset, reading: Reading, *, name: str) -> Encoded:
        """Refuse rows without tags, which nothing reads."""
        way_out = "leave ood_data and target_data out"
        raise InputValueError(expected("data without tags", "be for texts or images", "tokens", way_out))

    def logits(
        self, encoded: Encoded, *, batch_size: int = 32, on_progress: Progress | None = None
    ) -> NDArray[np.float32]:
        """(N, C) of each token that counts, sentence by sentence."""
        rows, counted = encoded.inputs
        found: list[Any] = [None] * len(rows)
        left = self.tokenizer.padding_side == "left"
        for chunk in self.chunks(rows, batch_size, on_progress):
            padded = self.run(self.batch([rows[i] for i in chunk]))
            for i, logits in zip(chunk, padded, strict=True):
                own = logits[-len(counted[i]) :] if left else logits[: len(counted[i])]
                found[i] = own[counted[i]]
        return np.concatenate(found)

    def as_served(self, rows: Dataset, n: int, reading: Reading, *, name: str) -> list[str]:
        """The first n sentences as texts."""
        return [" ".join(tokens) for tokens in rows[:n][reading.text_column]]

    def served_logits(self, served: Sequence[str], logits: NDArray[Any]) -> NDArray[np.float64]:
        """(n, C) of each sub-word: a pipeline cuts the text into words by itself, and scores each sub-word."""
        parts = []
        for text in served:
            special = self.tokenizer(text, return_special_tokens_mask=True)["special_tokens_mask"]
            (of_text,) = self.run(self.batch(self.tokenize([text])))
            parts.append(of_text[np.array(special[: len(of_text)]) == 0])
        return np.concatenate(parts).astype(np.float64)

    def serving_options(self, folder: Path, reading: Reading) -> tuple[dict[str, Any], dict[str, Any]]:
        """Each sub-word has its score."""
        return {"aggregation_strategy": "none", "ignore_labels": []}, {}

    def scores_of_served(self, results: Any) -> list[dict[str, float]]:
        """Each token has the score of its tag alone."""
        return [{each["entity"]: each["score"]} for text in results for each in text]

    def identities(self, rows: Dataset, reading: Reading, *, name: str) -> Iterator[tuple[str, ...]]:
        """The sentence, for each of its tokens."""
        for tokens in rows[reading.text_column]:
            yield from [tuple(tokens)] * len(tokens)
