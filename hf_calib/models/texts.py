"""Text classifiers, whose inputs are tokenized, checked, and run in batches of similar length."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoTokenizer

from hf_calib._errors import InputTypeError, check, expected
from hf_calib._text import counted
from hf_calib.data.sources import column_of
from hf_calib.models.classifier import Classifier, Encoded, Served, refusals
from hf_calib.models.prompts import PromptTemplate
from hf_calib.models.reading import Reading

# As a fraction of the model's: for a folder without a tokenizer, transformers makes one with 5
# special tokens and no words.
_LEAST_VOCABULARY = 0.5
# As a fraction of the tokens.
_MOST_UNKNOWN = 0.5
_ROWS_CHECKED = 10_000
# The ends of the names of layers with a vector for each position: BERT's, BART's, GPT-2's.
_TABLES = ("position_embeddings", "embed_positions", "wpe")
_SAVE_ITS_TOKENIZER = (
    "save the tokenizer that the model was trained with into the model's folder"
)


class Pair(NamedTuple):
    """Two texts that a model reads as one input."""

    text: str
    text_pair: str


class TextClassifier(Classifier):
    """A sequence classifier of texts, or of pairs of them, and its tokenizer."""

    @staticmethod
    def load_processing(
        source: str | Path, model: Any, *, trust_remote_code: bool
    ) -> Any:
        """Load the tokenizer, which must have the model's vocabulary."""
        with refusals("the model", "be loadable", source, _SAVE_ITS_TOKENIZER):
            tokenizer = AutoTokenizer.from_pretrained(
                source, trust_remote_code=trust_remote_code
            )
        known = len(tokenizer)
        needed = _vocabulary(model)
        got = f"one of {known:,} tokens, for a model that has {needed:,}"
        knows = known >= _LEAST_VOCABULARY * needed
        check(knows, "the model to come with its tokenizer", got, _SAVE_ITS_TOKENIZER)
        return tokenizer

    @property
    def tokenizer(self) -> Any:
        """The processing class, by the name that is usual for texts."""
        return self.processing_class

    @property
    def prompt(self) -> PromptTemplate | None:
        """The prompt of a classifier of option tokens; None for other models."""
        return PromptTemplate.of(self.model.config)

    def limit(self, reading: Reading) -> int | None:
        """The number of tokens that a text is cut to; None to leave it whole."""
        return reading.max_length or self.longest

    def tokenize(
        self, texts: Sequence[str] | Sequence[Pair], limit: int | None
    ) -> list[dict[str, list[int]]]:
        """Return token ids and further inputs, truncated to a limit or, if it is None, whole."""
        if self.prompt is not None:
            made = self._prompts(self.prompt, texts, limit)
            return [
                {"input_ids": ids, "attention_mask": [1] * len(ids)} for _, ids in made
            ]
        columns = [texts] if isinstance(texts[0], str) else zip(*texts, strict=True)
        encoded = self.tokenizer(
            *map(list, columns),
            truncation=limit is not None,
            max_length=limit,
            # It warns of texts that the model cannot read whole, which are cut later.
            verbose=False,
        )
        return [
            dict(zip(encoded, row, strict=True))
            for row in zip(*encoded.values(), strict=True)
        ]

    def _prompts(
        self, prompt: PromptTemplate, texts: Sequence[Any], limit: int | None
    ) -> list[tuple[str, list[int]]]:
        """The rendered prompts with their tokens."""
        return [
            prompt.fitting(*_parts(text), tokenizer=self.tokenizer, max_length=limit)
            for text in texts
        ]

    def encode_inputs(self, rows: Dataset, reading: Reading, *, name: str) -> Encoded:
        """Check and tokenize texts."""
        reading.refuse("images", "image_column")
        self.check_max_length(reading)
        texts = _texts(rows, reading)
        tokens = self.tokenize(texts, None)
        # No model has a prediction for a row without tokens.
        empty = [i for i, row in enumerate(tokens) if not row["input_ids"]]
        if empty:
            requirement = "texts to have at least one token"
            got = (
                f"none in {len(empty)} of {len(tokens)} rows (first in row {empty[0]})"
            )
            check(False, requirement, got, "remove these rows")
        limit = self.limit(reading)
        n_cut = 0 if limit is None else self._cut(tokens, texts, limit)
        self.check_known_words(tokens)
        if self.prompt is not None:
            self._check_ends(tokens)
        notes = _notes_on_blank(texts)
        if n_cut:
            notes.append(
                f"{n_cut:,} of {len(texts):,} texts were cut at {limit} tokens. A pipeline gives "
                "the same scores for these if it is called with truncation=True, "
                f"max_length={limit}."
            )
        note = " ".join(notes) or None
        return Encoded(tokens, note=note, cut_at=limit if n_cut else None)

    def _cut(
        self,
        tokens: list[dict[str, list[int]]],
        texts: Sequence[Any],
        limit: int,
    ) -> int:
        """Cut the texts of more tokens than the limit, in place, and return their number."""
        long = [i for i, row in enumerate(tokens) if len(row["input_ids"]) > limit]
        if long:
            # The tokenizer knows which text of a pair it shortens, and a prompt where its text is.
            cut = self.tokenize([texts[i] for i in long], limit)
            for i, row in zip(long, cut, strict=True):
                tokens[i] = row
        return len(long)

    def _check_ends(self, tokens: Sequence[dict[str, list[int]]]) -> None:
        """Raise for a prompt that ends with the padding token, which a model does not read."""
        padding = self.model.config.get_text_config().pad_token_id
        for i, row in enumerate(tokens):
            if row["input_ids"][-1] == padding:
                requirement = "a prompt to end with a token that is no padding"
                got = f"{self.tokenizer.decode([padding])!r} at the end of row {i}"
                way_out = (
                    "set another padding token, or write ends_with into the prompt"
                )
                check(False, requirement, got, way_out)

    def check_known_words(self, tokens: Sequence[dict[str, list[int]]]) -> None:
        """Raise if the tokenizer does not know the texts, or the model does not know its ids."""
        # Some of many rows are enough to tell a tokenizer of another model.
        step = math.ceil(len(tokens) / _ROWS_CHECKED)
        ids = np.concatenate([np.asarray(row["input_ids"]) for row in tokens[::step]])
        needed = _vocabulary(self.model) or math.inf
        # On a GPU a larger id ends the process's work with an error that does not name it.
        requirement = f"token ids to be below the model's {needed:,}"
        check(ids.max() < needed, requirement, ids.max(), _SAVE_ITS_TOKENIZER)
        unknown = self.tokenizer.unk_token_id
        special = set(self.tokenizer.all_special_ids) - {unknown}
        words = ids[~np.isin(ids, list(special))]
        n_unknown = int(np.count_nonzero(words == unknown))
        knows = len(words) > 0 and n_unknown <= _MOST_UNKNOWN * len(words)
        requirement = "the tokens of the texts to be known to the tokenizer"
        got = "special tokens only"
        if len(words):
            got = f"{n_unknown:,} unknown ones of {len(words):,}"
        way_out = f"{_SAVE_ITS_TOKENIZER}, or check the language of the texts"
        check(knows, requirement, got, way_out)

    def chunks(self, encoded: Encoded, batch_size: int) -> list[NDArray[np.intp]]:
        """Return batches of rows of similar length.

        The longest come first, so that a batch that is too large for memory fails at once.
        """
        # Batches of one length need little padding, which takes as long as tokens do.
        lengths = np.array([len(row["input_ids"]) for row in encoded.inputs])
        order = np.argsort(-lengths, kind="stable")
        size = batch_size if self.can_pad else 1
        return np.array_split(order, math.ceil(len(order) / size))

    def batch(self, inputs: Sequence[dict[str, list[int]]]) -> dict[str, Tensor]:
        """Return padded tensors on the model's device."""
        # One row needs no padding token, which decoders often lack.
        if len(inputs) == 1:
            made = {name: torch.tensor([values]) for name, values in inputs[0].items()}
        else:
            made = self.tokenizer.pad(list(inputs), return_tensors="pt")
        return {name: values.to(self.model.device) for name, values in made.items()}

    @property
    def can_pad(self) -> bool:
        """Whether model and tokenizer have a padding token."""
        of_model = getattr(self.model.config, "pad_token_id", None)
        return of_model is not None and self.tokenizer.pad_token_id is not None

    def check_max_length(self, reading: Reading) -> None:
        """Raise for a max_length without a token of a text, or beyond the model's positions."""
        if reading.max_length is None:
            return
        is_pair = reading.text_pair_column is not None
        # Tokenizers do not cut a text at all where its special tokens alone are too many.
        least = 1 + self.tokenizer.num_special_tokens_to_add(pair=is_pair)
        # Other positions, such as rotary ones, have no last one.
        is_table = any(
            isinstance(module, torch.nn.Embedding) and name.endswith(_TABLES)
            for name, module in self.model.named_modules()
        )
        most = self.positions if is_table else None
        given = reading.max_length
        way_out = "leave it out for the default"
        check(given >= least, f"max_length to be at least {least}", given, way_out)
        requirement = f"max_length to be at most {most}, the positions of the model"
        check(most is None or given <= most, requirement, given, way_out)

    @property
    def longest(self) -> int | None:
        """The largest number of tokens that the model can read; None if unknown."""
        limits = (self.tokenizer.model_max_length, self.positions)
        # A tokenizer without a limit has a huge one.
        known = [each for each in limits if each is not None and 0 < each < 1_000_000]
        return min(known, default=None)

    @property
    def positions(self) -> int | None:
        """The number of tokens that the model has positions for; None if unknown."""
        positions = getattr(self.model.config, "max_position_embeddings", None)
        if positions is None:
            return None
        # RoBERTa and similar models count the positions of a text from behind the padding token's.
        reserved = [0]
        for name, module in self.model.named_modules():
            padding = getattr(module, "padding_idx", None)
            if name.endswith("position_embeddings") and padding is not None:
                reserved.append(padding + 1)
        return positions - max(reserved)

    def served(self, rows: Dataset, reading: Reading, *, name: str) -> Served:
        """Return texts (pairs as dicts), cut as here; a plain pipeline gets rendered prompts."""
        texts = _texts(rows, reading)
        limit = self.limit(reading)
        batch = self.batch(self.tokenize(texts if self.can_pad else texts[:1], limit))
        inputs = [text if isinstance(text, str) else text._asdict() for text in texts]
        # A plain pipeline knows no prompts, and adds the special tokens of a chat again.
        plain = inputs
        call: dict[str, Any] = {"truncation": limit is not None, "max_length": limit}
        if self.prompt is not None:
            plain = [text for text, _ in self._prompts(self.prompt, texts, limit)]
            call["add_special_tokens"] = not self.prompt.chat
        return Served(inputs, plain, batch, {"top_k": None}, call)

    def identities(
        self, rows: Dataset, reading: Reading, *, name: str
    ) -> Iterable[Any]:
        """Return the texts."""
        return _texts(rows, reading)


def _vocabulary(model: Any) -> int:
    """The size of a model's vocabulary; 0 if its config does not have it."""
    return getattr(model.config.get_text_config(), "vocab_size", None) or 0


def _parts(text: Any) -> tuple[str, ...]:
    return (text,) if isinstance(text, str) else tuple(text)


def _texts(rows: Dataset, reading: Reading) -> list[Any]:
    """The texts or the pairs of texts."""
    first = _column_of_texts(rows, "text_column", reading.text_column)
    if reading.text_pair_column is None:
        return first
    second = _column_of_texts(rows, "text_pair_column", reading.text_pair_column)
    return list(map(Pair, first, second))


def _notes_on_blank(texts: Sequence[Any]) -> list[str]:
    """A sentence on blank texts, which are read like any others; none without such texts."""
    blank = [i for i, text in enumerate(texts) if not all(map(str.strip, _parts(text)))]
    if not blank:
        return []
    which = f"{len(blank):,} of {len(texts):,} texts are empty"
    return [f"{which}, the first in row {blank[0]}."]


def _column_of_texts(rows: Dataset, argument: str, column: str) -> list[str]:
    texts = column_of(rows, argument, column).to_pylist()
    if not all(isinstance(text, str) for text in texts):
        got = rows.features[column]
        way_out = f"choose another {argument}"
        raise InputTypeError(expected(f"column {column!r}", "hold texts", got, way_out))
    return texts


class OneLogitClassifier(TextClassifier):
    """A sequence classifier with one logit, whose sigmoid is a probability, such as a reranker."""

    @staticmethod
    def load_processing(
        source: str | Path, model: Any, *, trust_remote_code: bool
    ) -> Any:
        """Load the tokenizer, and set the model's problem type to a sigmoid, as in pipelines."""
        # transformers would train such a model by regression, but pipelines show its sigmoid.
        if model.config.problem_type is None:
            model.config.problem_type = "multi_label_classification"
        return TextClassifier.load_processing(
            source, model, trust_remote_code=trust_remote_code
        )

    def read_labels(self, rows: Dataset, reading: Reading, name: str) -> NDArray[Any]:
        """Return labels (N, 1) of 0 and 1."""
        if reading.label_columns or reading.label_separator or reading.no_label:
            return super().read_labels(rows, reading, name)
        column = reading.label_column
        values = column_of(rows, "label_column", column).to_pylist()
        wrong = [row for row, value in enumerate(values) if value not in (0, 1)]
        if wrong:
            row = wrong[0]
            got = f"{values[row]!r} in row {row} ({counted(len(wrong), 'such row')})"
            way_out = "a model with one logit has one probability: "
            way_out += "write 1 where it should be high, and else 0"
            check(False, f"column {column!r} to hold 0 and 1", got, way_out)
        return np.array(values, dtype=np.float32)[:, None]
