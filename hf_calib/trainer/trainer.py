"""`CalibrationTrainer`: the Hugging Face Trainer with a calibration loss, metrics and a calibration map."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate.data_loader import BatchSamplerShard
from accelerate.utils import broadcast_object_list, gather_object
from sklearn.base import clone
from torch import Tensor
from transformers import (
    DefaultFlowCallback,
    PreTrainedConfig,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
)
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from hf_calib._compat import declare_loss_scaled
from hf_calib._errors import InputTypeError, InputValueError, expected
from hf_calib._hub import CARD, with_owner
from hf_calib.cards.card import mend_stock_card, write_card
from hf_calib.export.heads import head_loses_bias
from hf_calib.export.hub import push_folder
from hf_calib.export.saving import (
    check_overwrites_no_original,
    loaded_from,
    save_folded,
    standalone_copy,
)
from hf_calib.losses import AdaptiveLoss, CalibrationLoss, all_gather_rows, logits_of
from hf_calib.losses.statistics.definitions import IGNORE_INDEX
from hf_calib.scaling import AutoScaling, TemperatureScaling
from hf_calib.scaling.methods import foldable_method
from hf_calib.scaling.saved_map import MAP_NAME, few_parameters, save_map, temperature_of, title_of
from hf_calib.trainer import preflight
from hf_calib.trainer.arguments import BALANCED, CalibrationTrainingArguments, hub_token_left_out
from hf_calib.trainer.calibration_map import (
    check_fitted,
    check_head,
    check_problem,
    fit_once,
    has_bias,
    map_of_checkpoint,
)
from hf_calib.trainer.callbacks import (
    AdaFocalCallback,
    CalibrationMapCallback,
    EndOfTraining,
    TemperatureScalingCallback,
    _CalibrationCallback,
)
from hf_calib.trainer.checkpoint import (
    check_complete,
    last_complete_checkpoint,
    load_adapter,
    load_loss_state,
    load_weights,
    save_loss_state,
)
from hf_calib.trainer.evaluation_pass import Evaluation, EvaluationPass
from hf_calib.trainer.labels import (
    aligned_labels,
    balanced_class_weights,
    check_decisions,
    collated_labels,
    number_of_classes,
    predicts_next_token,
    read_labels,
)
from hf_calib.trainer.milestones import milestone_schedule
from hf_calib.trainer.random_state import random_state_left_as_found
from hf_calib.trainer.report import REPORT, about_data, is_map_of, measured, write_results
from hf_calib.trainer.search import objective_named, out_of_fold_metrics, values_of_best_trial
from hf_calib.trainer.training_trace import TrainingTrace

logger = logging.getLogger(__name__)

_Callback = TypeVar("_Callback", bound=_CalibrationCallback)


class CalibrationTrainer(Trainer):
    """A `Trainer` that trains with a calibration loss and reports how calibrated the model is.

    It takes the arguments of `Trainer`, plus `calibration_dataset`. What it adds:

    * the loss that `args.loss` names, computed in float32 from the logits and the labels, which the model
      never sees; the loss of an optimizer step is the mean over the whole global batch, however it is cut into
      micro-batches and processes;
    * `eval_accuracy`, `eval_ece`, `eval_adaptive_ece`, `eval_classwise_ece`, `eval_mce`, `eval_nll`,
      `eval_brier` at each evaluation, with no extra forward pass and without keeping logits;
    * for losses that adapt, updates of their gammas from the calibration split, saved in every checkpoint;
    * a calibration map (`args.calibration_method`), fitted on the calibration split at the end, and the same
      metrics with it, `eval_ece_calibrated` and so on;
    * `save_calibrated_model`: a directory that a plain `transformers.pipeline` serves calibrated.

    Args:
        model: a classifier whose output has `logits`: sequence, token or image classification, multi-label;
            or a causal language model.
        args: `CalibrationTrainingArguments`.
        calibration_dataset: held-out examples for the gammas and the calibration map, like `eval_dataset`;
            used for nothing else. None uses the evaluation set for both, with a warning.
        **kwargs: the other arguments of `Trainer`. Of several `AdaFocalCallback` or
            `CalibrationMapCallback` in `callbacks`, the last of each counts.

    Attributes:
        calibration_map: the fitted scaler, or None: the one object that metrics, records and saving go by.

    Raises:
        TypeError: if args are not `CalibrationTrainingArguments`.
        ValueError: for arguments that do not fit together; before any training.

    Notes:
        `save_model` and the checkpoints hold the model as trained, as with `Trainer`, and the map beside it in
        `calibration.json`, from which a resumed training has it again. What is to be served is written by
        `save_calibrated_model`, or by `push_to_hub`.

        A head that has no bias when it is loaded (GPT-2's) cannot hold a map with one: vector, matrix and the like
        are refused before the training. "auto", which chooses by the data, gives way to a temperature there, with
        a warning.

        Whether the problem is multi-label is decided once: by the model's `problem_type`, else by the labels of
        the training split. All splits are held to it.

        A causal language model's logits at position t are compared with the label at t + 1, as in
        transformers, in the loss, the metrics and the map alike. Encoder-decoders that generate are
        refused.

        On several processes, accelerate repeats rows to fill the last batch of an epoch. They are ignored, so
        the loss is that of one process; only a dataset without a length (a stream) may count some twice.

        A subclass with a `compute_loss` of its own returns the mean over its micro-batch, which is averaged over
        accumulation steps and processes; set `loss_is_scaled_for_ga=True` if it is normalised already.

    Example:
        Two lines of a Trainer script change:

            args = CalibrationTrainingArguments(loss="adafocal", output_dir="out", ...)
            trainer = CalibrationTrainer(
                model, args, train_dataset=..., calibration_dataset=..., eval_dataset=...
            )
            trainer.train()
            trainer.save_calibrated_model("calibrated")
    """

    args: CalibrationTrainingArguments
    loss_is_scaled_for_ga: bool | None = None  # which transformers < 5.19 does not have

    def __init__(
        self,
        model: Any = None,
        args: CalibrationTrainingArguments | None = None,
        *positional: Any,
        calibration_dataset: Any = None,
        **kwargs: Any,
    ) -> None:
        if args is None:
            args = CalibrationTrainingArguments(output_dir="tmp_trainer")
        if not isinstance(args, CalibrationTrainingArguments):
            way_out = "replace TrainingArguments by it; all its arguments stay"
            raise InputTypeError(
                expected("args", "be CalibrationTrainingArguments", type(args).__name__, way_out)
            )
        self.calibration_dataset = calibration_dataset
        self.calibration_loss: CalibrationLoss
        self.calibration_map: Any = None
        self._about_map: dict[str, Any] = {}
        self.last_evaluation: EvaluationPass | None = None
        self.evaluated_dataset: Any = None
        self._under_way: list[Evaluation] = []  # an evaluation, and those that callbacks begin within it
        self._pass: EvaluationPass | None = None
        self._keep_logits = False
        self._is_last_evaluation = False
        self._held_out_loaders: dict[int | None, tuple[Any, Any]] = {}
        self._example_batch: dict[str, Any] | None = None
        self._decided_problem_type: str | None = None
        self._next_token = False
        self._said_not_folded = False
        self._summary_was_at: int | None = None
        self._own_callbacks: list[_CalibrationCallback] = []
        self._removed: set[type[_CalibrationCallback]] = set()  # callbacks that the user does not want
        self._resume_from: str | None = None
        self._args_before_search: dict[str, Any] | None = None  # while there is one
        self._search_is_by_map = False
        super().__init__(model, args, *positional, **kwargs)
        if self.compute_loss_func is not None:
            got, way_out = "compute_loss_func", "use transformers.Trainer for a loss of your own"
            raise InputValueError(expected("the loss", "be named by args.loss", got, way_out))
        # The labels are ours to use, whether or not the model's forward takes them too.
        self.label_names = self.label_names or ["labels"]
        # Not to be guessed from the model's signature: compute_loss says how its loss is scaled.
        self.model_accepts_loss_kwargs = False
        self._make_loss()
        self._add_calibration_callbacks()
        self._check_model()

    # ---- Set-up ----

    def _calibration_arguments(self) -> tuple[Any, ...]:
        """What loss and callbacks are made from."""
        loss, args = self.args.make_loss(), self.args
        weights = args.class_weights if loss.class_weights is None else loss.class_weights.tolist()
        schedule = dict(args.gamma_update_schedule or {})  # type: ignore[arg-type]  # read when it was set
        updates = (args.gamma_update_steps, schedule, args.gamma_update_samples)
        calibration = (args.calibration_method, args.temperature_criterion, args.calibration_strategy)
        return loss.name, loss.hyperparameters, weights, args.gather_batch, updates, calibration

    def _make_loss(self) -> None:
        self._made_from = self._calibration_arguments()
        balanced = None
        if self.args.class_weights == BALANCED:
            balanced = balanced_class_weights(
                self.train_dataset,
                self._label_key,
                n_classes=number_of_classes(self._unwrapped),
                multi_label=bool(self._has_label_per_class(self.train_dataset, "training")),
                collated=lambda row: self._collated(self.train_dataset, "training", row),
            )
        loss = self.args.make_loss(self._problem_type, balanced_weights=balanced)
        self.calibration_loss = loss.to(self.args.device)
        if self.args.gather_batch and self.args.world_size > 1:
            self.calibration_loss.gather = all_gather_rows

    @property
    def calibration_split(self) -> Any:
        """The dataset for gammas and map: `calibration_dataset`, else one evaluation set, else None."""
        if self.calibration_dataset is not None:
            return self.calibration_dataset
        return None if isinstance(self.eval_dataset, dict) else self.eval_dataset

    @property
    def _output_dir(self) -> str:
        return str(self.args.output_dir)

    @property
    def _label_key(self) -> str:
        return str(self.label_names[0])

    @property
    def _unwrapped(self) -> Any:
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    @property
    def _config(self) -> Any:
        """The model's config; None for a network that has none of the usual kind."""
        config = getattr(self._unwrapped, "config", None)
        return config if isinstance(config, PreTrainedConfig) else None

    @property
    def _problem_type(self) -> str | None:
        return getattr(self._config, "problem_type", None) or self._decided_problem_type

    def _decide_problem_type(self, multi_label: bool) -> None:
        self._decided_problem_type = f"{'multi' if multi_label else 'single'}_label_classification"
        self.calibration_loss.multi_label = multi_label
        if multi_label:
            self.calibration_loss.check_multi_label()

    def _add_calibration_callbacks(self) -> None:
        args, adaptive = self.args, isinstance(self.calibration_loss, AdaptiveLoss)
        self._own_callbacks = []
        if self._callback(AdaFocalCallback) is None and adaptive and AdaFocalCallback not in self._removed:
            updates = AdaFocalCallback(
                every_n_steps=args.gamma_update_steps,
                n_samples=args.gamma_update_samples,
                schedule=args.gamma_update_schedule,  # type: ignore[arg-type]  # read when it was set
            )
            self._own_callbacks.append(updates)
        scaler, strategy = self._make_scaler(), args.calibration_strategy
        removed = any(issubclass(kind, CalibrationMapCallback) for kind in self._removed)
        if self._callback(CalibrationMapCallback) is None and scaler is not None and not removed:
            if isinstance(scaler, TemperatureScaling):  # remove_callback is asked for this one
                criterion = scaler.criterion
                self._own_callbacks.append(TemperatureScalingCallback(criterion=criterion, strategy=strategy))
            else:
                self._own_callbacks.append(CalibrationMapCallback(scaler, strategy=strategy))
        if (
            args.training_trace
            and self._callback(TrainingTrace) is None
            and TrainingTrace not in self._removed
        ):
            self._own_callbacks.append(TrainingTrace())
        for callback in self._own_callbacks:
            self.add_callback(callback)
        self._arrange_callbacks()

    def _make_scaler(self) -> Any:
        """What the arguments say; by default a temperature where a map is too much or its bias would be lost."""
        scaler, model = self.args.make_scaler(), self._unwrapped
        if self.args.calibration_method is not None or not isinstance(scaler, AutoScaling) or model is None:
            return scaler
        too_much = predicts_next_token(model) or head_loses_bias(model, number_of_classes(model))
        return TemperatureScaling() if too_much else scaler

    def add_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        """Add a callback as `Trainer` does; one of this package replaces an earlier one of its class."""
        super().add_callback(callback)
        self._arrange_callbacks()

    def _arrange_callbacks(self) -> None:
        """Keep the last of each kind of ours; the trace comes after the gammas, and the map after both."""
        callbacks = self.callback_handler.callbacks
        for kind in (AdaFocalCallback, CalibrationMapCallback, TrainingTrace):
            for earlier in [callback for callback in callbacks if isinstance(callback, kind)][:-1]:
                callbacks.remove(earlier)
        for callback in callbacks:
            if isinstance(callback, _CalibrationCallback):
                callback.trainer = self
        callbacks.sort(key=lambda c: 2 * isinstance(c, CalibrationMapCallback) + isinstance(c, TrainingTrace))
        if not isinstance(callbacks[0], EndOfTraining):
            callbacks.insert(0, EndOfTraining(self))

    def _load_callback_state(self) -> None:
        """With `restore_callback_states_from_checkpoint` the Trainer has made callbacks anew, which know no trainer."""
        super()._load_callback_state()
        self._arrange_callbacks()

    def _callback(self, kind: type[_Callback]) -> _Callback | None:
        return next((c for c in self.callback_handler.callbacks if isinstance(c, kind)), None)

    # ---- Checks before a training ----

    def _check_model(self) -> None:
        loss = self.calibration_loss
        preflight.check_model(self._unwrapped, loss, self.label_names)
        self._next_token = predicts_next_token(self._unwrapped)
        if self._callback(AdaFocalCallback) is not None and not isinstance(loss, AdaptiveLoss):
            way_out = "use loss='adafocal', or leave the callback out"
            raise InputValueError(
                expected("AdaFocalCallback", "go with a loss that adapts", repr(loss.name), way_out)
            )

    def _check_data(self) -> None:
        adafocal, split = self._callback(AdaFocalCallback), self.calibration_split
        fitting = self._callback(CalibrationMapCallback)
        if adafocal is not None and split is None:
            got = "several evaluation sets" if isinstance(self.eval_dataset, dict) else "none"
            requirement = f"be given for loss {self.args.loss!r}, whose gammas follow held-out predictions"
            raise InputValueError(
                expected("calibration_dataset", requirement, got, "pass calibration_dataset")
            )
        if adafocal is not None or fitting is not None:
            preflight.check_calibration_split(split, None if adafocal is None else adafocal.n_samples)
        if self.args.load_best_model_at_end:
            preflight.check_best_metric(str(self.args.metric_for_best_model), self.eval_dataset)
        self._check_labels()
        if fitting is not None:
            self._check_goes_with(fitting.scaler)
        if not self.is_world_process_zero():
            return
        if self.is_searching:  # which has said what it evaluates on
            preflight.warn_of_double_roles(self.train_dataset, split, None, "The search")
        elif split is None and fitting is not None:
            preflight.warn_of_no_map(fitting.title, self.eval_dataset)
        elif adafocal is not None or fitting is not None:
            names = [] if adafocal is None else ["the loss's gammas"]
            names += [] if fitting is None else [fitting.title]
            what = " and ".join(names)
            what = what[0].upper() + what[1:]
            preflight.warn_of_double_roles(self.train_dataset, split, self.eval_dataset, what)
        preflight.warn_of_split_batches(
            self.calibration_loss,
            micro_batch=self.args.train_batch_size,
            processes=self.args.world_size,
            accumulation=self.args.gradient_accumulation_steps,
            gather=self.args.gather_batch,
        )

    def _check_labels(self) -> None:
        """Decide the problem type, by the training split where the model does not say, and hold all splits to it."""
        evaluation = self.eval_dataset
        sets = evaluation if isinstance(evaluation, dict) else {"evaluation": evaluation}
        splits = {"training": self.train_dataset, "calibration": self.calibration_dataset}
        splits |= {f"evaluation {role!r}" if role in splits else role: each for role, each in sets.items()}
        self._set_signature_columns_if_needed()
        inputs: set[str] = set(self._signature_columns or ()) - {self._label_key, "label", "label_ids"}
        labels = {role: read_labels(dataset, self._label_key) for role, dataset in splits.items()}
        preflight.check_rows(splits, labels, inputs)
        kinds = {role: self._has_label_per_class(dataset, role) for role, dataset in splits.items()}
        if self._problem_type is None:
            decided = next((kind for kind in kinds.values() if kind is not None), None)
            if decided is not None:
                self._decide_problem_type(decided)
        multi_label = self.calibration_loss.multi_label
        preflight.check_label_kinds(kinds, multi_label)
        n_classes = number_of_classes(self._unwrapped)
        preflight.check_label_values(
            labels,
            multi_label=multi_label,
            n_classes=n_classes,
            collated=lambda role, row: self._collated(splits[role], role, row),
        )

    def _collated(self, dataset: Any, role: str, row: int | None = None) -> Tensor | None:
        collator = self._get_collator_with_removed_columns(self.data_collator, role)
        return collated_labels(dataset, role, collator, self._label_key, row)

    def _has_label_per_class(self, dataset: Any, role: str) -> bool | None:
        labels = self._collated(dataset, role)
        if labels is None or (labels.is_floating_point() and labels.dim() != 2):
            return None
        return labels.is_floating_point()

    # ---- Training ----

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, *args: Any, **kwargs: Any
    ) -> TrainOutput:
        """Train as `Trainer.train` does; data and checkpoint are checked first.

        If the loss or the map's settings in `args` have changed since the last training, loss and
        callbacks are made anew.

        Args:
            resume_from_checkpoint: a checkpoint, or True for the newest complete one in `output_dir`. The table
                of an adaptive loss and the calibration map are restored with it.
            trial: of a hyperparameter search, which passes it; the others as for `Trainer`.

        Raises:
            ValueError: for labels out of range or missing, an adaptive loss without held-out data, a calibration
                method that does not go with the problem or the model's head, or a checkpoint that is incomplete,
                of another model or of another loss.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_complete_checkpoint(self._output_dir, self.args.world_size)
        elif resume_from_checkpoint:
            check_complete(resume_from_checkpoint)
        self._resume_from = resume_from_checkpoint or None
        if self.model_init is None:
            self._set_up_training()
        if self.is_searching:
            # The Trainer sets a trial's values when its model is there, which then has the seed of the trial before.
            self._restore_arguments()
            with self._values_of_a_trial():
                super()._hp_search_setup(trial)
        try:
            return super().train(self._resume_from, trial, *args, **kwargs)
        finally:
            self.is_in_train = False  # also after an error

    def _hp_search_setup(self, trial: Any) -> None:
        """Called in each training, once the new model is there."""
        if not self.is_searching:
            super()._hp_search_setup(trial)
        if self.model_init is not None:
            self._set_up_training()

    def _set_up_training(self) -> None:
        # A new model starts with a new table.
        if self.model_init is not None or self._made_from != self._calibration_arguments():
            present = self.callback_handler.callbacks
            self._removed |= {type(c) for c in self._own_callbacks if c not in present}
            self.callback_handler.callbacks = [c for c in present if c not in self._own_callbacks]
            self._held_out_loaders.clear()
            self._make_loss()
            self._add_calibration_callbacks()
            self._check_model()
        self._check_data()
        if self._resume_from is not None and isinstance(self.calibration_loss, AdaptiveLoss):
            load_loss_state(self.calibration_loss, self._resume_from)
        # Further training undoes an earlier calibration.
        self._forget_calibration_map()
        fitting = self._callback(CalibrationMapCallback)
        if self._resume_from is not None and fitting is not None:
            saved = map_of_checkpoint(self._resume_from, fitting.scaler)
            if saved is not None:
                self._take_calibration_map(saved.scaler, saved.about)
        self.last_evaluation = None
        self._summary_was_at = None

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

        Example:
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
        if self.calibration_split is None:
            got = "several evaluation sets" if isinstance(self.eval_dataset, dict) else "none"
            way_out = "pass calibration_dataset to the trainer"
            raise InputValueError(expected("calibration_dataset", "be given to search on", got, way_out))
        asked = "eval_nll" if compute_objective is None else compute_objective
        self._search_is_by_map = isinstance(asked, str) and asked.endswith("_calibrated")
        if isinstance(asked, str):
            asked = objective_named(
                asked,
                direction,
                own_metrics=self.compute_metrics is not None,
                has_map=self._callback(CalibrationMapCallback) is not None,
            )
        if self.calibration_dataset is None and self.is_world_process_zero():
            warnings.warn(
                "There is no calibration_dataset, so the search is on the evaluation split. What is reported for it "
                "afterwards is optimistic. Pass calibration_dataset, and keep the evaluation split out of the search.",
                stacklevel=2,
            )
        space = None if hp_space is None else lambda trial: _loss_first(hp_space(trial))
        reported, self.eval_dataset = self.eval_dataset, self.calibration_split
        self._args_before_search = {each.name: getattr(self.args, each.name) for each in fields(self.args)}
        try:
            best = super().hyperparameter_search(
                space, asked, n_trials, direction, backend, hp_name, **kwargs
            )
        finally:
            self._restore_arguments()
            self._args_before_search = None
            self.eval_dataset = reported
        values = [values_of_best_trial(best, self.hp_space)]
        broadcast_object_list(values)  # only the first process knows them
        with self._values_of_a_trial():
            for name, value in _loss_first(values[0]).items():
                if hasattr(self.args, name):  # the rest as in a trial
                    known = getattr(self.args, name)
                    setattr(self.args, name, value if known is None else type(known)(value))
        return best

    @property
    def is_searching(self) -> bool:
        """Whether a hyperparameter search is under way: evaluations are then of the calibration split."""
        return self._args_before_search is not None

    def _restore_arguments(self) -> None:
        """What the trial before has set is not the next one's."""
        for name, value in (self._args_before_search or {}).items():
            setattr(self.args, name, value)

    @contextmanager
    def _values_of_a_trial(self) -> Iterator[None]:
        """Within it a trial's values are set on args; `loss_kwargs` stay only with the loss that they are of."""
        loss = self.args.loss
        own: Any = self.args.loss_kwargs
        self.args.loss_kwargs = {}
        yield
        of_trial: Any = self.args.loss_kwargs
        if self.args.loss == loss:
            self.args.loss_kwargs = {**own, **of_trial} if own else of_trial or own

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self._load_whole(self.model if model is None else model, resume_from_checkpoint, True):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        best = str(self.state.best_model_checkpoint)
        if not self._load_whole(self.model, best, False):
            super()._load_best_model()
        if isinstance(self.calibration_loss, AdaptiveLoss):
            load_loss_state(self.calibration_loss, best)

    def _load_whole(self, model: Any, checkpoint: str, is_trainable: bool) -> bool:
        """Load a checkpoint of a model that lies whole on each device; the Trainer loads what is sharded."""
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            return False
        if (
            hasattr(model, "peft_config")
            and hasattr(model, "load_adapter")
            and hasattr(model, "active_adapters")
        ):
            return load_adapter(model, checkpoint, is_trainable=is_trainable)
        return load_weights(model, checkpoint)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: Any
    ) -> tuple[Any, Any]:
        """The micro-batches of one optimizer step, and the loss's normalizer over all processes."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if type(self).compute_loss is CalibrationTrainer.compute_loss and batches:
            self._ignore_repeated_rows(batches[-1])
        labels = [batch[self._label_key].to(device) for batch in batches if self._label_key in batch]
        if not labels:
            return batches, None
        if self.args.loss_reduction == "sum":
            return batches, torch.ones((), device=device)
        counts = [self.calibration_loss.normalizer(self._aligned(each)).float() for each in labels]
        return batches, self.accelerator.reduce(torch.stack(counts).sum(), "sum").clamp_min(1e-12)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """That of the arguments; `lr_milestones` are epochs of this training."""
        args = self.args
        if self.lr_scheduler is None and args.lr_milestones is not None:
            late = [epoch for epoch in args.lr_milestones if epoch >= args.num_train_epochs]
            if late:
                warnings.warn(
                    f"The milestones {late} lie at or after the end of {args.num_train_epochs:g} epochs. The learning "
                    "rate never falls there. Scale lr_milestones with the epochs.",
                    stacklevel=3,
                )
            self.lr_scheduler = milestone_schedule(
                self.optimizer if optimizer is None else optimizer,  # type: ignore[arg-type]  # there is one
                args.lr_milestones,
                decay=args.lr_decay,
                steps_per_epoch=num_training_steps / args.num_train_epochs,
                n_warmup_steps=args.get_warmup_steps(num_training_steps),
            )
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)

    def _ignore_repeated_rows(self, batch: Any) -> None:
        """Take the rows out that accelerate adds from the start of the epoch, so that processes have equal batches."""
        shards = getattr(self.callback_handler.train_dataloader, "batch_sampler", None)
        is_last = self.accelerator.gradient_state.end_of_dataloader
        if not (is_last and isinstance(shards, BatchSamplerShard) and self._label_key in batch):
            return
        labels = batch[self._label_key]
        rows_left = len(shards.batch_sampler.sampler) % (len(labels) * shards.num_processes)
        if rows_left and shards.even_batches and not shards.drop_last:
            own = min(max(rows_left - shards.process_index * len(labels), 0), len(labels))
            labels = labels.clone() if labels.is_floating_point() else labels.long().clone()
            labels[own:] = IGNORE_INDEX
            batch[self._label_key] = labels

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """One micro-batch. Whether its loss is scaled for accumulation, compute_loss says anew each time."""
        stated = (self.loss_is_scaled_for_ga, self.model_accepts_loss_kwargs)
        try:
            return super().training_step(*args, **kwargs)
        finally:
            self.loss_is_scaled_for_ga, self.model_accepts_loss_kwargs = stated

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | float | None = None,
    ) -> Any:
        """The calibration loss; the model is called without labels, so it does not compute its own.

        The loss is a sum over the rows of this micro-batch, divided by the number of rows in the whole global
        batch (`get_batch_samples`), times the number of processes, over which DDP averages the gradients.
        Without `num_items_in_batch` it is the mean over this micro-batch.
        """
        key = self._label_key
        if inputs.get(key) is None:
            way_out = "check the dataset's label column and the data collator"
            raise InputValueError(expected("the batch", f"have {key!r}", f"only {sorted(inputs)}", way_out))
        outputs = model(**{name: value for name, value in inputs.items() if name != key})
        labels = self._aligned(inputs[key])
        if self.calibration_loss.multi_label is None:
            self._decide_problem_type(labels.is_floating_point())
        if self.calibration_loss.multi_label and labels.is_floating_point():
            check_decisions(labels)
            if self._config is not None:  # pipelines read it, and would apply a softmax
                self._config.problem_type = "multi_label_classification"
        if not model.training:
            num_items_in_batch = None  # the loss of an evaluation batch is its own mean
        loss = self.calibration_loss(outputs, labels, num_items_in_batch=num_items_in_batch)
        if num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes
            declare_loss_scaled(self)
        if isinstance(outputs, tuple):  # the Trainer takes the logits from behind the loss
            outputs = (loss, *outputs)
        elif isinstance(outputs, Tensor):
            outputs = (loss, outputs)
        return (loss, outputs) if return_outputs else loss

    def _aligned(self, labels: Tensor) -> Tensor:
        return aligned_labels(labels, next_token=self._next_token)

    # ---- Evaluation ----

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        *,
        keep_logits: bool = False,
    ) -> dict[str, float]:
        """Evaluate as `Trainer.evaluate` does, with the calibration metrics among the results.

        Args:
            eval_dataset: as for `Trainer`; the others too.
            ignore_keys: entries of the model's output that are no predictions.
            metric_key_prefix: of the log keys.
            keep_logits: keep logits and labels of the dataset for `last_evaluation.logits_and_labels()`. Once a
                calibration map is fitted and the training is over, they are kept in any case where they are few
                (50,000 rows, 20 million values), for the intervals of the model card.
        """
        callback = self._callback(CalibrationMapCallback)
        fits = self.is_in_train and self.calibration_split is not None and not self.is_searching
        if callback is not None and fits:
            callback.before_evaluate(self.state.global_step)
        known = self.eval_dataset
        if eval_dataset is None:
            self.evaluated_dataset = known
        else:  # by its name, where there are several
            named = isinstance(known, dict) and isinstance(eval_dataset, str)
            self.evaluated_dataset = known[eval_dataset] if named else eval_dataset  # type: ignore[index]
        self._keep_logits, outer = keep_logits or self._keep_logits, self._keep_logits
        present = Evaluation(self.evaluated_dataset)
        self._under_way.append(present)
        try:
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        finally:
            self._under_way.pop()
            if present.done is not None:  # what a callback has evaluated meanwhile is not the last
                self.evaluated_dataset, self.last_evaluation = present.dataset, present.done
            self._keep_logits = outer

    @property
    def present_evaluation(self) -> Evaluation | None:
        """In an `on_evaluate`, what it is about; None if a callback began it within another evaluation."""
        nested = any(outer.done is not None for outer in self._under_way[:-1])
        return self._under_way[-1] if self._under_way and not nested else None

    def evaluate_at_end(self) -> None:
        """The evaluation with the map, at the end of a training: the one that the model card shows."""
        self._is_last_evaluation = True
        try:
            self.evaluate()
        finally:
            self._is_last_evaluation = False

    def _get_eval_sampler(self, eval_dataset: Any) -> None:
        """None: the rows in their order, which `predict` and predictions.safetensors give them back in.

        With group_by_length the Trainer would shuffle them by its seed.
        """

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        # During the training nobody asks for them, and each evaluation would gather them.
        for_card = self.calibration_map is not None and (not self.is_in_train or self._is_last_evaluation)
        searched = self._map_to_search_by() if description == "Evaluation" else None
        current = EvaluationPass(
            self.accelerator,
            metric_key_prefix,
            n_bins=self.args.n_bins,
            calibration_map=self.calibration_map,
            keep_logits=self._keep_logits or for_card or searched is not None,
            keep_at_most=None if self._keep_logits or searched is not None else EvaluationPass.FEW_VALUES,
            keep_scores=(trace := self._callback(TrainingTrace)) is not None and trace.is_recording,
        )
        with self._recording(current):
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        current.finish()
        if description == "Evaluation":
            self.last_evaluation = current
            if self._under_way:
                self._under_way[-1].done = current
        metrics = current.metrics()
        if searched is not None and metrics:
            rows = current.logits_and_labels()
            metrics |= out_of_fold_metrics(
                self.accelerator, searched, *rows, prefix=metric_key_prefix, n_bins=self.args.n_bins
            )
        # A metric of that name from the user's compute_metrics takes precedence.
        return output._replace(metrics=metrics | (output.metrics or {}))

    def _map_to_search_by(self) -> Any:
        """In a search, the scaler whose metrics its evaluations have; else None."""
        callback, model = self._callback(CalibrationMapCallback), self._unwrapped
        wanted = callback is not None and (self._search_is_by_map or callback.strategy == "evaluate")
        if not (self.is_searching and wanted):
            return None
        assert callback is not None
        gives_way = isinstance(callback.scaler, AutoScaling) and head_loses_bias(
            model, number_of_classes(model)
        )
        return TemperatureScaling() if gives_way else callback.scaler

    @contextmanager
    def _recording(self, current: EvaluationPass) -> Iterator[None]:
        self._pass, outer = current, self._pass
        try:
            yield
        finally:
            self._pass = outer

    def prediction_step(
        self,
        model: Any,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        loss, logits, labels = super().prediction_step(model, inputs, False, ignore_keys)
        if self._pass is not None and logits is not None and isinstance(labels, Tensor):
            self._pass.add(logits_of(logits), self._aligned(labels))
            if self._pass.keep_logits and self._example_batch is None:
                rows = {k: v for k, v in inputs.items() if k != self._label_key and isinstance(v, Tensor)}
                self._example_batch = {k: (v[:4] if v.dim() else v).cpu() for k, v in rows.items()}
        return (loss, None, None) if prediction_loss_only else (loss, logits, labels)

    # ---- Calibration ----

    def held_out_pass(self, *, n_samples: int | None = None, keep_logits: bool = False) -> EvaluationPass:
        """Run the model over the calibration split; mode, random streams, log and progress bars stay as found.

        Args:
            n_samples: only a fixed random subset of this size; None for all.
            keep_logits: keep logits and labels, for a fit that needs them.
        """
        return self.quiet_pass(self._held_out_loader(n_samples), keep_logits=keep_logits)

    def quiet_pass(
        self, loader: Any, *, keep_logits: bool = False, keep_scores: bool = False
    ) -> EvaluationPass:
        """Run the model over a loader's rows; mode, random streams, log and progress bars stay as found.

        Args:
            loader: of `get_test_dataloader`.
            keep_logits: keep logits and labels.
            keep_scores: keep the numbers of each row that a trace needs.
        """
        keep = {"keep_logits": keep_logits, "keep_scores": keep_scores}
        current = EvaluationPass(self.accelerator, "", n_bins=self.args.n_bins, **keep)
        model: Any = self.model
        visible, modes = self.callback_handler, [(module, module.training) for module in model.modules()]
        quiet = CallbackHandler(
            [DefaultFlowCallback()], model, self.processing_class, self.optimizer, self.lr_scheduler
        )
        try:
            with random_state_left_as_found(), self._recording(current):
                self.callback_handler = quiet
                super().evaluation_loop(loader, "Calibration", True)
        finally:
            self.callback_handler = visible
            for module, mode in modes:
                module.training = mode
        current.finish()
        return current

    def _held_out_loader(self, n_samples: int | None) -> Any:
        """Made once for a split: accelerate remembers every loader that it prepares."""
        split = self.calibration_split
        made_for, loader = self._held_out_loaders.get(n_samples, (None, None))
        if made_for is not split:
            dataset = split
            if n_samples is not None and n_samples < len(split):  # the same random examples each time
                generator = torch.Generator().manual_seed(self.args.seed)
                rows = torch.randperm(len(split), generator=generator)[:n_samples].tolist()
                by_index = hasattr(split, "select")
                dataset = split.select(rows) if by_index else torch.utils.data.Subset(split, rows)
            # get_eval_dataloader would, with persistent workers, give the loader of the evaluation set.
            loader = self.get_test_dataloader(dataset)
            self._held_out_loaders[n_samples] = (split, loader)
        return loader

    def update_adaptive_loss(
        self, held_out: EvaluationPass | None = None, *, n_samples: int | None = None
    ) -> None:
        """Update the table of an adaptive loss from the calibration split, and log it.

        Args:
            held_out: a pass over it that is at hand; None makes one.
            n_samples: of which subset size to make one; None for the whole split.

        Raises:
            ValueError: if the split has no labelled examples.
        """
        loss = self.calibration_loss
        assert isinstance(loss, AdaptiveLoss)
        state = (held_out or self.held_out_pass(n_samples=n_samples)).labelled()
        progress = self.state.global_step / max(self.state.max_steps, 1)
        loss.update(state.confidences, state.correct, class_gaps=state.class_gaps, progress=progress)
        self._log_table(loss.log_values())

    def _log_table(self, values: dict[str, float]) -> None:
        """Log all the numbers; but print their ranges only, because nobody reads sixty numbers in a line."""
        due, handler = self.control.should_log, self.callback_handler
        callbacks = handler.callbacks
        printing = [c for c in callbacks if isinstance(c, PrinterCallback | ProgressCallback)]
        handler.callbacks = [c for c in callbacks if c not in printing]
        try:
            self.log(values)
        finally:
            handler.callbacks = callbacks
        for callback in printing:
            callback.on_log(self.args, self.state, self.control, logs=_ranges(values))
        self.control.should_log = due  # the training loss may still have to be logged

    @property
    def temperature(self) -> float | None:
        """T, where the fitted calibration map divides the logits by one number; else None."""
        return None if self.calibration_map is None else temperature_of(self.calibration_map)

    def fit_calibration_map(self, scaler: Any = None) -> Any:
        """Fit a map of the logits on the calibration split, and record it in the model's config.

        From then on evaluations report the metrics with it too. The model's weights stay as they are:
        `save_calibrated_model` folds the map into what it saves. A fit that fails leaves no map.

        Args:
            scaler: any of `SCALERS` that folds, fitted in place; its `multi_label` is set by the labels. None takes
                a copy of the `CalibrationMapCallback`'s, or else what the arguments say, or else a temperature.

        Returns:
            The fitted scaler, which is also `calibration_map`. If `AutoScaling` chose a map with a bias for a head
            that cannot keep one, it is a `TemperatureScaling` instead.

        Raises:
            TypeError: if the scaler cannot be folded.
            ValueError: if there is no calibration split, if its logits or labels cannot be fitted, or if the map
                does not go with the problem or with the model's head.
        """
        if self.calibration_split is None:
            got, way_out = "none", "pass calibration_dataset to the trainer"
            raise InputValueError(
                expected("calibration_dataset", "be given to fit a calibration map", got, way_out)
            )
        if scaler is None:
            callback = self._callback(CalibrationMapCallback)
            scaler = clone(callback.scaler) if callback is not None else self._make_scaler()
            scaler = TemperatureScaling() if scaler is None else scaler
        self._check_goes_with(scaler)
        self._forget_calibration_map()
        logits, labels = self.held_out_pass(keep_logits=True).logits_and_labels()
        check_problem(scaler, labels.ndim == 2)
        fit_once(self.accelerator, scaler, logits, labels)
        model = self._unwrapped
        if has_bias(scaler) and head_loses_bias(model, number_of_classes(model)):
            if self.is_world_process_zero():
                warnings.warn(
                    f"{title_of(scaler).capitalize()} has a bias, which the head of {type(model).__name__} loses when "
                    "it is loaded. A temperature was fitted instead. Use a model whose head has a bias, or set "
                    "calibration_method='temperature'.",
                    stacklevel=2,
                )
            scaler = TemperatureScaling()
            fit_once(self.accelerator, scaler, logits, labels)
        split = "calibration" if self.calibration_dataset is not None else "evaluation"
        self.use_calibration_map(scaler, split=split, n_examples=len(labels))
        return scaler

    def fit_temperature(self, scaling: TemperatureScaling | None = None) -> float:
        """Fit a temperature, as `fit_calibration_map` does any map.

        Args:
            scaling: what fits it; None takes the `TemperatureScalingCallback`'s, or the negative log-likelihood.

        Returns:
            T > 0; logits / T are calibrated.

        Raises:
            ValueError: if there is no calibration split, or its logits or labels cannot be fitted.
        """
        if scaling is None:
            callback = self._callback(CalibrationMapCallback)
            own = TemperatureScaling() if callback is None else callback.scaler
            scaling = clone(own) if isinstance(own, TemperatureScaling) else TemperatureScaling()
        return float(self.fit_calibration_map(scaling).temperature_)

    def use_calibration_map(self, scaler: Any, *, split: str, n_examples: int) -> None:
        """Take a map that was fitted elsewhere, for example on out-of-fold logits, as if it had been fitted here.

        Evaluations report it, the model's config records it, and what is saved or pushed has it. Every process
        passes the same map.

        Args:
            scaler: fitted on logits of this model; any of `SCALERS` that folds.
            split: what it was fitted on, as the record and the model card call it.
            n_examples: how many rows that were.

        Raises:
            TypeError: if the scaler cannot be folded.
            ValueError: if it does not go with the problem, the classes or the head of the model, or has NaN.
        """
        self._check_goes_with(scaler)
        n_classes, multi_label = number_of_classes(self._unwrapped), self.calibration_loss.multi_label
        check_fitted(scaler, multi_label=multi_label, n_classes=n_classes)
        weights, criterion = self.calibration_loss.class_weights, getattr(scaler, "criterion", None)
        about = {
            **({} if criterion is None else {"criterion": criterion}),
            "split": split,
            "n_examples": n_examples,
            "loss": self.calibration_loss.name,
            "loss_kwargs": self.calibration_loss.hyperparameters,
            **({} if weights is None else {"class_weights": weights.tolist()}),
            "folded": False,
            **about_data(self, split, n_examples),
        }
        self._take_calibration_map(scaler, about)

    def _take_calibration_map(self, scaler: Any, about: dict[str, Any]) -> None:
        self.calibration_map, self._about_map = scaler, about
        if self._config is not None:
            self._config.calibration = {
                "method": foldable_method(scaler),
                **few_parameters(scaler),
                **{key: value for key, value in about.items() if key not in _BESIDE_THE_CONFIG},
            }

    def _forget_calibration_map(self) -> None:
        self.calibration_map = None
        if hasattr(self._config, "calibration"):
            del self._config.calibration

    def _check_goes_with(self, scaler: Any) -> None:
        check_problem(scaler, self.calibration_loss.multi_label)
        check_head(scaler, self._unwrapped, number_of_classes(self._unwrapped))

    # ---- Saving ----

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as trained, as `Trainer.save_model` does: the map is not folded in, but lies beside it.

        What is to be served is written by `save_calibrated_model`.
        """
        if self.calibration_map is not None and not _internal_call and not self._said_not_folded:
            self._said_not_folded = True
            if self.is_world_process_zero():
                logger.warning(
                    "save_model writes the model as trained, without its %s: a pipeline that loads it is not "
                    "calibrated. Use save_calibrated_model(output_dir) for the calibrated model.",
                    title_of(self.calibration_map),
                )
        with hub_token_left_out():
            super().save_model(output_dir, _internal_call=True)
        if self.args.should_save:
            folder = Path(output_dir or self._output_dir)
            if isinstance(self.calibration_loss, AdaptiveLoss):
                save_loss_state(self.calibration_loss, folder)
            if self.calibration_map is None or not is_map_of(self.calibration_map, folder / MAP_NAME):
                (folder / REPORT).unlink(missing_ok=True)  # of an earlier training
            if self.calibration_map is not None:
                save_map(self.calibration_map, folder, self._about_map)
            else:  # that of an earlier training is not this model's
                (folder / MAP_NAME).unlink(missing_ok=True)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        with hub_token_left_out():
            super()._push_from_checkpoint(checkpoint_folder)

    def save_calibrated_model(self, output_dir: str | os.PathLike[str]) -> None:
        """Save a copy of the model with the calibration map folded into its head.

        The directory needs no code of ours: `transformers.pipeline` on it gives the map's probabilities. It holds
        float32 weights and the tokenizer or image processor, and adapters are merged. The model in memory
        keeps its weights. `calibration.json` has the map as numbers.

        Args:
            output_dir: appears whole; in an existing directory, files are replaced and other weights removed.

        Raises:
            ValueError: if no map was fitted, or if the model has no head it can be folded into; if
                output_dir is where the model was loaded from, or holds adapters, which would be lost.
            OSError: if output_dir cannot be written; it is as it was then.
        """
        check_overwrites_no_original(output_dir, loaded_from(self.model))
        self._save_calibrated_model(output_dir)

    def _save_calibrated_model(self, output_dir: str | os.PathLike[str]) -> None:
        """Save it over anything: a push replaces what the training has left in its own output folder."""
        if self.calibration_map is None:
            got = "no map" if self.args.make_scaler() is None else "none yet"
            way_out = "train with a calibration_dataset, or call fit_calibration_map()"
            raise InputValueError(expected("the calibration map", "be fitted", got, way_out))
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        state_dict = self.accelerator.get_state_dict(self.model_wrapped) if sharded else None

        def save() -> None:
            model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
            save_folded(
                standalone_copy(model, state_dict),
                self.calibration_map,
                output_dir,
                batch=self._example_batch,
                processing_class=self.processing_class or getattr(self.data_collator, "tokenizer", None),
                about=self._about_map | measured(self),
            )

        self.all_or_none(save, here=self.args.should_save)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        create_pr: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Push the calibrated model in one commit; without a map, what `Trainer.push_to_hub` pushes.

        The output folder then holds the calibrated model with its card, as `save_calibrated_model` and
        `create_model_card` write them. Weights in the repository that would be loaded in place of it are removed
        in the same commit; see `hf_calib.export.push_folder`. A push that fails leaves the repository as it was.

        Args:
            commit_message: of the commit.
            blocking: wait until all is uploaded.
            token: with write access; None takes `args.hub_token`.
            revision: the branch; None takes `args.hub_revision`.
            private: make a new repository private; None takes `args.hub_private_repo`.
            create_pr: open a pull request instead of changing the branch.
            **kwargs: for `create_model_card`.

        Returns:
            The commit, or a future of it where `blocking` is off; None on all processes but the first.

        Raises:
            ValueError: if the Hub refuses the push; or for create_pr without a map.
            OSError: if the model cannot be saved, or the Hub cannot be reached.
            RuntimeError: on the other processes then.
        """
        if self.calibration_map is None:
            if create_pr:
                got, way_out = "none", "train with a calibration_dataset, or push without create_pr"
                raise InputValueError(
                    expected("the calibration map", "be fitted for create_pr", got, way_out)
                )
            if private is not None:
                kwargs["private"] = private
            return super().push_to_hub(commit_message, blocking, token, revision, **kwargs)
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        repo_id = self.hub_model_id or self.args.hub_model_id or Path(self._output_dir).absolute().name
        self._finish_current_push()  # one of the training's own, which reads the same folder
        self._save_calibrated_model(self._output_dir)

        def push() -> Any:
            # With its owner, without whom the card's lines would not find it.
            full_name = with_owner(repo_id, token or self.args.hub_token)
            self.hub_model_id = full_name  # type: ignore[assignment]  # transformers declares None only
            if isinstance(self.calibration_loss, AdaptiveLoss):
                save_loss_state(self.calibration_loss, self._output_dir)
            kwargs.setdefault("model_name", repo_id.split("/")[-1])
            tags = kwargs.get("tags") or []
            of_the_model = getattr(self.model, "model_tags", None) or []
            kwargs["tags"] = list(
                dict.fromkeys([*([tags] if isinstance(tags, str) else tags), *of_the_model])
            )
            self.create_model_card(**kwargs)
            return push_folder(
                self._output_dir,
                full_name,
                token=token or self.args.hub_token,
                private=self.args.hub_private_repo if private is None else private,
                revision=revision or self.args.hub_revision,
                create_pr=create_pr,
                message=commit_message or "End of training",
                run_as_future=not blocking,
            )

        return self.all_or_none(push, here=self.is_world_process_zero())

    def all_or_none(self, work: Callable[[], Any], *, here: bool) -> Any:
        """Do some work on this process or on others; where it fails, all of them raise, and none waits for it."""
        done, failed = None, None
        if here:
            try:
                done = work()
            except Exception as error:
                failed = error
        reasons = gather_object([None if failed is None else f"{failed}"])
        if failed is not None:
            raise failed
        for reason in reasons:
            if reason is not None:
                raise RuntimeError(f"Another process failed: {reason}")
        return done

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write the Trainer's model card, with a section on calibration once a map is fitted.

        The arguments are those of `Trainer.create_model_card`. The report on the last evaluation is written beside
        the card, in the folder `calibration`.
        """
        history = self.state.log_history
        if self._summary_was_at is not None:
            # The stock card makes a table of the evaluations before the summary, and expects them to have the same
            # metrics; the final one has those with the map too.
            for_card = list(history)
            for entry in [entry for entry in history if "train_runtime" in entry]:
                for_card.remove(entry)
                for_card.insert(self._summary_was_at, entry)
            self.state.log_history = for_card
        try:
            super().create_model_card(*args, **kwargs)
        finally:
            self.state.log_history = history
        folder = Path(self._output_dir)
        if self.is_world_process_zero():
            base_model = getattr(self._config, "_name_or_path", None)
            mend_stock_card(folder / CARD, base_model, is_calibrated=self.calibration_map is not None)
            if self.calibration_map is not None:
                write_results(self, folder)
                write_card(folder, repo_id=self.hub_model_id or self.args.hub_model_id)


# Entries of calibration.json that a model's config does without.
_BESIDE_THE_CONFIG = ("base_model", "data", "fingerprint", "metrics")


def _loss_first(values: dict[str, Any]) -> dict[str, Any]:
    """A trial's values are set in this order, and the loss decides which hyperparameters there are."""
    return dict(sorted(values.items(), key=lambda item: item[0] != "loss"))


def _ranges(values: dict[str, float]) -> dict[str, Any]:
    """{"gamma_00": 1.2, "gamma_01": 0.9, "epoch": 2} -> {"gamma": "0.9 to 1.2", "epoch": 2}"""
    of_bins: dict[str, list[float]] = {}
    rest = {}
    for key, value in values.items():
        name, _, number = key.rpartition("_")
        if number.isdigit():
            of_bins.setdefault(name, []).append(value)
        else:
            rest[key] = value
    return {name: f"{min(found):.4g} to {max(found):.4g}" for name, found in of_bins.items()} | rest
