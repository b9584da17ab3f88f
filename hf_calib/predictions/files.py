"""Files of predictions with their labels."""

from __future__ import annotations

import csv
import gzip
import os
import zipfile
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hf_calib._errors import (
    InputTypeError,
    InputValueError,
    did_you_mean,
    expected,
    few,
    look_alikes,
)
from hf_calib._files import whole_file
from hf_calib.predictions.predictions import Predictions

if TYPE_CHECKING:
    from pandas import DataFrame, Series

FORMATS = (".npz", ".csv", ".tsv", ".parquet")
KINDS = ("logits", "probs")
_UNREADABLE = (OSError, EOFError, ValueError, zlib.error)  # what a broken file raises
_UNREADABLE_NPZ = (
    *(*_UNREADABLE, zipfile.BadZipFile),
    *(NotImplementedError, RuntimeError),  # packed in a way that is not known, or encrypted
    MemoryError,  # a header that claims more than there can be
    TypeError,  # one array, not a file of them
)
# Columns that hold labels, whichever of them is read: never probabilities of a class.
_NAMES_OF_LABELS = {"gold", "label", "label_id", "labels", "target", "targets", "true_label", "y_true"}

_LARGEST_EXACT = 2**53  # above, float64 leaves integers out


def load_predictions(path: str | os.PathLike[str], *, label_column: str = "label") -> Predictions:
    """Read predictions and labels from one file.

    For a model that runs elsewhere; `predict` runs one here.

    Args:
        path: one of
            .npz: arrays `logits` or `probs` (N, C), `labels` (N,) int, and perhaps `class_names`
            (C,) str. Pickled objects are not read.
            .csv, .tsv (also .gz) or .parquet: a column of labels, and one column for each class, in the order
            of the classes: `logit_<class>` or `prob_<class>`, beside which other columns are ignored, or just
            `<class>`, which are probabilities.
        label_column: the column of labels in a table: class names, or class ids from 0 on. If every class
            name is an integer, an integer label is a name.

    Returns:
        The predictions; the class names are those of the columns.

    Raises:
        ValueError: if the file is missing or unreadable, or something in it is missing, ambiguous or wrong.
        TypeError: if a column or array is not numeric.

    >>> load_predictions("missing.npz")
    Traceback (most recent call last):
    ...
    hf_calib._errors.InputValueError: expected predictions to name an existing file, got missing.npz; check the path
    """
    return _load(Path(path), label_column, labelled=True)


def load_unlabelled(path: str | os.PathLike[str], *, label_column: str = "label") -> Predictions:
    """Read predictions whose labels are not known, or not to be looked at.

    Args:
        path: as for `load_predictions`; labels may be missing.
        label_column: a column of a table that is not read.

    Returns:
        The predictions, whose labels are all 0 and mean nothing.

    Raises:
        ValueError, TypeError: as `load_predictions`.
    """
    return _load(Path(path), label_column, labelled=False)


def _load(path: Path, label_column: str, *, labelled: bool) -> Predictions:
    """The predictions of a file; without labels, all of them are 0."""
    if not os.path.isfile(path):
        raise InputValueError(expected("predictions", "name an existing file", path, "check the path"))
    suffix = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    if suffix.lower() not in FORMATS:
        requirement = f"be a file ending in {', '.join(FORMATS)}"
        raise InputValueError(expected("predictions", requirement, path.name, did_you_mean(suffix, FORMATS)))
    if suffix.lower() == ".npz":
        predictions = _read_npz(path, labelled=labelled)
    else:
        predictions = _from_table(
            _read_table(path, suffix.lower(), label_column), label_column, labelled=labelled
        )
    _check_not_probabilities(predictions.logits)
    return predictions


def save_predictions(predictions: Predictions, path: str | os.PathLike[str]) -> None:
    """Write predictions as .npz, for `load_predictions`: the whole file or nothing; a file there is replaced.

    Args:
        predictions: what to write.
        path: ends in .npz; missing folders are created.

    Raises:
        ValueError: if the path ends in anything else.
    """
    path = Path(path)
    if path.suffix != ".npz":
        raise InputValueError(expected("path", "end in .npz", path.name, "name the file predictions.npz"))
    kind = "logits" if predictions.probs is None else "probs"
    arrays = {kind: getattr(predictions, kind), "labels": predictions.labels}
    if predictions.class_names is not None:
        arrays["class_names"] = np.array(predictions.class_names, dtype=np.str_)
    with whole_file(path) as unfinished:
        np.savez(unfinished, allow_pickle=False, **arrays)


def _read_npz(path: Path, *, labelled: bool) -> Predictions:
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {name: file[name] for name in (*KINDS, "labels", "class_names") if name in file}
            found = ", ".join(file.files)
    except _UNREADABLE_NPZ as error:
        way_out = "write it with numpy.savez, plain arrays only"
        raise InputValueError(
            expected("predictions", "be readable as npz", f"{path} ({error})", way_out)
        ) from error
    if not labelled:
        n_rows = max((len(np.atleast_1d(arrays[kind])) for kind in KINDS if kind in arrays), default=0)
        arrays["labels"] = np.zeros(n_rows, int)
    if "labels" not in arrays or not any(kind in arrays for kind in KINDS):
        way_out = "write it with numpy.savez(path, logits=logits, labels=labels)"
        requirement = "hold the arrays labels and logits (or probs)"
        raise InputValueError(expected(str(path), requirement, found or "none", way_out))
    names = arrays.get("class_names")
    return Predictions(
        arrays["labels"],
        arrays.get("logits"),
        arrays.get("probs"),
        None if names is None else _names(np.atleast_1d(names)),
    )


def _names(names: NDArray[Any]) -> tuple[str, ...]:
    """Class names, which numpy may hold as bytes."""
    return tuple(name.decode() if isinstance(name, bytes) else str(name) for name in names.tolist())


def _check_not_probabilities(logits: NDArray[Any] | None) -> None:
    """Refuse probabilities under the name of logits: their softmax would be nearly uniform."""
    if logits is None or logits.min() < 0 or logits.max() > 1 or np.abs(logits.sum(axis=1) - 1).max() > 1e-3:
        return
    got = "values in [0, 1] whose rows all sum to 1: probabilities"
    way_out = (
        "name them probs, or in a table prob_<class>; if they are logits, add 1 to all of them, which changes "
        "no probability"
    )
    raise InputValueError(expected("logits", "be logits", got, way_out))


def _read_table(path: Path, suffix: str, label_column: str) -> DataFrame:
    import pandas

    try:
        if suffix == ".parquet":
            return pandas.read_parquet(path)
        # Without keep_default_na=False a class named "NA" or "None" would be a missing value.
        options: dict[str, Any] = {"sep": "\t" if suffix == ".tsv" else ",", "keep_default_na": False}
        header = _header(path, options["sep"])
        # Labels as they stand there: 01, TRUE and 1.50 may be names.
        table = pandas.read_csv(path, index_col=False, dtype={label_column: str}, **options)
        if len(header) == len(table.columns):
            table.columns = header  # pandas has renamed columns of one name
        return table
    except _UNREADABLE as error:  # what pandas and pyarrow raise derives from these
        got = f"{path} ({error})"
        way_out = "write it again"
        raise InputValueError(
            expected("predictions", f"be readable as {suffix[1:]}", got, way_out)
        ) from error


def _header(path: Path, separator: str) -> list[str]:
    """A table's names of columns; a row of another length is refused, as pandas would shift or drop its values."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, delimiter=separator)
        header = next(rows, [])
        width = len(header)
        for number, row in enumerate(rows):
            if len(row) not in (0, width):
                got = f"{len(row)} in row {number}"
                way_out = "give each row a value for each column, and none more"
                raise InputValueError(
                    expected("the table", f"have {width} values in every row", got, way_out)
                )
    return header


def _from_table(table: DataFrame, label_column: str, *, labelled: bool) -> Predictions:
    columns = [str(name) for name in table.columns]
    table.columns = columns
    if labelled and label_column not in columns:
        if len(columns) == 1 and any(mark in columns[0] for mark in ",;\t"):
            got = f"one column {columns[0]!r}"
            way_out = "separate the columns of a .csv by commas, and of a .tsv by tabs"
            raise InputValueError(expected("the table", "have several columns", got, way_out))
        requirement = f"be one of {', '.join(columns)}"
        raise InputValueError(
            expected("label_column", requirement, repr(label_column), did_you_mean(label_column, columns))
        )
    if not len(table):
        way_out = "write the predictions below the header"
        raise InputValueError(expected("the table", "have rows", "a header only", way_out))
    kind, names = class_columns(columns, label_column)
    scores = table[list(names.values())]
    for name, dtype in scores.dtypes.items():
        if dtype.kind not in "fiu":
            way_out = "name the class columns logit_<class> or prob_<class>, and fill in missing values"
            raise InputTypeError(expected(f"column {name!r}", "hold numbers in every row", dtype, way_out))
    matrix = scores.to_numpy(dtype=np.float64)
    if kind is None:
        _check_looks_like_probabilities(matrix)
    labels = (
        _label_ids(table[label_column], list(names), label_column)
        if labelled
        else np.zeros(len(table), np.int64)
    )
    return Predictions(labels, **{kind or "probs": matrix}, class_names=tuple(names))


def class_columns(columns: Sequence[str], label_column: str) -> tuple[str | None, dict[str, str]]:
    """The kind of scores, if the names of the class columns tell it, and class name -> column."""
    others = [name for name in columns if name != label_column]
    found = {
        kind: [name for name in others if name.startswith(prefix)]
        for kind, prefix in (("logits", "logit_"), ("probs", "prob_"))
    }
    if all(found.values()):
        got = "logit_ and prob_ columns"
        way_out = "keep one kind of them"
        raise InputValueError(expected("the table", "hold logits or probabilities", got, way_out))
    kind = next((kind for kind, names in found.items() if names), None)
    used = found[kind] if kind else others
    named = {"logits": "logit_", "probs": "prob_", None: ""}[kind]
    if len(used) < 2:
        way_out = "name them logit_<class> or prob_<class>"
        got = ", ".join(used) or "none"
        raise InputValueError(
            expected("the table", "hold a column for each of at least 2 classes", got, way_out)
        )
    times = Counter(columns)
    twice = sorted({name for name in (label_column, *used) if times[name] > 1})
    if twice:
        got = f"{', '.join(map(repr, twice))} twice"
        raise InputValueError(expected("the columns", "have different names", got, "keep one of each name"))
    classes = {name.removeprefix(named): name for name in used}
    if any(not name.strip() for name in classes):
        got = repr(next(column for name, column in classes.items() if not name.strip()))
        way_out = "name the class; leave out a table's index when you write it"
        raise InputValueError(expected("the class columns", "name their classes", got, way_out))
    labels_too = [name for name in classes if name.casefold() in _NAMES_OF_LABELS] if kind is None else []
    if labels_too:
        got = f"{labels_too[0]!r} beside the label column {label_column!r}"
        way_out = "name the class columns prob_<class>, and other columns are ignored"
        raise InputValueError(expected("the table", "hold one column of labels", got, way_out))
    return kind, classes


def _check_looks_like_probabilities(matrix: NDArray[np.float64]) -> None:
    """Columns without a prefix are probabilities; if they are logits, say how to name them."""
    outside = (matrix < 0) | (matrix > 1 + 1e-6)
    if outside.any():
        row, column = np.argwhere(outside)[0]
        way_out = "name the columns logit_<class> if they hold logits, and prob_<class> if there are others"
        requirement = "hold probabilities, as their names do not say logit_"
        got = f"{matrix[row, column]:.6g} in row {row}"
        raise InputValueError(expected("the class columns", requirement, got, way_out))


def _label_ids(labels: Series, names: list[str], column: str) -> NDArray[np.int64]:
    """Labels as the numbers of the columns they name or count."""
    import pandas

    types = pandas.api.types
    missing = np.flatnonzero(labels.isna() | (labels.astype(str).str.strip() == ""))
    if len(missing):
        got = f"none in {len(missing)} rows (first in row {missing[0]})"
        raise InputValueError(
            expected(f"column {column!r}", "hold a label in every row", got, "remove these rows")
        )
    number = {name: i for i, name in enumerate(names)}
    texts = labels.astype(str)
    if set(texts) <= set(names):
        return np.array([number[text] for text in texts], dtype=np.int64)
    if types.is_string_dtype(labels):  # of a text file: perhaps numbers
        numbers = pandas.to_numeric(labels, errors="coerce")
        labels = labels if numbers.isna().any() else numbers
        texts = labels.astype(str)
    may_overflow = types.is_float_dtype(labels) or types.is_unsigned_integer_dtype(labels)
    if may_overflow and not set(texts) <= set(names):
        wrong = np.flatnonzero((labels % 1 != 0) | (labels.abs() > _LARGEST_EXACT))
        if len(wrong):
            got = f"{labels.iloc[wrong[0]]} in row {wrong[0]}"
            way_out = "choose another label_column"
            raise InputTypeError(expected(f"column {column!r}", "hold class names or ids", got, way_out))
        labels = labels.astype(np.int64)  # pandas writes integers so where some were missing
        texts = labels.astype(str)
    if types.is_integer_dtype(labels) and not all(name.lstrip("-").isdigit() for name in names):
        return labels.to_numpy(dtype=np.int64)
    unknown = sorted(set(texts) - set(names))
    if unknown:
        alike = look_alikes(unknown, names)
        requirement = f"hold the names of the class columns ({few(names)})"
        way_out = "write the labels as the columns are named, or as numbers from 0 on"
        got = few(list(map(repr, unknown))) + (f" ({alike})" if alike else "")
        raise InputValueError(expected(f"column {column!r}", requirement, got, way_out))
    return np.array([number[text] for text in texts], dtype=np.int64)
