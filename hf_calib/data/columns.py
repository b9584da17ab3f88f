"""Classification data in a common form: columns `text` or `image`, and `label`, or lists of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import datasets
import pyarrow.compute
from datasets import (
    ClassLabel,
    Dataset,
    DatasetDict,
    Features,
    Image,
    concatenate_datasets,
)

from hf_calib._errors import InputTypeError, check, expected, few
from hf_calib._text import as_number
from hf_calib.data.labels import (
    INTEGERS,
    TEXTS,
    LabelLayout,
    encode_label_sets,
    ids_of,
    is_of,
    names_in,
    names_of,
)
from hf_calib.data.sources import column_of_split
from hf_calib.metrics.checks import RowError, check_names

_CHECK_LABELS = "check label_column and class_names, or remove these rows"


def check_is_no_label(name: str, column: str | None, labels: Sequence[str]) -> None:
    """Raise if the inputs are the labels, which a model would copy."""
    requirement = f"{name} to be another column than the labels'"
    way_out = "name the column of the inputs"
    check(column not in labels, requirement, repr(column), way_out)


def choose_columns(
    dataset: DatasetDict,
    *,
    text_column: str | None = None,
    image_column: str | None = None,
    label_column: str = "label",
    class_names: Sequence[str] | None = None,
    multi_label: bool = False,
    label_separator: str | None = None,
    label_columns: Sequence[str] | None = None,
    no_label: str | None = None,
) -> DatasetDict:
    """Keep the input and the label of every row under fixed names, and check them.

    Args:
        dataset: splits with any columns, one of them named `train`.
        text_column: the column of texts (str); pass it or `image_column`.
        image_column: the column of images: a datasets Image, encoded bytes with their path, or
            paths.
        label_column: the column of labels. Texts become classes in sorted order, integers (also as
            floats) must count from 0, and a ClassLabel keeps its names. With `multi_label`: lists
            of these, or texts with a separator.
        class_names: class names in the order of their ids, if the data do not name them.
        multi_label: whether a row has any number of labels, including none.
        label_separator: separator of the labels in a text: " " for "4 27", "|" for "Mass|Nodule".
        label_columns: instead of `label_column`, one column of 0 and 1 per label, with the label's
            name.
        no_label: value of rows without a label, such as "No Finding".

    Returns:
        The splits with two columns: `text` or `image` (encoded; `ImageTransform` decodes it), and
        `label`, the same ClassLabel in every split, or with `multi_label` a list of them (see
        `multi_hot`).

    Raises:
        ValueError: if a column is missing, a split is empty, a value is missing or blank, a label
            is not among the names, or two classes look the same.
        TypeError: if a column contains other values than texts, images or classes.

    >>> rows = Dataset.from_dict({"headline": ["up", "down"], "topic": ["markets", "art"]})
    >>> splits = DatasetDict({"train": rows})
    >>> chosen = choose_columns(splits, text_column="headline", label_column="topic")
    >>> chosen["train"].features["label"].names, chosen["train"][0]
    (['art', 'markets'], {'text': 'up', 'label': 1})
    """
    check_names("class_names", class_names)
    check_names("label_columns", label_columns)
    is_one = (text_column is None) != (image_column is None)
    requirement = "one of text_column and image_column to be given"
    check(is_one, requirement, f"{text_column!r} and {image_column!r}", "give one")
    layout = LabelLayout(label_column, label_columns, label_separator, no_label)
    is_plain = layout == LabelLayout(label_column)
    requirement = "the data to have several labels per row"
    way_out = (
        "set multi_label, or leave label_separator, label_columns and no_label out"
    )
    check(multi_label or is_plain, requirement, "one class per row", way_out)
    kind, column = _kind_and_column(text_column, image_column)
    read = [label_column] if label_columns is None else list(label_columns)
    check_is_no_label(f"{kind}_column", column, read)
    inputs = {
        name: _inputs(name, split, kind, column) for name, split in dataset.items()
    }
    ids: Mapping[str, Sequence[Any]]
    if multi_label:
        names, ids = encode_label_sets(dataset, layout, class_names)
        feature = datasets.Sequence(ClassLabel(names=names))
    else:
        names, ids = _encode_labels(dataset, label_column, class_names)
        feature = ClassLabel(names=names)
    features = Features({"label": feature})
    chosen = DatasetDict()
    for name in dataset:
        labels = Dataset.from_dict({"label": ids[name]}, features=features)
        # Columns that are concatenated are not copied, which would take long for images.
        chosen[name] = concatenate_datasets([inputs[name], labels], axis=1)
    return chosen


def choose_inputs(
    rows: Dataset,
    *,
    name: str,
    text_column: str | None = None,
    image_column: str | None = None,
) -> Dataset:
    """Keep the inputs of rows without labels, as the column `text` or `image`, and check them.

    If there is no such column, the only column of its type is used. Error messages call the data by
    `name`.

    >>> rows = Dataset.from_dict({"utterance": ["play jazz"], "intent": [3]})
    >>> choose_inputs(rows, name="others", text_column="text")[0]
    {'text': 'play jazz'}
    """
    kind, column = _kind_and_column(text_column, image_column)
    # Data of other classes come from elsewhere, where the column has another name.
    of_the_kind = [
        each for each, feature in rows.features.items() if _fits(feature, kind)
    ]
    if column not in rows.column_names and len(of_the_kind) == 1:
        column = of_the_kind[0]
    return _inputs(name, rows, kind, column)


def _kind_and_column(
    text_column: str | None, image_column: str | None
) -> tuple[str, str]:
    """The name that a column of inputs gets, and its name in the data."""
    if image_column is not None:
        return "image", image_column
    return "text", str(text_column)


def _inputs(name: str, split: Dataset, kind: str, column: str) -> Dataset:
    """The column `text` of a split, or `image` without decoding."""
    stored = column_of_split(name, split, column)
    feature = split.features[column]
    # Texts may be paths of images.
    are_texts = _fits(feature, "text")
    if not are_texts and not _fits(feature, kind):
        requirement = f"hold {kind}s in split {name!r}"
        way_out = f"choose another {kind}_column"
        raise InputTypeError(
            expected(f"column {column!r}", requirement, feature, way_out)
        )
    # A model gives any probability for an empty text, which belongs to no class.
    if are_texts:
        trimmed = pyarrow.compute.utf8_trim_whitespace(stored)
        is_blank = pyarrow.compute.equal(trimmed, "")
        _check_not_blank(name, column, "text", is_blank.to_pylist())
    chosen = split.select_columns([column])
    if column != kind:
        chosen = chosen.rename_column(column, kind)
    # Images are decoded when they are used: all of them would not fit into memory.
    if kind == "image":
        return chosen.cast_column("image", Image(decode=False))
    return chosen


def _encode_labels(
    dataset: DatasetDict, column: str, class_names: Sequence[str] | None
) -> tuple[list[str], dict[str, list[int]]]:
    """The class names, and the labels of all splits as ids; a ClassLabel has names unless given."""
    labels = {
        name: _stored_labels(name, split, column) for name, split in dataset.items()
    }
    features = {name: split.features[column] for name, split in dataset.items()}
    declared = {
        name: feature.names
        for name, feature in features.items()
        if isinstance(feature, ClassLabel)
    }
    if class_names is not None:
        names = list(class_names)
        _check_declared(declared, names)
        # Integers of a ClassLabel are ids, so only others may be meant as names.
        undeclared = [labels[name] for name in labels.keys() - declared.keys()]
        _check_order_of_numbers(set().union(*undeclared), names)
    else:
        # The ids of two splits may mean different classes, as far as these have names.
        for name, own in declared.items():
            argument = f"the labels of split {name!r}"
            labels[name] = names_of(labels[name], own, argument, _CHECK_LABELS)
        names = declared.get("train") or names_in(labels["train"], "classes")
    # One class has nothing to learn, and two of one name cannot be told apart in a report.
    differ = len(set(names)) == len(names) >= 2
    requirement = "the classes to be at least two, and differ"
    check(differ, requirement, names, "check label_column and class_names")
    # Next to texts in train, the integers of another split may be ids in any order.
    first = labels["train"][0]
    ids = {}
    for name, own_labels in labels.items():
        argument = f"the labels of split {name!r}"
        are_alike = isinstance(own_labels[0], str) == isinstance(first, str)
        requirement = f"{argument} to be texts, or integers, as in train"
        got = f"{own_labels[0]!r} and {first!r} in train"
        check(are_alike, requirement, got, _CHECK_LABELS)
        ids[name] = ids_of(own_labels, names, argument, _CHECK_LABELS)
    return names, ids


def _check_order_of_numbers(labels: set[Any], class_names: Sequence[str]) -> None:
    """Raise if integer labels, which are ids, may also be names of other classes."""
    # The label 1 of stars "1" to "5" is the first name, and the second id.
    numbers = [as_number(name) for name in class_names]
    are_names = len(labels) > 0 and labels <= set(numbers)
    are_in_order = numbers == list(range(len(numbers)))
    requirement = (
        "class_names that are numbers to be in the order of the ids 0, 1, 2, ..."
    )
    got = f"{few(class_names)} for integer labels"
    way_out = "write the labels as texts, which are names"
    check(are_in_order or not are_names, requirement, got, way_out)


def _check_declared(
    declared: Mapping[str, Sequence[str]], class_names: Sequence[str]
) -> None:
    """Raise unless ids mean the same in all splits, and each has one of the given names."""
    for name, names in declared.items():
        are_shared = names == next(iter(declared.values()))
        requirement = f"the classes of split {name!r} to be those of the other splits, "
        requirement += f"and as many as class_names ({len(class_names)})"
        got = f"{len(names)}: {few(names)}"
        fits = are_shared and len(names) == len(class_names)
        check(fits, requirement, got, "make them agree")


def _stored_labels(name: str, split: Dataset, column: str) -> list[Any]:
    """The labels as texts or integers."""
    values = column_of_split(name, split, column).to_pylist()
    feature = split.features[column]
    # As names, False and True sort as 0 and 1 do.
    if is_of(feature, "bool"):
        return [str(value) for value in values]
    if is_of(feature, "float") and all(value.is_integer() for value in values):
        # Pandas writes integers as floats if some are missing.
        values = [int(value) for value in values]
    elif not is_of(feature, *TEXTS, *INTEGERS):
        requirement = (
            f"hold one class in each row, as a text or an integer, in split {name!r}"
        )
        way_out = "choose another label_column"
        raise InputTypeError(
            expected(f"column {column!r}", requirement, feature, way_out)
        )
    # The Hub marks withheld labels by -1.
    way_out = 'use another, for example test_split="validation"'
    check(-1 not in values, f"split {name!r} to be labelled", -1, way_out)
    _check_not_blank(
        name, column, "label", [not str(value).strip() for value in values]
    )
    return values


def _check_not_blank(name: str, column: str, what: str, is_blank: list[bool]) -> None:
    """Raise if a row of a split has no text or label."""
    if any(is_blank):
        requirement = f"hold a {what} in every row of split {name!r}"
        way_out = "remove the rows without one"
        raise RowError(
            is_blank.index(True), f"column {column!r}", requirement, "none", way_out
        )


def _fits(feature: object, kind: str) -> bool:
    """Whether a column can be one of texts or of images."""
    if kind == "text":
        return is_of(feature, *TEXTS)
    # So are images stored in a parquet file that `datasets` did not write.
    is_stored = isinstance(feature, dict) and feature.keys() == {"bytes", "path"}
    return isinstance(feature, Image) or is_stored
