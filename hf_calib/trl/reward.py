"""Reward models by TRL with a calibration loss, metrics and temperature: chosen and rejected as two classes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from trl import RewardConfig, RewardTrainer

from hf_calib._errors import InputTypeError, InputValueError, expected
from hf_calib.trainer.config import CalibrationConfig
from hf_calib.trainer.evaluation import Evaluation
from hf_calib.trainer.trainer import CalibrationMixin

_METHODS = (None, "temperature", "none")


@dataclass(repr=False)
class CalibrationRewardConfig(CalibrationConfig, RewardConfig):
    """Arguments of `CalibrationRewardTrainer`: those of TRL's `RewardConfig` and of `CalibrationConfig`.

    Raises:
        ValueError: for what `CalibrationConfig` refuses, class weights, and maps other than a temperature.

    Example::

        args = CalibrationRewardConfig("out", loss="focal", loss_kwargs={"gamma": 2.0})
    """

    def __post_init__(self) -> None:
        RewardConfig.__post_init__(self)
        self.check_calibration()
        if self.calibration_method not in _METHODS:
            way_out = "set 'temperature': an offset cancels in the difference of two rewards"
            requirement = "be 'temperature' or 'none' for rewards"
            raise InputValueError(
                expected("calibration_method", requirement, repr(self.calibration_method), way_out)
            )
        if self.class_weights is not None:
            way_out = "leave it out: the chosen answer is the right class in every pair"
            raise InputValueError(
                expected("class_weights", "be None for rewards", repr(self.class_weights), way_out)
            )


class CalibrationRewardTrainer(CalibrationMixin, RewardTrainer):
    r"""TRL's `RewardTrainer` with the loss that `args.loss` names, calibration metrics and a temperature.

    The rewards of a pair are two logits, of which the chosen one is right: TRL's loss, -log sigmoid of their
    difference, is their cross entropy. Any loss of two classes takes its place, those that adapt to held-out
    predictions too. Margins, the centring term and TRL's metrics stay; with cross entropy the loss is TRL's to the last
    bit.

    $$L = \ell\left((r_{\text{chosen}} - m,\ r_{\text{rejected}}),\ 0\right)$$

    Evaluations have the metrics of `CalibrationTrainer`, over pairs: `eval_ece` is that of the probability
    sigmoid(r_chosen - r_rejected) that one answer is preferred. A temperature is fitted on `calibration_dataset`, or
    else on the evaluation set, and `save_calibrated_model` divides the head `score` by it: the sigmoid of the
    difference of two rewards is then a calibrated probability, and every order of answers is as it was.

    Args:
        model: as for `RewardTrainer`.
        args: `CalibrationRewardConfig`.
        calibration_dataset: held-out pairs, in any form that `RewardTrainer` takes.
        **kwargs: the other arguments of `RewardTrainer`.

    Raises:
        TypeError: if args are not `CalibrationRewardConfig`.

    Example::

        trainer = CalibrationRewardTrainer(
            "Qwen/Qwen3-0.6B",
            CalibrationRewardConfig("out", loss="focal"),
            train_dataset=pairs,
            calibration_dataset=held_out,
        )
        trainer.train()
        trainer.save_calibrated_model("calibrated")
    """

    not_for_the_model = ("margin",)
    _metrics: dict[str, Any]  # TRL's

    def __init__(
        self,
        model: Any,
        args: CalibrationRewardConfig | None = None,
        *positional: Any,
        calibration_dataset: Any = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(args, CalibrationRewardConfig):
            way_out = 'pass CalibrationRewardConfig("out", loss="focal")'
            raise InputTypeError(
                expected("args", "be a CalibrationRewardConfig", type(args).__name__, way_out)
            )
        super().__init__(model, args, *positional, calibration_dataset=calibration_dataset, **kwargs)
        if calibration_dataset is not None:
            self.calibration_dataset = self._prepare_dataset(
                calibration_dataset, self.processing_class, args, "calibration"
            )

    def logits_and_labels(self, model: Any, inputs: dict[str, Any]) -> tuple[Any, Any, Tensor]:
        """The rewards of the chosen, less its margin, and of the rejected as logits (N, 2); labels 0."""
        self._stock_loss, outputs = RewardTrainer.compute_loss(self, model, inputs, return_outputs=True)
        logits = pairs_of(outputs.logits, inputs.get("margin"))
        return {"logits": logits}, logits, torch.zeros(len(logits), dtype=torch.long, device=logits.device)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """TRL's own, with the calibration loss of the pairs in the place of theirs."""
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if self.calibration_loss.name == "cross_entropy":
            loss = self._stock_loss
        elif self.args.center_rewards_coefficient is not None:
            chosen_first = outputs["logits"]
            of_pairs = -torch.nn.functional.logsigmoid(chosen_first[:, 0] - chosen_first[:, 1]).mean()
            loss = loss + (self._stock_loss - of_pairs)  # what TRL adds
        return (loss, outputs) if return_outputs else loss

    def held_out_pass(self, **settings: Any) -> Evaluation:
        """As `CalibrationMixin.held_out_pass`, and without a trace in TRL's own metrics."""
        logged = self._metrics
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        try:
            return super().held_out_pass(**settings)
        finally:
            self._metrics = logged


def pairs_of(rewards: Tensor, margin: Tensor | None) -> Tensor:
    """(N, 2) logits: of the chosen, less its margin, and of the rejected."""
    chosen, rejected = rewards.squeeze(-1).chunk(2)
    return torch.stack([chosen if margin is None else chosen - margin, rejected], dim=1)
