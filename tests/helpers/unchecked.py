"""Predictions as a training leaves them: nothing is validated."""

from __future__ import annotations

from typing import Any

import numpy as np

from hf_calib.predictions.predictions import Predictions


def unchecked(
    logits: Any,
    labels: Any,
    sentences: Any = None,
    class_names: tuple[str, ...] | None = None,
) -> Predictions:
    """Logits (N, C), labels, and for tokens their sentences; classes are named 0, 1, ... by default."""
    names = class_names or tuple(map(str, range(np.shape(logits)[1])))
    return Predictions(
        labels, logits=logits, class_names=names, sentences=sentences, validate=False
    )
