"""Figures of slices: the groups of rows that a column names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hf_calib.metrics.checks import FloatArray
from hf_calib.plots._common import BLUE, GREY, VERMILION, plain_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def slice_diagram(
    names: Sequence[str], gaps: FloatArray, differs: NDArray[np.bool_], *, column: str
) -> Figure:
    """Draw each slice's confidence minus accuracy with its interval; those that differ from the others are filled.

    Args:
        names: S slices, from the top.
        gaps: (S, 3), the gap and the ends of its interval.
        differs: (S,), which differ from the other rows beyond chance.
        column: that names the slices.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.0, 1.0 + 0.2 * len(names)), layout="constrained")
    axes = figure.subplots()
    places = np.arange(len(names))[::-1]
    axes.axvline(0, color=GREY, linewidth=0.8, linestyle=":")
    for which, colour, word in (
        (differs, VERMILION, "differs"),
        (~differs, BLUE, "within chance of the others"),
    ):
        if which.any():
            axes.hlines(places[which], gaps[which, 1], gaps[which, 2], color=colour, linewidth=1.6)
            axes.scatter(
                gaps[which, 0],
                places[which],
                s=18,
                color=colour if word == "differs" else "white",
                edgecolor=colour,
                zorder=3,
                label=word,
            )
    axes.set_yticks(places, [name if len(name) <= 30 else f"{name[:29]}…" for name in names])
    for label in (*axes.get_yticklabels(), axes.yaxis.label):
        label.set_parse_math(False)
    axes.set_ylabel(column, fontsize=8)
    axes.set_xlabel("confidence minus accuracy: above 0 is over-confident", fontsize=8)
    plain_axes(axes)
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=7, frameon=False
    )
    return figure
