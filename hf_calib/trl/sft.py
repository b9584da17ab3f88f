"""Supervised fine-tuning by TRL with a calibration loss, through TRL's own fused head."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from trl import SFTConfig, SFTTrainer
from trl.trainer.utils import add_fused_lm_head

from hf_calib._errors import InputTypeError, InputValueError, expected
from hf_calib.losses import AdaptiveLoss, CalibrationLoss, make_loss
from hf_calib.trainer.config import CalibrationConfig, read_mapping

_FIELDS = CalibrationConfig.__dataclass_fields__
_STATISTICS = ("log_probs", "entropy", "is_top1")  # that TRL's head keeps for its own loss and metrics


@dataclass
class CalibrationSFTConfig(SFTConfig):
    """Arguments of `CalibrationSFTTrainer`: those of TRL's `SFTConfig`, plus the loss.

    Args:
        loss: a name in `LOSSES`.
        loss_kwargs: its hyperparameters.

    Raises:
        ValueError: for an unknown loss or hyperparameter, or a loss that TRL's head does not keep enough for; with the
            way out.

    Notes:
        TRL's head never makes the logits. Of each token it keeps the log-probability and the entropy, with gradients,
        and the sum of squared probabilities, without. So cross entropy, focal, inverse focal, FLSD, their gradient
        forms, entropy regularisation and BSCE-GRA train here; label smoothing, the dual focal losses, the logit norm,
        Brier, BSCE and FCL need more, and losses that couple the batch have no value per token.

    Example::

        args = CalibrationSFTConfig("out", loss="focal", loss_kwargs={"gamma": 2.0})
    """

    loss: str = field(default="cross_entropy", metadata=dict(_FIELDS["loss"].metadata))
    loss_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata=dict(_FIELDS["loss_kwargs"].metadata)
    )

    def __post_init__(self) -> None:
        self.loss_kwargs = read_mapping(self.loss_kwargs)
        loss = self.make_loss()
        check_fused(loss)
        if loss.name != "cross_entropy":
            if self.loss_type == "dft":
                way_out = "leave loss_type out"
                raise InputValueError(
                    expected("loss_type", f"be 'nll' for loss {loss.name!r}", "'dft'", way_out)
                )
            if self.label_smoothing_factor:
                got = f"{self.label_smoothing_factor} with loss={loss.name!r}"
                raise InputValueError(
                    expected(
                        "label_smoothing_factor", "be 0 beside another loss", got, "leave one of them out"
                    )
                )
        super().__post_init__()

    def make_loss(self) -> CalibrationLoss:
        """The loss that this describes."""
        return make_loss(self.loss, **(read_mapping(self.loss_kwargs) or {}))


class CalibrationSFTTrainer(SFTTrainer):
    """TRL's `SFTTrainer` with the loss that `args.loss` names; everything else is TRL's own.

    The shift of the labels, completion-only and assistant-only masks, packing, padding-free batches, accumulation,
    several processes, PEFT and TRL's metrics stay as they are: the model's call is wrapped, and TRL's loss is then the
    calibration loss of what its fused head keeps of each token. With cross entropy it is the stock trainer.

    Args:
        model: as for `SFTTrainer`.
        args: `CalibrationSFTConfig`.
        **kwargs: the other arguments of `SFTTrainer`.

    Raises:
        TypeError: if args are not `CalibrationSFTConfig`.
        ValueError: if there is a `compute_loss_func` beside the loss.

    Notes:
        Evaluations report the loss as `eval_loss`. For calibration metrics and a map of a classifier, make one of the
        trained model (`hf_calib.language_models.label_token_classifier`) and calibrate it.

    Example::

        trainer = CalibrationSFTTrainer(
            "Qwen/Qwen3-0.6B", CalibrationSFTConfig("out", loss="focal"), train_dataset=rows
        )
        trainer.train()
    """

    def __init__(self, model: Any, args: CalibrationSFTConfig | None = None, **kwargs: Any) -> None:
        if not isinstance(args, CalibrationSFTConfig):
            way_out = 'pass CalibrationSFTConfig("out", loss="focal")'
            raise InputTypeError(expected("args", "be a CalibrationSFTConfig", type(args).__name__, way_out))
        loss = args.make_loss()
        if kwargs.get("compute_loss_func") is not None and loss.name != "cross_entropy":
            way_out = "leave one of them out"
            raise InputValueError(
                expected("compute_loss_func", f"be None beside {loss.name!r}", "one", way_out)
            )
        super().__init__(model, args, **kwargs)
        self.calibration_loss = loss
        if _reads_squares(loss):
            base = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
            add_fused_lm_head(base, outputs=(*_STATISTICS, "log_sum_sq_probs"))

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """TRL's own, of a model whose log-probabilities are minus the loss of each token."""
        if self.calibration_loss.name != "cross_entropy":
            model = _WithLoss(model, self.calibration_loss)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


class _WithLoss:
    """A model's call, whose fused outputs have minus the loss in the place of the log-probabilities."""

    def __init__(self, model: Any, loss: CalibrationLoss) -> None:
        self._model = model
        self._loss = loss

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self._model(*args, **kwargs)
        if not kwargs.get("fused_lm_head"):
            return outputs
        mask = outputs.label_mask
        rows = self._loss.from_log_probs(
            outputs.log_probs,
            entropy=outputs.entropy,
            log_sum_sq_probs=outputs.log_sum_sq_probs,
            mask=mask,
            reduction="none",
        )
        count = kwargs.get("num_items_in_batch")
        whole = rows.sum() / (mask.sum().clamp_min(1) if count is None else count)
        if outputs.aux_loss is not None:  # which the stock output has in its loss
            coefficient = getattr(self._model.config.get_text_config(), "router_aux_loss_coef", 0.0)
            whole = whole + coefficient * outputs.aux_loss
        return replace(outputs, log_probs=-rows, loss=whole)


def check_fused(loss: CalibrationLoss) -> None:
    """Refuse a loss that TRL's head does not keep enough for, before anything is loaded.

    Raises:
        ValueError: by the name of the loss, with the way out.
    """
    if isinstance(loss, AdaptiveLoss):
        way_out = "use CalibrationTrainer, which updates its gammas from held-out predictions"
        raise InputValueError(
            expected("loss", "train without held-out predictions", repr(loss.name), way_out)
        )
    kept = torch.zeros(1, requires_grad=True)
    loss.from_log_probs(kept, entropy=kept, log_sum_sq_probs=_without_gradient())


def _without_gradient() -> Tensor:
    return torch.zeros(1)


def _reads_squares(loss: CalibrationLoss) -> bool:
    """Whether it reads the sum of squared probabilities, which TRL's head keeps when it is asked to."""
    kept = torch.zeros(1)
    try:
        loss.from_log_probs(kept, entropy=kept)
    except InputValueError:
        return True
    return False
