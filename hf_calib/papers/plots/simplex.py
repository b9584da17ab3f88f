"""Surfaces over the probabilities of three classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from hf_calib._errors import InputValueError, expected
from hf_calib.metrics.checks import FloatArray, as_floats, check_probs
from hf_calib.plots._common import check_class_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 3
_LEVELS = 8
_HEIGHT = np.sqrt(3) / 2
# Of the corners: the first class on top, the other two left and right.
_CORNERS = np.array([[0.5, _HEIGHT], [0.0, 0.0], [1.0, 0.0]])


def simplex_surfaces(
    probs: ArrayLike,
    surfaces: Mapping[str, ArrayLike],
    *,
    class_names: Sequence[str] | None = None,
    title: str | None = None,
) -> Figure:
    """Draw numbers that depend on the probabilities of three classes, a triangle for each.

    For what a loss makes of a prediction as a whole, such as `hf_calib.papers.uncertainty_weights` with the first
    class as the label: a corner is a certain prediction, the middle an even one. Light is large, with a scale of
    its own for each triangle; where a surface changes its sign, the line of 0 is thick, and hatched below 0.

    Args:
        probs: (N, 3) float, rows that sum to 1, not all on a line; `hf_calib.papers.simplex_grid` makes them.
        surfaces: name -> (N,) finite numbers.
        class_names: of the three corners: top, left, right. Their numbers by default.
        title: a line above the whole figure.

    Returns:
        A figure to show or to `save_figure`.

    Raises:
        ValueError: if there is no surface, or the arrays do not fit.

    References:
        Lin et al. 2025, "Uncertainty weighted gradients for model calibration", Fig. 2, there with four classes.

    >>> grid = [[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.25, 0.25, 0.5]]
    >>> len(simplex_surfaces(grid, {"focal": [0.5, 0.75, 0.75]}).axes)  # with its scale
    2
    """
    from matplotlib.figure import Figure

    points, checked = _check(probs, surfaces)
    names = check_class_names(class_names, 3)
    columns = min(_COLUMNS, len(checked))
    rows = -(-len(checked) // columns)
    figure = Figure(figsize=(0.1 + 2.2 * columns, 0.1 + 1.95 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in panels:
        axes.set(xticks=[], yticks=[])
        axes.set_axis_off()
    for axes, (name, values) in zip(panels, checked.items(), strict=False):
        _draw(figure, axes, points @ _CORNERS, values)
        _name_corners(axes, names)
        axes.set_title(name, fontsize=9, parse_math=False)
    if title:
        figure.suptitle(title, fontsize=10, parse_math=False)
    return figure


def _check(probs: ArrayLike, surfaces: Mapping[str, ArrayLike]) -> tuple[FloatArray, dict[str, FloatArray]]:
    points = check_probs(probs).astype(np.float64)
    if points.shape[1] != 3 or np.linalg.matrix_rank(points - points.mean(axis=0), tol=1e-9) < 2:
        way_out = "pass hf_calib.papers.simplex_grid()"
        got = f"shape {points.shape}" if points.shape[1] != 3 else "points on a line"
        raise InputValueError(expected("probs", "be a grid (N, 3) over three classes", got, way_out))
    if not surfaces:
        way_out = "pass {name: values}"
        raise InputValueError(expected("a figure", "have at least one surface", "none", way_out))
    checked = {name: as_floats(f"surface {name!r}", values) for name, values in surfaces.items()}
    for name, values in checked.items():
        if values.shape != (len(points),) or not np.isfinite(values).all():
            got = f"shape {values.shape}" if values.shape != (len(points),) else "NaN or infinite values"
            way_out = "leave out the points where it is not defined"
            requirement = f"be {len(points)} finite numbers"
            raise InputValueError(expected(f"surface {name!r}", requirement, got, way_out))
    return points, checked


def _draw(figure: Figure, axes: Axes, places: FloatArray, values: FloatArray) -> None:
    across, up = places.T
    if np.ptp(values) == 0:  # matplotlib would warn of equal levels
        levels = values[0] + np.array([-0.5, 0.5])
    else:
        levels = np.linspace(values.min(), values.max(), _LEVELS + 1)
    surface = axes.tricontourf(across, up, values, levels=levels, cmap="cividis")
    if len(levels) > 2:
        axes.tricontour(
            across, up, values, levels=levels[1:-1], colors="white", linewidths=0.4, linestyles="-"
        )
    if values.min() < 0 < values.max():
        axes.tricontourf(across, up, values, levels=[values.min(), 0], colors="none", hatches=["////"])
        axes.tricontour(across, up, values, levels=[0], colors="black", linewidths=1.6)
    axes.plot(*np.vstack([_CORNERS, _CORNERS[:1]]).T, color="#333333", linewidth=0.8)
    axes.set(xlim=(-0.12, 1.12), ylim=(-0.13, _HEIGHT + 0.11), aspect="equal")
    ticks = np.unique(levels[[0, len(levels) // 2, -1]])
    scale = figure.colorbar(surface, ax=axes, shrink=0.75, ticks=ticks)
    near_0 = 0.005 * np.ptp(levels)
    scale.ax.set_yticklabels([f"{tick:.2g}" if abs(tick) > near_0 else "0" for tick in ticks])
    scale.ax.tick_params(labelsize=7, length=2)


def _name_corners(axes: Axes, names: Sequence[str]) -> None:
    for (across, up), name, below in zip(_CORNERS, names, (False, True, True), strict=True):
        axes.text(
            across,
            up + (-0.03 if below else 0.03),
            name,
            ha="center",
            va="top" if below else "bottom",
            fontsize=7.5,
            parse_math=False,
        )
