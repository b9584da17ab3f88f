"""`CalibrationTrainer`: the Hugging Face Trainer with a calibration loss, metrics and a calibrator."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, Trainer
from transformers.trainer_utils import EvalLoopOutput

from hf_calib._compat import load_saved_names
from hf_calib._errors import check
from hf_calib.export.folder import check_overwrites_no_original, loaded_from
from hf_calib.language_models.label_tokens import is_causal
from hf_calib.losses import AdaptiveLoss, CalibrationLoss, all_gather_rows, logits_of
from hf_calib.metrics.checks import check_type
from hf_calib.scaling import TemperatureScaling
from hf_calib.scaling.saved_map import SavedMap, check_finite, temperature_of
from hf_calib.trainer import calibration_map as maps
from hf_calib.trainer import callbacks, checks, saving
from hf_calib.trainer import labels as of_labels
from hf_calib.trainer.callbacks import CalibrationMapCallback, own_callback
from hf_calib.trainer.config import (
    CalibrationConfig,
    CalibrationTrainingArguments,
    hub_token_left_out,
)
from hf_calib.trainer.evaluation import Evaluation, held_out, run
from hf_calib.trainer.labels import PLACES, AnswerOptions
from hf_calib.trainer.saving import load_loss_state, newest_checkpoint


class CalibrationMixin(Trainer):
    """Mixin that adds calibration to a subclass of `Trainer`: `class Mine(CalibrationMixin, TheirTrainer)`.

    `CalibrationTrainer` is the mixin with the stock `Trainer`, and describes what it adds. If a trainer makes its
    batches or logits in another way, override `logits_and_labels`. A trainer with its own `compute_loss` keeps it, and
    its evaluations have the metrics if its `prediction_step` returns logits and labels. With `compute_loss_func` the
    loss is that function, scaled as in the stock Trainer.

    Args:
        calibration: a `CalibrationConfig`, if `args` has no such fields; other arguments as in `CalibrationTrainer`.
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
    during_training = False  # A callback ends it after the last step.
    _resume_from: str | None = None

    def __init__(
        self,
        *args: Any,
        calibration_dataset: Any = None,
        calibration: Any = None,
        **kwargs: Any,
    ) -> None:
        given: Any = kwargs.get("args", args[1] if len(args) > 1 else None)
        fits = isinstance(
            given if calibration is None else calibration, CalibrationConfig
        )
        way_out = "replace TrainingArguments by it, or pass calibration=CalibrationConfig(...) with it"
        check_type(
            fits,
            "args to be CalibrationTrainingArguments",
            type(given).__name__,
            way_out,
        )
        self.calibration_config: CalibrationConfig = (
            given if calibration is None else calibration
        )
        self.calibration_dataset = calibration_dataset
        self.made_callbacks: dict[type, Any] = {}
        super().__init__(*args, **kwargs)
        # False if a trainer of another kind makes the labels from its batches.
        self.reads_labels = (
            type(self).logits_and_labels is CalibrationMixin.logits_and_labels
        )
        if self.reads_labels:  # The model's forward may read them, too.
            self.label_names = self.label_names or ["labels"]
        self.label_key = str(self.label_names[0]) if self.label_names else "labels"
        self.model_accepts_loss_kwargs = (
            False  # The Trainer must not infer it from the model.
        )
        self.originals = set() if self.model is None else loaded_from(self.model)
        options: list[str] | None = getattr(self.args, "answer_options", None)
        if options is not None:
            self.answers = AnswerOptions(
                self.unwrapped_model, self.processing_class, options
            )
            self.data_collator = partial(self.answers.batch, self.data_collator)
        handler: Any = self.callback_handler
        handler.on_train_begin = partial(self._begin_training, handler.on_train_begin)
        self._make_loss()

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
    def calibration_split(self) -> Any:
        """The dataset for gammas and calibrator: `calibration_dataset`, a single evaluation set, or None."""
        if self.calibration_dataset is not None:
            return self.calibration_dataset
        return None if isinstance(self.eval_dataset, dict) else self.eval_dataset

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

    def _make_loss(self) -> None:
        """Make the configured loss and callbacks."""
        config, model = self.calibration_config, self.unwrapped_model
        self._made_from = config.settings()
        self._next_token = self.answers is None and is_causal(model)
        options = None if self.answers is None else self.answers.tokens
        # The problem type of loss and metrics; None if unknown.
        self.n_classes = (
            of_labels.number_of_classes(model) if options is None else len(options)
        )
        problem_type = getattr(self.model_config, "problem_type", None)
        balanced = (
            of_labels.balanced_weights(self)
            if config.class_weights == "balanced"
            else None
        )
        self.calibration_loss = config.make_loss(problem_type, balanced).to(
            self.args.device
        )
        if config.gather_batch and self.args.world_size > 1:
            self.calibration_loss.gather = all_gather_rows
        callbacks.renew(self)
        checks.check_model(self)

    # ---- Training ----

    def train(
        self,
        resume_from_checkpoint: Any = None,
        trial: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Train like `Trainer.train`; first raise ValueError if data or checkpoint do not fit the loss or the model.

        `resume_from_checkpoint=True` uses the newest complete checkpoint in `output_dir` and also restores the table of
        an adaptive loss and the calibrator. If the settings of loss or calibrator have changed, both are made again.
        """
        if resume_from_checkpoint is True:
            folder, way_out = (
                self.args.output_dir,
                "pass resume_from_checkpoint=FOLDER, or train without it",
            )
            resume_from_checkpoint = newest_checkpoint(folder)
            found = resume_from_checkpoint is not None
            check(
                found,
                "output_dir to hold a complete checkpoint",
                f"{folder} with none",
                way_out,
            )
        self._resume_from = resume_from_checkpoint or None
        if self.model_init is None:
            self._set_up_training()
        try:
            with hub_token_left_out():
                return super().train(self._resume_from, trial, *args, **kwargs)
        finally:
            self.is_in_train = self.during_training = (
                False  # This is also set after an error.
            )

    def _set_up_training(self) -> None:
        """Set loss, calibrator and gammas for the start of a run: new ones, or those of its checkpoint."""
        load_saved_names(self.model)
        self.calibration_config.check_calibration()
        if (
            self.model_init is not None
            or self._made_from != self.calibration_config.settings()
        ):
            self._make_loss()  # A new model needs a new table.
        checks.check_data(self)
        maps.take(self, None)  # Further training invalidates an earlier calibrator.
        fitting = own_callback(self, CalibrationMapCallback)
        if self._resume_from is not None and isinstance(
            self.calibration_loss, AdaptiveLoss
        ):
            load_loss_state(self.calibration_loss, self._resume_from)
        if self._resume_from is not None and fitting is not None:
            maps.take(self, maps.map_of_checkpoint(self._resume_from, fitting.scaler))
        self.last_evaluation = None

    def _begin_training(self, begin: Callable[..., Any], *given: Any) -> Any:
        """Run the handler's begin event, once the callbacks are those of this run."""
        if self.model_init is not None:  # A trial of a search has set its arguments.
            self._set_up_training()
        callbacks.arrange(
            self
        )  # The Trainer may have restored callbacks from a checkpoint.
        self.during_training = True
        return begin(*given)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: Any
    ) -> Any:
        """Return the micro-batches of one optimizer step, and the loss's normalizer over all processes."""
        batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self.compute_loss_func is not None:
            return batches, count
        # Another compute_loss may not support ignored rows.
        if batches and type(self).compute_loss is CalibrationMixin.compute_loss:
            loader = self.callback_handler.train_dataloader
            of_labels.ignore_repeated_rows(
                batches[-1], self.label_key, loader, self.accelerator
            )
        labels = [
            batch[self.label_key].to(device)
            for batch in batches
            if self.label_key in batch
        ]
        if not labels:
            return batches, None
        if self.calibration_config.loss_reduction == "sum":
            return batches, torch.ones((), device=device)
        labels = [
            of_labels.aligned_labels(each, next_token=self._next_token)
            for each in labels
        ]
        counts = [self.calibration_loss.normalizer(each).float() for each in labels]
        return batches, self.accelerator.reduce(
            torch.stack(counts).sum(), "sum"
        ).clamp_min(1e-12)

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the calibration loss; the model is called without labels, so it does not compute its own loss.

        The loss is the sum over the rows of this micro-batch, divided by the sum of weights of the global batch (1 for
        loss_reduction="sum"; see `get_batch_samples`), times the number of processes, over which DDP averages, and the
        accumulation steps if the Trainer divides by them. Without `num_items_in_batch` it is the mean of this batch.
        """
        if self.compute_loss_func is not None:
            return super().compute_loss(
                model, inputs, return_outputs, num_items_in_batch
            )
        if not model.training:
            loader = self.callback_handler.eval_dataloader
            of_labels.ignore_repeated_rows(
                inputs, self.label_key, loader, self.accelerator
            )
        outputs, logits, labels = self.logits_and_labels(model, inputs)
        logits = logits_of(logits)
        if self.calibration_loss.multi_label is None:  # The first batch decides.
            self.calibration_loss.multi_label = labels.is_floating_point()
            if labels.is_floating_point():
                self.calibration_loss.check_multi_label()
                if (
                    self.model_config is not None
                ):  # Pipelines read it, and would otherwise apply a softmax.
                    self.model_config.problem_type = "multi_label_classification"
        if self.calibration_loss.multi_label and labels.is_floating_point():
            checks.check_decisions(labels)
        if not model.training:
            num_items_in_batch = None  # The loss of an evaluation batch is its mean.
            self.seen = (logits, labels)  # For the current pass.
            if self.example_batch is None:
                tensors = {
                    name: v
                    for name, v in inputs.items()
                    if isinstance(v, Tensor) and v.dim()
                }
                names = tensors.keys() - {self.label_key, *self.not_for_the_model}
                self.example_batch = {name: tensors[name][:4].cpu() for name in names}
        loss = self.calibration_loss(
            logits, labels, num_items_in_batch=num_items_in_batch
        )
        if num_items_in_batch is not None:
            scaled = getattr(
                self, "loss_is_scaled_for_ga", False
            )  # transformers < 5.19 has none
            steps = (
                1 if scaled else getattr(self, "current_gradient_accumulation_steps", 1)
            )
            loss = loss * (self.accelerator.num_processes * steps)
        if isinstance(
            outputs, tuple | Tensor
        ):  # The Trainer reads logits after the loss.
            outputs = (
                (loss, *outputs) if isinstance(outputs, tuple) else (loss, outputs)
            )
        return (loss, outputs) if return_outputs else loss

    def logits_and_labels(
        self, model: Any, inputs: dict[str, Any]
    ) -> tuple[Any, Any, Tensor]:
        """Run one forward; return the outputs for `prediction_step`, the logits (..., C) and their labels.

        The model is called without labels. Override this method if batches or logits are made in another way.
        """
        key, way_out = (
            self.label_key,
            "check the dataset's label column and the data collator",
        )
        check(
            inputs.get(key) is not None,
            f"the batch to have {key!r}",
            f"only {sorted(inputs)}",
            way_out,
        )
        labels, others = (
            inputs[key],
            {name: value for name, value in inputs.items() if name != key},
        )
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
        *args: Any,
        keep_logits: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Evaluate like `Trainer.evaluate`, and add the calibration metrics to the results.

        With `keep_logits`, all logits and labels are kept for `last_evaluation.logits_and_labels()`. For the model card
        they are also kept if a calibrator is fitted, training has ended, and there are at most 50,000 rows.
        """
        callback = own_callback(self, CalibrationMapCallback)
        if (
            callback is not None
            and self.during_training
            and self.calibration_split is not None
        ):
            callback.before_evaluate(self.state.global_step)
        sets: Any = self.eval_dataset
        dataset = sets if eval_dataset is None else eval_dataset
        self._asked = (
            (sets[dataset] if isinstance(dataset, str) else dataset),
            keep_logits,
        )
        return super().evaluate(eval_dataset, *args, **kwargs)

    def evaluation_loop(
        self, dataloader: Any, description: str, *args: Any, **kwargs: Any
    ) -> EvalLoopOutput:
        """Run the Trainer's loop in the order of the rows, and add the calibration metrics."""
        kwargs |= dict(
            zip(
                ("prediction_loss_only", "ignore_keys", "metric_key_prefix"),
                args,
                strict=False,
            )
        )
        prefix, loss_only = (
            kwargs.get("metric_key_prefix", "eval"),
            kwargs.pop("prediction_loss_only", None),
        )
        loss_only = self.args.prediction_loss_only if loss_only is None else loss_only
        # During training the logits are not needed, and each evaluation would gather them.
        few = (
            Evaluation.FEW_VALUES
            if self.fitted_map is not None and not self.during_training
            else 0
        )
        dataset, keep_logits = vars(self).pop("_asked", (None, False))
        n_bins, keep = self.calibration_config.n_bins, math.inf if keep_logits else few
        current = Evaluation(self.accelerator, prefix, n_bins, keep, dataset=dataset)
        current.calibration_map = self.calibration_map
        loop = partial(super().evaluation_loop, description=description, **kwargs)
        output = run(self, current, loop, dataloader, loss_only)
        if description == "Evaluation":
            self.last_evaluation = current
        # A metric with this name from the user's compute_metrics takes precedence.
        return output._replace(metrics=current.metrics() | (output.metrics or {}))

    # ---- Calibration ----

    def held_out_pass(
        self, *, n_samples: int | None = None, keep_logits: bool = False
    ) -> Evaluation:
        """Run the model on the calibration split; mode, random states, log and progress bars are unchanged afterwards.

        With `n_samples`, only a fixed random subset of this size is used. `keep_logits` keeps logits and labels; for a
        causal language model, those of a random sample of tokens, at most 20,000 and half a GiB.
        """
        n_bins, keep = self.calibration_config.n_bins, math.inf if keep_logits else 0
        current = Evaluation(self.accelerator, "", n_bins, keep, self._next_token)
        return held_out(self, self.calibration_split, current, n_samples=n_samples)

    def fit_calibration_map(self, scaler: Any = None) -> Any:
        """Fit a calibrator to the calibration split, record it in the config, and use it in all later evaluations.

        The model's weights do not change; `save_calibrated_model` folds the calibrator into the saved copy. If the fit
        fails, there is no calibrator. For a causal language model the rows are a sample of tokens (`held_out_pass`).

        Args:
            scaler: a foldable calibrator of `SCALERS`, which is fitted in place and returned. None uses a copy of that
                of the `CalibrationMapCallback`, otherwise that of the arguments, otherwise a temperature.

        Raises:
            TypeError, ValueError: if the calibrator cannot be folded, or does not fit the split or the model.
        """
        requirement = "calibration_dataset to be given to fit a calibrator"
        check(
            self.calibration_split is not None,
            requirement,
            "none",
            "pass it to the trainer",
        )
        scaler = callbacks.scaler_to_fit(self) if scaler is None else scaler
        maps.check_goes_with(scaler, self)
        maps.take(self, None)
        logits, labels = self.held_out_pass(keep_logits=True).logits_and_labels()
        maps.check_problem(scaler, labels.ndim == 2)
        maps.fit_once(self.accelerator, scaler, logits, labels)
        split = "calibration" if self.calibration_dataset is not None else "evaluation"
        self.use_calibration_map(scaler, split=split, n_examples=len(labels))
        return scaler

    def fit_temperature(self, scaling: TemperatureScaling | None = None) -> float:
        """Fit a temperature like `fit_calibration_map`, by default that of the callback or by the NLL; return T > 0."""
        own = callbacks.scaler_to_fit(self) if scaling is None else scaling
        scaling = own if isinstance(own, TemperatureScaling) else TemperatureScaling()
        return float(self.fit_calibration_map(scaling).temperature_)

    def use_calibration_map(self, scaler: Any, *, split: str, n_examples: int) -> None:
        """Use a calibrator that was fitted elsewhere, for example to out-of-fold logits.

        Args:
            scaler: a foldable calibrator of `SCALERS`, fitted to logits of this model, the same on every process.
            split, n_examples: name of the fitted rows in the record and the model card, and their number.

        Raises:
            TypeError, ValueError: if it cannot be folded, has NaN, or does not fit the problem or the model.
        """
        maps.check_goes_with(scaler, self)
        check_finite(scaler)
        maps.take(
            self, SavedMap(scaler, saving.about_map(self, scaler, split, n_examples))
        )

    # ---- Saving ----

    def save_model(
        self, output_dir: str | None = None, _internal_call: bool = False
    ) -> None:
        """Save the model as trained, like `Trainer`, and the calibrator next to it; see `save_calibrated_model`."""
        if not _internal_call:
            saving.warn_not_folded(self)
        with hub_token_left_out():
            super().save_model(output_dir, _internal_call=True)
        if self.args.should_save:
            saving.save_beside(self, Path(output_dir or self.args.output_dir))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(
                commit_message="Model save", revision=self.args.hub_revision
            )

    def save_calibrated_model(self, output_dir: str | os.PathLike[str]) -> None:
        """Save a copy of the model with the calibrator folded into its head.

        A `transformers.pipeline` of the directory returns calibrated probabilities without this library. The directory
        has float32 weights with merged adapters, the tokenizer or image processor, and the calibrator's numbers in
        `calibration.json`. It is written completely or, after an OSError, unchanged; other weights in it are removed.

        Raises:
            ValueError: if no calibrator was fitted, or it cannot be folded into the model's head; if the model was
                loaded from output_dir, or output_dir contains adapters.
        """
        check_overwrites_no_original(
            output_dir, self.originals | loaded_from(self.model)
        )
        saving.save_calibrated(self, output_dir)

    def push_to_hub(
        self, commit_message: str | None = "End of training", *where: Any, **kwargs: Any
    ) -> Any:
        """Push the calibrated model in one commit; without a calibrator, push like `Trainer.push_to_hub`.

        The output folder then has the calibrated model with its card. Weights in the repository that would be loaded
        instead are removed in the same commit; `hf_calib.export.push_folder` describes this and the errors.
        `blocking`, `token`, `revision` and `private` are those of `Trainer.push_to_hub`; `create_pr=True` opens a pull
        request, and all other arguments are for `create_model_card`. Return the commit, or a future of it.
        """
        kwargs |= dict(
            zip(("blocking", "token", "revision", "private"), where, strict=False)
        )
        if self.fitted_map is not None:
            return saving.push(self, commit_message, kwargs)
        way_out = "train with a calibration_dataset, or push without create_pr"
        is_push = not kwargs.pop("create_pr", False)
        check(is_push, "a calibrator to be fitted for create_pr", "none", way_out)
        return super().push_to_hub(commit_message, **kwargs)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write the Trainer's model card; with a calibrator, add its section and write the report in `calibration`."""
        super().create_model_card(*args, **kwargs)
        saving.complete_card(self)


class CalibrationTrainer(CalibrationMixin):
    """A `Trainer` that trains with a calibration loss, logs calibration metrics, and calibrates the model.

    * The loss named by `args.loss` is computed in float32 from logits and labels; the model gets no labels. The loss of
      an optimizer step is the mean over the whole global batch, whatever its division into micro-batches.
    * Each evaluation has `eval_accuracy`, `eval_ece`, `eval_adaptive_ece`, `eval_classwise_ece`, `eval_mce`,
      `eval_nll` and `eval_brier`, with no extra forward pass and without keeping logits.
    * The gammas of losses that adapt are updated from the calibration split, and are saved in every checkpoint.
    * A calibrator (`args.calibration_method`) is fitted to the calibration split at the end. The same metrics are then
      logged with it, as `eval_ece_calibrated` and so on, and `save_calibrated_model` writes a directory from which a
      plain `transformers.pipeline` returns calibrated probabilities.

    Args:
        model: a classifier of sequences, tokens or images, also multi-label, whose output has `logits`; or a causal
            language model, whose logits at position t are compared with the label at t + 1.
        args: `CalibrationTrainingArguments`.
        calibration_dataset: held-out examples for the gammas and the calibrator, in the form of `eval_dataset`; not
            used for anything else. None uses a single evaluation set for both, with a warning.
        **kwargs: the other arguments of `Trainer`. If several callbacks of this library have one type, the last counts.

    Raises:
        TypeError, ValueError: if arguments do not fit together, before any training.

    Notes:
        Checkpoints have the model as trained and, separately, the calibrator, which a resumed run restores. A head
        without a bias (GPT-2's) cannot hold a calibrator with a bias. Rows that accelerate repeats to fill the last
        batch of an epoch on several processes are ignored, except in streams.

        A subclass with its own `compute_loss` returns the mean over its micro-batch, which is averaged over
        accumulation steps and processes; set `loss_is_scaled_for_ga=True` if the loss is already normalised.

    Example::

        args = CalibrationTrainingArguments(loss="adafocal", output_dir="out", ...)
        trainer = CalibrationTrainer(model, args, train_dataset=..., calibration_dataset=..., eval_dataset=...)
        trainer.train()
        trainer.save_calibrated_model("calibrated")
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
