"""Binned figures: reliability of predictions, classes and labels,
and histograms of correct and wrong predictions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtri

from hf_calib._errors import check
from hf_calib.metrics.checks import (
    FloatArray,
    check_integer,
    check_n_bins,
    check_probs_and_labels,
)
from hf_calib.metrics.sums import (
    BinSums,
    TopLabel,
    bin_sums,
    binned_error,
    class_gaps,
    uniform_bins,
    uniform_edges,
    wilson_interval,
)
from hf_calib.plots import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FEW_ROWS = 10
# The opacity of a bin with fewer rows.
_FADED = 0.3
# The part of a histogram's height for its numbers.
_COUNTS_BAND = 0.42
# In points; with more bins than this allows, the numbers are left out.
_SMALLEST_LETTERS = 3.5
_RIGHT: dict[str, Any] = {"color": style.BLUE, "edgecolor": "white"}
_WRONG: dict[str, Any] = {
    "color": style.PEACH,
    "edgecolor": style.VERMILION,
    "hatch": "////",
}
# The accuracy is filled and the gap an outline, so that both stay visible where they overlap.
_ACCURACY: dict[str, Any] = {"color": style.MIDDLE, "edgecolor": "white"}
_GAP: dict[str, Any] = {"fill": False, "edgecolor": style.VERMILION, "linewidth": 1.2}
# The part of a bin's width on each side of its outline.
_MARGIN = 0.08


def reliability_diagram(
    panels: Mapping[str, tuple[ArrayLike, ArrayLike]],
    *,
    n_bins: int = 15,
    title: str | None = None,
) -> Figure:
    """Draw accuracy against confidence, with one panel for each name.

    Use it for one model, or to compare a few, for example before and after a temperature. For
    several models, each before and after, use `reliability_grid`.

    In each panel a bar is the accuracy of a confidence bin, and the outline reaches from there to
    the bin's mean confidence: an empty outline above the bar is over-confidence, one within the bar
    under-confidence. Bins of fewer than 10 examples are faded, because their accuracies are mostly
    chance. Below is the fraction of examples in each bin, with their number, and two lines at the
    mean confidence and the overall accuracy. If the mean confidence is to the right, the model is
    over-confident on the whole.

    Args:
        panels: name -> (confidences, correct), each (N,): confidences in [0, 1], and correct 1 or
            0.
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
    """Draw reliability diagrams in rows and columns, for example before and after a temperature x
    losses.

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
    sums = {}
    for row, panels in (rows or {"": {}}).items():
        tops = style.check_panels(panels)
        sums[row] = {name: bin_sums(top, n_bins) for name, top in tops.items()}
    return reliability_of_sums(sums, title=title)


def reliability_of_sums(
    rows: Mapping[str, Mapping[str, BinSums]],
    *,
    n_rows: Mapping[str, int] | None = None,
    title: str | None = None,
) -> Figure:
    """Draw `reliability_grid` from the sums (M,) of the equal-width bins.

    Args:
        rows: row name -> column name -> sums.
        n_rows: column name -> number of rows, if the counts of the bins are sums of weights.
    """
    columns = list(next(iter(rows.values())))
    for row, panels in rows.items():
        check(
            set(panels) == set(columns),
            "every row to have the same columns",
            f"{sorted(panels)} in {row!r} and {sorted(columns)} above",
            "draw one diagram per row",
        )
    labels = ("accuracy", "share")
    with style.paired_panels(list(rows), columns, labels, title) as (figure, axes):
        for (row, column), (upper, lower) in axes.items():
            sums = rows[row][column]
            n = _n_rows(sums, column, n_rows)
            _draw_accuracy(upper, sums, n)
            _draw_counts(lower, sums)
            upper.set_title(_summary(sums, n), fontsize=7, loc="left", pad=4)
            if column == columns[0]:
                _name_row(upper, row)
        # As many entries as fit next to each other below this many panels.
        n_in_a_row = min(1 + len(columns), 5)
        style.add_legend(figure, *figure.axes, columns=n_in_a_row)
    return figure


def _n_rows(sums: BinSums, column: str, n_rows: Mapping[str, int] | None) -> int:
    """The number of rows of a column, which the counts of its bins add up to unless they are sums
    of weights.
    """
    if n_rows is None:
        return round(sums.counts.sum())
    return n_rows[column]


def _summary(sums: BinSums, n_rows: int) -> str:
    total = sums.counts.sum()
    error = binned_error(sums, total)
    accuracy = sums.correct.sum() / total
    return f"ECE {error:.3f}   accuracy {accuracy:.3f}   N {n_rows:,}"


def _name_row(axes: Axes, row: str) -> None:
    """Write the name of a row of panels to the left of its first one."""
    axes.text(
        -0.3,
        # This part of the upper panel's height is the middle of both panels, 2.6 to 1.
        0.3,
        "\n".join(style.name_lines(row, 26)),
        transform=axes.transAxes,
        rotation=90,
        ha="center",
        va="center",
        fontsize=9,
        fontweight="bold",
    )


def _draw_accuracy(axes: Axes, sums: BinSums, n_rows: int) -> None:
    """Draw bars up to the accuracy, with outlines from there to the mean confidence."""
    shown = sums.counts > 0
    edges = uniform_edges(len(shown))
    left = edges[:-1][shown]
    width = np.diff(edges)[shown]
    confidence, accuracy = (each[shown] for each in sums.means())
    margin = _MARGIN * width
    # Of a few rows, the accuracy is mostly chance. Counts may be sums of weights.
    is_few = n_rows * sums.counts[shown] / sums.counts.sum() < _FEW_ROWS
    for some, opacity in ((~is_few, 1.0), (is_few, _FADED)):
        if not some.any():
            continue
        of_few = opacity == _FADED
        axes.bar(
            left[some],
            accuracy[some],
            width[some],
            align="edge",
            linewidth=0.4,
            alpha=opacity,
            label="fewer than 10 rows" if of_few else "accuracy of the bin",
            **_ACCURACY,
        )
        axes.bar(
            (left + margin)[some],
            (confidence - accuracy)[some],
            (width - 2 * margin)[some],
            bottom=accuracy[some],
            align="edge",
            alpha=opacity,
            label=None if of_few else "gap to the mean confidence",
            **_GAP,
        )


def _draw_counts(axes: Axes, sums: BinSums) -> None:
    """Draw the fractions of the bins, with their numbers if there is space."""
    edges = uniform_edges(len(sums.counts))
    total = sums.counts.sum()
    share = sums.counts / total
    most = share.max()
    look: dict[str, Any] = {"color": style.LIGHT, "edgecolor": "white"}
    look["label"] = "share of the rows"
    axes.bar(edges[:-1], share, np.diff(edges), align="edge", linewidth=0.4, **look)
    # The highest bar ends below the numbers.
    axes.set_ylim(0, most / (1 - _COUNTS_BAND) * 1.04)
    axes.set_yticks([0, most], ["0", f"{most:.0%}"])
    accuracy = sums.correct.sum() / total
    style.draw_means(axes, accuracy, sums.confidence.sum() / total, 1 - _COUNTS_BAND)
    # A number that is turned by 90 degrees should not be wider than its bin.
    size = min(6.0, 100 / len(share))
    if size < _SMALLEST_LETTERS:
        return
    for bin_number in np.flatnonzero(sums.counts):
        axes.text(
            edges[bin_number : bin_number + 2].mean(),
            0.96,
            _short(sums.counts[bin_number]),
            transform=axes.get_xaxis_transform(),
            fontsize=size,
            rotation=90,
            ha="center",
            va="top",
        )


def _short(count: float) -> str:
    """A count in at most five characters."""
    if count < 10_000:
        return f"{count:.0f}"
    # From here on, the thousands are rounded to 1000k.
    if count < 999_500:
        return f"{count / 1e3:.0f}k"
    return f"{count / 1e6:.1f}M"


def confidence_histogram(
    panels: Mapping[str, tuple[ArrayLike, ArrayLike]],
    *,
    n_bins: int = 20,
    title: str | None = None,
) -> Figure:
    """Draw the distribution of the confidences of correct predictions (up) and of wrong predictions
    (down).

    It shows whether confidence separates correct from wrong predictions, which a reliability
    diagram does not show: if it does, the two halves have different shapes. Each half has fractions
    of its own examples.

    Args:
        panels: name -> (confidences, correct), each (N,), as in `reliability_diagram`.
        n_bins: M, the number of equal-width bins (lower, upper].

    >>> figure = confidence_histogram({"model": ([0.9, 0.8, 0.7], [1, 0, 1])})
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['right: 2', 'wrong: 1', 'model']
    """
    from matplotlib.ticker import MaxNLocator

    checked = style.check_panels(panels)
    n_bins = check_n_bins(n_bins)
    with style.drawing(0.9 + 2.5 * len(checked), 2.9, title) as figure:
        shape: dict[str, Any] = {"sharex": True, "sharey": True, "squeeze": False}
        grid = figure.subplots(1, len(checked), **shape)[0]
        for axes, (name, top) in zip(grid, checked.items(), strict=True):
            is_right = top.correct == 1
            upwards = _shares(top.confidence[is_right], n_bins)
            downwards = -_shares(top.confidence[~is_right], n_bins)
            _draw_half(axes, upwards, _RIGHT)
            _draw_half(axes, downwards, _WRONG)
            right = f"right: {is_right.sum():,}"
            wrong = f"wrong: {(~is_right).sum():,}"
            look = {"transform": axes.transAxes, "fontsize": 7.5}
            axes.text(0.03, 0.96, right, va="top", color=style.BLUE, **look)
            axes.text(0.03, 0.04, wrong, va="bottom", color=style.VERMILION, **look)
            axes.axhline(0, color="black", linewidth=0.8)
            axes.set(xlim=(0, 1), xlabel="confidence")
            style.unit_ticks(axes, "x")
            style.write_above(axes, name, 5, fontsize=9, fontweight="bold")
        style.plain_axes(*grid)
        # The height is the same up and down and in every panel, with space for the words.
        height = max(np.abs(axes.get_ylim()).max() for axes in grid) * 1.15
        grid[0].set_ylim(-height, height)
        grid[0].yaxis.set_major_locator(MaxNLocator(5))
        grid[0].yaxis.set_major_formatter(lambda share, _: f"{abs(100 * share):.3g}%")
        grid[0].set_ylabel("share of wrong | of right")
    return figure


def _shares(confidences: FloatArray, n_bins: int) -> FloatArray:
    """The fractions (M,) of confidences (n,) in the bins."""
    counts = np.bincount(uniform_bins(confidences, n_bins), minlength=n_bins)
    return counts / max(len(confidences), 1)


def _draw_half(axes: Axes, heights: FloatArray, look: Mapping[str, Any]) -> None:
    edges = uniform_edges(len(heights))
    widths = np.diff(edges)
    axes.bar(edges[:-1], heights, widths, align="edge", linewidth=0.4, **look)


_COLUMNS = 4
OF_LABELS = ("label", "labels", "true")


def class_reliability_grid(
    probs: ArrayLike,
    labels: ArrayLike,
    *,
    class_names: Sequence[str] | None = None,
    n_bins: int = 10,
    max_classes: int = 12,
    title: str | None = None,
) -> Figure:
    r"""Draw the frequency of each class against its predicted probability.

    It shows errors of single classes, which cancel in a `reliability_diagram` of the predicted
    class. A point is a bin of the class's probabilities over all N examples; its area grows with
    the number of examples, and its bar is a 95% Wilson interval. The number is the class's term of
    the classwise calibration error. If there are more than `max_classes` classes, those with the
    largest error are drawn, and the figure says so.

    Args:
        probs: (N, C) float, rows that sum to 1.
        labels: (N,) int in [0, C).
        class_names: C names; default "0", "1", ...
        n_bins: M, the number of equal-width bins (lower, upper].
        max_classes: the largest number of panels.

    References:
        Kull et al. 2019 (classwise calibration); Wilson 1927.

    >>> probs = [[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]]
    >>> figure = class_reliability_grid(probs, [0, 1, 1], class_names=["cat", "dog"])
    >>> [axes.texts[0].get_text() for axes in figure.axes]
    ['cat', 'dog']
    """
    checked, targets = check_probs_and_labels(probs, labels)
    names = style.check_class_names(class_names, checked.shape[1])
    n_bins = check_n_bins(n_bins)
    check_integer("max_classes", max_classes, 1, "12 is the default")
    of_classes = []
    for c in range(len(names)):
        is_true = (targets == c).astype(np.float64)
        probabilities = checked[:, c].astype(np.float64)
        of_classes.append(bin_sums(TopLabel(probabilities, is_true), n_bins))
    # The axes are the sums, the classes and the bins.
    sums = BinSums(*np.stack(of_classes, axis=1))
    return classes_of_sums(sums, names, max_classes=max_classes, title=title)


def classes_of_sums(
    sums: BinSums,
    names: Sequence[str],
    *,
    max_classes: int = 12,
    title: str | None = None,
    words: tuple[str, str, str] = ("class", "classes", "examples"),
) -> Figure:
    """Draw `class_reliability_grid` from the sums (C, M) of the bins of each class."""
    # A stable order shows the same classes everywhere if several have one error.
    shown = np.argsort(-class_gaps(sums), kind="stable")[:max_classes]
    panels = {names[c]: BinSums(*(each[c] for each in sums)) for c in shown}
    worst = None
    if len(shown) < len(names):
        worst = f"{len(shown)} of {len(names)} {words[1]}: those with the largest error"
    return _draw_panels(panels, words, title, worst)


def all_labels_reliability(sums: Mapping[str, BinSums]) -> Figure:
    """Draw the reliability of the decisions on all labels together, with one panel for each name.

    Args:
        sums: name -> sums (C, M) of each label's bins.
    """
    totals = {
        name: BinSums(*(each.sum(axis=0) for each in by_label))
        for name, by_label in sums.items()
    }
    return _draw_panels(totals, OF_LABELS)


def _draw_panels(
    panels: Mapping[str, BinSums], words: tuple[str, str, str], *titles: str | None
) -> Figure:
    """Draw a grid of small reliability diagrams, each with its name, its error and its frequency."""
    n_columns = min(_COLUMNS, len(panels))
    n_rows = math.ceil(len(panels) / n_columns)
    width = max(3.4, 0.5 + 1.6 * n_columns)
    shape: dict[str, Any] = {"sharex": True, "sharey": True, "squeeze": False}
    with style.drawing(width, 0.75 + 1.75 * n_rows, *titles) as figure:
        grid = figure.subplots(n_rows, n_columns, **shape)
        # The last row of the grid may have more cells than there are panels.
        for axes, (name, sums) in zip(grid.flat, panels.items(), strict=False):
            _draw_bins(axes, sums)
            # A label that is known in no row has no error.
            error = np.nan_to_num(class_gaps(sums))
            below = f"error {error:.3f}, {sums.correct.sum():,.0f} {words[2]}"
            short = style.shortened(name, 20)
            style.write_above(axes, short, 12, fontsize=7, fontweight="bold")
            style.write_above(axes, below, 4.5, fontsize=6)
        for axes in grid.flat[len(panels) :]:
            axes.remove()
        figure.supxlabel(f"probability of the {words[0]}")
        figure.supylabel("how often it is true")
    return figure


def _draw_bins(axes: Axes, sums: BinSums) -> None:
    shown = sums.counts > 0
    counts = sums.counts[shown]
    stated, frequency = (each[shown] for each in sums.means())
    style.draw_diagonal(axes)
    ends = wilson_interval(frequency, counts, float(ndtri(0.975)))
    axes.vlines(stated, *ends, color=style.SKY, linewidth=2.2)
    # Sizes are logarithmic, because the first bin has nearly all examples of most classes.
    sizes = 5 + 22 * np.log1p(counts) / np.log1p(counts.sum())
    look: dict[str, Any] = {"color": style.BLUE, "linewidth": 0, "clip_on": False}
    axes.scatter(stated, frequency, s=sizes, zorder=3, **look)
    style.unit_ticks(axes)
    style.plain_axes(axes)
