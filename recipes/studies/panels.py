"""Small panels with shared axes for the studies of training dynamics: lines, spreads over rows, groups of rows."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike

from hf_calib.plots.style import (
    GREY,
    SKY,
    add_legend,
    drawing,
    line_looks,
    name_lines,
    plain_axes,
)

Lines = Mapping[str, tuple[ArrayLike, ArrayLike]]


def small_multiples(
    panels: Mapping[str, Lines],
    *,
    xlabel: str,
    ylabel: str,
    faint: Mapping[str, Lines] | None = None,
    level: float | None = None,
    logarithmic: bool = False,
    columns: int | None = None,
) -> Figure:
    """Draw lines in small panels with the same axes: AdaFocal's figures 1, 2 and 5, dual focal loss's figure 4a.

    Args:
        panels: panel -> line -> (x, y), each (T,); y may have NaN, where the line is broken. A name
            has the same colour, dash and marker in all panels.
        xlabel: below the panels.
        ylabel: beside them.
        faint: lines of the same names in some of the same panels, drawn thin behind them in the
            same colour: for the values before smoothing.
        level: y of a dotted line in each panel, such as the 0 of a calibrated bin.
        logarithmic: a y axis that is linear up to 1 and logarithmic beyond.
        columns: panels side by side; by default 4, or 5 where they are full.

    >>> lines = {"focal 3": ([1, 2, 3], [0.2, 0.1, 0.0]), "focal 5": ([1, 2, 3], [0.1, 0.0, -0.1])}
    >>> figure = small_multiples({"bin 0": lines, "bin 7": lines}, xlabel="epoch", ylabel="gap", level=0)
    >>> [axes.get_title() for axes in figure.axes]
    ['bin 0', 'bin 7']
    """
    with _grid(panels, xlabel, ylabel, columns) as (figure, cells, looks):
        for name, axes in cells.items():
            if level is not None:
                axes.axhline(level, color=GREY, linestyle=":", linewidth=1)
            behind = (faint or {}).get(name, {})
            for line, (x, y) in behind.items():
                thin = {"color": looks[line]["color"], "linewidth": 0.6, "alpha": 0.5}
                axes.plot(x, y, **thin)
            for line, (x, y) in panels[name].items():
                axes.plot(x, y, label=line, **looks[line])
            if logarithmic:
                axes.set_yscale("symlog", linthresh=1.0)
                axes.yaxis.set_major_formatter("{x:g}")
    return figure


def spread_by_epoch(panels: Mapping[str, Lines], *, ylabel: str) -> Figure:
    """Draw the median and the quartiles of rows as the training goes on: dual focal loss's figures 4b and 4c.

    `panels` has panel -> name -> (epochs (T,), values (T, R)), such as a `TracedSet`'s epochs and
    `row_max_logit`.
    """
    with _grid(panels, "epoch", ylabel) as (figure, cells, looks):
        for name, axes in cells.items():
            for line, (epochs, values) in panels[name].items():
                look = looks[line]
                low, middle, high = np.quantile(values, [0.25, 0.5, 0.75], axis=1)
                band = {"color": look["color"], "alpha": 0.15, "linewidth": 0}
                axes.fill_between(epochs, low, high, **band)
                axes.plot(epochs, middle, label=line, **look)
                edge = look | {"linewidth": 0.5, "marker": ""}
                axes.plot(epochs, low, **edge)
                axes.plot(epochs, high, **edge)
    return figure


def group_boxes(
    panels: Mapping[str, Mapping[str, ArrayLike]], *, xlabel: str, ylabel: str
) -> Figure:
    """Draw a box and the size of each group of rows: AdaFocal's figure 34, as quartiles and whiskers.

    `panels` has panel -> group -> values (R,); all panels have the same groups, of which some may
    be empty.
    """
    names = list(next(iter(panels.values())))
    for panel, groups in panels.items():
        if list(groups) != names:
            raise ValueError(
                f"expected {panel} to have the groups {names}, got {list(groups)}"
            )
    line = {"color": "#333333", "linewidth": 0.9}
    looks: dict[str, Any] = {
        "boxprops": {"facecolor": SKY, **line},
        "medianprops": {"color": "black", "linewidth": 1.6},
        "whiskerprops": line,
        "capprops": line,
        "widths": 0.6,
        "showfliers": False,
        "patch_artist": True,
    }
    with _grid(panels, xlabel, ylabel) as (figure, cells, _):
        for panel, axes in cells.items():
            values = [np.asarray(group, float) for group in panels[panel].values()]
            axes.boxplot(values, orientation="horizontal", **looks)
            axes.set_yticks(range(1, len(names) + 1), names)
            axes.set_ylim(len(names) + 0.6, 0.4)
            place: dict[str, Any] = {"transform": axes.get_yaxis_transform()}
            place |= {"fontsize": 6, "ha": "right", "va": "bottom"}
            for row, group in enumerate(values, start=1):
                axes.text(0.98, row + 0.42, f"n {len(group)}", **place)
    return figure


@contextmanager
def _grid(
    panels: Mapping[str, Mapping[str, Any]],
    xlabel: str,
    ylabel: str,
    columns: int | None = None,
) -> Iterator[tuple[Figure, dict[str, Axes], dict[str, dict[str, Any]]]]:
    """Panels with the same axes, and the look of each line; what is drawn in them is named in a legend in the end."""
    names = dict.fromkeys(name for lines in panels.values() for name in lines)
    looks = {}
    for name, look, marker in zip(names, line_looks(), cycle("os^Dv*P"), strict=False):
        look |= {"marker": marker, "markersize": 3, "linewidth": 1.2}
        looks[name] = look
    if columns is None:
        columns = 5 if len(panels) % 5 == 0 else min(4, len(panels))
    rows = math.ceil(len(panels) / columns)
    of_column = 8.4 / max(columns, 4)
    with drawing(max(4.2, 0.7 + of_column * columns), 0.9 + 1.5 * rows) as figure:
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        for axes in grid.flat[len(panels) :]:
            axes.set_axis_off()
        cells = dict(zip(panels, grid.flat, strict=False))
        yield figure, cells, looks
        for axes in grid[:, 0]:
            axes.set_ylabel(textwrap.fill(ylabel, 24), fontsize=7)
        for axes in grid.flat[: len(panels)][-columns:]:
            axes.tick_params(labelbottom=True)
            axes.set_xlabel(xlabel, fontsize=7)
        for name, axes in cells.items():
            axes.set_title("\n".join(name_lines(name, 30)), fontsize=8)
            plain_axes(axes)
            axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
            for line in axes.lines:
                line.set_markevery(max(1, len(line.get_xdata()) // 8))
        # Boxes have no names in a legend.
        if any(axes.get_legend_handles_labels()[1] for axes in figure.axes):
            add_legend(figure, *cells.values(), columns=min(5, len(names)))
