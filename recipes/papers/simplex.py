"""Surfaces over the probabilities of three classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

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

    A corner is a certain prediction, the middle an even one. Light is large, with a scale of its own for each
    triangle; where a surface changes its sign, the line of 0 is thick, and hatched below 0.

    Args:
        probs: (N, 3), as of `simplex_grid`.
        surfaces: name -> (N,) finite numbers, such as `uncertainty_weights` with the first class as the label.
        class_names: of the three corners: top, left, right.
    """
    columns = min(3, len(surfaces))
    rows = -(-len(surfaces) // columns)
    figure = Figure(
        figsize=(0.1 + 2.2 * columns, 0.1 + 1.95 * rows), layout="constrained"
    )
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in panels:
        axes.set(xticks=[], yticks=[])
        axes.set_axis_off()
    for axes, (name, values) in zip(panels, surfaces.items(), strict=False):
        _draw_surface(
            figure, axes, np.asarray(probs) @ CORNERS, np.asarray(values, float)
        )
        for (across, up), corner in zip(CORNERS, class_names, strict=True):
            above = 0.03 if up else -0.03
            axes.text(
                across,
                up + above,
                corner,
                ha="center",
                va="bottom" if up else "top",
                fontsize=7.5,
            )
        axes.set_title(name, fontsize=9)
    if title:
        figure.suptitle(title, fontsize=10)
    return figure


def _draw_surface(
    figure: Figure, axes: Axes, places: np.ndarray, values: np.ndarray
) -> None:
    at: Any = (*places.T, values)
    levels = np.linspace(values.min(), values.max(), 9)
    if np.ptp(values) == 0:  # matplotlib would warn of equal levels
        levels = values[0] + np.array([-0.5, 0.5])
    surface = axes.tricontourf(*at, levels=levels, cmap="cividis")
    if len(levels) > 2:
        axes.tricontour(
            *at, levels=levels[1:-1], colors="white", linewidths=0.4, linestyles="-"
        )
    if values.min() < 0 < values.max():
        axes.tricontourf(*at, levels=[values.min(), 0], colors="none", hatches=["////"])
        axes.tricontour(*at, levels=[0], colors="black", linewidths=1.6)
    axes.plot(*np.vstack([CORNERS, CORNERS[:1]]).T, color="#333333", linewidth=0.8)
    axes.set(xlim=(-0.12, 1.12), ylim=(-0.13, HEIGHT + 0.11), aspect="equal")
    ticks = np.unique(levels[[0, len(levels) // 2, -1]])
    scale = figure.colorbar(surface, ax=axes, shrink=0.75, ticks=ticks)
    near_0 = 0.005 * np.ptp(levels)
    scale.ax.set_yticklabels(
        [f"{tick:.2g}" if abs(tick) > near_0 else "0" for tick in ticks]
    )
    scale.ax.tick_params(labelsize=7, length=2)
