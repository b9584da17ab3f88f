"""Figures of slices: the groups of rows that a column names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hf_calib.metrics.checks import FloatArray
from hf_calib.plots._common import BLUE, GREY, VERMILION, add_legend, new_figure, plain_axes, shortened

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
    figure = new_figure(5.0, 1.0 + 0.2 * len(names))
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
    axes.set_yticks(places, [shortened(name, 30) for name in names])
    for label in (*axes.get_yticklabels(), axes.yaxis.label):
        label.set_parse_math(False)
    axes.set_ylabel(column, fontsize=8)
    axes.set_xlabel("confidence minus accuracy: above 0 is over-confident", fontsize=8)
    plain_axes(axes)
    add_legend(figure, axes, columns=2)
    return figure
