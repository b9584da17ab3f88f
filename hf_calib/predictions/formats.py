"""Predictions that are not tables: arrays in .npz files, and sample logs of lm-evaluation-harness."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO

import numpy as np
from numpy.typing import NDArray

from hf_calib._errors import InputError, InputValueError, check, expected, few
from hf_calib._files import whole_file
from hf_calib.metrics.checks import check_soft_labels
from hf_calib.predictions.columns import check_not_probabilities
from hf_calib.predictions.predictions import Predictions

_KINDS = ("logits", "probs")
_SOFT_LABELS = ("soft_labels", "probs")  # CIFAR-10H has the latter.


def load_arrays(path: str, argument: str, *, labelled: bool = True) -> Predictions:
    """Load predictions from arrays `logits` or `probs`, `labels` and optionally `class_names`; missing labels are 0."""
    arrays, found = _read(path, argument, (*_KINDS, "labels", "class_names"))
    kind = next((kind for kind in _KINDS if kind in arrays), None)
    if not labelled and kind is not None:
        arrays["labels"] = np.zeros(len(np.atleast_1d(arrays[kind])), int)
    way_out = "write it with numpy.savez(path, logits=logits, labels=labels)"
    requirement = f"{Path(path).name} to hold the arrays labels and logits (or probs)"
    check(kind is not None and "labels" in arrays, requirement, found, way_out)
    has_rows = len(np.atleast_1d(arrays["labels"])) > 0
    requirement = f"{Path(path).name} to have rows"
    check(has_rows, requirement, "none", "write the scores and the label of each row")
    names = arrays.pop("class_names", None)
    if names is not None:
        listed = np.atleast_1d(names).tolist()
        names = tuple(
            each.decode() if isinstance(each, bytes) else str(each) for each in listed
        )
    arrays = {name: _in_native_order(array) for name, array in arrays.items()}
    made = Predictions(arrays.pop("labels"), **arrays, class_names=names)
    check_not_probabilities(made.logits)
    return made


def _in_native_order(array: NDArray[Any]) -> NDArray[Any]:
    """The array of another kind of machine in this one's byte order."""
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def save_predictions(predictions: Predictions, path: str | os.PathLike[str]) -> None:
    """Write predictions as .npz for `load_predictions`, completely or not at all; an existing file is replaced.

    Args:
        predictions: the predictions.
        path: a path that ends in .npz; missing folders are created.

    Raises:
        ValueError: if the path has another suffix.
    """
    path = Path(path)
    check(
        path.suffix == ".npz",
        "path to end in .npz",
        path.name,
        "name the file predictions.npz",
    )
    kind = "logits" if predictions.probs is None else "probs"
    arrays = {kind: predictions.scores, "labels": predictions.labels}
    if predictions.class_names is not None:
        arrays["class_names"] = np.array(predictions.class_names, dtype=np.str_)
    with whole_file(path) as unfinished:
        np.savez(unfinished, allow_pickle=False, **arrays)


def load_soft_labels(
    path: str | os.PathLike[str], n_rows: int, n_classes: int
) -> NDArray[np.float64]:
    """Load soft labels (N, C), the shares of annotators per class, from a file's array `soft_labels` or `probs`."""
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
    requirement = f"{key} in {path} to have shape ({n_rows}, {n_classes}), of the data's rows and the model's classes"
    way_out = "write those of the same rows, in their order"
    check(
        array.shape == (n_rows, n_classes), requirement, f"shape {array.shape}", way_out
    )
    return check_soft_labels(array, array.shape)


def _read(path: str, argument: str, names: Sequence[str]) -> tuple[dict[str, Any], str]:
    """The arrays with these names, and the names of all arrays; objects are not unpickled."""
    try:
        with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as archive:
            _check_rows_agree(archive)
            return {
                name: archive[name] for name in names if name in archive
            }, ", ".join(archive) or "none"
    except InputError:
        raise
    except Exception as error:  # The file may have any content.
        got, way_out = (
            f"{path} ({error})",
            "write it with numpy.savez, plain arrays only",
        )
        raise InputValueError(
            expected(argument, "be readable as npz", got, way_out)
        ) from error


def _check_rows_agree(archive: Any) -> None:
    """Raise if headers state other numbers of rows, as a small file may hold arrays larger than the memory."""
    rows = {
        name: _shape(archive, name)[:1]
        for name in (*_KINDS, "labels")
        if name in archive.files
    }
    got = ", ".join(f"{n[0] if n else 'no'} of {name}" for name, n in rows.items())
    way_out = "write the scores and the label of each row"
    requirement = "the arrays to have the same number of rows"
    check(len(set(rows.values())) < 2, requirement, got, way_out)


def _shape(archive: Any, name: str) -> tuple[int, ...]:
    """The shape of an array, from its header only."""
    readers: Any = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    with archive.zip.open(f"{name}.npy") as file:
        shape, *_ = readers[np.lib.format.read_magic(file)](file)
    return tuple(shape)


OptionScores = Literal["sum", "per_character", "per_byte"]
_KEYS = {"doc_id", "arguments", "filtered_resps", "target"}
_WAY_OUT = "log a multiple-choice task"


def rows_of_log(file: TextIO) -> list[Any] | None:
    """The rows of a log of lm-evaluation-harness, in lines or a list; None for other files."""
    first = next((line for line in file if line.strip()), "null")
    file.seek(0)
    is_list = first.lstrip().startswith("[")
    try:
        found = json.load(file) if is_list else [json.loads(first)]
    except (ValueError, RecursionError):
        return None
    if not found or not _is_row(found[0]):
        return None
    if is_list:
        return list(found)
    file.seek(0)
    return [json.loads(line) for line in file if line.strip()]


def _is_row(row: Any) -> bool:
    """Whether a value of JSON is a row of a log."""
    return isinstance(row, dict) and row.keys() >= _KEYS


def read_log(rows: list[Any], name: str, scores: OptionScores = "sum") -> Predictions:
    """Return the log-likelihoods of a log's answers as logits (see `open_predictions`), and the labels."""
    for place, row in enumerate(rows):
        requirement = f"each row of {name} to have {', '.join(sorted(_KEYS))}"
        got = f"{few([row])} in row {place}"
        check(_is_row(row), requirement, got, "write the log again")
        got = f"{row.get('acc')!r} in row {place} of {name}"
        is_known = row.get("acc", 0) in (0, 1)
        check(is_known, "acc to be 0 or 1", got, "evaluate the task again")
    times = Counter(str(row["doc_id"]) for row in rows).most_common(1)
    got = f"{times[0][1]} rows with {times[0][0]} in {name}"
    check(
        times[0][1] == 1,
        "each doc_id to be in one row",
        got,
        "keep the rows of one filter",
    )
    places = [f"in row {place} of {name}" for place in range(len(rows))]
    answers = [
        _answers(row["arguments"], place)
        for row, place in zip(rows, places, strict=True)
    ]
    likelihoods = [
        _likelihoods(*each) for each in zip(rows, answers, places, strict=True)
    ]
    # If a question has fewer answers, the missing ones have probability 0.
    logits = np.full((len(rows), max(map(len, answers))), -np.inf)
    lengths = {
        "sum": lambda text: 1,
        "per_character": len,
        "per_byte": lambda text: len(text.encode()),
    }
    for own, texts, values in zip(logits, answers, likelihoods, strict=True):
        own[: len(texts)] = values / np.array(
            [max(lengths[scores](text), 1) for text in texts]
        )
    best = [int(values.argmax()) for values in likelihoods]
    names = tuple(map(str, range(logits.shape[1])))
    return Predictions(
        np.array(_targets(rows, answers, best, places)),
        logits=logits,
        class_names=names,
    )


def _answers(arguments: Any, place: str) -> list[str]:
    """The answers in a dictionary, or in the pairs of context and answer of old versions."""
    pairs = arguments
    if isinstance(arguments, dict):
        # A log with sorted keys has gen_args_10 before gen_args_2, but its log-likelihoods in order.
        pairs = [arguments[key] for key in sorted(arguments, key=_number_at_the_end)]
    try:
        texts = [pair["arg_1"] if isinstance(pair, dict) else pair[1] for pair in pairs]
    except (TypeError, KeyError, IndexError):
        texts = []
    requirement = "arguments to hold a context and an answer for each answer"
    check(bool(texts), requirement, f"{few([arguments])} {place}", _WAY_OUT)
    return [str(text).strip() for text in texts]


def _number_at_the_end(key: str) -> int:
    """The number of gen_args_2 and the like; 0 without one."""
    digits = re.search(r"\d+$", key, re.ASCII)
    return 0 if digits is None else int(digits.group())


def _likelihoods(
    row: Mapping[str, Any], answers: Sequence[str], place: str
) -> np.ndarray:
    found = row["filtered_resps"]
    try:
        likelihoods = np.array([float(each[0]) for each in found])
    except (TypeError, ValueError, IndexError, KeyError):
        likelihoods = np.empty(0)
    requirement = (
        "filtered_resps to hold a log-likelihood for each of at least 2 answers"
    )
    got = f"{few([found])} for {len(answers)} answers {place}"
    check(len(likelihoods) == len(answers) >= 2, requirement, got, _WAY_OUT)
    requirement = "filtered_resps to hold numbers below infinity, one of them finite"
    # NaN is not below infinity.
    fits = bool((likelihoods < np.inf).all() and likelihoods.max() > -np.inf)
    way_out = "remove the row, or find the cause, such as a model that has diverged"
    check(fits, requirement, f"{few([found])} {place}", way_out)
    return likelihoods


def _targets(
    rows: Sequence[Mapping[str, Any]],
    answers: Sequence[Sequence[str]],
    best: Sequence[int],
    places: Sequence[str],
) -> list[int]:
    """The indices of the correct answers, which a task gives as an index or as a text.

    A number may be the index of one answer and the text of another; the accuracies in the log decide.
    """
    targets = [str(row["target"]).strip() for row in rows]
    texts = [
        str(own.index(each)) if each in own else each
        for each, own in zip(targets, answers, strict=True)
    ]
    wrong: list[int] = []
    fitting: list[list[int]] = []
    for labels in (targets, texts):
        wrong = [
            place
            for place, (label, own) in enumerate(zip(labels, answers, strict=True))
            if label not in map(str, range(len(own)))
            or rows[place].get("acc", label == str(best[place]))
            != (label == str(best[place]))
        ]
        if not wrong:
            fitting.append([int(label) for label in labels])
    requirement = "the target to be the index or the text of the correct answer, in agreement with acc"
    place = wrong[0] if wrong else 0
    got = f"{targets[place]!r} {places[place]}"
    check(bool(fitting), requirement, got, _WAY_OUT)
    as_indices, as_texts = fitting[0], fitting[-1]
    differing = [
        place for place in range(len(rows)) if as_indices[place] != as_texts[place]
    ]
    place = differing[0] if differing else 0
    got = f"{targets[place]!r} {places[place]}, which is both"
    requirement = "the target to be the index of an answer or the text of one"
    way_out = "log the metric acc, which tells them apart"
    check(not differing, requirement, got, way_out)
    return as_indices
