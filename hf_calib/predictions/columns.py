"""The columns of a table of predictions, and its rows as arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hf_calib._errors import InputTypeError, check, did_you_mean, expected, few
from hf_calib.metrics.checks import (
    FloatArray,
    IntArray,
    RowError,
    check_rows,
    refuse,
    row_sum_tolerance,
)
from hf_calib.predictions.predictions import (
    check_class_names,
    check_logits,
    check_unambiguous,
    label_ids,
    logs_of,
)

if TYPE_CHECKING:
    from pyarrow import RecordBatch, Schema

LISTS = {"logits": "logits", "probs": "probs", "probabilities": "probs"}
_PREFIXES = {"logits": "logit_", "probs": "prob_"}
# Columns of labels, which are never probabilities of a class, whichever of them is read.
_NAMES_OF_LABELS = {
    "gold",
    "label",
    "label_id",
    "labels",
    "target",
    "targets",
    "true_label",
    "y_true",
}
_NUMBERS_WAY = (
    "name the class columns logit_<class> or prob_<class>, and fill in missing values"
)


class Batch(NamedTuple):
    """A batch of n checked rows of predictions."""

    scores: NDArray[Any]  # (n, C), logits or probabilities, as in the file.
    probs: NDArray[Any]  # (n, C)
    labels: IntArray  # (n,)
    weights: FloatArray | None  # (n,)
    by: tuple[
        tuple[IntArray, list[Any]], ...
    ]  # Codes (n,) and names of each column of slices.
    table: RecordBatch | None = None  # The rows as read.

    def as_logits(self) -> NDArray[Any]:
        """Return the logits (n, C), or the logarithm of the probabilities, where 0 counts as 1e-38."""
        return logs_of(self.probs) if self.scores is self.probs else self.scores


@dataclass(frozen=True)
class Columns:
    """The columns of a table that are read."""

    kind: str  # "logits" or "probs"
    scores: tuple[str, ...]  # A column per class, or one of lists.
    class_names: tuple[str, ...]
    label: str | None
    weight: str | None = None
    by: tuple[str, ...] = ()  # The columns of slices.

    @property
    def names(self) -> list[str]:
        """All columns, without repeats."""
        return list(
            dict.fromkeys(
                [*self.scores, *filter(None, [self.label, self.weight]), *self.by]
            )
        )

    def check_same(self, names: Sequence[str]) -> None:
        """Raise if another file has other columns or classes."""
        found = set(names)
        missing = [repr(name) for name in self.names if name not in found]
        way_out = "write all files with the same columns"
        requirement = "the columns to be those of the first file"
        check(not missing, requirement, f"none named {few(missing)}", way_out)
        prefix = _PREFIXES[self.kind]
        known = {*self.scores, prefix}
        more = [
            repr(name)
            for name in names
            if name.lstrip().startswith(prefix) and name not in known
        ]
        one_model = len(self.scores) == 1 or not more
        got, way_out = f"also {few(more)}", "use files of one model"
        check(one_model, "the classes to be those of the first file", got, way_out)

    def read(self, batch: RecordBatch) -> Batch:
        """Return the rows of a batch; raise a `RowError` for an invalid row."""
        scores = probs = self._scores(batch)
        if self.kind == "logits":
            check_logits(scores)
            check_not_probabilities(scores)
            probs = softmax_of(scores)
        elif self.scores == self.class_names:
            outside = (scores < 0) | (scores > 1 + 1e-6)
            requirement = "hold probabilities, as their names do not say logit_"
            way_out = "name the columns logit_<class> if they hold logits, and prob_<class> if there are others"
            refuse(outside, "the class columns", requirement, scores, way_out)
        labels = np.zeros(len(batch), np.int64)
        if self.label is not None:
            labels = label_ids(batch.column(self.label), self.label, self.class_names)
        weights = None
        if self.weight is not None:
            weights = numbers_of(batch.column(self.weight), self.weight).astype(
                np.float64, copy=False
            )
        check_rows(probs, labels, weights, len(self.class_names))
        by = tuple(codes_of(batch.column(name)) for name in self.by)
        return Batch(scores, probs, labels, weights, by, batch)

    def _scores(self, batch: RecordBatch) -> NDArray[Any]:
        """The scores (n, C), contiguous per class."""
        if len(self.scores) > 1:
            columns = [numbers_of(batch.column(name), name) for name in self.scores]
            matrix = np.empty((len(columns), len(batch)), np.result_type(*columns))
            for row, column in zip(matrix, columns, strict=True):
                row[:] = column
            return matrix.T
        column = batch.column(self.scores[0])
        lengths = np.asarray(column.value_lengths())
        wrong = lengths != len(self.class_names)
        if wrong.any():
            row = int(np.argmax(wrong))
            requirement = f"have {len(self.class_names)} values"
            raise RowError(
                row,
                "the list",
                requirement,
                f"{lengths[row]:g}",
                "write one for each class",
            )
        try:
            values = numbers_of(column.flatten(), self.scores[0])
        except RowError as error:
            place, *told = error.args
            raise RowError(place // len(self.class_names), *told) from None
        return np.asfortranarray(values.reshape(len(batch), -1))


def columns_of(
    schema: Schema,
    label: str | None,
    weight: str | None = None,
    by: Sequence[str] = (),
    class_names: Sequence[str] = (),
) -> Columns:
    """Find the columns of a table from the schema of its first file; class names are for columns of lists."""
    check_roles(label, weight, by)
    names = list(schema.names)
    way_out = "write a column of labels and one for each class"
    check(bool(names), "the table to have columns", "none", way_out)
    _check_blanks(names, {label, weight, *by}.difference(names))
    times = Counter(names)
    listed = list_columns(schema)
    if listed and label == "label" and label not in names and "labels" in names:
        label = "labels"  # The name of numpy arrays.
    for option, name in (
        ("label_column", label),
        ("weight_column", weight),
        *(("by", each) for each in by),
    ):
        if option == "label_column":
            separated = len(names) > 1 or not any(mark in names[0] for mark in ",;\t")
            way_out = "separate a .csv's columns by commas, a .tsv's by tabs"
            check(
                separated,
                "the table to have several columns",
                f"one column {names[0]!r}",
                way_out,
            )
        is_there = name is None or name in names
        check(
            is_there,
            f"{option} to be one of {', '.join(names)}",
            repr(name),
            did_you_mean(name, names),
        )
        if name is not None:
            _check_once(times, name)
    for name in by:
        check_slices(name, schema.field(name).type)
    if listed:
        got, way_out = " and ".join(listed), "keep one of them"
        check(
            len(listed) == 1, "the table to hold logits or probabilities", got, way_out
        )
        kind, scores = LISTS[listed[0]], listed
        # Arrays with several labels per row may have one column.
        has_lists = label is not None and schema.field(label).type.num_fields > 0
        fewest = 1 if has_lists else 2
        check(
            len(class_names) >= fewest,
            f"column {listed[0]!r} to hold a list of at least 2 classes in each row",
            f"{len(class_names)} in the first row",
            "write a score for each class",
        )
    else:
        others = [name for name in names if name not in {label, weight, *by}]
        kind, scores, class_names = _class_columns(others, label)
        of_a_class = [
            repr(name)
            for name in (label, weight, *by)
            if (name or "").startswith(_PREFIXES[kind])
        ]
        requirement = "the columns of labels, weights and by not to be those of classes"
        check(not of_a_class, requirement, few(of_a_class), "name other columns")
        for name in scores:
            _check_once(times, name)
            _check_numbers(schema.field(name).type, name)
    check_class_names(class_names)
    if label is not None:
        check_unambiguous(schema.field(label).type, label, class_names)
    return Columns(kind, tuple(scores), tuple(class_names), label, weight, tuple(by))


def check_roles(label: str | None, weight: str | None, by: Sequence[str]) -> None:
    """Raise if one column is given for labels, weights or slices twice."""
    given = {"label_column": label, "weight_column": weight}
    names = [name for name in given.values() if name is not None]
    got = f"{label!r} for both"
    way_out = "name the column of the rows' weights, or leave weight_column out"
    check(
        len(set(names)) == len(names),
        "weight_column to be another column than label_column",
        got,
        way_out,
    )
    for option, name in given.items():
        requirement = f"by to name other columns than {option}"
        way_out = (
            "name columns of what is known of a row before its label, or leave by out"
        )
        check(name is None or name not in by, requirement, repr(name), way_out)


def check_slices(name: str, kind: Any) -> None:
    """Raise if the values of a column cannot be slices."""
    requirement = f"column {name!r} to hold texts or numbers"
    check(kind.num_fields == 0, requirement, kind, "name another column for by")


def _check_blanks(names: Sequence[str], missing: Set[str | None]) -> None:
    """Raise if a column would be read without the blanks at the ends of its name."""
    prefixes = tuple(_PREFIXES.values())
    blank = [
        repr(name)
        for name in names
        if name.strip() in missing
        or (not name.startswith(prefixes) and name.lstrip().startswith(prefixes))
    ]
    requirement = "the names of columns to have no blanks at their ends"
    way_out = "write the header without blanks next to its commas"
    check(not blank, requirement, few(blank), way_out)


def _check_once(times: Mapping[str, int], name: str) -> None:
    """Raise if several columns that are read have one name."""
    requirement = "the columns of a table to have different names"
    got = f"a file that contained multiple columns named {name}"
    check(times[name] == 1, requirement, got, "rename or remove all but one")


def _class_columns(
    columns: Sequence[str], label: str | None
) -> tuple[str, list[str], list[str]]:
    """The kind of the scores, their columns, and the class names."""
    found = {
        kind: [name for name in columns if name.startswith(prefix)]
        for kind, prefix in _PREFIXES.items()
    }
    got, way_out = "logit_ and prob_ columns", "keep one kind of them"
    check(
        not all(found.values()),
        "the table to hold logits or probabilities",
        got,
        way_out,
    )
    kind = "logits" if found["logits"] else "probs"
    used, prefix = (
        (found[kind], _PREFIXES[kind]) if found[kind] else (list(columns), "")
    )
    got, way_out = ", ".join(used) or "none", "name them logit_<class> or prob_<class>"
    check(
        len(used) >= 2,
        "the table to hold a column for each of at least 2 classes",
        got,
        way_out,
    )
    classes = [name.removeprefix(prefix) for name in used]
    blank = next(
        (name for name, each in zip(used, classes, strict=True) if not each.strip()),
        None,
    )
    way_out = "name the class, or write the table without its index"
    check(
        blank is None, "the class columns to name their classes", repr(blank), way_out
    )
    label_too = next(
        (name for name in classes if name.casefold() in _NAMES_OF_LABELS), None
    )
    got = f"{label_too!r} next to the label column {label!r}"
    way_out = "name the class columns prob_<class>; other columns are then ignored"
    check(
        bool(prefix) or label_too is None,
        "the table to hold one column of labels",
        got,
        way_out,
    )
    return kind, used, classes


def list_columns(schema: Schema) -> list[str]:
    """Return the columns of lists of scores."""
    from pyarrow import types

    kinds = (types.is_list, types.is_large_list, types.is_fixed_size_list)
    return [
        field.name
        for field in schema
        if field.name in LISTS and any(is_of(field.type) for is_of in kinds)
    ]


def check_not_probabilities(logits: NDArray[Any] | None) -> None:
    """Raise for probabilities that are named logits, because their softmax would be nearly uniform."""
    if logits is None or not len(logits):
        return
    # NaN is named later, with its row.
    within = logits.min() >= 0 and logits.max() <= 1
    if not within:
        return
    got = "values in [0, 1] whose rows all sum to 1"
    way_out = (
        "name them probs, or in a table prob_<class>; if they are logits, add 1 to all of them, which changes "
        "no probability"
    )
    check(
        np.abs(logits.sum(axis=1) - 1).max() > row_sum_tolerance(logits.shape[1]),
        "logits not to be probabilities",
        got,
        way_out,
    )


def softmax_of(logits: NDArray[Any]) -> FloatArray:
    """Return the softmax (n, C) of logits, in float64 and contiguous per class."""
    columns = logits.T.astype(np.float64)
    with np.errstate(invalid="ignore"):  # Rows with inf become NaN, which raises later.
        columns -= columns.max(axis=0)
    np.exp(columns, out=columns)
    columns /= columns.sum(axis=0)
    return columns.T


def codes_of(column: Any) -> tuple[IntArray, list[Any]]:
    """Return a column as codes (n,), and its values."""
    import pyarrow
    import pyarrow.compute as compute

    if not pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_encode(null_encoding="encode")
    indices, values = column.indices, column.dictionary.to_pylist()
    if indices.null_count:
        indices = compute.fill_null(indices.cast(pyarrow.int64()), len(values))
        values.append(None)
    return np.asarray(indices).astype(np.intp), values


def _check_numbers(kind: Any, name: str) -> None:
    from pyarrow import types

    known = (types.is_floating, types.is_integer, types.is_decimal, types.is_null)
    if not any(is_of(kind) for is_of in known):
        raise InputTypeError(
            expected(
                f"column {name!r}", "hold numbers in every row", kind, _NUMBERS_WAY
            )
        )


def numbers_of(column: Any, name: str) -> NDArray[Any]:
    """Return a column of numbers (n,), with floats unchanged and others as float64; raise if a value is missing."""
    import pyarrow
    import pyarrow.compute as compute

    _check_numbers(column.type, name)
    if column.null_count:
        row = int(np.argmax(column.is_null()))
        raise RowError(
            row, f"column {name!r}", "hold numbers in every row", "none", _NUMBERS_WAY
        )
    if not pyarrow.types.is_floating(column.type):
        column = compute.cast(column, pyarrow.float64())
    return np.asarray(column)
