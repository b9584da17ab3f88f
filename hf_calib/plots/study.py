"""Figures of a study: several losses, each before and after post-hoc maps, with intervals over its seeds."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple

from numpy.typing import ArrayLike

from hf_calib._errors import InputValueError, expected
from hf_calib.metrics.checks import check_n_bins
from hf_calib.metrics.sums import TopLabel, bin_sums, top_label_error
from hf_calib.plots._common import (
    BLUE,
    VERMILION,
    Panel,
    check_panels,
    draw_diagonal,
    name_lines,
    no_panel,
    plain_axes,
    unit_ticks,
    write_name,
)

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
_SHADE = "#F2F2F2"
_STEADY = 0.01  # the share of a bin that the line goes through; with fewer, accuracies jump
_COLUMNS = 5  # small panels in a row


def rank_diagram(
    metrics: Mapping[str, Mapping[str, Mapping[str, Interval]]], *, title: str | None = None
) -> Figure:
    """Draw the mean rank of each loss with each post-hoc map, a panel for each metric, the best loss at the top.

    Ranks say which is ahead and how reliably, in no unit; how far ahead, `difference_diagram` shows. Intervals
    that overlap do not mean that two are equal.

    Args:
        metrics: metric -> loss -> map -> (mean rank, low, high), where 1 is the best; low and high may be None.
            A loss may lack a map; a rank that is NaN is left out.
        title: a line above the figure.

    Returns:
        A figure to show or to `save_figure`.

    Raises:
        ValueError: if there is no metric, or a metric without a rank.

    >>> maps = {"none": (2.5, 2.0, 3.0), "temperature": (1.0, 1.0, 1.0)}
    >>> figure = rank_diagram({"NLL": {"focal": {"none": (2.5, None, None)}, "cross_entropy": maps}})
    >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
    ['cross_entropy', 'focal']
    """
    from matplotlib.figure import Figure

    names = _maps(metrics)
    orders = {metric: _best_first(losses) for metric, losses in metrics.items()}
    if not orders or not all(orders.values()):
        way_out = "finish the trainings of at least one loss"
        raise InputValueError(expected("metrics", "hold a mean rank each", "none", way_out))
    height = max(_height(order, 0.12 + 0.11 * len(names)) for order in orders.values())
    figure = Figure(figsize=(0.4 + 4 * len(orders), 1.2 + height), layout="constrained")
    for axes, (metric, order) in zip(
        figure.subplots(1, len(orders), squeeze=False)[0], orders.items(), strict=True
    ):
        _draw_rows(axes, order)
        for k, (name, look) in enumerate(zip(names, cycle(_LOOKS), strict=False)):
            shift = 0.72 * ((k + 0.5) / len(names) - 0.5)
            found = [
                (i + shift, metrics[metric][loss][name])
                for i, loss in enumerate(order)
                if name in metrics[metric][loss]
            ]
            _draw_intervals(axes, found, look, filled=[True] * len(found))
        low, high = axes.get_xlim()
        axes.set_xlim(1 - 0.02 * (high - low), max(high, 2))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("mean rank (1 is the best)", fontsize=8)
        axes.set_title(metric, fontsize=9, fontweight="bold", parse_math=False)
    _add_legend(figure, _map_handles(names))
    if title:
        figure.suptitle(title, fontsize=10, parse_math=False)
    return figure


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


def reliability_panels(
    models: Mapping[str, Mapping[str, tuple[ArrayLike, ArrayLike]]],
    *,
    n_bins: int = 15,
    title: str | None = None,
) -> Figure:
    """Draw small reliability diagrams, one for each model, with its states (before and after a map) in one panel.

    For more models than `reliability_grid` has room for. A point is a bin, at its mean confidence and accuracy,
    the larger the more examples it holds: below the diagonal the model is over-confident, above it
    under-confident. The line leaves out bins with less than 1% of the examples.

    Args:
        models: model -> state -> (confidences, correct), each (N,), as for `reliability_diagram`.
        n_bins: M, the number of equal-width bins (lower, upper].
        title: a line above the whole figure.

    Returns:
        A figure to show or to `save_figure`.

    Raises:
        ValueError: if there is no model or no state, or arrays do not fit.

    >>> states = {"before": ([0.9, 0.8, 0.7], [1, 0, 1]), "after": ([0.7, 0.6, 0.6], [1, 0, 1])}
    >>> figure = reliability_panels({"cross_entropy": states, "focal": states})
    >>> len(figure.axes)
    2
    """
    from matplotlib.figure import Figure

    if not models:
        raise InputValueError(no_panel())
    n_bins = check_n_bins(n_bins)
    checked = {model: check_panels(states) for model, states in models.items()}
    names = list(dict.fromkeys(name for states in checked.values() for name in states))
    columns = min(_COLUMNS, len(models))
    rows = -(-len(models) // columns)
    lines = max(len(name_lines(model, _LETTERS)) for model in models)
    size = (max(3.4, 0.5 + 1.85 * columns), 0.6 + (2 + 0.16 * lines) * rows)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes, (model, states) in zip(grid.flat, checked.items(), strict=False):
        draw_diagonal(axes)
        errors = []
        for name, look in zip(names, cycle(_LOOKS), strict=False):
            if name in states:
                _draw_bins(axes, states[name], n_bins, look, hollow=name == names[0])
                errors.append(top_label_error(TopLabel(*states[name]), n_bins=n_bins))
        axes.set_title("ECE " + " → ".join(f"{error:.3f}" for error in errors), fontsize=7, loc="left", pad=4)
        write_name(axes, model, width=_LETTERS)
        unit_ticks(axes)
        plain_axes(axes)
    for axes in grid.flat[len(models) :]:
        axes.set_axis_off()
    # The lowest panel of a column names the axis, also where the last row is shorter.
    for k, axes in enumerate(grid.flat[: len(models)]):
        if k % columns == 0:
            axes.set_ylabel("accuracy", fontsize=8)
        if k + columns >= len(models):
            axes.set_xlabel("confidence", fontsize=8)
            axes.tick_params(labelbottom=True)
    _add_legend(figure, _map_handles(names, hollow_first=True))
    if title:
        figure.suptitle(title, fontsize=10, parse_math=False)
    return figure


def _maps(metrics: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """The names of the maps of all losses, in the order in which they come."""
    return list(dict.fromkeys(name for rows in metrics.values() for maps in rows.values() for name in maps))


def _best_first(losses: Mapping[str, Mapping[str, Interval]]) -> list[str]:
    """The losses that have a rank, by the best rank that any map gives them."""
    best = {
        loss: min((rank for rank, *_ in maps.values() if math.isfinite(rank)), default=math.inf)
        for loss, maps in losses.items()
    }
    return sorted((loss for loss, rank in best.items() if math.isfinite(rank)), key=best.__getitem__)


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


def _draw_bins(axes: Axes, panel: Panel, n_bins: int, look: _Look, *, hollow: bool) -> None:
    bins = bin_sums(TopLabel(*panel), n_bins)
    shown = bins.counts > 0
    confidence, accuracy = (each[shown] for each in bins.means())
    share = bins.counts[shown] / bins.counts.sum()
    steady = share >= _STEADY
    line = "--" if hollow else "-"
    axes.plot(confidence[steady], accuracy[steady], color=look.colour, linewidth=1, linestyle=line)
    axes.scatter(
        confidence,
        accuracy,
        3 + 60 * share,
        facecolor="white" if hollow else look.colour,
        edgecolor=look.colour,
        marker=look.marker,
        linewidth=0.9,
        clip_on=False,
        zorder=3,
    )


def _map_handles(names: Sequence[str], *, hollow_first: bool = False) -> list[Line2D]:
    from matplotlib.lines import Line2D

    return [
        Line2D(
            [],
            [],
            color=look.colour,
            marker=look.marker,
            markersize=4.5,
            markerfacecolor="white" if hollow_first and k == 0 else look.colour,
            linestyle="--" if hollow_first and k == 0 else "-",
            linewidth=1.3,
            label=textwrap.shorten(name, 60, placeholder="…"),
        )
        for k, (name, look) in enumerate(zip(names, cycle(_LOOKS), strict=False))
    ]


def _add_legend(figure: Figure, handles: list[Line2D]) -> None:
    legend = figure.legend(
        handles=handles, loc="outside lower center", ncols=min(3, len(handles)), fontsize=7.5, frameon=False
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
