"""The figure of slices, with a named row for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hf_calib.metrics.checks import FloatArray
from hf_calib.plots import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def slice_diagram(
    names: Sequence[str], gaps: FloatArray, differs: NDArray[np.bool_], *, column: str
) -> Figure:
    """Draw each slice's confidence minus accuracy with its interval,
    filled if it differs from the others.

    Args:
        names: S names of slices, from the top.
        gaps: (S, 3), the gap and the ends of its interval.
        differs: (S,), True if a slice differs from the other rows beyond chance.
        column: the column that defines the slices.
    """
    with style.drawing(5.0, 1.0 + 0.2 * len(names)) as figure:
        axes = figure.subplots()
        axes.axvline(0, color=style.GREY, linewidth=0.8, linestyle=":")
        _draw_gaps(axes, gaps, differs, "differs", style.VERMILION, style.VERMILION)
        others = "within chance of the others"
        _draw_gaps(axes, gaps, ~differs, others, style.BLUE, "white")
        _name_rows(axes, [style.shortened(name, 30) for name in names])
        axes.set_ylabel(column)
        axes.set_xlabel("confidence minus accuracy: above 0 is over-confident")
        style.add_legend(figure, axes, columns=2)
    return figure


def _draw_gaps(
    axes: Axes,
    gaps: FloatArray,
    which: NDArray[np.bool_],
    label: str,
    colour: str,
    ground: str,
) -> None:
    """Draw the gaps of some of the slices with their intervals."""
    rows = np.flatnonzero(which)
    if len(rows) == 0:
        return
    gap, low, high = gaps[rows].T
    axes.hlines(rows, low, high, color=colour, linewidth=1.6)
    look: dict[str, Any] = {"color": ground, "edgecolor": colour, "label": label}
    axes.scatter(gap, rows, s=18, zorder=3, **look)


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Label the rows with the names, from the top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    style.plain_axes(axes)
