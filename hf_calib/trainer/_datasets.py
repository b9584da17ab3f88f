"""Checks of the trainer's data sets that cost nothing beside a training that fails late."""

from __future__ import annotations

import warnings
from typing import Any

import datasets
import numpy as np
import torch

from hf_calib._errors import InputTypeError, InputValueError, expected


def check_calibration_split(dataset: Any, n_samples: int | None) -> None:
    """Refuse an empty calibration split, and one without a length where a subset is asked for.

    Raises:
        TypeError, ValueError: saying what to pass.
    """
    if dataset is not None and not hasattr(dataset, "__len__"):
        if n_samples is not None:
            got, way_out = type(dataset).__name__, "leave gamma_update_samples out"
            raise InputTypeError(expected("calibration_dataset", "have a length", got, way_out))
    elif dataset is not None and len(dataset) == 0:
        way_out = "hold some examples out, or leave calibration_dataset out"
        raise InputValueError(expected("the calibration split", "have examples", "none", way_out))


def check_labels(dataset: Any, role: str, n_classes: int, label_key: str) -> None:
    """Refuse class indices outside [0, n_classes), where the data set can tell without loading its rows.

    Raises:
        ValueError: naming the split, the label and its row.
    """
    columns = getattr(dataset, "column_names", None) if isinstance(dataset, datasets.Dataset) else None
    column = next((name for name in (label_key, "label", "label_ids") if name in (columns or [])), None)
    if column is None:
        return
    labels, rows = _flat_labels(dataset, column)
    if labels.dtype.kind not in "iu":
        return
    wrong = np.flatnonzero(((labels < 0) & (labels != -100)) | (labels >= n_classes))
    if len(wrong):
        n_rows = len(np.unique(rows[wrong]))
        got = f"{labels[wrong[0]]} in row {rows[wrong[0]]} ({n_rows} such rows)"
        way_out = "set num_labels when the model is loaded, or relabel"
        raise InputValueError(
            expected(f"labels of the {role} split", f"be in [0, {n_classes})", got, way_out)
        )


def _flat_labels(dataset: datasets.Dataset, column: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The labels of a column of numbers, or of lists of them (one per token), and the row of each."""
    values = dataset.with_format("arrow")[column][:].combine_chunks()
    rows = np.arange(len(values))
    while hasattr(values, "value_parent_indices"):  # lists
        rows = rows[values.value_parent_indices().to_numpy()]
        values = values.flatten()
    return values.to_numpy(zero_copy_only=False), rows


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
            f"the training split is also the calibration split: {what} will follow a model that has seen these "
            "examples, and come out over-confident; hold some examples out as calibration_dataset"
        )
    elif calibration is not None and any(calibration is split for split in reported):
        message = (
            f"the evaluation split is also the calibration split: {what} will follow the examples that are "
            "reported, so the reported calibration is optimistic; pass a separate calibration_dataset"
        )
    elif train is not None and any(train is split for split in reported):
        message = (
            "the training split is also the evaluation split: what is reported is for examples that the model "
            "has seen, and is optimistic; hold some examples out as eval_dataset"
        )
    if message is not None:
        warnings.warn(message, stacklevel=4)


def random_subset(dataset: Any, size: int, seed: int) -> Any:
    """The same random examples each time, in random order; all of them if there are no more."""
    if size >= len(dataset):
        return dataset
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randperm(len(dataset), generator=generator)[:size].tolist()
    if hasattr(dataset, "select"):
        return dataset.select(indices)
    return torch.utils.data.Subset(dataset, indices)
