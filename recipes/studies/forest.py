"""Forest plots of paired differences to a baseline."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from itertools import cycle

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from paired import LEVEL

from hf_calib.plots import style

# A difference with its interval and p, if there are any.
Difference = tuple[float, float | None, float | None, float | None]

_DARK = "#333333"
# In the order of the calibrators; the markers differ in grey, too.
_LOOKS = (
    (_DARK, "o"),
    (style.BLUE, "s"),
    (style.VERMILION, "^"),
    ("#009E73", "D"),
    ("#CC79A7", "v"),
)
# The most characters of a name in a line.
_LETTERS = 24


def difference_diagram(
    metrics: Mapping[str, Mapping[str, Mapping[str, Difference]]], *, baseline: str
) -> Figure:
    """Draw paired differences to a baseline as a forest plot, with a row per metric and a column per calibrator.

    A filled marker is a difference that is distinguishable from 0; a hollow marker is not. Each
    panel has its own scale, because differences before calibration are often many times as large as
    those after it.

    Args:
        metrics: metric -> loss -> calibrator -> (difference, low, high, p); None if there is no
            interval or p. All panels have the losses in the given order. A calibrator may be
            missing, and a difference of NaN is left out. Pass corrected p for several comparisons.
        baseline: name of the baseline for the legend.

    Raises:
        ValueError: if there is no difference.

    >>> focal = {"none": (0.1, 0.08, 0.12, 0.001), "temperature": (-0.001, -0.01, 0.008, 0.8)}
    >>> figure = difference_diagram({"NLL": {"focal": focal}}, baseline="cross_entropy + temperature")
    >>> [axes.get_title() for axes in figure.axes]
    ['none', 'temperature']
    """
    losses: dict[str, None] = {}
    maps: dict[str, None] = {}
    for found in metrics.values():
        losses |= dict.fromkeys(found)
        for row in found.values():
            maps |= dict.fromkeys(row)
    if not maps:
        raise ValueError("expected metrics to hold at least one difference, got none")
    names = [_in_lines(loss) for loss in losses]
    most_lines = 1 + max(name.count("\n") for name in names)
    height = len(names) * max(0.2, 0.14 * most_lines + 0.06)
    size = (1.9 + 2.3 * len(maps), 0.6 + (0.85 + height) * len(metrics))
    with style.drawing(*size) as figure:
        grid = figure.subplots(len(metrics), len(maps), sharey=True, squeeze=False)
        for panels, (metric, found) in zip(grid, metrics.items(), strict=True):
            for axes, name, look in zip(panels, maps, cycle(_LOOKS), strict=False):
                _prepare_panel(axes, names)
                axes.set_xlabel(f"difference in {metric}")
                for row_number, loss in enumerate(losses):
                    difference = found.get(loss, {}).get(name)
                    if difference is not None:
                        _draw_difference(axes, row_number, difference, look)
        for axes, name in zip(grid[0], maps, strict=True):
            axes.set_title(_in_lines(name), fontweight="bold")
        filled = {"color": _DARK, "marker": "o", "markersize": 4.5, "linestyle": ""}
        hollow = filled | {"markerfacecolor": "white"}
        against = textwrap.fill(f"distinguishable from {baseline}", 60)
        signs = {against: filled, "not distinguishable": hollow}
        handles = [Line2D([], [], label=name, **look) for name, look in signs.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=2)
    return figure


def _in_lines(name: str) -> str:
    return "\n".join(style.name_lines(name, _LETTERS))


def _prepare_panel(axes: Axes, names: Sequence[str]) -> None:
    """Name the rows of a panel, shade every other one, and mark 0."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    style.plain_axes(axes)
    for row in range(0, len(names), 2):
        axes.axhspan(row - 0.5, row + 0.5, color="#F1F1F1", linewidth=0, zorder=0)
    axes.axvline(0, color="black", linewidth=1)
    axes.locator_params(axis="x", nbins=5)
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.spines["left"].set_visible(False)


def _draw_difference(
    axes: Axes, row: int, difference: Difference, look: tuple[str, str]
) -> None:
    value, low, high, p = difference
    if not math.isfinite(value):
        return
    colour, marker = look
    if low is not None and high is not None:
        ends = [low, high]
        axes.plot(ends, [row, row], color=colour, linewidth=1.3, solid_capstyle="butt")
    is_distinguishable = p is not None and p < LEVEL
    inside = colour if is_distinguishable else "white"
    size = {"markersize": 4.5, "clip_on": False}
    axes.plot(value, row, marker, color=colour, markerfacecolor=inside, **size)
