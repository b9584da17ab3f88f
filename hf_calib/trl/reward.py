"""Reward models by TRL with a calibration loss: chosen and rejected as two classes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from trl import RewardConfig, RewardTrainer

from hf_calib._errors import InputTypeError, InputValueError, expected
from hf_calib.losses import AdaptiveLoss, CalibrationLoss, make_loss
from hf_calib.trainer.config import CalibrationConfig, read_mapping

_FIELDS = CalibrationConfig.__dataclass_fields__


@dataclass
class CalibrationRewardConfig(RewardConfig):
    """Arguments of `CalibrationRewardTrainer`: those of TRL's `RewardConfig`, plus the loss.

    Args:
        loss: a name in `LOSSES`.
        loss_kwargs: its hyperparameters.

    Raises:
        ValueError: for an unknown loss or hyperparameter, or a loss that adapts to held-out predictions.

    Example::

        args = CalibrationRewardConfig("out", loss="focal", loss_kwargs={"gamma": 2.0})
    """

    loss: str = field(default="cross_entropy", metadata=dict(_FIELDS["loss"].metadata))
    loss_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata=dict(_FIELDS["loss_kwargs"].metadata)
    )

    def __post_init__(self) -> None:
        self.loss_kwargs = read_mapping(self.loss_kwargs)
        loss = self.make_loss()
        if isinstance(loss, AdaptiveLoss):
            way_out = "put hf_calib.trainer.CalibrationMixin over RewardTrainer, which updates its gammas"
            raise InputValueError(
                expected("loss", "train without held-out predictions", repr(loss.name), way_out)
            )
        super().__post_init__()

    def make_loss(self) -> CalibrationLoss:
        """The loss that this describes."""
        return make_loss(self.loss, **(read_mapping(self.loss_kwargs) or {}))


class CalibrationRewardTrainer(RewardTrainer):
    r"""TRL's `RewardTrainer` with the loss that `args.loss` names; everything else is TRL's own.

    The rewards of a pair are two logits, of which the chosen one is right: TRL's loss, -log sigmoid of their
    difference, is their cross entropy. Any loss of two classes takes its place. Margins, the centring term and TRL's
    metrics stay.

    $$L = \ell\left((r_{\text{chosen}} - m,\ r_{\text{rejected}}),\ 0\right)$$

    Args:
        model: as for `RewardTrainer`.
        args: `CalibrationRewardConfig`.
        **kwargs: the other arguments of `RewardTrainer`.

    Raises:
        TypeError: if args are not `CalibrationRewardConfig`.

    Example::

        trainer = CalibrationRewardTrainer(
            "Qwen/Qwen3-0.6B", CalibrationRewardConfig("out", loss="focal"), train_dataset=pairs
        )
        trainer.train()
    """

    def __init__(self, model: Any, args: CalibrationRewardConfig | None = None, **kwargs: Any) -> None:
        if not isinstance(args, CalibrationRewardConfig):
            way_out = 'pass CalibrationRewardConfig("out", loss="focal")'
            raise InputTypeError(
                expected("args", "be a CalibrationRewardConfig", type(args).__name__, way_out)
            )
        self.calibration_loss = args.make_loss()
        super().__init__(model, args, **kwargs)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """TRL's own, with the calibration loss of the pairs in the place of theirs."""
        stock, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if self.calibration_loss.name != "cross_entropy":
            logits = _pairs(outputs.logits, inputs.get("margin"))
            labels = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
            # What TRL adds, the centring term, stays.
            theirs = -torch.nn.functional.logsigmoid(logits[:, 0] - logits[:, 1]).mean()
            stock = stock - theirs + self.calibration_loss(logits, labels)
        return (stock, outputs) if return_outputs else stock


def _pairs(rewards: Tensor, margin: Tensor | None) -> Tensor:
    """(N, 2) logits: of the chosen, less its margin, and of the rejected."""
    chosen, rejected = rewards.squeeze(-1).chunk(2)
    return torch.stack([chosen if margin is None else chosen - margin, rejected], dim=1)
