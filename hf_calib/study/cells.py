"""The finished trainings of a study whose numbers can be compared: one kind of task, and the same test rows."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hf_calib._errors import InputError, InputValueError, expected
from hf_calib.metrics.multi_label import UNKNOWN
from hf_calib.predictions.predictions import Predictions
from hf_calib.predictions.training import PREDICTIONS, TrainingPredictions
from hf_calib.study.folder import CELLS, is_finished, problem

Key = tuple[str, int]  # loss and seed


class Cells(NamedTuple):
    """The cells of a study.

    Args:
        folders: (loss, seed) -> folder, of those that can be compared.
        missing: (loss, seed) -> why not, of the others.
    """

    folders: dict[Key, Path]
    missing: dict[Key, str]


def find_cells(study: Path, plan: Mapping[str, Any]) -> Cells:
    """Look through the cells that study.json lists; a loss and seed that it lists twice is the later one.

    Raises:
        ValueError: if the cells are of different kinds.
    """
    listed = {(entry["loss"], entry["seed"]): study / CELLS / name for name, entry in plan["cells"].items()}
    missing: dict[Key, str] = {}
    tested: dict[Key, str] = {}  # what the rows of a comparison share
    kinds: dict[str, Key] = {}  # the first cell of each
    for key, folder in listed.items():
        if not is_finished(folder):
            missing[key] = problem(folder)
            continue
        try:
            predictions = TrainingPredictions.load(folder / PREDICTIONS)
        except InputError as error:
            missing[key] = str(error)
            continue
        kinds.setdefault(predictions.test.kind.name, key)
        wrong = fault(predictions.test)
        if wrong is not None:
            missing[key] = f"its test predictions {wrong}"
            continue
        labels = hashlib.sha256(predictions.test.labels.astype(np.int64).tobytes())
        if predictions.test.sentences is not None:
            labels.update(predictions.test.sentences.astype(np.int64).tobytes())
        tested[key] = f"{predictions.class_names} {labels.hexdigest()}"
    if len(kinds) > 1:
        got = ", ".join(f"{kind} ones ({loss}, seed {seed})" for kind, (loss, seed) in kinds.items())
        way_out = "compare each kind in a study of its own"
        raise InputValueError(expected("a study's predictions", "be of one kind", got, way_out))
    if tested:
        ((most, n_cells),) = Counter(tested.values()).most_common(1)
        for key, found in tested.items():
            if found != most:
                missing[key] = (
                    f"its test labels or classes are not those that {n_cells} of the {len(tested)} finished cells "
                    "share, and a paired comparison needs the same rows in the same order"
                )
    folders = {key: folder for key, folder in listed.items() if key not in missing}
    return Cells(folders, missing)


def fault(rows: Predictions) -> str | None:
    """The fault that keeps rows out of a comparison, to follow "its test predictions"; or None."""
    logits, labels = rows.as_logits(), rows.labels
    n_rows, n_classes = logits.shape
    if n_rows == 0:
        return "are none"
    if labels.ndim == 2:
        n_bad = np.count_nonzero(~np.isfinite(logits).all(axis=1))
    elif n_classes < 2:
        return "have one logit per row, and a study compares classifiers with at least 2 classes"
    else:
        n_bad = np.count_nonzero(~_usable(logits))
    if n_bad:
        return f"have NaN or infinite logits in {n_bad} of {n_rows} rows: the training diverged"
    if labels.ndim == 2:
        if labels.shape != logits.shape:
            return f"have labels of shape {labels.shape} beside logits {logits.shape}"
        if not np.isin(labels, (0, 1, UNKNOWN)).all():
            return "have labels that are not 0 or 1, nor -100 for one that is not known"
        return None if (labels != UNKNOWN).any() else "have no label that is known"
    if labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= n_classes:
        return f"have labels outside 0..{n_classes - 1}"
    return None


def _usable(logits: NDArray[Any]) -> NDArray[np.bool_]:
    """Rows whose largest logit is finite: -inf masks a class, and NaN compares false."""
    largest = logits.max(axis=1)
    return np.asarray((largest < np.inf) & (largest > -np.inf))
