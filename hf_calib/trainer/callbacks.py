"""Callbacks that update gammas from held-out predictions and fit the calibrator.

`CalibrationTrainer` adds them according to its arguments; pass a callback only to choose its
settings in Python. They also work with the stock `Trainer`, if they get the trainer and the rows.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from sklearn.base import clone
from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_calib._errors import check, expected
from hf_calib._text import counted
from hf_calib.losses import AdaptiveLoss
from hf_calib.metrics.checks import check_choice
from hf_calib.metrics.sums import class_gaps
from hf_calib.scaling import TemperatureScaling
from hf_calib.scaling.saved_map import Criterion, map_title, method_of
from hf_calib.trainer.calibration_map import check_has_hard_labels, fit_once
from hf_calib.trainer.checks import check_is_dataset
from hf_calib.trainer.evaluation import Evaluation, check_labelled
from hf_calib.trainer.passes import SplitLoaders, run_held_out
from hf_calib.trainer.saving import A_GAP, load_loss_state, save_loss_state

STRATEGIES = ("end", "evaluate")
# Of the tables in the log: 160 of 15 bins, or some 400 kB in each checkpoint.
_MOST_NUMBERS = 10_000

Kind = TypeVar("Kind", bound=TrainerCallback)


class CalibrationCallback(TrainerCallback):
    """A callback of a `CalibrationTrainer`, which registers itself, or of a stock trainer, passed
    with rows.
    """

    def __init__(self, trainer: Any = None, calibration_dataset: Any = None) -> None:
        check(
            (trainer is None) == (calibration_dataset is None),
            "trainer and calibration_dataset to be given together",
            got="one of them",
            way_out="leave both out for a CalibrationTrainer, which has its own calibration rows",
        )
        if calibration_dataset is not None:
            check_is_dataset(calibration_dataset)
        self.trainer = trainer
        self.calibration_dataset = calibration_dataset
        self.is_of_a_stock_trainer = trainer is not None
        self._loaders: SplitLoaders | None = None  # Those of a stock trainer.

    def on_train_begin(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> None:
        if self.trainer is None:
            raise RuntimeError(
                expected(
                    type(self).__name__,
                    "be used by a CalibrationTrainer",
                    got="another trainer",
                    way_out="pass trainer=trainer and calibration_dataset=rows",
                )
            )

    def held_out_pass(
        self, *, n_samples: int | None = None, keep_logits: bool = False
    ) -> Evaluation:
        """Run `CalibrationTrainer.held_out_pass`, also for a stock trainer."""
        if not self.is_of_a_stock_trainer:
            return self.trainer.held_out_pass(
                n_samples=n_samples, keep_logits=keep_logits
            )
        if self._loaders is None:
            self._loaders = SplitLoaders(self.trainer)
        loader = self._loaders.loader(self.calibration_dataset, n_samples)
        loss = self.trainer.compute_loss_func
        current = Evaluation(
            self.trainer.accelerator,
            keep_values=math.inf if keep_logits else 0,
            reads_soft_labels=getattr(loss, "reads_soft_labels", False),
        )
        run_held_out(self.trainer, loader, current)
        return current


class AdaFocalCallback(CalibrationCallback):
    """Callback that updates an adaptive loss (AdaFocal, AdaDualFocal, CalFocal, ECE-CE) from
    held-out predictions.

    By default it updates at each evaluation, or after each epoch if there are no evaluations.
    Frequent updates help short runs (AdaFocal, appendix I). The table is in every checkpoint, and
    in `trainer.state.log_history` for `hf_calib.plots.gamma_dynamics`; of a long run, 160 updates
    at nearly equal distances stay there. Trackers and the console get `gamma_mean`, `gamma_min` and
    `gamma_max` of each.

    Args:
        every_n_steps: number of optimizer steps between updates, at least 1, instead of the
            default.
        n_samples: size of a fixed random subset for updates by steps; None for the whole
            calibration split.
        schedule: {epoch: steps}, rising. `{25: 100, 40: 1}` updates as by default in the first 25
            epochs, every 100 optimizer steps in the next 15, and then at every step. Not allowed
            with `every_n_steps`.
        trainer: a stock Trainer whose `compute_loss_func` is the loss.
        calibration_dataset: the held-out rows for this stock Trainer.

    References:
        Ghosh et al. 2022, Algorithm 1; the schedule: Fig. 53.

    >>> AdaFocalCallback(every_n_steps=50, n_samples=2000).every_n_steps
    50
    """

    def __init__(
        self,
        *,
        every_n_steps: int | None = None,
        n_samples: int | None = None,
        schedule: Mapping[int, int] | None = None,
        **rows: Any,
    ) -> None:
        super().__init__(**rows)
        self.every_n_steps = every_n_steps
        self.n_samples = n_samples
        names = ("every_n_steps", "schedule", "n_samples")
        self.schedule = check_updates(names, every_n_steps, schedule, n_samples) or {}
        self._is_training = False
        self._resumed_at = -1

    @property
    def adaptive_loss(self) -> Any:
        """The loss whose table is updated."""
        return (
            getattr(self.trainer, "calibration_loss", None)
            or self.trainer.compute_loss_func
        )

    def on_train_begin(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> None:
        super().on_train_begin(args, state, control)
        self._is_training = True
        self._resumed_at = state.global_step or -1
        if self.is_of_a_stock_trainer:
            loss = self.adaptive_loss
            check(
                isinstance(loss, AdaptiveLoss),
                "compute_loss_func to be a loss that adapts",
                got=loss,
                way_out="pass compute_loss_func=adafocal() to the Trainer",
            )
            loss.to(args.device)
            if state.global_step > 0:
                load_loss_state(loss, _checkpoint(args, state))
        self.adaptive_loss.expect_updates()
        first = self._first_update(args, state)
        # An update after the last step changes no weights.
        if first >= state.max_steps and state.is_world_process_zero:
            warnings.warn(
                f"The loss will never adapt: its first update is after {counted(first, 'step')}, "
                f"and the training has {state.max_steps}. Set a smaller number in "
                "gamma_update_steps or gamma_update_schedule, evaluate more often, or train for "
                "longer.",
                stacklevel=2,
            )

    def _first_update(self, args: Any, state: Any) -> int:
        """The step after which the first update is; of a schedule about that step."""
        if self.every_n_steps is not None:
            return self.every_n_steps
        if 0 in self.schedule:
            return min(self.schedule.values())
        steps_of_epoch = math.ceil(state.max_steps / max(1, state.num_train_epochs))
        first = steps_of_epoch
        if args.eval_on_start:
            first = 0
        elif args.eval_strategy == "steps":
            n_evaluations = math.ceil(max(1, args.eval_delay) / state.eval_steps)
            # There is one after the last step, too.
            first = min(n_evaluations * state.eval_steps, state.max_steps)
        scheduled = [
            epoch * steps_of_epoch + steps for epoch, steps in self.schedule.items()
        ]
        return min([first, *scheduled])

    def update(
        self, done: Evaluation | None = None, *, n_samples: int | None = None
    ) -> None:
        """Update the table and log it, from a given pass, or from a new pass over the held-out
        rows.
        """
        found = done or self.held_out_pass(n_samples=n_samples)
        sums = found.raw
        check_labelled(sums is not None)
        assert sums is not None

        loss = self.adaptive_loss
        state = self.trainer.state
        top = sums.top_label_rows
        of_classes = class_gaps(sums.class_bins()) if loss.reads_labels else None
        loss.update(
            top.confidence,
            top.correct,
            class_gaps=of_classes,
            progress=state.global_step / max(state.max_steps, 1),
        )
        table = loss.log_values()
        # The numbers of all bins are for figures, which read them here; they are too many for a log
        # line.
        state.log_history.append(
            {**table, "epoch": state.epoch, "step": state.global_step}
        )
        self._log_gammas(
            [value for name, value in table.items() if name.startswith("gamma_")]
        )
        _thin_out(state.log_history, most=max(2, _MOST_NUMBERS // len(table)))

    def _log_gammas(self, gammas: list[float]) -> None:
        """Send the gammas to the trackers in three numbers; some losses have none."""
        if not gammas:
            return
        control = self.trainer.control
        is_due = control.should_log
        self.trainer.log(
            {
                "gamma_mean": sum(gammas) / len(gammas),
                "gamma_min": min(gammas),
                "gamma_max": max(gammas),
            }
        )
        control.should_log = is_due  # The training loss may still have to be logged.

    def _interval(self, state: Any) -> int | None:
        """The steps between updates in the epoch of the last step; None for the default."""
        epoch = max(
            0, math.ceil(state.epoch) - 1
        )  # After the last step of epoch 24 it is 25.0.
        interval = self.every_n_steps
        for first_epoch, steps in self.schedule.items():  # These are rising.
            if epoch >= first_epoch:
                interval = steps
        return interval

    def _is_due(self, state: Any) -> bool:
        """Whether updates are as by default, and there was none at this step for another evaluation
        set.
        """
        if self._interval(state) is not None:
            return False
        updates = [entry for entry in state.log_history[-200:] if A_GAP in entry]
        return all(entry["step"] != state.global_step for entry in updates)

    def on_epoch_begin(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> None:
        # It is not at the end of an epoch, because a run may be saved and resumed after the last
        # step.
        if args.eval_strategy == "steps":
            return
        is_whole_epoch = state.epoch == int(state.epoch)
        is_end_of_epoch = state.global_step > 0 and (
            is_whole_epoch or control.should_training_stop
        )
        if is_end_of_epoch and self._is_due(state):
            self.update()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        interval = self._interval(state)
        if interval is not None and state.global_step % interval == 0:
            self.update(n_samples=self.n_samples)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Evaluations after training change nothing.
        if not self._is_training:
            return
        # The evaluation at the start of a resumed run was followed by an update before the run
        # stopped.
        if state.global_step == self._resumed_at:
            return
        if self._is_due(state):
            self.update(self._evaluation_at_hand())

    def _evaluation_at_hand(self) -> Evaluation | None:
        """The last evaluation, if it was of the calibration split, which then needs no pass of its
        own.
        """
        done = getattr(self.trainer, "last_evaluation", None)
        if done is None or done.dataset is not self.trainer.calibration_split:
            return None
        if self.trainer.args.dataloader_drop_last:  # It may lack rows.
            return None
        return done

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (
            self.is_of_a_stock_trainer and args.should_save
        ):  # CalibrationTrainer saves it with the model.
            save_loss_state(self.adaptive_loss, _checkpoint(args, state))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_epoch_begin(args, state, control)  # The last epoch has no next one.
        self._is_training = False
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            # The table belongs to the weights, which are now those of the best checkpoint.
            load_loss_state(self.adaptive_loss, state.best_model_checkpoint)


def _thin_out(log_history: list[dict[str, Any]], most: int) -> None:
    """Keep so many tables, at nearly equal distances: the whole log is in each checkpoint."""
    tables = [place for place, entry in enumerate(log_history) if A_GAP in entry]
    dropped = set()
    while len(tables) > most:
        steps = [log_history[place]["step"] for place in tables]
        # Each table between two others leaves a gap of this width. The first and the last stay.
        pairs = zip(steps[:-2], steps[2:], strict=True)
        widths = [after - before for before, after in pairs]
        place = tables.pop(1 + widths.index(min(widths)))
        dropped.add(place)
        # The line for the trackers follows its table.
        if "gamma_mean" in log_history[place + 1]:
            dropped.add(place + 1)
    kept = [each for i, each in enumerate(log_history) if i not in dropped]
    log_history[:] = kept


class CalibrationMapCallback(CalibrationCallback):
    """Callback that fits a foldable calibrator to the calibration split, whose metrics are then
    logged, too.

    At the end, after the best model is loaded, the evaluation set is evaluated again, so that every
    metric is logged before and after calibration (`eval_ece`, `eval_ece_calibrated`, ...). If the
    fit or this evaluation fails, a warning is given. The calibrator is the attribute `fitted`; with
    a stock Trainer, fold it with `hf_calib.fold`.

    Args:
        scaler: a calibrator that is not fitted, with its settings; each fit uses a copy.
        strategy: "end", or "evaluate" to also fit before each evaluation during training of a
            `CalibrationTrainer`.
        trainer: a stock Trainer.
        calibration_dataset: the rows to fit to, for this stock Trainer.

    >>> from hf_calib.scaling import MatrixScaling
    >>> CalibrationMapCallback(MatrixScaling(off_diagonal_penalty=1.0)).scaler
    MatrixScaling(off_diagonal_penalty=1.0)
    """

    def __init__(self, scaler: Any, *, strategy: str = "end", **rows: Any) -> None:
        super().__init__(**rows)
        check_choice("strategy", strategy, STRATEGIES)
        check(
            strategy == "end" or not self.is_of_a_stock_trainer,
            "strategy to be 'end' for a stock Trainer, which has no event before its evaluations",
            got=repr(strategy),
            way_out="leave it out, or use a CalibrationTrainer",
        )
        self.scaler = scaler
        self.strategy = strategy
        self.title = map_title(method_of(scaler, folds=True))
        self.fitted: Any = None
        self._last_step = -1

    def before_evaluate(self, step: int) -> None:
        """Run before each evaluation during training; several evaluation sets count as one."""
        if self.strategy != "evaluate":
            return
        if step != self._last_step or self.trainer.fitted_map is None:
            self._last_step = step
            self._fit()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        if self.is_of_a_stock_trainer:
            self._fit()
            return
        if trainer.calibration_split is None:
            return  # A warning has said so at the start.
        trainer.during_training = False
        self._fit()
        if trainer.eval_dataset is not None:
            self._evaluate_at_the_end()

    # No error in the following (NaN logits, a broken row) may end a run of one process, whose model
    # is good. With several processes there are two kinds. An error of the fit is the same on all of
    # them, see `fit_once`. An error of a pass may be that of one process, for which the others wait
    # in the next gather: only its end ends them, too.

    def _fit(self) -> None:
        """Fit a copy of the calibrator to the held-out rows, or warn that it was not fitted."""
        self.fitted = None
        if not self.is_of_a_stock_trainer:
            self.trainer.remove_calibration_map()
        scaler = clone(self.scaler)
        passed = None
        try:
            passed = self.held_out_pass(keep_logits=True)
            if self.is_of_a_stock_trainer:
                logits, labels = passed.logits_and_labels()
                check_has_hard_labels(are_soft=passed.has_soft_labels)
                fit_once(self.trainer.accelerator, scaler, logits, labels)
            else:
                self.trainer.fit_calibration_map(scaler, passed)
        except Exception as error:
            is_of_the_pass = passed is None
            if is_of_the_pass and self.trainer.accelerator.num_processes > 1:
                raise
            _warn(
                f"{self.title.capitalize()} was not fitted",
                error,
                "and is not calibrated. Correct the cause, and call fit_calibration_map().",
            )
        else:
            self.fitted = scaler

    def _evaluate_at_the_end(self) -> None:
        """Log the final metrics, or warn that they are not logged."""
        try:
            self.trainer.evaluate()
        except Exception as error:
            if self.trainer.accelerator.num_processes > 1:
                raise
            _warn(
                "The evaluation after the training failed",
                error,
                "but its final metrics are not logged. Correct the evaluation set, and call "
                "evaluate().",
            )


def _warn(failure: str, error: Exception, way_out: str) -> None:
    reason = f"{type(error).__name__}: {error}".rstrip(".")
    warnings.warn(
        f"{failure}: {reason}. The trained model is kept, {way_out}", stacklevel=3
    )


class TemperatureScalingCallback(CalibrationMapCallback):
    """Callback that fits a temperature: `CalibrationMapCallback` with `TemperatureScaling`.

    Args:
        criterion: "nll" (exact), "ece" or "adaptive_ece" (the papers' grid).
        **settings: the arguments of `CalibrationMapCallback`.

    References:
        Guo et al. 2017; the papers' grid: Mukhoti et al. 2020.

    >>> TemperatureScalingCallback(criterion="ece").scaling
    TemperatureScaling(criterion='ece')
    """

    def __init__(self, *, criterion: Any = "nll", **settings: Any) -> None:
        check_choice("criterion", criterion, get_args(Criterion))
        self.scaling = TemperatureScaling(criterion=criterion)
        super().__init__(self.scaling, **settings)


# ---- Callbacks of a CalibrationTrainer ----


class OwnCallbacks:
    """The callbacks of this library in a trainer: those made from its arguments, and those that a
    user passes.

    A user's callback takes the place of ours of this kind, and one that the user removes stays
    away.
    """

    # The gammas are updated before the calibrator is fitted.
    KINDS: tuple[type[CalibrationCallback], ...] = (
        AdaFocalCallback,
        CalibrationMapCallback,
    )

    def __init__(self, trainer: Any, handler: CallbackHandler) -> None:
        self._trainer = trainer
        self._handler = handler
        self._installed: dict[type, TrainerCallback] = {}
        self._removed_by_user: set[type] = set()

    @property
    def gammas(self) -> AdaFocalCallback | None:
        """The callback that updates the loss's table."""
        return self.find(AdaFocalCallback)

    @property
    def fitting(self) -> CalibrationMapCallback | None:
        """The callback that fits the calibrator."""
        return self.find(CalibrationMapCallback)

    def find(self, kind: type[Kind]) -> Kind | None:
        """Return the callback of this kind that acts: the last one."""
        for callback in reversed(self._handler.callbacks):
            if isinstance(callback, kind):
                return callback
        return None

    def replace(
        self, kind: type[CalibrationCallback], wanted: CalibrationCallback | None
    ) -> None:
        """Put a callback in the place of the one that was installed earlier; with None there is
        none.
        """
        earlier = self._installed.pop(kind, None)
        if earlier is not None and earlier in self._handler.callbacks:
            self._handler.callbacks.remove(earlier)
        elif earlier is not None:
            self._removed_by_user.add(kind)
        if (
            wanted is None
            or kind in self._removed_by_user
            or self.find(kind) is not None
        ):
            return
        self._handler.add_callback(wanted)
        self._installed[kind] = wanted

    def arrange(self) -> None:
        """Keep the last of each kind, before all others."""
        ours = [self.find(kind) for kind in self.KINDS]
        acting = [callback for callback in ours if callback is not None]
        for callback in acting:
            callback.trainer = self._trainer
        others = [
            callback
            for callback in self._handler.callbacks
            if not isinstance(callback, self.KINDS)
        ]
        self._handler.callbacks = [*acting, *others]

    def arrange_for_the_end(self) -> None:
        """Put the fit after callbacks that may replace the weights, and before those that may close
        the log.

        A user's callback may leave an average of the weights, to which the calibrator is then
        fitted.
        """
        callbacks = list(self._handler.callbacks)
        fits = [each for each in callbacks if isinstance(each, CalibrationMapCallback)]
        closes = [
            each
            for each in callbacks
            if type(each).on_log is not TrainerCallback.on_log and each not in fits
        ]
        before = [each for each in callbacks if each not in fits and each not in closes]
        self._handler.callbacks = [*before, *fits, *closes]


# ---- Checks of options, also in the arguments ----


def check_updates(
    names: Sequence[str], steps: Any, schedule: Any, samples: Any
) -> dict[int, int] | None:
    """Raise for update settings that do not fit together; return the schedule, whose epochs may be
    JSON strings.
    """
    of_steps, of_schedule, of_samples = names
    if steps is not None:
        check_whole(of_steps, steps, 1, 10**9)
    if samples is not None:
        check_whole(of_samples, samples, 1, 10**12)
    read = None if schedule is None else _read_schedule(schedule)
    check(
        schedule is None or read is not None,
        f"{of_schedule} to map whole epochs, rising, at least 0, to whole numbers of steps, at "
        "least 1",
        got=repr(schedule),
        way_out='write {"25": 100, "40": 1} for every 100 steps from epoch 25 on, each step '
        "from 40 on",
    )
    check(
        schedule is None or steps is None,
        f"{of_schedule} to be used without {of_steps}",
        got=f"{of_steps}={steps}",
        way_out="leave one of them out",
    )
    check(
        samples is None or steps is not None or schedule is not None,
        f"{of_samples} to be used with {of_steps} or {of_schedule}",
        got="neither",
        way_out="set one of them",
    )
    return read


def _read_schedule(schedule: Any) -> dict[int, int] | None:
    """The schedule with epochs as numbers; None if it is not a schedule."""
    if not isinstance(schedule, Mapping) or not schedule:
        return None
    read = {}
    for epoch, steps in schedule.items():
        # The keys of JSON are strings.
        first = int(epoch) if isinstance(epoch, str) and epoch.isdecimal() else epoch
        is_whole = type(first) is int and type(steps) is int  # True is an int, too.
        if not is_whole or first < 0 or steps < 1 or first in read:
            return None
        read[first] = steps
    is_rising = list(read) == sorted(read)
    return read if is_rising else None


def check_whole(name: str, value: object, least: int, most: int) -> None:
    """Raise unless a setting is a whole number in a range."""
    check(
        type(value) is int and least <= value <= most,  # True is an int, too.
        f"{name} to be a whole number, at least {least}, at most {most}",
        got=repr(value),
        way_out="leave it out for the default",
    )


def _checkpoint(args: Any, state: Any) -> Path:
    """The folder of the checkpoint at this step."""
    return Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
