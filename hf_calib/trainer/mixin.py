"""`CalibrationMixin`: a calibration loss, metrics and a calibration map for any `Trainer`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard
from sklearn.base import clone
from torch import Tensor
from transformers import PreTrainedConfig, TrainerCallback
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from hf_calib._compat import declare_loss_scaled, load_saved_names
from hf_calib._errors import InputTypeError, InputValueError, check, did_you_mean, expected
from hf_calib.export.heads import head_loses_bias
from hf_calib.export.saving import loaded_from
from hf_calib.losses import AdaptiveLoss, CalibrationLoss, all_gather_rows, logits_of
from hf_calib.losses.statistics.definitions import IGNORE_INDEX
from hf_calib.metrics.state import LOGGED_METRICS, lower_is_better
from hf_calib.scaling import AutoScaling, TemperatureScaling
from hf_calib.scaling.saved_map import OF_PAIRS, has_bias, temperature_of, title_of
from hf_calib.trainer.answers import PLACES, AnswerOptions
from hf_calib.trainer.calibration_map import (
    FittedMap,
    check_fitted,
    check_head,
    check_problem,
    fit_once,
    map_of_checkpoint,
)
from hf_calib.trainer.callbacks import (
    AdaFocalCallback,
    CalibrationCallback,
    CalibrationMapCallback,
    TemperatureScalingCallback,
    hold_the_ends,
    own_callback,
    update_table,
)
from hf_calib.trainer.checkpoint import load_loss_state, newest_checkpoint
from hf_calib.trainer.checks import check_data, check_decisions, check_model
from hf_calib.trainer.config import BALANCED, CalibrationConfig
from hf_calib.trainer.evaluation import Evaluation, held_out, run
from hf_calib.trainer.labels import (
    aligned_labels,
    balanced_class_weights,
    collated_labels,
    number_of_classes,
    predicts_next_token,
)
from hf_calib.trainer.publishing import PublishingMixin
from hf_calib.trainer.report import about_data


class CalibrationMixin(PublishingMixin):
    """The calibration of a `Trainer`: put it before any subclass, `class Mine(CalibrationMixin, TheirTrainer)`.

    `CalibrationTrainer` is this with the stock `Trainer`, and its docstring says what it adds. Another trainer keeps
    what it does itself: a trainer that makes its batches or its logits in its own way overrides `logits_and_labels`;
    one with a `compute_loss` of its own is left alone, and its evaluations have the metrics where its
    `prediction_step` returns logits and labels. With `compute_loss_func` the loss is that function, scaled as the stock
    Trainer does.

    Args:
        *args: of the trainer.
        **kwargs: of the trainer.
        calibration_dataset: held-out examples for the gammas and the calibration map; see `CalibrationTrainer`.
        calibration: the `CalibrationConfig`, where the trainer's arguments are not one themselves.

    Raises:
        TypeError: if there is no config.
        ValueError: for arguments that do not fit together; before any training.

    Example::

        class CalibratedRewards(CalibrationMixin, RewardTrainer):
            def logits_and_labels(self, model, inputs):
                rewards = model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, 0]
                logits = torch.stack(rewards.chunk(2), dim=1)  # chosen and rejected
                return {"logits": logits}, logits, torch.zeros(len(logits), dtype=torch.long, device=logits.device)
    """

    loss_is_scaled_for_ga: bool | None = None  # which transformers < 5.19 does not have
    not_for_the_model: tuple[str, ...] = ()  # tensors of a batch, besides the labels

    def __init__(
        self,
        *args: Any,
        calibration_dataset: Any = None,
        calibration: CalibrationConfig | None = None,
        **kwargs: Any,
    ) -> None:
        given = kwargs.get("args", args[1] if len(args) > 1 else None)
        self._given_config = calibration
        if calibration is None and not isinstance(given, CalibrationConfig):
            way_out = "replace TrainingArguments by it, or pass calibration=CalibrationConfig(...) beside it"
            raise InputTypeError(
                expected("args", "be CalibrationTrainingArguments", type(given).__name__, way_out)
            )
        self.calibration_dataset = calibration_dataset
        self.calibration_loss: CalibrationLoss
        self.fitted_map: FittedMap | None = None
        self.last_evaluation: Evaluation | None = None
        self._evaluating: list[tuple[Any, Evaluation | None]] = []  # calls of evaluate: dataset, its pass
        self._keep_logits = False
        self._is_last_evaluation = False
        self._decided_problem_type: str | None = None
        self._next_token = False
        self.answers: AnswerOptions | None = None
        self._own_callbacks: list[CalibrationCallback] = []
        self._removed: set[type[CalibrationCallback]] = set()  # callbacks that the user does not want
        self._resume_from: str | None = None
        super().__init__(*args, **kwargs)
        if self.compute_loss_func is not None and self.calibration_config.loss != "cross_entropy":
            got, way_out = (
                f"compute_loss_func beside loss={self.calibration_config.loss!r}",
                "leave one of them out",
            )
            raise InputValueError(expected("the loss", "be given once", got, way_out))
        if self._reads_labels:
            # They are ours to use, whether or not the model's forward takes them too.
            self.label_names = self.label_names or ["labels"]
        # Not to be guessed from the model's signature: compute_loss says how its loss is scaled.
        self.model_accepts_loss_kwargs = False
        self.originals = set() if self.model is None else loaded_from(self.model)
        options = getattr(self.args, "answer_options", None)
        if options is not None:
            self.answers = AnswerOptions(self.unwrapped_model, self.processing_class, options)
            self.data_collator = partial(self.answers.batch, self.data_collator)
            self.not_for_the_model = (PLACES,)
        self._make_loss()
        self._add_calibration_callbacks()
        hold_the_ends(self)
        self._check_model()

    # ---- Set-up ----

    @property
    def calibration_config(self) -> CalibrationConfig:
        """The configuration that was given; without one, the trainer's arguments."""
        return self.args if self._given_config is None else self._given_config

    @property
    def calibration_map(self) -> Any:
        """The fitted scaler, or None; the one object that metrics, records and saving go by."""
        return None if self.fitted_map is None else self.fitted_map.scaler

    def _calibration_arguments(self) -> tuple[Any, ...]:
        """The configuration that loss and callbacks are made from."""
        loss, args = self.calibration_config.make_loss(), self.calibration_config
        weights = args.class_weights if loss.class_weights is None else loss.class_weights.tolist()
        schedule = dict(args.gamma_update_schedule or {})  # type: ignore[arg-type]  # read when it was set
        updates = (args.gamma_update_steps, schedule, args.gamma_update_samples)
        calibration = (args.calibration_method, args.temperature_criterion, args.calibration_strategy)
        return loss.name, loss.hyperparameters, weights, args.gather_batch, updates, calibration

    def _make_loss(self) -> None:
        self._made_from = self._calibration_arguments()
        balanced = None
        if self.calibration_config.class_weights == BALANCED:
            balanced = balanced_class_weights(self)
        loss = self.calibration_config.make_loss(self.problem_type, balanced_weights=balanced)
        self.calibration_loss = loss.to(self.args.device)
        if self.calibration_config.gather_batch and self.args.world_size > 1:
            self.calibration_loss.gather = all_gather_rows

    @property
    def calibration_split(self) -> Any:
        """The dataset for gammas and map; `calibration_dataset`, else one evaluation set, else None."""
        if self.calibration_dataset is not None:
            return self.calibration_dataset
        return None if isinstance(self.eval_dataset, dict) else self.eval_dataset

    @property
    def _reads_labels(self) -> bool:
        """Whether labels are in the batches, and not made from them by a trainer of another kind."""
        return type(self).logits_and_labels is CalibrationMixin.logits_and_labels

    @property
    def label_key(self) -> str:
        """The name of the labels in a batch."""
        return str(self.label_names[0]) if self.label_names else "labels"

    @property
    def unwrapped_model(self) -> Any:
        """The model without wrappers for several processes or compilation."""
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    @property
    def model_config(self) -> Any:
        """The model's config; None for a network that has none of the usual kind."""
        config = getattr(self.unwrapped_model, "config", None)
        return config if isinstance(config, PreTrainedConfig) else None

    @property
    def n_classes(self) -> int | None:
        """The number of classes that the loss and the metrics are over; None if the model does not say."""
        return number_of_classes(self.unwrapped_model) if self.answers is None else len(self.answers.tokens)

    @property
    def class_names(self) -> dict[int, str]:
        """The names of the classes by their numbers; empty if the model has none."""
        if self.answers is not None:
            return dict(enumerate(self.answers.names))
        return getattr(self.model_config, "id2label", None) or {}

    @property
    def problem_type(self) -> str | None:
        """The model's, or what its labels say."""
        return getattr(self.model_config, "problem_type", None) or self._decided_problem_type

    def decide_problem_type(self, multi_label: bool) -> None:
        """Take it that a row has several labels, or one; the loss is held to it."""
        self._decided_problem_type = f"{'multi' if multi_label else 'single'}_label_classification"
        self.calibration_loss.multi_label = multi_label
        if multi_label:
            self.calibration_loss.check_multi_label()

    def _add_calibration_callbacks(self) -> None:
        args, adaptive = self.calibration_config, isinstance(self.calibration_loss, AdaptiveLoss)
        self._own_callbacks = []
        if (
            own_callback(self, AdaFocalCallback) is None
            and adaptive
            and AdaFocalCallback not in self._removed
        ):
            updates = AdaFocalCallback(
                every_n_steps=args.gamma_update_steps,
                n_samples=args.gamma_update_samples,
                schedule=args.gamma_update_schedule,  # type: ignore[arg-type]  # read when it was set
            )
            self._own_callbacks.append(updates)
        scaler, strategy = self._make_scaler(), args.calibration_strategy
        removed = any(issubclass(kind, CalibrationMapCallback) for kind in self._removed)
        if own_callback(self, CalibrationMapCallback) is None and scaler is not None and not removed:
            if isinstance(scaler, TemperatureScaling):  # remove_callback is asked for this one
                criterion = scaler.criterion
                self._own_callbacks.append(TemperatureScalingCallback(criterion=criterion, strategy=strategy))
            else:
                self._own_callbacks.append(CalibrationMapCallback(scaler, strategy=strategy))
        for callback in self._own_callbacks:
            self.add_callback(callback)
        self._arrange_callbacks()

    def _make_scaler(self) -> Any:
        """The scaler of the arguments; by default a temperature where a bias would be lost, none of a vocabulary."""
        config, model = self.calibration_config, self.unwrapped_model
        scaler = config.make_scaler()
        is_default = config.calibration_method is None and isinstance(scaler, AutoScaling)
        if not is_default or model is None:
            return scaler
        if self.answers is not None:
            return TemperatureScaling()
        if predicts_next_token(model):  # minutes and gigabytes that nobody has asked for
            return None
        return TemperatureScaling() if head_loses_bias(model, self.n_classes) else scaler

    def add_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        """Add a callback as `Trainer` does; one of this package replaces an earlier one of its class."""
        super().add_callback(callback)
        self._arrange_callbacks()

    def _arrange_callbacks(self) -> None:
        """Keep the last of each kind of ours; the map comes after the gammas, and after the user's."""
        callbacks = self.callback_handler.callbacks
        for kind in (AdaFocalCallback, CalibrationMapCallback):
            for earlier in [callback for callback in callbacks if isinstance(callback, kind)][:-1]:
                callbacks.remove(earlier)
        for callback in callbacks:
            if isinstance(callback, CalibrationCallback):
                callback.trainer = self
        callbacks.sort(key=lambda callback: isinstance(callback, CalibrationMapCallback))

    # ---- Checks before a training ----

    def _check_model(self) -> None:
        loss = self.calibration_loss
        if self._reads_labels:
            check_model(self)
        self._next_token = self.answers is None and predicts_next_token(self.unwrapped_model)
        if own_callback(self, AdaFocalCallback) is not None and not isinstance(loss, AdaptiveLoss):
            way_out = "use loss='adafocal', or leave the callback out"
            raise InputValueError(
                expected("AdaFocalCallback", "go with a loss that adapts", repr(loss.name), way_out)
            )

    def has_label_per_class(self, dataset: Any, role: str) -> bool | None:
        """Whether the labels of a dataset are one float per class; None where this cannot be told."""
        labels = collated_labels(self, dataset, role)
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
            resume_from_checkpoint = newest_checkpoint(self._output_dir)
            way_out = "pass resume_from_checkpoint=FOLDER, or train without it"
            found = resume_from_checkpoint is not None
            check(found, "output_dir to hold a complete checkpoint", f"{self._output_dir} with none", way_out)
        self._resume_from = resume_from_checkpoint or None
        if self.model_init is None:
            self._set_up_training()
        self._stated = (self.loss_is_scaled_for_ga, self.model_accepts_loss_kwargs)
        try:
            return super().train(self._resume_from, trial, *args, **kwargs)
        finally:
            self.is_in_train = False  # also after an error
            self.loss_is_scaled_for_ga, self.model_accepts_loss_kwargs = self._stated

    def begin_training(self) -> None:
        """Called before all `on_train_begin`, when the model is there and a trial of a search has set its arguments."""
        if self.model_init is not None:
            self._set_up_training()
        self._arrange_callbacks()  # the Trainer may have made them anew from a checkpoint's state

    def _set_up_training(self) -> None:
        load_saved_names(self.model)
        # A new model starts with a new table.
        if self.model_init is not None or self._made_from != self._calibration_arguments():
            present = self.callback_handler.callbacks
            self._removed |= {type(c) for c in self._own_callbacks if c not in present}
            self.callback_handler.callbacks = [c for c in present if c not in self._own_callbacks]
            vars(self).pop("held_out_loaders", None)
            self._make_loss()
            self._add_calibration_callbacks()
            self._check_model()
        check_data(self)
        if self._resume_from is not None and isinstance(self.calibration_loss, AdaptiveLoss):
            load_loss_state(self.calibration_loss, self._resume_from)
        # Further training undoes an earlier calibration.
        self._forget_calibration_map()
        fitting = own_callback(self, CalibrationMapCallback)
        if self._resume_from is not None and fitting is not None:
            saved = map_of_checkpoint(self._resume_from, fitting.scaler)
            if saved is not None:
                self._take_calibration_map(saved)
        self.last_evaluation = None
        self.summary_was_at = None

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: Any
    ) -> tuple[Any, Any]:
        """The micro-batches of one optimizer step, and the loss's normalizer over all processes."""
        # Whether a loss is scaled for accumulation, our compute_loss says anew in each step.
        self.loss_is_scaled_for_ga, self.model_accepts_loss_kwargs = self._stated
        batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self.compute_loss_func is not None:
            return batches, count
        # Another compute_loss need not know ignored rows.
        if batches and type(self).compute_loss is CalibrationMixin.compute_loss:
            self._ignore_repeated_rows(batches[-1])
        labels = [batch[self.label_key].to(device) for batch in batches if self.label_key in batch]
        if not labels:
            return batches, None
        if self.calibration_config.loss_reduction == "sum":
            return batches, torch.ones((), device=device)
        counts = [self.calibration_loss.normalizer(self._aligned(each)).float() for each in labels]
        return batches, self.accelerator.reduce(torch.stack(counts).sum(), "sum").clamp_min(1e-12)

    def _ignore_repeated_rows(self, batch: Any) -> None:
        """Take the rows out that accelerate adds from the start of the epoch, so that processes have equal batches."""
        shards = getattr(self.callback_handler.train_dataloader, "batch_sampler", None)
        is_last = self.accelerator.gradient_state.end_of_dataloader
        if not (is_last and isinstance(shards, BatchSamplerShard) and self.label_key in batch):
            return
        labels = batch[self.label_key]
        rows_left = len(shards.batch_sampler.sampler) % (len(labels) * shards.num_processes)
        if rows_left and shards.even_batches and not shards.drop_last:
            own = min(max(rows_left - shards.process_index * len(labels), 0), len(labels))
            labels = labels.clone() if labels.is_floating_point() else labels.long().clone()
            labels[own:] = IGNORE_INDEX
            batch[self.label_key] = labels

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The calibration loss; the model is called without labels, so it does not compute its own.

        The loss is a sum over the rows of this micro-batch, divided by the number of rows in the whole global
        batch (`get_batch_samples`), times the number of processes, over which DDP averages the gradients.
        Without `num_items_in_batch` it is the mean over this micro-batch.
        """
        if self.compute_loss_func is not None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        outputs, logits, labels = self.logits_and_labels(model, inputs)
        if self.calibration_loss.multi_label is None:
            self.decide_problem_type(labels.is_floating_point())
        if self.calibration_loss.multi_label and labels.is_floating_point():
            check_decisions(labels)
            if self.model_config is not None:  # pipelines read it, and would apply a softmax
                self.model_config.problem_type = "multi_label_classification"
        if not model.training:
            num_items_in_batch = None  # the loss of an evaluation batch is its own mean
            self.seen = (logits_of(logits), labels)  # for the pass that is under way
            if self._example_batch is None:
                others = {self.label_key, *self.not_for_the_model}
                rows = {k: v for k, v in inputs.items() if k not in others and isinstance(v, Tensor)}
                self._example_batch = {k: (v[:4] if v.dim() else v).cpu() for k, v in rows.items()}
        loss = self.calibration_loss(logits_of(logits), labels, num_items_in_batch=num_items_in_batch)
        if num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes
            declare_loss_scaled(self)
        if isinstance(outputs, tuple):  # the Trainer takes the logits from behind the loss
            outputs = (loss, *outputs)
        elif isinstance(outputs, Tensor):
            outputs = (loss, outputs)
        return (loss, outputs) if return_outputs else loss

    def logits_and_labels(self, model: Any, inputs: dict[str, Any]) -> tuple[Any, Any, Tensor]:
        """One forward: what `prediction_step` returns, the logits (..., C), and the label of each.

        The model is called without labels. A trainer whose batches or logits are made otherwise overrides this.
        """
        key = self.label_key
        if inputs.get(key) is None:
            way_out = "check the dataset's label column and the data collator"
            raise InputValueError(expected("the batch", f"have {key!r}", f"only {sorted(inputs)}", way_out))
        labels, others = inputs[key], {name: value for name, value in inputs.items() if name != key}
        if self.answers is not None:
            logits = self.answers.logits(model, others)
            return {"logits": logits}, logits, labels
        outputs = model(**others)
        return outputs, outputs, self._aligned(labels)

    def _aligned(self, labels: Tensor) -> Tensor:
        return aligned_labels(labels, next_token=self._next_token)

    def hyperparameter_search(
        self,
        hp_space: Any = None,
        compute_objective: Callable[[dict[str, float]], float] | str | None = None,
        n_trials: int = 20,
        direction: Any = "minimize",
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Search as `Trainer.hyperparameter_search` does; by default for the smallest NLL of the evaluation set.

        Args:
            hp_space: as for `Trainer`, and the others too. A trial sets a loss with its hyperparameters,
                ``{"loss": "focal", "loss_kwargs": {"gamma": trial.suggest_float("gamma", 1, 5)}}``.
            compute_objective: a function of an evaluation's metrics, or the name of one, such as "eval_brier" or
                "eval_nll_calibrated". None is "eval_nll": `eval_loss` does not compare losses with each other, and
                the sum of all metrics, which is the Trainer's default, means nothing.
            n_trials: how many.
            direction: "minimize" or "maximize".
        """
        if compute_objective is None or isinstance(compute_objective, str):
            compute_objective = self._objective(compute_objective or "eval_nll", direction)
        return super().hyperparameter_search(
            hp_space, compute_objective, n_trials, direction, *args, **kwargs
        )

    def _objective(self, name: str, direction: Any) -> Callable[[dict[str, float]], float]:
        """The function of an evaluation's metrics that takes the one of this name."""
        known = [f"eval_{key}{suffix}" for suffix in ("", "_calibrated") for key in LOGGED_METRICS]
        requirement = "compute_objective to be a function of an evaluation's metrics, or the name of one"
        is_known = name in (*known, "eval_loss") or self.compute_metrics is not None
        check(is_known, requirement, repr(name), did_you_mean(name, known))
        is_ours = name.removeprefix("eval_").removesuffix("_calibrated") in LOGGED_METRICS
        higher = is_ours and not lower_is_better(name)
        right = "maximize" if higher else "minimize"
        fits = direction == right or not (is_ours or name == "eval_loss")
        way_out = "pass a function of the metrics as compute_objective for another aim"
        check(fits, f"direction to be {right!r} for {name}", repr(direction), way_out)
        if name.endswith("_calibrated") and is_ours:
            callback = own_callback(self, CalibrationMapCallback)
            way_out = f"set calibration_method, or search for {name.removesuffix('_calibrated')!r}"
            check(callback is not None, f"a calibration map to be asked for with {name!r}", "none", way_out)
            at_each = self.args.eval_strategy == "no" or getattr(callback, "strategy", "") == "evaluate"
            requirement = f"calibration_strategy to be 'evaluate' for {name!r} during a training"
            check(at_each, requirement, "'end'", "set it, or eval_strategy='no'")
        return itemgetter(name)

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
            ignore_keys: entries of the model's output that are not predictions.
            metric_key_prefix: of the log keys.
            keep_logits: keep logits and labels of the dataset for `last_evaluation.logits_and_labels()`. Once a
                calibration map is fitted and the training is over, they are kept in any case where they are few
                (50,000 rows, 20 million values), for the intervals of the model card.
        """
        callback = own_callback(self, CalibrationMapCallback)
        if callback is not None and self.is_in_train and self.calibration_split is not None:
            callback.before_evaluate(self.state.global_step)
        known: Any = self.eval_dataset
        named = isinstance(known, dict) and isinstance(eval_dataset, str)
        dataset = known if eval_dataset is None else known[eval_dataset] if named else eval_dataset
        self._evaluating.append((dataset, None))
        outer = self._keep_logits
        self._keep_logits = keep_logits or outer
        try:
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        finally:
            self._keep_logits = outer
            _, done = self._evaluating.pop()
            # What a callback has evaluated meanwhile is not the last; several sets are evaluations of their own.
            self.last_evaluation = done or self.last_evaluation

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
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        # During the training nobody asks for the logits, and each evaluation would gather them.
        for_card = self.calibration_map is not None and (not self.is_in_train or self._is_last_evaluation)
        current = Evaluation(
            self.accelerator,
            metric_key_prefix,
            n_bins=self.calibration_config.n_bins,
            calibration_map=self.calibration_map,
            keep_logits=self._keep_logits or for_card,
            keep_at_most=None if self._keep_logits else Evaluation.FEW_VALUES,
        )
        loop = partial(
            super().evaluation_loop, dataloader, description, False, ignore_keys, metric_key_prefix
        )
        output = run(self, current, loop, loss_only=loss_only)
        if description == "Evaluation":
            self.last_evaluation = current
            if self._evaluating:
                current.dataset = self._evaluating[-1][0]
                self._evaluating[-1] = (current.dataset, current)
        # A metric of that name from the user's compute_metrics takes precedence.
        return output._replace(metrics=current.metrics() | (output.metrics or {}))

    # ---- Calibration ----

    def held_out_pass(
        self, *, n_samples: int | None = None, keep_logits: bool = False, sample_tokens: bool = False
    ) -> Evaluation:
        """Run the model over the calibration split; mode, random streams, log and progress bars stay as found.

        Args:
            n_samples: only a fixed random subset of this size; None for all.
            keep_logits: keep logits and labels, for a fit that needs them.
            sample_tokens: keep those of a random sample of the tokens, at most 20,000 and half a GiB.
        """
        keep: dict[str, Any] = {"keep_logits": keep_logits, "sample_tokens": sample_tokens}
        keep["n_bins"] = self.calibration_config.n_bins
        return held_out(self, self.calibration_split, n_samples=n_samples, **keep)

    def update_adaptive_loss(self, done: Evaluation | None = None, *, n_samples: int | None = None) -> None:
        """Update the table of an adaptive loss from the calibration split, and log it.

        Args:
            done: a pass over it that is at hand; None makes one.
            n_samples: of which subset size to make one; None for the whole split.

        Raises:
            ValueError: if the split has no labelled examples.
        """
        loss = self.calibration_loss
        assert isinstance(loss, AdaptiveLoss)
        update_table(self, loss, done or self.held_out_pass(n_samples=n_samples))

    @property
    def temperature(self) -> float | None:
        """T, where the fitted calibration map divides the logits by one number; else None."""
        return None if self.calibration_map is None else temperature_of(self.calibration_map)

    def fit_calibration_map(self, scaler: Any = None) -> Any:
        """Fit a map of the logits on the calibration split, and record it in the model's config.

        From then on evaluations report the metrics with it too. The model's weights stay as they are:
        `save_calibrated_model` folds the map into what it saves. A fit that fails leaves no map. For a causal language
        model the rows are a random sample of the split's tokens, at most 20,000 and half a GiB of logits.

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
            callback = own_callback(self, CalibrationMapCallback)
            scaler = clone(callback.scaler) if callback is not None else self._make_scaler()
            scaler = TemperatureScaling() if scaler is None else scaler
        self.check_goes_with(scaler)
        self._forget_calibration_map()
        held_out = self.held_out_pass(keep_logits=True, sample_tokens=self._next_token)
        logits, labels = held_out.logits_and_labels()
        check_problem(scaler, labels.ndim == 2)
        fit_once(self.accelerator, scaler, logits, labels)
        model = self.unwrapped_model
        if has_bias(scaler) and head_loses_bias(model, self.n_classes):
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
            callback = own_callback(self, CalibrationMapCallback)
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
        self.check_goes_with(scaler)
        n_classes, multi_label = self.n_classes, self.calibration_loss.multi_label
        check_fitted(scaler, multi_label=multi_label, n_classes=n_classes)
        weights, criterion = self.calibration_loss.class_weights, getattr(scaler, "criterion", None)
        about = {
            **({} if criterion is None else {"criterion": criterion}),
            "split": split,
            "n_examples": n_examples,
            "loss": self.calibration_loss.name,
            "loss_kwargs": self.calibration_loss.hyperparameters,
            **({} if weights is None else {"class_weights": weights.tolist()}),
            **(OF_PAIRS if n_classes == 1 and not multi_label else {}),
            "folded": False,
            **about_data(self, split, n_examples),
        }
        self._take_calibration_map(FittedMap(scaler, about))

    def _take_calibration_map(self, fitted: FittedMap) -> None:
        self.fitted_map = fitted
        if self.model_config is not None:
            self.model_config.calibration = fitted.config_record()

    def _forget_calibration_map(self) -> None:
        self.fitted_map = None
        if hasattr(self.model_config, "calibration"):
            del self.model_config.calibration

    def check_goes_with(self, scaler: Any) -> None:
        """Refuse a scaler that does not go with the problem or the model's head."""
        check_problem(scaler, self.calibration_loss.multi_label)
        check_head(scaler, self.unwrapped_model, self.n_classes)
