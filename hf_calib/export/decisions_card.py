"""The lines of a model card on the decisions that lie beside the model."""

from __future__ import annotations

import os

from hf_calib._markdown import escape
from hf_calib.decisions import Decisions
from hf_calib.decisions.saved import FILE


def decision_lines(folder: str | os.PathLike[str]) -> list[str]:
    """A paragraph on the folder's decisions.json, after an empty line; nothing where there is none.

    Raises:
        ValueError: if the file is broken, or for other classes than those of the model's config.json.

    >>> decision_lines("no/such/folder")
    []
    """
    if not os.path.isfile(os.path.join(folder, FILE)):
        return []
    sentence = escape(Decisions.from_pretrained(folder).sentence())
    return [
        "",
        f"A decision rule comes with the model, in `{FILE}`. {sentence} To apply it: "
        "`hf_calib.decisions.Decisions.from_pretrained(name)(pipe(texts, top_k=None))`.",
    ]
