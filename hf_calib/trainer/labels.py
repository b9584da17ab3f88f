"""Labels of the trainer's datasets: reading them without loading rows, and what they say about the problem."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import datasets
import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import IterableDataset

from hf_calib._errors import InputValueError, expected, few
from hf_calib.losses.statistics.definitions import IGNORE_INDEX
from hf_calib.trainer.random_state import random_state_left_as_found


class Labels(NamedTuple):
    """The labels of a split, flattened."""

    values: NDArray[Any]
    rows: NDArray[np.int64]  # the row of each value
    missing: NDArray[np.int64]  # rows where a label is None


def read_labels(dataset: Any, label_key: str) -> Labels | None:
    """Read the labels of a `datasets.Dataset` from its column, or of a list of rows; None for other datasets."""
    if isinstance(dataset, datasets.Dataset):
        column = _label_name(dataset.column_names, label_key)
        return None if column is None else _labels_of_column(dataset, column)
    if isinstance(dataset, list | tuple) and dataset and all(isinstance(row, Mapping) for row in dataset):
        name = _label_name(dataset[0], label_key)
        return None if name is None else _labels_of_rows([row.get(name) for row in dataset])
    return None


def has_rows(dataset: Any) -> bool:
    """Whether rows can be read by their index. A stream may have a length, and inherits `__getitem__`."""
    if isinstance(dataset, IterableDataset):
        return False
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def collated_labels(
    dataset: Any,
    role: str,
    collator: Callable[[list[Any]], Any],
    label_key: str,
    *,
    batch_size: int,
    row: int | None = None,
) -> Tensor | None:
    """The labels of a row, or the first ones, as the model's batches will have them; None where this cannot be told.

    Collators and transforms convert: `default_data_collator` makes floats of a list of integers in a column `label`.
    At batch size 1 one row is collated, since rows need not fit together then.

    Raises:
        ValueError: if the rows cannot be made a batch.
    """
    if not (has_rows(dataset) and len(dataset)):
        return None
    rows = range(min(2, batch_size, len(dataset))) if row is None else [row]
    with random_state_left_as_found():  # reading a row may augment it
        try:
            batch = collator([dataset[index] for index in rows])
        except Exception as error:
            what = "the first rows" if row is None else f"row {row}"
            got, way_out = f"{type(error).__name__}: {error}", "check its rows and the data collator"
            raise InputValueError(
                expected(f"{what} of the {role} split", "be made a batch", got, way_out)
            ) from error
    labels = batch.get(label_key)
    return labels if isinstance(labels, Tensor) else None


def balanced_class_weights(
    dataset: Any,
    label_key: str,
    *,
    n_classes: int | None,
    multi_label: bool,
    collated: Callable[[int], Tensor | None],
) -> list[float]:
    """Weights N / (C n_c), which give every class the same share of the loss.

    Args:
        dataset: the training split.
        label_key: name of the labels.
        n_classes: C, or None.
        multi_label: what the problem is.
        collated: gives the labels of a row as the model's batches will have them; None where this is not known.

    Raises:
        ValueError: if the labels cannot be read, are changed before the model sees them, are multi-label, or
            lack a class.
    """
    found = read_labels(dataset, label_key)
    way_out = "give one number per class"
    if multi_label or found is None or found.values.dtype.kind not in "iu":
        requirement = "be given as numbers where the training split has no column of class indices"
        raise InputValueError(expected("class_weights", requirement, "'balanced'", way_out))
    counted = found.values[found.values >= 0]
    for row in sorted({int(found.rows[i]) for i in np.unique(found.values, return_index=True)[1]}):
        arriving = collated(row)
        if arriving is not None and set(arriving.flatten().tolist()) - {IGNORE_INDEX} != _classes(found, row):
            requirement = "be given as numbers where a transform or collator changes the labels"
            got = f"'balanced', and a row {row} that arrives as {arriving.flatten().tolist()}"
            raise InputValueError(expected("class_weights", requirement, got, way_out))
    counts = np.bincount(counted, minlength=n_classes or 0)
    if n_classes is not None and len(counts) > n_classes:
        got = f"label {len(counts) - 1} in the training split"
        requirement = f"be 'balanced' over labels in [0, {n_classes})"
        raise InputValueError(expected("class_weights", requirement, got, "relabel, or set num_labels"))
    absent = np.flatnonzero(counts == 0)
    if len(absent) or len(counts) == 0:
        got = f"no examples of class {few(absent.tolist())}" if len(absent) else "no labels"
        requirement = "be 'balanced' over classes that the training split has"
        raise InputValueError(expected("class_weights", requirement, got, way_out))
    return (len(counted) / (len(counts) * counts)).tolist()


def _classes(found: Labels, row: int) -> set[int]:
    start, end = np.searchsorted(found.rows, (row, row + 1))  # the values come row by row
    return set(found.values[start:end].tolist()) - {IGNORE_INDEX}


def predicts_next_token(model: Any) -> bool:
    """Whether the model is a decoder-only language model: its logits at position t are for token t + 1."""
    model = _without_adapters(model)
    return _generates(model) and not getattr(model.config, "is_encoder_decoder", False)


def generates_by_encoder_and_decoder(model: Any) -> bool:
    """Whether the model is a sequence-to-sequence generator (not a classifier on top of one)."""
    model = _without_adapters(model)
    return _generates(model) and bool(getattr(model.config, "is_encoder_decoder", False))


def number_of_classes(model: Any) -> int | None:
    """The model's number of labels, for a language model the size of its vocabulary; None if it does not say.

    A model for multiple choice does not: its classes are the choices of each question, and `num_labels` is not theirs.
    """
    model = _without_adapters(model)
    if type(model).__name__.endswith("ForMultipleChoice"):
        return None
    if _generates(model) or type(model).__name__.endswith("ForMaskedLM"):
        return getattr(model.config.get_text_config(), "vocab_size", None)
    return getattr(getattr(model, "config", None), "num_labels", None)


def aligned_labels(labels: Tensor, *, next_token: bool) -> Tensor:
    """The labels, each at the position of the logits that it belongs to.

    Args:
        labels: (N,), (N, 1), (N, L), or float (N, C).
        next_token: shift by one position, as transformers does for causal language models; the last position
            is then ignored.

    >>> import torch
    >>> aligned_labels(torch.tensor([[5, 6, 7]]), next_token=True)
    tensor([[   6,    7, -100]])
    >>> aligned_labels(torch.tensor([[5], [6]]), next_token=False)
    tensor([5, 6])
    """
    if next_token and labels.dim() > 1:
        return pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:]
    one_column = labels.dim() == 2 and labels.shape[1] == 1 and not labels.is_floating_point()
    return labels.squeeze(1) if one_column else labels


def check_decisions(labels: Tensor) -> None:
    """Refuse multi-label targets outside [0, 1].

    Raises:
        ValueError: naming a value.
    """
    wrong = ~((labels >= 0) & (labels <= 1)) & (labels != IGNORE_INDEX)  # NaN compares as neither
    if bool(wrong.any()):
        got, way_out = labels[wrong][0].item(), "give 0 or 1 per class, or -100 to ignore a decision"
        raise InputValueError(expected("multi-label labels", "be in [0, 1]", got, way_out))


def _label_name(names: Iterable[str], label_key: str) -> str | None:
    """The name that the collator would take, as `default_data_collator` renames `label` and `label_ids`."""
    return next((name for name in (label_key, "label", "label_ids") if name in names), None)


def _labels_of_column(dataset: datasets.Dataset, column: str) -> Labels:
    """Of a column of numbers, or of lists of them (one per token or class)."""
    values = dataset.with_format("arrow")[column][:].combine_chunks()
    rows = np.arange(len(values))
    missing = []
    while True:
        absent = values.is_null().to_numpy(zero_copy_only=False)
        missing.append(rows[absent])
        if not hasattr(values, "value_parent_indices"):
            break
        rows = rows[values.value_parent_indices().to_numpy()]
        values = values.flatten()
    flat = values.drop_null().to_numpy(zero_copy_only=False)
    return Labels(flat, rows[~absent], np.unique(np.concatenate(missing)))


def _labels_of_rows(labels: list[Any]) -> Labels:
    arrays = [np.asarray(label if label is not None else []) for label in labels]
    rows = np.repeat(np.arange(len(labels)), [array.size for array in arrays])
    missing = np.array([row for row, label in enumerate(labels) if label is None], dtype=np.int64)
    present = [array for array, label in zip(arrays, labels, strict=True) if label is not None]
    flat = np.concatenate([array.ravel() for array in present]) if present else np.empty(0)
    return Labels(flat, rows, missing)


def _without_adapters(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _generates(model: Any) -> bool:
    return hasattr(model, "can_generate") and bool(model.can_generate())


def first_missing(dataset: Any, column: str) -> int | None:
    """The first row of a `datasets.Dataset` without a value in the column, if others have one."""
    if dataset.data.column(column).null_count == 0:
        return None
    absent = dataset.with_format("arrow")[column][:].is_null().to_numpy()
    return int(np.argmax(absent)) if absent.any() and not absent.all() else None
