"""Figures of a study: several losses, each before and after post-hoc maps, with intervals over its seeds."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple

from hf_calib._errors import InputValueError, expected
from hf_calib.plots._common import BLUE, VERMILION, name_lines, plain_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D


# A mean with its interval, and a difference with its interval and p, where there are any.
Interval = tuple[float, float | None, float | None]
Difference = tuple[float, float | None, float | None, float | None]


class _Look(NamedTuple):
    colour: str
    marker: str


# In the order of the maps: told apart by the marker in grey.
_LOOKS = (
    _Look("#333333", "o"),
    _Look(BLUE, "s"),
    _Look(VERMILION, "^"),
    _Look("#009E73", "D"),
    _Look("#CC79A7", "v"),
)
_LETTERS = 24  # of a name in a line


def difference_diagram(
    metrics: Mapping[str, Mapping[str, Mapping[str, Difference]]],
    *,
    baseline: str,
    level: float = 0.05,
    title: str | None = None,
) -> Figure:
    """Draw paired differences to a baseline as a forest plot: a row of panels for each metric, a column for each map.

    A filled marker is a difference that is distinguishable from 0, a hollow one is not. Each panel has a scale
    of its own, as differences before a map are often many times those after it.

    Args:
        metrics: metric -> loss -> map -> (difference, low, high, p); None where there is no interval or p.
            Losses stand in the order in which they come, in all panels; one may lack a map, and a difference
            that is NaN is left out.
        baseline: what the differences are to, for the legend.
        level: p below it counts as distinguishable; corrected p where there are several comparisons.
        title: a line above the figure.

    Returns:
        A figure to show or to `save_figure`.

    Raises:
        ValueError: if there is no difference.

    >>> focal = {"none": (0.1, 0.08, 0.12, 0.001), "temperature": (-0.001, -0.01, 0.008, 0.8)}
    >>> figure = difference_diagram({"NLL": {"focal": focal}}, baseline="cross_entropy + temperature")
    >>> [axes.get_title() for axes in figure.axes]
    ['none', 'temperature']
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    names = _maps(metrics)
    losses = list(dict.fromkeys(loss for rows in metrics.values() for loss in rows))
    if not names:
        way_out = "compare at least one loss with the baseline"
        raise InputValueError(expected("metrics", "hold at least one difference", "none", way_out))
    height = 0.85 + _height(losses, 0.2)
    figure = Figure(figsize=(1.9 + 2.3 * len(names), 0.6 + height * len(metrics)), layout="constrained")
    grid = figure.subplots(len(metrics), len(names), sharey=True, squeeze=False)
    for panels, (metric, rows) in zip(grid, metrics.items(), strict=True):
        for axes, name, look in zip(panels, names, cycle(_LOOKS), strict=False):
            _draw_rows(axes, losses)
            axes.axvline(0, color="black", linewidth=1)
            found = [(i, rows[loss][name]) for i, loss in enumerate(losses) if name in rows.get(loss, {})]
            filled = [p is not None and p < level for _, (*_, p) in found]
            _draw_intervals(axes, [(i, values[:3]) for i, values in found], look, filled)
            axes.set_xlabel(f"difference in {metric}", fontsize=8, parse_math=False)
    for axes, name in zip(grid[0], names, strict=True):
        axes.set_title("\n".join(name_lines(name, _LETTERS)), fontsize=9, fontweight="bold", parse_math=False)
    against = textwrap.fill(f"distinguishable from {baseline}", 60)
    marker: dict[str, Any] = {"color": "#333333", "marker": "o", "markersize": 4.5, "linestyle": ""}
    filled_one = Line2D([], [], label=against, **marker)
    _add_legend(
        figure, [filled_one, Line2D([], [], markerfacecolor="white", label="not distinguishable", **marker)]
    )
    if title:
        figure.suptitle(title, fontsize=10, parse_math=False)
    return figure


def _maps(metrics: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """The names of the maps of all losses, in the order in which they come."""
    return list(dict.fromkeys(name for rows in metrics.values() for maps in rows.values() for name in maps))


def _height(names: Sequence[str], inches: float) -> float:
    """The inches of rows with these names, which may need more than one line."""
    return len(names) * max(inches, 0.14 * max(len(name_lines(name, _LETTERS)) for name in names) + 0.06)


def _draw_rows(axes: Axes, names: Sequence[str]) -> None:
    """A row for each name from the top down, every other one shaded."""
    axes.set_yticks(range(len(names)), ["\n".join(name_lines(name, _LETTERS)) for name in names])
    for label in axes.get_yticklabels():
        label.set_parse_math(False)
    for row in range(0, len(names), 2):
        axes.axhspan(row - 0.5, row + 0.5, color="#F1F1F1", linewidth=0, zorder=0)
    axes.set_ylim(len(names) - 0.5, -0.5)
    plain_axes(axes)
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.locator_params(axis="x", nbins=5)
    axes.spines["left"].set_visible(False)


def _draw_intervals(
    axes: Axes, points: Sequence[tuple[float, Interval]], look: _Look, filled: Sequence[bool]
) -> None:
    for (row, (value, low, high)), solid in zip(points, filled, strict=True):
        if not math.isfinite(value):
            continue
        if low is not None and high is not None:
            axes.plot([low, high], [row, row], color=look.colour, linewidth=1.3, solid_capstyle="butt")
        ground = look.colour if solid else "white"
        axes.plot(
            value, row, look.marker, color=look.colour, markerfacecolor=ground, markersize=4.5, clip_on=False
        )


def _add_legend(figure: Figure, handles: list[Line2D]) -> None:
    legend = figure.legend(
        handles=handles, loc="outside lower center", ncols=min(3, len(handles)), fontsize=7.5, frameon=False
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
