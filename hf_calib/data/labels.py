"""Labels: their layout in a table, and the conversion of names, ids and lists to class ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, compress, islice
from typing import Any

import datasets
import numpy as np
import pyarrow
from datasets import (
    ClassLabel,
    Dataset,
    DatasetDict,
    Features,
    Value,
    concatenate_datasets,
)
from numpy.typing import NDArray

from hf_calib._errors import InputTypeError, check, expected, few, look_alikes
from hf_calib.data.sources import column_of_split, read_column
from hf_calib.metrics.checks import RowError
from hf_calib.predictions.labels import check_ids, label_ids

TEXTS = ("string", "large_string")
INTEGERS = ("int", "uint")
# Booleans and floats are equal to these integers.
_ZERO_OR_ONE = (0, 1, "0", "1")
_EMPTY = "remove these rows; a row without labels has an empty list or text"


def is_of(feature: object, *kinds: str) -> bool:
    """Whether a column has one of these types; a ClassLabel has integers."""
    # The names of types end in their bits, as in int64.
    return str(getattr(feature, "dtype", "")).startswith(kinds)


def ids_of(
    labels: Sequence[Any], names: Sequence[str], argument: str, way_out: str
) -> list[int]:
    """Return the ids of labels: integers are ids, and texts are names or ids, as in `label_ids`.

    Raises:
        RowError: if a label is neither.

    >>> ids_of(["fear", "joy"], ["joy", "fear"], "the labels", "check them")
    [1, 0]
    >>> ids_of(["1", "0"], ["joy", "fear"], "the labels", "check them")
    [1, 0]
    """
    # A column has one type, so the first label stands for all.
    if labels and isinstance(labels[0], int):
        ids = np.array(labels, np.int64)
    else:
        texts = pyarrow.array(labels, pyarrow.string())
        told = ("the classes", way_out)
        # Training data name their own classes, so "Art" may be another one than "art".
        ids = label_ids(texts, argument, names, told, as_written=True)
    check_ids(ids, argument, len(names), way_out)
    return ids.tolist()


def names_of(
    ids: Sequence[int], names: Sequence[str], argument: str, way_out: str
) -> list[str]:
    """Return the names of a ClassLabel's ids; raise a `RowError` if an id has no name."""
    # Files are not checked when they are read, and a negative id would count from the last class.
    check_ids(np.array(ids, np.int64), argument, len(names), way_out)
    return [names[label] for label in ids]


def in_lists(
    convert: Callable[[list[Any]], list[Any]], rows: Sequence[Sequence[Any]]
) -> list[list[Any]]:
    """Convert the labels of lists; the error of a label names the row of its list.

    >>> in_lists(sorted, [["c"], [], ["b", "a"]])
    [['a'], [], ['b', 'c']]
    """
    # All labels are converted at once, because whether texts are ids depends on all of them.
    try:
        converted = iter(convert(list(chain.from_iterable(rows))))
    except RowError as error:
        place, *message = error.args
        row_of_labels = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        raise RowError(int(row_of_labels[place]), *message) from None
    return [list(islice(converted, len(row))) for row in rows]


def names_in(labels: Iterable[Any], noun: str) -> list[str]:
    """Return the class names of train: sorted texts, or integers, which must count from 0."""
    found = sorted(set(labels))
    if all(isinstance(label, int) for label in found):
        # With a gap, a class has no row in train, or the column holds counts.
        requirement = "integer labels of train to count from 0 without gaps"
        way_out = (
            f"pass class_names for all {noun} from 0 on, or write the labels as texts"
        )
        check(found == list(range(len(found))), requirement, few(found), way_out)
        return [str(label) for label in found]
    # A trailing space would make two classes of one.
    alike = look_alikes(found, found)
    way_out = f"write the labels alike, or pass class_names if these are two {noun}"
    check(not alike, f"the {noun} of train to differ visibly", alike, way_out)
    return found


def has_several_labels(rows: Dataset) -> bool:
    """Whether the column `label` of `choose_columns` has a list of labels in each row."""
    return isinstance(getattr(rows.features["label"], "feature", None), ClassLabel)


@dataclass(frozen=True)
class LabelLayout:
    """The layout of a row's labels: a column of lists, of texts, or a 0/1 column per label."""

    column: str = "label"
    columns: Sequence[str] | None = None
    # Such as " " or "|"; blanks around a label are ignored.
    separator: str | None = None
    # The value of rows without labels, besides an empty list or text.
    no_label: str | None = None

    def read(self, name: str, split: Dataset) -> list[list[str]]:
        """Return the labels of each row as written, names or ids; errors name the row.

        >>> rows = Dataset.from_dict({"label": ["Mass|Nodule", "No Finding"]})
        >>> LabelLayout(separator="|", no_label="No Finding").read("train", rows)
        [['Mass', 'Nodule'], []]
        """
        if self.columns is not None:
            return _columns_of_ones(name, split, self.columns)
        rows = self._lists(name, split)
        kind = _kind_of_labels(split, self.column)
        as_texts = partial(
            _texts_of, kind=kind, argument=f"the labels of split {name!r}"
        )
        return [
            # A text that ends with a separator has an empty label.
            [label for label in row if label not in ("", self.no_label)]
            for row in in_lists(as_texts, rows)
        ]

    def _lists(self, name: str, split: Dataset) -> list[list[Any]]:
        """The list of each row, of one label or none where the column holds no lists."""
        values = column_of_split(name, split, self.column, _EMPTY).to_pylist()
        feature = split.features[self.column]
        inner = getattr(feature, "feature", None)
        if is_of(inner, *TEXTS, *INTEGERS):
            return values
        # A file in which no row has two labels.
        if is_of(feature, *INTEGERS):
            return [[value] for value in values]
        if not is_of(feature, *TEXTS):
            requirement = (
                f"hold lists of labels, or texts with a separator, in split {name!r}"
            )
            way_out = (
                "choose another label_column, or give the 0/1 columns as label_columns"
            )
            argument = f"column {self.column!r}"
            raise InputTypeError(expected(argument, requirement, feature, way_out))
        is_known = bool(self.separator) or not any(values)
        requirement = "label_separator to be given for labels in one text"
        got = f"texts in column {self.column!r}"
        check(is_known, requirement, got, "set it, for example to '|'")
        # Without a separator all texts are empty, as was checked above.
        return [text.split(self.separator or None) for text in values]

    def names(self, train: Dataset, rows: Sequence[Sequence[str]]) -> list[str]:
        """Return the names in the data: of columns or a ClassLabel, or the labels of train."""
        if self.columns is not None:
            return list(self.columns)
        kind = _kind_of_labels(train, self.column)
        if isinstance(kind, ClassLabel):
            return list(kind.names)
        # Lists of integers were read as texts, which sort otherwise: "10" is before "2".
        found: set[Any] = set(chain.from_iterable(rows))
        if found and all(label.isdecimal() for label in found):
            found = {int(label) for label in found}
        return names_in(found, "labels")


def _kind_of_labels(split: Dataset, column: str) -> Any:
    """The type of a label in a column of labels or of lists of them."""
    feature = split.features[column]
    return getattr(feature, "feature", feature)


def _columns_of_ones(
    name: str, split: Dataset, columns: Sequence[str]
) -> list[list[str]]:
    """The names of the columns that are 1 in each row."""
    check(len(columns) > 0, "label_columns to name a column", "none", "or leave it out")
    marks = []
    for column in columns:
        values = column_of_split(name, split, column, _EMPTY).to_pylist()
        # A csv column has texts if one of its cells is not a number.
        wrong = [i for i, value in enumerate(values) if value not in _ZERO_OR_ONE]
        if wrong:
            requirement = f"hold 0 or 1 in split {name!r}"
            got = repr(values[wrong[0]])
            way_out = "decide what it means, or remove this row"
            raise RowError(wrong[0], f"column {column!r}", requirement, got, way_out)
        marks.append([value in (1, "1") for value in values])
    return [list(compress(columns, row)) for row in zip(*marks, strict=True)]


def _texts_of(labels: Sequence[Any], kind: Any, argument: str) -> list[str]:
    """Labels as texts, those of a ClassLabel as names."""
    way_out = "use another split, or leave the label out: "
    way_out += "a row without labels has an empty list"
    for place, label in enumerate(labels):
        # The Hub marks withheld labels by -1.
        if label is None or (isinstance(label, int) and label < 0):
            raise RowError(place, argument, "be names or ids", label, way_out)
    if isinstance(kind, ClassLabel):
        labels = names_of(labels, kind.names, argument, way_out)
    return [str(label).strip() for label in labels]


def encode_label_sets(
    dataset: DatasetDict, layout: LabelLayout, class_names: Sequence[str] | None
) -> tuple[list[str], dict[str, list[list[int]]]]:
    """Return the names of the labels, and the sorted ids of each row of all splits."""
    read = {name: layout.read(name, split) for name, split in dataset.items()}
    names = list(class_names or layout.names(dataset["train"], read["train"]))
    # Labels are read by the columns' names, so names may only order them.
    if layout.columns is not None:
        requirement = f"class_names to be the label_columns ({few(layout.columns)})"
        fits = sorted(names) == sorted(layout.columns)
        check(fits, requirement, few(names), "rename the columns, or leave it out")
    requirement = "the labels to be at least one, and differ"
    way_out = "check label_column and class_names"
    check(len(set(names)) == len(names) > 0, requirement, few(names), way_out)
    ids = {name: label_set_ids(name, rows, names) for name, rows in read.items()}
    return names, ids


def label_set_ids(
    name: str, rows: Sequence[Sequence[str]], names: Sequence[str]
) -> list[list[int]]:
    """Return the ids of each row's labels, without repeats and in order."""
    argument = f"the labels of split {name!r}"
    # Rows with a 0 or 1 for each label would otherwise have the labels 0 and 1.
    may_be_marks = set(chain.from_iterable(rows)) <= {"0", "1"}
    repeating = [i for i, row in enumerate(rows) if len(set(row)) < len(row)]
    if may_be_marks and repeating:
        got = few(rows[repeating[0]])
        way_out = "of a 0 or 1 for each label, keep the ids of the 1s, or make columns "
        way_out += "of them: label_columns"
        raise RowError(repeating[0], argument, "be ids, each once a row", got, way_out)
    way_out = "check class_names, label_separator and no_label, or remove these rows"
    ids = in_lists(
        partial(ids_of, names=names, argument=argument, way_out=way_out), rows
    )
    return [sorted(set(row)) for row in ids]


def multi_hot_matrix(
    label_sets: Sequence[Sequence[int]], n_classes: int
) -> NDArray[np.float32]:
    """Return a matrix (N, C) float32, 1 if the row has the label.

    >>> multi_hot_matrix([[0, 2], []], 3)
    array([[1., 0., 1.],
           [0., 0., 0.]], dtype=float32)
    """
    matrix = np.zeros((len(label_sets), n_classes), np.float32)
    for row, ids in zip(matrix, label_sets, strict=True):
        row[ids] = 1
    return matrix


def multi_hot(dataset: DatasetDict) -> DatasetDict:
    """Convert the id lists of several labels per row to C float32 of 0 or 1, as a trainer needs.

    Data with one label per row do not change. Afterwards the dataset has no names, so call
    `label_maps` before.

    >>> feature = Features({"label": datasets.Sequence(ClassLabel(names=["joy", "fear"]))})
    >>> rows = Dataset.from_dict({"label": [[1], []]}, features=feature)
    >>> multi_hot(DatasetDict({"train": rows}))["train"]["label"][:]
    [[0.0, 1.0], [0.0, 0.0]]
    """
    features = Features({"label": datasets.Sequence(Value("float32"))})
    found = DatasetDict(dataset)
    for name, split in dataset.items():
        if has_several_labels(split):
            label_sets = read_column(split, "label").to_pylist()
            n_classes = split.features["label"].feature.num_classes
            marks = list(multi_hot_matrix(label_sets, n_classes))
            floats = Dataset.from_dict({"label": marks}, features=features)
            others = split.remove_columns("label")
            found[name] = concatenate_datasets([others, floats], axis=1)
    return found
