"""Which columns of a table of predictions hold what, and its batches as arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hf_calib._errors import InputTypeError, InputValueError, check, did_you_mean, expected, few, look_alikes
from hf_calib.metrics.checks import FloatArray, IntArray, RowError
from hf_calib.predictions.predictions import logs_of

if TYPE_CHECKING:
    from pyarrow import RecordBatch, Schema

LISTS = {"logits": "logits", "probs": "probs", "probabilities": "probs"}
_PREFIXES = {"logits": "logit_", "probs": "prob_"}
# Columns that hold labels, whichever of them is read: never probabilities of a class.
_NAMES_OF_LABELS = {"gold", "label", "label_id", "labels", "target", "targets", "true_label", "y_true"}
NUMBERS_WAY = "name the class columns logit_<class> or prob_<class>, and fill in missing values"
_LARGEST_EXACT = 2**53  # above, float64 leaves integers out


class Batch(NamedTuple):
    """n rows of predictions."""

    logits: NDArray[Any] | None  # (n, C)
    probs: NDArray[Any]  # (n, C), the softmax of logits where there are these
    labels: IntArray  # (n,)
    weights: FloatArray | None  # (n,)
    by: tuple[tuple[IntArray, list[Any]], ...]  # of each column of slices the codes (n,) and what they number

    @property
    def scores(self) -> NDArray[Any]:
        """(n, C): the logits, or the probabilities where there are none."""
        return self.probs if self.logits is None else self.logits

    def as_logits(self) -> NDArray[Any]:
        """(n, C): the logits, or the logarithm of the probabilities, where 0 counts as 1e-38."""
        return logs_of(self.probs) if self.logits is None else self.logits


@dataclass(frozen=True)
class Columns:
    """The columns of a table that are read."""

    kind: str | None  # "logits" or "probs"; None where the names do not tell: they are then probabilities
    scores: tuple[str, ...]  # a column for each class, or one of lists
    class_names: tuple[str, ...]
    label: str | None
    weight: str | None = None
    by: tuple[str, ...] = ()  # those of slices that are in the table

    @property
    def names(self) -> list[str]:
        """All of them, each once."""
        return list(dict.fromkeys([*self.scores, *filter(None, [self.label, self.weight]), *self.by]))

    @property
    def texts(self) -> list[str]:
        """Those that a text file holds as they stand there: 01, TRUE and 1.50 may be names."""
        return [*filter(None, [self.label]), *self.by]

    def check_same(self, names: Sequence[str]) -> None:
        """Raise where another file has other columns or classes."""
        missing = [name for name in self.names if name not in names]
        got = f"none named {few(list(map(repr, missing)))}"
        check(
            not missing, "the columns to be those of the first file", got, "write all with the same columns"
        )
        prefix = _PREFIXES["logits" if self.kind == "logits" else "probs"]
        known = (*self.scores, prefix)
        more = [name for name in names if name.startswith(prefix) and name not in known]
        more = more if len(self.scores) > 1 else []
        got = f"{few(list(map(repr, more)))} more"
        check(not more, "the classes to be those of the first file", got, "use one model's")

    def read(self, batch: RecordBatch) -> Batch:
        """The rows of a batch; a `RowError` for one that is wrong."""
        scores = self._scores(batch)
        if self.kind is None:
            _check_look_like_probabilities(scores)
        if self.kind == "logits":
            check_not_probabilities(scores)
        logits, probs = (scores, softmax_of(scores)) if self.kind == "logits" else (None, scores)
        labels = np.zeros(len(batch), np.int64)
        if self.label is not None:
            labels = label_ids(batch.column(self.label), self.label, self.class_names)
        weights = None if self.weight is None else _numbers(batch.column(self.weight), self.weight)
        return Batch(
            logits,
            probs,
            labels,
            None if weights is None else weights.astype(np.float64, copy=False),
            tuple(codes_of(batch.column(name)) for name in self.by),
        )

    def _scores(self, batch: RecordBatch) -> NDArray[Any]:
        if len(self.scores) == 1:
            column = batch.column(self.scores[0])
            values = _numbers(column.flatten(), self.scores[0])
            if values.size != len(batch) * len(self.class_names):
                lengths = column.value_lengths().to_numpy(zero_copy_only=False)
                row = int(np.argmax(lengths != len(self.class_names)))
                requirement = f"have {len(self.class_names)} values"
                raise RowError(row, "the list", requirement, f"{lengths[row]:g}", "write one for each class")
            return np.asfortranarray(values.reshape(len(batch), -1))
        columns = [_numbers(batch.column(name), name) for name in self.scores]
        matrix = np.empty((len(columns), len(batch)), np.result_type(*columns))
        for row, column in zip(matrix, columns, strict=True):
            row[:] = column
        return matrix.T


def columns_of(
    schema: Schema,
    label: str | None,
    weight: str | None = None,
    by: Sequence[str] = (),
    class_names: Sequence[str] = (),
) -> Columns:
    """Find the columns of a table by the schema of its first file; class names are those of lists."""
    names = list(schema.names)
    listed = [name for name in names if name in LISTS and is_list(schema.field(name).type)]
    if listed and label == "label" and label not in names and "labels" in names:
        label = "labels"  # as arrays of numpy are named
    wanted = [("label_column", label), ("weight_column", weight), *(("by", name) for name in by)]
    for option, name in wanted:
        way_out = did_you_mean(name, names)
        if option == "label_column" and len(names) == 1 and any(mark in names[0] for mark in ",;\t"):
            got, way_out = f"one column {names[0]!r}", "separate a .csv's columns by commas, a .tsv's by tabs"
            raise InputValueError(expected("the table", "have several columns", got, way_out))
        check(name is None or name in names, f"{option} to be one of {', '.join(names)}", repr(name), way_out)
    if listed:
        got = " and ".join(listed)
        check(len(listed) == 1, "the table to hold logits or probabilities", got, "keep one of them")
        return Columns(LISTS[listed[0]], (listed[0],), tuple(class_names), label, weight, tuple(by))
    kind, classes = _class_columns(
        [name for name in names if name not in {weight, *by} or name == label], label
    )
    for column in classes.values():
        if not is_number(schema.field(column).type):
            got = schema.field(column).type
            raise InputTypeError(
                expected(f"column {column!r}", "hold numbers in every row", got, NUMBERS_WAY)
            )
    return Columns(kind, tuple(classes.values()), tuple(classes), label, weight, tuple(by))


def _class_columns(columns: Sequence[str], label: str | None) -> tuple[str | None, dict[str, str]]:
    """The kind of scores, if the names of the class columns tell it, and class name -> column."""
    others = [name for name in columns if name != label]
    found = {kind: [name for name in others if name.startswith(prefix)] for kind, prefix in _PREFIXES.items()}
    got, way_out = "logit_ and prob_ columns", "keep one kind of them"
    check(not all(found.values()), "the table to hold logits or probabilities", got, way_out)
    kind = next((kind for kind, names in found.items() if names), None)
    used, prefix = (found[kind], _PREFIXES[kind]) if kind else (others, "")
    got, way_out = ", ".join(used) or "none", "name them logit_<class> or prob_<class>"
    check(len(used) >= 2, "the table to hold a column for each of at least 2 classes", got, way_out)
    classes = {name.removeprefix(prefix): name for name in used}
    blank = [repr(column) for name, column in classes.items() if not name.strip()]
    way_out = "name the class; leave out a table's index when you write it"
    check(not blank, "the class columns to name their classes", "".join(blank[:1]), way_out)
    too = [name for name in classes if name.casefold() in _NAMES_OF_LABELS] if kind is None else []
    got = f"{''.join(too[:1])!r} beside the label column {label!r}"
    way_out = "name the class columns prob_<class>, and other columns are ignored"
    check(not too, "the table to hold one column of labels", got, way_out)
    return kind, classes


def check_different(columns: Sequence[str]) -> None:
    """Refuse two columns of one name."""
    twice = sorted(name for name, times in Counter(columns).items() if times > 1)
    got = f"{', '.join(map(repr, twice))} twice"
    check(not twice, "the columns to have different names", got, "keep one of each name")


def check_not_probabilities(logits: NDArray[Any] | None) -> None:
    """Refuse probabilities under the name of logits: their softmax would be nearly uniform."""
    if logits is None or not len(logits) or logits.min() < 0 or logits.max() > 1:
        return
    got = "values in [0, 1] whose rows all sum to 1: probabilities"
    way_out = (
        "name them probs, or in a table prob_<class>; if they are logits, add 1 to all of them, which changes "
        "no probability"
    )
    check(np.abs(logits.sum(axis=1) - 1).max() > 1e-3, "logits to be logits", got, way_out)


def _check_look_like_probabilities(scores: NDArray[Any]) -> None:
    """Columns without a prefix are probabilities; if they are logits, say how to name them."""
    outside = (scores < 0) | (scores > 1 + 1e-6)
    if outside.any():
        row, column = np.argwhere(outside)[0]
        way_out = "name the columns logit_<class> if they hold logits, and prob_<class> if there are others"
        requirement = "hold probabilities, as their names do not say logit_"
        raise RowError(int(row), "the class columns", requirement, f"{scores[row, column]:.6g}", way_out)


def label_ids(column: Any, name: str, names: Sequence[str]) -> IntArray:
    """Labels as the numbers of the classes that they name or count; a `RowError` for one that does neither.

    A label is a name where all are; else they are numbers from 0 on, also as floats, unless all names are integers.
    """
    import pyarrow
    import pyarrow.compute as compute

    types = pyarrow.types
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if types.is_floating(column.type):
        column = compute.if_else(compute.is_nan(column), None, column)
        values = column.to_numpy(zero_copy_only=False)
        if (np.nan_to_num(values) % 1 == 0).all() and (np.abs(np.nan_to_num(values)) < _LARGEST_EXACT).all():
            column = compute.cast(column, pyarrow.int64())  # pandas writes integers so where some are missing
    numbered = tuple(names) == tuple(map(str, range(len(names)))) or not all(map(_is_whole, names))
    if types.is_integer(column.type) and not column.null_count and numbered:
        return np.asarray(column.to_numpy(zero_copy_only=False)).astype(np.int64)
    texts = compute.cast(column, pyarrow.string())
    if types.is_boolean(column.type):
        texts = compute.utf8_capitalize(texts)
    blank = compute.fill_null(compute.equal(compute.utf8_trim_whitespace(texts), ""), True)
    if compute.any(blank).as_py():
        got, way_out = "none", "remove the rows without one"
        raise RowError(_first(blank), f"column {name!r}", "hold a label in every row", got, way_out)
    found = compute.index_in(texts, value_set=pyarrow.array(names, pyarrow.string()))
    if not found.null_count:
        return np.asarray(found.to_numpy(zero_copy_only=False)).astype(np.int64)
    are_numbers = False
    if types.is_boolean(column.type):
        texts, are_numbers = compute.cast(compute.cast(column, pyarrow.int64()), pyarrow.string()), True
    try:
        numbers = compute.cast(texts, pyarrow.float64()).to_numpy(zero_copy_only=False)
        are_numbers = True
    except pyarrow.ArrowInvalid:
        pass
    if are_numbers:
        with np.errstate(invalid="ignore"):
            wrong = ~(numbers % 1 == 0) | (np.abs(numbers) > _LARGEST_EXACT)
        if wrong.any():
            row = int(np.argmax(wrong))
            got = f"{texts[row].as_py()} in row {row}"
            way_out = "choose another label_column"
            raise InputTypeError(expected(f"column {name!r}", "hold class names or ids", got, way_out))
        if not all(map(_is_whole, names)):
            return np.asarray(numbers.astype(np.int64))
        texts = compute.cast(pyarrow.array(numbers.astype(np.int64)), pyarrow.string())
        found = compute.index_in(texts, value_set=pyarrow.array(names, pyarrow.string()))
        if not found.null_count:
            return np.asarray(found.to_numpy(zero_copy_only=False)).astype(np.int64)
    row = _first(found.is_null())
    unknown = texts[row].as_py()
    alike = look_alikes([unknown], names)
    requirement = f"hold the names of the class columns ({few(names)})"
    way_out = "write the labels as the columns are named, or as numbers from 0 on"
    got = f"{unknown!r} ({alike})" if alike else repr(unknown)
    raise RowError(row, f"column {name!r}", requirement, got, way_out)


def softmax_of(logits: NDArray[Any]) -> FloatArray:
    """The softmax (n, C) of logits, in float64 and in one piece for each class."""
    columns = logits.T.astype(np.float64)
    with np.errstate(invalid="ignore"):  # rows with inf become NaN, which is refused
        columns -= columns.max(axis=0)
    np.exp(columns, out=columns)
    columns /= columns.sum(axis=0)
    return columns.T


def codes_of(column: Any) -> tuple[IntArray, list[Any]]:
    """A column as the numbers (n,) of its values."""
    import pyarrow
    import pyarrow.compute as compute

    if not pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_encode(null_encoding="encode")
    indices, values = column.indices, column.dictionary.to_pylist()
    if indices.null_count:
        indices = compute.fill_null(indices.cast(pyarrow.int64()), len(values))
        values.append(None)
    return np.asarray(indices.to_numpy(zero_copy_only=False)).astype(np.intp), values


def _is_whole(name: str) -> bool:
    return name.lstrip("-").isdigit()


def _first(flags: Any) -> int:
    return int(np.argmax(flags.to_numpy(zero_copy_only=False)))


def _numbers(column: Any, name: str) -> NDArray[Any]:
    import pyarrow
    import pyarrow.compute as compute

    argument, requirement = f"column {name!r}", "hold numbers in every row"
    if not is_number(column.type):
        raise InputTypeError(expected(argument, requirement, column.type, NUMBERS_WAY))
    if column.null_count:
        raise RowError(_first(column.is_null()), argument, requirement, "none", NUMBERS_WAY)
    if not pyarrow.types.is_floating(column.type):
        column = compute.cast(column, pyarrow.float64())
    return np.asarray(column.to_numpy(zero_copy_only=False))


def is_number(kind: Any) -> bool:
    """Whether a type of pyarrow is one of numbers."""
    from pyarrow import types

    return bool(types.is_floating(kind) or types.is_integer(kind) or types.is_decimal(kind))


def is_list(kind: Any) -> bool:
    """Whether a type of pyarrow is one of lists."""
    from pyarrow import types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))
