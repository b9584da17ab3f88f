"""The answers of a judge: of a language model's next tokens, a few options at one position of each row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_calib._errors import InputValueError, check, expected
from hf_calib.language_models.label_tokens import keeps_positions, option_tokens
from hf_calib.losses.statistics.definitions import IGNORE_INDEX
from hf_calib.trainer.labels import Labels, predicts_next_token

PLACES = "answer_places"  # in a batch: (N,) the position whose logits are for the answer


class AnswerOptions:
    """Reads classes off token labels, and their logits off a language model at the answers' positions."""

    def __init__(self, model: Any, tokenizer: Any, texts: Sequence[str]) -> None:
        requirement = "the model to be a causal language model for answer_options"
        way_out = "load it with AutoModelForCausalLM, or leave answer_options out"
        check(predicts_next_token(model), requirement, type(model).__name__, way_out)
        requirement = "processing_class to be a tokenizer for answer_options"
        way_out = "pass processing_class=tokenizer to the trainer"
        check(callable(tokenizer), requirement, repr(tokenizer), way_out)
        options = option_tokens(tokenizer, texts)
        self.names, self.tokens = list(options), list(options.values())
        self._keeps_positions = keeps_positions(model)

    def batch(self, collator: Callable[[Any], Any], rows: Any) -> dict[str, Any]:
        """A collated batch whose labels (N, L) of tokens have become the option of each row (N,), and its place."""
        batch = collator(rows)
        labels = batch["labels"]
        counted = labels != IGNORE_INDEX
        answered = counted.any(dim=1)
        places = counted.long().argmax(dim=1)  # the first position with a label, 0 where there is none
        is_option = labels.gather(1, places[:, None]) == torch.tensor(self.tokens)
        if (counted.sum(dim=1) > 1).any() or (answered & ~is_option.any(dim=1)).any():
            raise self._not_one(labels[answered].tolist(), "a batch")
        follow = not (answered & (places == 0)).any()
        check(follow, "the answer to follow a prompt", "one that is a row's first token", "add prompts")
        batch["labels"] = torch.where(answered, is_option.long().argmax(dim=1), IGNORE_INDEX)
        batch[PLACES] = (places - 1).clamp_min(0)
        return batch

    def logits(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """(N, K) the options' logits before the answer of each row; the model makes no others where it can."""
        inputs = dict(inputs)
        places = inputs.pop(PLACES)
        if self._keeps_positions:
            inputs["logits_to_keep"], places = places.unique(return_inverse=True)
        rows = torch.arange(len(places), device=places.device)
        return model(**inputs).logits[rows, places][:, self.tokens]

    def check(self, labels: Labels | None, role: str) -> None:
        """Refuse a split that has not one option's token as the label of each row, before any training."""
        if labels is None or labels.values.dtype.kind not in "iu":
            return
        counted = labels.values != IGNORE_INDEX
        values, rows = labels.values[counted], labels.rows[counted]
        wrong = ~np.isin(values, self.tokens)
        wrong[1:] |= rows[1:] == rows[:-1]
        if wrong.any():
            row = rows[np.argmax(wrong)]
            raise self._not_one([values[rows == row].tolist()], f"row {row} of the {role} split")

    def _not_one(self, found: list[Any], where: str) -> InputValueError:
        pairs = zip(self.tokens, self.names, strict=True)
        options = ", ".join(f"{token} ({name!r})" for token, name in pairs)
        got = f"{str(found[:2])[:200]} in {where}"
        way_out = "set the labels of all other tokens to -100"
        return InputValueError(expected("labels", f"have one token a row, of {options}", got, way_out))
