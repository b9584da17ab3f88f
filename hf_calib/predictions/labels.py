"""The labels of a table's rows, as the ids of a model's classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset
from numpy.typing import NDArray

from hf_calib._errors import (
    InputTypeError,
    InputValueError,
    did_you_mean,
    expected,
    few,
    look_alikes,
)
from hf_calib.data.labels import read_column


def column_values(rows: Dataset, argument: str, column: str) -> list[Any]:
    """All values of a column; raises if it is missing or has gaps."""
    if column not in rows.column_names:
        requirement = f"be one of {', '.join(rows.column_names)}"
        way_out = did_you_mean(column, rows.column_names)
        raise InputValueError(expected(argument, requirement, repr(column), way_out))
    stored = read_column(rows, column)
    if stored.null_count:
        got = f"{stored.null_count} without"
        raise InputValueError(
            expected(f"column {column!r}", "have a value in every row", got, "remove these rows")
        )
    return stored.to_pylist()


def check_class_names(
    model_names: Sequence[str], data_names: Sequence[str] | None, what: str
) -> tuple[str, ...]:
    """The data's names of the model's classes: the model's own unless others are given, one for each."""
    names = tuple(model_names if data_names is None else data_names)
    if len(names) != len(model_names) or len(set(names)) < len(names):
        requirement = f"name the model's {len(model_names)} {what} ({few(model_names)}) once each"
        raise InputValueError(expected("class_names", requirement, few(names), "follow the model's order"))
    return names


def are_unnamed(model_names: Sequence[str]) -> bool:
    """Whether class names are those that transformers gives where nobody has given any."""
    return list(model_names) == [f"LABEL_{i}" for i in range(len(model_names))]


def label_ids(
    rows: Dataset, column: str, model_names: Sequence[str], data_names: Sequence[str] | None
) -> NDArray[np.int64]:
    """The model's ids of the data's labels: by name if both have names, else the numbers themselves.

    Arguments and errors as for `predict`; an error names the first row that is wrong.
    """
    names = list(check_class_names(model_names, data_names, "classes"))
    labels = column_values(rows, "label_column", column)
    feature = rows.features[column]
    if isinstance(feature, ClassLabel) and -1 in labels:  # how the Hub marks labels that are withheld
        way_out = "choose a split that is labelled, such as 'validation'"
        raise InputValueError(expected("the rows", "be labelled", -1, way_out))
    if isinstance(labels[0], float) and all(label.is_integer() for label in labels):
        labels = [int(label) for label in labels]  # pandas writes integers so where some were missing
    if isinstance(feature, ClassLabel) and (data_names is not None or not are_unnamed(model_names)):
        labels = [feature.names[label] for label in labels]
    elif isinstance(labels[0], bool):
        labels = [str(label) for label in labels]
    elif isinstance(labels[0], int) and all(name.lstrip("-").isdigit() for name in names):
        labels = [str(label) for label in labels]  # a csv file cannot say that its 1, 2, 3 are names
    elif isinstance(labels[0], int) and data_names is not None and names != list(model_names):
        way_out = "leave class_names out where the labels are the model's ids"
        raise InputValueError(
            expected("class_names", f"name the labels of {column!r}", "numbers there", way_out)
        )
    if isinstance(labels[0], str):
        return _ids_of_names(labels, names, column)
    return _checked_ids(labels, names, column)


def _ids_of_names(labels: list[str], names: list[str], column: str) -> NDArray[np.int64]:
    blank = [i for i, label in enumerate(labels) if not label.strip()]
    if blank:
        got = f"none in {len(blank)} rows (first in row {blank[0]})"
        raise InputValueError(
            expected(f"column {column!r}", "hold a label in every row", got, "remove these rows")
        )
    number = {name: i for i, name in enumerate(names)}
    folded = {name.casefold(): i for name, i in number.items()}
    if len(folded) == len(number):  # no two classes differ in case only
        number |= {label: folded[label.casefold()] for label in set(labels) if label.casefold() in folded}
    unknown = sorted(set(labels) - set(number))
    if unknown:
        requirement = f"hold the model's classes ({few(names)})"
        alike = look_alikes(unknown, names)
        got = few(list(map(repr, unknown))) + (f" ({alike})" if alike else "")
        first = next(row for row, label in enumerate(labels) if label not in number)
        got = f"{got} (first in row {first})"
        way_out = "give the data's names of the model's classes, in the model's order, as class_names"
        raise InputValueError(expected(f"column {column!r}", requirement, got, way_out))
    return np.array([number[label] for label in labels], dtype=np.int64)


def _checked_ids(labels: list[Any], names: list[str], column: str) -> NDArray[np.int64]:
    if not all(isinstance(label, int) for label in labels):
        got = type(labels[0]).__name__
        way_out = "choose another label_column"
        raise InputTypeError(expected(f"column {column!r}", "hold one class in each row", got, way_out))
    outside = sorted({label for label in labels if not 0 <= label < len(names)})
    if outside:
        requirement = f"hold the model's ids, 0..{len(names) - 1}"
        way_out = "choose another label_column or split, or write the names of the classes"
        first = next(row for row, label in enumerate(labels) if label in outside)
        got = f"{few(outside)} (first in row {first})"
        raise InputValueError(expected(f"column {column!r}", requirement, got, way_out))
    return np.array(labels, dtype=np.int64)
