"""The lines of a model card on the decisions that lie beside the model."""

from __future__ import annotations

import os
import warnings

from hf_calib._errors import InputError
from hf_calib._markdown import escape
from hf_calib.decisions import Decisions
from hf_calib.decisions.saved import FILE


def decision_lines(folder: str | os.PathLike[str]) -> list[str]:
    """A paragraph on the folder's decisions.json, after an empty line; nothing where there is none.

    A file that is not ours, or for other classes, is warned of: the card is written at the end of a training.

    >>> decision_lines("no/such/folder")
    []
    """
    if not os.path.isfile(os.path.join(folder, FILE)):
        return []
    try:
        sentence = escape(Decisions.from_pretrained(folder).sentence())
    except InputError as error:
        warnings.warn(
            f"The model card says nothing of {FILE}: {error}. Run hf-calib decide again, or remove the file.",
            UserWarning,
            stacklevel=2,
        )
        return []
    return [
        "",
        f"A decision rule comes with the model, in `{FILE}`. {sentence} To apply it: "
        "`hf_calib.decisions.Decisions.from_pretrained(name)(pipe(texts, top_k=None))`.",
    ]
