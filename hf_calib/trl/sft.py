"""TRL's supervised fine-tuning with a calibration loss, through TRL's fused head."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import wraps
from types import MethodType
from typing import Any

import torch
from trl import SFTConfig, SFTTrainer
from trl.trainer.utils import add_fused_lm_head

from hf_calib._errors import InputTypeError, InputValueError, check, expected
from hf_calib.language_models.label_tokens import without_adapters
from hf_calib.losses import AdaptiveLoss, CalibrationLoss, make_loss
from hf_calib.losses.loss import over_items
from hf_calib.trainer.config import documented, read_mapping


@documented
@dataclass
class CalibrationSFTConfig(SFTConfig):
    """Arguments of `CalibrationSFTTrainer`: those of TRL's `SFTConfig`, plus the loss.

    Args:
        loss: Name of the loss in hf_calib.losses.LOSSES.
        loss_kwargs: Hyperparameters of the loss, as JSON: '{"gamma": 3.0}'.

    Raises:
        ValueError: if the loss or a hyperparameter is unknown, or the loss needs more than TRL's
            head keeps.

    Notes:
        TRL's head never stores the logits. For each token it keeps the log-probability and the
        entropy, with gradients, and the sum of squared probabilities, without. Therefore cross
        entropy, focal, inverse focal, FLSD, their gradient forms, entropy regularisation, BSCE-GRA,
        DFT and the power loss are supported. The other losses need more, or have no value per
        token.
    """

    loss: str = "cross_entropy"
    loss_kwargs: dict[str, Any] | str | None = None

    def __post_init__(self) -> None:
        self.loss_kwargs = read_mapping(self.loss_kwargs)
        loss = self.make_loss()
        # It raises if TRL's head keeps too little for this loss.
        reads_squares(loss)
        is_stock = loss.name == "cross_entropy"
        # Both options would replace the loss of a token.
        requirement = f"loss_type to be 'nll' for loss {loss.name!r}"
        check(
            is_stock or self.loss_type != "dft",
            requirement,
            "'dft'",
            "leave loss_type out",
        )
        got = f"{self.label_smoothing_factor} with loss={loss.name!r}"
        requirement = "label_smoothing_factor to be 0 with another loss"
        check(
            is_stock or not self.label_smoothing_factor,
            requirement,
            got,
            "leave one of them out",
        )
        super().__post_init__()

    def make_loss(self) -> CalibrationLoss:
        """Return the configured loss."""
        return make_loss(self.loss, **(read_mapping(self.loss_kwargs) or {}))


class CalibrationSFTTrainer(SFTTrainer):
    """TRL's `SFTTrainer` with the loss named by `args.loss`; everything else is unchanged.

    TRL's fused head returns minus the calibration loss of each token instead of its
    log-probability. The shift of the labels, completion-only and assistant-only masks, packing,
    padding-free batches, accumulation, several processes, PEFT and TRL's metrics work as in the
    stock trainer, and with cross entropy it is the stock trainer.

    Args:
        model: as in `SFTTrainer`.
        args: `CalibrationSFTConfig`.
        **kwargs: the other arguments of `SFTTrainer`.

    Raises:
        TypeError: if args are not `CalibrationSFTConfig`.
        ValueError: if there is also a `compute_loss_func`.

    Notes:
        Evaluations report the loss as `eval_loss`. For calibration metrics and a calibrator, make a
        classifier of the trained model (`hf_calib.language_models.label_token_classifier`) and
        calibrate it.

    Example::

        args = CalibrationSFTConfig("out", loss="focal", loss_kwargs={"gamma": 2.0})
        CalibrationSFTTrainer("Qwen/Qwen3-0.6B", args, train_dataset=rows).train()
    """

    def __init__(
        self, model: Any, args: CalibrationSFTConfig | None = None, **kwargs: Any
    ) -> None:
        if not isinstance(args, CalibrationSFTConfig):
            way_out = 'pass CalibrationSFTConfig("out", loss="focal")'
            raise InputTypeError(
                expected(
                    "args", "be a CalibrationSFTConfig", type(args).__name__, way_out
                )
            )
        loss = args.make_loss()
        is_stock = loss.name == "cross_entropy"
        is_alone = is_stock or kwargs.get("compute_loss_func") is None
        check(
            is_alone,
            f"compute_loss_func to be None with {loss.name!r}",
            "one",
            "leave one of them out",
        )
        super().__init__(model, args, **kwargs)
        self.calibration_loss = loss
        if not is_stock:
            # TRL's head is in the model below the adapters.
            _put_into_head(without_adapters(self.model), loss)


def reads_squares(loss: CalibrationLoss) -> bool:
    """Return whether a loss reads the sum of squared probabilities;
    raise if it needs more than TRL's head keeps.
    """
    way_out = (
        "use CalibrationTrainer, which updates its gammas from held-out predictions"
    )
    is_fixed = not isinstance(loss, AdaptiveLoss)
    check(
        is_fixed, "loss to train without held-out predictions", repr(loss.name), way_out
    )
    # The loss is tried on one token. TRL's sum of squares has no gradient, unlike the
    # others.
    kept = torch.zeros(1, requires_grad=True)
    loss.from_log_probs(kept, entropy=kept, log_sum_sq_probs=torch.zeros(1))
    with suppress(InputValueError):
        loss.from_log_probs(kept, entropy=kept)
        return False
    return True


def _put_into_head(model: Any, loss: CalibrationLoss) -> None:
    """Change the model's fused head of TRL so that it returns minus the loss instead of
    log-probabilities.
    """
    if reads_squares(loss):
        # The trainer has asked its head for the first three only.
        add_fused_lm_head(
            model, outputs=("log_probs", "entropy", "is_top1", "log_sum_sq_probs")
        )
    fused = model.forward

    # `generate` reads from the signature which arguments the model takes.
    @wraps(type(model).forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = fused(*args, **kwargs)
        # These outputs have logits, as for generation.
        if not kwargs.get("fused_lm_head"):
            return outputs
        mask = outputs.label_mask
        kept = {
            "entropy": outputs.entropy,
            "log_sum_sq_probs": outputs.log_sum_sq_probs,
        }
        rows = loss.from_log_probs(
            outputs.log_probs, **kept, mask=mask, reduction="none"
        )
        count = kwargs.get("num_items_in_batch")
        count = mask.sum() if count is None else count
        # The stock loss may have a term of experts.
        more = over_items((rows + outputs.log_probs).sum(), count)
        return replace(outputs, log_probs=-rows, loss=outputs.loss + more)

    model.forward = MethodType(forward, model)
