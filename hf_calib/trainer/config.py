"""Fields for the loss and the calibrator of a run: in the Trainer's arguments, or in a separate
config.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from transformers import TrainingArguments

from hf_calib._errors import check, few
from hf_calib._records import each_once
from hf_calib.losses import AdaptiveLoss, make_loss
from hf_calib.metrics.checks import check_choice, check_flag
from hf_calib.metrics.state import lower_is_better
from hf_calib.scaling import FOLDABLE_SCALERS, TemperatureScaling
from hf_calib.trainer.callbacks import (
    STRATEGIES,
    AdaFocalCallback,
    CalibrationMapCallback,
    TemperatureScalingCallback,
    check_updates,
    check_whole,
)

if TYPE_CHECKING:
    ClassWeights = list[float] | str | None
    PosWeight = list[float] | float | str | None
else:
    # HfArgumentParser allows one type per field: strings, which are parsed unless they are
    # "balanced".
    ClassWeights = list[str] | None
    PosWeight = list[str] | None

Kind = TypeVar("Kind")
# Class priors are given, and not fitted to a calibration split.
_FITTED_METHODS = [
    name for name, entry in FOLDABLE_SCALERS.items() if entry.needs != "priors"
]
CALIBRATION_METHODS = (*_FITTED_METHODS, "none")
_OPTIONS = {
    "temperature_criterion": ("nll", "ece", "adaptive_ece", "none"),
    "calibration_strategy": STRATEGIES,
    "loss_reduction": ("mean", "sum"),
}
METRIC_SCHEDULES = (
    "reduce_lr_on_plateau",
    "greedy",
)  # They read metric_for_best_model.
_WHOLE = {
    "n_bins": (1, 10_000),
    "seed": (0, 2**32 - 1),  # NumPy takes no others.
    "data_seed": (0, 2**63 - 1),
}

_saved_with_a_model: ContextVar[bool] = ContextVar("_saved_with_a_model", default=False)


def documented(made: type[Kind]) -> type[Kind]:
    """Add the descriptions in a dataclass's docstring to its fields, as the help of command-line
    options.
    """
    # Python 3.13 removes the indentation of docstrings, and cleandoc does so everywhere.
    docstring = inspect.cleandoc(made.__doc__ or "")
    item = r"^ {4}(\w+): (.+(?:\n {8}.+)*)"
    texts = dict(re.findall(item, docstring, re.MULTILINE))
    for field in dataclasses.fields(made):  # type: ignore[arg-type]
        if field.name in texts:
            text = " ".join(texts[field.name].split())
            field.metadata = {"help": text}  # type: ignore[assignment]
    return made


@documented
@dataclass(repr=False)
class CalibrationConfig:
    """Configuration of a `CalibrationMixin`: the loss, the updates of its gammas, and the
    calibrator.

    `CalibrationTrainingArguments` has these fields too. If a trainer's arguments are of another
    class, pass the config in addition to them.

    Args:
        loss: Name of the loss in hf_calib.losses.LOSSES: adafocal, dual_focal, focal, ...
        loss_kwargs: Hyperparameters of the loss, as JSON: '{"gamma": 3.0}'.
        class_weights: One positive weight per class, in the order of the model's labels; or
            'balanced': N / (C n_c), from the n_c labels of each class in the training split.
        pos_weight: For several labels per row: one positive weight per label for the decisions in
            which it applies, or one for all labels; or 'balanced': the negatives over the positives
            of each label in the training split.
        n_bins: Number of bins of the reported calibration errors.
        gamma_update_steps: Number of optimizer steps between updates of an adaptive loss (adafocal,
            ada_dual_focal, calfocal, ece_ce). Default: an update at each evaluation, or after each
            epoch if eval_strategy is 'no'.
        gamma_update_schedule: Instead of gamma_update_steps: the number of optimizer steps between
            updates from an epoch on, as JSON: '{"25": 100, "40": 1}'. Before the first of these
            epochs, updates are as by default.
        gamma_update_samples: With gamma_update_steps or gamma_update_schedule: size of a fixed
            random subset of the calibration split that is used for updates by steps. Default: the
            whole split.
        calibration_method: The calibrator that is fitted to the calibration split and folded into
            the saved model: auto, temperature, per_label_temperature, vector, matrix,
            structured_vector, structured_matrix, or none. Default: auto; temperature if
            temperature_criterion is ece or adaptive_ece, and for heads without a bias; none for
            causal LMs.
        temperature_criterion: The metric that a temperature minimises on the calibration split: nll
            (exact), ece or adaptive_ece (grid 0.1 to 10, as in the papers), or none for no
            temperature.
        calibration_strategy: When the calibrator is fitted: at the 'end' of training, or also at
            each 'evaluate'.
        gather_batch: Compute the penalties that couple the batch (mmce, soft_ece, kde_ece, mdca,
            avuc) over the micro-batches of all processes instead of those of each process.
        loss_reduction: 'mean' over the rows of the whole batch of an optimizer step, or the 'sum',
            which reproduces the image papers and needs max_grad_norm=2.

    Raises:
        ValueError: if the loss or a hyperparameter is unknown, or a value is out of range; before
            data are read.

    >>> CalibrationConfig(loss="focal", loss_kwargs={"gamma": 2.0}).make_loss().hyperparameters
    {'gamma': 2.0}
    """

    loss: str = "cross_entropy"
    loss_kwargs: dict[str, Any] | str | None = None
    class_weights: ClassWeights = None
    pos_weight: PosWeight = None
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
            check_choice(name, getattr(self, name), options)
        for name, (least, most) in _WHOLE.items():
            # A separate configuration has no seeds, and for these None is a default.
            value = getattr(self, name, None)
            if value is not None or name == "n_bins":
                check_whole(name, value, least, most)
        check_flag("gather_batch", self.gather_batch)
        self.gamma_update_schedule = check_updates(
            ("gamma_update_steps", "gamma_update_schedule", "gamma_update_samples"),
            steps=self.gamma_update_steps,
            schedule=_from_json(self.gamma_update_schedule),
            samples=self.gamma_update_samples,
        )
        # Weights become numbers, unless they are "balanced".
        self.class_weights = _read_weights("class_weights", self.class_weights)
        self.pos_weight = _read_weights("pos_weight", self.pos_weight)
        # Both raise for what they cannot make.
        self.make_scaler()
        loss = self.make_loss()
        updates = ("gamma_update_steps", "gamma_update_schedule")
        given = [name for name in updates if getattr(self, name) is not None]
        check(
            not given or isinstance(loss, AdaptiveLoss),
            f"{given[0] if given else ''} to be used with a loss that adapts",
            got=f"loss={self.loss!r}",
            way_out="leave it out, or use loss='adafocal'",
        )

    def fields(self) -> dict[str, Any]:
        """The settings of loss, callbacks and calibrator, without those of the Trainer."""
        own = dataclasses.fields(CalibrationConfig)
        return {field.name: getattr(self, field.name) for field in own}

    def settings(self) -> str:
        """These settings, for comparison with earlier ones."""
        smoothing = getattr(self, "label_smoothing_factor", None)
        return repr([*self.fields().values(), smoothing])

    def make_loss(
        self,
        problem_type: str | None = None,
        balanced: list[float] | None = None,
        balanced_pos_weight: list[float] | None = None,
    ) -> Any:
        """Return the configured `CalibrationLoss` for a model's `problem_type`; with None the
        labels' dtype decides.
        """
        weights: Any = (
            balanced if self.class_weights == "balanced" else self.class_weights
        )
        pos_weight: Any = self.pos_weight
        if pos_weight == "balanced":
            # Until the labels are counted, all weights are 1.
            pos_weight = balanced_pos_weight or 1.0
        name = self.loss
        given: Any = self.loss_kwargs or {}
        shared = {"name", "class_weights", "pos_weight", "problem_type"}
        no_hyperparameters = given.keys() & shared
        check(
            not no_hyperparameters,
            "loss_kwargs to have hyperparameters of the loss only",
            got=few(sorted(no_hyperparameters)),
            way_out="class_weights and pos_weight are settings of their own, loss is the name, and "
            "the model has its problem_type",
        )
        # The Trainer's argument, which a separate configuration does not have.
        smoothing = getattr(self, "label_smoothing_factor", 0)
        if smoothing != 0:
            check(
                name == "cross_entropy",
                "label smoothing to be used with cross entropy",
                got=f"label_smoothing_factor={smoothing} with loss={name!r}",
                way_out=f"use loss='label_smoothing', loss_kwargs={{'smoothing': {smoothing}}} "
                "alone",
            )
            name = "label_smoothing"
            given = {"smoothing": smoothing}
        return make_loss(
            name,
            class_weights=weights,
            pos_weight=pos_weight,
            problem_type=problem_type,
            **given,
        )

    def make_scaler(self) -> Any:
        """Return the configured calibrator, not fitted; None for no calibration."""
        method = self.calibration_method
        criterion = self.temperature_criterion
        if method is None:
            method = "auto" if criterion == "nll" else "temperature"
        check_choice("calibration_method", method, CALIBRATION_METHODS)
        wants_none = "set calibration_method='none' for no calibrator"
        check(
            criterion == "nll"
            or method in ("temperature", "none"),  # The default says nothing.
            "temperature_criterion to be given with calibration_method='temperature' only",
            got=f"{criterion!r} with calibration_method={method!r}",
            way_out=wants_none if criterion == "none" else "leave it out",
        )
        if "none" in (method, criterion):
            return None
        if method == "temperature":
            return TemperatureScaling(criterion)  # type: ignore[arg-type]
        return FOLDABLE_SCALERS[method].load()()


def gamma_callback(config: CalibrationConfig, loss: Any) -> AdaFocalCallback | None:
    """The callback for a configured loss, if it adapts."""
    if not isinstance(loss, AdaptiveLoss):
        return None
    return AdaFocalCallback(
        every_n_steps=config.gamma_update_steps,
        n_samples=config.gamma_update_samples,
        schedule=config.gamma_update_schedule,  # type: ignore[arg-type]
    )


def map_callback(strategy: str, scaler: Any) -> CalibrationMapCallback | None:
    """The callback for a configured calibrator, if there is one."""
    if scaler is None:
        return None
    # This class is what users pass to remove_callback.
    if isinstance(scaler, TemperatureScaling):
        return TemperatureScalingCallback(criterion=scaler.criterion, strategy=strategy)
    return CalibrationMapCallback(scaler, strategy=strategy)


# repr=False: a repr of the dataclass would replace the one that masks the token.
@documented
@dataclass(repr=False)
class CalibrationTrainingArguments(CalibrationConfig, TrainingArguments):
    """Arguments of `CalibrationTrainer`: those of `TrainingArguments`, the loss and the calibrator.

    `transformers.HfArgumentParser` reads them from the command line, `parse_arguments` from a YAML
    file with overrides.

    With `load_best_model_at_end`, `metric_for_best_model` may be a calibration metric
    (`eval_adaptive_ece`, `eval_nll`, ...); smaller values are then better, unless
    `greater_is_better` is set. Metrics of the calibrator (`eval_nll_calibrated`, ...) need
    `calibration_strategy="evaluate"`. With an adaptive loss the default is `nll`, because the loss
    itself changes between evaluations.

    Args:
        answer_options: For a causal language model that answers with one of a few tokens, such as
            ' A' ' B' ' C' ' D': loss, metrics and temperature use only these tokens. Each row has
            one of them as its only label.

    >>> args = CalibrationTrainingArguments("out", loss="focal", report_to="none")
    >>> args.make_loss().hyperparameters
    {'gamma': 3.0}
    """

    answer_options: list[str] | None = None

    def __post_init__(self) -> None:
        self.check_calibration()
        schedule_reads_it = self.lr_scheduler_type in METRIC_SCHEDULES
        needs_metric = self.load_best_model_at_end or schedule_reads_it
        # An adaptive loss itself changes between evaluations.
        if (
            needs_metric
            and self.metric_for_best_model is None
            and isinstance(self.make_loss(), AdaptiveLoss)
        ):
            self.metric_for_best_model = "nll"
        # The trainer knows the names of evaluation sets, which a metric's name may begin with.
        self.direction_is_given = self.greater_is_better is not None
        # The base class assumes that larger is better except for losses.
        if self.greater_is_better is None and lower_is_better(
            self.metric_for_best_model or ""
        ):
            self.greater_is_better = False
        TrainingArguments.__post_init__(self)

    def __getstate__(self) -> dict[str, Any]:
        if _saved_with_a_model.get():
            return {**self.__dict__, "hub_token": None}
        return self.__dict__


@contextmanager
def hub_token_left_out() -> Iterator[None]:
    """A context in which pickled arguments have no `hub_token`, as `training_args.bin` is uploaded
    with the model.
    """
    outer = _saved_with_a_model.set(True)
    try:
        yield
    finally:
        _saved_with_a_model.reset(outer)


def _plain(value: Any) -> Any:
    """A number or array of NumPy or PyTorch in JSON types; infinity is "inf"."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, tuple):
        value = list(value)
    is_infinite = isinstance(value, float) and value == math.inf
    return "inf" if is_infinite else value


def _read_weights(argument: str, given: Any) -> Any:
    """Weights as numbers or "balanced"; the command line gives a list of strings."""
    if given is None:
        return None
    weights = _plain(given)
    way_out = "give one number per class, in the order of the model's labels"
    if argument == "pos_weight":
        way_out = "give one number per label, in the order of the model's labels, or one for all"
        is_number = isinstance(weights, int | float) and not isinstance(weights, bool)
        weights = [weights] if is_number else weights
    if weights in ("balanced", ["balanced"]):
        return "balanced"
    try:
        numbers = _floats(weights)
    except (TypeError, ValueError):
        numbers = []
    check(
        bool(numbers),
        f"{argument} to be numbers, or 'balanced'",
        got=few([repr(given)]),
        way_out=way_out,
    )
    return numbers


def _floats(values: Any) -> list[float]:
    """A list of numbers, also as strings."""
    # Neither a mapping's keys nor a flag is a weight.
    if not isinstance(values, list) or any(isinstance(each, bool) for each in values):
        raise TypeError
    return [float(each) for each in values]


def _from_json(value: Any) -> Any:
    """A string of the command line parsed as JSON; other strings stay unchanged, and a later check
    rejects them.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value, object_pairs_hook=each_once)
    except json.JSONDecodeError:
        return value


def read_mapping(value: Any) -> dict[str, Any] | None:
    """Return the mapping of hyperparameters, which is a JSON string on the command line."""
    given = _from_json(value)
    if given is None:
        return None
    is_mapping = isinstance(given, dict)
    check(
        is_mapping and all(isinstance(name, str) for name in given),
        "loss_kwargs to be a mapping of hyperparameters, or JSON of one",
        got=repr(value),
        way_out="write '{\"name\": value}'",
    )
    return {name: _plain(item) for name, item in given.items()}
