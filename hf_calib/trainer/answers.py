"""The answers of a judge: of a language model's next tokens, a few options at one position of each row."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_calib._errors import InputValueError, expected
from hf_calib.language_models.label_tokens import label_token_ids
from hf_calib.losses.statistics.definitions import IGNORE_INDEX
from hf_calib.trainer.checks import Labels, predicts_next_token


class AnswerOptions:
    """Reads classes off token labels, and their logits off a language model at the answers' positions.

    Args:
        model: a causal language model, also with adapters.
        tokenizer: its tokenizer.
        texts: of the options, one token each, as they follow a prompt.

    Raises:
        ValueError: if the model is no causal language model, there is no tokenizer, or an option is no single token.
    """

    def __init__(self, model: Any, tokenizer: Any, texts: Sequence[str]) -> None:
        if not predicts_next_token(model):
            way_out = "load it with AutoModelForCausalLM, or leave answer_options out"
            got = type(model).__name__
            raise InputValueError(
                expected("the model", "be a causal language model for answer_options", got, way_out)
            )
        if not callable(tokenizer):
            way_out = "pass processing_class=tokenizer to the trainer"
            raise InputValueError(
                expected("processing_class", "be a tokenizer for answer_options", repr(tokenizer), way_out)
            )
        self.names = [text.strip() for text in texts]
        self.tokens = label_token_ids(tokenizer, dict(zip(self.names, texts, strict=True)))
        plain = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._keeps_positions = "logits_to_keep" in inspect.signature(plain.forward).parameters

    def classes(self, labels: Tensor) -> Tensor:
        """(N,) the option of each row, from labels (N, L) of tokens; -100 where the row has none.

        Raises:
            ValueError: if a row has several labels, or one that is no option.
        """
        counted = labels != IGNORE_INDEX
        answered = counted.any(dim=1)
        at_answer = labels.gather(1, self._places(labels)[:, None])
        is_option = at_answer == torch.tensor(self.tokens, device=labels.device)
        if bool((counted.sum(dim=1) > 1).any() | (answered & ~is_option.any(dim=1)).any()):
            raise InputValueError(self._not_one(labels[counted.sum(dim=1) > 0].tolist(), "a batch"))
        return torch.where(answered, is_option.long().argmax(dim=1), IGNORE_INDEX)

    def logits(self, model: Any, inputs: dict[str, Any], labels: Tensor) -> Tensor:
        """(N, K) the options' logits before the answer of each row; the model makes no others where it can.

        Raises:
            ValueError: if an answer is the first token of its row.
        """
        places = self._places(labels) - 1
        if bool(((places < 0) & (labels != IGNORE_INDEX).any(dim=1)).any()):
            raise InputValueError(
                expected("the answer", "follow a prompt", "one that is a row's first token", "add prompts")
            )
        places = places.clamp_min(0)
        if self._keeps_positions:
            kept, places = places.unique(return_inverse=True)
            inputs = {**inputs, "logits_to_keep": kept}
        outputs = model(**inputs)
        rows = torch.arange(len(labels), device=places.device)
        return outputs.logits[rows, places][:, self.tokens]

    def check(self, labels: Labels | None, role: str) -> None:
        """Refuse a split that has not one option's token as the label of each row, before any training.

        Raises:
            ValueError: naming a row.
        """
        if labels is None or labels.values.dtype.kind not in "iu":
            return
        counted = labels.values != IGNORE_INDEX
        values, rows = labels.values[counted], labels.rows[counted]
        wrong = ~np.isin(values, self.tokens)
        wrong[1:] |= rows[1:] == rows[:-1]
        if wrong.any():
            row = rows[np.argmax(wrong)]
            raise InputValueError(
                self._not_one([values[rows == row].tolist()], f"row {row} of the {role} split")
            )

    def _not_one(self, found: list[Any], where: str) -> str:
        options = ", ".join(
            f"{token} ({name!r})" for token, name in zip(self.tokens, self.names, strict=True)
        )
        way_out = "set the labels of all other tokens to -100"
        got = f"{str(found[:2])[:200]} in {where}"
        return expected("labels", f"have one token a row, of {options}", got, way_out)

    @staticmethod
    def _places(labels: Tensor) -> Tensor:
        """(N,) the first position with a label, 0 where there is none."""
        return (labels != IGNORE_INDEX).long().argmax(dim=1)
