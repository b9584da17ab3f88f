"""Callbacks of `CalibrationTrainer`: gammas that follow the calibration split, and the calibration map.

`CalibrationTrainer` adds these callbacks by itself, as its arguments say. Pass one of them to it only to
choose its settings in Python.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any, TypeVar, get_args

from sklearn.base import clone
from transformers import TrainerCallback
from transformers.trainer_utils import IntervalStrategy

from hf_calib._errors import InputTypeError, InputValueError, did_you_mean, expected
from hf_calib.scaling import TemperatureScaling
from hf_calib.scaling.methods import foldable_method
from hf_calib.scaling.saved_map import map_title
from hf_calib.scaling.temperature import Criterion
from hf_calib.trainer.calibration_map import in_words
from hf_calib.trainer.tables import show

STRATEGIES = ("end", "evaluate")
Kind = TypeVar("Kind", bound=TrainerCallback)


class CalibrationCallback(TrainerCallback):
    """A callback that works on the trainer; the trainer introduces itself when the callback is added."""

    trainer: Any = None  # the CalibrationTrainer, which imports this module

    def before_train_end(self, state: Any) -> None:
        """Called at the end of the training, before any callback's `on_train_end`."""

    def _attached(self) -> Any:
        if self.trainer is None:
            name = type(self).__name__
            raise RuntimeError(
                expected(name, "be used by a CalibrationTrainer", "another trainer", "switch to it")
            )
        return self.trainer


def calibrate_before_the_end(trainer: Any) -> None:
    """Let the calibration at the end of a training come before all `on_train_end`, whatever the order of callbacks.

    MLflow, TensorBoard, Trackio and others close in theirs, and what calibration logs is to reach them. No callback of
    ours stands in front of the users' for that: the handler itself begins with it.
    """
    handler = trainer.callback_handler
    end = handler.on_train_end

    def on_train_end(args: Any, state: Any, control: Any) -> Any:
        history = state.log_history
        summary = len(history) - 1  # the Trainer has just logged it, and it is to stay the last entry
        for callback in list(handler.callbacks):
            if isinstance(callback, CalibrationCallback):
                callback.before_train_end(state)
        if summary >= 0 and "train_runtime" in history[summary]:  # a pruned trial of a search has none
            history.append(history.pop(summary))
            trainer.summary_was_at = summary
        return end(args, state, control)

    handler.on_train_end = on_train_end


class AdaFocalCallback(CalibrationCallback):
    """Updates the table of an adaptive loss (AdaFocal, AdaDualFocal, CalFocal, ECE-CE) from held-out predictions.

    By default at each evaluation, on the whole calibration split, and at the end of each epoch where there are
    no evaluations; or every `every_n_steps` optimizer steps, on a fixed random subset of `n_samples` examples.
    Frequent updates help short trainings (AdaFocal, appendix I). A `schedule` makes them more frequent from some
    epochs on. The model's mode, the random streams and the progress bars are left as found, and the
    values are the same on every process.

    Each update is logged, whatever `logging_steps` says: for each bin its gamma, calibration gap, edges and number
    of held-out examples (`gamma_00`, `calibration_gap_00`, `edge_00`, `count_00`, ...), which
    `hf_calib.plots.gamma_dynamics` draws. `trainer.state.log_history` and trackers get all of them, the console
    their ranges. With 15 bins an update takes 2 kB in the checkpoints' `trainer_state.json`.

    A trainer has one: the last that it is given.

    Args:
        every_n_steps: None, or at least 1.
        n_samples: None for all; only with `every_n_steps`, or for the updates of a `schedule` by steps.
        schedule: {epoch: steps}, epochs rising, from 0: from which epoch on to update every how many optimizer
            steps. `{25: 100, 40: 1}` updates as by default in the first 25 epochs, every 100 steps in the next
            15, and then at every step. Not with `every_n_steps`.

    Raises:
        TypeError: if `every_n_steps` or `n_samples` is not an integer.
        ValueError: if a number is out of range, a schedule is no such mapping or comes with `every_n_steps`, or
            `n_samples` is given alone.

    References:
        Ghosh et al. 2022, Algorithm 1; the schedule: Fig. 53.

    Example:
        >>> callback = AdaFocalCallback(every_n_steps=50, n_samples=2000)
        >>> callback.every_n_steps
        50
    """

    def __init__(
        self,
        *,
        every_n_steps: int | None = None,
        n_samples: int | None = None,
        schedule: Mapping[int, int] | None = None,
    ) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("n_samples", n_samples)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise InputTypeError(
                    expected(name, "be an integer", repr(value), "leave it out for the default")
                )
            if value is not None and value < 1:
                raise InputValueError(expected(name, "be at least 1", value, "leave it out for the default"))
        if schedule is not None and every_n_steps is not None:
            got, way_out = f"every_n_steps={every_n_steps}", "leave one of them out"
            raise InputValueError(expected("schedule", "go without every_n_steps", got, way_out))
        if n_samples is not None and every_n_steps is None and schedule is None:
            requirement, way_out = "go with every_n_steps or schedule", "set one of them"
            raise InputValueError(expected("n_samples", requirement, "neither", way_out))
        self.every_n_steps = every_n_steps
        self.n_samples = n_samples
        self.schedule = {} if schedule is None else read_schedule(schedule, "schedule")
        self._updating = False
        self._last_step = -1

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer, resumed = self._attached(), state.global_step > 0
        # An evaluation before the first step of a resumed training was followed by an update before it stopped.
        self._updating, self._last_step = True, state.global_step if resumed else -1
        if resumed and self._missed_at_epoch_end(args, state):
            trainer.update_adaptive_loss()

    def _missed_at_epoch_end(self, args: Any, state: Any) -> bool:
        """Whether the checkpoint was saved at the last step of an epoch, but before the epoch's update."""
        at_epoch_end = args.eval_strategy in (IntervalStrategy.NO, IntervalStrategy.EPOCH)
        if self._interval(state) is not None or not at_epoch_end or state.epoch != int(state.epoch):
            return False
        logged = (entry for entry in reversed(state.log_history) if entry.get("step") == state.global_step)
        return not any("calibration_gap_00" in entry for entry in logged)

    def _interval(self, state: Any) -> int | None:
        """Optimizer steps between updates in the epoch of the last step; None for updates as by default."""
        epoch = max(0, math.ceil(state.epoch) - 1)  # after the last step of epoch 24 it is 25.0
        interval = self.every_n_steps
        for first, steps in self.schedule.items():
            if epoch >= first:
                interval = steps
        return interval

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        interval = self._interval(state)
        if interval is not None and state.global_step % interval == 0:
            self._attached().update_adaptive_loss(n_samples=self.n_samples)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._interval(state) is None and args.eval_strategy == IntervalStrategy.NO:
            self._attached().update_adaptive_loss()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Several evaluation sets make one evaluation; evaluations after the training change nothing.
        trainer = self._attached()
        if self._updating and self._interval(state) is None and state.global_step != self._last_step:
            self._last_step = state.global_step
            done = trainer.last_evaluation
            trainer.update_adaptive_loss(done if done.dataset is trainer.calibration_split else None)

    def before_train_end(self, state: Any) -> None:
        self._updating = False


class CalibrationMapCallback(CalibrationCallback):
    """Fits a scaler that folds on the calibration split, and has it reported beside the raw probabilities.

    At the end of the training, after the best model was loaded and before trackers close, the evaluation set
    (if there is one) is evaluated once more, so that every metric is logged before and after (`eval_ece`,
    `eval_ece_calibrated`, ...), and the map is named on the console. With `strategy="evaluate"` each evaluation during
    the training is preceded by a fit too. A fit or a final evaluation that fails is warned of; the trained model is
    kept.

    A trainer has one: the last that it is given.

    Args:
        scaler: not fitted, with settings of its own; each fit is of a copy.
        strategy: "end" or "evaluate".

    Raises:
        TypeError: if the scaler cannot be folded into a model's head.
        ValueError: for another strategy.

    Example:
        >>> from hf_calib.scaling import MatrixScaling
        >>> CalibrationMapCallback(MatrixScaling(off_diagonal_penalty=1.0)).scaler
        MatrixScaling(off_diagonal_penalty=1.0)
    """

    def __init__(self, scaler: Any, *, strategy: str = "end") -> None:
        self.title = map_title(foldable_method(scaler))
        _check_option("strategy", strategy, STRATEGIES)
        self.scaler = scaler
        self.strategy = strategy
        self._last_step = -1

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._attached()
        self._last_step = -1

    def before_evaluate(self, step: int) -> None:
        """Called by the trainer before each evaluation during the training; several sets make one."""
        if self.strategy == "evaluate" and step != self._last_step:
            self._last_step = step
            self._fit()

    def before_train_end(self, state: Any) -> None:
        trainer = self._attached()
        if trainer.calibration_split is None:
            return
        self._last_step = state.global_step
        self._fit()
        if trainer.calibration_map is not None:
            show(trainer, {"calibration_map": in_words(trainer.calibration_map)})
        if trainer.eval_dataset is not None:
            try:
                trainer.evaluate_at_end()
            except Exception as error:  # whatever it is, the training is done and must not be lost
                warnings.warn(
                    f"The evaluation after the training failed: {_in_short(error)}. The trained model is kept, but "
                    "its final metrics are not logged. Correct the evaluation set, and call evaluate().",
                    stacklevel=2,
                )

    def _fit(self) -> None:
        """Fit; but no failure (a model whose logits are NaN, a broken row) is a reason to lose a training."""
        trainer = self._attached()
        try:
            trainer.fit_calibration_map(clone(self.scaler))
        except Exception as error:
            warnings.warn(
                f"{self.title.capitalize()} was not fitted: {_in_short(error)}. The trained model is kept, and its "
                "probabilities stay as trained. Correct the cause, and call fit_calibration_map().",
                stacklevel=2,
            )


class TemperatureScalingCallback(CalibrationMapCallback):
    """Fits a temperature: `CalibrationMapCallback` with `TemperatureScaling`.

    Args:
        criterion: "nll" (exact), "ece" or "adaptive_ece" (the papers' grid).
        strategy: "end" or "evaluate".

    Raises:
        ValueError: for another criterion or strategy.

    References:
        Guo et al. 2017; the papers' grid: Mukhoti et al. 2020.

    Example:
        >>> TemperatureScalingCallback(criterion="ece").scaling
        TemperatureScaling(criterion='ece')
    """

    def __init__(self, *, criterion: Any = "nll", strategy: str = "end") -> None:
        _check_option("criterion", criterion, get_args(Criterion))
        self.scaling = TemperatureScaling(criterion=criterion)
        super().__init__(self.scaling, strategy=strategy)


def own_callback(trainer: Any, kind: type[Kind]) -> Kind | None:
    """A trainer's callback of a kind."""
    return next((each for each in trainer.callback_handler.callbacks if isinstance(each, kind)), None)


def read_schedule(schedule: Any, name: str) -> dict[int, int]:
    """Check a schedule of updates; its epochs may be words, as JSON has them.

    >>> read_schedule({"25": 100, "40": 1}, "schedule")
    {25: 100, 40: 1}
    """
    given = schedule if isinstance(schedule, Mapping) else {}
    epochs = [int(key) if isinstance(key, str) and key.isdecimal() else key for key in given]
    steps = list(given.values())
    whole = all(type(number) is int for number in [*epochs, *steps])
    if not given or not whole or epochs != sorted(set(epochs)) or epochs[0] < 0 or min(steps) < 1:
        requirement = "map whole epochs, rising, at least 0, to whole numbers of steps, at least 1"
        way_out = 'write {"25": 100, "40": 1} for every 100 steps from epoch 25 on, each step from 40 on'
        raise InputValueError(expected(name, requirement, repr(schedule), way_out))
    return dict(zip(epochs, steps, strict=True))


def _check_option(name: str, value: object, options: tuple[str, ...]) -> None:
    if value not in options:
        way_out = did_you_mean(value, options)
        raise InputValueError(expected(name, f"be one of {options}", repr(value), way_out))


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(".")
