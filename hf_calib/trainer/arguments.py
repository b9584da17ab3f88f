"""`CalibrationTrainingArguments`: the Trainer's arguments and the few of our own."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainingArguments

from hf_calib._errors import InputValueError, did_you_mean, expected
from hf_calib.losses import make_loss
from hf_calib.metrics.logged import lower_is_better

TEMPERATURE_CRITERIA = ("nll", "ece", "adaptive_ece", "none")
TEMPERATURE_STRATEGIES = ("end", "evaluate")


@dataclass
class CalibrationTrainingArguments(TrainingArguments):
    """Arguments of `CalibrationTrainer`: all of `TrainingArguments`, and which loss and temperature to use.

    Everything is checked here, before any data is touched. From Python, from the command line (through
    `transformers.HfArgumentParser`), or from a YAML file with command-line overrides (`parse_arguments`).

    With `load_best_model_at_end`, `metric_for_best_model` may be one of the calibration metrics
    (`eval_adaptive_ece`, `eval_nll_calibrated`, ...); the smaller is then the better, unless
    `greater_is_better` says otherwise.

    Raises:
        ValueError: for an unknown loss, an unknown or out-of-range hyperparameter, or other values out of
            range; the message names what is allowed.

    Example:
        >>> args = CalibrationTrainingArguments(
        ...     output_dir="out", loss="focal", loss_kwargs={"gamma": 2.0}, report_to="none"
        ... )
        >>> args.make_loss().hyperparameters
        {'gamma': 2.0}
    """

    loss: str = field(
        default="cross_entropy",
        metadata={"help": "Name of the loss, see hf_calib.losses.LOSSES: adafocal, dual_focal, focal, ..."},
    )
    loss_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Hyperparameters of the loss, as JSON: '{\"gamma\": 3.0}'."}
    )
    class_weights: list[float] | None = field(
        default=None, metadata={"help": "One positive weight per class, in the order of the model's labels."}
    )
    n_bins: int = field(default=15, metadata={"help": "Number of bins of the reported calibration errors."})
    gamma_update_steps: int | None = field(
        default=None,
        metadata={
            "help": "Update an adaptive loss (adafocal, ada_dual_focal, calfocal, ece_ce) every so many optimizer "
            "steps. Default: at each evaluation, or at the end of each epoch where eval_strategy is 'no'."
        },
    )
    gamma_update_samples: int | None = field(
        default=None,
        metadata={
            "help": "With gamma_update_steps: use a fixed random subset of this many examples of the calibration "
            "split. Default: all of it."
        },
    )
    temperature_criterion: str = field(
        default="nll",
        metadata={
            "help": "What the temperature minimises on the calibration split: nll (exact), ece or adaptive_ece "
            "(grid 0.1 to 10, as in the papers), or none for no temperature."
        },
    )
    temperature_strategy: str = field(
        default="end",
        metadata={
            "help": "When the temperature is fitted: 'end' of the training, or at each 'evaluate' too."
        },
    )
    gather_batch: bool = field(
        default=False,
        metadata={
            "help": "Compute the penalties that couple the batch (mmce, soft_ece, kde_ece) over the micro-batches "
            "of all processes instead of each process's own."
        },
    )

    def __post_init__(self) -> None:
        self.loss_kwargs = _mapping(self.loss_kwargs)
        if self.greater_is_better is None and lower_is_better(self.metric_for_best_model or ""):
            self.greater_is_better = False  # the base class takes all but losses for scores
        super().__post_init__()
        for name, options in (
            ("temperature_criterion", TEMPERATURE_CRITERIA),
            ("temperature_strategy", TEMPERATURE_STRATEGIES),
        ):
            value = getattr(self, name)
            if value not in options:
                raise InputValueError(
                    expected(name, f"be one of {options}", repr(value), did_you_mean(value, options))
                )
        for name in ("n_bins", "gamma_update_steps", "gamma_update_samples"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and value >= 1):
                way_out = "leave it out for the default"
                raise InputValueError(expected(name, "be a whole number, at least 1", repr(value), way_out))
        if self.gamma_update_samples is not None and self.gamma_update_steps is None:
            got = "gamma_update_steps=None"
            raise InputValueError(
                expected("gamma_update_samples", "go with gamma_update_steps", got, "set both")
            )
        if self.label_smoothing_factor != 0 and self.loss != "cross_entropy":
            got = f"label_smoothing_factor={self.label_smoothing_factor} with loss={self.loss!r}"
            way_out = f"use loss='label_smoothing', loss_kwargs={{'smoothing': {self.label_smoothing_factor}}} alone"
            raise InputValueError(expected("label smoothing", "go with cross entropy", got, way_out))
        loss = self.make_loss()
        if self.class_weights is not None:  # numbers that JSON can hold, from whatever they came in
            self.class_weights = loss.class_weights.tolist()

    def __getstate__(self) -> dict[str, Any]:
        """For `training_args.bin`, which is saved and uploaded beside the model: without the secret."""
        return self.__dict__ | {"hub_token": None}

    def make_loss(self, problem_type: str | None = None) -> Any:
        """The `CalibrationLoss` that these arguments describe."""
        name, kwargs = self.loss, dict(self.loss_kwargs or {})  # type: ignore[arg-type]
        if self.label_smoothing_factor != 0:
            name, kwargs = "label_smoothing", {"smoothing": self.label_smoothing_factor}
        return make_loss(name, class_weights=self.class_weights, problem_type=problem_type, **kwargs)


def _mapping(value: Any) -> dict[str, Any] | None:
    """Read JSON from the command line."""
    way_out = "write '{\"name\": value}'"
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            got = f"{value!r} ({error})"
            raise InputValueError(
                expected("loss_kwargs", "be a mapping, or JSON of one", got, way_out)
            ) from error
    if value is not None and not isinstance(value, dict):
        raise InputValueError(expected("loss_kwargs", "be a mapping, or JSON of one", repr(value), way_out))
    return value
