"""Callbacks that update gammas from held-out predictions and fit the calibrator.

`CalibrationTrainer` adds them according to its arguments; pass a callback only to choose its settings in Python. They
also work with the stock `Trainer`, if they get the trainer and the rows.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from sklearn.base import clone
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, IntervalStrategy

from hf_calib._errors import check, did_you_mean, expected
from hf_calib.losses import AdaptiveLoss
from hf_calib.metrics.checks import check_integer
from hf_calib.scaling import TemperatureScaling
from hf_calib.scaling.affine import Criterion
from hf_calib.scaling.saved_map import map_title, method_of
from hf_calib.trainer.calibration_map import fit_once, scaler_of
from hf_calib.trainer.evaluation import Evaluation, check_labelled, held_out
from hf_calib.trainer.saving import load_loss_state, save_loss_state

STRATEGIES = ("end", "evaluate")
Kind = TypeVar("Kind", bound=TrainerCallback)


class CalibrationCallback(TrainerCallback):
    """A callback of a `CalibrationTrainer`, which registers itself, or of a stock trainer, passed with rows."""

    def __init__(self, trainer: Any = None, calibration_dataset: Any = None) -> None:
        way_out = "leave both out for a CalibrationTrainer, which has its own calibration rows"
        together = (trainer is None) == (calibration_dataset is None)
        check(
            together,
            "trainer and calibration_dataset to be given together",
            "one of them",
            way_out,
        )
        self.trainer, self.calibration_dataset = trainer, calibration_dataset
        self.is_of_a_stock_trainer = trainer is not None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> None:
        if self.trainer is None:
            got, way_out = (
                "another trainer",
                "pass trainer=trainer and calibration_dataset=rows",
            )
            raise RuntimeError(
                expected(
                    type(self).__name__, "be used by a CalibrationTrainer", got, way_out
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
        current = Evaluation(
            self.trainer.accelerator, keep_values=math.inf if keep_logits else 0
        )
        return held_out(
            self.trainer, self.calibration_dataset, current, n_samples=n_samples
        )


class AdaFocalCallback(CalibrationCallback):
    """Callback that updates an adaptive loss (AdaFocal, AdaDualFocal, CalFocal, ECE-CE) from held-out predictions.

    By default it updates at each evaluation, or after each epoch if there are no evaluations. Frequent updates help
    short runs (AdaFocal, appendix I). The table is in every checkpoint, and in `trainer.state.log_history` for
    `hf_calib.plots.gamma_dynamics`. Trackers and the console get `gamma_mean`, `gamma_min` and `gamma_max`.

    Args:
        every_n_steps: number of optimizer steps between updates, at least 1, instead of the default.
        n_samples: size of a fixed random subset for updates by steps; None for the whole calibration split.
        schedule: {epoch: steps}, rising. `{25: 100, 40: 1}` updates as by default in the first 25 epochs, every 100
            optimizer steps in the next 15, and then at every step. Not allowed with `every_n_steps`.
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
        self.every_n_steps, self.n_samples = every_n_steps, n_samples
        for name in ("every_n_steps", "n_samples"):
            if getattr(self, name) is not None:
                check_integer(
                    name, getattr(self, name), 1, "leave it out for the default"
                )
        names = ("every_n_steps", "schedule", "n_samples")
        self.schedule = check_updates(names, every_n_steps, schedule, n_samples) or {}
        self._training, self._resumed_at = False, -1

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
        self._training, self._resumed_at = True, state.global_step or -1
        if self.is_of_a_stock_trainer:
            way_out = "pass compute_loss_func=adafocal() to the Trainer"
            adapts = isinstance(self.adaptive_loss, AdaptiveLoss)
            check(
                adapts,
                "compute_loss_func to be a loss that adapts",
                self.adaptive_loss,
                way_out,
            )
            self.adaptive_loss.to(args.device)
            if state.global_step > 0:
                load_loss_state(self.adaptive_loss, _checkpoint(args, state))

    def update(
        self, done: Evaluation | None = None, *, n_samples: int | None = None
    ) -> None:
        """Update the table and log it, from a given pass, or from a new pass over the held-out rows."""
        found = (done or self.held_out_pass(n_samples=n_samples)).raw
        loss, trainer, state = self.adaptive_loss, self.trainer, self.trainer.state
        check_labelled(found is not None)
        assert found is not None
        gaps = found.class_gaps if loss.reads_labels else None
        progress = state.global_step / max(state.max_steps, 1)
        loss.update(*found.top_label, class_gaps=gaps, progress=progress)
        # The numbers of all bins are for figures, which read them here; they are too many for a log line.
        table = loss.log_values()
        state.log_history.append(
            {**table, "epoch": state.epoch, "step": state.global_step}
        )
        gammas = [value for name, value in table.items() if name.startswith("gamma_")]
        if gammas:
            due = trainer.control.should_log
            mean = sum(gammas) / len(gammas)
            trainer.log(
                {"gamma_mean": mean, "gamma_min": min(gammas), "gamma_max": max(gammas)}
            )
            trainer.control.should_log = (
                due  # The training loss may still have to be logged.
            )

    def _interval(self, state: Any) -> int | None:
        """The optimizer steps between updates in the epoch of the last step; None for the default."""
        epoch = max(
            0, math.ceil(state.epoch) - 1
        )  # After the last step of epoch 24 it is 25.0.
        begun = [steps for first, steps in self.schedule.items() if epoch >= first]
        return begun[-1] if begun else self.every_n_steps

    def _is_due(self, state: Any) -> bool:
        """Whether updates are as by default, and there was none at this step for another evaluation set."""
        last = [
            entry["step"]
            for entry in state.log_history[-200:]
            if "calibration_gap_00" in entry
        ]
        return self._interval(state) is None and state.global_step not in last

    def on_epoch_begin(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> None:
        # It is not at the end of an epoch, because a run may be saved and resumed after the last step.
        by_epochs = args.eval_strategy in (IntervalStrategy.NO, IntervalStrategy.EPOCH)
        is_end = state.global_step > 0 and (
            state.epoch == int(state.epoch) or control.should_training_stop
        )
        if by_epochs and is_end and self._is_due(state):
            self.update()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        interval = self._interval(state)
        if interval is not None and state.global_step % interval == 0:
            self.update(n_samples=self.n_samples)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Evaluations after training change nothing. The evaluation at the start of a resumed run was followed by an
        # update before the run stopped.
        if (
            self._training
            and state.global_step != self._resumed_at
            and self._is_due(state)
        ):
            done = getattr(self.trainer, "last_evaluation", None)
            at_hand = (
                done is not None and done.dataset is self.trainer.calibration_split
            )
            self.update(done if at_hand else None)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (
            self.is_of_a_stock_trainer and args.should_save
        ):  # CalibrationTrainer saves it with the model.
            save_loss_state(self.adaptive_loss, _checkpoint(args, state))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_epoch_begin(args, state, control)
        self._training = False
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            load_loss_state(self.adaptive_loss, state.best_model_checkpoint)


class CalibrationMapCallback(CalibrationCallback):
    """Callback that fits a foldable calibrator to the calibration split, whose metrics are then logged, too.

    At the end, after the best model is loaded, the evaluation set is evaluated again, so that every metric is logged
    before and after calibration (`eval_ece`, `eval_ece_calibrated`, ...). If the fit or this evaluation fails, a
    warning is given. The calibrator is the attribute `fitted`; with a stock Trainer, fold it with `hf_calib.fold`.

    Args:
        scaler: a calibrator that is not fitted, with its settings; each fit uses a copy.
        strategy: "end", or "evaluate" to also fit before each evaluation during training.
        trainer: a stock Trainer.
        calibration_dataset: the rows to fit to, for this stock Trainer.

    >>> from hf_calib.scaling import MatrixScaling
    >>> CalibrationMapCallback(MatrixScaling(off_diagonal_penalty=1.0)).scaler
    MatrixScaling(off_diagonal_penalty=1.0)
    """

    def __init__(self, scaler: Any, *, strategy: str = "end", **rows: Any) -> None:
        super().__init__(**rows)
        check_option("strategy", strategy, STRATEGIES)
        self.title = map_title(method_of(scaler, folds=True))
        self.scaler, self.strategy, self._last_step = scaler, strategy, -1
        self.fitted: Any = None

    def before_evaluate(self, step: int) -> None:
        """Run before each evaluation during training; several evaluation sets count as one."""
        if self.strategy == "evaluate" and (
            step != self._last_step or self.trainer.fitted_map is None
        ):
            self._last_step = step
            self._fit()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        if not self.is_of_a_stock_trainer and trainer.calibration_split is None:
            return
        trainer.during_training = False
        self._fit()
        if trainer.eval_dataset is not None and not self.is_of_a_stock_trainer:
            way_out = "but its final metrics are not logged. Correct the evaluation set, and call evaluate()."
            _or_warn(
                trainer.evaluate, "The evaluation after the training failed", way_out
            )

    def _fit(self) -> None:
        scaler, trainer = clone(self.scaler), self.trainer

        def fit() -> Any:
            if not self.is_of_a_stock_trainer:
                return trainer.fit_calibration_map(scaler)
            fit_once(
                trainer.accelerator,
                scaler,
                *self.held_out_pass(keep_logits=True).logits_and_labels(),
            )
            return scaler

        way_out = (
            "and is not calibrated. Correct the cause, and call fit_calibration_map()."
        )
        self.fitted = _or_warn(
            fit, f"{self.title.capitalize()} was not fitted", way_out
        )


def _or_warn(work: Callable[[], Any], failure: str, way_out: str) -> Any:
    """Run the work, and warn if it fails, because no error here (NaN logits, a broken row) may end a run."""
    try:
        return work()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".rstrip(".")
        warnings.warn(
            f"{failure}: {reason}. The trained model is kept, {way_out}", stacklevel=3
        )
        return None


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
        check_option("criterion", criterion, get_args(Criterion))
        self.scaling = TemperatureScaling(criterion=criterion)
        super().__init__(self.scaling, **settings)


# ---- Callbacks of a CalibrationTrainer ----


def renew(trainer: Any) -> None:
    """Replace the earlier callbacks by those of a configuration."""
    handler, config, scaler = (
        trainer.callback_handler,
        trainer.calibration_config,
        scaler_of(trainer),
    )
    wanted: dict[type[TrainerCallback], Any] = {
        AdaFocalCallback: None,
        CalibrationMapCallback: None,
    }
    if isinstance(trainer.calibration_loss, AdaptiveLoss):
        updates = {
            "every_n_steps": config.gamma_update_steps,
            "n_samples": config.gamma_update_samples,
        }
        wanted[AdaFocalCallback] = AdaFocalCallback(
            **updates, schedule=config.gamma_update_schedule
        )
    strategy = {"strategy": config.calibration_strategy}
    if isinstance(scaler, TemperatureScaling):  # remove_callback gets this class.
        wanted[CalibrationMapCallback] = TemperatureScalingCallback(
            criterion=scaler.criterion, **strategy
        )
    elif scaler is not None:
        wanted[CalibrationMapCallback] = CalibrationMapCallback(scaler, **strategy)
    for kind, callback in wanted.items():
        earlier = trainer.made_callbacks.get(kind)
        if earlier is not None and earlier not in handler.callbacks:
            continue  # The user has removed it.
        if earlier is not None:
            handler.callbacks.remove(earlier)
        is_own = callback is not None and own_callback(trainer, kind) is None
        trainer.made_callbacks[kind] = callback if is_own else None
        if is_own:
            trainer.add_callback(callback)
    arrange(trainer)


def arrange(trainer: Any) -> None:
    """Keep the last of each of our callbacks, gammas before calibrator, before those that close the log."""
    callbacks = trainer.callback_handler.callbacks
    kinds = AdaFocalCallback, CalibrationMapCallback
    ours = [own for kind in kinds if (own := own_callback(trainer, kind)) is not None]
    for callback in ours:
        callback.trainer = trainer
    callbacks[:] = [
        *ours,
        *(callback for callback in callbacks if not isinstance(callback, kinds)),
    ]


def own_callback(trainer: Any, kind: type[Kind]) -> Kind | None:
    """The last callback of this type in a trainer."""
    return next(
        (
            c
            for c in reversed(trainer.callback_handler.callbacks)
            if isinstance(c, kind)
        ),
        None,
    )


def scaler_to_fit(trainer: Any) -> Any:
    """A copy of the callback's calibrator, otherwise that of the arguments, otherwise a temperature."""
    callback = own_callback(trainer, CalibrationMapCallback)
    scaler = scaler_of(trainer) if callback is None else clone(callback.scaler)
    return TemperatureScaling() if scaler is None else scaler


# ---- Checks of options, also in the arguments ----


def check_updates(
    names: Sequence[str], steps: Any, schedule: Any, samples: Any
) -> dict[int, int] | None:
    """Raise for update settings that do not fit together; return the schedule, whose epochs may be JSON strings."""
    given = schedule if isinstance(schedule, Mapping) else {}
    epochs = [
        int(key) if isinstance(key, str) and key.isdecimal() else key for key in given
    ]
    whole = bool(given) and all(
        type(number) is int for number in [*epochs, *given.values()]
    )
    holds = (
        whole
        and epochs == sorted(set(epochs))
        and epochs[0] >= 0
        and min(given.values()) >= 1
    )
    requirement = f"{names[1]} to map whole epochs, rising, at least 0, to whole numbers of steps, at least 1"
    way_out = 'write {"25": 100, "40": 1} for every 100 steps from epoch 25 on, each step from 40 on'
    check(schedule is None or holds, requirement, repr(schedule), way_out)
    alone, got = None in (schedule, steps), f"{names[0]}={steps}"
    check(
        alone, f"{names[1]} to be used without {names[0]}", got, "leave one of them out"
    )
    by_steps = samples is None or steps is not None or schedule is not None
    check(
        by_steps,
        f"{names[2]} to be used with {names[0]} or {names[1]}",
        "neither",
        "set one of them",
    )
    return dict(zip(epochs, given.values(), strict=True)) or None


def check_option(name: str, value: object, options: tuple[str, ...]) -> None:
    """Raise unless a setting is one of the options."""
    check(
        value in options,
        f"{name} to be one of {options}",
        repr(value),
        did_you_mean(value, options),
    )


def _checkpoint(args: Any, state: Any) -> Path:
    """The folder of the checkpoint at this step."""
    return Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
