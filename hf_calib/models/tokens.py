"""Token classifiers: tagged sentences with a row of predictions for each labelled token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray

from hf_calib._errors import check
from hf_calib._text import plain_name
from hf_calib.data.tokens import encode_words, read_sentences, tagged_sentences
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
        # Which sub-words of a sentence count is known by its tags.
        requirement = "data without tags to be for texts or images"
        check(labelled, requirement, "tokens", "leave ood_data out")
        names = names_in_data(self.class_names, reading.class_names, "tags")
        reading.refuse("texts", "text_pair_column")
        reading.refuse("images", "image_column")
        self.check_max_length(reading)
        shown = plain_name(name)
        tokens, tags = read_sentences(
            rows, reading.text_column, reading.label_column, name=shown
        )
        sentences = tagged_sentences(tokens, tags, names, name=shown)
        encoded, note = encode_words(sentences, self.tokenizer, self.limit(reading))
        labels = [np.array(each, dtype=np.int64) for each in encoded["labels"]]
        counted = [each != IGNORE_INDEX for each in labels]
        sub_words = encoded.remove_columns("labels").to_list()
        self.check_known_words(sub_words)
        n_counted = [np.count_nonzero(each) for each in counted]
        return Encoded(
            sub_words,
            labels=np.concatenate(labels)[np.concatenate(counted)],
            sentences=np.repeat(np.arange(len(labels)), n_counted),
            note=note,
            counted=counted,
        )

    def own(
        self, encoded: Encoded, row: int, logits: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """Return the logits (n, C) of the labelled tokens of a padded sentence."""
        assert encoded.counted is not None
        counted = encoded.counted[row]
        # The other end of the row is padding, up to the longest sentence of the batch.
        if self.tokenizer.padding_side == "left":
            return logits[-len(counted) :][counted]
        return logits[: len(counted)][counted]

    def served(self, rows: Dataset, reading: Reading, *, name: str) -> Served:
        """Return sentences as texts, whose sub-words each have a score."""
        texts = [" ".join(tokens) for tokens in rows[:][reading.text_column]]
        limit = self.limit(reading)
        batch = self.batch(self.tokenize(texts if self.can_pad else texts[:1], limit))
        # The pipeline leaves out the tag "O" unless it is told otherwise.
        options = {"aggregation_strategy": "none", "ignore_labels": []}
        return Served(texts, texts, batch, options, {})

    def served_logits(
        self, served: Sequence[str], logits: NDArray[Any]
    ) -> NDArray[np.float64]:
        """Return the logits (n, C) of each sub-word, each of which a pipeline scores."""
        parts = []
        # A pipeline splits the text itself, and may find other sub-words than those of the tokens.
        for text in served:
            encoded = self.tokenizer(text, return_special_tokens_mask=True)
            (of_text,) = self.run(self.batch(self.tokenize([text], self.longest)))
            is_special = np.array(encoded["special_tokens_mask"][: len(of_text)])
            parts.append(of_text[is_special == 0])
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
