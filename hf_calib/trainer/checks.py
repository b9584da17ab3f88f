"""Checks before training: errors for data that would fail later, and warnings of misleading
metrics.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
from accelerate.utils import gather_object
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from hf_calib._errors import check, did_you_mean, few
from hf_calib._text import as_number, counted
from hf_calib.language_models.label_tokens import is_causal, without_adapters
from hf_calib.losses import CalibrationLoss
from hf_calib.losses.adaptive import GapTableLoss
from hf_calib.losses.statistics.definitions import IGNORE_INDEX
from hf_calib.losses.statistics.soft_labels import are_valid, look_soft
from hf_calib.metrics.checks import check_type
from hf_calib.metrics.state import LOGGED_METRICS, is_turned_around, lower_is_better
from hf_calib.trainer.first_rows import FirstRows, has_rows, is_multi_label
from hf_calib.trainer.labels import (
    Labels,
    Problem,
    first_missing,
    label_columns,
    read_labels,
)

_CALIBRATED = "_calibrated"
_ADD_METRICS = {"evaluate", "evaluation_loop", "on_evaluate"}
_OF_THE_TRAINER = (
    "eval_loss",
    "eval_runtime",
    "eval_samples_per_second",
    "eval_steps_per_second",
)


class Splits(NamedTuple):
    """The datasets of a trainer by their role."""

    train: Any
    calibration: Any
    evaluation: Any  # One dataset, several by name, or None.

    @property
    def held_out(self) -> Any:
        """The rows for gammas and calibrator: those given, a single evaluation set, or None."""
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
    plain = without_adapters(model)
    inputs = inspect.signature(plain.forward).parameters
    check(
        "start_positions" not in inputs,
        "the model to be a classifier or a causal language model",
        got=f"{type(model).__name__}, which answers with the start and end of a span",
        way_out="use transformers.Trainer",
    )
    generates = getattr(plain, "can_generate", bool)()
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
        way_out="load it with num_labels=2; for one sigmoid with "
        "problem_type='multi_label_classification'",
    )


def check_number_of_weights(loss: CalibrationLoss, n_classes: int | None) -> None:
    """Raise unless there is a weight for each class, or for each label that applies, if their
    number is known.
    """
    if n_classes is None:
        return
    for argument, weights in (
        ("class_weights", loss.class_weights),
        ("pos_weight", loss.pos_weight),
    ):
        n_weights = n_classes if weights is None else len(weights)
        is_of_all = argument == "pos_weight" and n_weights == 1
        check(
            n_weights == n_classes or is_of_all,
            f"{argument} to have one entry for each of the {n_classes} classes",
            got=n_weights,
            way_out="give them in the order of the model's labels",
        )


def check_smoothing_is_read(args: Any, config: Any) -> None:
    """Raise for the Trainer's label smoothing with a separate configuration, which has its own."""
    smoothing = args.label_smoothing_factor
    check(
        smoothing == 0 or config is args,
        "label_smoothing_factor to be 0 with calibration=CalibrationConfig(...)",
        got=smoothing,
        way_out=f"use loss='label_smoothing', loss_kwargs={{'smoothing': {smoothing}}} there",
    )


def check_not_rounded(model: nn.Module, trained_in: set[torch.dtype] | None) -> None:
    """Raise for 16-bit weights that were trained in other dtypes, because a saved copy would be of
    rounded numbers.
    """
    for name, parameter in model.named_parameters():
        is_narrow = parameter.dtype in (torch.bfloat16, torch.float16)
        check(
            not is_narrow or trained_in is None or parameter.dtype in trained_in,
            "model to have float32 or float64 weights",
            got=f"{parameter.dtype} in {name}, which was trained in "
            f"{few(sorted(map(str, trained_in or ())))}",
            way_out="load the weights of a checkpoint, since those of the model are rounded",
        )


# ---- Metrics by name ----


class LoggedMetrics(NamedTuple):
    """The metrics that each evaluation of a run has, as far as they are known."""

    evaluation: Any  # One dataset, several by name, or None.
    has_calibrated: bool  # A calibrator is fitted before each evaluation.
    has_others: bool  # A user computes further metrics, whose names are not known.

    def check(
        self, name: str, argument: str, wanted: str = "a metric of each evaluation"
    ) -> None:
        """Raise for a log key, such as "eval_nll", that no evaluation will have."""
        metric = name
        if isinstance(self.evaluation, dict) and self.evaluation:
            evaluated, rest = self.parts(name)
            first = next(iter(self.evaluation))
            check(
                evaluated is not None,
                f"{argument} to begin with the name of an evaluation set "
                f"({few(list(self.evaluation))})",
                got=repr(name),
                way_out=f"set it to 'eval_{first}_{rest}', for example",
            )
            metric = f"eval_{rest}"
        known = [f"eval_{key}" for key in LOGGED_METRICS]
        calibrated = [f"{key}{_CALIBRATED}" for key in known]
        check(
            metric in (*known, *calibrated, *_OF_THE_TRAINER) or self.has_others,
            f"{argument} to be {wanted}",
            got=repr(name),
            way_out=did_you_mean(metric, [*known, *calibrated]),
        )
        check(
            metric not in calibrated or self.has_calibrated,
            f"{argument} to be {wanted}",
            got=f"{name!r}, which is computed after the training only, if there is a calibrator",
            way_out="set calibration_strategy='evaluate', or "
            f"{argument}={name.removesuffix(_CALIBRATED)!r}",
        )

    def labelled_for(self, name: str) -> Any:
        """The evaluation rows whose labels one of these metrics is of; None for other log keys."""
        evaluated, metric = self.parts(name)
        rows = self.evaluation
        if isinstance(rows, dict):
            rows = rows.get(evaluated)
        is_ours = metric.removesuffix(_CALIBRATED) in (*LOGGED_METRICS, "loss")
        return rows if is_ours else None

    def parts(self, name: str) -> tuple[str | None, str]:
        """The evaluation set that a log key begins with, if it is one of several, and the metric."""
        sets = []
        if isinstance(self.evaluation, dict):
            sets = [key for key in self.evaluation if name.startswith(f"eval_{key}_")]
        evaluated = max(sets, key=len, default=None)
        metric = name.removeprefix("eval_").removeprefix(f"{evaluated}_")
        return evaluated, metric


def add_metrics(kinds: Iterable[type]) -> bool:
    """Whether a trainer or callback of one of these classes may add metrics, whose names are not
    known.
    """
    for each in kinds:
        for kind in each.__mro__:
            is_stock = kind.__module__.startswith(("hf_calib.", "transformers."))
            if not is_stock and _ADD_METRICS & vars(kind).keys():
                return True
    return False


class Objective(NamedTuple):
    """The objective of a hyperparameter search that is a metric's name."""

    name: str

    def __call__(self, metrics: Mapping[str, float]) -> float:
        check(
            self.name in metrics,
            "compute_objective to be a function of an evaluation's metrics, or the name of one",
            got=repr(self.name),
            way_out=f"the evaluation has {few(sorted(metrics))}",
        )
        return metrics[self.name]


def check_direction(name: str, trial: Any) -> None:
    """Raise for a search in which the metric gets worse, if its backend tells; that of a user's
    metric is not known.
    """
    study = getattr(trial, "study", None)  # Optuna's; the others have none.
    is_accuracy = re.search(rf"_accuracy({_CALIBRATED})?$", name) is not None
    is_known = is_accuracy or name.endswith("_loss") or lower_is_better(name)
    is_known = is_known and not is_turned_around(name)
    if study is None or not is_known:
        return
    right = "maximize" if is_accuracy else "minimize"
    asked = [direction.name.lower() for direction in study.directions]
    check(
        asked == [right],
        f"direction to be {right!r} for {name}",
        got=few([repr(each) for each in asked]),
        way_out="pass a function of the metrics as compute_objective for another aim",
    )


# ---- Labels ----


def has_transform(dataset: Any) -> bool:
    """Whether rows of a `datasets.Dataset` are changed when they are read."""
    is_table = isinstance(dataset, datasets.Dataset)
    return is_table and dataset.format["type"] == "custom"


def names_of_classes(dataset: Any, label_key: str) -> list[str]:
    """The names by which the label column of a dataset numbers its classes; none if a transform may
    change them.
    """
    is_known = isinstance(dataset, (datasets.Dataset, datasets.IterableDataset))
    if not is_known or has_transform(dataset):
        return []
    features = dataset.features or {}
    columns = (name for name in label_columns(label_key) if name in features)
    feature: Any = features.get(next(columns, ""))
    while hasattr(feature, "feature"):  # Lists have one label per token.
        feature = feature.feature
    return list(getattr(feature, "names", []))


def _comparable(name: str) -> str | Decimal:
    """A class name as it is compared: in lower case, or a number."""
    number = as_number(str(name))
    return str(name).casefold() if number is None else number


class Split(NamedTuple):
    """A dataset whose labels are checked."""

    dataset: Any
    role: str
    # A user's collator or the transform of a dataset may change the labels later.
    is_stock: bool


class LabelCheck(NamedTuple):
    """What the labels of all splits have to fit."""

    problem: Problem
    class_names: Sequence[str]
    names_of_splits: Sequence[str]  # Of the first split that names its classes.
    first_rows: FirstRows  # Labels as they arrive.
    collator_is_stock: bool

    def check(self, dataset: Any, role: str) -> None:
        """Raise for labels that are missing, names or out of range, if the dataset has a label
        column.
        """
        may_change = has_transform(dataset)
        split = Split(dataset, role, self.collator_is_stock and not may_change)
        if split.is_stock and self.problem.answers is None:
            self._check_order(split)
        found = read_labels(dataset, self.first_rows.label_key)
        if found is None:
            return
        found.check_given(role)
        if len(found.values) == 0:
            return
        # Of a calibration split this matters only if something is fitted to it.
        if split.is_stock and role != "calibration":
            found.check_not_ignored(role, "check its label column")
        first = found.values[0]
        check(
            may_change or not isinstance(first, str),
            f"labels of the {role} split to be class indices",
            got=f"{str(first)!r} in row {found.rows[0]}",
            way_out="number them alike in all splits: dataset.cast_column('label', "
            "ClassLabel(names=[...])), with the model's names in their order",
        )
        if found.values.dtype.kind not in "iuf":
            return
        if self.problem.reads_soft_labels and found.are_lists_of_floats:
            self._check_shares(found, split)
        elif self.problem.answers is None:
            if self.problem.multi_label is None and found.are_lists_of_floats:
                self._check_kind_is_known(found, role)
            self._check_range(found, split)
        elif not may_change:
            self.problem.answers.check(found, role)

    def _check_order(self, split: Split) -> None:
        """Raise for a column that numbers the classes in another way than the model, or than the
        first split.
        """
        names = names_of_classes(split.dataset, self.first_rows.label_key)
        here = [_comparable(name) for name in names]
        of_model = [_comparable(name) for name in self.class_names]
        places = {name: index for index, name in enumerate(of_model)}
        check(
            all(places.get(name, index) == index for index, name in enumerate(here)),
            f"the classes of the {split.role} split to be in the model's order "
            f"({few(self.class_names)})",
            got=few(names),
            way_out="call dataset.align_labels_with_mapping(model.config.label2id, column)",
        )
        # The model may have no names of its own, such as LABEL_0.
        first = [_comparable(name) for name in self.names_of_splits]
        n_shared = min(len(here), len(first))
        check(
            here[:n_shared] == first[:n_shared] or set(here).isdisjoint(first),
            f"the classes of the {split.role} split to be numbered as in the other splits "
            f"({few(self.names_of_splits)})",
            got=few(names),
            way_out="call dataset.align_labels_with_mapping({name: index}, column) with the same "
            "numbers for each split, or encode all splits together",
        )

    def _check_range(self, found: Labels, split: Split) -> None:
        """Raise for the first label that is out of range, unless its row arrives with others."""
        is_of_fit = split.role == "calibration"
        fits = self._fits(found.values, is_of_fit=is_of_fit)
        if fits.all():
            return
        requirement = f"in [0, {self.problem.n_classes})"
        way_out = "set num_labels when the model is loaded, or relabel"
        if self._is_multi_label(found.values):
            requirement = "0 or 1" if is_of_fit else "in [0, 1]"
            way_out = "give 0 or 1 per class, or -100 to ignore a decision"

        def arrives_right(labels: Tensor) -> bool:
            return bool(self._fits(labels.numpy(), is_of_fit=is_of_fit).all())

        wrong = Wrong(found.rows[~fits], str(found.values[~fits][0]), arrives_right)
        self._refuse(wrong, split, requirement, way_out)

    def _check_kind_is_known(self, found: Labels, role: str) -> None:
        """Raise for rows of fractions that sum to 1, because the problem type does not say what
        they are.
        """
        rows, n_values = found.row_sizes
        if len(np.unique(n_values)) > 1:
            return
        labels = torch.tensor(found.values).reshape(len(rows), -1)
        _, are_soft = look_soft(labels)
        check(
            not are_soft,
            f"labels of the {role} split to be class indices, or one float per class",
            got="rows that sum to 1",
            way_out="set the model's problem_type to 'single_label_classification' for soft labels "
            "of one softmax, or to 'multi_label_classification' for a sigmoid per class",
        )

    def _check_shares(self, found: Labels, split: Split) -> None:
        """Raise for the first row of soft labels that is not one share for each class, unless it
        arrives as such.
        """
        rows, n_values = found.row_sizes
        n_classes = self.problem.n_classes or int(n_values[0])
        fits = n_values == n_classes
        requirement = f"one share for each of the {n_classes} classes"
        if fits.all():
            fits = _are_soft_labels(torch.tensor(found.values), n_classes)
            requirement = "shares of at least 0 whose rows sum to 1"
        if fits.all():
            return

        def arrives_right(labels: Tensor) -> bool:
            if not labels.is_floating_point():
                return True
            return bool(_are_soft_labels(labels, n_classes).all())

        wrong_rows = rows[~fits]
        own = found.values[found.rows == wrong_rows[0]]
        wrong = Wrong(wrong_rows, few(own.tolist()), arrives_right)
        way_out = (
            "divide each row by its sum, and give -100 for every class to ignore it; for several "
            "labels per row set the model's problem_type to 'multi_label_classification'"
        )
        self._refuse(wrong, split, requirement, way_out)

    def _refuse(
        self, wrong: Wrong, split: Split, requirement: str, way_out: str
    ) -> None:
        """Raise for the first of some rows, unless its labels arrive right, or may do so after a
        user's code.
        """
        row = int(wrong.rows[0])
        arriving = self.first_rows.labels(split.dataset, split.role, [row])
        may_be_right = not split.is_stock
        if arriving:
            may_be_right = wrong.arrives_right(arriving[0])
        n_rows = len(np.unique(wrong.rows))
        check(
            may_be_right,
            f"labels of the {split.role} split to be {requirement}",
            got=f"{wrong.shown} in row {row} ({counted(n_rows, 'such row')})",
            way_out=way_out,
        )

    def _is_multi_label(self, values: NDArray[Any]) -> bool:
        if self.problem.multi_label is None:  # The first batch would decide like this.
            return values.dtype.kind == "f"
        return self.problem.multi_label

    def _fits(self, values: NDArray[Any], *, is_of_fit: bool) -> NDArray[np.bool_]:
        """Whether each label is in range or ignored; what is fitted is fitted to decisions."""
        if not self._is_multi_label(values):
            n_classes = self.problem.n_classes or np.inf
            fits = (values >= 0) & (values < n_classes)
        elif is_of_fit:
            fits = np.isin(values, (0, 1))
        else:
            fits = (values >= 0) & (values <= 1)
        return fits | (values == IGNORE_INDEX)


class Wrong(NamedTuple):
    """Rows whose labels are wrong in their dataset."""

    rows: NDArray[np.int64]
    shown: str  # The labels of the first one.
    arrives_right: Callable[[Tensor], bool]  # Whether these labels of it are right.


def _are_soft_labels(labels: Tensor, n_classes: int) -> NDArray[np.bool_]:
    """Whether each row of labels, (N, C) or flat, is ignored or shares of the classes."""
    if labels.numel() % n_classes != 0:
        return np.zeros(1, dtype=bool)
    return are_valid(labels.reshape(-1, n_classes)).numpy()


def check_kind(
    batch: Any,
    role: str,
    label_key: str,
    multi_label: bool | None,
    loss: CalibrationLoss,
) -> None:
    """Raise for a batch whose labels are of another kind than the problem, or are soft and of no
    use for the loss.
    """
    are_floats = is_multi_label(batch, label_key)
    if are_floats is None or multi_label is None or are_floats == multi_label:
        return
    if loss.reads_soft_labels:
        loss.check_takes_soft_labels()
        return
    convert = "convert them, or set the model's problem_type to"
    check(
        are_floats,
        f"labels of the {role} split to be one float per class, for a multi-label model",
        got="integers",
        way_out=f"{convert} 'single_label_classification'",
    )
    check(
        not are_floats,
        f"labels of the {role} split to be class indices, for a single-label model",
        got="one float per class",
        way_out=f"{convert} 'multi_label_classification', or for soft labels to "
        "'single_label_classification'",
    )


def check_has_labels(
    batch: Mapping[str, Any] | None, role: str, label_key: str, metric: str
) -> None:
    """Raise for evaluation rows without the labels of the metric that selects the best model."""
    check(
        batch is None or batch.get(label_key) is not None,
        f"the {role} split to have labels for metric_for_best_model",
        got=f"{metric!r}, and batches of {few(sorted(batch or ()))}",
        way_out="check its label column, or leave metric_for_best_model out",
    )


def check_inputs(dataset: Any, role: str, inputs: Collection[str]) -> None:
    """Raise for a row without a value in an input column of the model, if the dataset has its rows
    in memory.
    """
    for name in inputs:
        row = first_missing(dataset, name)
        check(
            row is None,
            f"the {role} split to have a value for {name!r} in every row",
            got=f"None in row {row}",
            way_out="drop these rows, or fill them in",
        )


def check_calibration_split(
    dataset: Any, batch: Any, label_key: str, n_samples: int | None
) -> None:
    """Raise for held-out rows that gammas and calibrator cannot be fitted to; `batch` has the first
    ones.
    """
    check_type(
        n_samples is None or has_rows(dataset),
        "calibration_dataset to have rows by their index for gamma_update_samples",
        got=f"{type(dataset).__name__}, which has no length",
        way_out="leave gamma_update_samples out",
    )
    check(
        not hasattr(dataset, "__len__") or len(dataset) > 0,
        "the calibration split to have examples",
        got="none",
        way_out="hold some examples out, or leave calibration_dataset out",
    )
    way_out = "check its label column, or set calibration_method='none'"
    check(
        batch is None or batch.get(label_key) is not None,
        "the calibration split to have labels",
        got=f"batches of {few(sorted(batch or ()))}",
        way_out=way_out,
    )
    found = read_labels(dataset, label_key)
    if found is not None:
        found.check_not_ignored("calibration", way_out)


# ---- Roles of the splits ----


def check_is_dataset(dataset: Any) -> None:
    """Raise for held-out rows that are no dataset, such as a generator, which has its rows only
    once.
    """
    is_stream = isinstance(dataset, (IterableDataset, datasets.IterableDataset))
    is_other = isinstance(dataset, (str, bytes, Mapping))
    check_type(
        is_stream or (has_rows(dataset) and not is_other),
        "calibration_dataset to be one dataset, with rows by their index or a stream",
        got=type(dataset).__name__,
        way_out="pass a datasets.Dataset, or a list of rows",
    )


def check_given_everywhere(splits: Splits) -> None:
    """Raise for held-out rows that some of several processes do not have, before these wait for one
    another.
    """
    for name, dataset in (
        ("calibration_dataset", splits.calibration),
        ("eval_dataset", splits.evaluation),
    ):
        is_given = gather_object([dataset is not None])
        without = [rank for rank, given in enumerate(is_given) if not given]
        check(
            len(without) in (0, len(is_given)),
            f"{name} to be given on every process, or on none",
            got=f"none on {few(without)} of {len(is_given)} processes, counted from 0",
            way_out="pass all rows on each, as the Trainer splits them",
        )


def check_gammas_have_rows(loss_name: str, splits: Splits) -> None:
    """Raise if an adaptive loss has no held-out rows."""
    check(
        splits.held_out is not None,
        f"calibration_dataset to be given for loss {loss_name!r}, whose gammas follow held-out "
        "predictions",
        got="several evaluation sets"
        if isinstance(splits.evaluation, dict)
        else "none",
        way_out="pass calibration_dataset",
    )


def warn_of_roles(splits: Splits, fitted: str) -> None:
    """Warn if a split has two roles, or if no split is given for what is fitted."""
    what = fitted[0].upper() + fitted[1:]
    held_out = splits.held_out
    hold_out = "Hold some examples out as calibration_dataset."
    instead = "no evaluation set either"
    if isinstance(splits.evaluation, dict):
        instead = "several evaluation sets"
    reported = [rows for rows in splits.evaluation_sets if rows is not None]
    warned_of = [
        (
            held_out is None,
            f"There is no calibration_dataset, and {instead}. {what} will not be fitted, so "
            "probabilities will not be calibrated. Pass calibration_dataset, or set "
            "calibration_method='none'.",
        ),
        (
            held_out is splits.train,
            f"The training split is also the calibration split. {what} will follow a model that "
            f"has seen these examples, and the result will be over-confident. {hold_out}",
        ),
        (
            any(held_out is rows for rows in reported),
            f"The evaluation split is also the calibration split. {what} will follow the examples "
            f"that are reported, so the reported calibration is optimistic. {hold_out}",
        ),
        (
            any(splits.train is rows for rows in reported),
            "The training split is also the evaluation split. The reported metrics are of examples "
            "that the model has seen, and are optimistic. Hold some examples out as eval_dataset.",
        ),
    ]
    texts = [text for holds, text in warned_of if holds]
    if texts:
        warnings.warn(texts[0], stacklevel=5)


def warn_of_fits_at_evaluations(
    strategy: str, *, has_evaluations: bool, has_calibrator: bool
) -> None:
    """Warn of a calibrator to be fitted before each evaluation, if there is none of them."""
    if strategy != "evaluate" or (has_calibrator and has_evaluations):
        return
    reason = "there is no calibrator"
    if has_calibrator:
        reason = "there is no evaluation during training, with eval_strategy='no'"
    warnings.warn(
        f"calibration_strategy='evaluate' has no effect: {reason}. Leave it out.",
        stacklevel=5,
    )


def warn_of_split_batches(loss: CalibrationLoss, args: Any, *, gathers: bool) -> None:
    """Warn of a penalty on the batch that will be computed on parts of it; `args` are the
    Trainer's.
    """
    batch_size = args.train_batch_size
    n_together = batch_size * args.world_size if gathers else batch_size
    n_of_a_step = batch_size * args.world_size * args.gradient_accumulation_steps
    if gathers and (not loss.couples_batch or args.world_size == 1):
        reason = "the training has one process"
        if not loss.couples_batch:
            reason = f"loss {loss.name!r} has no penalty that couples the batch"
        warnings.warn(
            f"gather_batch=True has no effect: {reason}. Leave it out.", stacklevel=5
        )
    # The weights of ECE-CE depend on the order of a batch, which is not gathered.
    has_ranks = isinstance(loss, GapTableLoss)
    if has_ranks and batch_size < n_of_a_step:
        warnings.warn(
            f"The weights of loss {loss.name!r} depend on the batch, and are computed on "
            f"micro-batches of {batch_size} of the {n_of_a_step} examples of an optimizer step. "
            "Results depend on this division. Use larger micro-batches.",
            stacklevel=5,
        )
    if loss.couples_batch and n_together < n_of_a_step:
        warnings.warn(
            f"The penalty of loss {loss.name!r} depends on the batch, and is computed on "
            f"micro-batches of {n_together} of the {n_of_a_step} examples of an optimizer step. "
            "Results depend on this division. Use larger micro-batches, or gather_batch=True on "
            "several processes.",
            stacklevel=5,
        )
