"""Fields for the loss and the calibrator of a run: in the Trainer's arguments, or in a separate config."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from transformers import TrainingArguments

from hf_calib._errors import check
from hf_calib.losses import AdaptiveLoss, make_loss
from hf_calib.metrics.checks import check_flag
from hf_calib.metrics.state import lower_is_better
from hf_calib.scaling import FOLDABLE_SCALERS, TemperatureScaling
from hf_calib.trainer.callbacks import STRATEGIES, check_option, check_updates

if TYPE_CHECKING:
    ClassWeights = list[float] | str | None
else:  # HfArgumentParser allows one type per field: strings, which are parsed unless they are "balanced".
    ClassWeights = list[str] | None

Kind = TypeVar("Kind")
CALIBRATION_METHODS = (
    *(key for key, entry in FOLDABLE_SCALERS.items() if entry.needs != "priors"),
    "none",
)
_OPTIONS = {
    "temperature_criterion": ("nll", "ece", "adaptive_ece", "none"),
    "calibration_strategy": STRATEGIES,
    "loss_reduction": ("mean", "sum"),
}
_MOST = {"n_bins": 10_000, "gamma_update_steps": 10**9, "gamma_update_samples": 10**12}

_saved_with_a_model: ContextVar[bool] = ContextVar("_saved_with_a_model", default=False)


def documented(fields: type[Kind]) -> type[Kind]:
    """Add the descriptions in a dataclass's docstring to its fields, as the help of command-line options."""
    for name, text in re.findall(
        r"^ {8}(\w+): (.+(?:\n {12}.+)*)", fields.__doc__ or "", re.MULTILINE
    ):
        field: Any = fields.__dataclass_fields__.get(name)  # type: ignore[attr-defined]
        if field is not None:
            field.metadata = {"help": " ".join(text.split())}
    return fields


@documented
@dataclass(repr=False)
class CalibrationConfig:
    """Configuration of a `CalibrationMixin`: the loss, the updates of its gammas, and the calibrator.

    `CalibrationTrainingArguments` has these fields too. If a trainer's arguments are of another class, pass the config
    in addition to them.

    Args:
        loss: Name of the loss in hf_calib.losses.LOSSES: adafocal, dual_focal, focal, ...
        loss_kwargs: Hyperparameters of the loss, as JSON: '{"gamma": 3.0}'.
        class_weights: One positive weight per class, in the order of the model's labels; or 'balanced': N / (C n_c),
            from the n_c labels of each class in the training split.
        n_bins: Number of bins of the reported calibration errors.
        gamma_update_steps: Number of optimizer steps between updates of an adaptive loss (adafocal, ada_dual_focal,
            calfocal, ece_ce). Default: an update at each evaluation, or after each epoch if eval_strategy is 'no'.
        gamma_update_schedule: Instead of gamma_update_steps: the number of optimizer steps between updates from an
            epoch on, as JSON: '{"25": 100, "40": 1}'. Before the first of these epochs, updates are as by default.
        gamma_update_samples: With gamma_update_steps or gamma_update_schedule: size of a fixed random subset of the
            calibration split that is used for updates by steps. Default: the whole split.
        calibration_method: The calibrator that is fitted to the calibration split and folded into the saved model:
            auto, temperature, per_label_temperature, vector, matrix, structured_vector, structured_matrix, or none.
            Default: auto; temperature if temperature_criterion is ece or adaptive_ece, and for heads without a bias;
            none for causal LMs.
        temperature_criterion: The metric that a temperature minimises on the calibration split: nll (exact), ece or
            adaptive_ece (grid 0.1 to 10, as in the papers), or none for no temperature.
        calibration_strategy: When the calibrator is fitted: at the 'end' of training, or also at each 'evaluate'.
        gather_batch: Compute the penalties that couple the batch (mmce, soft_ece, kde_ece, mdca, avuc) over the
            micro-batches of all processes instead of those of each process.
        loss_reduction: 'mean' over the rows of the whole batch of an optimizer step, or the 'sum', which reproduces
            the image papers and needs max_grad_norm=2.

    Raises:
        ValueError: if the loss or a hyperparameter is unknown, or a value is out of range; before data are read.

    >>> CalibrationConfig(loss="focal", loss_kwargs={"gamma": 2.0}).make_loss().hyperparameters
    {'gamma': 2.0}
    """

    loss: str = "cross_entropy"
    loss_kwargs: dict[str, Any] | str | None = None
    class_weights: ClassWeights = None
    n_bins: int = 15
    gamma_update_steps: int | None = None
    gamma_update_schedule: dict[int, int] | str | None = None
    gamma_update_samples: int | None = None
    calibration_method: str | None = None
    temperature_criterion: str = "nll"
    calibration_strategy: str = "end"
    gather_batch: bool = False
    loss_reduction: str = "mean"

    def __post_init__(self) -> None:
        self.check_calibration()

    def check_calibration(self) -> None:
        """Raise if a value is out of range or two values do not fit together."""
        self.loss_kwargs = read_mapping(self.loss_kwargs)
        for name, options in _OPTIONS.items():
            check_option(name, getattr(self, name), options)
        for name, most in _MOST.items():
            value = getattr(self, name)
            whole = value is None or (type(value) is int and 1 <= value <= most)
            requirement = f"{name} to be a whole number, at least 1, at most {most}"
            check(whole, requirement, repr(value), "leave it out for the default")
        check_flag("gather_batch", self.gather_batch)
        names = ("gamma_update_steps", "gamma_update_schedule", "gamma_update_samples")
        schedule = _from_json(self.gamma_update_schedule)
        updates = self.gamma_update_steps, schedule, self.gamma_update_samples
        self.gamma_update_schedule = check_updates(names, *updates)
        self.make_scaler()
        weights = _plain(self.class_weights)
        if isinstance(weights, list) and weights != [
            "balanced"
        ]:  # Strings come from the command line.
            weights = [
                float(each) if isinstance(each, str) else each for each in weights
            ]
        self.class_weights = "balanced" if weights == ["balanced"] else weights
        self.make_loss()

    def settings(self) -> str:
        """The settings of loss, callbacks and calibrator, for comparison with earlier settings."""
        names = [*CalibrationConfig.__dataclass_fields__, "label_smoothing_factor"]
        return repr([getattr(self, name, None) for name in names])

    def make_loss(
        self, problem_type: str | None = None, balanced: list[float] | None = None
    ) -> Any:
        """Return the configured `CalibrationLoss` for a model's `problem_type`; with None the labels' dtype decides."""
        name, kwargs = self.loss, dict(self.loss_kwargs or {})  # type: ignore[arg-type]
        smoothing = getattr(
            self, "label_smoothing_factor", 0
        )  # From the Trainer's arguments.
        if smoothing != 0:
            name, kwargs = "label_smoothing", {"smoothing": smoothing}
        weights: Any = (
            balanced if self.class_weights == "balanced" else self.class_weights
        )
        return make_loss(
            name, class_weights=weights, problem_type=problem_type, **kwargs
        )

    def make_scaler(self) -> Any:
        """Return the configured calibrator, not fitted; None for no calibration."""
        method, criterion = self.calibration_method, self.temperature_criterion
        if method is None:
            method = "auto" if criterion == "nll" else "temperature"
        check_option("calibration_method", method, CALIBRATION_METHODS)
        goes_together = method in ("temperature", "none") or criterion == "nll"
        requirement = "temperature_criterion to be given with calibration_method='temperature' only"
        way_out = (
            "set calibration_method='none' for no calibrator"
            if criterion == "none"
            else "leave it out"
        )
        check(
            goes_together,
            requirement,
            f"{criterion!r} with calibration_method={method!r}",
            way_out,
        )
        if "none" in (method, criterion):
            return None
        if method == "temperature":
            return TemperatureScaling(criterion)  # type: ignore[arg-type]
        return FOLDABLE_SCALERS[method].load()()


# repr=False: a repr of the dataclass would replace the one that masks the token.
@documented
@dataclass(repr=False)
class CalibrationTrainingArguments(CalibrationConfig, TrainingArguments):
    """Arguments of `CalibrationTrainer`: those of `TrainingArguments`, the loss and the calibrator.

    `transformers.HfArgumentParser` reads them from the command line, `parse_arguments` from a YAML file with overrides.

    With `load_best_model_at_end`, `metric_for_best_model` may be a calibration metric (`eval_adaptive_ece`, `eval_nll`,
    ...); smaller values are then better, unless `greater_is_better` is set. Metrics of the calibrator
    (`eval_nll_calibrated`, ...) need `calibration_strategy="evaluate"`. With an adaptive loss the default is `nll`,
    because the loss itself changes between evaluations.

    Args:
        answer_options: For a causal language model that answers with one of a few tokens, such as ' A' ' B' ' C' ' D':
            loss, metrics and temperature use only these tokens. Each row has one of them as its only label.

    >>> CalibrationTrainingArguments("out", loss="focal", report_to="none").make_loss().hyperparameters
    {'gamma': 3.0}
    """

    answer_options: list[str] | None = None

    def __post_init__(self) -> None:
        self.loss_kwargs = read_mapping(self.loss_kwargs)
        follows_it = self.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy")
        needs_metric = self.load_best_model_at_end or follows_it
        if (
            needs_metric
            and self.metric_for_best_model is None
            and isinstance(self.make_loss(), AdaptiveLoss)
        ):
            self.metric_for_best_model = "nll"
        metric = self.metric_for_best_model or ""
        if self.greater_is_better is None and lower_is_better(metric):
            self.greater_is_better = (
                False  # The base class assumes that larger is better except for losses.
            )
        TrainingArguments.__post_init__(self)
        self.check_calibration()
        smoothing = self.label_smoothing_factor
        got = f"label_smoothing_factor={smoothing} with loss={self.loss!r}"
        way_out = f"use loss='label_smoothing', loss_kwargs={{'smoothing': {smoothing}}} alone"
        alone = smoothing == 0 or self.loss == "cross_entropy"
        check(alone, "label smoothing to be used with cross entropy", got, way_out)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | (
            {"hub_token": None} if _saved_with_a_model.get() else {}
        )


@contextmanager
def hub_token_left_out() -> Iterator[None]:
    """A context in which pickled arguments have no `hub_token`, as `training_args.bin` is uploaded with the model."""
    outer = _saved_with_a_model.set(True)
    try:
        yield
    finally:
        _saved_with_a_model.reset(outer)


def _plain(value: Any) -> Any:
    """A number or array of NumPy or PyTorch in JSON types; infinity is "inf"."""
    plain = (
        value.tolist()
        if hasattr(value, "tolist")
        else [*value]
        if isinstance(value, tuple)
        else value
    )
    return "inf" if isinstance(plain, float) and plain == math.inf else plain


def _from_json(value: Any) -> Any:
    """A string of the command line parsed as JSON; other strings stay unchanged, and a later check rejects them."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError:
        return value


def read_mapping(value: Any) -> dict[str, Any] | None:
    """Return the mapping of hyperparameters, which is a JSON string on the command line."""
    given = _from_json(value)
    requirement = "loss_kwargs to be a mapping of hyperparameters, or JSON of one"
    fits = given is None or isinstance(given, dict)
    check(fits, requirement, repr(value), "write '{\"name\": value}'")
    return None if given is None else {key: _plain(item) for key, item in given.items()}
