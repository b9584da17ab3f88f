"""Checks before a training: what would fail late is refused, what would mislead is warned of."""

from __future__ import annotations

import warnings
from operator import itemgetter
from typing import Any

import datasets
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.trainer_utils import default_compute_objective

from hf_calib._errors import check, did_you_mean, few
from hf_calib.losses import AdaptiveLoss
from hf_calib.losses.statistics.definitions import IGNORE_INDEX
from hf_calib.metrics.checks import check_type
from hf_calib.metrics.state import LOGGED_METRICS
from hf_calib.trainer import labels as of_labels
from hf_calib.trainer.calibration_map import check_goes_with
from hf_calib.trainer.callbacks import AdaFocalCallback, CalibrationMapCallback, arrange, own_callback
from hf_calib.trainer.labels import Labels, collated_labels, has_rows

Array = NDArray[Any]
_DECISIONS = "give 0 or 1 per class, or -100 to ignore a decision"


def check_model(trainer: Any) -> None:
    """Refuse a model that is not a classifier, and a loss that does not fit it."""
    asked = trainer.calibration_config.loss
    once = trainer.compute_loss_func is None or asked == "cross_entropy"
    got = f"compute_loss_func beside loss={asked!r}"
    check(once, "the loss to be given once", got, "leave one of them out")
    model, n_classes, loss = trainer.unwrapped_model, trainer.n_classes, trainer.calibration_loss
    adapts = own_callback(trainer, AdaFocalCallback) is None or isinstance(loss, AdaptiveLoss)
    way_out = "use loss='adafocal', or leave the callback out"
    check(adapts, "AdaFocalCallback to go with a loss that adapts", repr(loss.name), way_out)
    if not trainer.reads_labels:
        return
    names = list(trainer.label_names)
    way_out = "set label_names=['labels'], or the one column that has the classes"
    check(len(names) <= 1, "label_names to name one column", names, way_out)
    got = f"{type(model).__name__}, an encoder-decoder that generates"
    way_out = "use its ...ForSequenceClassification, or transformers.Trainer"
    refused = of_labels.generates(model, encoder_decoder=True)
    check(not refused, "the model to be a classifier or a causal language model", got, way_out)
    way_out = "load it with num_labels=2, or with problem_type='multi_label_classification' for one sigmoid"
    several = n_classes != 1 or loss.multi_label
    check(several, "the model to be a classifier with at least 2 labels", n_classes, way_out)
    n_weights = n_classes if loss.class_weights is None else len(loss.class_weights)
    requirement = f"class_weights to have {n_classes} entries"
    check(n_classes in (None, n_weights), requirement, n_weights, "give one weight per label of the model")


def check_data(trainer: Any) -> None:
    """Refuse data that a training would fail on or be misled by, and warn of what its numbers will not say."""
    arrange(trainer)
    _name_objective(trainer)
    adafocal, fitting = own_callback(trainer, AdaFocalCallback), own_callback(trainer, CalibrationMapCallback)
    split, evaluation, args = trainer.calibration_split, trainer.eval_dataset, trainer.args
    sets = evaluation if isinstance(evaluation, dict) else {}
    loss, got = trainer.calibration_config.loss, "several evaluation sets" if sets else "none"
    requirement = (
        f"calibration_dataset to be given for loss {loss!r}, whose gammas follow held-out predictions"
    )
    check(adafocal is None or split is not None, requirement, got, "pass calibration_dataset")
    if split is not None and (adafocal is not None or fitting is not None):
        whole = adafocal is None or adafocal.n_samples is None or has_rows(split)
        got, way_out = type(split).__name__, "leave gamma_update_samples out"
        check_type(whole, "calibration_dataset to have a length and rows", got, way_out)
        way_out = "hold some examples out, or leave calibration_dataset out"
        holds = not hasattr(split, "__len__") or len(split) > 0
        check(holds, "the calibration split to have examples", "none", way_out)
    if args.load_best_model_at_end and sets:  # each one's metrics are logged under its name
        metric, first = str(args.metric_for_best_model), next(iter(sets))
        name = metric.removeprefix("eval_")
        requirement = f"metric_for_best_model to begin with the name of an evaluation set ({few(list(sets))})"
        way_out = f"set it to 'eval_{first}_{name}', for example"
        check(any(name.startswith(f"{key}_") for key in sets), requirement, repr(metric), way_out)
    _check_labels(trainer, sets or {"evaluation": evaluation}, fits=bool(adafocal or fitting))
    if fitting is not None:
        check_goes_with(fitting.scaler, trainer)
    if trainer.is_world_process_zero():
        fitted = ["the loss's gammas"] * (adafocal is not None) + ([] if fitting is None else [fitting.title])
        if fitted:
            _warn_of_roles(trainer, " and ".join(fitted))
        _warn_of_split_batches(trainer)


def _check_labels(trainer: Any, sets: dict[str, Any], *, fits: bool) -> None:
    """Decide the problem type, by the training split where the model does not say, and hold all splits to it."""
    splits = {"training": trainer.train_dataset, "calibration": trainer.calibration_dataset}
    splits |= {f"evaluation {role!r}" if role in splits else role: each for role, each in sets.items()}
    labels = {role: of_labels.read_labels(dataset, trainer.label_key) for role, dataset in splits.items()}
    for role, dataset in splits.items():
        _check_rows(trainer, dataset, role, labels[role])
    kinds = {role: of_labels.has_label_per_class(trainer, dataset, role) for role, dataset in splits.items()}
    if fits and trainer.reads_labels and has_rows(trainer.calibration_dataset):
        _check_calibration_labels(trainer, trainer.calibration_dataset, labels["calibration"])
    decided = next((kind for kind in kinds.values() if kind is not None), None)
    if trainer.problem_type is None and decided is not None:
        of_labels.decide_problem_type(trainer, decided)
    multi_label, form = trainer.calibration_loss.multi_label, "'{}_label_classification'"
    for role, kind in kinds.items():
        wanted, got, other = "class indices, for a single-label model", "one float per class", "multi"
        if multi_label:
            wanted, got, other = "one float per class, for a multi-label model", "integers", "single"
        way_out = f"convert them, or set the model's problem_type to {form.format(other)}"
        known = kind is not None and multi_label is not None
        check(not known or kind == multi_label, f"labels of the {role} split to be {wanted}", got, way_out)
    for role, found in labels.items():
        if trainer.answers is not None:
            trainer.answers.check(found, role)
        elif found is not None:
            _check_values(trainer, splits[role], role, found)


def _check_rows(trainer: Any, dataset: Any, role: str, found: Labels | None) -> None:
    """Refuse rows without labels or inputs, and class names, where this can be told without a pass."""
    what, is_dataset = f"labels of the {role} split to be", isinstance(dataset, datasets.Dataset)
    if found is not None:
        got = f"None in row {found.missing[0]} ({len(found.missing)} such rows)" if len(found.missing) else ""
        way_out = "label these rows, drop them, or give -100 to ignore them"
        check(not got, f"{what} given in every row", got, way_out)
        # A collator would say something about padding; a transform may number them.
        is_transformed = is_dataset and dataset.format["type"] == "custom"
        if len(found.values) and isinstance(found.values[0], str) and not is_transformed:
            way_out = "number them: dataset.class_encode_column('label'), the same names in each split"
            check(False, f"{what} class indices", f"{found.values[0]!r} in row {found.rows[0]}", way_out)
    inputs = (
        is_dataset
        and trainer.args.remove_unused_columns
        and of_labels.loader_of(trainer, dataset).dataset.column_names
    )
    for name in set(inputs or ()) - {trainer.label_key, *of_labels.LABEL_NAMES}:
        if dataset.data.column(name).null_count:
            absent = dataset.with_format("arrow")[name][:].is_null().to_numpy()
            requirement = f"the {role} split to have a value for {name!r} in every row"
            got = f"None in row {np.argmax(absent)}"
            check(absent.all() or not absent.any(), requirement, got, "drop these rows, or fill them in")


def _check_calibration_labels(trainer: Any, split: Any, found: Labels | None) -> None:
    """Refuse rows without a label to fit gammas and a map on, of which a training would say so at its end."""
    way_out = "check its label column, or set calibration_method='none'"
    given = found is None or not len(split) or not (found.values == IGNORE_INDEX).all()
    check(given, "labels of the calibration split to be given", "-100 in every row", way_out)
    if found is None and len(split):
        columns = getattr(split, "column_names", None)
        got = "none" if columns is None else f"none among {', '.join(columns)}"
        arrive = collated_labels(trainer, split, "calibration") is not None
        check(arrive, "the calibration split to have labels", got, way_out)


def _check_values(trainer: Any, dataset: Any, role: str, found: Labels) -> None:
    """Refuse labels out of range, where this can be told without a pass."""
    multi_label, n_classes, values = trainer.calibration_loss.multi_label, trainer.n_classes, found.values
    unknown = not multi_label and (values.dtype.kind == "f" or n_classes is None)
    if values.dtype.kind not in "iuf" or unknown:
        return
    # Training and evaluation take soft targets; a map and gammas are fitted to hard ones.
    hard = role == "calibration"

    def fits(array: Array) -> Array:
        if not multi_label:
            inside = (array >= 0) & (array < n_classes)
        else:
            inside = np.isin(array, (0, 1)) if hard else (array >= 0) & (array <= 1)
        return inside | (array == IGNORE_INDEX)

    wrong = ~fits(values)
    if not wrong.any():
        return
    rows = found.rows[wrong]
    arriving = collated_labels(trainer, dataset, role, int(rows[0]))
    if arriving is not None and fits(arriving.numpy()).all():
        return  # changed on the way to the model
    requirement, way_out = f"in [0, {n_classes})", "set num_labels when the model is loaded, or relabel"
    if multi_label:
        requirement, way_out = "0 or 1" if hard else "in [0, 1]", _DECISIONS
    got = f"{values[wrong][0]} in row {rows[0]} ({len(np.unique(rows))} such rows)"
    check(False, f"labels of the {role} split to be {requirement}", got, way_out)


def _name_objective(trainer: Any) -> None:
    """Let a hyperparameter search judge by the metric of a name; by default by the NLL, not by the Trainer's sum."""
    name = getattr(trainer, "compute_objective", None)
    name = "eval_nll" if name is default_compute_objective else name
    if not isinstance(name, str):
        return
    known = [f"eval_{key}{suffix}" for suffix in ("", "_calibrated") for key in LOGGED_METRICS]
    requirement = "compute_objective to be a function of an evaluation's metrics, or the name of one"
    is_known = name in (*known, "eval_loss") or trainer.compute_metrics is not None
    check(is_known, requirement, repr(name), did_you_mean(name, known))
    trainer.compute_objective = itemgetter(name)


def check_decisions(labels: Tensor) -> None:
    """Refuse multi-label targets outside [0, 1] in a batch."""
    right = ((labels >= 0) & (labels <= 1)) | (labels == IGNORE_INDEX)  # NaN is neither
    requirement = "multi-label labels to be in [0, 1]"
    if not labels.is_cpu:  # without waiting for the device
        torch._assert_async(right.all(), f"expected {requirement}; {_DECISIONS}")
    elif not right.all():
        check(False, requirement, labels[~right][0].item(), _DECISIONS)


# ---- Warnings ----


def _warn_of_roles(trainer: Any, fitted: str) -> None:
    """Warn if a split plays two roles, or if nothing tells which split to fit on."""
    train, calibration, evaluation = trainer.train_dataset, trainer.calibration_split, trainer.eval_dataset
    reported = list(evaluation.values()) if isinstance(evaluation, dict) else [evaluation]
    what = fitted[0].upper() + fitted[1:]
    if calibration is None:
        found = "several evaluation sets" if isinstance(evaluation, dict) else "no evaluation set either"
        fact = f"There is no calibration_dataset, and {found}. {what} will not be fitted, so the"
        rest = "probabilities stay as trained. Pass calibration_dataset, or set calibration_method='none'."
    elif calibration is train:
        fact = f"The training split is also the calibration split. {what} will follow a model that has seen these"
        rest = "examples, and come out over-confident. Hold some examples out as calibration_dataset."
    elif any(calibration is split for split in reported):
        fact = f"The evaluation split is also the calibration split. {what} will follow the examples that are"
        rest = "reported, so the reported calibration is optimistic. Pass a separate calibration_dataset."
    elif train is not None and any(train is split for split in reported):
        fact = (
            "The training split is also the evaluation split. What is reported is for examples that the model"
        )
        rest = "has seen, and is optimistic. Hold some examples out as eval_dataset."
    else:
        return
    warnings.warn(f"{fact} {rest}", stacklevel=5)


def _warn_of_split_batches(trainer: Any) -> None:
    """Warn of a penalty over the batch that will see only a part of it: a mean does not care how a batch is cut."""
    args, loss = trainer.args, trainer.calibration_loss
    gather, processes = trainer.calibration_config.gather_batch, args.world_size
    rows = args.train_batch_size * (processes if gather else 1)
    whole = args.train_batch_size * processes * args.gradient_accumulation_steps
    if loss.couples_batch and rows < whole:
        together = processes > 1 and not gather
        first = "Set gather_batch=True to take those of all processes together, or use" if together else "Use"
        warnings.warn(
            f"The penalty of loss {loss.name!r} depends on the batch, and is computed on micro-batches of {rows} "
            f"of the {whole} examples of an optimizer step. Results depend on how the batch is cut. "
            f"{first} larger micro-batches.",
            stacklevel=5,
        )
