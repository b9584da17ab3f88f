"""Checks before training: errors for data that would fail later, and warnings of misleading metrics."""

from __future__ import annotations

import math
import warnings
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.trainer_utils import default_compute_objective

from hf_calib._errors import check, did_you_mean
from hf_calib._text import counted
from hf_calib.language_models.label_tokens import is_causal, without_adapters
from hf_calib.losses import AdaptiveLoss
from hf_calib.losses.statistics.definitions import IGNORE_INDEX
from hf_calib.metrics.state import LOGGED_METRICS
from hf_calib.trainer.calibration_map import check_goes_with
from hf_calib.trainer.callbacks import (
    AdaFocalCallback,
    CalibrationMapCallback,
    arrange,
    own_callback,
)
from hf_calib.trainer.labels import read_labels

_DECISIONS = "give 0 or 1 per class, or -100 to ignore a decision"


def check_model(trainer: Any) -> None:
    """Raise for a model that is not a classifier, and for a loss that does not fit it."""
    asked, loss, model = (
        trainer.calibration_config.loss,
        trainer.calibration_loss,
        trainer.unwrapped_model,
    )
    once = trainer.compute_loss_func is None or asked == "cross_entropy"
    got = f"compute_loss_func and loss={asked!r}"
    check(once, "the loss to be given once", got, "leave one of them out")
    adapts = own_callback(trainer, AdaFocalCallback) is None or isinstance(
        loss, AdaptiveLoss
    )
    way_out = "use loss='adafocal', or leave the callback out"
    check(
        adapts,
        "AdaFocalCallback to be used with a loss that adapts",
        repr(loss.name),
        way_out,
    )
    if trainer.reads_labels:
        got = f"{type(model).__name__}, an encoder-decoder that generates"
        way_out = "use its ...ForSequenceClassification, or transformers.Trainer"
        classifies = (
            is_causal(model)
            or not getattr(without_adapters(model), "can_generate", bool)()
        )
        check(
            classifies,
            "the model to be a classifier or a causal language model",
            got,
            way_out,
        )
        several = trainer.n_classes != 1 or loss.multi_label
        way_out = "load it with num_labels=2; for one sigmoid with problem_type='multi_label_classification'"
        check(
            several,
            "the model to be a classifier with at least 2 labels",
            trainer.n_classes,
            way_out,
        )


def check_data(trainer: Any) -> None:
    """Raise for data on which training would fail later, and warn of splits that make metrics misleading."""
    arrange(trainer)
    _name_objective(trainer)
    adafocal, fitting = (
        own_callback(trainer, AdaFocalCallback),
        own_callback(trainer, CalibrationMapCallback),
    )
    split, evaluation = trainer.calibration_split, trainer.eval_dataset
    sets = evaluation if isinstance(evaluation, dict) else {}
    if adafocal is not None:
        got, loss = (
            "several evaluation sets" if sets else "none",
            f"loss {trainer.calibration_loss.name!r}",
        )
        requirement = f"calibration_dataset to be given for {loss}, whose gammas follow held-out predictions"
        check(split is not None, requirement, got, "pass calibration_dataset")
    splits = {
        "training": trainer.train_dataset,
        "calibration": trainer.calibration_dataset,
    }
    sets = sets or {"evaluation": evaluation}
    splits |= {
        f"evaluation {role!r}" if role in splits else role: each
        for role, each in sets.items()
    }
    for role, dataset in splits.items():
        if trainer.reads_labels:
            _check_labels(trainer, dataset, role)
    if fitting is not None:
        check_goes_with(fitting.scaler, trainer)
    if trainer.is_world_process_zero():
        fitted = ["the loss's gammas"] * (adafocal is not None) + (
            [] if fitting is None else [fitting.title]
        )
        if fitted:
            _warn_of_roles(trainer, " and ".join(fitted))
        _warn_of_split_batches(trainer)


def _check_labels(trainer: Any, dataset: Any, role: str) -> None:
    """Raise for labels that are missing, names or out of range, if the dataset has a label column."""
    what, found = (
        f"labels of the {role} split to be",
        read_labels(dataset, trainer.label_key),
    )
    if found is None:
        return
    values, missing = found.values, found.missing
    got = (
        f"None in row {missing[0]} ({counted(len(missing), 'such row')})"
        if len(missing)
        else ""
    )
    way_out = "label these rows, drop them, or give -100 to ignore them"
    check(not got, f"{what} given in every row", got, way_out)
    if (
        len(values) == 0 or dataset.format["type"] == "custom"
    ):  # A transform may number them.
        return
    way_out = "number them: dataset.class_encode_column('label'), the same names in each split"
    is_name = isinstance(values[0], str)
    check(
        not is_name,
        f"{what} class indices",
        f"{values[0]!r} in row {found.rows[0]}",
        way_out,
    )
    if values.dtype.kind not in "iuf":
        return
    if trainer.answers is not None:
        trainer.answers.check(found, role)
        return
    multi_label, n_classes = trainer.calibration_loss.multi_label, trainer.n_classes
    requirement, way_out = (
        f"in [0, {n_classes})",
        "set num_labels when the model is loaded, or relabel",
    )
    wrong = (values != IGNORE_INDEX) & ~(
        (values >= 0) & (values < (n_classes or math.inf))
    )
    if multi_label if multi_label is not None else values.dtype.kind == "f":
        hard = role == "calibration"  # Calibrator and gammas are fitted to these.
        requirement, way_out = "0 or 1" if hard else "in [0, 1]", _DECISIONS
        fits = np.isin(values, (0, 1)) if hard else (values >= 0) & (values <= 1)
        wrong = (values != IGNORE_INDEX) & ~fits
    # A user's collator may change them, too.
    is_stock = str(getattr(trainer.data_collator, "__module__", "")).startswith(
        "transformers."
    )
    if is_stock and wrong.any():
        rows = found.rows[wrong]
        got = f"{values[wrong][0]} in row {rows[0]} ({counted(len(np.unique(rows)), 'such row')})"
        check(False, f"{what} {requirement}", got, way_out)


def _name_objective(trainer: Any) -> None:
    """Return the objective of a hyperparameter search by name; the default is the NLL instead of the Trainer's sum."""
    name = getattr(trainer, "compute_objective", None)
    name = "eval_nll" if name is default_compute_objective else name
    if isinstance(name, str):
        known = [
            f"eval_{key}{suffix}"
            for suffix in ("", "_calibrated")
            for key in LOGGED_METRICS
        ]
        requirement = "compute_objective to be a function of an evaluation's metrics, or the name of one"
        is_known = name in (*known, "eval_loss") or trainer.compute_metrics is not None
        check(is_known, requirement, repr(name), did_you_mean(name, known))
        trainer.compute_objective = itemgetter(name)


def check_decisions(labels: Tensor) -> None:
    """Raise for multi-label targets outside [0, 1] in a batch."""
    right = ((labels >= 0) & (labels <= 1)) | (
        labels == IGNORE_INDEX
    )  # This is False for NaN.
    requirement = "multi-label labels to be in [0, 1]"
    if not labels.is_cpu:  # This does not wait for the device.
        torch._assert_async(right.all(), f"expected {requirement}; {_DECISIONS}")
    elif not right.all():
        check(False, requirement, labels[~right][0].item(), _DECISIONS)


def _warn_of_roles(trainer: Any, fitted: str) -> None:
    """Warn if a split has two roles, or if no split is given for the fit."""
    train, calibration, evaluation = (
        trainer.train_dataset,
        trainer.calibration_split,
        trainer.eval_dataset,
    )
    reported = (
        list(evaluation.values()) if isinstance(evaluation, dict) else [evaluation]
    )
    what, hold_out = (
        fitted[0].upper() + fitted[1:],
        "Hold some examples out as calibration_dataset.",
    )
    if calibration is None:
        found = (
            "several evaluation sets"
            if isinstance(evaluation, dict)
            else "no evaluation set either"
        )
        fact = f"There is no calibration_dataset, and {found}. {what} will not be fitted, so probabilities will not"
        rest = (
            "be calibrated. Pass calibration_dataset, or set calibration_method='none'."
        )
    elif calibration is train:
        fact = f"The training split is also the calibration split. {what} will follow a model that has seen these"
        rest = f"examples, and the result will be over-confident. {hold_out}"
    elif any(calibration is split for split in reported):
        fact = f"The evaluation split is also the calibration split. {what} will follow the examples that are"
        rest = f"reported, so the reported calibration is optimistic. {hold_out}"
    elif train is not None and any(train is split for split in reported):
        fact = "The training split is also the evaluation split. The reported metrics are of examples that"
        rest = "the model has seen, and are optimistic. Hold some examples out as eval_dataset."
    else:
        return
    warnings.warn(f"{fact} {rest}", stacklevel=5)


def _warn_of_split_batches(trainer: Any) -> None:
    """Warn of a penalty on the batch that will be computed on parts of it."""
    args, name, gathers = (
        trainer.args,
        trainer.calibration_loss.name,
        trainer.calibration_config.gather_batch,
    )
    rows = args.train_batch_size * (args.world_size if gathers else 1)
    whole = args.train_batch_size * args.world_size * args.gradient_accumulation_steps
    if trainer.calibration_loss.couples_batch and rows < whole:
        fact = f"The penalty of loss {name!r} depends on the batch, and is computed on micro-batches of {rows} of the"
        rest = "examples of an optimizer step. Results depend on this division. Use larger micro-batches, or"
        warnings.warn(
            f"{fact} {whole} {rest} gather_batch=True on several processes.",
            stacklevel=5,
        )
