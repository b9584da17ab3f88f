"""TRL's reward models with a calibration loss, metrics and a temperature:
chosen and rejected are two classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from trl import RewardConfig, RewardTrainer

from hf_calib._errors import InputTypeError, check, expected
from hf_calib.trainer.config import CalibrationConfig
from hf_calib.trainer.evaluation import Evaluation
from hf_calib.trainer.trainer import CalibrationMixin


@dataclass(repr=False)
class CalibrationRewardConfig(CalibrationConfig, RewardConfig):
    """Arguments of `CalibrationRewardTrainer`: those of TRL's `RewardConfig` and of
    `CalibrationConfig`.

    Raises:
        ValueError: for invalid values of `CalibrationConfig`, class weights, a `loss_reduction`,
            and calibrators other than a temperature.
    """

    def __post_init__(self) -> None:
        RewardConfig.__post_init__(self)
        self.check_calibration()
        method = self.calibration_method
        way_out = (
            "set 'temperature': an offset cancels in the difference of two rewards"
        )
        requirement = "calibration_method to be 'temperature' or 'none' for rewards"
        check(
            method in (None, "temperature", "none"), requirement, repr(method), way_out
        )
        check(
            self.loss_reduction == "mean",
            "loss_reduction to be 'mean' for rewards",
            repr(self.loss_reduction),
            "leave it out: TRL's loss is the mean over the pairs",
        )
        way_out = "leave it out: the chosen answer is the right class in every pair"
        without = self.class_weights is None
        check(
            without,
            "class_weights to be None for rewards",
            repr(self.class_weights),
            way_out,
        )
        check(
            self.pos_weight is None,
            "pos_weight to be None for rewards",
            repr(self.pos_weight),
            way_out,
        )


class CalibrationRewardTrainer(CalibrationMixin, RewardTrainer):
    r"""TRL's `RewardTrainer` with the loss named by `args.loss`,
    calibration metrics and a temperature.

    The rewards of a pair are two logits, and the chosen one is the label. TRL's loss is their cross
    entropy, bit for bit; it is replaced by any loss of two classes, also by losses that adapt to
    held-out predictions. Margins, the centring term and TRL's metrics do not change.

    $$L = \ell\left((r_{\text{chosen}} - m,\ r_{\text{rejected}}),\ 0\right)$$

    Evaluations have the metrics of `CalibrationTrainer` over pairs. A temperature is fitted to
    `calibration_dataset`, or otherwise to the evaluation set, and `save_calibrated_model` divides
    the head `score` by it. Then sigmoid(r_chosen - r_rejected) is a calibrated probability, and the
    order of answers does not change.

    Args:
        model: as in `RewardTrainer`, like all other arguments.
        args: `CalibrationRewardConfig`.
        calibration_dataset: held-out pairs in any form that `RewardTrainer` accepts.

    Raises:
        TypeError: if args are not `CalibrationRewardConfig`.

    Example::

        args = CalibrationRewardConfig("out", loss="focal", loss_kwargs={"gamma": 2.0})
        trainer = CalibrationRewardTrainer(
            "Qwen/Qwen3-0.6B", args, train_dataset=pairs, calibration_dataset=held_out
        )
        trainer.train()
        trainer.save_calibrated_model("calibrated")
    """

    not_for_the_model = ("margin",)

    def __init__(
        self,
        model: Any,
        args: CalibrationRewardConfig | None = None,
        *positional: Any,
        calibration_dataset: Any = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(args, CalibrationRewardConfig):
            got = type(args).__name__
            way_out = 'pass CalibrationRewardConfig("out", loss="focal")'
            raise InputTypeError(
                expected("args", "be a CalibrationRewardConfig", got, way_out)
            )
        super().__init__(
            model, args, *positional, calibration_dataset=calibration_dataset, **kwargs
        )
        if calibration_dataset is not None:
            # TRL tokenizes the training and evaluation sets; it does not know of this
            # one.
            prepared = self._prepare_dataset(
                calibration_dataset, self.processing_class, args, "calibration"
            )
            self.calibration_dataset = prepared

    def logits_and_labels(
        self, model: Any, inputs: dict[str, Any]
    ) -> tuple[Any, Any, Tensor]:
        """Return the chosen reward minus its margin and the rejected reward as logits (N, 2),
        with labels 0.
        """
        # TRL's pass also records its metrics. Its loss is kept for `compute_loss`.
        self._stock_loss, outputs = RewardTrainer.compute_loss(
            self, model, inputs, return_outputs=True
        )
        logits = pairs_of(outputs.logits, inputs.get("margin"))
        return (
            {"logits": logits},
            logits,
            torch.zeros(len(logits), dtype=torch.long, device=logits.device),
        )

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return TRL's loss, with the calibration loss of the pairs instead of their cross entropy."""
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        # A softmax of two logits rounds otherwise than TRL's sigmoid of their
        # difference.
        if self.calibration_loss.name == "cross_entropy":
            loss = self._stock_loss
        elif self.args.center_rewards_coefficient is not None:
            chosen, rejected = outputs["logits"].unbind(dim=1)
            # TRL's loss is the mean cross entropy plus other terms, and only the other
            # terms are kept.
            loss = loss + (self._stock_loss + logsigmoid(chosen - rejected).mean())
        return (loss, outputs) if return_outputs else loss

    def held_out_pass(self, **settings: Any) -> Evaluation:
        """Run `CalibrationMixin.held_out_pass` without an effect on TRL's log of the next
        evaluation.
        """
        done = super().held_out_pass(**settings)
        # TRL logs the means of all batches since its last log.
        self._metrics["eval"].clear()
        return done


def pairs_of(rewards: Tensor, margin: Tensor | None) -> Tensor:
    """Return the logits (N, 2): the chosen reward minus its margin, and the rejected reward."""
    # The first half of TRL's batch holds the chosen answers, the second the rejected
    # ones.
    chosen, rejected = rewards.squeeze(-1).chunk(2)
    return torch.stack([chosen if margin is None else chosen - margin, rejected], dim=1)
