"""Labels: their layout in a table, and the conversion of names, ids and lists to class ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
from datasets import (
    ClassLabel,
    Dataset,
    DatasetDict,
    Features,
    Value,
    concatenate_datasets,
)
from numpy.typing import NDArray

from hf_calib._errors import (
    InputTypeError,
    check,
    did_you_mean,
    expected,
    few,
    look_alikes,
)
from hf_calib._text import as_number, counted
from hf_calib.data.sources import read_column

TEXTS = ("string", "large_string")
INTEGERS = ("int", "uint")
_ZERO_OR_ONE = (0, 1, "0", "1")


class ClassNames(tuple[str, ...]):
    """The names of C classes in the order of their ids, and the conversion of labels to ids.

    >>> names = ClassNames(["joy", "fear"])
    >>> names.ids([["fear"], [], ["joy", "fear"]], "the labels", "check them"), names.ids([["1"]], "", "")
    ([[1], [], [0, 1]], [[1]])
    """

    def ids(
        self, rows: Sequence[Sequence[Any]], what: str, way_out: str
    ) -> list[list[int]]:
        """Return the ids of lists of labels, which are names or ids; texts are ids if all are numbers and no name is.

        Texts that are numbers are compared with such names as numbers: "1" is "1.0".

        Raises:
            ValueError: if a label is neither a name nor an id; the message has `what` and the row.
        """
        found = {label for row in rows for label in row}
        known: dict[Any, int] = {name: i for i, name in enumerate(self)} | {
            i: i for i in range(len(self))
        }
        named = self._named_by_number(found - known.keys())
        known |= {label: i for label, i in named.items() if i is not None}
        if (
            found
            and all(str(label).isdecimal() for label in found)
            and not found & {*self, *named}
        ):
            known |= {str(i): i for i in range(len(self))}
        wrong = [i for i, row in enumerate(rows) if not known.keys() >= set(row)]
        for label in rows[wrong[0]] if wrong else ():
            alike = look_alikes([str(label)], self)
            got = f"{label!r} in row {wrong[0]} ({counted(len(wrong), 'such row')}){alike and f' ({alike})'}"
            check(label in known, f"{what} to be among {few(self)}", got, way_out)
        return [[known[label] for label in row] for row in rows]

    def _named_by_number(self, labels: set[Any]) -> dict[Any, int | None]:
        """The ids of texts that are the number of a name, None if several names are."""
        numbers = [as_number(name) for name in self]
        written = {each: as_number(each) for each in labels if isinstance(each, str)}
        return {
            label: numbers.index(number) if numbers.count(number) == 1 else None
            for label, number in written.items()
            if number is not None and number in numbers
        }

    @classmethod
    def of(cls, labels: Iterable[Any], noun: str) -> ClassNames:
        """Return the class names of train: sorted texts, or integers, which must be 0, 1, 2 and so on."""
        found = sorted(set(labels))
        if all(isinstance(label, int) for label in found):
            way_out = f"pass class_names for all {noun} from 0 on, or write the labels as texts"
            counted = found == list(range(len(found)))
            check(
                counted,
                "integer labels of train to count from 0 without gaps",
                few(found),
                way_out,
            )
            return cls(map(str, found))
        alike = look_alikes(found, found)
        way_out = f"write the labels alike, or pass class_names if these are two {noun}"
        check(not alike, f"the {noun} of train to differ visibly", alike, way_out)
        return cls(found)


def check_columns(
    name: str, rows: Dataset, *columns: str, way_out: str = "remove these rows"
) -> None:
    """Raise if a split has no rows, lacks one of these columns, or has a missing value in one."""
    check(
        len(rows) > 0,
        f"split {name!r} to have rows",
        0,
        "check the file or the split's name",
    )
    for column in columns:
        there = rows.column_names
        requirement = (
            f"the column to read from split {name!r} to be one of {', '.join(there)}"
        )
        check(column in there, requirement, repr(column), did_you_mean(column, there))
        missing = np.flatnonzero(read_column(rows, column).is_null().to_numpy())
        requirement = (
            f"column {column!r} to have a value in every row of split {name!r}"
        )
        got = f"{len(missing)} without (first in row {missing[:1].sum()})"
        check(len(missing) == 0, requirement, got, way_out)


def is_of(feature: object, *kinds: str) -> bool:
    """Whether a column has one of these types; a ClassLabel has integers."""
    return str(getattr(feature, "dtype", "")).startswith(kinds)


def names_of_ids(
    rows: Sequence[Sequence[int]], names: Sequence[str], what: str, way_out: str
) -> list[list[str]]:
    """Return the names of lists of a ClassLabel's ids; raise ValueError with the row if an id has no name."""
    known = range(len(names))
    first_rows: dict[int, int] = {}  # Of each id without a name.
    for i, row in enumerate(rows):
        for label in row:
            if label not in known:
                first_rows.setdefault(label, i)
    first = min(first_rows.values(), default=0)
    got = f"[{few(list(first_rows))}] (first in row {first})"
    check(not first_rows, f"{what} to be ids of its classes", got, way_out)
    return [[names[label] for label in row] for row in rows]


def has_several_labels(rows: Dataset) -> bool:
    """Whether the column `label` of `choose_columns` has a list of labels in each row."""
    return isinstance(getattr(rows.features["label"], "feature", None), ClassLabel)


@dataclass(frozen=True)
class LabelLayout:
    """The layout of a row's labels: a column of lists, of texts with a separator, or a 0/1 column per label."""

    column: str = "label"
    columns: Sequence[str] | None = None
    separator: str | None = (
        None  # Such as " " or "|"; blanks around a label are ignored.
    )
    no_label: str | None = (
        None  # The value of rows without labels, besides an empty list or text.
    )

    def read(self, name: str, split: Dataset) -> list[list[str]]:
        """Return the labels of each row as written, names or ids; errors name the row.

        >>> rows = Dataset.from_dict({"label": ["Mass|Nodule", "No Finding"]})
        >>> LabelLayout(separator="|", no_label="No Finding").read("train", rows)
        [['Mass', 'Nodule'], []]
        """
        columns = [self.column] if self.columns is None else self.columns
        check(
            len(columns) > 0,
            "label_columns to name a column",
            "none",
            "or leave it out",
        )
        way_out = "remove these rows; a row without labels has an empty list or text"
        check_columns(name, split, *columns, way_out=way_out)
        if self.columns is not None:
            on = zip(
                *(_zeros_and_ones(name, split, column) for column in self.columns),
                strict=True,
            )
            return [
                [
                    column
                    for column, is_on in zip(self.columns, row, strict=True)
                    if is_on
                ]
                for row in on
            ]
        feature, values = (
            split.features[self.column],
            read_column(split, self.column).to_pylist(),
        )
        is_list = hasattr(feature, "feature")
        inner = feature.feature if is_list else feature
        if is_of(inner, *TEXTS) and not is_list:
            got, is_known = (
                f"texts in column {self.column!r}",
                bool(self.separator) or not any(values),
            )
            requirement = "label_separator to be given for labels in one text"
            check(is_known, requirement, got, "set it, for example to '|'")
            values = [
                text.split(self.separator) if text.strip() else [] for text in values
            ]
        elif not is_of(inner, *INTEGERS, *(TEXTS if is_list else ())):
            requirement = (
                f"hold lists of labels, or texts with a separator, in split {name!r}"
            )
            way_out = (
                "choose another label_column, or give the 0/1 columns as label_columns"
            )
            raise InputTypeError(
                expected(f"column {self.column!r}", requirement, feature, way_out)
            )
        elif not is_list:  # A file in which no row has two labels.
            values = [[value] for value in values]
        written = [
            [_written(inner, label, name, i) for label in row]
            for i, row in enumerate(values)
        ]
        return [
            [label for label in row if label and label != self.no_label]
            for row in written
        ]

    def names(self, train: Dataset, rows: Sequence[Sequence[str]]) -> ClassNames:
        """Return the names in the data: of the columns or the ClassLabel, or the sorted labels of train."""
        if self.columns is not None:
            return ClassNames(self.columns)
        feature = train.features[self.column]
        inner = getattr(feature, "feature", feature)
        if isinstance(inner, ClassLabel):
            return ClassNames(inner.names)
        found = {label for row in rows for label in row}
        are_ids = bool(found) and all(map(str.isdecimal, found))
        return ClassNames.of(map(int, found) if are_ids else found, "labels")


def encode_label_sets(
    dataset: DatasetDict, layout: LabelLayout, class_names: Sequence[str] | None
) -> tuple[ClassNames, dict[str, list[list[int]]]]:
    """Return the names of the labels, and the ids of each row of all splits, without repeats and in order."""
    read = {name: layout.read(name, split) for name, split in dataset.items()}
    names = ClassNames(class_names or layout.names(dataset["train"], read["train"]))
    if layout.columns is not None:
        requirement = f"class_names to be the label_columns ({few(layout.columns)})"
        fits = sorted(names) == sorted(layout.columns)
        check(fits, requirement, few(names), "rename the columns, or leave it out")
    differ, way_out = (
        len(set(names)) == len(names) > 0,
        "check label_column and class_names",
    )
    check(differ, "the labels to be at least one, and differ", few(names), way_out)
    return names, {
        name: label_set_ids(name, rows, names) for name, rows in read.items()
    }


def label_set_ids(
    name: str, rows: Sequence[Sequence[str]], names: Sequence[str]
) -> list[list[int]]:
    """Return the ids of each row's labels, without repeats and in order; raise for rows with a 0 or 1 per label."""
    if {label for row in rows for label in row} <= {"0", "1"}:
        i, row = next(
            ((i, row) for i, row in enumerate(rows) if len(set(row)) < len(row)),
            (0, []),
        )
        way_out = "of a 0 or 1 for each label, keep the ids of the 1s, or make columns of them: label_columns"
        requirement = f"labels of split {name!r} to be ids, each once a row"
        check(not row, requirement, f"{few(row)} in row {i}", way_out)
    way_out = "check class_names, label_separator and no_label, or remove these rows"
    return [
        sorted(set(ids))
        for ids in ClassNames(names).ids(rows, f"labels of split {name!r}", way_out)
    ]


def multi_hot_matrix(
    label_sets: Sequence[Sequence[int]], n_classes: int
) -> NDArray[np.float32]:
    """Return a matrix (N, C) float32, 1 if the row has the label.

    >>> multi_hot_matrix([[0, 2], []], 3)
    array([[1., 0., 1.],
           [0., 0., 0.]], dtype=float32)
    """
    matrix = np.zeros((len(label_sets), n_classes), np.float32)
    rows = np.repeat(np.arange(len(label_sets)), [len(ids) for ids in label_sets])
    matrix[rows, [label for ids in label_sets for label in ids]] = 1
    return matrix


def multi_hot(dataset: DatasetDict) -> DatasetDict:
    """Convert the id lists of several labels per row to C float32 of 0 or 1, the form for a trainer.

    Data with one label per row do not change. Afterwards the dataset has no names, so call `label_maps` before.

    >>> feature = Features({"label": datasets.Sequence(ClassLabel(names=["joy", "fear"]))})
    >>> rows = Dataset.from_dict({"label": [[1], []]}, features=feature)
    >>> multi_hot(DatasetDict({"train": rows}))["train"]["label"][:]
    [[0.0, 1.0], [0.0, 0.0]]
    """
    found, feature = {}, Features({"label": datasets.Sequence(Value("float32"))})
    for name, split in dataset.items():
        if has_several_labels(split):
            label_sets = read_column(split, "label").to_pylist()
            matrix = multi_hot_matrix(
                label_sets, split.features["label"].feature.num_classes
            )
            floats = Dataset.from_dict({"label": list(matrix)}, features=feature)
            split = concatenate_datasets(
                [split.remove_columns("label"), floats], axis=1
            )
        found[name] = split
    return DatasetDict(found)


def _written(feature: Any, label: Any, split: str, row: int) -> str:
    """A label as text, or the name of a ClassLabel; raise for -1, which marks withheld labels on the Hub."""
    names = feature.names if isinstance(feature, ClassLabel) else None
    is_id = isinstance(label, int) and 0 <= label < (len(names) if names else np.inf)
    way_out = "use another split, or leave the label out: a row without labels has an empty list"
    requirement = f"labels of split {split!r} to be names or ids"
    check(
        is_id or isinstance(label, str), requirement, f"{label} in row {row}", way_out
    )
    return str(names[label] if names else label).strip()


def _zeros_and_ones(name: str, split: Dataset, column: str) -> list[bool]:
    """Whether each row has the label; a csv column has texts if one of its cells is not a number."""
    values = read_column(split, column).to_pylist()
    wrong = next(
        (
            f"{value!r} in row {i}"
            for i, value in enumerate(values)
            if value not in _ZERO_OR_ONE
        ),
        None,
    )
    way_out = "decide what it means, or remove this row"
    check(
        wrong is None,
        f"column {column!r} to hold 0 or 1 in split {name!r}",
        wrong,
        way_out,
    )
    return [value in (1, "1") for value in values]
