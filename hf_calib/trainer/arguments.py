"""`CalibrationTrainingArguments`: the Trainer's arguments and those of the calibration."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainingArguments

from hf_calib._errors import InputValueError, expected
from hf_calib.losses import AdaptiveLoss
from hf_calib.metrics.state import lower_is_better
from hf_calib.trainer.config import BALANCED, CalibrationConfig, check_whole_numbers, read_mapping

_BY_METRIC = ("reduce_lr_on_plateau", "greedy")  # schedulers that follow metric_for_best_model
_SEEDS = {"seed": (0, 2**32 - 1), "data_seed": (0, 2**63 - 1)}  # NumPy takes no larger seed

_saved_with_a_model: ContextVar[bool] = ContextVar("_saved_with_a_model", default=False)


@contextmanager
def hub_token_left_out() -> Iterator[None]:
    """Within it, pickled arguments have no `hub_token`: `training_args.bin` is uploaded beside the model."""
    outer = _saved_with_a_model.set(True)
    try:
        yield
    finally:
        _saved_with_a_model.reset(outer)


# repr=False: a repr of the dataclass would replace the one that masks the token.
@dataclass(repr=False)
class CalibrationTrainingArguments(CalibrationConfig, TrainingArguments):
    """Arguments of `CalibrationTrainer`: those of `TrainingArguments`, plus the loss and the calibration map.

    Everything is checked here, before any data is touched. From Python, from the command line (through
    `transformers.HfArgumentParser`), or from a YAML file with command-line overrides (`parse_arguments`).

    With `load_best_model_at_end`, `metric_for_best_model` may be one of the calibration metrics
    (`eval_adaptive_ece`, `eval_nll`, ...); the smaller is then the better, unless `greater_is_better` says
    otherwise. Those of the calibration map (`eval_nll_calibrated`, ...) need `calibration_strategy="evaluate"`.
    With an adaptive loss the default is `nll`: the loss itself is another one at each evaluation.

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

    answer_options: list[str] | None = field(
        default=None,
        metadata={
            "help": "For a causal language model that answers with one of a few tokens, such as ' A' ' B' ' C' ' D': "
            "loss, metrics and temperature are over these. Each row has one of them as its only label."
        },
    )

    def __post_init__(self) -> None:
        self.loss_kwargs = read_mapping(self.loss_kwargs)
        needs_metric = self.load_best_model_at_end or self.lr_scheduler_type in _BY_METRIC
        if needs_metric and self.metric_for_best_model is None and isinstance(self.make_loss(), AdaptiveLoss):
            self.metric_for_best_model = "nll"
        if self.greater_is_better is None and lower_is_better(self.metric_for_best_model or ""):
            self.greater_is_better = False  # the base class takes all but losses for scores
        TrainingArguments.__post_init__(self)
        self.check_calibration()
        check_whole_numbers(self, _SEEDS)
        if self.answer_options is not None and self.calibration_method not in (None, "temperature", "none"):
            requirement = "be 'temperature' or 'none' with answer_options"
            way_out = "make a classifier with hf_calib.language_models.label_token_classifier for other maps"
            raise InputValueError(
                expected("calibration_method", requirement, repr(self.calibration_method), way_out)
            )
        if self.answer_options is not None and self.class_weights == BALANCED:
            way_out = "give one number per option"
            raise InputValueError(
                expected("class_weights", "be numbers with answer_options", "'balanced'", way_out)
            )
        metric = self.metric_for_best_model or ""
        has_map = self.make_scaler() is not None
        if metric.endswith("_calibrated") and not (has_map and self.calibration_strategy == "evaluate"):
            requirement = f"be 'evaluate' for metric_for_best_model={metric!r}, with a map to fit"
            got = f"{self.calibration_strategy!r}" + ("" if has_map else " and no map")
            way_out = f"set both, or use metric_for_best_model={metric.removesuffix('_calibrated')!r}"
            raise InputValueError(expected("calibration_strategy", requirement, got, way_out))
        if self.label_smoothing_factor != 0 and self.loss != "cross_entropy":
            got = f"label_smoothing_factor={self.label_smoothing_factor} with loss={self.loss!r}"
            way_out = f"use loss='label_smoothing', loss_kwargs={{'smoothing': {self.label_smoothing_factor}}} alone"
            raise InputValueError(expected("label smoothing", "go with cross entropy", got, way_out))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | ({"hub_token": None} if _saved_with_a_model.get() else {})
