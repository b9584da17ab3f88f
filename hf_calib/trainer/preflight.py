"""What `CalibrationTrainer` refuses, or warns of, before a training that would fail late or mislead."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from hf_calib._errors import InputValueError, expected
from hf_calib.losses import AdaptiveLoss
from hf_calib.trainer._datasets import check_calibration_split, check_labels, warn_of_double_roles
from hf_calib.trainer.callbacks import AdaFocalCallback, TemperatureScalingCallback

if TYPE_CHECKING:
    from hf_calib.trainer.trainer import CalibrationTrainer


def check_model(trainer: CalibrationTrainer) -> None:
    """Refuse a model that is no classifier, and what does not fit the model or the loss.

    Raises:
        ValueError: saying what to change.
    """
    if trainer.compute_loss_func is not None:
        got, way_out = "compute_loss_func", "use transformers.Trainer for a loss of your own"
        raise InputValueError(expected("the loss", "be named by args.loss", got, way_out))
    n_classes, loss = _n_classes(trainer), trainer.calibration_loss
    if n_classes == 1:
        way_out = "load the model with num_labels=2 or more"
        raise InputValueError(
            expected("the model", "be a classifier with at least 2 labels", n_classes, way_out)
        )
    weights = loss.class_weights
    if weights is not None and n_classes is not None and len(weights) != n_classes:
        way_out = "give one weight per label of the model"
        raise InputValueError(expected("class_weights", f"have {n_classes} entries", len(weights), way_out))
    if trainer._callback(AdaFocalCallback) is not None and not isinstance(loss, AdaptiveLoss):
        way_out = "use loss='adafocal', or leave the callback out"
        raise InputValueError(
            expected("AdaFocalCallback", "go with a loss that adapts", repr(loss.name), way_out)
        )


def check_data(trainer: CalibrationTrainer) -> None:
    """Check the roles and the labels of the data sets.

    Raises:
        ValueError: naming the data set, and what is wrong with it.
    """
    adafocal, split = trainer._callback(AdaFocalCallback), trainer.calibration_split
    if adafocal is not None and split is None:
        got = "several evaluation sets" if isinstance(trainer.eval_dataset, dict) else "none"
        requirement = f"be given for loss {trainer.args.loss!r}, whose gammas follow held-out predictions"
        raise InputValueError(expected("calibration_dataset", requirement, got, "pass calibration_dataset"))
    if adafocal is not None or trainer._callback(TemperatureScalingCallback) is not None:
        check_calibration_split(split, None if adafocal is None else adafocal.n_samples)
        if trainer.is_world_process_zero():
            what = "the temperature" if adafocal is None else "the loss's gammas and the temperature"
            warn_of_double_roles(trainer.train_dataset, split, trainer.eval_dataset, what)
    if trainer.is_world_process_zero():
        _warn_of_split_batches(trainer)
    n_classes = _n_classes(trainer)
    if n_classes is not None and trainer._problem_type != "multi_label_classification":
        for role, dataset in _splits(trainer).items():
            check_labels(dataset, role, n_classes, trainer.label_names[0])


def _splits(trainer: CalibrationTrainer) -> dict[str, Any]:
    evaluation = trainer.eval_dataset
    sets = evaluation if isinstance(evaluation, dict) else {"evaluation": evaluation}
    return {"training": trainer.train_dataset, "calibration": trainer.calibration_dataset, **sets}


def _n_classes(trainer: CalibrationTrainer) -> int | None:
    return getattr(trainer._config, "num_labels", None)


def _warn_of_split_batches(trainer: CalibrationTrainer) -> None:
    """A mean over the batch does not care how it is cut; a penalty that couples its examples does."""
    args, loss = trainer.args, trainer.calibration_loss
    rows = args.train_batch_size * (args.world_size if args.gather_batch else 1)
    whole = args.train_batch_size * args.world_size * args.gradient_accumulation_steps
    if loss.couples_batch and rows < whole:
        way_out = "use larger micro-batches"
        if args.world_size > 1 and not args.gather_batch:
            way_out = "set gather_batch=True to take those of all processes together, or " + way_out
        warnings.warn(
            f"the penalty of loss {loss.name!r} depends on the batch, and is computed on micro-batches of {rows} "
            f"of the {whole} examples of an optimizer step: results depend on how it is cut; {way_out}",
            stacklevel=4,
        )
