"""Arrays in .npz files: predictions, and soft labels."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_calib._errors import InputValueError, check, expected
from hf_calib._files import whole_file
from hf_calib.metrics.checks import check_soft_labels
from hf_calib.predictions.columns import check_not_probabilities
from hf_calib.predictions.predictions import Predictions

_KINDS = ("logits", "probs")
_SOFT_LABELS = ("soft_labels", "probs")  # the latter as in the file of CIFAR-10H


def load_arrays(path: str, argument: str, *, labelled: bool = True) -> Predictions:
    """Predictions of the arrays `logits` or `probs`, `labels` and perhaps `class_names`; unlabelled, with labels 0."""
    arrays, found = _read(path, argument, (*_KINDS, "labels", "class_names"))
    kind = next((kind for kind in _KINDS if kind in arrays), None)
    if not labelled and kind is not None:
        arrays["labels"] = np.zeros(len(np.atleast_1d(arrays[kind])), int)
    way_out = "write it with numpy.savez(path, logits=logits, labels=labels)"
    requirement = f"{Path(path).name} to hold the arrays labels and logits (or probs)"
    check(kind is not None and "labels" in arrays, requirement, found, way_out)
    names = arrays.pop("class_names", None)
    if names is not None:
        listed = np.atleast_1d(names).tolist()
        names = tuple(each.decode() if isinstance(each, bytes) else str(each) for each in listed)
    made = Predictions(arrays.pop("labels"), **arrays, class_names=names)
    check_not_probabilities(made.logits)
    return made


def save_predictions(predictions: Predictions, path: str | os.PathLike[str]) -> None:
    """Write predictions as .npz, for `load_predictions`: the whole file or nothing; a file there is replaced.

    Args:
        predictions: what to write.
        path: ends in .npz; missing folders are created.

    Raises:
        ValueError: if the path ends in anything else.
    """
    path = Path(path)
    check(path.suffix == ".npz", "path to end in .npz", path.name, "name the file predictions.npz")
    kind = "logits" if predictions.probs is None else "probs"
    arrays = {kind: predictions.scores, "labels": predictions.labels}
    if predictions.class_names is not None:
        arrays["class_names"] = np.array(predictions.class_names, dtype=np.str_)
    with whole_file(path) as unfinished:
        np.savez(unfinished, allow_pickle=False, **arrays)


def load_soft_labels(path: str | os.PathLike[str], n_rows: int, n_classes: int) -> NDArray[np.float64]:
    """Soft labels (N, C), shares of annotators that named each class: the array `soft_labels` or `probs` of a file."""
    check(os.path.isfile(path), "soft_labels to name an existing file", path, "check the path")
    arrays, found = _read(os.fspath(path), "soft_labels", _SOFT_LABELS)
    way_out = "write it with numpy.savez(path, soft_labels=soft_labels)"
    check(bool(arrays), f"{path} to hold the array {' or '.join(_SOFT_LABELS)}", found, way_out)
    key, array = next(iter(arrays.items()))
    requirement = (
        f"{key} in {path} to have shape ({n_rows}, {n_classes}), of the data's rows and the model's classes"
    )
    way_out = "write those of the same rows, in their order"
    check(array.shape == (n_rows, n_classes), requirement, f"shape {array.shape}", way_out)
    return check_soft_labels(array, array.shape)


def _read(path: str, argument: str, names: Sequence[str]) -> tuple[dict[str, Any], str]:
    """The arrays of these names, and the names of all; objects are not unpickled."""
    try:
        with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as archive:
            return {name: archive[name] for name in names if name in archive}, ", ".join(archive) or "none"
    except Exception as error:  # objects, another file, one array, packed or encrypted, of terabytes
        got, way_out = f"{path} ({error})", "write it with numpy.savez, plain arrays only"
        raise InputValueError(expected(argument, "be readable as npz", got, way_out)) from error
