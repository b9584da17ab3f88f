"""Outputs of a causal language model: labels that were not shifted are noticed."""

from __future__ import annotations

import warnings

import pytest
import torch
from transformers.modeling_outputs import CausalLMOutput, TokenClassifierOutput

from hf_calib.losses import make_loss

LOGITS, LABELS = torch.randn(2, 5, 7), torch.randint(7, (2, 5))


@pytest.mark.parametrize("name", ["cross_entropy", "focal"])
def test_labels_as_long_as_the_logits_are_warned_of(name: str) -> None:
    with pytest.warns(
        UserWarning, match=r"learns to copy its input\. Use CalibrationTrainer, which shifts them, or"
    ):
        loss = make_loss(name)(CausalLMOutput(logits=LOGITS), LABELS)
    assert loss == make_loss(name)(LOGITS, LABELS)


def test_all_else_is_not() -> None:
    loss = make_loss("focal")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss(TokenClassifierOutput(logits=LOGITS), LABELS)
        loss(CausalLMOutput(logits=LOGITS).logits[:, :-1], LABELS[:, 1:])
