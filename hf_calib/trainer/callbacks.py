"""What happens beside the optimizer steps: the gammas follow the calibration split, a temperature is fitted.

`CalibrationTrainer` adds these callbacks by itself, as its arguments say. Pass one of them to it only to
choose its settings in Python.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback
from transformers.trainer_utils import IntervalStrategy

from hf_calib._errors import InputValueError, expected
from hf_calib.scaling import TemperatureScaling

if TYPE_CHECKING:
    from hf_calib.trainer.trainer import CalibrationTrainer


class _CalibrationCallback(TrainerCallback):
    """A callback that works on the trainer; the trainer introduces itself when the callback is added."""

    trainer: CalibrationTrainer | None = None

    def _attached(self) -> CalibrationTrainer:
        if self.trainer is None:
            name = type(self).__name__
            raise RuntimeError(
                expected(name, "be used by a CalibrationTrainer", "another trainer", "switch to it")
            )
        return self.trainer


class AdaFocalCallback(_CalibrationCallback):
    """Updates the table of an adaptive loss (AdaFocal, AdaDualFocal, CalFocal, ECE-CE) from held-out predictions.

    By default at each evaluation, on the whole calibration split, and at the end of each epoch where there are
    no evaluations; or every `every_n_steps` optimizer steps, on a fixed random subset of `n_samples` examples.
    Frequent updates help short trainings (AdaFocal, Appendix K). The model's mode, the random streams and the
    progress bars are left as found, and the values are the same on every process. Each update at an evaluation
    is logged (`gamma_00`, ..., `calibration_gap_00`, ...: see `hf_calib.plots.gamma_dynamics`); updates every n
    steps are logged when the training loss is, and the last one in any case.

    Args:
        every_n_steps: None, or at least 1.
        n_samples: None for all; only with `every_n_steps`.

    References:
        Ghosh et al. 2022, Algorithm 1.
    """

    def __init__(self, *, every_n_steps: int | None = None, n_samples: int | None = None) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("n_samples", n_samples)):
            if value is not None and value < 1:
                raise InputValueError(expected(name, "be at least 1", value, "leave it out for the default"))
        if n_samples is not None and every_n_steps is None:
            raise InputValueError(
                expected("n_samples", "go with every_n_steps", "every_n_steps=None", "set both")
            )
        self.every_n_steps = every_n_steps
        self.n_samples = n_samples
        self._updating = False
        self._unlogged = False
        self._last_step = -1

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer, resumed = self._attached(), state.global_step > 0
        # What is evaluated before the first step of a resumed training was followed before.
        self._updating, self._last_step = True, state.global_step if resumed else -1
        if resumed and self._missed_at_epoch_end(args, state):
            trainer.update_adaptive_loss()

    def _missed_at_epoch_end(self, args: Any, state: Any) -> bool:
        """Whether the checkpoint was saved at the last step of an epoch, but before the epoch's update."""
        at_epoch_end = args.eval_strategy in (IntervalStrategy.NO, IntervalStrategy.EPOCH)
        if self.every_n_steps is not None or not at_epoch_end or state.epoch != int(state.epoch):
            return False
        logged = (entry for entry in reversed(state.log_history) if entry.get("step") == state.global_step)
        return not any("calibration_gap_00" in entry for entry in logged)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.every_n_steps is not None and state.global_step % self.every_n_steps == 0:
            self._unlogged = not control.should_log
            self._attached().update_adaptive_loss(n_samples=self.n_samples, log=control.should_log)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.every_n_steps is None and args.eval_strategy == IntervalStrategy.NO:
            self._attached().update_adaptive_loss()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Several evaluation sets make one evaluation; and what is evaluated after the training is not training.
        if self._updating and self.every_n_steps is None and state.global_step != self._last_step:
            self._last_step = state.global_step
            trainer = self._attached()
            at_hand = trainer.evaluated_dataset is trainer.calibration_split
            trainer.update_adaptive_loss(trainer.last_evaluation if at_hand else None)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._updating = False
        if self._unlogged:
            self._attached().log_adaptive_loss()
            self._unlogged = False


class TemperatureScalingCallback(_CalibrationCallback):
    """Fits a temperature on the calibration split, and has it reported beside the raw probabilities.

    At the end of the training, after the best model was loaded, the evaluation set (if there is one) is
    evaluated once more, so that the log ends with every metric before and after (`eval_ece`,
    `eval_ece_calibrated`, ...). With `strategy="evaluate"` each evaluation during the training is preceded by
    a fit too.

    Args:
        criterion: "nll" (exact), "ece" or "adaptive_ece" (the papers' grid).
        strategy: "end" or "evaluate".

    References:
        Guo et al. 2017; the papers' grid: Mukhoti et al. 2020.
    """

    def __init__(self, *, criterion: Any = "nll", strategy: str = "end") -> None:
        if strategy not in ("end", "evaluate"):
            raise InputValueError(
                expected("strategy", "be 'end' or 'evaluate'", repr(strategy), "see the docstring")
            )
        self.scaling = TemperatureScaling(criterion=criterion)
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

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self._attached()
        if trainer.calibration_split is None:
            return
        self._last_step = state.global_step
        self._fit()
        if trainer.eval_dataset is not None:
            trainer.evaluate()

    def _fit(self) -> None:
        """Fit; but a model whose logits no temperature fits (NaN) is no reason to lose a finished training."""
        trainer = self._attached()
        try:
            trainer.fit_temperature()
        except ValueError as error:
            trainer.temperature = None
            warnings.warn(f"no temperature was fitted: {error}", stacklevel=2)
