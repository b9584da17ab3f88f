"""Surfaces over the probabilities of three classes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from hf_calib.plots.style import drawing

HEIGHT = np.sqrt(3) / 2
# Of the triangle's corners: the first class on top, the other two left and right.
CORNERS = np.array([[0.5, HEIGHT], [0.0, 0.0], [1.0, 0.0]])


def simplex_surfaces(
    probs: ArrayLike,
    surfaces: Mapping[str, ArrayLike],
    *,
    class_names: Sequence[str] = ("class 0", "class 1", "class 2"),
    title: str | None = None,
) -> Figure:
    """Draw numbers that depend on the probabilities of three classes, a triangle for each: BSCE-GRA's figure 2.

    A corner is a certain prediction, the middle an even one. Light is large, with a scale of its
    own for each triangle; where a surface changes its sign, the line of 0 is thick, and hatched
    below 0.

    Args:
        probs: (N, 3), as of `simplex_grid`.
        surfaces: name -> (N,) finite numbers, such as `uncertainty_weights` with the first class as
            the label.
        class_names: of the three corners: top, left, right.
    """
    places = np.asarray(probs) @ CORNERS
    columns = min(3, len(surfaces))
    rows = math.ceil(len(surfaces) / columns)
    with drawing(0.1 + 2.2 * columns, 0.1 + 1.95 * rows, title) as figure:
        panels = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes in panels:
            axes.set_axis_off()
        for axes, (name, values) in zip(panels, surfaces.items(), strict=False):
            _draw_surface(figure, axes, places, np.asarray(values, float))
            _name_corners(axes, class_names)
            axes.set_title(name)
    return figure


def _name_corners(axes: Axes, class_names: Sequence[str]) -> None:
    top, left, right = class_names
    look: Any = {"ha": "center", "fontsize": 7.5}
    axes.text(0.5, HEIGHT + 0.03, top, va="bottom", **look)
    axes.text(0.0, -0.03, left, va="top", **look)
    axes.text(1.0, -0.03, right, va="top", **look)


def _draw_surface(
    figure: Figure, axes: Axes, places: np.ndarray, values: np.ndarray
) -> None:
    at: Any = (*places.T, values)
    low = values.min()
    high = values.max()
    levels = np.linspace(low, high, 9)
    if low == high:
        # Matplotlib would warn of equal levels.
        levels = np.array([low - 0.5, low + 0.5])
    surface = axes.tricontourf(*at, levels=levels, cmap="cividis")
    if low < high:
        thin: Any = {"colors": "white", "linewidths": 0.4, "linestyles": "-"}
        axes.tricontour(*at, levels=levels[1:-1], **thin)
    if low < 0 < high:
        axes.tricontourf(*at, levels=[low, 0], colors="none", hatches=["////"])
        axes.tricontour(*at, levels=[0], colors="black", linewidths=1.6)
    outline = CORNERS[[0, 1, 2, 0]]
    axes.plot(*outline.T, color="#333333", linewidth=0.8)
    axes.set(xlim=(-0.12, 1.12), ylim=(-0.13, HEIGHT + 0.11), aspect="equal")
    ticks = np.unique(levels[[0, len(levels) // 2, -1]])
    scale = figure.colorbar(surface, ax=axes, shrink=0.75, ticks=ticks)
    near_0 = 0.005 * np.ptp(levels)
    numbers = [0.0 if abs(tick) <= near_0 else tick for tick in ticks]
    scale.ax.set_yticklabels([f"{number:.2g}" for number in numbers])
    scale.ax.tick_params(labelsize=7, length=2)
