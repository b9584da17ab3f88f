"""Losses of causal language models for any training loop,
which shift the labels rather than the logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_calib._errors import InputTypeError, check, expected
from hf_calib.losses import CalibrationLoss, logits_of
from hf_calib.losses.loss import check_loss
from hf_calib.losses.statistics.definitions import IGNORE_INDEX


class for_causal_lm(torch.nn.Module):  # noqa: N801, it is used as a function
    """A calibration loss for causal language models, whose logits at a position predict the next
    token.

    Use it as `compute_loss_func` of a Trainer, or in any loop; `CalibrationTrainer` shifts labels
    by itself.

    Args:
        loss: a loss of `hf_calib.losses`.

    Raises:
        ValueError: if the loss couples the batch, because its penalty would cover the tokens of one
            micro-batch.

    >>> from hf_calib.losses import cross_entropy
    >>> logits, labels = torch.randn(2, 5, 11), torch.randint(11, (2, 5))
    >>> ours = for_causal_lm(cross_entropy())(logits, labels)
    >>> shifted = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    >>> torch.allclose(ours, shifted)
    True
    """

    def __init__(self, loss: CalibrationLoss) -> None:
        super().__init__()
        check_loss(loss)
        way_out = "use a loss with a value per token, such as focal"
        check(
            not loss.couples_batch,
            "loss to have a value per token",
            repr(loss.name),
            way_out,
        )
        self.loss = loss

    def forward(
        self,
        outputs: Any,
        labels: Tensor | None = None,
        *,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
    ) -> Tensor:
        """Compute the loss.

        Args:
            outputs: the model's outputs, or its logits (B, L, V).
            labels: (B, L) token ids of the inputs' length, not shifted, -100 for tokens without
                loss.
            shift_labels: already shifted labels (B, L) instead of `labels`, as in sequence
                parallelism.
            num_items_in_batch: divisor of the sum, from the Trainer; by default the number of
                tokens with loss.

        Returns:
            A scalar, in nats.
        """
        if (labels is None) == (shift_labels is None):
            got = "neither" if labels is None else "both"
            raise InputTypeError(
                expected("labels or shift_labels", "be given", got, "pass one of them")
            )
        logits = logits_of(outputs)
        # The labels are shifted, because shifting the logits would copy them.
        wanted: Any = (
            shift_labels
            if labels is None
            else pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
        )
        got = f"{tuple(logits.shape)} and {tuple(wanted.shape)}"
        fits = logits.dim() == 3 and wanted.shape == logits.shape[:2]
        way_out = "pass the labels as long as the inputs"
        check(fits, "logits and labels to be (B, L, V) and (B, L)", got, way_out)
        count = (
            self.loss.normalizer(wanted)
            if num_items_in_batch is None
            else num_items_in_batch
        )
        return self.loss(logits, wanted, num_items_in_batch=count)
