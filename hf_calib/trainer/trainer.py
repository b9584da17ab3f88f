"""`CalibrationTrainer`: the Hugging Face Trainer with a calibration loss, metrics and a calibration map."""

from __future__ import annotations

from typing import Any

from transformers import Trainer

from hf_calib.trainer.config import CalibrationTrainingArguments
from hf_calib.trainer.mixin import CalibrationMixin


class CalibrationTrainer(CalibrationMixin, Trainer):
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
        Two lines of a Trainer script change::

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
        args = CalibrationTrainingArguments(output_dir="tmp_trainer") if args is None else args
        super().__init__(model, args, *positional, calibration_dataset=calibration_dataset, **kwargs)
