"""Files of soft labels: what share of an example's annotators named each class."""

from __future__ import annotations

import os
import zipfile
import zlib

import numpy as np
from numpy.typing import NDArray

from hf_calib._errors import InputValueError, expected
from hf_calib.metrics.checks import check_soft_labels

KEYS = ("soft_labels", "probs")  # the latter as in the file of CIFAR-10H
_WAY_OUT = "write it with numpy.savez(path, soft_labels=soft_labels)"


def load_soft_labels(path: str | os.PathLike[str], n_rows: int, n_classes: int) -> NDArray[np.float64]:
    """Read soft labels (N, C) from a .npz file, where they are the array `soft_labels`, or `probs`.

    Args:
        path: of the file. Pickled objects are not read.
        n_rows: N, of the data, in whose order they are.
        n_classes: C, of the model, in whose order they are.

    Raises:
        ValueError: if the file is missing or unreadable, has no such array of this shape, or it does not sum to
            1 in each row.
        TypeError: if it holds anything but floats.

    >>> load_soft_labels("missing.npz", 10, 2)
    Traceback (most recent call last):
    ...
    hf_calib._errors.InputValueError: expected soft_labels to name an existing file, got missing.npz; check the path
    """
    if not os.path.isfile(path):
        raise InputValueError(expected("soft_labels", "name an existing file", path, "check the path"))
    try:
        with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
            key = next((key for key in KEYS if key in file), None)
            found = ", ".join(file.files) or "none"
            array = None if key is None else file[key]
    except (OSError, EOFError, ValueError, TypeError, zlib.error, zipfile.BadZipFile) as error:
        got = f"{path} ({error})"
        raise InputValueError(expected("soft_labels", "be readable as npz", got, _WAY_OUT)) from error
    if array is None:
        requirement = f"hold the array {' or '.join(KEYS)}"
        raise InputValueError(expected(str(path), requirement, found, _WAY_OUT))
    if array.shape != (n_rows, n_classes):
        requirement = f"have shape ({n_rows}, {n_classes}), of the data's rows and the model's classes"
        way_out = "write those of the same rows, in their order"
        raise InputValueError(expected(f"{key} in {path}", requirement, f"shape {array.shape}", way_out))
    return check_soft_labels(array, array.shape)
