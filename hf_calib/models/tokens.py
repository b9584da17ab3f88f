"""Token classifiers: tagged sentences with a row of predictions for each labelled token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, Features, List, Value
from numpy.typing import NDArray

from hf_calib._errors import InputValueError, expected
from hf_calib._text import plain_name
from hf_calib.data.tokens import encode_words, read_sentences, tag_ids
from hf_calib.losses.statistics.definitions import IGNORE_INDEX
from hf_calib.models.classifier import Encoded, Served
from hf_calib.models.reading import Reading, names_in_data
from hf_calib.models.texts import TextClassifier


class TokenClassifier(TextClassifier):
    """A token classifier and its tokenizer."""

    def encode(
        self, rows: Dataset, reading: Reading, *, name: str, labelled: bool = True
    ) -> Encoded:
        """Check and tokenize tagged sentences."""
        if not labelled:
            way_out = "leave ood_data out"
            raise InputValueError(
                expected(
                    "data without tags", "be for texts or images", "tokens", way_out
                )
            )
        names = names_in_data(self.class_names, reading.class_names, "tags")
        reading.refuse("texts", "text_pair_column")
        reading.refuse("images", "image_column")
        self.check_max_length(reading)
        shown = plain_name(name)
        tokens, tags = read_sentences(
            rows, reading.text_column, reading.label_column, name=shown
        )
        features = Features(
            {
                "tokens": List(Value("string")),
                "tags": List(ClassLabel(names=list(names))),
            }
        )
        columns = {"tokens": tokens, "tags": tag_ids(tags, names, name=shown)}
        sentences = Dataset.from_dict(columns, features=features)
        encoded, note = encode_words(
            sentences, self.tokenizer, reading.max_length or self.longest
        )
        labels = [np.array(each, dtype=np.int64) for each in encoded["labels"]]
        counted = [each != IGNORE_INDEX for each in labels]
        sub_words = encoded.remove_columns("labels").to_list()
        self.check_known_words(sub_words)
        of_tokens = np.concatenate(labels)[np.concatenate(counted)]
        numbers = np.repeat(
            np.arange(len(labels)), [np.count_nonzero(each) for each in counted]
        )
        return Encoded(sub_words, of_tokens, numbers, note, counted=counted)

    def own(
        self, encoded: Encoded, row: int, logits: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """Return the logits (n, C) of the labelled tokens of a padded sentence."""
        assert encoded.counted is not None
        counted, left = encoded.counted[row], self.tokenizer.padding_side == "left"
        return (logits[-len(counted) :] if left else logits[: len(counted)])[counted]

    def served(self, rows: Dataset, reading: Reading, *, name: str) -> Served:
        """Return sentences as texts, whose sub-words each have a score."""
        texts = [" ".join(tokens) for tokens in rows[:][reading.text_column]]
        batch = self.batch(
            self.tokenize(texts if self.can_pad else texts[:1], reading.max_length)
        )
        return Served(
            texts,
            texts,
            batch,
            {"aggregation_strategy": "none", "ignore_labels": []},
            {},
        )

    def served_logits(
        self, served: Sequence[str], logits: NDArray[Any]
    ) -> NDArray[np.float64]:
        """Return the logits (n, C) of each sub-word, because a pipeline splits the text and scores each sub-word."""
        parts = []
        for text in served:
            special = self.tokenizer(text, return_special_tokens_mask=True)[
                "special_tokens_mask"
            ]
            (of_text,) = self.run(self.batch(self.tokenize([text])))
            parts.append(of_text[np.array(special[: len(of_text)]) == 0])
        return np.concatenate(parts).astype(np.float64)

    def scores_of_served(self, results: Any) -> list[dict[str, float]]:
        """Return the score of each token's predicted tag."""
        return [{each["entity"]: each["score"]} for text in results for each in text]

    def identities(
        self, rows: Dataset, reading: Reading, *, name: str
    ) -> Iterator[tuple[str, ...]]:
        """Return, for each token, its sentence."""
        for tokens in rows[reading.text_column]:
            yield from [tuple(tokens)] * len(tokens)
