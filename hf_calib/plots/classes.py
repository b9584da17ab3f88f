"""Reliability of single classes, and of single labels where a row has several: small multiples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtri

from hf_calib.metrics.checks import FloatArray, check_n_bins, check_probs_and_labels
from hf_calib.metrics.multi_label import check_decisions, label_bins
from hf_calib.metrics.sums import BinSums, TopLabel, bin_sums, class_gaps
from hf_calib.plots import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 4
_OF_LABELS = ("label", "labels", "true")


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
    names = style.check_class_names(class_names, checked.shape[1])
    n_bins = check_n_bins(n_bins)
    tops = [TopLabel(*np.array([checked[:, c], targets == c], np.float64)) for c in range(len(names))]
    sums = BinSums(*map(np.stack, zip(*(bin_sums(top, n_bins) for top in tops), strict=True)))
    return classes_of_sums(sums, names, max_classes=max_classes, title=title)


def classes_of_sums(
    sums: BinSums,
    names: Sequence[str],
    *,
    max_classes: int = 12,
    title: str | None = None,
    words: tuple[str, str, str] = ("class", "classes", "examples"),
) -> Figure:
    """The same from the sums (C, M) of the bins of each class."""
    shown = np.argsort(-class_gaps(sums), kind="stable")[:max_classes]
    worst = f"{len(shown)} of {len(names)} {words[1]}: those with the largest error"
    panels = [BinSums(*(total[c] for total in sums)) for c in shown]
    titles = title, worst if len(shown) < len(names) else None
    return _draw_panels([names[c] for c in shown], panels, words, *titles)


def label_reliability_grid(
    probs: ArrayLike,
    labels: ArrayLike,
    *,
    class_names: Sequence[str] | None = None,
    n_bins: int = 10,
    max_labels: int = 12,
    title: str | None = None,
) -> Figure:
    """Draw, for each of several labels a row, how often it applies against the probability that it was given.

    The panels are those of `class_reliability_grid`, whose rows have one class each; here the probabilities of a row
    need not sum to 1. The number is the label's calibration error, and the labels with the largest come first.

    Args:
        probs: (N, C) float in [0, 1].
        labels: (N, C) of 0 and 1, and -100 where a label is not known.
        class_names: C names; default "0", "1", ...
        n_bins: M, the number of equal-width bins (lower, upper].
        max_labels: panels at most.

    >>> probs = [[0.9, 0.7], [0.8, 0.2], [0.3, 0.1]]
    >>> figure = label_reliability_grid(probs, [[1, 1], [1, 0], [0, 0]], class_names=["Mass", "Nodule"])
    >>> [axes.texts[0].get_text() for axes in figure.axes]
    ['Nodule', 'Mass']
    """
    decisions = check_decisions(probs, labels)
    names = style.check_class_names(class_names, decisions.probs.shape[1])
    sums = label_bins(decisions, check_n_bins(n_bins))
    return classes_of_sums(sums, names, max_classes=max_labels, title=title, words=_OF_LABELS)


def all_labels_reliability(sums: Mapping[str, BinSums]) -> Figure:
    """The same for the decisions on all labels together, one panel for each name, such as before and after.

    Args:
        sums: of each label's bins (C, M).
    """
    totals = [BinSums(*(each.sum(axis=0) for each in by_label)) for by_label in sums.values()]
    return _draw_panels(list(sums), totals, _OF_LABELS)


def _draw_panels(
    names: Sequence[str], panels: Sequence[BinSums], words: tuple[str, str, str], *titles: str | None
) -> Figure:
    """A grid of small reliability diagrams, each with its name, its error and how often it is true."""
    n_columns = min(_COLUMNS, len(panels))
    n_rows = math.ceil(len(panels) / n_columns)
    with style.drawing(max(3.4, 0.5 + 1.6 * n_columns), 0.75 + 1.75 * n_rows, *titles) as figure:
        grid = figure.subplots(n_rows, n_columns, sharex=True, sharey=True, squeeze=False)
        for axes, name, sums in zip(grid.flat, names, panels, strict=False):
            _draw_bins(axes, sums)
            error = np.nan_to_num(class_gaps(sums))
            style.write_above(axes, style.shortened(name, 20), 12, fontsize=7, fontweight="bold")
            style.write_above(
                axes, f"error {error:.3f}, {sums.correct.sum():,.0f} {words[2]}", 4.5, fontsize=6
            )
        for axes in grid.flat[len(panels) :]:
            axes.remove()
        figure.supxlabel(f"probability of the {words[0]}")
        figure.supylabel("how often it is true")
    return figure


def _draw_bins(axes: Axes, sums: BinSums) -> None:
    shown = sums.counts > 0
    counts, stated, frequency = (each[shown] for each in (sums.counts, *sums.means()))
    style.draw_diagonal(axes)
    axes.vlines(stated, *_wilson(frequency, counts), color=style.SKY, linewidth=2.2)
    # Sizes follow the logarithm: in most classes nearly all examples lie in the first bin.
    sizes = 5 + 22 * np.log1p(counts) / np.log1p(counts.sum())
    axes.scatter(stated, frequency, s=sizes, color=style.BLUE, linewidth=0, zorder=3, clip_on=False)
    style.unit_ticks(axes)
    style.plain_axes(axes)


def _wilson(frequency: FloatArray, counts: FloatArray) -> FloatArray:
    """The 95% interval (2, M) of a frequency; unlike the normal one it has a width at 0 and at 1."""
    z = float(ndtri(0.975))
    middle = (frequency + z**2 / (2 * counts)) / (1 + z**2 / counts)
    reach = z / (1 + z**2 / counts) * np.sqrt(frequency * (1 - frequency) / counts + (z / (2 * counts)) ** 2)
    return np.stack([middle - reach, middle + reach])
