"""Figures in bins of confidence: reliability diagrams, and histograms of what is right and wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from hf_calib._errors import check
from hf_calib.metrics.checks import FloatArray, check_n_bins
from hf_calib.metrics.sums import BinSums, TopLabel, bin_sums, binned_error, uniform_bins, uniform_edges
from hf_calib.plots import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COUNTS_BAND = 0.42  # the part of a histogram's height that belongs to its numbers
_RIGHT: dict[str, Any] = {"color": style.BLUE, "edgecolor": "white"}
_OVER: dict[str, Any] = {"color": style.PEACH, "edgecolor": style.VERMILION, "hatch": "////"}
_UNDER: dict[str, Any] = {"color": style.SKY, "edgecolor": style.BLUE, "hatch": "\\\\\\\\"}


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
    tops = {row: style.check_panels(panels) for row, panels in (rows or {"": {}}).items()}
    sums = {
        row: {name: bin_sums(top, n_bins) for name, top in panels.items()} for row, panels in tops.items()
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
    columns = list(next(iter(rows.values())))
    for row, panels in rows.items():
        got = f"{sorted(panels)} in {row!r} and {sorted(columns)} above"
        same = set(panels) == set(columns)
        check(same, "every row to have the same columns", got, "draw one diagram per row")
    with style.paired_panels(list(rows), columns, ("accuracy", "share"), title) as (figure, axes):
        for (row, column), (upper, lower) in axes.items():
            sums = rows[row][column]
            total = sums.counts.sum()
            accuracy = sums.correct.sum() / total
            _draw_accuracy(upper, sums)
            _draw_counts(lower, sums)
            style.draw_means(lower, accuracy, sums.confidence.sum() / total, 1 - _COUNTS_BAND)
            n = (n_rows or {}).get(column, round(total))
            summary = f"ECE {binned_error(sums, total):.3f}   accuracy {accuracy:.3f}   N {n:,}"
            upper.set_title(summary, fontsize=7, loc="left", pad=4)
            if column == columns[0]:
                look: Any = {
                    "rotation": 90,
                    "ha": "center",
                    "va": "center",
                    "fontsize": 9,
                    "fontweight": "bold",
                }
                name = "\n".join(style.name_lines(row, 26))
                upper.text(-0.3, 0.3, name, transform=upper.transAxes, **look)
        style.add_legend(figure, figure.axes[0], style.MEANS, columns={1: 2, 2: 3}.get(len(columns), 6))
    return figure


def _draw_accuracy(axes: Axes, sums: BinSums) -> None:
    """Bars up to the accuracy; the hatched part lies between accuracy and mean confidence."""
    shown = sums.counts > 0
    edges = uniform_edges(len(shown))
    left, width = edges[:-1][shown], np.diff(edges)[shown]
    confidence, accuracy = (each[shown] for each in sums.means())
    common = np.minimum(accuracy, confidence)

    def draw(height: FloatArray, bottom: FloatArray | float, label: str, look: dict[str, Any]) -> None:
        axes.bar(left, height, width, bottom, align="edge", linewidth=0.4, label=label, **look)

    draw(common, 0, "accuracy of the bin", _RIGHT)
    draw(confidence - common, common, "gap: over-confident", _OVER)
    draw(accuracy - common, common, "gap: under-confident", _UNDER)
    axes.hlines(accuracy, left, left + width, color="black", linewidth=1.2, clip_on=False)


def _draw_counts(axes: Axes, sums: BinSums) -> None:
    """The share of the bins, their numbers above it where these can be read."""
    edges = uniform_edges(len(sums.counts))
    share = sums.counts / sums.counts.sum()
    look: Any = {"color": "#BDBDBD", "edgecolor": "white", "linewidth": 0.4}
    axes.bar(edges[:-1], share, np.diff(edges), align="edge", **look)
    axes.set_ylim(0, share.max() / (1 - _COUNTS_BAND) * 1.04)
    axes.set_yticks([0, share.max()], ["0", f"{share.max():.0%}"])
    size = min(6.0, 100 / len(share))
    place: Any = {"transform": axes.get_xaxis_transform(), "rotation": 90, "ha": "center", "va": "top"}
    for centre, count in zip((edges[:-1] + edges[1:]) / 2, sums.counts, strict=True):
        if count and size >= 3.5:
            axes.text(centre, 0.96, _short(count), fontsize=size, **place)


def _short(count: float) -> str:
    """A count in at most four or five characters."""
    if count < 10_000:
        return f"{count:.0f}"
    return f"{count / 1e3:.0f}k" if count < 999_500 else f"{count / 1e6:.1f}M"


def confidence_histogram(
    panels: Mapping[str, tuple[ArrayLike, ArrayLike]], *, n_bins: int = 20, title: str | None = None
) -> Figure:
    """Draw how confidences are spread where the prediction is right (up) and where it is wrong (down).

    For seeing whether confidence separates right from wrong, which a reliability diagram does not show: the two
    halves of a useful model have different shapes. Each half is in shares of its own examples.

    Args:
        panels: name -> (confidences, correct), each (N,), as for `reliability_diagram`.
        n_bins: M, the number of equal-width bins (lower, upper].

    >>> figure = confidence_histogram({"model": ([0.9, 0.8, 0.7], [1, 0, 1])})
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['right: 2', 'wrong: 1', 'model']
    """
    checked = style.check_panels(panels)
    n_bins = check_n_bins(n_bins)
    with style.drawing(0.9 + 2.5 * len(checked), 2.9, title) as figure:
        grid = figure.subplots(1, len(checked), sharex=True, sharey=True, squeeze=False)[0]
        for axes, (name, top) in zip(grid, checked.items(), strict=True):
            _draw_half(axes, top, "right", 1, n_bins)
            _draw_half(axes, top, "wrong", 0, n_bins)
            axes.axhline(0, color="black", linewidth=0.8)
            axes.set(xlim=(0, 1), xlabel="confidence")
            style.unit_ticks(axes, "x")
            style.write_above(axes, name, 5, fontsize=9, fontweight="bold")
        style.plain_axes(*grid)
        # The same height up and down and in every panel, with room for the words.
        height = max(np.abs(axes.get_ylim()).max() for axes in grid) * 1.15
        step = 10.0 ** np.floor(np.log10(height))
        step *= 0.5 if height / step < 2.5 else 1 if height / step < 5 else 2
        ticks = np.arange(-np.floor(height / step), np.floor(height / step) + 1) * step
        grid[0].set_ylim(-height, height)
        grid[0].set_yticks(ticks, [f"{abs(tick):.{0 if step >= 0.01 else 1}%}" for tick in ticks])
        grid[0].set_ylabel("share of wrong | of right")
    return figure


def _draw_half(axes: Axes, top: TopLabel, word: str, correct: int, n_bins: int) -> None:
    """The shares of the bins among what is right, upwards, or wrong, downwards."""
    edges = uniform_edges(n_bins)
    half = top.confidence[top.correct == correct]
    share = np.bincount(uniform_bins(half, n_bins), minlength=n_bins) / max(len(half), 1)
    height = share if correct else -share
    axes.bar(
        edges[:-1], height, np.diff(edges), align="edge", linewidth=0.4, **(_RIGHT if correct else _OVER)
    )
    y, va, colour = (0.96, "top", style.BLUE) if correct else (0.04, "bottom", style.VERMILION)
    words = f"{word}: {len(half):,}"
    axes.text(0.03, y, words, transform=axes.transAxes, va=va, fontsize=7.5, color=colour)
