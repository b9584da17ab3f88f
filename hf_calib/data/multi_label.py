"""Several labels a row: read from lists, from one text with a separator, or from a 0/1 column of each label."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value, concatenate_datasets
from numpy.typing import NDArray

from hf_calib._errors import (
    InputTypeError,
    InputValueError,
    did_you_mean,
    expected,
    few,
    look_alikes,
)
from hf_calib.data.splits import has_several_labels, read_column


@dataclass(frozen=True)
class LabelLayout:
    """Where the labels of a row stand.

    Args:
        column: of lists of names or ids, or of texts with a separator between these.
        columns: instead, one column of 0 and 1 for each label.
        separator: between the labels of a text, such as " " or "|"; blanks around a label do not count.
        no_label: what stands where a row has none, such as "No Finding"; an empty list or text says so too.
    """

    column: str = "label"
    columns: Sequence[str] | None = None
    separator: str | None = None
    no_label: str | None = None

    def read(self, name: str, split: Dataset) -> list[list[str]]:
        """The labels of each row, as written: names, or ids.

        Args:
            name: of the split, for errors.
            split: any columns.

        Raises:
            ValueError: if a column is missing, or a value is; the message names the row.
            TypeError: if the column holds anything else.

        >>> rows = Dataset.from_dict({"label": ["Mass|Nodule", "No Finding"]})
        >>> LabelLayout(separator="|", no_label="No Finding").read("train", rows)
        [['Mass', 'Nodule'], []]
        """
        self.check_columns(name, split)
        if self.columns is not None and len(self.columns) == 0:
            raise InputValueError(expected("label_columns", "name a column", "none", "or leave it out"))
        if self.columns is not None:
            on = np.stack([_zeros_and_ones(name, split, column) for column in self.columns], axis=1)
            return [[self.columns[i] for i in np.flatnonzero(row).tolist()] for row in on]
        feature = split.features[self.column]
        values = read_column(split, self.column).to_pylist()
        inner = getattr(feature, "feature", None)
        if isinstance(inner, ClassLabel):
            rows = [[_name_of(inner, i, name, row) for i in ids] for row, ids in enumerate(values)]
        elif inner is not None and _is_name_or_id(inner):
            rows = [[_written(name, row, label) for label in labels] for row, labels in enumerate(values)]
        elif isinstance(feature, ClassLabel):
            rows = [[_name_of(feature, i, name, row)] for row, i in enumerate(values)]
        elif getattr(feature, "dtype", "").startswith(("int", "uint")):  # a file where no row has two
            rows = [[_written(name, row, value)] for row, value in enumerate(values)]
        elif getattr(feature, "dtype", "") in ("string", "large_string"):
            if not self.separator and any(values):
                got, way_out = f"texts in column {self.column!r}", "set it, for example to '|'"
                raise InputValueError(
                    expected("label_separator", "be given for labels in one text", got, way_out)
                )
            rows = [text.split(self.separator) if text.strip() else [] for text in values]
        else:
            requirement = f"hold lists of labels, or texts with a separator, in split {name!r}"
            way_out = "choose another label_column, or give the 0/1 columns as label_columns"
            raise InputTypeError(expected(f"column {self.column!r}", requirement, feature, way_out))
        stripped = ([label.strip() for label in labels] for labels in rows)
        return [[label for label in labels if label and label != self.no_label] for labels in stripped]

    def check_columns(self, name: str, split: Dataset) -> None:
        """Refuse a split without these columns, or with a gap in one; an empty list or text is none."""
        for column in [self.column] if self.columns is None else self.columns:
            if column not in split.column_names:
                requirement, way_out = (
                    f"be one of {', '.join(split.column_names)}",
                    did_you_mean(column, split.column_names),
                )
                raise InputValueError(
                    expected(
                        f"the column to read labels from in split {name!r}",
                        requirement,
                        repr(column),
                        way_out,
                    )
                )
            missing = np.flatnonzero(read_column(split, column).is_null().to_numpy())
            if len(missing):
                requirement = f"have a value in every row of split {name!r}"
                got = f"none in {len(missing)} rows (first in row {missing[0]})"
                way_out = "remove these rows; a row without labels has an empty list or text"
                raise InputValueError(expected(f"column {column!r}", requirement, got, way_out))


def encode_label_sets(
    dataset: DatasetDict, layout: LabelLayout, class_names: Sequence[str] | None
) -> tuple[list[str], dict[str, list[list[int]]]]:
    """The names of the labels, and the ids of every row of every split, each once and in order.

    Raises:
        ValueError: if a label is none of the names; the message names its split and row.
    """
    read = {name: layout.read(name, split) for name, split in dataset.items()}
    names = list(class_names or _default_names(dataset["train"], layout, read["train"]))
    if len(set(names)) < len(names) or not names:
        way_out = "check label_column and class_names"
        raise InputValueError(expected("the labels", "be at least one, and differ", few(names), way_out))
    if layout.columns is not None:  # a column's label is that of its place
        if len(names) != len(layout.columns):
            requirement, got = f"name the {len(layout.columns)} label_columns", f"{len(names)} names"
            raise InputValueError(
                expected("class_names", requirement, got, "give one for each, in their order")
            )
        renamed = dict(zip(layout.columns, names, strict=True))
        read = {name: [[renamed[label] for label in row] for row in rows] for name, rows in read.items()}
    return names, {name: label_set_ids(name, rows, names) for name, rows in read.items()}


def label_set_ids(name: str, rows: Sequence[Sequence[str]], names: Sequence[str]) -> list[list[int]]:
    """The ids of each row's labels: by name, or the numbers themselves where all labels are numbers and no name is.

    Args:
        name: of the split, for errors.
        rows: the labels of each.
        names: C of them.

    Raises:
        ValueError: if a label is none of these, or rows are a 0 or 1 for each label; the message names the row.

    >>> label_set_ids("test", [["1", "0"], []], ["joy", "fear"])
    [[0, 1], []]
    """
    found = {label for row in rows for label in row}
    if found <= {"0", "1"}:
        _refuse_multi_hot(name, rows)
    ids = {label: i for i, label in enumerate(names)}
    if found and all(map(str.isdecimal, found)) and not found & set(names):
        ids = {str(i): i for i in range(len(names))}
    unknown = found - set(ids)
    if unknown:
        wrong = [i for i, row in enumerate(rows) if unknown & set(row)]
        label = next(each for each in rows[wrong[0]] if each in unknown)
        alike = look_alikes([label], names)
        got = f"{label!r} in row {wrong[0]} ({len(wrong)} such rows)"
        got += f" ({alike})" if alike else ""
        way_out = "check class_names, label_separator and no_label, or remove these rows"
        raise InputValueError(
            expected(f"labels of split {name!r}", f"be among {few(list(names))}", got, way_out)
        )
    return [sorted({ids[label] for label in row}) for row in rows]


def _refuse_multi_hot(name: str, rows: Sequence[Sequence[str]]) -> None:
    """Lists of a 0 or 1 for each label read as lists of ids: labels 0 and 1, in nearly every row."""
    for i, row in enumerate(rows):
        if len(set(row)) < len(row):
            got = f"{', '.join(row[:5])}{', ...' if len(row) > 5 else ''} in row {i}"
            way_out = (
                "of a 0 or 1 for each label, keep the ids of the 1s, or make columns of them: label_columns"
            )
            raise InputValueError(
                expected(f"labels of split {name!r}", "be ids, each once a row", got, way_out)
            )


def multi_hot_matrix(label_sets: Sequence[Sequence[int]], n_classes: int) -> NDArray[np.float32]:
    """(N, C) float32, 1 where a row has the label.

    >>> multi_hot_matrix([[0, 2], []], 3)
    array([[1., 0., 1.],
           [0., 0., 0.]], dtype=float32)
    """
    matrix = np.zeros((len(label_sets), n_classes), np.float32)
    rows = np.repeat(np.arange(len(label_sets)), [len(ids) for ids in label_sets])
    matrix[rows, [label for ids in label_sets for label in ids]] = 1
    return matrix


def multi_hot(dataset: DatasetDict) -> DatasetDict:
    """Turn the lists of ids of several labels a row into one float a label: what a trainer takes.

    Args:
        dataset: as `choose_columns` returns it; one label a row stays as it is.

    Returns:
        DatasetDict of the same splits, with `label` a list of C float32, 0 or 1. The names are then no longer in it:
        take `label_maps` before.

    >>> feature = Features({"label": datasets.Sequence(ClassLabel(names=["joy", "fear"]))})
    >>> rows = Dataset.from_dict({"label": [[1], []]}, features=feature)
    >>> multi_hot(DatasetDict({"train": rows}))["train"]["label"][:]
    [[0.0, 1.0], [0.0, 0.0]]
    """
    return DatasetDict({name: _with_floats(split) for name, split in dataset.items()})


def _with_floats(split: Dataset) -> Dataset:
    if not has_several_labels(split):
        return split
    n_classes = split.features["label"].feature.num_classes
    matrix = multi_hot_matrix(read_column(split, "label").to_pylist(), n_classes)
    feature = Features({"label": datasets.Sequence(Value("float32"))})
    floats = Dataset.from_dict({"label": list(matrix)}, features=feature)
    return concatenate_datasets([split.remove_columns("label"), floats], axis=1)


def _default_names(train: Dataset, layout: LabelLayout, rows: list[list[str]]) -> list[str]:
    """Those of the data: of the columns or the ClassLabel, or the labels of train in sorted order."""
    if layout.columns is not None:
        return list(layout.columns)
    feature = train.features[layout.column]
    inner = getattr(feature, "feature", feature)
    if isinstance(inner, ClassLabel):
        return list(inner.names)
    found = sorted({label for row in rows for label in row})
    alike = look_alikes(found, found)
    if alike:
        way_out = "write the labels alike, or pass class_names if these are two"
        raise InputValueError(expected("the labels of train", "differ visibly", alike, way_out))
    if found and all(map(str.isdecimal, found)):
        ids = sorted(map(int, found))
        if ids != list(range(len(ids))):
            way_out = "pass class_names for all labels from 0 on, or write the labels as texts"
            raise InputValueError(
                expected("integer labels of train", "count from 0 without gaps", few(ids), way_out)
            )
        return [str(i) for i in ids]
    return found


def _name_of(feature: ClassLabel, label: int | None, split: str, row: int) -> str:
    if label is None or not 0 <= label < feature.num_classes:  # -1 is how the Hub marks withheld ones
        requirement = f"lie in 0..{feature.num_classes - 1}"
        way_out = "use another split, or remove these rows"
        raise InputValueError(
            expected(f"labels of split {split!r}", requirement, f"{label} in row {row}", way_out)
        )
    return str(feature.names[label])


def _written(split: str, row: int, label: Any) -> str:
    if label is None or (isinstance(label, int) and label < 0):  # -1 would become a name
        way_out = "leave the label out: a row without labels has an empty list"
        raise InputValueError(
            expected(f"labels of split {split!r}", "be names or ids", f"{label} in row {row}", way_out)
        )
    return str(label)


def _is_name_or_id(feature: object) -> bool:
    return str(getattr(feature, "dtype", "")).startswith(("string", "large_string", "int", "uint"))


def _zeros_and_ones(name: str, split: Dataset, column: str) -> NDArray[np.bool_]:
    """(N,) whether a row has the label."""
    values = read_column(split, column).to_pylist()
    for row, value in enumerate(values):
        if value not in (
            0,
            1,
            "0",
            "1",
        ):  # texts in a csv file with an empty cell: that cell is what is wrong
            requirement, got = f"hold 0 or 1 in split {name!r}", f"{value!r} in row {row}"
            way_out = "decide what it means, or remove this row"
            raise InputValueError(expected(f"column {column!r}", requirement, got, way_out))
    return np.array([value in (1, "1") for value in values], dtype=bool)
