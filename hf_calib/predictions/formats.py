"""Predictions in .npz files, and calibrated tables."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hf_calib._errors import InputError, InputValueError, check, expected, few
from hf_calib._files import whole_file
from hf_calib.metrics.checks import (
    check_kind,
    check_soft_labels,
    check_type,
    row_chunks,
)
from hf_calib.predictions.columns import CONFIDENCE, CORRECT, PREDICTED, SCORE
from hf_calib.predictions.labels import are_equal
from hf_calib.predictions.predictions import (
    Predictions,
    TopLabels,
    check_not_probabilities,
)

if TYPE_CHECKING:
    from hf_calib.predictions.reading import Read

# The numbers of a table that are calibrated and written at once.
_ROWS_AT_ONCE = 2**22
_KINDS = ("logits", "probs")
_SENTENCES = "sentences"
_WEIGHTS = "weights"
_OF_ROWS = (*_KINDS, "labels", CONFIDENCE, CORRECT, *PREDICTED, _SENTENCES, _WEIGHTS)
_ARRAYS = (*_OF_ROWS, "class_names")
# The bytes of a name or a label: the header of a small file may claim texts that fill
# the memory.
_LONGEST_TEXT = 2**12
# CIFAR-10H has the latter.
_SOFT_LABELS = ("soft_labels", "probs")


def load_arrays(
    path: str, argument: str, *, labelled: bool = True
) -> Predictions | TopLabels:
    """Load predictions from arrays `logits` or `probs`, `labels` and optionally `class_names`;
    missing labels are 0.

    Of top labels the arrays are `confidence` and `correct`, or `prediction` and `labels`.
    """
    name = Path(path).name
    arrays, found = _read(path, argument, _ARRAYS)
    # Weights that are left out without a word would change every number.
    way_out = "write a table with a column of them, and name it as weight_column"
    got = f"the array {_WEIGHTS}"
    check(_WEIGHTS not in arrays, f"{name} to have no weights", got, way_out)
    scores = {kind: arrays[kind] for kind in _KINDS if kind in arrays}
    if not scores and CONFIDENCE in arrays:
        return _top_labels(name, arrays, found)
    if not labelled:
        for array in scores.values():
            arrays["labels"] = np.zeros(len(np.atleast_1d(array)), int)
    way_out = "write it with numpy.savez(path, logits=logits, labels=labels)"
    requirement = f"{name} to hold the arrays labels and logits (or probs)"
    check(bool(scores) and "labels" in arrays, requirement, found, way_out)
    class_names = None
    if "class_names" in arrays:
        listed = np.atleast_1d(arrays["class_names"]).tolist()
        # Names of numpy's type S are bytes.
        class_names = tuple(
            each.decode() if isinstance(each, bytes) else str(each) for each in listed
        )
    about: dict[str, Any] = {"class_names": class_names}
    about[_SENTENCES] = arrays.get(_SENTENCES)
    made = Predictions(arrays["labels"], **scores, **about)
    if made.logits is not None:
        check_not_probabilities(made.logits)
    return made


def _top_labels(name: str, arrays: dict[str, Any], found: str) -> TopLabels:
    """Top labels from their arrays."""
    predicted = [arrays[each] for each in PREDICTED if each in arrays]
    if CORRECT in arrays:
        correct = arrays[CORRECT]
    else:
        requirement = f"{name} to hold the array correct, or prediction and labels"
        way_out = "write whether each prediction is correct, as 0 or 1"
        check(bool(predicted) and "labels" in arrays, requirement, found, way_out)
        correct = _are_equal(predicted[0], arrays["labels"])
    confidence = arrays[CONFIDENCE].astype(np.float64, copy=False)
    # They are checked as they are stored: as an integer, 0.5 would be a wrong
    # prediction.
    made = TopLabels(confidence, correct)
    return replace(made, correct=correct.astype(np.int64))


def _are_equal(predicted: NDArray[Any], labels: NDArray[Any]) -> NDArray[np.int64]:
    """1 where the prediction (N,) is the label."""
    import pyarrow

    columns = {"prediction": predicted, "labels": labels}
    for name, array in columns.items():
        way_out = "write the class of each row, as a number or a text"
        got = f"shape {array.shape}"
        check(array.ndim == 1, f"{name} to have shape (N,)", got, way_out)
        check_kind(array, "biufUS", f"{name} to hold numbers or texts", way_out)
    first, second = map(pyarrow.array, columns.values())
    return are_equal(first, "prediction", second, "labels")


def save_predictions(
    predictions: Predictions | TopLabels, path: str | os.PathLike[str]
) -> None:
    """Write predictions as .npz for `load_predictions`, completely or not at all;
    an existing file is replaced.

    The sentences of tokens are kept. Weights and slices belong into a table.

    Args:
        predictions: the predictions.
        path: a path that ends in .npz; missing folders are created.

    Raises:
        TypeError: if these are no predictions.
        ValueError: if the path has another suffix, or the predictions have weights or slices.
    """
    is_known = isinstance(predictions, Predictions | TopLabels)
    got = type(predictions).__name__
    check_type(is_known, "predictions to be Predictions or TopLabels", got, "make them")
    more = [*predictions.by]
    if predictions.weights is not None:
        more.append("weights")
    way_out = "write a table with these columns, or dataclasses.replace(predictions, weights=None, by={})"
    check(not more, "predictions to have no weights or slices", few(more), way_out)
    path = Path(path)
    check(
        path.suffix == ".npz",
        "path to end in .npz",
        path.name,
        "name the file predictions.npz",
    )
    arrays: dict[str, Any]
    if isinstance(predictions, TopLabels):
        arrays = {CONFIDENCE: predictions.confidence, CORRECT: predictions.correct}
    else:
        kind = "logits" if predictions.probs is None else "probs"
        arrays = {kind: predictions.scores, "labels": predictions.labels}
        if predictions.class_names is not None:
            # An array of objects would be pickled, and pickles are not read.
            arrays["class_names"] = np.array(predictions.class_names, dtype=np.str_)
    if predictions.sentences is not None:
        arrays[_SENTENCES] = predictions.sentences
    with whole_file(path) as unfinished:
        np.savez(unfinished, allow_pickle=False, **arrays)


def write_calibrated(
    read: Read, rows: Any, scaler: Any, path: Path, class_names: Any = None
) -> None:
    """Write some rows of files with calibrated probabilities in place of their scores.

    The rows of a table become a table, with all other columns unchanged; those of arrays and logs
    become arrays.

    Args:
        read: the files as they were read, with all of their columns.
        rows: a slice, or a mask (N,).
        scaler: the fitted calibrator.
        path: the file, without its ending.
        class_names: the C names for arrays; None for those of the data.
    """
    chosen = read.predictions.select(rows)
    target = path.with_suffix(read.ending)
    if read.columns is not None:
        _write_table(read, chosen, rows, scaler, target)
        return
    probs = scaler.predict_proba(chosen.as_logits())
    made: Predictions | TopLabels
    if isinstance(chosen, TopLabels):
        made = TopLabels(probs[:, 1], chosen.correct)
    else:
        names = class_names or chosen.class_names
        made = replace(chosen, logits=None, probs=probs, class_names=names)
    save_predictions(made, target)


def _write_table(
    read: Read,
    chosen: Predictions | TopLabels,
    rows: Any,
    scaler: Any,
    path: Path,
) -> None:
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    others = read.others
    if not isinstance(rows, slice):
        others = others.filter(pyarrow.array(rows))
    # The slices are among the other columns; `select` would convert all of them for
    # each part.
    chosen = replace(chosen, by={}, validate=False)

    def tables() -> Iterator[Any]:
        for part in row_chunks(len(chosen), chosen.n_classes, elements=_ROWS_AT_ONCE):
            probs = scaler.predict_proba(chosen.select(part).as_logits())
            kept = others.slice(part.start, len(probs))
            own = dict(zip(kept.column_names, kept.columns, strict=True))
            yield pyarrow.table(_columns_of(read, probs) | own)

    written = tables()
    first = next(written)
    with ParquetWriter(path, first.schema) as writer:
        for table in chain([first], written):
            writer.write_table(table)


def _columns_of(read: Read, probs: NDArray[Any]) -> dict[str, Any]:
    """The columns of calibrated probabilities (n, C), in the form of the scores."""
    import pyarrow

    columns = read.columns
    assert columns is not None
    if columns.listed:
        flat = pyarrow.array(np.ascontiguousarray(probs).reshape(-1))
        n_classes = probs.shape[1]
        lists = pyarrow.FixedSizeListArray.from_arrays(flat, n_classes)
        return {columns.written[0]: lists}
    by_class = np.ascontiguousarray(probs.T)
    # The one column holds the probability of the second class: that of "correct", or of
    # the positive class.
    if columns.kind in (CONFIDENCE, SCORE):
        by_class = by_class[1:]
    pairs = zip(columns.written, by_class, strict=True)
    return {name: pyarrow.array(own) for name, own in pairs}


def load_soft_labels(
    path: str | os.PathLike[str], n_rows: int, n_classes: int
) -> NDArray[np.float64]:
    """Load soft labels (N, C), the shares of annotators per class,
    from a file's array `soft_labels` or `probs`.
    """
    check(
        os.path.isfile(path),
        "soft_labels to name an existing file",
        path,
        "check the path",
    )
    arrays, found = _read(os.fspath(path), "soft_labels", _SOFT_LABELS)
    way_out = "write it with numpy.savez(path, soft_labels=soft_labels)"
    check(
        bool(arrays),
        f"{path} to hold the array {' or '.join(_SOFT_LABELS)}",
        found,
        way_out,
    )
    key, array = next(iter(arrays.items()))
    argument = f"{key} in {path}"
    return check_soft_labels(array, (n_rows, n_classes), argument=argument)


def _read(path: str, argument: str, names: Sequence[str]) -> tuple[dict[str, Any], str]:
    """The arrays with these names, and the names of all arrays; objects are not unpickled."""
    try:
        with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as archive:
            _check_headers(archive, path)
            arrays = {name: archive[name] for name in names if name in archive}
            for name, array in arrays.items():
                # Another kind of machine may have another order of bytes.
                native = array.dtype.newbyteorder("=")
                arrays[name] = array.astype(native, copy=False)
            return arrays, ", ".join(archive) or "none"
    except InputError:
        raise
    # The file may have any content.
    except Exception as error:
        got = f"{path} ({error})"
        way_out = "write it with numpy.savez, plain arrays only"
        raise InputValueError(
            expected(argument, "be readable as npz", got, way_out)
        ) from error


def _check_headers(archive: Any, path: str) -> None:
    """Raise if headers state several numbers of rows, or more values or longer texts than the
    scores have use for, as a small file may hold arrays larger than the memory; or 0 rows.
    """
    headers = {name: _header(archive, name) for name in _ARRAYS if name in archive}
    of_rows = {name: headers[name][0] for name in _OF_ROWS if name in headers}
    rows = {name: shape[:1] for name, shape in of_rows.items()}
    got = ", ".join(f"{n[0] if n else 'no'} of {name}" for name, n in rows.items())
    way_out = "write the scores and the label of each row"
    requirement = "the arrays to have the same number of rows"
    check(len(set(rows.values())) < 2, requirement, got, way_out)
    has_rows = (0,) not in rows.values()
    check(has_rows, f"{Path(path).name} to have rows", "none", way_out)
    scores = [of_rows[name] for name in (*_KINDS, CONFIDENCE) if name in of_rows]
    if not scores:
        return
    most = max(math.prod(shape) for shape in scores)
    limits = dict.fromkeys(of_rows, most)
    n_classes = scores[0][1] if len(scores[0]) > 1 else 2
    limits["class_names"] = n_classes
    for name, (shape, n_bytes) in headers.items():
        requirement = f"{name} to hold at most {limits[name]:,} values, as the scores"
        n_values = math.prod(shape)
        way_out = "write one for each row, or for each class"
        check(n_values <= limits[name], requirement, f"{n_values:,}", way_out)
        requirement = f"{name} to hold texts of at most {_LONGEST_TEXT:,} bytes"
        check(n_bytes <= _LONGEST_TEXT, requirement, f"{n_bytes:,}", "shorten them")


def _header(archive: Any, name: str) -> tuple[tuple[int, ...], int]:
    """The shape of an array and the bytes of a value, from its header only."""
    read: Any = np.lib.format.read_array_header_2_0
    with archive.zip.open(f"{name}.npy") as file:
        if np.lib.format.read_magic(file) == (1, 0):
            read = np.lib.format.read_array_header_1_0
        shape, _, dtype = read(file)
        return tuple(shape), dtype.itemsize
