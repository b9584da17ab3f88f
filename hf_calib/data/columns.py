"""One form for any classification data: columns `text` or `image`, and `label` as a ClassLabel, or a list of these."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import datasets
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, concatenate_datasets

from hf_calib._errors import (
    InputTypeError,
    InputValueError,
    did_you_mean,
    expected,
    look_alikes,
)
from hf_calib.data.multi_label import LabelLayout, encode_label_sets
from hf_calib.data.splits import read_column

_BLANK_LINE = re.compile(r"\r?\n\r?\n")  # e-mails and files of Windows end lines with \r\n


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
    """Keep the input and the label of every row, under fixed names, and check them.

    Args:
        dataset: splits with any columns, `train` among them.
        text_column: the column of str; give this one or `image_column`.
        image_column: the column of images: a datasets Image, encoded bytes with their path, or paths.
        label_column: the column of labels. Texts become classes in sorted order; integers (also as floats)
            must count from 0 and keep their values; a ClassLabel keeps its names.
        class_names: the class names in order of their id, if the data do not name them.
        multi_label: whether a row has any number of labels, also none. The column then holds lists of names or ids,
            or texts with a separator.
        label_separator: between the labels of a text: " " for "4 27", "|" for "Mass|Nodule".
        label_columns: instead of `label_column`, one column of 0 and 1 for each label.
        no_label: what stands in rows without a label, such as "No Finding".

    Returns:
        DatasetDict of the same splits with two columns: `text`, or `image` (left encoded:
        `ImageTransform` decodes it), and `label` (ClassLabel, the same in every split; with `multi_label` a list
        of these, see `multi_hot`).

    Raises:
        ValueError: if a column is missing, a split is empty, a value is missing or blank, a split has a label
            that train lacks (with `multi_label`: that is none of the names), or two classes look the same.
        TypeError: if a column holds anything but texts, images or classes.

    >>> rows = Dataset.from_dict({"headline": ["up", "down"], "topic": ["markets", "art"]})
    >>> chosen = choose_columns(DatasetDict({"train": rows}), text_column="headline", label_column="topic")
    >>> chosen["train"].features["label"].names, chosen["train"][0]
    (['art', 'markets'], {'text': 'up', 'label': 1})
    """
    if text_column is not None and image_column is None:
        input_column, prepare = text_column, _texts
    elif image_column is not None and text_column is None:
        input_column, prepare = image_column, _images
    else:
        got = f"{text_column!r} and {image_column!r}"
        raise InputValueError(expected("one of text_column and image_column", "be given", got, "give one"))
    layout = LabelLayout(label_column, label_columns, label_separator, no_label)
    if not multi_label and layout != LabelLayout(label_column):
        way_out = "set multi_label, or leave label_separator, label_columns and no_label out"
        raise InputValueError(expected("the data", "have several labels a row", "one class a row", way_out))
    for name, split in dataset.items():
        _check_columns(name, split, input_column, *([] if multi_label else [label_column]))
    label_ids: dict[str, Any]
    if multi_label:
        names, label_ids = encode_label_sets(dataset, layout, class_names)
        feature = Features({"label": datasets.Sequence(ClassLabel(names=names))})
    else:
        names, label_ids = _encode_labels(dataset, label_column, class_names)
        feature = Features({"label": ClassLabel(names=names)})
    return DatasetDict(
        {
            # Side by side, so that changing the labels does not rewrite the images.
            name: concatenate_datasets(
                [
                    prepare(name, split.select_columns([input_column]), input_column),
                    Dataset.from_dict({"label": label_ids[name]}, features=feature),
                ],
                axis=1,
            )
            for name, split in dataset.items()
        }
    )


def choose_inputs(
    rows: Dataset, *, name: str, text_column: str | None = None, image_column: str | None = None
) -> Dataset:
    """Keep the inputs of rows whose labels are not read, such as those from elsewhere.

    Args:
        rows: with any columns.
        name: of the data, for errors.
        text_column: the column of str; give this one or `image_column`. If there is no such column, the only one of
            its kind is taken.
        image_column: the column of images.

    Returns:
        A dataset of the column `text`, or `image`.

    Raises:
        ValueError: if there is no such column, no row, or a value is missing.
        TypeError: if the column holds anything else.

    >>> rows = Dataset.from_dict({"utterance": ["play jazz"], "intent": [3]})
    >>> choose_inputs(rows, name="others", text_column="text")[0]
    {'text': 'play jazz'}
    """
    kind = "text" if image_column is None else "image"
    column, prepare, fits = (
        (text_column, _texts, _is_text) if image_column is None else (image_column, _images, _is_image)
    )
    of_the_kind = [each for each, feature in rows.features.items() if fits(feature)]
    if column not in rows.column_names and len(of_the_kind) == 1:
        column = of_the_kind[0]
    _check_columns(name, rows, str(column))
    return prepare(name, rows.select_columns([str(column)]), str(column)).select_columns([kind])


def strip_headers(dataset: DatasetDict) -> DatasetDict:
    """Cut each text up to its first blank line: the header of a newsgroup post, or of an e-mail.

    A text with no blank line stays as it is, and one of nothing but a header becomes empty: as in the code of
    Kumar, Sarawagi, Jain, Trainable Calibration Measures, 2018, whose 20 Newsgroups later papers took.

    Args:
        dataset: as `choose_columns` returns it, with the column `text`.

    Raises:
        ValueError: if no text of train has a blank line.

    >>> rows = Dataset.from_dict({"text": ["From: me\\nSubject: it\\n\\nIt works.\\n\\nMe"], "label": [0]})
    >>> strip_headers(DatasetDict({"train": rows}))["train"]["text"][0]
    'It works.\\n\\nMe'
    """

    def cut(batch: dict[str, list[str]]) -> dict[str, list[str]]:
        return {"text": [_BLANK_LINE.split(text, maxsplit=1)[-1] for text in batch["text"]]}

    if not any(map(_BLANK_LINE.search, read_column(dataset["train"], "text").to_pylist())):
        raise InputValueError(
            expected(
                "texts of train",
                "have a header and a blank line after it",
                "no blank line",
                "leave strip_headers out; they may be cut already",
            )
        )
    return dataset.map(cut, batched=True, desc="Cutting headers")


def _check_columns(name: str, split: Dataset, *columns: str) -> None:
    if len(split) == 0:
        raise InputValueError(
            expected(f"split {name!r}", "have rows", 0, "check the file or the split's name")
        )
    for column in columns:
        if column not in split.column_names:
            raise InputValueError(
                expected(
                    f"the column to read from split {name!r}",
                    f"be one of {', '.join(split.column_names)}",
                    repr(column),
                    did_you_mean(column, split.column_names),
                )
            )
        values = read_column(split, column)
        if values.null_count:
            first = values.is_null().to_pylist().index(True)
            raise InputValueError(
                expected(
                    f"column {column!r}",
                    f"have a value in every row of split {name!r}",
                    f"{values.null_count} without (first in row {first})",
                    "remove these rows",
                )
            )


def _texts(name: str, split: Dataset, column: str) -> Dataset:
    feature = split.features[column]
    if not _is_text(feature):
        raise InputTypeError(
            expected(
                f"column {column!r}", f"hold texts in split {name!r}", feature, "choose another text_column"
            )
        )
    return split if column == "text" else split.rename_column(column, "text")


def _images(name: str, split: Dataset, column: str) -> Dataset:
    feature = split.features[column]
    if not (_is_image(feature) or _is_text(feature)):
        raise InputTypeError(
            expected(
                f"column {column!r}", f"hold images in split {name!r}", feature, "choose another image_column"
            )
        )
    renamed = split if column == "image" else split.rename_column(column, "image")
    return renamed.cast_column("image", Image(decode=False))


def _encode_labels(
    dataset: DatasetDict, column: str, class_names: Sequence[str] | None
) -> tuple[list[str], dict[str, list[int]]]:
    """The class names, and every split's labels as ids."""
    labels = {name: _stored_labels(name, split, column) for name, split in dataset.items()}
    trained = set(labels["train"])
    names = list(class_names or _default_names(dataset["train"].features[column], trained))
    _check_names(names, dataset, column)
    are_texts = isinstance(labels["train"][0], str)
    id_of = {name if are_texts else i: i for i, name in enumerate(names)}
    for name, values in labels.items():
        _check_labels(name, values, known=set(id_of), trained=trained)
    return names, {name: [id_of[value] for value in values] for name, values in labels.items()}


def _stored_labels(name: str, split: Dataset, column: str) -> list[Any]:
    """Texts or integers."""
    feature = split.features[column]
    dtype = str(getattr(feature, "dtype", ""))
    values = read_column(split, column).to_pylist()
    if dtype == "bool":
        return [str(value) for value in values]
    if dtype.startswith("float") and all(value.is_integer() for value in values):
        values = [int(value) for value in values]  # pandas writes integers so where some were missing
    elif not (_is_text(feature) or dtype.startswith(("int", "uint"))):
        raise InputTypeError(
            expected(
                f"column {column!r}",
                f"hold one class in each row, as a text or an integer, in split {name!r}",
                feature,
                "choose another label_column",
            )
        )
    if -1 in values:  # how the Hub marks labels that are withheld
        raise InputValueError(
            expected(f"split {name!r}", "be labelled", -1, 'use another, for example test_split="validation"')
        )
    blank = [i for i, value in enumerate(values) if isinstance(value, str) and not value.strip()]
    if blank:
        raise InputValueError(
            expected(
                f"column {column!r}",
                f"hold a label in every row of split {name!r}",
                f"none in {len(blank)} rows (first in row {blank[0]})",
                "remove these rows",
            )
        )
    return values


def _default_names(feature: object, trained: set[Any]) -> list[str]:
    if isinstance(feature, ClassLabel):
        return feature.names
    classes = sorted(trained)
    alike = "" if isinstance(classes[0], int) else look_alikes(classes, classes)
    if alike:
        raise InputValueError(
            expected(
                "the classes of train",
                "differ visibly",
                alike,
                "write the labels alike, or pass class_names if these are two classes",
            )
        )
    if isinstance(classes[0], int) and classes != list(range(len(classes))):
        raise InputValueError(
            expected(
                "integer labels of train",
                "count from 0 without gaps",
                _few(classes),
                "pass class_names for all classes from 0 on, or write the labels as texts",
            )
        )
    return [str(value) for value in classes]


def _check_names(names: list[str], dataset: DatasetDict, column: str) -> None:
    if len(names) < 2 or len(set(names)) < len(names):
        raise InputValueError(
            expected(
                "the classes", "be at least two, and differ", names, "check label_column and class_names"
            )
        )
    features = {name: split.features[column] for name, split in dataset.items()}
    declared = {name: feature.names for name, feature in features.items() if isinstance(feature, ClassLabel)}
    first = next(iter(declared.values()), None)
    for name, own in declared.items():
        if own != first or len(own) != len(names):
            raise InputValueError(
                expected(
                    f"the classes of split {name!r}",
                    f"be those of the other splits, and as many as class_names ({len(names)})",
                    f"{len(own)}: {_few(own)}",
                    "make them agree",
                )
            )


def _check_labels(name: str, values: list[Any], *, known: set[Any], trained: set[Any]) -> None:
    for requirement, allowed in (("occur in train as well", trained), ("be among class_names", known)):
        others = sorted(set(values) - allowed, key=str)
        if others:
            alike = look_alikes(map(str, others), map(str, allowed))
            first = next(row for row, value in enumerate(values) if value not in allowed)
            raise InputValueError(
                expected(
                    f"labels of split {name!r}",
                    requirement,
                    _few(others) + (f" ({alike})" if alike else "") + f" (first in row {first})",
                    "check label_column, or remove these rows",
                )
            )


def _few(values: list[Any]) -> str:
    return f"{values[:5]}{' ...' if len(values) > 5 else ''}"


def _is_image(feature: object) -> bool:
    return isinstance(feature, Image) or (isinstance(feature, dict) and set(feature) == {"bytes", "path"})


def _is_text(feature: object) -> bool:
    return getattr(feature, "dtype", None) in ("string", "large_string")
