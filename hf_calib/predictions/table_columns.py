"""Which columns of a table of predictions hold what, and its batches as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hf_calib._errors import InputTypeError, InputValueError, did_you_mean, expected, few
from hf_calib.metrics.checks import FloatArray, IntArray, RowError
from hf_calib.predictions.files import class_columns
from hf_calib.predictions.predictions import logs_of

if TYPE_CHECKING:
    from pyarrow import RecordBatch, Schema

_LISTS = {"logits": "logits", "probs": "probs", "probabilities": "probs"}
_NO_VALUE = "(none)"


class Batch(NamedTuple):
    """Rows of predictions.

    Args:
        logits: (n, C), or None.
        probs: (n, C), the softmax of logits where there are these.
        labels: (n,) int64.
        weights: (n,) float64, or None.
        by: for each column that names slices, the codes (n,) and the values that they number.
    """

    logits: NDArray[Any] | None
    probs: NDArray[Any]
    labels: IntArray
    weights: FloatArray | None
    by: tuple[tuple[IntArray, list[Any]], ...]

    @property
    def scores(self) -> NDArray[Any]:
        """(n, C): the logits, or the probabilities where there are none."""
        return self.probs if self.logits is None else self.logits

    def as_logits(self) -> NDArray[Any]:
        """(n, C): the logits, or the logarithm of the probabilities, where 0 counts as 1e-38."""
        return logs_of(self.probs) if self.logits is None else self.logits


@dataclass(frozen=True)
class TableColumns:
    """The columns of a table that are read.

    Args:
        kind: "logits" or "probs".
        scores: a column for each class, or one of lists.
        class_names: C.
        label: the column of labels.
        weight: that of weights, or None.
        by: those that name slices, and are in the table.
    """

    kind: str
    scores: tuple[str, ...]
    class_names: tuple[str, ...]
    label: str
    weight: str | None = None
    by: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """All of them, each once."""
        return list(dict.fromkeys([*self.scores, self.label, *filter(None, [self.weight]), *self.by]))

    @classmethod
    def of(
        cls,
        schema: Schema,
        label: str,
        *,
        weight: str | None = None,
        by: Sequence[str] = (),
        class_names: Sequence[str] | None = None,
        n_classes: int | None = None,
    ) -> TableColumns:
        """Find them.

        Args:
            schema: of the first shard.
            label: the column of labels.
            weight: that of weights, or None.
            by: those that name slices.
            class_names: of lists, where they are known.
            n_classes: of lists whose type does not tell.

        Raises:
            ValueError: if a column is missing, or what the columns hold is ambiguous.
        """
        import pyarrow

        names = list(schema.names)
        listed = [name for name in names if name in _LISTS and _is_list(schema.field(name).type)]
        if listed and label == "label" and label not in names and "labels" in names:
            label = "labels"  # as arrays of numpy are named
        for option, name in (
            ("label_column", label),
            *([("weight_column", weight)] if weight is not None else []),
            *(("by", name) for name in by),
        ):
            if name not in names:
                requirement = f"be one of {few(names)}"
                raise InputValueError(expected(option, requirement, repr(name), did_you_mean(name, names)))
        if listed:
            if len(listed) > 1:
                got = " and ".join(listed)
                raise InputValueError(
                    expected("the table", "hold logits or probabilities", got, "keep one of them")
                )
            kind = schema.field(listed[0]).type
            size = kind.list_size if pyarrow.types.is_fixed_size_list(kind) else n_classes
            found = class_names or tuple(map(str, range(size or 0)))
            return cls(_LISTS[listed[0]], (listed[0],), tuple(found), label, weight, tuple(by))
        others = [name for name in names if name not in {weight, *by} or name == label]
        scores, columns = class_columns(others, label)
        for column in columns.values():
            if not _is_number(schema.field(column).type):
                got = schema.field(column).type
                way_out = "name the class columns logit_<class> or prob_<class>, and fill in missing values"
                raise InputTypeError(
                    expected(f"column {column!r}", "hold numbers in every row", got, way_out)
                )
        return cls(scores or "probs", tuple(columns.values()), tuple(columns), label, weight, tuple(by))

    def check_same(self, schema: Schema) -> None:
        """Raise where another shard has other columns or classes."""
        missing = [name for name in self.names if name not in schema.names]
        if missing:
            got = f"none named {few(list(map(repr, missing)))}"
            way_out = "write all shards with the same columns"
            raise InputValueError(expected("the columns", "be those of the first shard", got, way_out))
        if len(self.scores) == 1:
            return
        prefix = "logit_" if self.kind == "logits" else "prob_"
        more = [name for name in schema.names if name.startswith(prefix) and name not in self.scores]
        if more:
            got = f"{few(list(map(repr, more)))} more"
            raise InputValueError(
                expected("the classes", "be those of the first shard", got, "use one model's")
            )

    def read(self, batch: RecordBatch) -> Batch:
        """The rows of a batch.

        Raises:
            TypeError: if a column is not of numbers.
            ValueError: a `RowError` for a row whose label is missing or unknown.
        """
        scores = self._scores(batch)
        logits, probs = (scores, softmax_of(scores)) if self.kind == "logits" else (None, scores)
        weights = None if self.weight is None else _numbers(batch.column(self.weight), self.weight)
        return Batch(
            logits,
            probs,
            self._labels(batch.column(self.label)),
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
                got = f"{lengths[row]:g}"
                requirement = f"have {len(self.class_names)} values"
                raise RowError(row, "the list", requirement, got, "write one for each class")
            return np.asfortranarray(values.reshape(len(batch), -1))
        columns = [_numbers(batch.column(name), name) for name in self.scores]
        matrix = np.empty((len(columns), len(batch)), np.result_type(*columns))
        for row, column in zip(matrix, columns, strict=True):
            row[:] = column
        return matrix.T

    def _labels(self, column: Any) -> IntArray:
        """Labels as the numbers of the classes that they name or count."""
        import pyarrow
        import pyarrow.compute as compute

        types = pyarrow.types
        if types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if column.null_count:
            row = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
            raise RowError(row, "the label", "be there", "none", "remove the rows without one")
        whole_names = all(name.lstrip("-").isdigit() for name in self.class_names)
        if types.is_floating(column.type):
            values = column.to_numpy(zero_copy_only=False)
            odd = np.flatnonzero(values % 1 != 0)
            if len(odd):
                got = str(values[odd[0]])
                raise RowError(
                    int(odd[0]), "the label", "be a class name or id", got, "choose another label_column"
                )
            column = compute.cast(column, pyarrow.int64())
        if types.is_integer(column.type) or types.is_boolean(column.type):
            ids = compute.cast(column, pyarrow.int64()).to_numpy(zero_copy_only=False)
            if not whole_names or self.class_names == tuple(map(str, range(len(self.class_names)))):
                return np.asarray(ids)
            column = compute.cast(compute.cast(column, pyarrow.int64()), pyarrow.string())
        texts = compute.cast(column, pyarrow.string())
        found = compute.index_in(texts, value_set=pyarrow.array(self.class_names, pyarrow.string()))
        if found.null_count == len(found) and len(found) and not whole_names:
            try:  # ids, in a file of text, perhaps as pandas writes them where some are missing
                numbers = compute.cast(texts, pyarrow.float64()).to_numpy(zero_copy_only=False)
                if (numbers % 1 == 0).all():
                    return np.asarray(numbers.astype(np.int64))
            except pyarrow.ArrowInvalid:
                pass
        if found.null_count:
            row = int(np.argmax(found.is_null().to_numpy(zero_copy_only=False)))
            requirement = f"be one of the classes ({few(self.class_names)})"
            way_out = "write the labels as the columns are named, or as numbers from 0 on"
            raise RowError(row, "the label", requirement, repr(texts[row].as_py()), way_out)
        return np.asarray(found.to_numpy(zero_copy_only=False)).astype(np.int64)


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
    indices = column.indices
    values = column.dictionary.to_pylist()
    if indices.null_count:
        indices = compute.fill_null(indices.cast(pyarrow.int64()), len(values))
        values.append(None)
    return np.asarray(indices.to_numpy(zero_copy_only=False)).astype(np.intp), values


def name_of_value(value: Any) -> str:
    """A slice's name.

    >>> name_of_value("de"), name_of_value(None), name_of_value(3)
    ('de', '(none)', '3')
    """
    return _NO_VALUE if value in (None, "") else str(value)


def _numbers(column: Any, name: str) -> NDArray[Any]:
    import pyarrow
    import pyarrow.compute as compute

    if not _is_number(column.type):
        way_out = "fill in missing values"
        raise InputTypeError(expected(f"column {name!r}", "hold numbers in every row", column.type, way_out))
    if pyarrow.types.is_decimal(column.type) or pyarrow.types.is_integer(column.type):
        column = compute.cast(column, pyarrow.float64())
    return np.asarray(column.to_numpy(zero_copy_only=False))


def _is_number(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_floating(kind) or types.is_integer(kind) or types.is_decimal(kind))


def _is_list(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))
