"""A common form of classification data: columns `text` or `image`, and `label`, a ClassLabel or a list of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import datasets
import numpy as np
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
    ClassNames,
    LabelLayout,
    check_columns,
    encode_label_sets,
    is_of,
    names_of_ids,
)
from hf_calib.data.sources import read_column
from hf_calib.metrics.checks import check_names


def check_is_no_label(name: str, column: str | None, labels: Sequence[str]) -> None:
    """Raise if the inputs are the labels, which a model would copy."""
    check(
        column not in labels,
        f"{name} to be another column than the labels'",
        repr(column),
        "name the column of the inputs",
    )


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
        image_column: the column of images: a datasets Image, encoded bytes with their path, or paths.
        label_column: the column of labels. Texts become classes in sorted order, integers (also as floats) must count
            from 0, and a ClassLabel keeps its names. With `multi_label`: lists of these, or texts with a separator.
        class_names: class names in the order of their ids, if the data do not name them.
        multi_label: whether a row has any number of labels, including none.
        label_separator: separator of the labels in a text: " " for "4 27", "|" for "Mass|Nodule".
        label_columns: instead of `label_column`, one column of 0 and 1 per label, with the label's name.
        no_label: value of rows without a label, such as "No Finding".

    Returns:
        The splits with two columns: `text` or `image` (encoded; `ImageTransform` decodes it), and `label`, the same
        ClassLabel in every split, or with `multi_label` a list of them (see `multi_hot`).

    Raises:
        ValueError: if a column is missing, a split is empty, a value is missing or blank, a label is not among the
            names, or two classes look the same.
        TypeError: if a column contains other values than texts, images or classes.

    >>> rows = Dataset.from_dict({"headline": ["up", "down"], "topic": ["markets", "art"]})
    >>> chosen = choose_columns(DatasetDict({"train": rows}), text_column="headline", label_column="topic")
    >>> chosen["train"].features["label"].names, chosen["train"][0]
    (['art', 'markets'], {'text': 'up', 'label': 1})
    """
    given = f"{text_column!r} and {image_column!r}"
    check_names("class_names", class_names)
    check_names("label_columns", label_columns)
    one = (text_column is None) != (image_column is None)
    check(one, "one of text_column and image_column to be given", given, "give one")
    layout = LabelLayout(label_column, label_columns, label_separator, no_label)
    way_out = (
        "set multi_label, or leave label_separator, label_columns and no_label out"
    )
    plain = multi_label or layout == LabelLayout(label_column)
    check(
        plain, "the data to have several labels per row", "one class per row", way_out
    )
    kind, column = (
        ("text", text_column) if image_column is None else ("image", image_column)
    )
    read = [label_column] if label_columns is None else list(label_columns)
    check_is_no_label(f"{kind}_column", column, read)
    inputs = {
        name: _inputs(name, split, kind, str(column)) for name, split in dataset.items()
    }
    encoded: Any = (
        encode_label_sets(dataset, layout, class_names) if multi_label else None
    )
    names, ids = encoded or _encode_labels(dataset, label_column, class_names)
    of_one = ClassLabel(names=list(names))
    features = Features({"label": datasets.Sequence(of_one) if multi_label else of_one})
    # The columns are concatenated, so that changing labels does not rewrite images.
    labels = {
        name: Dataset.from_dict({"label": rows}, features=features)
        for name, rows in ids.items()
    }
    return DatasetDict(
        {
            name: concatenate_datasets([inputs[name], labels[name]], axis=1)
            for name in dataset
        }
    )


def choose_inputs(
    rows: Dataset,
    *,
    name: str,
    text_column: str | None = None,
    image_column: str | None = None,
) -> Dataset:
    """Keep the inputs of rows without reading labels, as the column `text` or `image`, and check them.

    If there is no such column, the only column of its type is used. Error messages call the data by `name`.

    >>> rows = Dataset.from_dict({"utterance": ["play jazz"], "intent": [3]})
    >>> choose_inputs(rows, name="others", text_column="text")[0]
    {'text': 'play jazz'}
    """
    kind, column = (
        ("text", text_column) if image_column is None else ("image", image_column)
    )
    of_the_kind = [
        each for each, feature in rows.features.items() if _fits(feature, kind)
    ]
    if column not in rows.column_names and len(of_the_kind) == 1:
        (column,) = of_the_kind
    return _inputs(name, rows, kind, str(column))


def _inputs(name: str, split: Dataset, kind: str, column: str) -> Dataset:
    """The column `text` of a split, or `image` without decoding."""
    check_columns(name, split, column)
    feature = split.features[column]
    if not (
        _fits(feature, "text") or _fits(feature, kind)
    ):  # Texts may be paths of images.
        requirement, way_out = (
            f"hold {kind}s in split {name!r}",
            f"choose another {kind}_column",
        )
        raise InputTypeError(
            expected(f"column {column!r}", requirement, feature, way_out)
        )
    if _fits(feature, "text"):
        texts = pyarrow.compute.utf8_trim_whitespace(read_column(split, column))
        is_blank = pyarrow.compute.equal(texts, "").to_numpy()
        _check_not_blank(name, column, "text", np.flatnonzero(is_blank).tolist())
    chosen = split.select_columns([column])
    renamed = chosen if column == kind else chosen.rename_column(column, kind)
    return (
        renamed if kind == "text" else renamed.cast_column("image", Image(decode=False))
    )


def _encode_labels(
    dataset: DatasetDict, column: str, class_names: Sequence[str] | None
) -> tuple[ClassNames, dict[str, list[int]]]:
    """The class names, and the labels of all splits as ids; a ClassLabel uses its own names unless others are given."""
    labels = {
        name: _stored_labels(name, split, column) for name, split in dataset.items()
    }
    declared = {name: split.features[column] for name, split in dataset.items()}
    way_out = "check label_column and class_names, or remove these rows"
    if class_names is not None:
        _check_declared(declared, class_names)
        undeclared = {
            name: labels[name]
            for name, feature in declared.items()
            if not isinstance(feature, ClassLabel)
        }
        _check_order_of_numbers(undeclared, class_names)
    else:
        for name, feature in declared.items():
            if isinstance(feature, ClassLabel):
                stored = [[label] for label in labels[name]]
                what = f"labels of split {name!r}"
                named = names_of_ids(stored, feature.names, what, way_out)
                labels[name] = [label for (label,) in named]
        class_names = getattr(declared["train"], "names", None) or ClassNames.of(
            labels["train"], "classes"
        )
    names = ClassNames(class_names)
    check(
        len(set(names)) == len(names) >= 2,
        "the classes to be at least two, and differ",
        list(names),
        "check label_column and class_names",
    )
    ids = {}
    for name, values in labels.items():
        got = f"{values[0]!r} and {labels['train'][0]!r} in train"
        alike = isinstance(values[0], str) == isinstance(labels["train"][0], str)
        check(
            alike,
            f"labels of split {name!r} to be texts, or integers, as in train",
            got,
            way_out,
        )
        found = names.ids(
            [[value] for value in values], f"labels of split {name!r}", way_out
        )
        ids[name] = [label for (label,) in found]
    return names, ids


def _check_order_of_numbers(
    labels: Mapping[str, Sequence[Any]], class_names: Sequence[str]
) -> None:
    """Raise if integer labels, which are ids, may also be names of other classes."""
    numbers = [as_number(name) for name in class_names]
    found = {label for values in labels.values() for label in values}
    are_names = bool(found) and found <= set(numbers)
    are_ids = numbers == list(range(len(numbers)))
    requirement = (
        "class_names that are numbers to be in the order of the ids 0, 1, 2, ..."
    )
    got = f"{few(class_names)} for integer labels"
    way_out = "write the labels as texts, which are names"
    check(are_ids or not are_names, requirement, got, way_out)


def _check_declared(declared: Mapping[str, Any], class_names: Sequence[str]) -> None:
    """Raise unless ids mean the same in all splits, and each has one of the given names."""
    own = {
        name: feature.names
        for name, feature in declared.items()
        if isinstance(feature, ClassLabel)
    }
    for name, names in own.items():
        same = names == next(iter(own.values())) and len(names) == len(class_names)
        requirement = f"the classes of split {name!r} to be those of the other splits"
        requirement += f", and as many as class_names ({len(class_names)})"
        check(same, requirement, f"{len(names)}: {few(names)}", "make them agree")


def _stored_labels(name: str, split: Dataset, column: str) -> list[Any]:
    """The labels as texts or integers."""
    check_columns(name, split, column)
    feature, values = split.features[column], read_column(split, column).to_pylist()
    if is_of(feature, "bool"):
        return [str(value) for value in values]
    if is_of(feature, "float") and all(value.is_integer() for value in values):
        values = [
            int(value) for value in values
        ]  # Pandas writes integers as floats if some are missing.
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
    blank = [i for i, value in enumerate(values) if not str(value).strip()]
    _check_not_blank(name, column, "label", blank)
    return values


def _check_not_blank(name: str, column: str, what: str, rows: list[int]) -> None:
    """Raise for rows of a split without a text or label."""
    requirement = f"column {column!r} to hold a {what} in every row of split {name!r}"
    check(not rows, requirement, f"none in row {few(rows)}", "remove these rows")


def _fits(feature: object, kind: str) -> bool:
    if kind == "text":
        return is_of(feature, *TEXTS)
    return isinstance(feature, Image) or (
        isinstance(feature, dict) and set(feature) == {"bytes", "path"}
    )
