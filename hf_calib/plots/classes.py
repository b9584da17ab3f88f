"""Reliability of single classes: small multiples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtri

from hf_calib.metrics.checks import FloatArray, check_n_bins, check_probs_and_labels
from hf_calib.metrics.sums import BinSums, TopLabel, bin_sums, class_gaps
from hf_calib.plots._common import (
    BLUE,
    SKY,
    add_title,
    check_class_names,
    draw_diagonal,
    new_figure,
    plain_axes,
    shortened,
    unit_ticks,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
_COLUMNS = 4
_PANEL_INCHES = (1.6, 1.75)


def class_reliability_grid(
    probs: ArrayLike,
    labels: ArrayLike,
    *,
    class_names: Sequence[str] | None = None,
    n_bins: int = 10,
    max_classes: int = 12,
    title: str | None = None,
) -> Figure:
    r"""Draw, for each class, how often it is true against the probability that it was given.

    For finding the classes that a `reliability_diagram`, which looks at predictions only, averages away. A
    point is a bin of the class's probabilities over all N examples, its area grows with their number, and its
    bar is a 95% Wilson interval. The number is the class's term of the classwise calibration error. Of more
    than `max_classes` classes, those with the largest such error are drawn, and the figure says so.

    Args:
        probs: (N, C) float, rows that sum to 1.
        labels: (N,) int in [0, C).
        class_names: C names; default "0", "1", ...
        n_bins: M, the number of equal-width bins (lower, upper].
        max_classes: panels at most.

    References:
        Kull et al. 2019 (classwise calibration); Wilson 1927.

    >>> probs = [[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]]
    >>> figure = class_reliability_grid(probs, [0, 1, 1], class_names=["cat", "dog"])
    >>> [axes.texts[0].get_text() for axes in figure.axes]
    ['cat', 'dog']
    """
    checked, targets = check_probs_and_labels(probs, labels)
    n_classes = checked.shape[1]
    names = check_class_names(class_names, n_classes)
    n_bins = check_n_bins(n_bins)
    by_class = [
        TopLabel(checked[:, c].astype(np.float64), (targets == c).astype(np.float64))
        for c in range(n_classes)
    ]
    sums = BinSums(*map(np.stack, zip(*(bin_sums(top, n_bins) for top in by_class), strict=True)))
    return classes_of_sums(sums, names, max_classes=max_classes, title=title)


def classes_of_sums(
    sums: BinSums, names: Sequence[str], *, max_classes: int = 12, title: str | None = None
) -> Figure:
    """The same from the sums (C, M) of the bins of each class."""
    errors = class_gaps(sums)
    shown = np.argsort(-errors, kind="stable")[:max_classes]
    figure = draw_panels(
        [
            (
                names[c],
                f"error {errors[c]:.3f}, {sums.correct[c].sum():.0f} examples",
                BinSums(*(total[c] for total in sums)),
            )
            for c in shown
        ]
    )
    few = f"{len(shown)} of {len(names)} classes: those with the largest error"
    add_title(figure, title, few if len(shown) < len(names) else None)
    return figure


def draw_panels(panels: Sequence[tuple[str, str, BinSums]], *, of: str = "class") -> Figure:
    """A grid of small reliability diagrams, each with its name, its numbers and its bins."""
    columns = min(_COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = new_figure(max(3.4, 0.5 + _PANEL_INCHES[0] * columns), 0.75 + _PANEL_INCHES[1] * rows)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes, (name, numbers, bins) in zip(grid.flat, panels, strict=False):
        _draw_class(axes, bins)
        _write_class(axes, name, numbers)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    figure.supxlabel(f"probability of the {of}", fontsize=8)
    figure.supylabel("how often it is true", fontsize=8)
    return figure


def _draw_class(axes: Axes, bins: BinSums) -> None:
    shown = bins.counts > 0
    counts, stated, frequency = (each[shown] for each in (bins.counts, *bins.means()))
    draw_diagonal(axes)
    low, high = _wilson(frequency, counts)
    axes.vlines(stated, low, high, color=SKY, linewidth=2.2)
    # Sizes follow the logarithm: in most classes nearly all examples lie in the first bin.
    sizes = 5 + 22 * np.log1p(counts) / np.log1p(counts.sum())
    axes.scatter(stated, frequency, s=sizes, color=BLUE, linewidth=0, zorder=3, clip_on=False)
    unit_ticks(axes)
    plain_axes(axes)


def _wilson(frequency: FloatArray, counts: FloatArray) -> FloatArray:
    """The 95% interval (2, M) of a frequency; unlike the normal one it has a width at 0 and at 1."""
    z = float(ndtri(0.975))
    middle = (frequency + z**2 / (2 * counts)) / (1 + z**2 / counts)
    reach = z / (1 + z**2 / counts) * np.sqrt(frequency * (1 - frequency) / counts + (z / (2 * counts)) ** 2)
    return np.stack([middle - reach, middle + reach])


def _write_class(axes: Axes, name: str, numbers: str) -> None:
    """The name, cut to the panel's width, and below it the numbers."""
    for text, points, look in ((shortened(name, 20), 12, "bold"), (numbers, 4.5, "normal")):
        axes.annotate(
            text,
            xy=(0, 1),
            xycoords="axes fraction",
            xytext=(0, points),
            textcoords="offset points",
            fontsize=7 if look == "bold" else 6,
            fontweight=look,
            parse_math=False,
        )
