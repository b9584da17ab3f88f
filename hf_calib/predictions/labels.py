"""Labels in a column of any type, as the ids of classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_calib._errors import InputTypeError, check, expected, few, look_alikes
from hf_calib._text import as_number
from hf_calib.metrics.checks import RowError

OF_TABLES = (
    "the names of the class columns",
    "write the labels as the columns are named, or as numbers from 0 on",
)
_LARGEST_EXACT = 2**53  # Above it, float64 does not represent all integers.


def check_unambiguous(kind: Any, label: str, class_names: Sequence[str]) -> None:
    """Raise if a label of this pyarrow type may be the name of one class and the id of another."""
    from pyarrow import types

    numbers = [as_number(name) for name in class_names]
    are_ids = types.is_integer(kind.value_type if types.is_dictionary(kind) else kind)
    if None not in numbers or are_ids:
        return
    ids = set(range(len(class_names)))
    twofold = [
        repr(name)
        for place, (name, number) in enumerate(zip(class_names, numbers, strict=True))
        if number in ids and number != place
    ]
    check(
        not twofold,
        f"each label in column {label!r} to be a name or an id of one class only",
        f"class names {few(twofold)} that are ids of other classes, next to names "
        "that are no numbers",
        "rename the classes and the labels",
    )


def label_ids(
    column: Any, name: str, names: Sequence[str], told: tuple[str, str] = OF_TABLES
) -> NDArray[np.int64]:
    """Return the ids (n,) of the labels in a pyarrow array, which are names or ids; raise a `RowError` otherwise.

    One rule holds for the whole column. Its labels are names if all of them are; upper and lower case count only if
    names differ by it alone. Otherwise they are ids from 0, also as floats or texts. If all names are numbers, labels
    are names, which are compared as numbers.

    Args:
        column: integers, floats, texts or booleans.
        name: name of the column.
        names: C class names.
        told: for errors, the requirement on the labels and the way out.
    """
    import pyarrow
    import pyarrow.compute as compute
    from pyarrow import types

    argument = f"column {name!r}"
    numbers = [as_number(name) for name in names]
    are_ids = None in numbers or numbers == list(range(len(names)))
    if types.is_integer(column.type) and not column.null_count and are_ids:
        return np.asarray(column).astype(np.int64, copy=False)
    column = filled(column, argument)
    texts = column.cast(pyarrow.string())
    found = compute.index_in(texts, pyarrow.array(names, pyarrow.string()))
    lower = [each.lower() for each in names]
    if found.null_count and len(set(lower)) == len(lower):
        in_lower_case = pyarrow.array(lower, pyarrow.string())
        found = compute.index_in(compute.utf8_lower(texts), in_lower_case)
    if found.null_count or are_numbers(column.type):
        of_numbers = _ids_of_numbers(texts, argument, numbers)
        found = found if of_numbers is None else of_numbers
    if found.null_count:
        row = int(np.argmax(found.is_null()))
        unknown = texts[row].as_py()
        alike = look_alikes([unknown], names)
        got = f"{unknown!r} ({alike})" if alike else repr(unknown)
        raise RowError(row, argument, f"hold {told[0]} ({few(names)})", got, told[1])
    return np.asarray(found).astype(np.int64)


def are_numbers(kind: Any) -> bool:
    """Whether a pyarrow type is one of numbers, or of missing values only."""
    from pyarrow import types

    known = (types.is_floating, types.is_integer, types.is_decimal, types.is_null)
    return any(is_of(kind) for is_of in known)


def filled(column: Any, argument: str) -> Any:
    """Return a column of one value a row as a plain array; raise if a row has none, or several."""
    import pyarrow
    import pyarrow.compute as compute
    from pyarrow import types

    if isinstance(column, pyarrow.ChunkedArray):
        column = column.combine_chunks()
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if types.is_nested(column.type):
        way_out = "choose another label_column"
        raise InputTypeError(
            expected(argument, "hold one class in each row", column.type, way_out)
        )
    is_missing = column.is_null(nan_is_null=True)
    if types.is_string(column.type) or types.is_large_string(column.type):
        is_blank = compute.equal(compute.utf8_trim_whitespace(column), "")
        is_missing = compute.fill_null(is_blank, True)
    if is_missing.true_count:
        row = int(np.argmax(is_missing))
        way_out = "remove the rows without one"
        raise RowError(row, argument, "hold a label in every row", "none", way_out)
    return column


def _ids_of_numbers(
    texts: Any, argument: str, numbers: Sequence[Decimal | None]
) -> Any:
    """The ids (n,) of labels that are numbers, null for those without a class; None if a label is no number."""
    import pyarrow

    encoded = texts.dictionary_encode()
    read = [as_number(each) for each in encoded.dictionary.to_pylist()]
    labels = [number for number in read if number is not None]
    if len(labels) < len(read):
        return None
    ids: list[int | None]
    places = {number: i for i, number in enumerate(numbers)}
    if None not in numbers or places.keys() >= set(labels):
        times = Counter(numbers)
        twice = [str(label) for label in labels if times[label] > 1]
        requirement = (
            f"class_names to differ as numbers, as the labels in {argument} do"
        )
        way_out = "name each class by another number"
        check(not twice, requirement, f"{few(twice)} twice", way_out)
        ids = [places.get(label) for label in labels]
    else:
        is_id = np.array(
            [abs(label) <= _LARGEST_EXACT and label % 1 == 0 for label in labels]
        )
        wrong = ~is_id[np.asarray(encoded.indices)]
        if wrong.any():
            row = int(np.argmax(wrong))
            way_out = "choose another label_column"
            raise RowError(
                row, argument, "hold class names or ids", texts[row], way_out
            )
        ids = [int(label) for label in labels]
    return pyarrow.array(ids, pyarrow.int64()).take(encoded.indices)
