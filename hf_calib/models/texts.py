"""Classifiers of texts: tokenized, checked, and run in batches of similar length."""

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

from hf_calib._errors import InputTypeError, InputValueError, expected
from hf_calib.models.classifier import Classifier, Encoded, Progress
from hf_calib.models.labels import column_of
from hf_calib.models.loading import refusals
from hf_calib.models.prompts import PromptTemplate
from hf_calib.models.reading import Reading

# A folder without a tokenizer gets one from transformers that knows 5 special tokens and no word.
_LEAST_VOCABULARY = 0.5  # of the model's
_MOST_UNKNOWN = 0.5  # of the tokens
_ROWS_CHECKED = 10_000
_SAVE_ITS_TOKENIZER = "save the tokenizer that the model was trained with into the model's folder"


class Pair(NamedTuple):
    """Two texts that a model reads as one input."""

    text: str
    text_pair: str


class TextClassifier(Classifier):
    """A sequence classifier of texts, or of pairs of them, and its tokenizer."""

    @staticmethod
    def load_processing(source: str | Path, model: Any, *, trust_remote_code: bool) -> Any:
        """The tokenizer, which has to know the model's vocabulary."""
        with refusals("the model", "be loadable", source, _SAVE_ITS_TOKENIZER):
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
        known = len(tokenizer)
        needed = getattr(model.config.get_text_config(), "vocab_size", None) or 0
        if known < _LEAST_VOCABULARY * needed:
            got = f"one of {known:,} tokens, for a model that has {needed:,}"
            raise InputValueError(expected("the model", "come with its tokenizer", got, _SAVE_ITS_TOKENIZER))
        return tokenizer

    @property
    def tokenizer(self) -> Any:
        """The processing class by its own name."""
        return self.processing_class

    def tokenize(
        self, texts: Sequence[str] | Sequence[Pair], max_length: int | None = None
    ) -> list[dict[str, list[int]]]:
        """Token ids and what goes with them, truncated to max_length, by default what the model can read."""
        limit = max_length or self.longest
        if self.prompt is not None:
            return [
                {"input_ids": ids, "attention_mask": [1] * len(ids)} for _, ids in self._prompts(texts, limit)
            ]
        columns = [texts] if isinstance(texts[0], str) else zip(*texts, strict=True)
        encoded = self.tokenizer(*map(list, columns), truncation=limit is not None, max_length=limit)
        return [dict(zip(encoded, row, strict=True)) for row in zip(*encoded.values(), strict=True)]

    @property
    def prompt(self) -> PromptTemplate | None:
        """How a text becomes the model's input, of a language model's option tokens; None for other models."""
        return PromptTemplate.of(self.model.config)

    def _prompts(self, texts: Sequence[Any], limit: int | None) -> list[tuple[str, list[int]]]:
        """Rendered, with their tokens, which must not end with the padding token: the logits before it are read."""
        prompt = self.prompt
        assert prompt is not None
        made = []
        for i, text in enumerate(texts):
            parts = (text,) if isinstance(text, str) else tuple(text)
            made.append(prompt.fitting(*parts, tokenizer=self.tokenizer, max_length=limit))
            if made[-1][1] and made[-1][1][-1] == self.model.config.get_text_config().pad_token_id:
                got = f"{self.tokenizer.decode(made[-1][1][-1:])!r} at the end of row {i}"
                way_out = "set another padding token, or write ends_with into the prompt"
                raise InputValueError(
                    expected("a prompt", "end with a token that is no padding", got, way_out)
                )
        return made

    def encode_inputs(self, rows: Dataset, reading: Reading, *, name: str) -> Encoded:
        """Check and tokenize texts, whose labels are not read."""
        _check_rows(rows, reading.max_length)
        texts = _texts(rows, reading)
        tokens = self.tokenize(texts, reading.max_length)
        empty = [i for i, row in enumerate(tokens) if not row["input_ids"]]
        if empty:
            got = f"none in {len(empty)} of {len(tokens)} rows (first in row {empty[0]})"
            raise InputValueError(expected("texts", "have at least one token", got, "remove these rows"))
        check_known_words(self, tokens)
        return Encoded(tokens, note=_note_on_empty(texts))

    def encode(self, rows: Dataset, reading: Reading, *, name: str, labelled: bool = True) -> Encoded:
        """Check and tokenize texts."""
        _check_rows(rows, reading.max_length)
        return super().encode(rows, reading, name=name, labelled=labelled)

    def logits(
        self, encoded: Encoded, *, batch_size: int = 32, on_progress: Progress | None = None
    ) -> NDArray[np.float32]:
        """(N, C) of the texts, in their order."""
        tokens = encoded.inputs
        logits = np.empty((len(tokens), len(self.class_names)), dtype=np.float32)
        for chunk in self.chunks(tokens, batch_size, on_progress):
            logits[chunk] = self.run(self.batch([tokens[i] for i in chunk]))
        return logits

    def chunks(
        self, rows: Sequence[Any], batch_size: int, on_progress: Progress | None
    ) -> Iterable[NDArray[Any]]:
        """Row numbers of similar lengths, longest first: a batch that does not fit in memory fails at once."""
        order = np.argsort([-len(row["input_ids"]) for row in rows], kind="stable")
        size = batch_size if self.can_pad else 1
        for chunk in np.array_split(order, math.ceil(len(order) / size)):
            yield chunk
            if on_progress is not None:
                on_progress(len(chunk), len(order))

    def batch(self, inputs: Sequence[dict[str, list[int]]]) -> dict[str, Tensor]:
        """Padded tensors on the model's device."""
        if len(inputs) == 1:  # needs no padding token, which decoders often lack
            made = {name: torch.tensor([values]) for name, values in inputs[0].items()}
        else:
            made = self.tokenizer.pad(list(inputs), return_tensors="pt")
        return {name: values.to(self.model.device) for name, values in made.items()}

    @property
    def can_pad(self) -> bool:
        """Whether both model and tokenizer know a padding token."""
        return None not in (self.tokenizer.pad_token_id, getattr(self.model.config, "pad_token_id", None))

    def as_served(self, rows: Dataset, n: int, reading: Reading, *, name: str) -> list[Any]:
        """The first n texts, of pairs as dicts."""
        texts = _texts(rows.select(range(min(n, len(rows)))), reading)
        return [text if isinstance(text, str) else text._asdict() for text in texts]

    def for_plain_pipeline(self, served: Sequence[Any], reading: Reading) -> list[Any]:
        """What a plain pipeline has to be given: rendered prompts, where the model has one."""
        if self.prompt is None:
            return list(served)
        texts = [text if isinstance(text, str) else Pair(**text) for text in served]
        return [prompt for prompt, _ in self._prompts(texts, reading.max_length or self.longest)]

    def served_batch(self, served: Sequence[Any], reading: Reading) -> dict[str, Tensor]:
        """The texts, or the first where the model cannot pad."""
        texts: list[Any] = [text if isinstance(text, str) else Pair(**text) for text in served]
        return self.batch(self.tokenize(texts if self.can_pad else texts[:1], reading.max_length))

    def serving_options(self, folder: Path, reading: Reading) -> tuple[dict[str, Any], dict[str, Any]]:
        """All scores, of texts that are cut as here."""
        cut = reading.max_length or self.longest
        options: dict[str, Any] = {"truncation": cut is not None, "max_length": cut}
        if self.prompt is not None:
            options["add_special_tokens"] = not self.prompt.chat
        return {"top_k": None}, options

    def identities(self, rows: Dataset, reading: Reading, *, name: str) -> Iterable[Any]:
        """The texts."""
        return _texts(rows, reading)

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


def _note_on_empty(texts: Sequence[Any]) -> str | None:
    """Texts of nothing but blanks are read as any other; whoever reads the report should know."""
    parts = [[text] if isinstance(text, str) else text for text in texts]
    empty = [i for i, each in enumerate(parts) if not all(part.strip() for part in each)]
    if not empty:
        return None
    return f"{len(empty):,} of {len(texts):,} texts are empty, the first in row {empty[0]}."


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


def _texts(rows: Dataset, reading: Reading) -> list[Any]:
    """The texts, or the pairs of texts."""
    firsts = _texts_of(rows, "text_column", reading.text_column)
    if reading.text_pair_column is None:
        return firsts
    return list(map(Pair, firsts, _texts_of(rows, "text_pair_column", reading.text_pair_column)))


def _texts_of(rows: Dataset, argument: str, column: str) -> list[str]:
    texts = column_of(rows, argument, column).to_pylist()
    if not all(isinstance(text, str) for text in texts):
        got = rows.features[column]
        raise InputTypeError(expected(f"column {column!r}", "hold texts", got, f"choose another {argument}"))
    return texts
