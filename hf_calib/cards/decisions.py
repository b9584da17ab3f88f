"""The lines of a model card on the decisions that lie beside the model."""

from __future__ import annotations

import json
import os
import warnings

from hf_calib._errors import InputError
from hf_calib._text import escape
from hf_calib.decisions import Decisions
from hf_calib.decisions.saved import FILE
from hf_calib.scaling.saved_map import MAP_NAME


def decision_lines(folder: str | os.PathLike[str]) -> list[str]:
    """A paragraph on the folder's decisions.json, after an empty line; nothing where there is none.

    A file that is not ours, for other classes or for other weights, is warned of: the card is written at the end
    of a training.

    >>> decision_lines("no/such/folder")
    []
    """
    if not os.path.isfile(os.path.join(folder, FILE)):
        return []
    try:
        decisions = Decisions.from_pretrained(folder)
        sentence = escape(decisions.sentence())
    except InputError as error:
        _left_out(str(error), "Run hf-calib decide again, or remove the file.")
        return []
    weights = _fingerprint(folder)
    if None not in (weights, decisions.fingerprint) and weights != decisions.fingerprint:
        _left_out(
            "its rule was fitted on the probabilities of other weights than those of this folder, and what it promises "
            "is not known to hold for them",
            "Run hf-calib decide again.",
        )
        return []
    return [
        "",
        f"A decision rule comes with the model, in `{FILE}`. {sentence} To apply it: "
        "`hf_calib.decisions.Decisions.from_pretrained(name)(classify(texts))`.",
    ]


def _fingerprint(folder: str | os.PathLike[str]) -> object:
    """That of calibration.json; None where it has none."""
    try:
        with open(os.path.join(folder, MAP_NAME), encoding="utf-8") as file:
            record = json.load(file)
    except (OSError, ValueError, RecursionError):
        return None
    return record.get("fingerprint") if isinstance(record, dict) else None


def _left_out(reason: str, way_out: str) -> None:
    warnings.warn(f"The model card says nothing of {FILE}: {reason}. {way_out}", UserWarning, stacklevel=3)
