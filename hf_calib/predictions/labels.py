"""Labels in a column of any type, as the ids of classes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_calib._errors import (
    InputTypeError,
    check,
    did_you_mean,
    expected,
    few,
    look_alikes,
)
from hf_calib._text import as_number
from hf_calib.metrics.checks import RowError, refuse

OF_TABLES = (
    "the names of the class columns",
    "write the labels as the columns are named, or as numbers from 0 on",
)
OF_SCORES = (
    "the names of the two classes",
    "name the class of the score as positive_class, or both as class_names",
)
FLAGS = ("false", "true")
_ONE_WAY = "write a class in the same way in both columns, or write a column 'correct' of 0 and 1"
# The zero of "01" may be a part of a code.
_PADDED = re.compile(r"\s*[+-]?0\d")
# Above it, float64 does not represent all integers.
_LARGEST_EXACT = 2**53


def check_unambiguous(kind: Any, argument: str, class_names: Sequence[str]) -> None:
    """Raise if a label of this pyarrow type may be the name of one class and the id of another."""
    from pyarrow import types

    numbers = [as_number(name) for name in class_names]
    # If some names are no numbers, a column of integers holds ids only.
    are_ids = types.is_integer(kind.value_type if types.is_dictionary(kind) else kind)
    if None not in numbers or are_ids:
        return
    ids = set(range(len(class_names)))
    twofold = [
        repr(name)
        for place, (name, number) in enumerate(zip(class_names, numbers, strict=True))
        if number in ids and number != place
    ]
    requirement = f"each label in {argument} to be a name or an id of one class only"
    got = f"class names {few(twofold)} that are ids of other classes, next to names "
    got += "that are no numbers"
    check(not twofold, requirement, got, "rename the classes and the labels")


def label_ids(
    column: Any,
    argument: str,
    names: Sequence[str],
    told: tuple[str, str] = OF_TABLES,
    *,
    as_written: bool = False,
) -> NDArray[np.int64]:
    """Return the ids (n,) of the labels in a pyarrow array; raise a `RowError` if one has none.

    Labels are names or ids, and one rule holds for the whole column. They are names if all of them
    are; upper and lower case count only if names differ by it alone. Otherwise they are ids from 0,
    also as floats or texts. If all names are numbers, labels are names, which are compared as
    numbers. The ids may be outside of 0..C-1, see `check_ids`.

    Args:
        column: integers, floats, texts or booleans.
        argument: the column in errors.
        names: C class names.
        told: for errors, the requirement on the labels and the way out.
        as_written: whether names count in their case only, and ids if they are plain integers and
            no label is a name. So it is in training data, which name their own classes.
    """
    import pyarrow
    from pyarrow import types

    numbers = [as_number(name) for name in names]
    are_ids = None in numbers or numbers == list(range(len(names)))
    # This is the way of most columns, which makes no text of each row.
    if types.is_integer(column.type) and not column.null_count and are_ids:
        return np.asarray(column).astype(np.int64, copy=False)
    column = filled(column, argument)
    texts = column.cast(pyarrow.string())
    found = _as_names(texts, names)
    if found.null_count and not as_written:
        found = _as_names_in_any_case(texts, names, found)
    # The text of a number is one of several forms, such as 1 and 1.0, so it is compared
    # as a number.
    if found.null_count or are_numbers(column.type):
        found = _as_numbers(texts, names, found, argument, as_written)
    if found.null_count:
        row = int(np.argmax(found.is_null()))
        unknown = texts[row].as_py()
        alike = look_alikes([unknown], names)
        got = f"{unknown!r} ({alike})" if alike else repr(unknown)
        raise RowError(row, argument, f"hold {told[0]} ({few(names)})", got, told[1])
    return np.asarray(found).astype(np.int64)


def other_label(column: Any, argument: str, positive: str) -> str | None:
    """Return the one label in a pyarrow array that is not the positive one, None if there is none;
    raise for several, or if no label is the positive one.
    """
    labels = filled(column, argument).cast("string").unique().to_pylist()
    others = {_key(text): text for text in labels if not is_same(text, positive)}
    is_known = any(is_same(text, positive) for text in labels)
    requirement = f"positive_class to be a label in {argument}"
    got = f"{positive!r} for {few(labels)}"
    check(is_known, requirement, got, did_you_mean(positive, labels))
    requirement = f"{argument} to have one other label than {positive!r}"
    way_out = "write a column for each class"
    check(len(others) < 2, requirement, few(list(others.values())), way_out)
    return next(iter(others.values()), None)


def are_ids(column: Any, argument: str, names: Sequence[str]) -> bool:
    """Whether the labels in a pyarrow array are ids, which do not follow their names to other
    places.
    """
    moved = [*names[1:], names[0]]
    ids = label_ids(column, argument, names)
    return bool((ids == label_ids(column, argument, moved)).any())


def check_ids(
    ids: NDArray[np.int64], argument: str, n_classes: int, way_out: str
) -> None:
    """Raise unless all ids (n,) are of these classes."""
    outside = (ids < 0) | (ids >= n_classes)
    refuse(outside, argument, f"hold ids in 0..{n_classes - 1}", ids, way_out)


def _as_names(texts: Any, names: Sequence[str]) -> Any:
    """The ids (n,) of labels that are names, null for others."""
    import pyarrow
    import pyarrow.compute as compute

    return compute.index_in(texts, pyarrow.array(names, pyarrow.string()))


def _as_names_in_any_case(texts: Any, names: Sequence[str], found: Any) -> Any:
    """The ids (n,) without upper and lower case; what was found if names differ by it alone."""
    import pyarrow.compute as compute

    lower = [name.lower() for name in names]
    if len(set(lower)) < len(lower):
        return found
    return _as_names(compute.utf8_lower(texts), lower)


def _as_numbers(
    texts: Any, names: Sequence[str], found: Any, argument: str, as_written: bool
) -> Any:
    """The ids (n,) of labels that are numbers; what was found if one is no number."""
    import pyarrow

    # Each different text is parsed once.
    encoded = texts.dictionary_encode()
    written = encoded.dictionary.to_pylist()
    labels = [number for number in map(as_number, written) if number is not None]
    if len(labels) < len(written):
        return found
    check_unambiguous(texts.type, argument, names)
    numbers = [as_number(name) for name in names]
    places = {number: i for i, number in enumerate(numbers)}
    ids: list[int | None]
    if None not in numbers or places.keys() >= set(labels):
        times = Counter(numbers)
        twice = [str(label) for label in labels if times[label] > 1]
        requirement = f"class_names to differ as numbers, as those in {argument}"
        way_out = "name each class by another number"
        check(not twice, requirement, f"{few(twice)} twice", way_out)
        ids = [places.get(label) for label in labels]
    # If some of the labels are names, the others are no ids.
    elif as_written and places.keys() & set(labels):
        return found
    else:
        are_ids = [abs(label) <= _LARGEST_EXACT and label % 1 == 0 for label in labels]
        if as_written:
            # A text such as "01" may be a code.
            are_ids = [text.isdecimal() and not _PADDED.match(text) for text in written]
        wrong = ~np.array(are_ids)[np.asarray(encoded.indices)]
        if wrong.any():
            row = int(np.argmax(wrong))
            way_out = "choose another label_column"
            raise RowError(
                row, argument, "hold class names or ids", texts[row], way_out
            )
        ids = [int(label) for label in labels]
    return pyarrow.array(ids, pyarrow.int64()).take(encoded.indices)


def are_flags(column: Any, name: str, class_names: Sequence[str]) -> bool:
    """Whether labels are false or true, which stand for the first and the second of these two class
    names.
    """
    import pyarrow
    import pyarrow.compute as compute
    from pyarrow import types

    first, second = (each.lower() for each in class_names)
    # These names say that true is the first class, or false the second.
    if first == FLAGS[1] or second == FLAGS[0]:
        return False
    column = filled(column, f"column {name!r}")
    # The numbers 0 and 1 are ids, which `label_ids` reads.
    if types.is_boolean(column.type) or are_numbers(column.type):
        return types.is_boolean(column.type)
    lower = compute.utf8_lower(column.cast(pyarrow.string()))
    return bool(compute.all(compute.is_in(lower, pyarrow.array(FLAGS))).as_py())


def are_equal(
    predicted: Any, predicted_name: str, labels: Any, label_name: str
) -> NDArray[np.int64]:
    """1 where the prediction (n,) is the label, in pyarrow arrays of any types; otherwise 0.

    The rule is that of `label_ids`. Texts are names if one column has all values of the other.
    Otherwise numbers are compared as numbers, and other texts without upper and lower case. As no
    class names say which is meant, texts that may be codes or the same number, such as "01" and
    "1", are refused unless they are names.
    """
    import pyarrow

    columns = [
        _exact(predicted, f"column {predicted_name!r}"),
        _exact(labels, f"column {label_name!r}"),
    ]
    if any(are_numbers(each.type) for each in columns):
        # Next to numbers, false and true are 0 and 1.
        columns = [_without_booleans(each) for each in columns]
    encoded = [each.cast(pyarrow.string()).dictionary_encode() for each in columns]
    first, second = (each.dictionary.to_pylist() for each in encoded)
    told = f"columns {predicted_name!r} and {label_name!r}"
    is_typed = any(are_numbers(each.type) for each in columns)
    are_names = set(first) <= set(second) or set(second) <= set(first)
    keys: list[list[Decimal | str]] = [first, second]
    if is_typed or not are_names:
        keys = [_keys(first, told), _keys(second, told)]
        _check_not_padded(dict(zip(keys[0], first, strict=True)), keys[1], second, told)
    else:
        # Numbers that are written in two ways would be kept apart, and be wrong without a word.
        every = dict.fromkeys([*first, *second])
        numbers = [text for text in every if as_number(text) is not None]
        _keys([text for text in numbers if not _is_padded(text)], told)
    known = list(dict.fromkeys([*keys[0], *keys[1]]))
    texts = [key for key in known if isinstance(key, str)]
    alike = look_alikes(texts, texts)
    requirement = f"the classes in {told} to differ visibly"
    check(not alike, requirement, alike, "write each class in one way")
    # If no class were in both columns, every prediction would count as wrong.
    are_shared = len(known) < len(first) + len(second)
    requirement = f"{told} to hold the same classes"
    got = f"{few(first)} and {few(second)}, of which none is in both"
    way_out = "write both alike, or write a column 'correct' of 0 and 1"
    check(are_shared, requirement, got, way_out)
    places = {key: place for place, key in enumerate(known)}
    of_first, of_second = (np.array([places[key] for key in own]) for own in keys)
    predicted_ids = of_first[np.asarray(encoded[0].indices)]
    ids = of_second[np.asarray(encoded[1].indices)]
    return (predicted_ids == ids).astype(np.int64)


def n_different(columns: Sequence[Any]) -> int:
    """The number of different labels in pyarrow arrays of any types."""
    found: set[Decimal | str] = set()
    for column in columns:
        texts = _without_booleans(column).cast("string").unique().drop_null()
        found |= {_key(text) for text in texts.to_pylist()}
    return len(found)


def _keys(texts: Sequence[str], told: str) -> list[Decimal | str]:
    """What is compared of different labels; raise if two of them would be equal."""
    keys = [_key(text) for text in texts]
    times = Counter(keys)
    pairs = zip(keys, texts, strict=True)
    twice = [repr(text) for key, text in pairs if times[key] > 1]
    requirement = f"each class in {told} to be written in one way"
    check(not twice, requirement, few(twice), _ONE_WAY)
    return keys


def _check_not_padded(
    predicted: dict[Decimal | str, str],
    keys: Sequence[Decimal | str],
    texts: Sequence[str],
    told: str,
) -> None:
    """Raise if a prediction, by its key, and a label are the same number,
    and one may be a code such as "01".
    """
    pairs = [
        (predicted[key], text)
        for key, text in zip(keys, texts, strict=True)
        if key in predicted
    ]
    padded = [
        f"{one!r} and {other!r}"
        for one, other in pairs
        if one.strip() != other.strip() and (_is_padded(one) or _is_padded(other))
    ]
    requirement = f"each class in {told} to be written in one way"
    check(not padded, requirement, few(padded), _ONE_WAY)


def _is_padded(text: str) -> bool:
    """Whether a number is written with zeros that it does not need, as codes are."""
    return as_number(text) is not None and bool(_PADDED.match(text))


def _exact(column: Any, argument: str) -> Any:
    """Return a column that is `filled`; raise if its numbers are floats that may have been other
    integers.
    """
    import pyarrow.compute as compute
    from pyarrow import types

    column = filled(column, argument)
    if types.is_floating(column.type):
        wide = column.cast("float64")
        is_rounded = np.asarray(compute.greater(compute.abs(wide), _LARGEST_EXACT))
        if is_rounded.any():
            row = int(np.argmax(is_rounded))
            requirement = "hold classes, of which floats above 2^53 are not exact"
            way_out = "write the classes as integers or texts"
            raise RowError(row, argument, requirement, wide[row].as_py(), way_out)
    return column


def _without_booleans(column: Any) -> Any:
    """Return a column with 0 and 1 in place of booleans."""
    from pyarrow import types

    return column.cast("int8") if types.is_boolean(column.type) else column


def _key(text: str) -> Decimal | str:
    """What is compared of a label: a number, or a text in lower case."""
    number = as_number(text)
    return text.lower() if number is None else number


def is_same(text: str, other: str) -> bool:
    """Whether two texts are one label: the same number,
    or the same text without upper and lower case.
    """
    return _key(text) == _key(other)


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
    # An array of numbers has NaN where one is missing.
    is_missing = column.is_null(nan_is_null=True)
    if types.is_string(column.type) or types.is_large_string(column.type):
        is_blank = compute.equal(compute.utf8_trim_whitespace(column), "")
        is_missing = compute.fill_null(is_blank, True)
    if is_missing.true_count:
        row = int(np.argmax(is_missing))
        way_out = "remove the rows without one"
        raise RowError(row, argument, "hold a label in every row", "none", way_out)
    return column
