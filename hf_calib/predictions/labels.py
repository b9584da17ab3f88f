"""Labels in a column of any type, as the ids of classes; the kinds of labels, and what follows for maps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hf_calib._errors import InputTypeError, expected, few, look_alikes
from hf_calib.metrics.checks import RowError
from hf_calib.scaling import SINGLE_LABEL_SCALERS

_LARGEST_EXACT = 2**53  # above, float64 leaves integers out
OF_TABLES = (
    "the names of the class columns",
    "write the labels as the columns are named, or as numbers from 0 on",
)


def label_ids(
    column: Any, name: str, names: Sequence[str], told: tuple[str, str] = OF_TABLES
) -> NDArray[np.int64]:
    """The ids (n,) that the labels of a pyarrow array name or are; a `RowError` for one that does neither.

    Labels are names where all are, in any case where no two names differ in case only. Else they are numbers from 0
    on, also as floats or texts; where all names are integers, they are names as numbers, too.

    Args:
        column: of integers, floats, texts or truth values.
        name: of the column.
        names: C of them.
        told: for errors, what the labels have to be, and the way out.
    """
    import pyarrow
    import pyarrow.compute as compute

    argument, types = f"column {name!r}", pyarrow.types
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if types.is_nested(column.type):
        way_out = "choose another label_column"
        raise InputTypeError(expected(argument, "hold one class in each row", column.type, way_out))
    if types.is_floating(column.type):
        column = compute.if_else(compute.is_nan(column), None, column)
    are_whole = all(each.lstrip("-").isdigit() for each in names)
    are_numbers = not are_whole or tuple(names) == tuple(map(str, range(len(names))))
    if types.is_integer(column.type) and not column.null_count and are_numbers:
        return np.asarray(column).astype(np.int64)
    texts = compute.cast(column, pyarrow.string())
    blank = compute.fill_null(compute.equal(compute.utf8_trim_whitespace(texts), ""), True)
    if compute.any(blank).as_py():
        requirement, way_out = "hold a label in every row", "remove the rows without one"
        raise RowError(int(np.argmax(blank)), argument, requirement, "none", way_out)
    found = compute.index_in(texts, value_set=pyarrow.array(names, pyarrow.string()))
    lower = [each.lower() for each in names]
    if found.null_count and len(set(lower)) == len(lower):
        found = compute.index_in(compute.utf8_lower(texts), value_set=pyarrow.array(lower, pyarrow.string()))
    if found.null_count:
        with suppress(pyarrow.ArrowInvalid), np.errstate(invalid="ignore"):
            numbers = np.asarray(compute.cast(texts, pyarrow.float64()))
            wrong = ~(np.abs(numbers) <= _LARGEST_EXACT) | (numbers % 1 != 0)
            if wrong.any():
                row, way_out = int(np.argmax(wrong)), "choose another label_column"
                raise RowError(row, argument, "hold class names or ids", texts[row], way_out)
            ids = numbers.astype(np.int64)
            if not are_whole:
                return ids
            texts = compute.cast(pyarrow.array(ids), pyarrow.string())
            found = compute.index_in(texts, value_set=pyarrow.array(names, pyarrow.string()))
    if found.null_count:
        row = int(np.argmax(found.is_null()))
        unknown = texts[row].as_py()
        alike = look_alikes([unknown], names)
        got = f"{unknown!r} ({alike})" if alike else repr(unknown)
        raise RowError(row, argument, f"hold {told[0]} ({few(names)})", got, told[1])
    return np.asarray(found).astype(np.int64)


class LabelKind(NamedTuple):
    """How the labels of a task are given, and what follows for probabilities, maps and statistics."""

    name: str  # in messages
    rows: str  # the examples that have a label
    columns: str  # the columns of the logits
    sigmoid: bool  # whether each logit has a probability of its own, so that a row has any number of labels
    independent: bool  # whether examples are independent draws, as the promises of decisions need
    maps: tuple[str, ...]  # the post-hoc methods that go with it


SINGLE_LABEL = LabelKind("single-label", "rows", "classes", False, True, tuple(SINGLE_LABEL_SCALERS))
TOKENS = LabelKind("token", "tokens", "classes", False, False, tuple(SINGLE_LABEL_SCALERS))
MULTI_LABEL = LabelKind(
    "multi-label", "rows", "labels", True, True, ("auto", "temperature", "per_label_temperature")
)
