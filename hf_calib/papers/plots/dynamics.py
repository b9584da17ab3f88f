"""Figures of a training as it goes on: small multiples of lines, spreads over rows, and groups of rows."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from hf_calib._errors import InputTypeError, InputValueError, expected
from hf_calib.metrics.checks import FloatArray, as_floats
from hf_calib.plots._common import GREY, line_looks, name_lines, plain_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Lines = Mapping[str, tuple[ArrayLike, ArrayLike]]

_COLUMNS = 4  # panels side by side; 5 where they are full, such as of 15 bins
_MARKERS = "os^Dv*P"
_AT_MOST = 8  # markers on a line


def small_multiples(
    panels: Mapping[str, Lines],
    *,
    xlabel: str,
    ylabel: str,
    faint: Mapping[str, Lines] | None = None,
    level: float | None = None,
    logarithmic: bool = False,
    columns: int | None = None,
    title: str | None = None,
) -> Figure:
    """Draw lines in small panels with the same axes: a panel for each bin, or for each setting.

    A name has the same colour, dash and marker in all panels.

    Args:
        panels: panel -> line -> (x, y), each (T,); y may have NaN, where the line is broken.
        xlabel: below the panels.
        ylabel: beside them.
        faint: lines of the same names in some of the same panels, drawn thin behind them in the same colour: for the
            values before smoothing.
        level: y of a dotted line in each panel, such as the 0 of a calibrated bin.
        logarithmic: a y axis that is linear up to 1 and logarithmic beyond.
        columns: panels side by side; by default 4, or 5 where they are full.
        title: a line above the figure.

    Returns:
        A figure to show or to `save_figure`.

    Raises:
        ValueError: if there is no panel, x and y do not fit, or a faint line is none of the panels'.

    References:
        Ghosh et al. 2022, "AdaFocal", figures 1, 2 and 5; Tao et al. 2023, "Dual focal loss", figure 4a.

    >>> lines = {"focal 3": ([1, 2, 3], [0.2, 0.1, 0.0]), "focal 5": ([1, 2, 3], [0.1, 0.0, -0.1])}
    >>> figure = small_multiples({"bin 0": lines, "bin 7": lines}, xlabel="epoch", ylabel="gap", level=0)
    >>> [axes.get_title() for axes in figure.axes]
    ['bin 0', 'bin 7']
    """
    for name, lines in (faint or {}).items():
        if not set(lines) <= set(panels.get(name, {})):
            got, way_out = f"{list(lines)} in {name!r}", "name panels and lines as in panels"
            raise InputValueError(expected("faint", "have lines of the panels", got, way_out))
    with _grid(panels, xlabel, ylabel, title, columns) as (figure, cells, looks):
        for name, axes in cells.items():
            if level is not None:
                axes.axhline(level, color=GREY, linestyle=":", linewidth=1)
            for line, (x, y) in (faint or {}).get(name, {}).items():
                axes.plot(*_checked(line, x, y), color=looks[line]["color"], linewidth=0.6, alpha=0.5)
            for line, (x, y) in panels[name].items():
                axes.plot(*_checked(line, x, y), label=line, **looks[line])
            if logarithmic:
                axes.set_yscale("symlog", linthresh=1.0)
    return figure


def spread_by_epoch(
    panels: Mapping[str, Lines], *, xlabel: str = "epoch", ylabel: str, title: str | None = None
) -> Figure:
    """Draw how values of rows spread as the training goes on: the median, and a band between the quartiles.

    Args:
        panels: panel -> name -> (epochs (T,), values (T, R)), such as a `TracedSet`'s epochs and `row_max_logit`.
        xlabel: below the panels.
        ylabel: beside them.
        title: a line above the figure.

    Returns:
        A figure to show or to `save_figure`.

    Raises:
        ValueError: if there is no panel, or epochs and values do not fit.

    References:
        Tao et al. 2023, "Dual focal loss", figures 4b and 4c, which show the end of the training.

    >>> logits = {"focal": ([1, 2], [[0.5, 1.0, 1.5], [1.0, 2.0, 3.0]])}
    >>> figure = spread_by_epoch({"evaluation": logits}, ylabel="maximum logit")
    >>> figure.axes[0].lines[0].get_ydata().tolist()
    [1.0, 2.0]
    """
    with _grid(panels, xlabel, ylabel, title) as (figure, cells, looks):
        for name, axes in cells.items():
            for line, (epochs, values) in panels[name].items():
                at, rows = _checked(line, epochs, values, of_rows=True)
                low, middle, high = np.quantile(rows, [0.25, 0.5, 0.75], axis=1)
                axes.fill_between(at, low, high, color=looks[line]["color"], alpha=0.15, linewidth=0)
                axes.plot(at, middle, label=line, **looks[line])
                for edge in (low, high):
                    axes.plot(at, edge, **{**looks[line], "linewidth": 0.5, "marker": ""})
    return figure


def group_boxes(
    panels: Mapping[str, Mapping[str, ArrayLike]], *, xlabel: str, ylabel: str, title: str | None = None
) -> Figure:
    """Draw a box for each group of rows: quartiles, whiskers to 1.5 times their distance, no outliers; and its size.

    Args:
        panels: panel -> group -> values (R,); all panels have the same groups. A group may be empty.
        xlabel: of the values.
        ylabel: of the groups.
        title: a line above the figure.

    Returns:
        A figure to show or to `save_figure`.

    Raises:
        ValueError: if there is no panel, groups differ, or values are not finite numbers in one row.

    References:
        Ghosh et al. 2022, "AdaFocal", figure 34 (maximum logits of rows by when they were learned), as boxes.

    >>> figure = group_boxes({"focal": {"to 2": [5.0, 6.0], "never": []}}, xlabel="logit", ylabel="learned")
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['n 2', 'n 0']
    """
    with _grid(panels, xlabel, ylabel, title) as (figure, cells, _):
        names = list(next(iter(panels.values())))
        for panel, axes in cells.items():
            if list(panels[panel]) != names:
                way_out = "use the same boundaries for all"
                raise InputValueError(
                    expected(panel, f"have the groups {names}", list(panels[panel]), way_out)
                )
            values = [_checked_group(f"{panel}, {name}", group) for name, group in panels[panel].items()]
            line = {"color": "#333333", "linewidth": 0.9}
            axes.boxplot(
                values,
                orientation="horizontal",
                showfliers=False,
                widths=0.6,
                patch_artist=True,
                boxprops={"facecolor": "#A6D8F5", **line},
                medianprops={"color": "black", "linewidth": 1.6},
                whiskerprops=line,
                capprops=line,
            )
            axes.set_yticks(range(1, len(names) + 1), names)
            axes.set_ylim(len(names) + 0.6, 0.4)
            for k, group in enumerate(values):
                axes.text(
                    0.98,
                    k + 1.42,
                    f"n {len(group)}",
                    transform=axes.get_yaxis_transform(),
                    fontsize=6,
                    ha="right",
                    va="bottom",
                )
    return figure


@contextmanager
def _grid(
    panels: Mapping[str, Mapping[str, Any]],
    xlabel: str,
    ylabel: str,
    title: str | None,
    columns: int | None = None,
) -> Iterator[tuple[Figure, dict[str, Axes], dict[str, dict[str, Any]]]]:
    """Panels with the same axes, and the look of each line; what is drawn in them is named in a legend in the end."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    if not panels or not all(panels.values()):
        way_out = "pass {panel: {name: values}}"
        raise InputValueError(expected("panels", "have at least one line each", "none", way_out))
    names = dict.fromkeys(name for lines in panels.values() for name in lines)
    looks = {
        name: {**look, "marker": marker, "markersize": 3, "linewidth": 1.2}
        for name, look, marker in zip(names, line_looks(), cycle(_MARKERS), strict=False)
    }
    columns = columns or (5 if len(panels) % 5 == 0 else min(_COLUMNS, len(panels)))
    rows = -(-len(panels) // columns)
    size = (max(4.2, 0.7 + 8.4 / max(columns, 4) * columns), 0.9 + 1.5 * rows)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    cells = dict(zip(panels, grid.flat, strict=False))
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    yield figure, cells, looks
    handles: dict[str, Any] = {}
    for k, (name, axes) in enumerate(cells.items()):
        axes.set_title("\n".join(name_lines(name, 30)), fontsize=8, parse_math=False)
        plain_axes(axes)
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        if k + columns >= len(panels):
            axes.tick_params(labelbottom=True)
            axes.set_xlabel(xlabel, fontsize=7, parse_math=False)
        if k % columns == 0:
            axes.set_ylabel(textwrap.fill(ylabel, 24), fontsize=7, parse_math=False)
        for line in axes.lines:
            line.set_markevery(max(1, len(line.get_xdata()) // _AT_MOST))
        found, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, found, strict=True))
    if handles:
        legend = figure.legend(
            list(handles.values()),
            list(handles),
            loc="outside lower center",
            ncols=min(5, len(handles)),
            fontsize=7,
            frameon=False,
        )
        for text in legend.get_texts():
            text.set_parse_math(False)
    if title:
        figure.suptitle(title, fontsize=10, parse_math=False)


def _checked(
    name: str, x: ArrayLike, y: ArrayLike, *, of_rows: bool = False
) -> tuple[FloatArray, FloatArray]:
    try:  # None, as JSON has it, is NaN
        at, values = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputTypeError(expected(f"line {name!r}", "hold numbers", str(error), "pass floats")) from error
    if at.ndim != 1 or values.ndim != 1 + of_rows or len(at) != len(values) or not values.size:
        shapes = "(T,) and (T, R)" if of_rows else "(T,) twice"
        way_out = "pass at least one entry per evaluation"
        raise InputValueError(
            expected(f"line {name!r}", f"be {shapes}", f"{at.shape} and {values.shape}", way_out)
        )
    return at, values


def _checked_group(name: str, values: ArrayLike) -> FloatArray:
    group = as_floats(name, values)
    if group.ndim != 1 or not np.isfinite(group).all():
        got = f"shape {group.shape}" if group.ndim != 1 else "NaN or infinite values"
        raise InputValueError(expected(name, "be finite numbers (R,)", got, "pass one number a row"))
    return group
