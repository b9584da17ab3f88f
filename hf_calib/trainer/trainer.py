"""`CalibrationTrainer`: the Trainer with a calibration loss, metrics and a calibrator."""

from __future__ import annotations

import inspect
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sklearn.base import clone
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedConfig, Trainer
from transformers.trainer_utils import default_compute_objective

from hf_calib._compat import load_saved_names
from hf_calib._errors import InputValueError, check, expected, few
from hf_calib._hub import CARD, with_owner
from hf_calib.cards.card import repair_stock_card, write_card
from hf_calib.export.folder import (
    check_overwrites_no_original,
    loaded_from,
    save_folded,
    standalone_copy,
)
from hf_calib.export.hub import push_folder
from hf_calib.language_models.label_tokens import is_causal, without_adapters
from hf_calib.losses import AdaptiveLoss, CalibrationLoss, all_gather_rows, logits_of
from hf_calib.metrics.checks import check_integer, check_type
from hf_calib.metrics.state import lower_is_better
from hf_calib.models.weights import fingerprint_if_whole, is_loaded_alike
from hf_calib.scaling import TemperatureScaling
from hf_calib.scaling.saved_map import SavedMap, temperature_of, title_of
from hf_calib.trainer import calibration_map as maps
from hf_calib.trainer import checks, passes, results, saving
from hf_calib.trainer import labels as of_labels
from hf_calib.trainer.callbacks import (
    AdaFocalCallback,
    CalibrationMapCallback,
    OwnCallbacks,
)
from hf_calib.trainer.checks import Splits
from hf_calib.trainer.config import (
    METRIC_SCHEDULES,
    CalibrationConfig,
    CalibrationTrainingArguments,
    gamma_callback,
    hub_token_left_out,
    map_callback,
)
from hf_calib.trainer.evaluation import Batch, Evaluation, WatchedStep
from hf_calib.trainer.first_rows import FirstRows, is_multi_label
from hf_calib.trainer.labels import PLACES, AnswerOptions, Problem
from hf_calib.trainer.results import Results
from hf_calib.trainer.saving import (
    check_complete,
    check_goes_on,
    checkpoint_to_resume,
    load_loss_state,
    raise_everywhere,
)

logger = logging.getLogger(__name__)


class CalibrationMixin(Trainer):
    """Mixin that adds calibration to a subclass of `Trainer`: `class Mine(CalibrationMixin,
    TheirTrainer)`.

    `CalibrationTrainer` is the mixin with the stock `Trainer`, and describes what it adds. If a
    trainer makes its batches or logits in another way, override `logits_and_labels`. A trainer with
    its own `compute_loss` keeps it, and its evaluations have the metrics if its `prediction_step`
    returns logits and labels. With `compute_loss_func` the loss is that function, scaled as in the
    stock Trainer.

    Args:
        calibration: a `CalibrationConfig`, if `args` has no such fields; other arguments as in
            `CalibrationTrainer`.
    """

    args: Any
    calibration_loss: CalibrationLoss
    fitted_map: SavedMap | None = None
    last_evaluation: Evaluation | None = None
    answers: AnswerOptions | None = None
    not_for_the_model: tuple[str, ...] = (
        PLACES,
    )  # Tensors of a batch other than labels.
    example_batch: dict[str, Tensor] | None = None  # A folded head is checked on it.
    said_not_folded = False
    said_left_out = False
    has_pushed_a_map = False
    during_training = False  # A callback ends it after the last step.
    _planned_pass: Evaluation | None = None  # What `evaluate` hands to its loop.
    _resume_from: str | None = None
    _trial_of_search: Any = None
    _weights_of_map: str | None = None  # The fingerprint when it was fitted, if known.
    _trained_in: set[torch.dtype] | None = None  # The dtypes of the trained weights.

    def __init__(
        self,
        *args: Any,
        calibration_dataset: Any = None,
        calibration: Any = None,
        **kwargs: Any,
    ) -> None:
        given: Any = kwargs.get("args", args[1] if len(args) > 1 else None)
        config = given if calibration is None else calibration
        check_type(
            isinstance(config, CalibrationConfig),
            "args to be CalibrationTrainingArguments",
            type(given).__name__,
            "replace TrainingArguments by it, or pass calibration=CalibrationConfig(...) with it",
        )
        self.calibration_config: CalibrationConfig = config
        self.calibration_dataset = calibration_dataset
        with warnings.catch_warnings():
            # The losses of this library smooth the labels of each decision.
            message = "Label smoothing is not compatible with multi-label"
            warnings.filterwarnings("ignore", message)
            super().__init__(*args, **kwargs)
        self.own_callbacks = OwnCallbacks(self, self.callback_handler)
        self.split_loaders = passes.SplitLoaders(self)

        # False if a trainer of another kind makes the labels from its batches.
        self.reads_labels = (
            type(self).logits_and_labels is CalibrationMixin.logits_and_labels
        )
        if self.reads_labels and not self.label_names:
            self.label_names = ["labels"]
        self.label_key = str(self.label_names[0]) if self.label_names else "labels"
        self.model_accepts_loss_kwargs = (
            False  # The Trainer must not infer it from the model.
        )

        # A calibrated copy must not replace the files that the model was loaded from.
        self.originals = set() if self.model is None else loaded_from(self.model)
        options: list[str] | None = getattr(self.args, "answer_options", None)
        if options is not None:
            self.answers = AnswerOptions(
                self.unwrapped_model, self.processing_class, options
            )
            self.data_collator = partial(self.answers.batch, self.data_collator)
        # There is no event after the Trainer has restored the callbacks and before it calls them.
        handler: Any = self.callback_handler
        handler.on_train_begin = partial(self._begin_training, handler.on_train_begin)
        handler.on_train_end = partial(self._end_training, handler.on_train_end)
        self._make_loss()
        self._set_direction()
        self._check_model()

    # ---- Set-up ----

    @property
    def calibration_map(self) -> Any:
        """The fitted calibrator, or None; metrics, records and saving all use this object."""
        return None if self.fitted_map is None else self.fitted_map.scaler

    @property
    def temperature(self) -> float | None:
        """T if the fitted calibrator divides the logits by one number, otherwise None."""
        return (
            None if self.fitted_map is None else temperature_of(self.fitted_map.scaler)
        )

    @property
    def has_own_loss(self) -> bool:
        """Whether the loss is that of this class; another `compute_loss` may read other labels."""
        return type(self).compute_loss is CalibrationMixin.compute_loss

    @property
    def splits(self) -> Splits:
        """The datasets by their role."""
        return Splits(self.train_dataset, self.calibration_dataset, self.eval_dataset)

    @property
    def calibration_split(self) -> Any:
        """The dataset for gammas and calibrator: `calibration_dataset`, a single evaluation set, or
        None.
        """
        return self.splits.held_out

    @property
    def unwrapped_model(self) -> Any:
        """The model without wrappers for several processes or compilation."""
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    @property
    def model_config(self) -> Any:
        """The model's config; None if the network has no `transformers` config."""
        config = getattr(self.unwrapped_model, "config", None)
        return config if isinstance(config, PreTrainedConfig) else None

    @property
    def class_names(self) -> dict[int, str]:
        """The class names by class index; empty if the model has none."""
        if self.answers is not None:
            return dict(enumerate(self.answers.names))
        return getattr(self.model_config, "id2label", None) or {}

    @property
    def problem(self) -> Problem:
        """What the model predicts, as far as it is known."""
        return Problem(
            self.unwrapped_model,
            self.n_classes,
            self.calibration_loss.multi_label,
            self.answers,
            self.calibration_loss.reads_soft_labels,
        )

    @property
    def results(self) -> Results:
        """What is known of the run now, for records and reports."""
        last = self.last_evaluation
        is_of_other_weights = last is not None and last.is_of_other_weights
        return Results(
            loss=self.calibration_loss,
            loss_record=self._loss_record,
            splits=self.splits,
            n_bins=self.calibration_config.n_bins,
            n_classes=self.n_classes,
            class_names=self.class_names,
            base_model=getattr(self.model_config, "name_or_path", None),
            mixed_precision=self.accelerator.mixed_precision,
            fitted=self.fitted_map,
            evaluation=None if is_of_other_weights else self.last_evaluation,
        )

    @property
    def _loss_record(self) -> dict[str, Any]:
        """The loss in JSON types; empty for a function of the user's, which has no name."""
        if self.compute_loss_func is not None:
            return {}
        return saving.loss_record(self.calibration_loss)

    @property
    def _first_rows(self) -> FirstRows:
        """The first rows of the datasets as the batches will have them."""
        return FirstRows(self.get_test_dataloader, self.label_key)

    def _make_loss(self) -> None:
        """Make the configured loss and callbacks."""
        config = self.calibration_config
        model = self.unwrapped_model
        self._made_from = self._settings()
        self._next_token = self.answers is None and is_causal(model)
        if self.answers is None:
            self.n_classes = of_labels.number_of_classes(model)
        else:
            self.n_classes = len(self.answers.tokens)
        self.calibration_loss = config.make_loss(
            # The problem type of loss and metrics; None if unknown.
            problem_type=getattr(self.model_config, "problem_type", None),
            balanced=self._balanced("class_weights", of_labels.balanced_weights),
            balanced_pos_weight=self._balanced(
                "pos_weight", of_labels.balanced_pos_weight
            ),
        ).to(self.args.device)
        if config.gather_batch and self.args.world_size > 1:
            self.calibration_loss.gather = all_gather_rows

        gammas = gamma_callback(config, self.calibration_loss)
        self.own_callbacks.replace(AdaFocalCallback, gammas)
        fitting = map_callback(config.calibration_strategy, self._configured_scaler())
        self.own_callbacks.replace(CalibrationMapCallback, fitting)
        self.own_callbacks.arrange()

    def _configured_scaler(self) -> Any:
        """The calibrator of the arguments, not fitted, or None."""
        config = self.calibration_config
        is_default = config.calibration_method is None
        scaler = config.make_scaler()
        return maps.scaler_for(self.problem, scaler, is_default=is_default)

    def _settings(self) -> list[Any]:
        """What loss and callbacks are made from."""
        config = self.calibration_config
        made_from: list[Any] = [config.settings()]
        if "balanced" in (config.class_weights, config.pos_weight):
            # They are counted in these rows, as they arrive.
            made_from += [id(self.train_dataset), id(self.data_collator)]
        return made_from

    def _balanced(
        self, setting: str, balance: Callable[..., list[float]]
    ) -> list[float] | None:
        """The weights "balanced" of classes or labels, by the labels of the training split."""
        if getattr(self.calibration_config, setting) != "balanced":
            return None
        labels = None
        if self.answers is None:  # Otherwise the column has tokens.
            labels = of_labels.read_labels(self.train_dataset, self.label_key)
        arriving = partial(self._first_rows.labels, self.train_dataset, "training")
        return balance(labels, self.n_classes, arriving)

    def _check_model(self) -> None:
        """Raise for a model that is no classifier, and for arguments that do not fit together."""
        loss = self.calibration_loss
        checks.check_loss_is_given_once(
            self.calibration_config.loss, self.compute_loss_func
        )
        check(
            isinstance(loss, AdaptiveLoss) or self.own_callbacks.gammas is None,
            "AdaFocalCallback to be used with a loss that adapts",
            got=repr(loss.name),
            way_out="use loss='adafocal', or leave the callback out",
        )
        if self.reads_labels:
            checks.check_is_classifier(self.problem)
            checks.check_number_of_weights(loss, self.n_classes)
        # The names that the Trainer finds in the model's signature may be of no column.
        if self.reads_labels and self.has_own_loss and self.args.label_names:
            of_labels.check_one_label(self.args.label_names)
        if self.has_own_loss:
            checks.check_smoothing_is_read(self.args, self.calibration_config)

        key = self._key_of_best
        if self._reads_best and key is not None:
            self._logged_metrics.check(key, "metric_for_best_model")

    @property
    def _reads_best(self) -> bool:
        """Whether the metric that selects the best model is read: the Trainer does after each
        evaluation.
        """
        return (
            self.args.eval_strategy != "no"
            or self.args.load_best_model_at_end
            or self.args.save_strategy == "best"
            or self.args.lr_scheduler_type in METRIC_SCHEDULES
        )

    def _set_direction(self) -> None:
        """Take smaller values for better in a metric of an evaluation set that is named like a
        sign, as "neg".
        """
        key = self._key_of_best
        if key is None or getattr(self.args, "direction_is_given", True):
            return
        evaluated, metric = self._logged_metrics.parts(key)
        if evaluated is not None and lower_is_better(metric):
            self.args.greater_is_better = False

    @property
    def _key_of_best(self) -> str | None:
        """The log key of the metric that selects the best model, which the Trainer gives the
        prefix, too.
        """
        best = self.args.metric_for_best_model
        return best if best is None or best.startswith("eval_") else f"eval_{best}"

    @property
    def _logged_metrics(self) -> checks.LoggedMetrics:
        """The metrics of evaluations, as far as they are known."""
        fitting = self.own_callbacks.fitting
        fits_before = fitting is not None and fitting.strategy == "evaluate"
        # A search without evaluations during training has one at the end.
        fits_at_the_end = fitting is not None and self.args.eval_strategy == "no"
        has_split = self.calibration_split is not None
        kinds = map(type, [self, *self.callback_handler.callbacks])
        return checks.LoggedMetrics(
            self.eval_dataset,
            has_calibrated=has_split and (fits_before or fits_at_the_end),
            has_others=self.compute_metrics is not None or checks.add_metrics(kinds),
        )

    def _take_objective(self, trial: Any) -> None:
        """Read the objective of a search's trial by its name; by default it is the NLL instead of
        the Trainer's sum.
        """
        objective: Any = self.compute_objective
        if objective is default_compute_objective:
            objective = "eval_nll"
        if isinstance(objective, str):
            objective = checks.Objective(objective)
            self.compute_objective = objective
        # Each trial has settings of its own.
        if isinstance(objective, checks.Objective):
            wanted = "a function of an evaluation's metrics, or the name of one"
            self._logged_metrics.check(objective.name, "compute_objective", wanted)
            checks.check_direction(objective.name, trial)

    # ---- Training ----

    def train(
        self,
        resume_from_checkpoint: Any = None,
        trial: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Train like `Trainer.train`; first raise ValueError if data or checkpoint do not fit the
        loss or the model.

        `resume_from_checkpoint=True` uses the newest complete checkpoint in `output_dir` and also
        restores the table of an adaptive loss and the calibrator. If the settings of loss or
        calibrator have changed, both are made again.
        """
        given = resume_from_checkpoint
        check_type(
            given is None or isinstance(given, (bool, str, os.PathLike)),
            "resume_from_checkpoint to be the path of a checkpoint, or True for the newest",
            got=repr(given),
            way_out="pass a path such as 'out/checkpoint-500'",
        )
        loss = self.calibration_config.loss
        if resume_from_checkpoint is True:
            resume_from_checkpoint = checkpoint_to_resume(self.args.output_dir, loss)
        elif resume_from_checkpoint:
            check_complete(resume_from_checkpoint, loss)
        self._resume_from = (
            None if resume_from_checkpoint is False else resume_from_checkpoint
        )
        self._trial_of_search = trial
        configured = self.calibration_config.fields()
        self._prepare_anew()
        if self.model_init is None:
            self._set_up_training()
        try:
            with hub_token_left_out():
                return super().train(self._resume_from, trial, *args, **kwargs)
        finally:
            # This is also set after an error.
            self.is_in_train = False
            self.during_training = False
            if trial is not None:  # The next one may not set what this one has set.
                vars(self.calibration_config).update(configured)

    def _prepare_anew(self) -> None:
        """Let the training make a DDP of a model that an earlier pass has prepared for evaluations
        only.
        """
        is_of_one = self.args.world_size == 1
        if is_of_one or self.is_fsdp_enabled or self.is_deepspeed_enabled:
            return
        wrapped: Any = self.model_wrapped
        model: Any = self.model
        # That of an earlier training is used again.
        if any(isinstance(each, DistributedDataParallel) for each in wrapped.modules()):
            return
        # Of a prepared model, accelerate makes no DDP, and each process would train one of its own.
        plain = self.accelerator.unwrap_model(
            wrapped, keep_fp32_wrapper=False, keep_torch_compile=False
        )
        plain._is_accelerate_prepared = False
        self.model_wrapped = model

    def _set_up_training(self) -> None:
        """Set loss, calibrator and gammas for the start of a run: new ones, or those of its
        checkpoint.
        """
        load_saved_names(self.model)
        self.calibration_config.check_calibration()
        if self.model_init is not None or self._made_from != self._settings():
            self._make_loss()  # A new model needs a new table.
        self._check_model()  # Arguments may have changed since it was made.
        if self._trial_of_search is not None:
            self._take_objective(self._trial_of_search)
        self._check_data()
        self.remove_calibration_map()  # Further training invalidates an earlier calibrator.
        if self._resume_from:  # The Trainer itself refuses an empty name.
            self._restore_calibration(self._resume_from)
        self.last_evaluation = None

    def _restore_calibration(self, checkpoint: str) -> None:
        """Restore the gammas and the calibrator of a checkpoint of this loss."""
        check_goes_on(self.calibration_loss, self.args, checkpoint)
        if isinstance(self.calibration_loss, AdaptiveLoss):
            load_loss_state(self.calibration_loss, checkpoint)
        fitting = self.own_callbacks.fitting
        if fitting is not None:
            saved = maps.map_of_checkpoint(checkpoint, fitting.scaler)
            if saved is not None:
                maps.check_fitted(saved.scaler, self.problem)
            self._set_map(saved)

    def _check_data(self) -> None:
        """Raise for data on which training would fail later, and warn of splits that make metrics
        misleading.
        """
        checks.check_given_everywhere(self.splits)
        if self.calibration_dataset is not None:
            checks.check_is_dataset(self.calibration_dataset)
        self.own_callbacks.arrange()
        gammas = self.own_callbacks.gammas
        fitting = self.own_callbacks.fitting
        fitted = []
        if gammas is not None:
            checks.check_gammas_have_rows(self.calibration_loss.name, self.splits)
            fitted.append("the loss's gammas")
        if fitting is not None:
            fitted.append(fitting.title)
        problem = self.problem
        if self.reads_labels:
            is_fitted_to = (
                self.calibration_split if fitted and self.has_own_loss else None
            )
            problem = problem._replace(multi_label=self._check_rows(is_fitted_to))
        if fitting is not None:
            maps.check_goes_with(fitting.scaler, problem)

        if self.is_world_process_zero():
            config = self.calibration_config
            if fitted:
                checks.warn_of_roles(self.splits, " and ".join(fitted))
            checks.warn_of_fits_at_evaluations(
                config.calibration_strategy,
                has_evaluations=self.args.eval_strategy != "no"
                or self.args.eval_on_start,
                has_calibrator=fitting is not None,
            )
            checks.warn_of_split_batches(
                self.calibration_loss, self.args, gathers=config.gather_batch
            )

    def _check_rows(self, fitted_to: Any) -> bool | None:
        """Raise for rows or labels that model, loss, fit or metric cannot read; return whether a
        row has several.
        """
        key = self.label_key
        loss = self.calibration_loss
        labels = self._label_check()
        multi_label = self.problem.multi_label
        best = self._key_of_best if self._reads_best else None
        selecting = None if best is None else self._logged_metrics.labelled_for(best)
        forward = without_adapters(self.unwrapped_model).forward
        inputs = inspect.signature(forward).parameters.keys()
        for role, dataset in self.splits.by_name().items():
            checks.check_inputs(dataset, role, inputs - {*of_labels.label_columns(key)})
            labels.check(dataset, role)
            is_fitted_to = dataset is not None and dataset is fitted_to
            # Other datasets may change when they are read, as an epoch does.
            if not is_fitted_to and not of_labels.is_in_memory(dataset):
                continue
            batch = self._first_rows.batch(dataset, role)
            if is_fitted_to:
                gammas = self.own_callbacks.gammas
                n_samples = None if gammas is None else gammas.n_samples
                checks.check_calibration_split(dataset, batch, key, n_samples)
            if best is not None and dataset is selecting:
                checks.check_has_labels(batch, role, key, best)
            checks.check_kind(batch, role, key, multi_label, loss)
            if is_fitted_to and self.own_callbacks.fitting:
                are_soft = is_multi_label(batch, key) and multi_label is False
                maps.check_has_hard_labels(are_soft=bool(are_soft))
            if multi_label is None:  # As the first batch of the training will decide.
                multi_label = is_multi_label(batch, key)
        if multi_label is False:
            loss.check_no_pos_weight("one label per row")
        return multi_label

    def _label_check(self) -> checks.LabelCheck:
        """What labels have to fit: the problem, and the names of classes of the model and of the
        first split.
        """
        collator_module = str(getattr(self.data_collator, "__module__", ""))
        splits = self.splits.by_name().values()
        named = [checks.names_of_classes(rows, self.label_key) for rows in splits]
        return checks.LabelCheck(
            problem=self.problem,
            class_names=list(self.class_names.values()),
            names_of_splits=next(filter(None, named), []),
            first_rows=self._first_rows,
            collator_is_stock=collator_module.startswith("transformers."),
        )

    def _begin_training(self, begin: Callable[..., Any], *given: Any) -> Any:
        """Run the handler's begin event, once the callbacks are those of this run."""
        if self.model_init is not None:  # A trial of a search has set its arguments.
            self._set_up_training()
        self.own_callbacks.arrange()  # The Trainer may have restored callbacks from a checkpoint.
        # Checkpoints have this state.
        states: Any = self.state.stateful_callbacks
        if self._loss_record:
            states[saving.LOSS_RECORD] = self._loss_record
        else:
            states.pop(saving.LOSS_RECORD, None)
        self.during_training = True
        self._trained_in = {each.dtype for each in self.unwrapped_model.parameters()}
        return begin(*given)

    def _end_training(self, end: Callable[..., Any], *given: Any) -> Any:
        """Run the handler's end event, in which the calibrator is fitted to the weights that are
        left.
        """
        self.own_callbacks.arrange_for_the_end()
        control = end(*given)
        fitting = self.own_callbacks.fitting
        if fitting is not None and not self._has_weights_of_map():
            logger.warning(
                "A callback has changed the weights after the calibrator was fitted. It is fitted "
                "again, but trackers may not receive its metrics. A callback without `on_log` "
                "would have come before the fit."
            )
            fitting.on_train_end(*given)
        return control

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: Any
    ) -> Any:
        """Return the micro-batches of one optimizer step, and the loss's normalizer over all
        processes.
        """
        # The step changes the weights, and a checkpoint must not have a calibrator of earlier ones.
        if self.fitted_map is not None:
            self.remove_calibration_map()
        batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self.compute_loss_func is not None:
            return batches, count
        # Another compute_loss may not support ignored rows.
        if batches and self.has_own_loss:
            self._ignore_repeats(batches[-1], self.callback_handler.train_dataloader)
        labels = [
            batch[self.label_key].to(device)
            for batch in batches
            if self.label_key in batch
        ]
        if not labels:
            return batches, None
        if self.calibration_config.loss_reduction == "sum":
            return batches, torch.ones((), device=device)
        counts = []
        for each in labels:
            aligned = of_labels.aligned_labels(each, next_token=self._next_token)
            counts.append(self.calibration_loss.normalizer(aligned).float())
        total = self.accelerator.reduce(torch.stack(counts).sum(), "sum")
        return batches, total.clamp_min(1e-12)  # All rows may be ignored.

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the calibration loss; the model is called without labels, so it does not compute
        its own loss.

        The loss is the sum over the rows of this micro-batch, divided by the sum of weights of the
        global batch (1 for loss_reduction="sum"; see `get_batch_samples`), times the number of
        processes, over which DDP averages, and the accumulation steps if the Trainer divides by
        them. Without `num_items_in_batch` it is the mean of this batch.
        """
        # The Trainer finds the names in the model's signature, so only a batch tells whether there
        # are such columns.
        if self.reads_labels and len(self.label_names) > 1:
            of_labels.check_one_label(self.label_names)
        if self.compute_loss_func is not None:
            return super().compute_loss(
                model, inputs, return_outputs, num_items_in_batch
            )
        if not model.training:
            num_items_in_batch = None  # Its mean; the pass weights it by its rows.
            self._ignore_repeats(inputs, self.callback_handler.eval_dataloader)

        outputs, logits, labels = self.logits_and_labels(model, inputs)
        logits = logits_of(logits)
        if not model.training:
            self._remember(inputs, Batch(logits, labels))

        loss = self.calibration_loss(
            logits, labels, num_items_in_batch=num_items_in_batch
        )
        # Without a problem type the loss refuses soft labels of one softmax.
        if self.calibration_loss.multi_label is None:
            self._set_problem_type(multi_label=labels.is_floating_point())
        if num_items_in_batch is not None:
            loss = loss * self._scale_of_micro_batches()
        if not return_outputs:
            return loss
        # The Trainer reads logits after the loss.
        if isinstance(outputs, tuple):
            return loss, (loss, *outputs)
        if isinstance(outputs, Tensor):
            return loss, (loss, outputs)
        return loss, outputs

    def _ignore_repeats(self, batch: Any, loader: Any) -> None:
        """Ignore the rows that accelerate repeats so that all of several processes have equal
        batches.
        """
        if self.accelerator.num_processes > 1:
            of_labels.ignore_repeated_rows(
                batch, self.label_key, loader, self.accelerator
            )

    def _set_problem_type(self, *, multi_label: bool) -> None:
        """Take the kind of the problem from the first batch, because the model's config does not
        say it.
        """
        self.calibration_loss.multi_label = multi_label
        # Pipelines read it, and would otherwise apply a softmax.
        if multi_label and self.model_config is not None:
            self.model_config.problem_type = "multi_label_classification"

    def _remember(self, inputs: dict[str, Any], batch: Batch) -> None:
        """Give a batch to the pass that is running, and keep some rows of the first one as an
        example.
        """
        current = self.current_pass
        if current is not None:
            current.read_by_the_loss = batch
        if self.example_batch is None:
            not_inputs = {self.label_key, *self.not_for_the_model}
            self.example_batch = {
                name: value[:4].cpu()
                for name, value in inputs.items()
                # Numbers have no rows.
                if isinstance(value, Tensor) and value.dim() and name not in not_inputs
            }

    def _scale_of_micro_batches(self) -> int:
        """The number of micro-batches over which the Trainer and DDP will average this step's
        losses.
        """
        is_scaled = getattr(
            self, "loss_is_scaled_for_ga", False
        )  # transformers < 5.19 has none
        if is_scaled:
            return self.accelerator.num_processes
        steps = getattr(self, "current_gradient_accumulation_steps", 1)
        return self.accelerator.num_processes * steps

    def logits_and_labels(
        self, model: Any, inputs: dict[str, Any]
    ) -> tuple[Any, Any, Tensor]:
        """Run one forward; return the outputs for `prediction_step`, the logits (..., C) and their
        labels.

        The model is called without labels. Override this method if batches or logits are made in
        another way.
        """
        labels = inputs.get(self.label_key)
        if labels is None:
            raise InputValueError(
                expected(
                    "the batch",
                    f"have {self.label_key!r}",
                    got=f"only {sorted(inputs)}",
                    way_out="check the dataset's label column and the data collator",
                )
            )
        others = {
            name: value for name, value in inputs.items() if name != self.label_key
        }
        if self.answers is not None:
            logits = self.answers.logits(model, others)
            return {"logits": logits}, logits, labels
        outputs = model(**others)
        return (
            outputs,
            outputs,
            of_labels.aligned_labels(labels, next_token=self._next_token),
        )

    # ---- Evaluation ----

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        *,
        keep_logits: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Evaluate like `Trainer.evaluate`, and add the calibration metrics to the results.

        With `keep_logits`, all logits and labels are kept for
        `last_evaluation.logits_and_labels()`; of several sets, those of the last one. For the model
        card they are also kept if a calibrator is fitted, training has ended, and there are at most
        50,000 rows. With `dataloader_drop_last` the last rows are left out as there, with a
        warning.
        """
        sets: Any = self.eval_dataset
        dataset = sets if eval_dataset is None else eval_dataset
        if isinstance(dataset, dict):
            if keep_logits:
                kwargs["keep_logits"] = True  # A subclass's evaluate may not have it.
            metrics: dict[str, Any] = {}
            for name, rows in dataset.items():
                # The Trainer keeps the loaders of its own sets by their names.
                each = name if eval_dataset is None else rows
                prefix = f"{metric_key_prefix}_{name}"
                metrics |= self.evaluate(
                    each, ignore_keys=ignore_keys, metric_key_prefix=prefix, **kwargs
                )
            return metrics

        if self.during_training and self.calibration_split is not None:
            fitting = self.own_callbacks.fitting
            if fitting is not None:
                fitting.before_evaluate(self.state.global_step)
        if isinstance(dataset, str):
            names = list(sets) if isinstance(sets, dict) else []
            check(
                dataset in names,
                "eval_dataset to be a dataset, or the name of an evaluation set",
                got=repr(dataset),
                way_out=f"there are {few(names)}" if names else "pass a dataset",
            )
            dataset = sets[dataset]
        self._planned_pass = self._new_pass(dataset, keep_logits=keep_logits)
        try:
            return super().evaluate(
                eval_dataset, ignore_keys, metric_key_prefix, **kwargs
            )
        finally:
            self._planned_pass = None  # Also if it failed before its loop.

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Run the Trainer's loop in the order of the rows, and add the calibration metrics."""
        current = self._planned_pass or self._new_pass()
        self._planned_pass = None  # A callback may evaluate something else.
        current.prefix = metric_key_prefix
        if self.args.dataloader_drop_last and not self.said_left_out:
            self._warn_left_out(dataloader)
        with passes.passing(self, current, dataloader):
            output = super().evaluation_loop(
                dataloader,
                description,
                prediction_loss_only,
                ignore_keys,
                metric_key_prefix,
            )
        if description == "Evaluation":
            self.last_evaluation = current
            # Weights change in a training, at the end of which the calibrator is fitted.
            is_of_map = self.during_training or self._has_weights_of_map()
            if current.calibration_map is not None and not is_of_map:
                current.is_of_other_weights = True
                self._warn_of_other_weights()
        theirs = dict(output.metrics or {})
        if "loss" in self.args.include_for_metrics and current.has_loss:
            # The loop has kept the losses of the batches for the user's metrics.
            theirs.pop(f"{metric_key_prefix}_loss", None)
        # A metric with this name from the user's compute_metrics takes precedence.
        metrics = current.metrics() | theirs
        return output._replace(metrics=metrics)

    def _warn_of_other_weights(self) -> None:
        """Log that an evaluation has used a calibrator of other weights."""
        if self.is_world_process_zero():
            logger.warning(
                "The weights are not those that the calibrator was fitted to, so the calibrated "
                "metrics are not those of a calibrated model. Call fit_calibration_map() for these "
                "weights."
            )

    def _warn_left_out(self, loader: Any) -> None:
        """Warn once of an evaluation that does not read all rows, as the stock Trainer's."""
        n_left_out = passes.rows_left_out(loader)
        if n_left_out == 0 or not self.is_world_process_zero():
            return
        self.said_left_out = True
        warnings.warn(
            f"dataloader_drop_last leaves {n_left_out} of {len(loader.dataset)} rows out of this "
            "evaluation, so its loss and metrics are of the others. Set "
            "dataloader_drop_last=False. Gammas and the calibrator are fitted to all rows of the "
            "calibration split.",
            stacklevel=4,
        )

    def _new_pass(
        self, dataset: Any = None, *, keep_logits: bool = False
    ) -> Evaluation:
        """Make a pass with the calibrator as it is now."""
        keep_values: float = 0
        if keep_logits:
            keep_values = math.inf
        # During training the logits are not needed, and each evaluation would gather them.
        elif self.fitted_map is not None and not self.during_training:
            keep_values = Evaluation.FEW_VALUES
        return Evaluation(
            self.accelerator,
            n_bins=self.calibration_config.n_bins,
            keep_values=keep_values,
            reads_soft_labels=self.calibration_loss.reads_soft_labels,
            dataset=dataset,
            calibration_map=self.calibration_map,
        )

    @property
    def current_pass(self) -> Evaluation | None:
        """The pass that is running, to which `compute_loss` gives its batches."""
        step = vars(self).get("prediction_step")
        return step.current if isinstance(step, WatchedStep) else None

    # ---- Calibration ----

    def held_out_pass(
        self, *, n_samples: int | None = None, keep_logits: bool = False
    ) -> Evaluation:
        """Run the model on the calibration split; mode, random states, log and progress bars are
        unchanged afterwards.

        With `n_samples`, only a fixed random subset of this size is used. `keep_logits` keeps
        logits and labels; for a causal language model, those of a random sample of tokens, at most
        20,000 and half a GiB.
        """
        current = Evaluation(
            self.accelerator,
            n_bins=self.calibration_config.n_bins,
            keep_values=math.inf if keep_logits else 0,
            sample_tokens=self._next_token,
            reads_soft_labels=self.calibration_loss.reads_soft_labels,
        )
        loader = self.split_loaders.loader(self.calibration_split, n_samples)
        passes.run_held_out(self, loader, current)
        return current

    def fit_calibration_map(
        self, scaler: Any = None, held_out: Evaluation | None = None
    ) -> Any:
        """Fit a calibrator to the calibration split, record it in the config, and use it in all
        later evaluations.

        The model's weights do not change; `save_calibrated_model` folds the calibrator into the
        saved copy. If the fit fails, there is no calibrator. For a causal language model the rows
        are a sample of tokens (`held_out_pass`).

        Args:
            scaler: a foldable calibrator of `SCALERS`, which is fitted in place and returned. None
                uses a copy of that of the `CalibrationMapCallback`, otherwise that of the
                arguments, otherwise a temperature.
            held_out: a `held_out_pass` with logits; None runs one.

        Raises:
            TypeError, ValueError: if the calibrator cannot be folded, or does not fit the split or
                the model.
        """
        checks.check_given_everywhere(self.splits)
        check(
            self.calibration_split is not None,
            "calibration_dataset to be given to fit a calibrator",
            got="none",
            way_out="pass it to the trainer",
        )
        if scaler is None:
            scaler = self._scaler_to_fit()
        maps.check_goes_with(scaler, self.problem)
        self.remove_calibration_map()
        if held_out is None:
            held_out = self.held_out_pass(keep_logits=True)
        logits, labels = held_out.logits_and_labels()
        maps.check_has_hard_labels(are_soft=held_out.has_soft_labels)
        maps.check_problem(scaler, labels.ndim == 2)
        maps.fit_once(self.accelerator, scaler, logits, labels)
        split = "calibration" if self.calibration_dataset is not None else "evaluation"
        problem = self.problem._replace(multi_label=labels.ndim == 2)
        self._use_map(scaler, problem, split, len(labels))
        return scaler

    def _scaler_to_fit(self) -> Any:
        """A copy of the callback's calibrator, otherwise that of the arguments, otherwise a
        temperature.
        """
        fitting = self.own_callbacks.fitting
        if fitting is not None:
            return clone(fitting.scaler)
        configured = self._configured_scaler()
        return TemperatureScaling() if configured is None else configured

    def fit_temperature(self, scaling: TemperatureScaling | None = None) -> float:
        """Fit a temperature like `fit_calibration_map`, by default that of the callback or by the
        NLL; return T > 0.
        """
        own = self._scaler_to_fit() if scaling is None else scaling
        if not isinstance(own, TemperatureScaling):
            own = TemperatureScaling()
        return float(self.fit_calibration_map(own).temperature_)

    def use_calibration_map(self, scaler: Any, *, split: str, n_examples: int) -> None:
        """Use a calibrator that was fitted elsewhere, for example to out-of-fold logits.

        Args:
            scaler: a foldable calibrator of `SCALERS`, fitted to logits of this model, the same on
                every process.
            split, n_examples: name of the fitted rows in the record and the model card, and their
                number.

        Raises:
            TypeError, ValueError: if it cannot be folded, has NaN, or does not fit the problem or
                the model.
        """
        is_name = isinstance(split, str) and split != ""
        way_out = "name the rows that it was fitted to, such as 'out-of-fold'"
        check_type(is_name, "split to be a name", repr(split), way_out)
        check_integer("n_examples", n_examples, 1, "pass the number of fitted rows")
        problem = self.problem
        if problem.multi_label is None and self.reads_labels:
            problem = problem._replace(multi_label=self._has_several_labels())
        maps.check_goes_with(scaler, problem)
        self._use_map(scaler, problem, split, n_examples)

    def _use_map(
        self, scaler: Any, problem: Problem, split: str, n_examples: int
    ) -> None:
        maps.check_fitted(scaler, problem)
        about = results.about_map(self.results, scaler, split, n_examples)
        self._set_map(SavedMap(scaler, about))
        self._weights_of_map = self._fingerprint()

    def _fingerprint(self) -> str | None:
        """That of the weights as they are; None if each process has a part of them."""
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            return None
        return fingerprint_if_whole(self.unwrapped_model)

    def _has_weights_of_map(self) -> bool:
        """Whether the weights are still those that the calibrator was fitted to, as far as it is
        known.
        """
        known = self._weights_of_map
        return known is None or known == self._fingerprint()

    def _has_several_labels(self) -> bool | None:
        """Whether the rows have one float per class, by the first split with labels; None if it
        cannot be told.
        """
        for role, dataset in self.splits.by_name().items():
            batch = self._first_rows.batch(dataset, role)
            kind = is_multi_label(batch, self.label_key)
            if kind is not None:
                return kind
        return None

    def remove_calibration_map(self) -> None:
        """Use no calibrator, until one is fitted."""
        self._set_map(None)

    def _set_map(self, fitted: SavedMap | None) -> None:
        self.fitted_map = fitted
        self._weights_of_map = None
        maps.record_in_config(self.model_config, fitted)

    # ---- Saving ----

    def save_model(
        self, output_dir: str | None = None, _internal_call: bool = False
    ) -> None:
        """Save the model as trained, like `Trainer`, and the calibrator next to it; see
        `save_calibrated_model`.
        """
        if not _internal_call:
            self._warn_not_folded()
        with hub_token_left_out():
            super().save_model(output_dir, _internal_call=True)
        if self.args.should_save:
            folder = Path(output_dir or self.args.output_dir)
            fitted = self._map_of_weights()
            saving.save_beside(folder, self.calibration_loss, fitted)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(
                commit_message="Model save", revision=self.args.hub_revision
            )

    def _map_of_weights(self) -> SavedMap | None:
        """The calibrator with the fingerprint of the weights that it was fitted to, if they are
        loaded alike.
        """
        fitted = self.fitted_map
        if fitted is None or self._weights_of_map is None:
            return fitted
        # A model with answers is loaded as another one, a classifier.
        if self.answers is not None or not is_loaded_alike(self.unwrapped_model):
            return fitted
        about = {**fitted.about, "fingerprint": self._weights_of_map}
        return fitted._replace(about=about)

    def _warn_not_folded(self) -> None:
        """Log once that a model is saved as trained although there is a calibrator."""
        if (
            self.fitted_map is None
            or self.said_not_folded
            or not self.is_world_process_zero()
        ):
            return
        self.said_not_folded = True
        logger.warning(
            "save_model writes the model as trained, without its %s: a pipeline that loads it is "
            "not calibrated. Use save_calibrated_model(output_dir) for the calibrated model.",
            title_of(self.calibration_map),
        )

    def save_calibrated_model(self, output_dir: str | os.PathLike[str]) -> None:
        """Save a copy of the model with the calibrator folded into its head.

        A `transformers.pipeline` of the directory returns calibrated probabilities without this
        library. The directory has float32 weights with merged adapters, the tokenizer or image
        processor, and the calibrator's numbers in `calibration.json`. It is written completely or,
        after an OSError, unchanged; other weights in it are removed.

        Raises:
            ValueError: if no calibrator was fitted, the weights were changed since, or it cannot be
                folded into the model's head; if the model was loaded from output_dir, or output_dir
                contains adapters or is a checkpoint.
        """
        check_type(
            isinstance(output_dir, (str, os.PathLike)),
            "output_dir to be the path of a folder",
            got=repr(output_dir),
            way_out="name a new folder",
        )
        check(
            output_dir != "",
            "output_dir to be the path of a folder",
            got=repr(output_dir),
            way_out="name a new folder, or '.' for the current one",
        )
        check_overwrites_no_original(
            output_dir, self.originals | loaded_from(self.model)
        )
        self._save_calibrated(output_dir)

    def _save_calibrated(self, output_dir: str | os.PathLike[str]) -> None:
        """Save the model with the folded calibrator, over anything: a push replaces the files of
        the run.
        """
        fitted = self.fitted_map
        is_configured = self.calibration_config.make_scaler() is not None
        check(
            fitted is not None,
            "a calibrator to be fitted",
            got="none yet" if is_configured else "none configured",
            way_out="train with a calibration_dataset, or call fit_calibration_map()",
        )
        assert fitted is not None
        checks.check_not_rounded(self.unwrapped_model, self._trained_in)
        check(
            self._has_weights_of_map(),
            "the model to have the weights that the calibrator was fitted to",
            got="weights that were changed since",
            way_out="call fit_calibration_map()",
        )
        state_dict = None
        if (
            self.is_fsdp_enabled or self.is_deepspeed_enabled
        ):  # Each process has a part of the weights.
            state_dict = self.accelerator.get_state_dict(self.model_wrapped)

        def save() -> None:
            save_folded(
                standalone_copy(self.unwrapped_model, state_dict),
                fitted.scaler,
                output_dir,
                batch=self.example_batch,
                processing_class=self.processing_class
                or getattr(self.data_collator, "tokenizer", None),
                about={**fitted.about, **results.measured(self.results)},
            )

        raise_everywhere(save, here=self.args.should_save)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        *,
        create_pr: bool = False,
        **of_the_card: Any,
    ) -> Any:
        """Push the calibrated model in one commit; without a calibrator, push like
        `Trainer.push_to_hub`.

        The output folder then has the calibrated model with its card. Weights in the repository
        that would be loaded instead are removed in the same commit; `hf_calib.export.push_folder`
        describes this and the errors. `blocking`, `token`, `revision` and `private` are those of
        `Trainer.push_to_hub`; `create_pr=True` opens a pull request, and all other arguments are
        for `create_model_card`. Return the commit, or a future of it.
        """
        # A calibrator in the repository is not that of the weights that replace its own.
        if self.fitted_map is None and not self.has_pushed_a_map:
            check(
                not create_pr,
                "a calibrator to be fitted for create_pr",
                got="none",
                way_out="train with a calibration_dataset, or push without create_pr",
            )
            if private is not None:  # transformers < 5.20 has no such argument.
                of_the_card["private"] = private
            return super().push_to_hub(
                commit_message, blocking, token, revision, **of_the_card
            )

        args = self.args
        folder = args.output_dir
        self.callback_handler.on_push_begin(args, self.state, self.control)
        repo_id = self.hub_model_id or args.hub_model_id or Path(folder).absolute().name
        running = getattr(self, "push_in_progress", None)
        if running is not None:  # A push of the Trainer reads the same folder.
            running.wait_until_done()
        self._save_for_push(folder)
        token = token or args.hub_token

        def upload() -> Any:
            # The name needs its owner, so that the card's code works.
            hub_model_id: Any = with_owner(repo_id, token)
            self.hub_model_id = hub_model_id
            if isinstance(self.calibration_loss, AdaptiveLoss):
                saving.save_loss_state(self.calibration_loss, folder)
            model_tags = getattr(self.model, "model_tags", None)
            settings = saving.card_settings(of_the_card, repo_id, model_tags)
            self.create_model_card(**settings)
            return push_folder(
                folder,
                hub_model_id,
                message=commit_message or "End of training",
                create_pr=create_pr,
                run_as_future=not blocking,
                token=token,
                revision=revision or args.hub_revision,
                private=args.hub_private_repo if private is None else private,
            )

        return raise_everywhere(upload, here=self.is_world_process_zero())

    def _save_for_push(self, folder: str) -> None:
        """Save the model in the output folder, calibrated if there is a calibrator."""
        if self.fitted_map is None:
            self.save_model(_internal_call=True)
        else:
            self._save_calibrated(folder)
            self.has_pushed_a_map = True

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write the Trainer's model card; with a calibrator, add its section and write the report
        in `calibration`.
        """
        super().create_model_card(*args, **kwargs)
        if not self.is_world_process_zero():
            return
        folder = Path(self.args.output_dir)
        base_model = getattr(self.model_config, "name_or_path", None)
        is_calibrated = self.fitted_map is not None
        repair_stock_card(
            folder / CARD,
            base_model,
            is_calibrated=is_calibrated,
            # The Trainer's list is of the last evaluation.
            is_measured=self.results.evaluation_with_map is not None,
        )
        if is_calibrated:
            results.write_results(self.results, folder)
            write_card(folder, repo_id=self.hub_model_id or self.args.hub_model_id)


class CalibrationTrainer(CalibrationMixin):
    """A `Trainer` that trains with a calibration loss, logs calibration metrics, and calibrates the
    model.

    * The loss named by `args.loss` is computed in float32 from logits and labels; the model gets no
      labels. The loss of an optimizer step is the mean over the whole global batch, whatever its
      division into micro-batches.
    * Each evaluation has `eval_accuracy`, `eval_ece`, `eval_adaptive_ece`, `eval_classwise_ece`,
      `eval_mce`, `eval_nll` and `eval_brier`, with no extra forward pass and without keeping
      logits. `eval_loss` is the (weighted) mean over all labelled rows, and for losses that couple
      the batch the mean over the batches.
    * The gammas of losses that adapt are updated from the calibration split, and are saved in every
      checkpoint.
    * A calibrator (`args.calibration_method`) is fitted to the calibration split at the end. The
      same metrics are then logged with it, as `eval_ece_calibrated` and so on, and
      `save_calibrated_model` writes a directory from which a plain `transformers.pipeline` returns
      calibrated probabilities.

    Args:
        model: a classifier of sequences, tokens or images, also multi-label, whose output has
            `logits`; or a causal language model, whose logits at position t are compared with the
            label at t + 1.
        args: `CalibrationTrainingArguments`.
        calibration_dataset: held-out examples for the gammas and the calibrator, in the form of
            `eval_dataset`; not used for anything else. None uses a single evaluation set for both,
            with a warning.
        **kwargs: the other arguments of `Trainer`. If several callbacks of this library have one
          type, the last counts.

    Raises:
        TypeError, ValueError: if arguments do not fit together, before any training.

    Notes:
        With the model's `problem_type="single_label_classification"`, lists of floats that sum to 1
        are soft labels. The metrics of an evaluation are then against these: a prediction is
        correct by the share of its class. A calibrator needs rows with one label.

        Checkpoints have the model as trained and, separately, the calibrator, which a resumed run
        restores. A head without a bias (GPT-2's) cannot hold a calibrator with a bias. Rows that
        accelerate repeats to fill the last batch of an epoch on several processes are ignored,
        except in streams with `dispatch_batches=False`.

        A subclass with its own `compute_loss` returns the mean over its micro-batch, which is
        averaged over accumulation steps and processes; set `loss_is_scaled_for_ga=True` if the loss
        is already normalised.

    Example::

        args = CalibrationTrainingArguments(loss="adafocal", output_dir="out", ...) trainer =
        CalibrationTrainer(model, args, train_dataset=..., calibration_dataset=...,
        eval_dataset=...) trainer.train() trainer.save_calibrated_model("calibrated")
    """

    args: CalibrationTrainingArguments

    def __init__(
        self, model: Any = None, args: Any = None, *positional: Any, **kwargs: Any
    ) -> None:
        args = (
            CalibrationTrainingArguments(output_dir="tmp_trainer")
            if args is None
            else args
        )
        super().__init__(model, args, *positional, **kwargs)
