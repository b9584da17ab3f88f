"""Figures with a named row for each slice or loss."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hf_calib._errors import check
from hf_calib.metrics.checks import FloatArray
from hf_calib.plots import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# A difference with its interval and p, if there are any.
Difference = tuple[float, float | None, float | None, float | None]

# In the order of the calibrators; the markers differ in grey, too.
_LOOKS = (
    ("#333333", "o"),
    (style.BLUE, "s"),
    (style.VERMILION, "^"),
    ("#009E73", "D"),
    ("#CC79A7", "v"),
)
_LETTERS = 24  # The most characters of a name in a line.


def difference_diagram(
    metrics: Mapping[str, Mapping[str, Mapping[str, Difference]]],
    *,
    baseline: str,
    level: float = 0.05,
    title: str | None = None,
) -> Figure:
    """Draw paired differences to a baseline as a forest plot, with a row per metric and a column per calibrator.

    A filled marker is a difference that is distinguishable from 0; a hollow marker is not. Each panel has its own
    scale, because differences before calibration are often many times as large as those after it.

    Args:
        metrics: metric -> loss -> calibrator -> (difference, low, high, p); None if there is no interval or p. All
            panels have the losses in the given order. A calibrator may be missing, and a difference of NaN is
            left out.
        baseline: name of the baseline for the legend.
        level: differences with p below it are distinguishable; pass corrected p for several comparisons.

    Raises:
        ValueError: if there is no difference.

    >>> focal = {"none": (0.1, 0.08, 0.12, 0.001), "temperature": (-0.001, -0.01, 0.008, 0.8)}
    >>> figure = difference_diagram({"NLL": {"focal": focal}}, baseline="cross_entropy + temperature")
    >>> [axes.get_title() for axes in figure.axes]
    ['none', 'temperature']
    """
    losses = list(dict.fromkeys(loss for rows in metrics.values() for loss in rows))
    maps = list(
        dict.fromkeys(
            name
            for rows in metrics.values()
            for found in rows.values()
            for name in found
        )
    )
    way_out = "compare at least one loss with the baseline"
    check(bool(maps), "metrics to hold at least one difference", "none", way_out)
    names = ["\n".join(style.name_lines(loss, _LETTERS)) for loss in losses]
    height = len(losses) * max(
        0.2, 0.14 * max(name.count("\n") + 1 for name in names) + 0.06
    )
    with style.drawing(
        1.9 + 2.3 * len(maps), 0.6 + (0.85 + height) * len(metrics), title
    ) as figure:
        grid = figure.subplots(len(metrics), len(maps), sharey=True, squeeze=False)
        for panels, (metric, rows) in zip(grid, metrics.items(), strict=True):
            for axes, name, look in zip(panels, maps, cycle(_LOOKS), strict=False):
                _name_rows(axes, names)
                for row in range(0, len(names), 2):
                    axes.axhspan(
                        row - 0.5, row + 0.5, color="#F1F1F1", linewidth=0, zorder=0
                    )
                axes.axvline(0, color="black", linewidth=1)
                for row, loss in enumerate(losses):
                    _draw_difference(
                        axes, row, rows.get(loss, {}).get(name), look, level
                    )
                axes.set_xlabel(f"difference in {metric}")
                axes.locator_params(axis="x", nbins=5)
                axes.tick_params(axis="y", length=0, labelsize=8)
                axes.spines["left"].set_visible(False)
        for axes, name in zip(grid[0], maps, strict=True):
            axes.set_title(
                "\n".join(style.name_lines(name, _LETTERS)), fontweight="bold"
            )
        marker: dict[str, Any] = {
            "color": "#333333",
            "marker": "o",
            "markersize": 4.5,
            "linestyle": "",
        }
        against = textwrap.fill(f"distinguishable from {baseline}", 60)
        signs = {
            against: marker,
            "not distinguishable": {**marker, "markerfacecolor": "white"},
        }
        style.add_legend(figure, grid[0, 0], signs, columns=2)
    return figure


def _draw_difference(
    axes: Axes,
    row: int,
    difference: Difference | None,
    look: tuple[str, str],
    level: float,
) -> None:
    value, low, high, p = difference or (math.nan, None, None, None)
    if not math.isfinite(value):
        return
    colour, marker = look
    if low is not None and high is not None:
        axes.plot(
            [low, high], [row, row], color=colour, linewidth=1.3, solid_capstyle="butt"
        )
    ground = colour if p is not None and p < level else "white"
    axes.plot(
        value,
        row,
        marker,
        color=colour,
        markerfacecolor=ground,
        markersize=4.5,
        clip_on=False,
    )


def slice_diagram(
    names: Sequence[str], gaps: FloatArray, differs: NDArray[np.bool_], *, column: str
) -> Figure:
    """Draw each slice's confidence minus accuracy with its interval, filled if it differs from the others.

    Args:
        names: S names of slices, from the top.
        gaps: (S, 3), the gap and the ends of its interval.
        differs: (S,), True if a slice differs from the other rows beyond chance.
        column: the column that defines the slices.
    """
    looks = {
        "differs": (differs, style.VERMILION, style.VERMILION),
        "within chance of the others": (~differs, style.BLUE, "white"),
    }
    with style.drawing(5.0, 1.0 + 0.2 * len(names)) as figure:
        axes = figure.subplots()
        axes.axvline(0, color=style.GREY, linewidth=0.8, linestyle=":")
        for word, (which, colour, ground) in looks.items():
            rows, (gap, low, high) = np.flatnonzero(which), gaps[which].T
            if len(rows):
                axes.hlines(rows, low, high, color=colour, linewidth=1.6)
                axes.scatter(
                    gap,
                    rows,
                    s=18,
                    color=ground,
                    edgecolor=colour,
                    zorder=3,
                    label=word,
                )
        _name_rows(axes, [style.shortened(name, 30) for name in names])
        axes.set_ylabel(column)
        axes.set_xlabel("confidence minus accuracy: above 0 is over-confident")
        style.add_legend(figure, axes, columns=2)
    return figure


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Label the rows with the names, from the top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    style.plain_axes(axes)
