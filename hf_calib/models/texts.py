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
from hf_calib.models.classifier import Classifier, Encoded, Served, refusals
from hf_calib.models.prompts import KEY, PromptTemplate
from hf_calib.models.reading import Reading, column_of

# For a folder without a tokenizer, transformers makes one with 5 special tokens and no words.
_LEAST_VOCABULARY = 0.5  # As a fraction of the model's.
_MOST_UNKNOWN = 0.5  # As a fraction of the tokens.
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
        known, needed = len(tokenizer), _vocabulary(model)
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
        return (
            PromptTemplate.of(self.model.config)
            if hasattr(self.model.config, KEY)
            else None
        )

    def tokenize(
        self, texts: Sequence[str] | Sequence[Pair], max_length: int | None = None
    ) -> list[dict[str, list[int]]]:
        """Return token ids and further inputs, truncated to max_length, by default the model's limit."""
        return self._tokenize(texts, max_length or self.longest)

    def _tokenize(
        self, texts: Sequence[Any], limit: int | None
    ) -> list[dict[str, list[int]]]:
        """Token ids and further inputs, truncated to a limit or, if it is None, whole."""
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
            verbose=False,  # It warns of whole texts that are only counted.
        )
        return [
            dict(zip(encoded, row, strict=True))
            for row in zip(*encoded.values(), strict=True)
        ]

    def _prompts(
        self, prompt: PromptTemplate, texts: Sequence[Any], limit: int | None
    ) -> list[tuple[str, list[int]]]:
        """The rendered prompts with their tokens, which must not end with the padding token, because it is not read."""
        made = [
            prompt.fitting(*_parts(text), tokenizer=self.tokenizer, max_length=limit)
            for text in texts
        ]
        padding = self.model.config.get_text_config().pad_token_id
        ends = next(
            (i for i, (_, ids) in enumerate(made) if ids and ids[-1] == padding), None
        )
        got = (
            f"{self.tokenizer.decode([padding])!r} at the end of row {ends}"
            if ends is not None
            else ""
        )
        way_out = "set another padding token, or write ends_with into the prompt"
        check(
            ends is None,
            "a prompt to end with a token that is no padding",
            got,
            way_out,
        )
        return made

    def encode_inputs(self, rows: Dataset, reading: Reading, *, name: str) -> Encoded:
        """Check and tokenize texts."""
        reading.refuse("images", "image_column")
        self.check_max_length(reading)
        texts = _texts(rows, reading)
        tokens = self.tokenize(texts, reading.max_length)
        empty = [i for i, row in enumerate(tokens) if not row["input_ids"]]
        got = f"none in {len(empty)} of {len(tokens)} rows (first in row {sum(empty[:1])})"
        check(not empty, "texts to have at least one token", got, "remove these rows")
        self.check_known_words(tokens)
        # Blank texts are read like any others, but the report says so.
        blank = [
            i
            for i, text in enumerate(texts)
            if not all(part.strip() for part in _parts(text))
        ]
        notes = []
        if blank:
            notes.append(
                f"{len(blank):,} of {len(texts):,} texts are empty, the first in row {blank[0]}."
            )
        limit = reading.max_length or self.longest
        n_cut = self._n_cut(texts, tokens, limit)
        if n_cut:
            notes.append(
                f"{n_cut:,} of {len(texts):,} texts were cut at {limit} tokens. A pipeline gives the same scores for "
                f"these if it is called with truncation=True, max_length={limit}."
            )
        cut_at = limit if n_cut else None
        return Encoded(tokens, note=" ".join(notes) or None, cut_at=cut_at)

    def _n_cut(
        self,
        texts: Sequence[Any],
        tokens: Sequence[dict[str, list[int]]],
        limit: int | None,
    ) -> int:
        """How many texts have more tokens than the limit."""
        if limit is None:
            return 0
        lengths = [len(row["input_ids"]) for row in tokens]
        # A prompt that was cut may be shorter than the limit.
        least = limit if self.prompt is None else 0
        at_limit = [i for i, length in enumerate(lengths) if length >= least]
        if not at_limit:
            return 0
        whole = self._tokenize([texts[i] for i in at_limit], None)
        return sum(
            len(row["input_ids"]) > lengths[i]
            for i, row in zip(at_limit, whole, strict=True)
        )

    def check_known_words(self, tokens: Sequence[dict[str, list[int]]]) -> None:
        """Raise if the tokenizer does not know the texts, or the model does not know its ids."""
        step = math.ceil(len(tokens) / _ROWS_CHECKED)
        ids = np.concatenate([np.asarray(row["input_ids"]) for row in tokens[::step]])
        needed = _vocabulary(self.model) or math.inf
        requirement = f"token ids to be below the model's {needed:,}"
        check(ids.max() < needed, requirement, ids.max(), _SAVE_ITS_TOKENIZER)
        unknown = self.tokenizer.unk_token_id
        words = ids[
            ~np.isin(ids, list(set(self.tokenizer.all_special_ids) - {unknown}))
        ]
        n_unknown = int(np.count_nonzero(words == unknown))
        got = (
            f"{n_unknown:,} unknown ones of {len(words):,}"
            if len(words)
            else "special tokens only"
        )
        way_out = f"{_SAVE_ITS_TOKENIZER}, or check the language of the texts"
        knows = len(words) > 0 and n_unknown <= _MOST_UNKNOWN * len(words)
        check(
            knows, "the tokens of the texts to be known to the tokenizer", got, way_out
        )

    def chunks(self, encoded: Encoded, batch_size: int) -> list[NDArray[np.intp]]:
        """Return batches of rows of similar length, longest first, so that one too large for memory fails at once."""
        order = np.argsort(
            [-len(row["input_ids"]) for row in encoded.inputs], kind="stable"
        )
        return np.array_split(
            order, math.ceil(len(order) / (batch_size if self.can_pad else 1))
        )

    def batch(self, inputs: Sequence[dict[str, list[int]]]) -> dict[str, Tensor]:
        """Return padded tensors on the model's device."""
        if (
            len(inputs) == 1
        ):  # One row needs no padding token, which decoders often lack.
            made = {name: torch.tensor([values]) for name, values in inputs[0].items()}
        else:
            made = self.tokenizer.pad(list(inputs), return_tensors="pt")
        return {name: values.to(self.model.device) for name, values in made.items()}

    @property
    def can_pad(self) -> bool:
        """Whether model and tokenizer have a padding token."""
        return None not in (
            self.tokenizer.pad_token_id,
            getattr(self.model.config, "pad_token_id", None),
        )

    def check_max_length(self, reading: Reading) -> None:
        """Raise for a max_length that leaves no token of a text, or for which the model has no positions."""
        if reading.max_length is None:
            return
        is_pair = reading.text_pair_column is not None
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
        return min(
            (limit for limit in limits if limit is not None and 0 < limit < 1_000_000),
            default=None,
        )

    @property
    def positions(self) -> int | None:
        """The number of tokens that the model has positions for; None if unknown."""
        positions = getattr(self.model.config, "max_position_embeddings", None)
        if positions is not None:
            # RoBERTa and similar models reserve positions: those of a text start after the padding token's.
            modules = self.model.named_modules()
            found = [
                getattr(each, "padding_idx", None)
                for name, each in modules
                if name.endswith("position_embeddings")
            ]
            positions -= max(
                (index + 1 for index in found if index is not None), default=0
            )
        return positions

    def served(self, rows: Dataset, reading: Reading, *, name: str) -> Served:
        """Return texts (pairs as dicts), truncated as here; a plain pipeline gets rendered prompts."""
        texts, cut = _texts(rows, reading), reading.max_length or self.longest
        inputs = [text if isinstance(text, str) else text._asdict() for text in texts]
        call: dict[str, Any] = {"truncation": cut is not None, "max_length": cut}
        plain, batch = (
            inputs,
            self.batch(self.tokenize(texts if self.can_pad else texts[:1], cut)),
        )
        if self.prompt is not None:
            plain = [prompt for prompt, _ in self._prompts(self.prompt, texts, cut)]
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
    columns = []
    for argument in ("text_column", "text_pair_column"):
        column = getattr(reading, argument)
        if column is not None:
            texts = column_of(rows, argument, column).to_pylist()
            if not all(isinstance(text, str) for text in texts):
                got, way_out = rows.features[column], f"choose another {argument}"
                raise InputTypeError(
                    expected(f"column {column!r}", "hold texts", got, way_out)
                )
            columns.append(texts)
    return columns[0] if len(columns) == 1 else list(map(Pair, *columns))


class OneLogitClassifier(TextClassifier):
    """A sequence classifier with one logit, whose sigmoid is a probability, such as a reranker or a toxicity score."""

    @staticmethod
    def load_processing(
        source: str | Path, model: Any, *, trust_remote_code: bool
    ) -> Any:
        """Load the tokenizer, and set the model's problem type to a sigmoid, as in pipelines."""
        if model.config.problem_type is None:
            model.config.problem_type = "multi_label_classification"
        return TextClassifier.load_processing(
            source, model, trust_remote_code=trust_remote_code
        )

    def read_labels(self, rows: Dataset, reading: Reading, name: str) -> NDArray[Any]:
        """Return labels (N, 1) of 0 and 1."""
        if reading.label_columns or reading.label_separator or reading.no_label:
            return super().read_labels(rows, reading, name)
        values = column_of(rows, "label_column", reading.label_column).to_pylist()
        wrong = [row for row, value in enumerate(values) if value not in (0, 1)]
        got = (
            f"{values[wrong[0]]!r} in row {wrong[0]} ({counted(len(wrong), 'such row')})"
            if wrong
            else ""
        )
        way_out = "a model with one logit has one probability: write 1 where it should be high, and else 0"
        check(
            not wrong, f"column {reading.label_column!r} to hold 0 and 1", got, way_out
        )
        return np.array(values, dtype=np.float32)[:, None]
