"""Reliability diagrams in bins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from hf_calib._errors import InputValueError, expected
from hf_calib.metrics.checks import FloatArray, check_n_bins
from hf_calib.metrics.sums import (
    BinSums,
    TopLabel,
    bin_sums,
    binned_error,
    uniform_edges,
)
from hf_calib.plots._common import (
    BLUE,
    MEANS,
    PEACH,
    SKY,
    VERMILION,
    add_legend,
    add_title,
    check_panel,
    draw_diagonal,
    name_lines,
    new_figure,
    no_panel,
    plain_axes,
    unit_ticks,
    write_name,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
_PANEL_INCHES = (2.5, 3.1)
_COUNTS_BAND = 0.42  # the part of a histogram's height that belongs to its numbers


def reliability_diagram(
    panels: Mapping[str, tuple[ArrayLike, ArrayLike]], *, n_bins: int = 15, title: str | None = None
) -> Figure:
    """Draw accuracy against confidence, one panel for each name, side by side.

    For one model, or a few to compare, for example before and after temperature. For several models, each
    before and after, use `reliability_grid`.

    In each panel a bar is the accuracy of a confidence bin, and its hatched part the distance from there to
    the bin's mean confidence, in one colour where the model is over-confident and in another where it is
    under-confident. Below is the share of examples in each bin, with their number, and two lines, the mean
    confidence and the overall accuracy: the model is over-confident on the whole if the mean confidence is to
    the right.

    Args:
        panels: name -> (confidences, correct), each (N,): of the top label in [0, 1], and 1 or 0.
        n_bins: M, the number of equal-width bins (lower, upper].

    References:
        Guo et al. 2017, Figure 1.

    >>> figure = reliability_diagram({"before": ([0.9, 0.8, 0.7], [1, 0, 1])})
    >>> len(figure.axes)
    2
    """
    return reliability_grid({"": panels}, n_bins=n_bins, title=title)


def reliability_grid(
    rows: Mapping[str, Mapping[str, tuple[ArrayLike, ArrayLike]]],
    *,
    n_bins: int = 15,
    title: str | None = None,
) -> Figure:
    """Draw reliability diagrams in rows and columns, for example before and after temperature x losses.

    The panels are those of `reliability_diagram`.

    Args:
        rows: row name -> column name -> (confidences, correct); every row has the same columns.
        n_bins: M, the number of equal-width bins (lower, upper].

    >>> losses = {"cross_entropy": ([0.9, 0.8], [1, 0]), "focal": ([0.7, 0.6], [1, 1])}
    >>> figure = reliability_grid({"before temperature": losses, "after temperature": losses})
    >>> len(figure.axes)
    8
    """
    n_bins = check_n_bins(n_bins)
    columns = _columns(rows)
    sums = {
        row: {column: _sums_of(f"{row} {column}".strip(), *rows[row][column], n_bins) for column in columns}
        for row in rows
    }
    return reliability_of_sums(sums, title=title)


def reliability_of_sums(
    rows: Mapping[str, Mapping[str, BinSums]],
    *,
    n_rows: Mapping[str, int] | None = None,
    title: str | None = None,
) -> Figure:
    """The same from the sums (M,) of the equal-width bins.

    Args:
        rows: row name -> column name -> sums.
        n_rows: column name -> rows, where the counts of the bins are sums of weights.
    """
    columns = _columns(rows)
    width, height = _PANEL_INCHES
    figure = new_figure(0.7 + width * len(columns), 0.6 + height * len(rows))
    axes = figure.subplots(
        2 * len(rows), len(columns), sharex=True, squeeze=False, height_ratios=[2.6, 1] * len(rows)
    )
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            upper, lower = axes[2 * i, j], axes[2 * i + 1, j]
            _draw_panel(upper, lower, rows[row][column], None if n_rows is None else n_rows[column])
            _label_panel(upper, lower, first=j == 0, last_row=i == len(rows) - 1)
            if i == 0:
                write_name(upper, column)
        _write_row(axes[2 * i, 0], row)
    add_legend(figure, axes[0, 0], *MEANS, columns={1: 2, 2: 3}.get(len(columns), 6))
    add_title(figure, title)
    return figure


def _columns(rows: Mapping[str, Mapping[str, object]]) -> list[str]:
    columns = list(next(iter(rows.values()), {}))
    if not columns:
        raise InputValueError(no_panel())
    for row, panels in rows.items():
        if set(panels) != set(columns):
            got = f"{sorted(panels)} in {row!r} and {sorted(columns)} above"
            raise InputValueError(
                expected("every row", "have the same columns", got, "draw one diagram per row")
            )
    return columns


def _sums_of(name: str, confidences: ArrayLike, correct: ArrayLike, n_bins: int) -> BinSums:
    return bin_sums(TopLabel(*check_panel(name, confidences, correct)), n_bins)


def _draw_panel(upper: Axes, lower: Axes, sums: BinSums, n_rows: int | None) -> None:
    total = float(sums.counts.sum())
    edges = uniform_edges(len(sums.counts))
    accuracy, confidence = sums.correct.sum() / total, sums.confidence.sum() / total
    _draw_accuracy(upper, sums, edges)
    _draw_counts(lower, sums, edges)
    top = 1 - _COUNTS_BAND
    lower.axvline(accuracy, 0, top, color="black", linewidth=1.4, clip_on=False)
    lower.axvline(confidence, 0, top, color=VERMILION, linestyle="--", linewidth=1.4, clip_on=False)
    ece = binned_error(sums, total)
    summary = f"ECE {ece:.3f}   accuracy {accuracy:.3f}   N {n_rows or round(total):,}"
    upper.set_title(summary, fontsize=7, loc="left", pad=4)


def _draw_accuracy(axes: Axes, bins: BinSums, edges: FloatArray) -> None:
    """Bars up to the accuracy; the hatched part lies between accuracy and mean confidence."""
    shown = bins.counts > 0
    left, width = edges[:-1][shown], np.diff(edges)[shown]
    confidence, accuracy = (each[shown] for each in bins.means())
    common = np.minimum(accuracy, confidence)

    def draw(height: FloatArray, bottom: FloatArray | float, label: str, **look: Any) -> None:
        axes.bar(left, height, width, bottom, align="edge", linewidth=0.4, label=label, **look)

    draw(common, 0, "accuracy of the bin", color=BLUE, edgecolor="white")
    over = {"color": PEACH, "edgecolor": VERMILION, "hatch": "////"}
    draw(confidence - common, common, "gap: over-confident", **over)
    under = {"color": SKY, "edgecolor": BLUE, "hatch": "\\\\\\\\"}
    draw(accuracy - common, common, "gap: under-confident", **under)
    axes.hlines(accuracy, left, left + width, color="black", linewidth=1.2, clip_on=False)
    draw_diagonal(axes)


def _draw_counts(axes: Axes, bins: BinSums, edges: FloatArray) -> None:
    share = bins.counts / bins.counts.sum()
    axes.bar(
        edges[:-1], share, np.diff(edges), align="edge", color="#BDBDBD", edgecolor="white", linewidth=0.4
    )
    axes.set_ylim(0, share.max() / (1 - _COUNTS_BAND) * 1.04)
    size = min(6.0, 100 / len(share))
    if size < 3.5:  # would be too small to read
        return
    for centre, count in zip((edges[:-1] + edges[1:]) / 2, bins.counts, strict=True):
        if count:
            text = axes.text(centre, 0.96, _short(count), fontsize=size, rotation=90, ha="center", va="top")
            text.set_transform(axes.get_xaxis_transform())


def _short(count: float) -> str:
    """A count in at most four or five characters."""
    if count < 10_000:
        return f"{count:.0f}"
    return f"{count / 1e3:.0f}k" if count < 999_500 else f"{count / 1e6:.1f}M"


def _label_panel(upper: Axes, lower: Axes, *, first: bool, last_row: bool) -> None:
    unit_ticks(upper)
    plain_axes(upper, lower)
    top_share = lower.get_ylim()[1] * (1 - _COUNTS_BAND) / 1.04
    lower.set_yticks([0, top_share], ["0", f"{top_share:.0%}"])
    if first:
        upper.set_ylabel("accuracy", fontsize=8)
        lower.set_ylabel("share", fontsize=8)
    if last_row:
        lower.set_xlabel("confidence", fontsize=8)


def _write_row(axes: Axes, name: str) -> None:
    axes.annotate(
        "\n".join(name_lines(name, 26)),
        xy=(0, 0.3),
        xycoords="axes fraction",
        xytext=(-44, 0),
        textcoords="offset points",
        rotation=90,
        ha="center",
        va="center",
        fontsize=9,
        fontweight="bold",
        parse_math=False,
    )
