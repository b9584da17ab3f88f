"""`CalibrationTrainer`: the Hugging Face Trainer with a calibration loss, metrics and a temperature."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import DefaultFlowCallback, PreTrainedConfig, Trainer, TrainerCallback
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from hf_calib._errors import InputTypeError, InputValueError, expected
from hf_calib.export.model_card import add_calibration_section
from hf_calib.export.saving import (
    check_overwrites_no_original,
    loaded_from,
    remove_other_weights,
    save_folded,
    standalone_copy,
)
from hf_calib.losses import AdaptiveLoss, CalibrationLoss, all_gather_rows, logits_of
from hf_calib.trainer._datasets import random_subset
from hf_calib.trainer.arguments import CalibrationTrainingArguments
from hf_calib.trainer.callbacks import AdaFocalCallback, TemperatureScalingCallback, _CalibrationCallback
from hf_calib.trainer.checkpoint import last_complete_checkpoint, load_loss_state, save_loss_state
from hf_calib.trainer.evaluation_pass import EvaluationPass
from hf_calib.trainer.preflight import check_data, check_model
from hf_calib.trainer.random_state import random_state_left_as_found

_Callback = TypeVar("_Callback", bound=_CalibrationCallback)


class CalibrationTrainer(Trainer):
    """A `Trainer` that trains with a calibration loss and reports how calibrated the model is.

    It takes the arguments of `Trainer`, and a data set more. What it adds:

    * the loss that `args.loss` names, computed in float32 from the logits and the labels, which the model
      never sees; the loss of an optimizer step is the mean over the whole global batch, however it is cut into
      micro-batches and processes;
    * `eval_accuracy`, `eval_ece`, `eval_adaptive_ece`, `eval_classwise_ece`, `eval_mce`, `eval_nll`,
      `eval_brier` at each evaluation, with no extra forward pass and without keeping logits;
    * for losses that adapt, updates of their gammas from the calibration split, saved in every checkpoint;
    * a temperature, fitted on the calibration split at the end, and the same metrics with it,
      `eval_ece_calibrated` and so on;
    * `save_calibrated_model`: a directory that a plain `transformers.pipeline` serves calibrated.

    Args:
        model: a classifier whose output has `logits`: sequence, token or image classification, multi-label.
        args: `CalibrationTrainingArguments`.
        calibration_dataset: held-out examples for the gammas and the temperature, like `eval_dataset`; used
            for nothing else. None uses the evaluation set for both, with a warning.
        **kwargs: the other arguments of `Trainer`.

    Raises:
        ValueError: for arguments that do not fit together; before any training.

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
        self.temperature: float | None = None
        self.last_evaluation: EvaluationPass | None = None
        self.evaluated_dataset: Any = None
        self._pass: EvaluationPass | None = None
        self._held_out_loaders: dict[int | None, tuple[Any, Any]] = {}
        self._probe: dict[str, Any] | None = None
        self._pushing = False
        super().__init__(model, args, *positional, **kwargs)
        # The labels are ours to use, whether or not the model's forward takes them too.
        self.label_names = self.label_names or ["labels"]
        self._make_loss()
        # The loss is a sum over the number of rows in the whole global batch (get_batch_samples), times the
        # number of processes, over which DDP averages the gradients. Both flags say: do not divide again.
        # transformers < 5.19 reads only the first.
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True
        self._add_calibration_callbacks()
        check_model(self)

    # ---- Set-up ----

    def _make_loss(self) -> None:
        self.calibration_loss = self.args.make_loss(self._problem_type).to(self.args.device)
        if self.args.gather_batch and self.args.world_size > 1:
            self.calibration_loss.gather = all_gather_rows

    @property
    def calibration_split(self) -> Any:
        """The data set for gammas and temperature: `calibration_dataset`, else one evaluation set, else None."""
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
    def _config(self) -> Any:
        """The model's config; None for a network that has none of the usual kind."""
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        config = getattr(model, "config", None)
        return config if isinstance(config, PreTrainedConfig) else None

    @property
    def _problem_type(self) -> str | None:
        return getattr(self._config, "problem_type", None)

    def _add_calibration_callbacks(self) -> None:
        args, adaptive = self.args, isinstance(self.calibration_loss, AdaptiveLoss)
        if self._callback(AdaFocalCallback) is None and adaptive:
            steps, samples = args.gamma_update_steps, args.gamma_update_samples
            self.add_callback(AdaFocalCallback(every_n_steps=steps, n_samples=samples))
        if self._callback(TemperatureScalingCallback) is None and args.temperature_criterion != "none":
            criterion, strategy = args.temperature_criterion, args.temperature_strategy
            self.add_callback(TemperatureScalingCallback(criterion=criterion, strategy=strategy))
        for callback in self.callback_handler.callbacks:
            self._introduce(callback)

    def add_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        """Add a callback as `Trainer` does; one of this package replaces an earlier one of its class."""
        kind = callback if isinstance(callback, type) else type(callback)
        if issubclass(kind, _CalibrationCallback):
            self.remove_callback(kind)
        super().add_callback(callback)
        self._introduce(self.callback_handler.callbacks[-1])
        # The temperature is fitted last of all: its evaluation is no occasion to update gammas.
        self.callback_handler.callbacks.sort(key=lambda c: isinstance(c, TemperatureScalingCallback))

    def _introduce(self, callback: TrainerCallback) -> None:
        if isinstance(callback, _CalibrationCallback):
            callback.trainer = self

    def _callback(self, kind: type[_Callback]) -> _Callback | None:
        return next((c for c in self.callback_handler.callbacks if isinstance(c, kind)), None)

    # ---- Training ----

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> TrainOutput:
        """Train as `Trainer.train` does; data and checkpoint are checked first.

        Args:
            resume_from_checkpoint: True takes the newest checkpoint in `output_dir` that was written to its
                end. The table of an adaptive loss is restored with it.

        Raises:
            ValueError: for labels out of range, an adaptive loss without held-out data, a checkpoint whose
                table is missing or corrupt.
        """
        check_data(self)
        if self.model_init is not None:  # a new model starts with a new table
            self._make_loss()
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_complete_checkpoint(self._output_dir, self.args.world_size)
        if resume_from_checkpoint and isinstance(self.calibration_loss, AdaptiveLoss):
            load_loss_state(self.calibration_loss, str(resume_from_checkpoint))
        # Further training undoes an earlier calibration.
        self.temperature = self.last_evaluation = None
        if hasattr(self._config, "calibration"):
            del self._config.calibration
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: Any
    ) -> tuple[Any, Any]:
        """The micro-batches of one optimizer step, and the loss's normalizer over all processes."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        key = self._label_key
        counts = [self.calibration_loss.normalizer(b[key].to(device)).float() for b in batches if key in b]
        if not counts:
            return batches, None
        return batches, self.accelerator.reduce(torch.stack(counts).sum(), "sum").clamp_min(1e-12)

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | float | None = None,
    ) -> Any:
        """The calibration loss; the model is called without labels, so it does not compute its own."""
        key = self._label_key
        if inputs.get(key) is None:
            way_out = "check the data set's label column and the data collator"
            raise InputValueError(expected("the batch", f"have {key!r}", f"only {sorted(inputs)}", way_out))
        outputs = model(**{name: value for name, value in inputs.items() if name != key})
        if not model.training:
            num_items_in_batch = None  # an evaluation batch stands for itself
        loss = self.calibration_loss(outputs, inputs[key], num_items_in_batch=num_items_in_batch)
        if num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes
        config = self._config if inputs[key].is_floating_point() else None
        if config is not None and config.problem_type is None:  # pipelines read it, and would apply a softmax
            config.problem_type = "multi_label_classification"
        if isinstance(outputs, tuple):  # the Trainer takes the logits from behind the loss
            outputs = (loss, *outputs)
        elif isinstance(outputs, Tensor):
            outputs = (loss, outputs)
        return (loss, outputs) if return_outputs else loss

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self._pushing and output_dir is None:  # push_to_hub saves what it uploads
            self._save_calibrated_model(self._output_dir)
            return
        super().save_model(output_dir, _internal_call)
        if isinstance(self.calibration_loss, AdaptiveLoss) and self.args.should_save:
            save_loss_state(self.calibration_loss, output_dir or self._output_dir)

    # ---- Evaluation ----

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate as `Trainer.evaluate` does, with the calibration metrics among the results."""
        callback = self._callback(TemperatureScalingCallback)
        if callback is not None and self.is_in_train and self.calibration_split is not None:
            callback.before_evaluate(self.state.global_step)
        self.evaluated_dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        return super().evaluate(eval_dataset, *args, **kwargs)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        current = EvaluationPass(
            self.accelerator, metric_key_prefix, n_bins=self.args.n_bins, temperature=self.temperature
        )
        with self._listening(current):
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        current.finish()
        if description == "Evaluation":
            self.last_evaluation = current
        # A metric of that name from the user's compute_metrics goes first.
        metrics = current.metrics() | (output.metrics or {})
        return output._replace(metrics=metrics)

    @contextmanager
    def _listening(self, current: EvaluationPass) -> Iterator[None]:
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
            self._pass.add(logits_of(logits), labels)
            if self._pass.keep_logits and self._probe is None:
                rows = {k: v for k, v in inputs.items() if k != self._label_key and isinstance(v, Tensor)}
                self._probe = {k: (v[:4] if v.dim() else v).cpu() for k, v in rows.items()}
        return (loss, None, None) if prediction_loss_only else (loss, logits, labels)

    # ---- Calibration ----

    def held_out_pass(self, *, n_samples: int | None = None, keep_logits: bool = False) -> EvaluationPass:
        """Run the model over the calibration split; mode, random streams, log and progress bars stay as found.

        Args:
            n_samples: only a fixed random subset of this size; None for all.
            keep_logits: keep logits and labels, for a fit that needs them.
        """
        current = EvaluationPass(self.accelerator, "", n_bins=self.args.n_bins, keep_logits=keep_logits)
        model: Any = self.model
        visible, modes = self.callback_handler, [(module, module.training) for module in model.modules()]
        quiet = CallbackHandler(
            [DefaultFlowCallback()], model, self.processing_class, self.optimizer, self.lr_scheduler
        )
        try:
            with random_state_left_as_found(), self._listening(current):
                self.callback_handler = quiet
                super().evaluation_loop(self._held_out_loader(n_samples), "Calibration", True)
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
            dataset = split if n_samples is None else random_subset(split, n_samples, self.args.seed)
            # get_eval_dataloader would, with persistent workers, give the loader of the evaluation set.
            loader = self.get_test_dataloader(dataset)
            self._held_out_loaders[n_samples] = (split, loader)
        return loader

    def update_adaptive_loss(
        self, held_out: EvaluationPass | None = None, *, n_samples: int | None = None, log: bool = True
    ) -> None:
        """Update the table of an adaptive loss from the calibration split.

        Args:
            held_out: a pass over it that is at hand; None makes one.
            n_samples: of which subset size to make one; None for the whole split.
            log: whether to log the table.

        Raises:
            ValueError: if the split has no labelled examples.
        """
        loss = self.calibration_loss
        assert isinstance(loss, AdaptiveLoss)
        state = (held_out or self.held_out_pass(n_samples=n_samples)).labelled()
        progress = self.state.global_step / max(self.state.max_steps, 1)
        loss.observe(state.confidences, state.correct, class_gaps=state.class_gaps, progress=progress)
        if log:
            self.log_adaptive_loss()

    def log_adaptive_loss(self) -> None:
        """Log the table of an adaptive loss."""
        assert isinstance(self.calibration_loss, AdaptiveLoss)
        due = self.control.should_log
        self.log(self.calibration_loss.log_values())
        self.control.should_log = due  # the training loss may still have to be logged

    def fit_temperature(self) -> float:
        """Fit the temperature on the calibration split, and record it in the model's config.

        From then on evaluations report the metrics with it too. The model's weights stay as they are:
        `save_calibrated_model` folds the temperature into what it saves.

        Returns:
            T > 0; logits / T are calibrated.

        Raises:
            ValueError: if there is no calibration split.
        """
        if self.calibration_split is None:
            way_out = "pass calibration_dataset to the trainer"
            raise InputValueError(
                expected("calibration_dataset", "be given to fit a temperature", "none", way_out)
            )
        callback = self._callback(TemperatureScalingCallback) or TemperatureScalingCallback()
        logits, labels = self.held_out_pass(keep_logits=True).logits_and_labels()
        scaling = callback.scaling.set_params(multi_label=labels.ndim == 2)
        self.temperature = float(scaling.fit(logits, labels).temperature_)
        config = self._config
        if config is not None:
            config.calibration = {
                "method": "temperature",
                "temperature": self.temperature,
                "criterion": scaling.criterion,
                "split": "calibration" if self.calibration_dataset is not None else "evaluation",
                "n_examples": len(labels),
                "loss": self.calibration_loss.name,
                "loss_kwargs": self.calibration_loss.hyperparameters,
                "folded": False,
            }
        return self.temperature

    # ---- Saving ----

    def save_calibrated_model(self, output_dir: str | os.PathLike[str]) -> None:
        """Save a copy of the model with the temperature folded into its head.

        The directory needs no code of ours: `transformers.pipeline` on it gives softmax(z / T). It holds
        float32 weights and the tokenizer or image processor, and adapters are merged. The model in memory
        keeps its weights.

        Args:
            output_dir: appears whole; in an existing directory, files are replaced and other weights removed.

        Raises:
            ValueError: if no temperature was fitted, or if the model has no head it can be folded into; if
                output_dir is where the model was loaded from, or holds adapters, which would be lost.
            OSError: if output_dir cannot be written; it is as it was then.
        """
        check_overwrites_no_original(output_dir, loaded_from(self.model))
        self._save_calibrated_model(output_dir)

    def _save_calibrated_model(self, output_dir: str | os.PathLike[str]) -> None:
        """Save it over anything: a push replaces what the training has left in its own output folder."""
        if self.temperature is None:
            got = f"temperature_criterion={self.args.temperature_criterion!r}, not yet fitted"
            way_out = "train with a calibration_dataset, or call fit_temperature()"
            raise InputValueError(expected("the temperature", "be fitted", got, way_out))
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        state_dict = self.accelerator.get_state_dict(self.model_wrapped) if sharded else None
        if self.args.should_save:
            model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
            save_folded(
                standalone_copy(model, state_dict),
                self.temperature,
                output_dir,
                batch=self._probe,
                processing_class=self.processing_class or getattr(self.data_collator, "tokenizer", None),
            )
        self.accelerator.wait_for_everyone()

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Push as `Trainer.push_to_hub` does, but the calibrated model, once a temperature is fitted."""
        self._pushing = self.temperature is not None
        try:
            pushed = super().push_to_hub(*args, **kwargs)
        finally:
            self._pushing = False
        if self.temperature is not None and self.is_world_process_zero():
            given = signature(Trainer.push_to_hub).bind(self, *args, **kwargs).arguments
            token, revision = (given.get(k) or getattr(self.args, f"hub_{k}") for k in ("token", "revision"))
            remove_other_weights(str(self.hub_model_id), self._output_dir, token=token, revision=revision)
        return pushed

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write the Trainer's model card, with a section on calibration once a temperature is fitted."""
        super().create_model_card(*args, **kwargs)
        record = getattr(self._config, "calibration", None)
        if self.temperature is not None and record is not None and self.is_world_process_zero():
            add_calibration_section(Path(self._output_dir), record, self.last_evaluation)
