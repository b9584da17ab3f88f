"""Checks before training: errors for data that would fail later, and warnings of misleading metrics."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.trainer_utils import default_compute_objective

from hf_calib._errors import check, did_you_mean
from hf_calib._text import counted
from hf_calib.language_models.label_tokens import is_causal, without_adapters
from hf_calib.losses import CalibrationLoss
from hf_calib.losses.statistics.definitions import IGNORE_INDEX
from hf_calib.metrics.state import LOGGED_METRICS
from hf_calib.trainer.labels import Labels, Problem, read_labels

_DECISIONS = "give 0 or 1 per class, or -100 to ignore a decision"


class Splits(NamedTuple):
    """The datasets of a trainer by their role."""

    train: Any
    calibration: Any
    evaluation: Any  # One dataset, several by name, or None.

    @property
    def held_out(self) -> Any:
        """The rows for gammas and calibrator: those given for it, a single evaluation set, or None."""
        if self.calibration is not None:
            return self.calibration
        return None if isinstance(self.evaluation, dict) else self.evaluation

    @property
    def evaluation_sets(self) -> list[Any]:
        """The evaluation sets; one that is None if there is none."""
        return (
            list(self.evaluation.values())
            if isinstance(self.evaluation, dict)
            else [self.evaluation]
        )

    def by_name(self) -> dict[str, Any]:
        """All splits by the name that messages have for them."""
        named = {"training": self.train, "calibration": self.calibration}
        if not isinstance(self.evaluation, dict):
            return {**named, "evaluation": self.evaluation}
        for name, dataset in self.evaluation.items():
            # A user may name one of several evaluation sets like another split.
            named[f"evaluation {name!r}" if name in named else name] = dataset
        return named


# ---- The model ----


def check_loss_is_given_once(
    asked: str, loss_function: Callable[..., Any] | None
) -> None:
    """Raise for a loss function beside a configured loss."""
    check(
        loss_function is None or asked == "cross_entropy",  # This is the default.
        "the loss to be given once",
        got=f"compute_loss_func and loss={asked!r}",
        way_out="leave one of them out",
    )


def check_is_classifier(problem: Problem) -> None:
    """Raise for a model that is neither a classifier nor a causal language model."""
    model = problem.model
    generates = getattr(without_adapters(model), "can_generate", bool)()
    check(
        is_causal(model) or not generates,
        "the model to be a classifier or a causal language model",
        got=f"{type(model).__name__}, an encoder-decoder that generates",
        way_out="use its ...ForSequenceClassification, or transformers.Trainer",
    )
    check(
        problem.n_classes != 1 or bool(problem.multi_label),
        "the model to be a classifier with at least 2 labels",
        got=problem.n_classes,
        way_out="load it with num_labels=2; for one sigmoid with problem_type='multi_label_classification'",
    )


def check_best_metric(
    metric: str | None, *, is_used: bool, fits_before_evaluations: bool
) -> None:
    """Raise for a metric of the calibrator that selects a checkpoint, but would be computed only at the end."""
    if metric is None or not is_used or fits_before_evaluations:
        return
    # Several evaluation sets have their names before that of the metric.
    is_of_calibrator = any(
        metric.endswith(f"{name}_calibrated") for name in LOGGED_METRICS
    )
    check(
        not is_of_calibrator,
        "metric_for_best_model to be a metric of each evaluation",
        got=f"{metric!r}, which is computed after the training only",
        way_out=f"set calibration_strategy='evaluate', or metric_for_best_model={metric.removesuffix('_calibrated')!r}",
    )


def objective_of(given: Any, *, has_own_metrics: bool) -> Any:
    """Return the objective of a hyperparameter search by name; the default is the NLL instead of the Trainer's sum."""
    name = "eval_nll" if given is default_compute_objective else given
    if not isinstance(name, str):
        return given
    known = [f"eval_{key}" for key in LOGGED_METRICS]
    known += [f"{key}_calibrated" for key in known]
    check(
        name in known or name == "eval_loss" or has_own_metrics,
        "compute_objective to be a function of an evaluation's metrics, or the name of one",
        got=repr(name),
        way_out=did_you_mean(name, known),
    )
    return itemgetter(name)


# ---- Labels ----


class LabelCheck(NamedTuple):
    """What the labels of all splits have to fit."""

    problem: Problem
    label_key: str
    # A user's collator or the transform of a dataset may change the labels later.
    collator_is_stock: bool

    def check(self, dataset: Any, role: str) -> None:
        """Raise for labels that are missing, names or out of range, if the dataset has a label column."""
        found = read_labels(dataset, self.label_key)
        if found is None:
            return
        requirement = f"labels of the {role} split to be"
        n_missing = len(found.missing)
        if n_missing:
            check(
                False,
                f"{requirement} given in every row",
                got=f"None in row {found.missing[0]} ({counted(n_missing, 'such row')})",
                way_out="label these rows, drop them, or give -100 to ignore them",
            )
        has_transform = dataset.format["type"] == "custom"
        if len(found.values) == 0 or has_transform:
            return
        first = found.values[0]
        check(
            not isinstance(first, str),
            f"{requirement} class indices",
            got=f"{first!r} in row {found.rows[0]}",
            way_out="number them: dataset.class_encode_column('label'), the same names in each split",
        )
        is_number = found.values.dtype.kind in "iuf"
        if not is_number:
            return
        if self.problem.answers is not None:
            self.problem.answers.check(found, role)
        elif self.collator_is_stock:
            self._check_range(found, role)

    def _check_range(self, found: Labels, role: str) -> None:
        """Raise for the first label that is out of range."""
        multi_label = self.problem.multi_label
        if multi_label is None:  # The first batch would decide like this.
            multi_label = found.values.dtype.kind == "f"
        if not multi_label:
            n_classes = self.problem.n_classes
            fits = found.values >= 0
            if n_classes:
                fits &= found.values < n_classes
            requirement = f"in [0, {n_classes})"
            way_out = "set num_labels when the model is loaded, or relabel"
        elif role == "calibration":  # Calibrator and gammas are fitted to decisions.
            fits = np.isin(found.values, (0, 1))
            requirement = "0 or 1"
            way_out = _DECISIONS
        else:
            fits = (found.values >= 0) & (found.values <= 1)
            requirement = "in [0, 1]"
            way_out = _DECISIONS
        is_wrong: NDArray[np.bool_] = ~fits & (found.values != IGNORE_INDEX)
        if is_wrong.any():
            rows = found.rows[is_wrong]
            n_rows = len(np.unique(rows))
            check(
                False,
                f"labels of the {role} split to be {requirement}",
                got=f"{found.values[is_wrong][0]} in row {rows[0]} ({counted(n_rows, 'such row')})",
                way_out=way_out,
            )


def check_decisions(labels: Tensor) -> None:
    """Raise for multi-label targets outside [0, 1] in a batch."""
    in_range = (labels >= 0) & (labels <= 1)  # This is False for NaN.
    is_right = in_range | (labels == IGNORE_INDEX)
    requirement = "multi-label labels to be in [0, 1]"
    if not labels.is_cpu:  # This does not wait for the device.
        torch._assert_async(is_right.all(), f"expected {requirement}; {_DECISIONS}")
    elif not is_right.all():
        check(False, requirement, got=labels[~is_right][0].item(), way_out=_DECISIONS)


# ---- Roles of the splits ----


def check_gammas_have_rows(loss_name: str, splits: Splits) -> None:
    """Raise if an adaptive loss has no held-out rows."""
    check(
        splits.held_out is not None,
        f"calibration_dataset to be given for loss {loss_name!r}, whose gammas follow held-out predictions",
        got="several evaluation sets"
        if isinstance(splits.evaluation, dict)
        else "none",
        way_out="pass calibration_dataset",
    )


def warn_of_roles(splits: Splits, fitted: str) -> None:
    """Warn if a split has two roles, or if no split is given for what is fitted."""
    what = fitted[0].upper() + fitted[1:]
    hold_out = "Hold some examples out as calibration_dataset."
    calibration = splits.held_out
    is_reported = [calibration is split for split in splits.evaluation_sets]
    trains_on_reported = [splits.train is split for split in splits.evaluation_sets]
    if calibration is None:
        found = (
            "several evaluation sets"
            if isinstance(splits.evaluation, dict)
            else "no evaluation set either"
        )
        text = (
            f"There is no calibration_dataset, and {found}. {what} will not be fitted, so probabilities will not be "
            "calibrated. Pass calibration_dataset, or set calibration_method='none'."
        )
    elif calibration is splits.train:
        text = (
            f"The training split is also the calibration split. {what} will follow a model that has seen these "
            f"examples, and the result will be over-confident. {hold_out}"
        )
    elif any(is_reported):
        text = (
            f"The evaluation split is also the calibration split. {what} will follow the examples that are reported, "
            f"so the reported calibration is optimistic. {hold_out}"
        )
    elif splits.train is not None and any(trains_on_reported):
        text = (
            "The training split is also the evaluation split. The reported metrics are of examples that the model has "
            "seen, and are optimistic. Hold some examples out as eval_dataset."
        )
    else:
        return
    warnings.warn(text, stacklevel=5)


def warn_of_split_batches(loss: CalibrationLoss, args: Any, *, gathers: bool) -> None:
    """Warn of a penalty on the batch that will be computed on parts of it; `args` are the Trainer's."""
    batch_size = args.train_batch_size
    n_together = batch_size * args.world_size if gathers else batch_size
    n_of_a_step = batch_size * args.world_size * args.gradient_accumulation_steps
    if loss.couples_batch and n_together < n_of_a_step:
        warnings.warn(
            f"The penalty of loss {loss.name!r} depends on the batch, and is computed on micro-batches of {n_together} "
            f"of the {n_of_a_step} examples of an optimizer step. Results depend on this division. Use larger "
            "micro-batches, or gather_batch=True on several processes.",
            stacklevel=5,
        )
