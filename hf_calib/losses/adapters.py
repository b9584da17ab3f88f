"""Losses in the CrossEncoderTrainer of sentence-transformers, which hands texts to a loss, not logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_calib._errors import InputTypeError, expected
from hf_calib.losses.loss import check_loss


class for_cross_encoder(torch.nn.Module):  # noqa: N801, it is used as a function
    """A calibration loss for `sentence_transformers`' CrossEncoderTrainer, in the place of its own losses.

    `CrossEncoderTrainer(model, ..., loss=for_cross_encoder(model, focal(gamma=2.0)))`. With one logit the loss is that
    of a sigmoid, and labels are 0 and 1; with several that of a softmax, and labels are class indices.

    Args:
        model: the `CrossEncoder` that is trained.
        loss: from `hf_calib.losses`.
    """

    def __init__(self, model: Any, loss: Any) -> None:
        super().__init__()
        check_loss(loss)
        if not (hasattr(model, "preprocess") and hasattr(model, "num_labels")):
            way_out = "pass the sentence_transformers.CrossEncoder; other logits go to the loss itself"
            raise InputTypeError(expected("model", "be a CrossEncoder", type(model).__name__, way_out))
        self.has_sigmoid = model.num_labels == 1
        if self.has_sigmoid:
            loss.check_multi_label()
        self.model = model
        self.loss = loss

    def forward(self, inputs: Sequence[Sequence[str]], labels: Tensor, **options: Any) -> Tensor:
        """Compute the mean loss, in nats, of columns of texts; the options, prompt and task, are the model's."""
        features = self.model.preprocess(list(zip(*inputs, strict=True)), **options)
        on_device = {k: f.to(self.model.device) if isinstance(f, Tensor) else f for k, f in features.items()}
        scores = self.model(on_device)["scores"]
        rows = labels.view(-1)
        return self.loss(scores, rows.to(scores.dtype)[:, None] if self.has_sigmoid else rows.long())
