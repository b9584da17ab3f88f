"""Hyperparameter search: its objective, and what a calibration map does for rows that it is also fitted on."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from numpy.typing import NDArray
from sklearn.base import clone
from transformers import Trainer
from transformers.trainer_utils import BestRun

from hf_calib._errors import InputTypeError, InputValueError, did_you_mean, expected, few
from hf_calib.export.heads import head_loses_bias
from hf_calib.metrics.state import LOGGED_METRICS
from hf_calib.metrics.streaming import StreamingCalibration
from hf_calib.scaling import AutoScaling, TemperatureScaling
from hf_calib.trainer.arguments import CalibrationTrainingArguments
from hf_calib.trainer.calibration_map import fit_once
from hf_calib.trainer.callbacks import CalibrationMapCallback, own_callback
from hf_calib.trainer.labels import number_of_classes

N_FOLDS = 5
CALIBRATED = "_calibrated"
_METRICS = [f"eval_{key}{suffix}" for suffix in ("", CALIBRATED) for key in LOGGED_METRICS]


def objective_named(
    name: str, direction: Any, *, own_metrics: bool, has_map: bool
) -> Callable[[dict[str, float]], float]:
    """The function of an evaluation's metrics that takes the one of this name.

    Args:
        name: a log key, such as "eval_nll".
        direction: of the search: "minimize" or "maximize".
        own_metrics: whether the user computes more of them than there are here.
        has_map: whether the trainer fits a calibration map.

    Raises:
        ValueError: for a name that no evaluation logs, or the wrong direction.
    """
    if name not in (*_METRICS, "eval_loss") and not own_metrics:
        requirement = "be a function of an evaluation's metrics, or the name of one"
        raise InputValueError(
            expected("compute_objective", requirement, repr(name), did_you_mean(name, _METRICS))
        )
    metric = name.removeprefix("eval_").removesuffix(CALIBRATED)
    right = "maximize" if metric == "accuracy" else "minimize"
    if direction != right and (metric in LOGGED_METRICS or name == "eval_loss"):
        way_out = "pass a function of the metrics as compute_objective for another aim"
        raise InputValueError(expected("direction", f"be {right!r} for {name}", repr(direction), way_out))
    if name.endswith(CALIBRATED) and metric in LOGGED_METRICS and not has_map:
        got = "none"
        way_out = f"set calibration_method, or search for {name.removesuffix(CALIBRATED)!r}"
        raise InputValueError(expected("a calibration map", f"be asked for with {name!r}", got, way_out))

    def objective(metrics: dict[str, float]) -> float:
        if name not in metrics:
            got = few(sorted(metrics))
            raise InputValueError(
                expected(
                    "the evaluation", f"have {name!r}", got, "search for one of these, or correct the trial"
                )
            )
        return metrics[name]

    return objective


def out_of_fold_metrics(
    accelerator: Accelerator,
    scaler: Any,
    logits: NDArray[Any],
    labels: NDArray[Any],
    *,
    prefix: str,
    n_bins: int,
) -> dict[str, float]:
    """Metrics after a map, of rows which are also all that it can be fitted on: each by the map of the other folds.

    The folds are random, and the same each time, so trials are compared on the same ones. A fit that fails gives
    NaN and a warning: a trial whose logits are NaN is no reason to lose a search.

    Args:
        accelerator: the trainer's; one process fits for all.
        scaler: not fitted.
        logits: (N, C).
        labels: (N,) int, or (N, C) of 0, 1 and -100.
        prefix: of the keys, such as "eval".
        n_bins: bins of the calibration errors.
    """
    folds = np.random.default_rng(0).permutation(np.arange(len(labels)) % N_FOLDS)
    mapped = np.empty(logits.shape, dtype=np.float32)
    try:
        for fold in np.unique(folds):
            held_out = folds == fold
            fitted = clone(scaler)
            fit_once(accelerator, fitted, logits[~held_out], labels[~held_out])
            mapped[held_out] = fitted.transform(logits[held_out])
        state = StreamingCalibration(n_bins=n_bins, multi_label=labels.ndim == 2)
        state.update(torch.from_numpy(mapped), torch.from_numpy(labels))
        values = state.compute()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".rstrip(".")
        warnings.warn(
            f"The calibration map could not be scored: {reason}. Its metrics are logged as NaN, which fails a trial "
            "that is judged by them. Look at the trial's settings and the labels of the calibration split.",
            stacklevel=2,
        )
        values = dict.fromkeys(LOGGED_METRICS, math.nan)
    return {f"{prefix}_{name}{CALIBRATED}": value for name, value in values.items()}


def values_of_best_trial(best: Any, hp_space: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """All that the best trial set, the constants of its space too; nothing where there is no one best trial.

    Args:
        best: what the search returned.
        hp_space: its space, for an optuna trial.
    """
    if not isinstance(best, BestRun):  # several objectives, or another process than the first
        return {}
    if not best.run_id.isdigit():  # ray and wandb: their values are drawn already
        return best.hyperparameters
    from optuna.trial import FixedTrial

    try:
        return hp_space(FixedTrial(best.hyperparameters, int(best.run_id)))
    except Exception as error:  # the study may be of an older space; its result must not be lost
        warnings.warn(
            f"The best trial's arguments were not set: {type(error).__name__}: {error}. The search space does not take "
            "the values that the study holds. Set them from the returned hyperparameters.",
            stacklevel=3,
        )
        return {}


class SearchMixin(Trainer):
    """The hyperparameter search of a trainer: on the calibration split, with the values of each trial on its args."""

    args: Any
    eval_dataset: Any
    calibration_dataset: Any
    calibration_split: Any
    _arguments_before: dict[str, Any] | None = None  # while there is a search
    searches_by_map = False

    def hyperparameter_search(
        self,
        hp_space: Any = None,
        compute_objective: Callable[[dict[str, float]], float] | str | None = None,
        n_trials: int = 20,
        direction: Any = "minimize",
        backend: Any = None,
        hp_name: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Search as `Trainer.hyperparameter_search` does, on the calibration split; by default for the smallest NLL.

        Each trial trains a model of its own (`model_init`), from the same seed unless it sets one, and is evaluated on
        the calibration split: `eval_dataset` is not read before the search is over. Without a `calibration_dataset`
        the search is on `eval_dataset`, with a warning. No map is fitted at the end of a trial.

        A trial sets `loss`, and the hyperparameters of the loss by the names `loss_gamma`, `loss_n_bins` and so on;
        the Trainer passes over those that the trial's loss does not have, and says so in its log. What a trial does
        not set is as it was before the search, whatever other trials set; `loss_kwargs` go with the loss that they
        stand beside.

        After the search `args` hold the best trial's values, so `trainer.train()` trains it again, now with the map
        and the evaluation set. Setting `best.hyperparameters` on them by name, as is usual, changes nothing. (They
        are only what was drawn: a constant of the space, `{"loss": "focal", ...}`, is not among them.)

        Args:
            hp_space: a function of an optuna trial that returns the arguments to set.
            compute_objective: a function of an evaluation's metrics, or the name of one, such as "eval_brier" or
                "eval_nll_calibrated". None is "eval_nll": `eval_loss` does not compare losses with each other, and
                the sum of all metrics, which is the Trainer's default, means nothing.
            n_trials: how many trials this call begins.
            direction: "minimize" or "maximize"; a list for several objectives, with a function that returns as many.
            backend: "optuna", "ray" or "wandb"; None takes what is installed.
            hp_name: a function of a trial that names its run.
            **kwargs: of the backend. For optuna those of `create_study` (`storage`, `study_name`, `load_if_exists`,
                `sampler`, `pruner`), and `timeout`, `gc_after_trial` and `catch` of its `optimize`.

        Returns:
            The `BestRun`, as `Trainer` does; a list of them for several objectives, which leave `args` as they were.

        Raises:
            ValueError: if there is no split to search on, or the objective's name or direction is wrong; before any
                training.

        Notes:
            The objective is that of a trial's last evaluation (with `load_best_model_at_end` too), or of one after
            the training where `eval_strategy` is "no". Pruners see each evaluation.

            Metrics with the calibration map ("eval_nll_calibrated") are out of fold: in five parts of the
            calibration split, each row is mapped by a map that was fitted on the other parts. They are there where
            the objective's name asks for them, or `calibration_strategy="evaluate"` does. With `calibration_method`
            "auto" this takes seconds at each evaluation from some twenty classes on; a temperature is quick.

            An adaptive loss takes its gammas from the rows that it is then judged by, a few numbers from all of
            them; the best value of a search is optimistic in any case. Report the evaluation set.

            With `storage="sqlite:///search.db", study_name="search", load_if_exists=True` a search that was
            interrupted goes on: finished trials are kept, and new ones are added. Optuna counts `n_trials` for each
            call, so pass what is left. A trial that was killed stays in the study as RUNNING and is not resumed. A
            sampler with a fixed seed would draw the same values again: give each call another one. Processes that
            call this at once with the same storage share the study.

            On several processes (torchrun) all take part in each trial. Pruners do not work there: only the first
            process would stop. Only the first returns the `BestRun`; args are set on all.

        Example::

            best = trainer.hyperparameter_search(
                lambda trial: {
                    "loss": trial.suggest_categorical("loss", ["focal", "dual_focal"]),
                    "loss_gamma": trial.suggest_float("loss_gamma", 0.5, 5.0),
                },
                "eval_nll_calibrated",
                n_trials=10,
            )
            trainer.train()
        """
        if not isinstance(self.args, CalibrationTrainingArguments):
            got, way_out = type(self.args).__name__, "a trial sets the loss and the map on these"
            requirement = "be CalibrationTrainingArguments, to be searched"
            raise InputTypeError(expected("args", requirement, got, way_out))
        if self.calibration_split is None:
            got = "several evaluation sets" if isinstance(self.eval_dataset, dict) else "none"
            way_out = "pass calibration_dataset to the trainer"
            raise InputValueError(expected("calibration_dataset", "be given to search on", got, way_out))
        asked = "eval_nll" if compute_objective is None else compute_objective
        self.searches_by_map = isinstance(asked, str) and asked.endswith("_calibrated")
        if isinstance(asked, str):
            asked = objective_named(
                asked,
                direction,
                own_metrics=self.compute_metrics is not None,
                has_map=own_callback(self, CalibrationMapCallback) is not None,
            )
        if self.calibration_dataset is None and self.is_world_process_zero():
            warnings.warn(
                "There is no calibration_dataset, so the search is on the evaluation split. What is reported for it "
                "afterwards is optimistic. Pass calibration_dataset, and keep the evaluation split out of the search.",
                stacklevel=2,
            )
        space = None if hp_space is None else lambda trial: _loss_first(hp_space(trial))
        reported, self.eval_dataset = self.eval_dataset, self.calibration_split
        self._arguments_before = {each.name: getattr(self.args, each.name) for each in fields(self.args)}
        try:
            best = super().hyperparameter_search(
                space, asked, n_trials, direction, backend, hp_name, **kwargs
            )
        finally:
            self.restore_arguments()
            self._arguments_before = None
            self.eval_dataset = reported
        values = [values_of_best_trial(best, self.hp_space)]
        broadcast_object_list(values)  # only the first process knows them
        with self.values_of_a_trial():
            for name, value in _loss_first(values[0]).items():
                if hasattr(self.args, name):  # the rest as in a trial
                    known = getattr(self.args, name)
                    setattr(self.args, name, value if known is None else type(known)(value))
        return best

    @property
    def is_searching(self) -> bool:
        """Whether a hyperparameter search is under way: evaluations are then of the calibration split."""
        return self._arguments_before is not None

    def restore_arguments(self) -> None:
        """Undo the settings of the trial before."""
        for name, value in (self._arguments_before or {}).items():
            setattr(self.args, name, value)

    @contextmanager
    def values_of_a_trial(self) -> Iterator[None]:
        """Within it a trial's values are set on args; `loss_kwargs` stay only with the loss that they are of."""
        loss = self.args.loss
        own: Any = self.args.loss_kwargs
        self.args.loss_kwargs = {}
        yield
        of_trial: Any = self.args.loss_kwargs
        if self.args.loss == loss:
            self.args.loss_kwargs = {**own, **of_trial} if own else of_trial or own

    def scaler_to_search_by(self, callback: CalibrationMapCallback | None, model: Any) -> Any:
        """In a search, the scaler whose metrics its evaluations have; else None."""
        wanted = callback is not None and (self.searches_by_map or callback.strategy == "evaluate")
        if not (self.is_searching and wanted):
            return None
        assert callback is not None
        gives_way = isinstance(callback.scaler, AutoScaling) and head_loses_bias(
            model, number_of_classes(model)
        )
        return TemperatureScaling() if gives_way else callback.scaler


def _loss_first(values: dict[str, Any]) -> dict[str, Any]:
    """A trial's values are set in this order, and the loss decides which hyperparameters there are."""
    return dict(sorted(values.items(), key=lambda item: item[0] != "loss"))
