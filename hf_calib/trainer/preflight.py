"""Checks before a training: what would fail late is refused, what would mislead is warned of."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import datasets
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hf_calib._errors import InputTypeError, InputValueError, expected, few
from hf_calib.losses import CalibrationLoss
from hf_calib.losses.statistics.definitions import IGNORE_INDEX
from hf_calib.trainer.callbacks import AdaFocalCallback, CalibrationMapCallback, own_callback
from hf_calib.trainer.labels import (
    Labels,
    first_missing,
    generates_by_encoder_and_decoder,
    has_rows,
    read_labels,
)

Array = NDArray[Any]


def check_data(trainer: Any) -> None:
    """Refuse data that a training would fail on or be misled by, and warn of what its numbers will not say.

    Raises:
        TypeError, ValueError: saying what to change.
    """
    adafocal, split = own_callback(trainer, AdaFocalCallback), trainer.calibration_split
    fitting = own_callback(trainer, CalibrationMapCallback)
    if adafocal is not None and split is None:
        got = "several evaluation sets" if isinstance(trainer.eval_dataset, dict) else "none"
        requirement = (
            f"be given for loss {trainer.calibration_config.loss!r}, whose gammas follow held-out predictions"
        )
        raise InputValueError(expected("calibration_dataset", requirement, got, "pass calibration_dataset"))
    if adafocal is not None or fitting is not None:
        check_calibration_split(split, None if adafocal is None else adafocal.n_samples)
    if trainer.args.load_best_model_at_end:
        check_best_metric(str(trainer.args.metric_for_best_model), trainer.eval_dataset)
    _check_labels(trainer)
    if fitting is not None:
        trainer.check_goes_with(fitting.scaler)
    if not trainer.is_world_process_zero():
        return
    if split is None and fitting is not None:
        warn_of_no_map(fitting.title, trainer.eval_dataset)
    elif adafocal is not None or fitting is not None:
        names = [] if adafocal is None else ["the loss's gammas"]
        names += [] if fitting is None else [fitting.title]
        what = " and ".join(names)
        what = what[0].upper() + what[1:]
        warn_of_double_roles(trainer.train_dataset, split, trainer.eval_dataset, what)
    warn_of_split_batches(
        trainer.calibration_loss,
        micro_batch=trainer.args.train_batch_size,
        processes=trainer.args.world_size,
        accumulation=trainer.args.gradient_accumulation_steps,
        gather=trainer.calibration_config.gather_batch,
    )


def _check_labels(trainer: Any) -> None:
    """Decide the problem type, by the training split where the model does not say, and hold all splits to it."""
    evaluation = trainer.eval_dataset
    sets = evaluation if isinstance(evaluation, dict) else {"evaluation": evaluation}
    splits = {"training": trainer.train_dataset, "calibration": trainer.calibration_dataset}
    splits |= {f"evaluation {role!r}" if role in splits else role: each for role, each in sets.items()}
    trainer._set_signature_columns_if_needed()
    inputs: set[str] = set(trainer._signature_columns or ()) - {trainer.label_key, "label", "label_ids"}
    labels = {role: read_labels(dataset, trainer.label_key) for role, dataset in splits.items()}
    check_rows(splits, labels, inputs)
    _check_no_names(labels, splits)
    kinds = {role: trainer.has_label_per_class(dataset, role) for role, dataset in splits.items()}
    _check_calibration_labels(trainer, labels)
    if trainer.problem_type is None:
        decided = next((kind for kind in kinds.values() if kind is not None), None)
        if decided is not None:
            trainer.decide_problem_type(decided)
    multi_label = trainer.calibration_loss.multi_label
    check_label_kinds(kinds, multi_label)
    if trainer.answers is not None:
        for role, found in labels.items():
            trainer.answers.check(found, role)
        return
    n_classes = trainer.n_classes
    check_label_values(
        labels,
        multi_label=multi_label,
        n_classes=n_classes,
        collated=lambda role, row: trainer.collated(splits[role], role, row),
    )


def _check_no_names(labels: Mapping[str, Labels | None], splits: Mapping[str, Any]) -> None:
    """Refuse class names, of which a collator would say something about padding; where a transform may number them."""
    for role, found in labels.items():
        dataset = splits[role]
        if isinstance(dataset, datasets.Dataset) and dataset.format["type"] == "custom":
            continue
        if found is not None and len(found.values) and isinstance(found.values[0], str):
            got = f"{found.values[0]!r} in row {found.rows[0]}"
            way_out = "number them: dataset.class_encode_column('label'), the same names in each split"
            raise InputValueError(expected(f"labels of the {role} split", "be class indices", got, way_out))


def _check_calibration_labels(trainer: Any, labels: Mapping[str, Labels | None]) -> None:
    """Refuse rows without a label to fit gammas and a map on, of which a training would say so at its end."""
    fits = any(own_callback(trainer, kind) for kind in (AdaFocalCallback, CalibrationMapCallback))
    split = trainer.calibration_dataset
    if not (fits and trainer._reads_labels and has_rows(split) and len(split)):
        return
    found = labels["calibration"]
    way_out = "check its label column, or set calibration_method='none'"
    if found is not None and (found.values == IGNORE_INDEX).all():
        raise InputValueError(
            expected("labels of the calibration split", "be given", "-100 in every row", way_out)
        )
    if found is None and trainer.collated(split, "calibration") is None:
        columns = getattr(split, "column_names", None)
        got = "none" if columns is None else f"none among {', '.join(columns)}"
        raise InputValueError(expected("the calibration split", "have labels", got, way_out))


def check_model(model: Any, n_classes: int | None, loss: CalibrationLoss, label_names: Sequence[str]) -> None:
    """Refuse a model that is not a classifier, and a loss that does not fit it.

    Args:
        model: without wrappers for several processes or compilation.
        n_classes: that the loss is over; None if the model does not say.
        loss: the loss that it is to be trained with.
        label_names: the trainer's.

    Raises:
        ValueError: saying what to change.
    """
    if len(label_names) > 1:
        way_out = "set label_names=['labels'], or the one column that has the classes"
        raise InputValueError(expected("label_names", "name one column", list(label_names), way_out))
    if generates_by_encoder_and_decoder(model):
        got = f"{type(model).__name__}, an encoder-decoder that generates"
        way_out = "use its ...ForSequenceClassification, or transformers.Trainer"
        raise InputValueError(
            expected("the model", "be a classifier or a causal language model", got, way_out)
        )
    if n_classes == 1 and not loss.multi_label:
        way_out = (
            "load it with num_labels=2, or with problem_type='multi_label_classification' for one sigmoid"
        )
        raise InputValueError(
            expected("the model", "be a classifier with at least 2 labels", n_classes, way_out)
        )
    weights = loss.class_weights
    if weights is not None and n_classes is not None and len(weights) != n_classes:
        way_out = "give one weight per label of the model"
        raise InputValueError(expected("class_weights", f"have {n_classes} entries", len(weights), way_out))


def check_calibration_split(dataset: Any, n_samples: int | None) -> None:
    """Refuse an empty calibration split, and a stream where a subset is asked for.

    Args:
        dataset: the calibration split, or None.
        n_samples: size of the subset that updates the gammas; None for the whole split.

    Raises:
        TypeError, ValueError: saying what to pass.
    """
    if dataset is not None and not has_rows(dataset) and n_samples is not None:
        got, way_out = type(dataset).__name__, "leave gamma_update_samples out"
        raise InputTypeError(expected("calibration_dataset", "have a length and rows", got, way_out))
    if dataset is not None and hasattr(dataset, "__len__") and len(dataset) == 0:
        way_out = "hold some examples out, or leave calibration_dataset out"
        raise InputValueError(expected("the calibration split", "have examples", "none", way_out))


def check_best_metric(metric: str, evaluation: Any) -> None:
    """Refuse a metric for the best model that several evaluation sets do not have.

    Args:
        metric: `args.metric_for_best_model`.
        evaluation: the evaluation set; a dict of several logs each one's metrics under its name.

    Raises:
        ValueError: naming a metric that there will be.
    """
    if not isinstance(evaluation, dict) or not evaluation:
        return
    name = metric.removeprefix("eval_")
    if not any(name.startswith(f"{key}_") for key in evaluation):
        requirement = f"begin with the name of an evaluation set ({few(list(evaluation))})"
        way_out = f"set it to 'eval_{next(iter(evaluation))}_{name}', for example"
        raise InputValueError(expected("metric_for_best_model", requirement, repr(metric), way_out))


def check_rows(splits: Mapping[str, Any], labels: Mapping[str, Labels | None], inputs: Iterable[str]) -> None:
    """Refuse rows without labels or inputs, where this can be told without a pass.

    Args:
        splits: the datasets by role.
        labels: their labels by role; None where they cannot be read.
        inputs: names of the columns that the model takes.

    Raises:
        ValueError: naming the split and the row.
    """
    for role, dataset in splits.items():
        found = labels.get(role)
        if found is not None and len(found.missing):
            got = f"None in row {found.missing[0]} ({len(found.missing)} such rows)"
            way_out = "label these rows, drop them, or give -100 to ignore them"
            raise InputValueError(
                expected(f"labels of the {role} split", "be given in every row", got, way_out)
            )
        columns = dataset.column_names if isinstance(dataset, datasets.Dataset) else []
        for name in sorted(set(inputs) & set(columns)):
            row = first_missing(dataset, name)
            if row is not None:
                requirement, got = f"have a value for {name!r} in every row", f"None in row {row}"
                raise InputValueError(
                    expected(f"the {role} split", requirement, got, "drop these rows, or fill them in")
                )


def check_label_kinds(kinds: Mapping[str, bool | None], multi_label: bool | None) -> None:
    """Refuse a split whose labels are of another kind than the problem.

    Args:
        kinds: by role, whether the labels are one float per class; None where this is not known.
        multi_label: what the problem is; None if it is not known.

    Raises:
        ValueError: naming the split.
    """
    for role, kind in kinds.items():
        if multi_label is False and kind:
            requirement, got = "be class indices, for a single-label model", "one float per class"
            way_out = "convert them, or set the model's problem_type to 'multi_label_classification'"
        elif multi_label and kind is False:
            requirement, got = "be one float per class, for a multi-label model", "integers"
            way_out = "convert them, or set the model's problem_type to 'single_label_classification'"
        else:
            continue
        raise InputValueError(expected(f"labels of the {role} split", requirement, got, way_out))


def check_label_values(
    labels: Mapping[str, Labels | None],
    *,
    multi_label: bool | None,
    n_classes: int | None,
    collated: Callable[[str, int], Tensor | None],
) -> None:
    """Refuse labels out of range, where this can be told without a pass.

    Args:
        labels: by role; None where they cannot be read.
        multi_label: what the problem is; None if it is not known.
        n_classes: C, or None.
        collated: gives the labels of a row of a split as the model's batches will have them, after transforms and
            the collator; None where this is not known.

    Raises:
        ValueError: naming the split, the label and its row.
    """
    for role, found in labels.items():
        if found is None or found.values.dtype.kind not in "iuf":
            continue
        values = found.values
        if multi_label:
            # Training and evaluation take soft targets; a map and gammas are fitted to hard ones.
            hard = role == "calibration"
            fits = _is_decision if hard else _is_share
            requirement = "be 0 or 1" if hard else "be in [0, 1]"
            way_out = "give 0 or 1 per class, or -100 to ignore a decision"
        elif values.dtype.kind in "iu" and n_classes is not None:
            fits = partial(_is_class, n_classes=n_classes)
            requirement = f"be in [0, {n_classes})"
            way_out = "set num_labels when the model is loaded, or relabel"
        else:
            continue
        wrong = ~fits(values) & (values != IGNORE_INDEX)
        if wrong.any():
            rows = found.rows[wrong]
            arriving = collated(role, int(rows[0]))
            if arriving is not None:
                seen = arriving.numpy()
                if (fits(seen) | (seen == IGNORE_INDEX)).all():
                    continue  # changed on the way to the model
            got = f"{values[wrong][0]} in row {rows[0]} ({len(np.unique(rows))} such rows)"
            raise InputValueError(expected(f"labels of the {role} split", requirement, got, way_out))


def _is_class(values: Array, n_classes: int) -> Array:
    return (values >= 0) & (values < n_classes)


def _is_share(values: Array) -> Array:
    return (values >= 0) & (values <= 1)


def _is_decision(values: Array) -> Array:
    return np.isin(values, (0, 1))


def warn_of_double_roles(train: Any, calibration: Any, evaluation: Any, what: str) -> None:
    """Warn once if a split plays two roles.

    Args:
        train: the training split, or None; the others alike.
        calibration: the split that `what` follows.
        evaluation: the split that is reported, or a dict of several.
        what: what is fitted to the calibration split.
    """
    reported = list(evaluation.values()) if isinstance(evaluation, dict) else [evaluation]
    message = None
    if calibration is not None and calibration is train:
        message = (
            f"The training split is also the calibration split. {what} will follow a model that has seen these "
            "examples, and come out over-confident. Hold some examples out as calibration_dataset."
        )
    elif calibration is not None and any(calibration is split for split in reported):
        message = (
            f"The evaluation split is also the calibration split. {what} will follow the examples that are "
            "reported, so the reported calibration is optimistic. Pass a separate calibration_dataset."
        )
    elif train is not None and any(train is split for split in reported):
        message = (
            "The training split is also the evaluation split. What is reported is for examples that the model "
            "has seen, and is optimistic. Hold some examples out as eval_dataset."
        )
    if message is not None:
        warnings.warn(message, stacklevel=6)


def warn_of_no_map(title: str, evaluation: Any) -> None:
    """Warn that nothing tells which split to fit the calibration map on.

    Args:
        title: the map's, such as "temperature scaling".
        evaluation: None, or a dict of several evaluation sets.
    """
    found = "several evaluation sets" if isinstance(evaluation, dict) else "no evaluation set either"
    warnings.warn(
        f"There is no calibration_dataset, and {found}. {title.capitalize()} will not be fitted, so the "
        "probabilities stay as trained. Pass calibration_dataset, or set calibration_method='none'.",
        stacklevel=6,
    )


def warn_of_split_batches(
    loss: CalibrationLoss, *, micro_batch: int, processes: int, accumulation: int, gather: bool
) -> None:
    """Warn of a penalty over the batch that will see only a part of it.

    A mean over the batch does not care how it is cut; a penalty that couples its examples does.

    Args:
        loss: the training loss.
        micro_batch: rows of a process in one forward.
        processes: how many there are.
        accumulation: micro-batches per optimizer step.
        gather: whether the penalty is computed over all processes.
    """
    rows = micro_batch * (processes if gather else 1)
    whole = micro_batch * processes * accumulation
    if loss.couples_batch and rows < whole:
        way_out = "Use larger micro-batches."
        if processes > 1 and not gather:
            way_out = (
                "Set gather_batch=True to take those of all processes together, or use larger micro-batches."
            )
        warnings.warn(
            f"The penalty of loss {loss.name!r} depends on the batch, and is computed on micro-batches of {rows} "
            f"of the {whole} examples of an optimizer step. Results depend on how the batch is cut. {way_out}",
            stacklevel=6,
        )
