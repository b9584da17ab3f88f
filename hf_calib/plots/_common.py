"""What every picture shares: colours, checks of what is drawn, and writing it to a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from hf_calib._checks import expected
from hf_calib.metrics.binning import FloatArray

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart in every kind of colour vision; hatching tells them apart in grey.
BLUE, SKY, VERMILION = "#0072B2", "#A6D8F5", "#D55E00"
PEACH, GREY = "#F9C9A8", "#8C8C8C"

_FORMATS = (".pdf", ".png", ".svg")


def check_panel(name: str, confidences: ArrayLike, correct: ArrayLike) -> tuple[FloatArray, FloatArray]:
    """Return both as float64 (N,), or say what is wrong with the panel."""
    confidence = np.asarray(confidences, dtype=np.float64)
    right = np.asarray(correct, dtype=np.float64)
    if confidence.ndim != 1 or confidence.shape != right.shape or not confidence.size:
        got = f"shapes {confidence.shape} and {right.shape}"
        way_out = "pass probs.max(axis=1) and probs.argmax(axis=1) == labels"
        raise ValueError(expected(f"panel {name!r}", "be two equally long arrays (N,)", got, way_out))
    if not ((confidence >= 0) & (confidence <= 1 + 1e-6)).all():
        got = f"values from {confidence.min():.6g} to {confidence.max():.6g}"
        way_out = "pass probabilities, not logits"
        raise ValueError(expected(f"confidences of panel {name!r}", "lie in [0, 1]", got, way_out))
    if not np.isin(right, (0, 1)).all():
        got = f"values from {right.min():.6g} to {right.max():.6g}"
        way_out = "pass probs.argmax(axis=1) == labels"
        raise ValueError(expected(f"correct of panel {name!r}", "be 0 or 1", got, way_out))
    return confidence, right


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a figure as .png, .pdf or .svg: the whole file or none, over whatever was there.

    Args:
        figure: from one of the functions here, or any matplotlib figure.
        path: where to; missing folders are made.

    Raises:
        ValueError: if the path ends in anything else.
    """
    path = Path(path)
    if path.suffix.lower() not in _FORMATS:
        requirement = f"end in {', '.join(_FORMATS)}"
        raise ValueError(expected("path", requirement, repr(str(path)), "name the file reliability.png"))
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        figure.savefig(unfinished, dpi=200)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
